"""Jobs of a Ray cluster through its dashboard:
https://docs.ray.io/en/latest/cluster/running-applications/job-submission/rest.html

It does not use Ray's client, which has no time limit; every request here has one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage
from typing import IO, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from orchestrator.core.errors import ClusterError
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.urls import check_url

ANSWER_S = 10.0
UPLOAD_S = 180.0
_TRIES = 3
_PAUSE_S = 1.0
_MAX_ANSWER_BYTES = 64 * 2**20
_BROKEN_BEHIND_PROXY = {502, 503, 504}
_SHOWN_BYTES = 80
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
ENDED = frozenset({"SUCCEEDED", "FAILED", "STOPPED"})
"""Final states of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DashboardJob:
    """A job as the dashboard describes it."""

    status: str
    """``PENDING``, ``RUNNING``, or one of ``ENDED``."""
    message: str


class _NoRedirects(HTTPRedirectHandler):
    """The token is only for this server: a redirect is an error."""

    def redirect_request(  # noqa: PLR0917 - the base class's signature
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        return None


class Dashboard:
    """The job server of one cluster."""

    def __init__(self, address: str, token: str = "") -> None:
        """``address``: ``https://host:port``. ``token``: the cluster's token; empty = the cluster requires none.

        Raises:
            UserError: the address is invalid, or must not be used.
        """
        check_url(address, what="the dashboard's address")
        self.address = address.rstrip("/")
        self._token = token
        # Through a proxy, this machine's own address would be the proxy's, which would also read the token.
        proxies = [ProxyHandler({})] if urlsplit(self.address).hostname in _LOOPBACK else []
        self._opener: OpenerDirector = build_opener(_NoRedirects, *proxies)

    @property
    def sends_token_in_clear(self) -> bool:
        """Whether others on the network path could read the token."""
        parts = urlsplit(self.address)
        return bool(self._token) and parts.scheme == "http" and parts.hostname not in _LOOPBACK

    def check(self) -> None:
        """Ask it for something. Raises ``ClusterError``: it does not answer, or address or token are wrong."""
        self._document("/api/version")

    def upload(self, name: str, content: bytes) -> str:
        """Store a package there unless it is there already; returns its URI for ``runtime_env``."""
        path = f"/api/packages/gcs/{quote(name, safe='')}"
        if not self._has(path):
            self._call("PUT", path, content, timeout_s=UPLOAD_S)
        return f"gcs://{name}"

    def submit(self, job_id: str, entrypoint: str, runtime_env: Mapping[str, Any]) -> None:
        """Start a job, once: a job of this id exists already if the answer to the first request was lost."""
        request = {"submission_id": job_id, "entrypoint": entrypoint, "runtime_env": runtime_env}
        try:
            self._call("POST", "/api/jobs/", json.dumps(request).encode(), timeout_s=UPLOAD_S)
        except ClusterError:
            if not self._has(f"/api/jobs/{job_id}"):
                raise

    def state(self, job_id: str) -> DashboardJob:
        """The present state of a job."""
        found = self._document(f"/api/jobs/{job_id}")
        return DashboardJob(status=str(found.get("status", "")), message=str(found.get("message") or ""))

    def log(self, job_id: str) -> str:
        """All that a job has printed."""
        return str(self._document(f"/api/jobs/{job_id}/logs").get("logs") or "")

    def _document(self, path: str) -> Mapping[str, Any]:
        """The answer of Ray's dashboard; not of a proxy before it, or of any other server."""
        content = self._call("GET", path)
        try:
            found = parse_json(content)
        except ValueError:
            found = None
        if not isinstance(found, Mapping):
            start = content[:_SHOWN_BYTES].decode(errors="replace").split()
            message = (
                f"{self.address} does not answer as a Ray dashboard does ({' '.join(start)!r}); check the address, and "
                "whether a proxy before it asks for a login"
            )
            raise ClusterError(message)
        return found

    def _has(self, path: str) -> bool:
        try:
            self._call("GET", path)
        except _AbsentError:
            return False
        return True

    def _call(self, method: str, path: str, content: bytes | None = None, *, timeout_s: float = ANSWER_S) -> bytes:
        """Send a request; repeat it if the connection, or that of a proxy, breaks. All requests can be repeated."""
        for tries in range(1, _TRIES + 1):
            try:
                return self._request(method, path, content, timeout_s)
            except HTTPError as error:
                if error.code not in _BROKEN_BEHIND_PROXY or tries == _TRIES:
                    raise self._refusal(error, path) from None  # its headers would show the token
            except (URLError, HTTPException, OSError) as error:
                if tries == _TRIES:
                    reason = getattr(error, "reason", error)
                    message = (
                        f"the dashboard at {self.address} does not answer ({reason}); check the address, and the "
                        "tunnel or VPN that leads to it"
                    )
                    raise ClusterError(message) from None
            time.sleep(_PAUSE_S)
        raise AssertionError

    def _request(self, method: str, path: str, content: bytes | None, timeout_s: float) -> bytes:
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        # http and https only: the constructor has checked it.
        request = Request(f"{self.address}{path}", data=content, headers=headers, method=method)  # noqa: S310
        with self._opener.open(request, timeout=timeout_s) as response:
            answer: bytes = response.read(_MAX_ANSWER_BYTES)
            return answer

    def _refusal(self, error: HTTPError, path: str) -> ClusterError:
        if error.code == 404:
            return _AbsentError(f"{self.address} knows no {path}")
        if error.code == 401:
            return ClusterError(
                f"the cluster at {self.address} asks for a token: ask its owner, write it into a file that only you "
                "can read, and name that file by the setting ray_token, see: orchestrator config set-context --help"
            )
        if error.code == 403:
            return ClusterError(f"the cluster at {self.address} refuses the token: is it this cluster's, and recent?")
        if 300 <= error.code < 400:
            return ClusterError(f"{self.address} leads elsewhere (HTTP {error.code}), and the token is not sent there")
        lines = error.read(2000).decode(errors="replace").strip().splitlines()
        return ClusterError(f"the dashboard at {self.address} answers HTTP {error.code}: {lines[-1] if lines else ''}")


class _AbsentError(ClusterError):
    """The server has no such resource."""
