"""Answers of the data plane without a process of its own, which takes seconds to import torch and timm."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any, Final
from unittest.mock import patch

from orchestrator.core import data_plane
from orchestrator.core.data_plane import COUNT, HIERARCHY, MODELS, TABLE, Question

HERE: Final = frozenset({COUNT.name, HIERARCHY.name, MODELS.name, TABLE.name})
"""Questions whose answers run no code of users, but that of plug-ins that define label spaces."""


@contextmanager
def answered_here() -> Iterator[None]:
    """What is asked while a sweep is read is answered in this process; ``data_plane.ask`` itself asks another one."""
    with patch("orchestrator.sweepfile.survey.ask", ask_here):
        yield


def ask_here(question: Question[Any, Any], request: Any, **given: Any) -> Any:
    """As ``data_plane.ask``, with the same texts of request and reply, and the same checks of both."""
    text = json.dumps(request)
    if question.name not in HERE or any("plugin" in space for space in request.get("spaces", ())):
        return data_plane.ask(question, request, **given)
    reply = StringIO()
    with patch("sys.stdin", StringIO(text)), redirect_stdout(reply):
        code = data_plane.answer(question.name)
    return data_plane._read_reply(question, reply.getvalue(), "", code)
