"""The stack's MLflow server, behind the project's token: ``python -m orchestrator.stack.mlflow_server DIRECTORY FD``.

MLflow itself accepts every connection to its port, and serves any file that its user may read, because the creator of
an experiment chooses the place of its files. On a machine with several users, that port would give the rights of the
stack's user. So

- the socket, descriptor FD, comes from the supervisor, which keeps it: no other user can take the port while no MLflow
  runs, and be shown the token by a browser;
- nothing but ``/health`` answers without the token of ``mlflow_token``: a program sends it as ``Authorization: Bearer``
  (MLflow's own client does with ``MLFLOW_TRACKING_TOKEN``), a browser as the cookie that a link with ``?token=`` sets;
- files are those below ``mlflow-artifacts``: no other scheme, no other folder, and no link that leads out of it.

This is no plug-in of ``mlflow server --app-name``: such a plug-in is found by the metadata of an installation, which a
checkout does not have, nor an older editable installation. The token is never on a command line, and requests, whose
addresses may contain it, are not logged.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

from orchestrator.stack.description import MLFLOW_ARTIFACTS, MLFLOW_TOKEN_FILE, TOKEN_PARAMETER, tracking_uri

HEALTH: Final = "/health"
"""The one page for everybody; it says ``OK``."""
ENVIRONMENT: Final = {
    # Its own default adds all private networks, whose names an attacker's name server may point here.
    "MLFLOW_SERVER_ALLOWED_HOSTS": "127.0.0.1,127.0.0.1:*,localhost,localhost:*,[::1],[[]::1]:*",
    # No job runners: they are for evaluations inside the server, and take three more processes.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
_REFUSAL: Final = (
    b"This MLflow server asks for its project's token. Open the link that `orchestrator up` or `orchestrator status "
    b"SWEEP` prints; programs send what is in mlflow_token of the project's directory (MLFLOW_TRACKING_TOKEN).\n"
)

_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]
_App: TypeAlias = Callable[[_Message, _Receive, _Send], Awaitable[None]]
_Headers: TypeAlias = list[tuple[bytes, bytes]]


class TokenGate:
    """An ASGI application around another one, which it protects by a token.

    ``name`` is the cookie's: browsers send the cookies of a host to all of its ports.
    """

    def __init__(self, app: _App, token: str, name: str) -> None:
        if not token:
            raise ValueError("an empty token would give access to everybody")
        self._app, self._token, self._name = app, token.encode(), name.encode()

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer, or let the application answer."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # MLflow has none
        elif scope["path"] == HEALTH:
            await _answer(send, HTTPStatus.OK, b"OK")
        elif self._asks_for_cookie(scope):
            cookie = b"%s=%s; HttpOnly; SameSite=Strict; Path=/" % (self._name, self._token)
            # A browser keeps the part after `#`, MLflow's own page, on a redirect.
            await _answer(send, HTTPStatus.SEE_OTHER, b"", [(b"location", b"/"), (b"set-cookie", cookie)])
        elif self._has_token(scope["headers"]):
            # The application does not need them, and so cannot reveal them.
            kept = [(name, value) for name, value in scope["headers"] if name not in {b"authorization", b"cookie"}]
            await self._app({**scope, "headers": kept}, receive, send)
        else:
            await _answer(send, HTTPStatus.UNAUTHORIZED, _REFUSAL, [(b"www-authenticate", b"Bearer")])

    def _asks_for_cookie(self, scope: _Message) -> bool:
        given = parse_qs(scope["query_string"]).get(TOKEN_PARAMETER.encode(), []) if scope["path"] == "/" else []
        return any(self._is_right(token) for token in given)

    def _has_token(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        return any(
            self._is_right(token) for name, value in headers for token in _tokens_of(name, value, cookie=self._name)
        )

    def _is_right(self, given: bytes) -> bool:
        return hmac.compare_digest(given, self._token)


def _tokens_of(header: bytes, value: bytes, *, cookie: bytes) -> list[bytes]:
    if header == b"authorization":
        kind, _, token = value.partition(b" ")
        return [token.strip()] if kind.lower() == b"bearer" else []
    if header == b"cookie":
        pairs = [pair.strip().partition(b"=") for pair in value.split(b";")]
        return [token for name, _, token in pairs if name == cookie]
    return []


async def _answer(send: _Send, status: HTTPStatus, body: bytes, headers: _Headers | None = None) -> None:
    start = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(body))]
    start += [(b"cache-control", b"no-store"), (b"referrer-policy", b"no-referrer"), *(headers or [])]
    await send({"type": "http.response.start", "status": int(status), "headers": start})
    await send({"type": "http.response.body", "body": body})


def load_mlflow(directory: Path) -> _App:
    """MLflow's application on a project's database and folder of artifacts, made ready and confined."""
    import uvicorn  # noqa: F401 - MLflow checks the Host header only where it finds its server already imported

    os.environ.update(ENVIRONMENT)
    from mlflow.server import constants, handlers

    from orchestrator.stack.mlflow_files import OWN_LOCATION, confine_artifacts, refuse_locations

    root = directory / MLFLOW_ARTIFACTS
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.environ |= {
        constants.BACKEND_STORE_URI_ENV_VAR: tracking_uri(directory),
        constants.ARTIFACT_ROOT_ENV_VAR: OWN_LOCATION,
        constants.ARTIFACTS_DESTINATION_ENV_VAR: str(root),
        constants.SERVE_ARTIFACTS_ENV_VAR: "true",
    }
    handlers.initialize_backend_stores(tracking_uri(directory), tracking_uri(directory), OWN_LOCATION)
    confine_artifacts(root)
    refuse_locations()
    from mlflow.server.fastapi_app import app

    application: _App = app
    return application


def main(arguments: list[str]) -> int:
    """Serve until a signal to end."""
    os.umask(0o077)  # of the database and the files
    directory, listener = Path(arguments[0]), socket.socket(fileno=int(arguments[1]))
    listener.set_inheritable(False)
    token = (directory / MLFLOW_TOKEN_FILE).read_text(encoding="utf-8").strip()
    app = TokenGate(load_mlflow(directory), token, f"orchestrator-mlflow-{listener.getsockname()[1]}")
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, access_log=False, server_header=False)).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
