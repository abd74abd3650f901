"""Questions to the data plane: what is answered, and each way in which nothing is."""

import json
import sys
from collections.abc import Callable
from importlib import import_module

import pytest

from orchestrator.core.data_plane import (
    COUNT,
    QUESTIONS,
    STATS,
    TABLE,
    CountRequest,
    LateAnswerError,
    NoAnswerError,
    StatsRequest,
    TableRequest,
    ask,
)

DIGITS = TableRequest(dataset={"builtin": {"builtin": "digits", "version": 1, "val_fraction": 0.2, "seed": 0}})


def instead(program: str) -> Callable[[list[str]], list[str]]:
    """Another program in the place of the data plane's."""
    return lambda _: [sys.executable, "-c", program]


@pytest.mark.parametrize("name", QUESTIONS)
def test_question_has_a_function_that_answers_it(name: str) -> None:
    module, _, function = QUESTIONS[name].handler.partition(":")
    assert callable(getattr(import_module(module), function))


def test_question_is_answered_and_a_wrong_request_is_refused_in_one_line() -> None:
    assert len(ask(TABLE, DIGITS)["rows"]) == 10
    with pytest.raises(NoAnswerError, match=r"has no dataset.json|not there|/nowhere") as caught:
        ask(STATS, StatsRequest(place="/nowhere"))
    assert (caught.value.exit_code, str(caught.value).count("\n")) == (102, 0)


@pytest.mark.parametrize(
    ("program", "why", "exit_code"),
    [
        ("import sys; sys.exit('all is lost')", "all is lost", 1),
        ("raise SystemExit(7)", "it ended with code 7", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "it ended with code -9", 1),
        ("print('hello')", "it ended with code 0", 1),
        ("print('[]')", "it ended with code 0", 1),
        (f"print({json.dumps({'error': 'no such set'})!r})", "no such set", 1),
        (f"print({json.dumps({'answer': {'rows': [], 'x': 1}})!r})", "of another version: .*x", 1),
        (f"print({json.dumps({'answer': {}})!r})", "of another version: .*rows", 1),
    ],
)
def test_no_answer_is_one_error_that_says_why(program: str, why: str, exit_code: int) -> None:
    with pytest.raises(NoAnswerError, match=why) as caught:
        ask(TABLE, DIGITS, wrap=instead(program))
    assert caught.value.exit_code == exit_code


def test_answer_is_the_last_line_whatever_a_library_prints() -> None:
    program = f"print('loading'); print({json.dumps({'answer': {'rows': [{'class': 0}]}})!r})"
    assert ask(TABLE, DIGITS, wrap=instead(program)) == {"rows": [{"class": 0}]}


def test_late_answer_is_an_error_of_its_own() -> None:
    with pytest.raises(LateAnswerError, match=r"no answer within 0\.5 s"):
        ask(TABLE, DIGITS, limit_s=0.5, wrap=instead("import signal; signal.pause()"))


def test_request_larger_than_a_command_line_is_asked() -> None:
    spaces = [{"hierarchy": "leaf"}] * 20_000
    request = CountRequest(dataset={"rows": None, "num_classes": 3}, num_train=10, spaces=spaces, files={})
    program = "import json, sys; print(json.dumps({'answer': {'counted': json.load(sys.stdin)['spaces']}}))"
    assert len(ask(COUNT, request, wrap=instead(program))["counted"]) == len(spaces)
