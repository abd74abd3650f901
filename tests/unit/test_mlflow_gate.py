"""Who gets past the gate of the stack's MLflow server, and what is told to whom does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from orchestrator.stack.description import Stack, make_private
from orchestrator.stack.mlflow_server import TokenGate
from orchestrator.storage.files import write_private

TOKEN = "5f2c" * 16
COOKIE = "orchestrator-mlflow-5000"


class Behind:
    """The application behind the gate; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"inside"})


def ask(
    behind: Behind, path: str, *headers: tuple[str, str], query: str = "", kind: str = "http"
) -> Sequence[dict[str, Any]]:
    """What the gate sends."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {
        "type": kind, "method": "GET", "path": path, "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
    }  # fmt: skip
    asyncio.run(TokenGate(behind, TOKEN, COOKIE)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    "path",
    [
        "/", "/version", "/graphql", "/get-artifact", "/static-files/x.js", "/health/", "//health", "/health/..",
        "/api/2.0/mlflow/experiments/create", "/ajax-api/2.0/mlflow/upload-artifact", "/ajax-api/3.0/mlflow/assistant",
        "/api/2.0/mlflow-artifacts/artifacts/x", "/v1/traces", "/gateway/x/mlflow/invocations", "/no/such/page",
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "header",
    [
        ("Accept", "*/*"),
        ("Authorization", "Bearer"),
        ("Authorization", "Bearer "),
        ("Authorization", f"Bearer {TOKEN[:-1]}"),
        ("Authorization", f"Bearer {TOKEN}0"),
        ("Authorization", f"Basic {TOKEN}"),
        ("Authorization", TOKEN),
        ("Cookie", f"{COOKIE}="),
        ("Cookie", f"{COOKIE}={TOKEN.upper()}"),
        ("Cookie", f"other={TOKEN}"),
        ("X-Forwarded-For", "127.0.0.1"),
    ],
    ids=str,
)
def test_gate_without_the_token_lets_nobody_in(path: str, header: tuple[str, str]) -> None:
    behind = Behind()
    start, body = ask(behind, path, header)
    assert behind.asked == []
    assert start["status"] == 401
    assert b"/" not in body["body"].replace(b"http://", b""), "no path of the project"
    assert TOKEN.encode() not in body["body"]


@pytest.mark.parametrize(
    "header",
    [
        ("Authorization", f"Bearer {TOKEN}"),
        ("authorization", f"bearer {TOKEN}"),
        ("Cookie", f"{COOKIE}={TOKEN}"),
        ("Cookie", f'a="x;y"; {COOKIE}={TOKEN}; b=c'),
    ],
    ids=str,
)
def test_gate_with_the_token_lets_in_and_keeps_it_to_itself(header: tuple[str, str]) -> None:
    behind = Behind()
    start, body = ask(behind, "/version", header, ("Accept", "text/html"))
    assert (start["status"], body["body"]) == (200, b"inside")
    assert behind.asked[0]["headers"] == [(b"accept", b"text/html")]


def test_gate_swaps_the_token_of_a_link_for_a_cookie_that_scripts_cannot_read() -> None:
    behind = Behind()
    start, _ = ask(behind, "/", query=f"token={TOKEN}")
    headers = dict(start["headers"])
    assert (start["status"], headers[b"location"], behind.asked) == (303, b"/", [])
    assert headers[b"set-cookie"] == f"{COOKIE}={TOKEN}; HttpOnly; SameSite=Strict; Path=/".encode()
    assert headers[b"cache-control"] == b"no-store"


@pytest.mark.parametrize(("path", "query"), [("/", "token=wrong"), ("/", "token="), ("/version", f"token={TOKEN}")])
def test_gate_takes_no_other_link(path: str, query: str) -> None:
    behind = Behind()
    assert ask(behind, path, query=query)[0]["status"] == 401
    assert behind.asked == []


def test_gate_answers_the_health_check_itself() -> None:
    behind = Behind()
    start, body = ask(behind, "/health")
    assert (start["status"], body["body"], behind.asked) == (200, b"OK", [])


def test_gate_opens_no_websocket_and_passes_the_start_of_the_server_on() -> None:
    behind = Behind()
    sent = ask(behind, "/", ("Authorization", f"Bearer {TOKEN}"), kind="websocket")
    assert [message["type"] for message in sent] == ["websocket.close"]
    ask(behind, "", kind="lifespan")
    assert [scope["type"] for scope in behind.asked] == ["lifespan"]


def test_gate_with_an_empty_token_is_not_built() -> None:
    with pytest.raises(ValueError, match="empty token"):
        TokenGate(Behind(), "", COOKIE)


def test_link_for_a_browser_has_the_token_before_the_page(tmp_path: Path) -> None:
    write_private(tmp_path / "mlflow_token", TOKEN)
    stack = Stack(
        directory="", ray_address="", dashboard_url="", tracking_uri="", token_path="", pid=1, pid_started_at=1,
        started_at_s=0.0, mlflow_url="http://127.0.0.1:5000", mlflow_token_path=str(tmp_path / "mlflow_token"),
    )  # fmt: skip
    page = stack.browser_link("http://127.0.0.1:5000/#/experiments/1/runs?compareRunsMode=CHART")
    assert page == f"http://127.0.0.1:5000/?token={TOKEN}#/experiments/1/runs?compareRunsMode=CHART"
    assert stack.browser_link("http://127.0.0.1:5000") == f"http://127.0.0.1:5000/?token={TOKEN}"


@pytest.mark.parametrize("mode", [None, 0o755, 0o777, 0o711])
def test_project_directory_is_closed_to_others(tmp_path: Path, mode: int | None) -> None:
    project = tmp_path / "deep" / "project"
    if mode is not None:
        project.mkdir(parents=True)
        project.chmod(mode)
    make_private(project)
    assert project.stat().st_mode & 0o777 == 0o700
