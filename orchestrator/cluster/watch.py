"""``python -m orchestrator.cluster.watch``: runs on a spot node, and makes it leave when its provider takes it back.

The provider announces it to the machine by the link-local metadata service, over HTTP. AWS, two minutes ahead:
https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html. Google Cloud, half a minute
ahead: https://cloud.google.com/compute/docs/instances/create-use-spot#detect-preemption.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
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
EVERY_S = 5.0
"""Polling interval that AWS recommends; a notice comes two minutes ahead, on Google Cloud half a minute."""
_WARN_AFTER = 3
"""Failed requests in a row before a warning."""
_LOG = logging.getLogger(__name__)


class Provider(StrEnum):
    """The provider of the machine."""

    AWS = "aws"
    GCP = "gcp"


class MetadataError(OrchestratorError):
    """The metadata service gives no valid answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionNotice:
    """A notice that the provider takes the machine back."""

    reason: str
    seconds_left: float
    """Seconds until it is gone, at least 0."""


class NoticeSource(Protocol):
    """Source of notices of one provider."""

    def ask(self, now: float) -> PreemptionNotice | None:
        """The notice, if there is one; ``now`` in unix seconds.

        Raises:
            MetadataError: the service does not answer; ask again.
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

    def ask(self, now: float) -> PreemptionNotice | None:
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
        return PreemptionNotice(reason=f"AWS spot interruption ({action})", seconds_left=max(0.0, at_s - now))

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

    def ask(self, now: float) -> PreemptionNotice | None:
        """See ``NoticeSource``: the instance is preempted, or its host goes into maintenance and takes it along."""
        if self._get("/computeMetadata/v1/instance/preempted") == "TRUE":
            return PreemptionNotice(reason="Google Cloud preempts the instance", seconds_left=_GCP_NOTICE_S)
        # Machines with GPUs cannot be moved: they get a notice an hour ahead, and are stopped.
        if self._get("/computeMetadata/v1/instance/maintenance-event") == "TERMINATE_ON_HOST_MAINTENANCE":
            return PreemptionNotice(reason="Google Cloud maintains the host and ends the instance", seconds_left=3600.0)
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


def wait_for_notice(
    source: NoticeSource,
    *,
    every_s: float = EVERY_S,
    sleep: Callable[[float], None] = time.sleep,
) -> PreemptionNotice:
    """Poll until the first notice; returns it. A metadata service that does not answer is polled for ever."""
    num_missed = 0
    while True:
        try:
            notice = source.ask(time.time())
            num_missed = 0
        except MetadataError as error:
            notice, num_missed = None, num_missed + 1
            if num_missed == _WARN_AFTER:
                _LOG.warning("no notice can be seen: %s; looking again every %g s", error, every_s)
        if notice is not None:
            return notice
        sleep(every_s)


def main() -> int:
    """The command line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = argparse.ArgumentParser(prog="python -m orchestrator.cluster.watch")
    parser.add_argument("--provider", type=Provider, choices=list(Provider), required=True)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds between looks")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS", ""), help="head of the cluster, host:port")
    parser.add_argument("--node", default="", help="beginning of Ray's id of the node; default: this machine's")
    given = parser.parse_args()
    try:
        notice = wait_for_notice(source_of(given.provider), every_s=given.every)
    except OrchestratorError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    _LOG.warning("%s: gone in %.0f s", notice.reason, notice.seconds_left)
    # Ray is imported only now: until here the watcher costs a node 20 MB and no CPU.
    command = [sys.executable, "-m", "orchestrator.cluster.leave", "--deadline", f"{notice.seconds_left:.1f}"]
    command += ["--reason", notice.reason, "--address", given.address, "--node", given.node]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
