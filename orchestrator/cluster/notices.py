"""What a provider says to its own machine before it takes it back. Read over HTTP from the link-local metadata service.

AWS: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html, two minutes ahead.
Google Cloud: https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption, half a minute ahead.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import OpenerDirector, ProxyHandler, Request, build_opener

from orchestrator.core.errors import OrchestratorError, UserError

ENDPOINT_VARIABLE = "ORCHESTRATOR_METADATA_ENDPOINT"
"""Environment variable: another address of the metadata service, such as a proxy of a container; tests use it."""
_TIMEOUT_S = 2.0
_TOKEN_TTL_S = 21_600
_GCP_NOTICE_S = 30.0
_NOT_FOUND = 404
_UNAUTHORIZED = 401


class Provider(StrEnum):
    """Whose machines these are."""

    AWS = "aws"
    GCP = "gcp"


class MetadataError(OrchestratorError):
    """The metadata service does not answer as one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The provider takes the machine back."""

    reason: str
    seconds_left: float
    """Until it is gone, at least 0."""


class NoticeSource(Protocol):
    """Where one provider's machines hear of it."""

    def ask(self, now: float) -> Notice | None:
        """The notice, if there is one; ``now`` in unix seconds.

        Raises:
            MetadataError: nobody knows, ask again.
        """


def source_of(provider: Provider, environment: Mapping[str, str] | None = None) -> NoticeSource:
    """The metadata service of a provider.

    Raises:
        UserError: the environment names another one that is no http address.
    """
    endpoint = (os.environ if environment is None else environment).get(ENDPOINT_VARIABLE, "")
    parts = urlsplit(endpoint)
    if endpoint and (parts.scheme != "http" or not parts.hostname):
        raise UserError(f"{ENDPOINT_VARIABLE} is {endpoint!r}; write http://host:port, or leave it unset")
    if provider is Provider.AWS:
        return AwsNotices(endpoint or "http://169.254.169.254")
    return GcpNotices(endpoint or "http://metadata.google.internal")


@dataclass(slots=True)
class AwsNotices:
    """Version 2 of the instance metadata service, which wants a token; version 1 may be switched off."""

    endpoint: str
    _token: str = field(default="", repr=False)

    def ask(self, now: float) -> Notice | None:
        """See ``NoticeSource``: a spot instance is interrupted."""
        text = self._get("/latest/meta-data/spot/instance-action")
        if text is None:
            return None
        try:
            document = json.loads(text)
            action, at = str(document["action"]), datetime.fromisoformat(str(document["time"]))
        except (ValueError, TypeError, KeyError) as error:
            raise MetadataError(
                f"{self.endpoint} announces an interruption that cannot be read: {text[:200]}"
            ) from error
        at_s = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
        return Notice(reason=f"AWS spot interruption ({action})", seconds_left=max(0.0, at_s - now))

    def _get(self, path: str) -> str | None:
        for _ in range(2):  # a token ends after some hours; the second round has a new one
            self._token = self._token or self._new_token()
            mine = {"X-aws-ec2-metadata-token": self._token}
            status, text = _fetch(Request(self.endpoint + path, headers=mine))  # noqa: S310 - http, checked
            if status != _UNAUTHORIZED:
                return None if status == _NOT_FOUND else text
            self._token = ""
        raise MetadataError(f"{self.endpoint} refuses the token that it gave out itself")

    def _new_token(self) -> str:
        wanted = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_TTL_S)}
        status, token = _fetch(Request(f"{self.endpoint}/latest/api/token", method="PUT", headers=wanted))  # noqa: S310
        if status in {_NOT_FOUND, _UNAUTHORIZED} or not token:
            message = (
                f"{self.endpoint} gives out no token: is this an EC2 instance, and is its metadata hop limit 2 or "
            )
            raise MetadataError(f"{message}more where Ray runs in containers?")
        return token


@dataclass(slots=True)
class GcpNotices:
    """The metadata server of Compute Engine."""

    endpoint: str

    def ask(self, now: float) -> Notice | None:
        """See ``NoticeSource``: the instance is preempted, or its host goes into maintenance and takes it along."""
        if self._get("/computeMetadata/v1/instance/preempted") == "TRUE":
            return Notice(reason="Google Cloud preempts the instance", seconds_left=_GCP_NOTICE_S)
        # Machines with GPUs cannot be moved: they are told an hour ahead, and stopped.
        if self._get("/computeMetadata/v1/instance/maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return Notice(reason="Google Cloud maintains the host and ends the instance", seconds_left=3600.0)
        return None

    def _get(self, path: str) -> str:
        flavor = {"Metadata-Flavor": "Google"}
        status, text = _fetch(Request(self.endpoint + path, headers=flavor))  # noqa: S310 - http, checked
        if status == _NOT_FOUND:
            raise MetadataError(f"{self.endpoint}{path} does not exist: is this a Compute Engine instance?")
        return text.strip()


def _opener() -> OpenerDirector:
    return build_opener(ProxyHandler({}))  # a link-local address; a proxy must never see the token


def _fetch(request: Request, opener: Callable[[], OpenerDirector] = _opener) -> tuple[int, str]:
    """Status and text; 404 and 401 are answers.

    Raises:
        MetadataError: no answer, or another status.
    """
    try:
        with opener().open(request, timeout=_TIMEOUT_S) as response:
            return int(response.status), response.read(65_536).decode("utf-8", "replace")
    except HTTPError as error:
        if error.code in {_NOT_FOUND, _UNAUTHORIZED}:
            return error.code, ""
        raise MetadataError(f"{request.full_url} answers with status {error.code}") from error
    except (URLError, OSError, ValueError) as error:
        raise MetadataError(f"{request.full_url} does not answer: {getattr(error, 'reason', error)}") from error
