"""Many questions to a store at once, and an end to waiting. The threads are daemons: none outlives its command."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from orchestrator.core.errors import OrchestratorError

NUM_THREADS = 16

Question = TypeVar("Question")
Answer = TypeVar("Answer")
_Answered = tuple[Question, Answer | Exception]


def ask_all(
    ask: Callable[[Question], Answer], questions: Sequence[Question], *, deadline_s: float
) -> dict[Question, Answer]:
    """Answers by question.

    Args:
        ask: called in up to 16 threads.
        questions: hashable.
        deadline_s: value of ``time.monotonic`` at which to stop waiting.

    Raises:
        TimeoutError: not everything was answered in time; its ``args[0]`` is the number of answers.
        OrchestratorError, OSError: the first one that a question raised.
    """
    waiting: queue.SimpleQueue[Question] = queue.SimpleQueue()
    answered: queue.SimpleQueue[_Answered[Question, Answer]] = queue.SimpleQueue()
    for question in questions:
        waiting.put(question)
    for _ in range(min(NUM_THREADS, len(questions))):
        threading.Thread(target=_serve, args=(ask, waiting, answered), daemon=True).start()
    answers: dict[Question, Answer] = {}
    try:
        while len(answers) < len(questions):
            question, answer = answered.get(timeout=max(0.0, deadline_s - time.monotonic()))
            if isinstance(answer, Exception):
                raise answer
            answers[question] = answer
    except queue.Empty:
        raise TimeoutError(len(answers)) from None
    finally:
        while not waiting.empty():  # the threads end after the question in hand
            _drop(waiting)
    return answers


def _serve(
    ask: Callable[[Question], Answer],
    waiting: queue.SimpleQueue[Question],
    answered: queue.SimpleQueue[_Answered[Question, Answer]],
) -> None:
    while True:
        try:
            question = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            answered.put((question, ask(question)))
        except (OrchestratorError, OSError, ValueError) as error:
            answered.put((question, error))


def _drop(waiting: queue.SimpleQueue[Question]) -> None:
    try:
        waiting.get_nowait()
    except queue.Empty:
        return
