"""One boto3 client per process and setting, and operations that are repeated until a deadline."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from random import SystemRandom
from typing import Any, TypeVar

import boto3
import botocore.session
from botocore.config import Config
from botocore.exceptions import NoCredentialsError
from botocore.loaders import Loader, create_loader

from orchestrator.core.errors import (
    OUTAGES,
    CorruptObjectError,
    CredentialsUnavailableError,
    StorageDeniedError,
    StorageError,
)
from orchestrator.storage.s3.responses import (
    DamagedAnswerError,
    Response,
    check_answer,
    check_raw_answer,
    translated_errors,
)
from orchestrator.storage.s3.settings import Addressing, S3Settings

Result = TypeVar("Result")

_MAX_POOL_CONNECTIONS = 32
_FIRST_PAUSE_S = 0.05
_LOG = logging.getLogger(__name__)
_LONGEST_PAUSE_S = 5.0
_RENEW_EVERY_S = 60.0
_RANDOM = SystemRandom()
_GIVEN_UP = "given up after"
_CONDITIONS = frozenset({"IfMatch", "IfNoneMatch"})


class Bucket:
    """Requests to one bucket. Thread-safe, and safe to pickle and to fork: it holds no connection."""

    def __init__(self, name: str, settings: S3Settings) -> None:
        self.name = name
        self.settings = settings

    def once(self, operation: str, key: str = "", **parameters: object) -> Response:
        """One request, named as boto3's method. Of its errors, the ``OUTAGES`` may be retried."""
        return self.read_once(operation, key, lambda response: response, **parameters)

    def read_once(self, operation: str, key: str, read: Callable[[Response], Result], **parameters: object) -> Result:
        """One request and what ``read`` makes of its response; errors while it reads the body are translated too."""
        given: Response = {"Bucket": self.name, **({"Key": key} if key else {}), **parameters}
        place = f"s3://{self.name}/{key or parameters.get('Prefix', '')}"
        is_conditional_write = operation == "put_object" and not _CONDITIONS.isdisjoint(parameters)

        def request() -> Result:
            with translated_errors(f"{operation} {place}", is_conditional_write=is_conditional_write):
                response: Response = getattr(_client(os.getpid(), self.settings, _renewal.number), operation)(**given)
                check_answer(operation, given, response)
                return read(response)

        number = _renewal.number
        try:
            return request()
        except CredentialsUnavailableError:
            raise
        except StorageDeniedError:  # so nothing has been done, whatever the operation is
            if not _renewal.may_repeat(number):
                raise
            return request()

    def repeat(self, operation: str, key: str = "", **parameters: object) -> Response:
        """``once``, repeated until the deadline while it may help; only for requests that may happen twice."""
        return self.retry_until_deadline(lambda: self.once(operation, key, **parameters))

    def retry_until_deadline(self, attempt: Callable[[], Result], progress: Callable[[], int] = lambda: 0) -> Result:
        """Repeat an attempt with growing random pauses while its errors are transient; once if an answer was damaged.

        The deadline counts from the last try that brought ``progress`` further than any before.

        Raises:
            StorageError: the attempt's own error, or its last transient one once the deadline would pass.
        """
        deadline_s = time.monotonic() + self.settings.deadline_s
        furthest = progress()
        was_damaged = False
        for pause_s in _backoff_s():
            try:
                return attempt()
            except DamagedAnswerError as error:
                if was_damaged:  # as an error that nobody repeats, as a transfer of several requests would
                    raise CorruptObjectError(str(error)) from error
                was_damaged = True
                _LOG.warning("%s; it is read again", error)
            except OUTAGES as error:
                if _GIVEN_UP in str(error):  # by a request within this attempt, which had the same deadline
                    raise
                if progress() > furthest:
                    furthest = progress()
                    deadline_s = time.monotonic() + self.settings.deadline_s
                if time.monotonic() + pause_s > deadline_s:
                    message = f"{error} ({_GIVEN_UP} {self.settings.deadline_s:g} s)"
                    raise type(error)(message) from error
            time.sleep(pause_s)
        raise StorageError("unreachable: pauses never end")


class _Renewal:
    """Counts how often this process has made its clients anew: botocore reads credentials in files once, and somebody
    may have renewed them there. Threads that race each other each make a client, and keep one of them.
    """

    def __init__(self) -> None:
        self.number = 0
        self._at_s = -math.inf

    def may_repeat(self, number: int) -> bool:
        """Whether a request that was denied with the client of this number may be repeated with a later one: there is
        one, or none was made within a minute.
        """
        if self.number == number and time.monotonic() - self._at_s >= _RENEW_EVERY_S:
            # In this order: a thread that looks in between finds that there is a later one.
            self.number = number + 1
            self._at_s = time.monotonic()
        return self.number != number


_renewal = _Renewal()


def _backoff_s() -> Iterator[float]:
    """Full jitter: a uniform share of a bound that doubles, so that many clients do not retry at the same time."""
    bound_s = _FIRST_PAUSE_S
    while True:
        yield _RANDOM.uniform(0.0, bound_s)
        bound_s = min(2 * bound_s, _LONGEST_PAUSE_S)


def new_session() -> boto3.session.Session:
    """A session of its own: boto3's default session is shared and not thread-safe while it makes clients.

    All share the descriptions of AWS that botocore has read: each would spend nine tenths of its time on them.
    """
    core = botocore.session.Session()
    loader = _loader(core.get_config_variable("data_path"))
    core.register_component("data_loader", loader)
    session = boto3.session.Session(botocore_session=core)
    # Each session of boto3 appends its own folder, the same for all.
    loader.search_paths[:] = dict.fromkeys(loader.search_paths)
    return session


@cache
def _loader(data_path: str | None) -> Loader:
    return create_loader(data_path)


@lru_cache(maxsize=8)
def _client(_pid: int, settings: S3Settings, _number: int) -> Any:  # noqa: ANN401 - boto3 makes its clients at run time
    """The client of this process. ``_pid`` is part of the key because a forked child must not share sockets, and
    ``_number``, that of ``_Renewal``, because credentials are read when a client is made.

    Its errors are translated where it is asked for, with the name of the object.
    """
    addressing = settings.addressing
    if addressing is Addressing.AUTO and settings.endpoint_url:
        addressing = Addressing.PATH  # other servers rarely have a host name per bucket
    config = Config(
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        max_pool_connections=_MAX_POOL_CONNECTIONS,
        # Trying again is left to retry_until_deadline, which knows the time. Botocore's adaptive mode would also slow
        # down every other request of the process: after one 503 a client with few requests falls to one in two seconds.
        retries={"mode": "standard", "total_max_attempts": 1},
        request_checksum_calculation=settings.checksums.value,
        response_checksum_validation=settings.checksums.value,
        tcp_keepalive=True,
        s3={"addressing_style": addressing.value},
    )
    session = new_session()
    if session.get_credentials() is None:
        # An exception is not remembered: the metadata service, which botocore asks once, may answer the next time.
        raise NoCredentialsError
    client = session.client("s3", endpoint_url=settings.endpoint_url or None, config=config)
    # Under this name it is called before botocore's own handlers, which take any odd answer for an error 500.
    client.meta.events.register_first("before-parse.*.*", check_raw_answer)
    return client
