"""Questions of the control plane to the data plane; each is answered by a separate process.

The control plane imports nothing of the data plane, so it asks questions, only through this module. A row of
`QUESTIONS` has a question with the types of its request and its answer, and the name of the function that answers it.
`ask` starts ``python -m workloads.answer NAME``, which calls `answer`. Invariants:

- The request is JSON on stdin: it may be larger than a command line, and lists of processes do not show it.
- The last line of stdout is the reply, ``{"answer": ...}`` or ``{"error": ...}``; other output of
  libraries goes to stderr. Every failure is a `NoAnswerError`, which says why in one line.
- Both sides check the types: a reply of another version is an error here, not a KeyError later.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from enum import Enum, auto
from importlib import import_module
from typing import Any, Final, Generic, NotRequired, TypeVar

from typing_extensions import TypedDict  # typing has one that can be checked from Python 3.12 on

from orchestrator.core.errors import NotFoundError, OrchestratorError

Json = Mapping[str, Any]
Asked = TypeVar("Asked")
Told = TypeVar("Told")

_MODULE: Final = "workloads.answer"
_FAILURE, _NOT_FOUND, _INTERRUPTED = 1, 102, 130
_SHOWN: Final = 300


# --------------------------------------------------------------------------------------------- requests and answers


class ShardPlaces(TypedDict):
    """Shards by one ``place`` or by splits, with their classes; see ``workloads.commands.data.ShardInputRequest``."""

    place: str
    splits: dict[str, str]
    classes: str
    num_classes: int
    multi_label: bool


class ConvertRequest(TypedDict):
    """A source to convert, with the arguments of converter and writer."""

    converter: str
    source: dict[str, Any]
    write: dict[str, Any]


class IndexRequest(TypedDict):
    """Shards to scan; ``budget`` is a share of a split."""

    target: ShardPlaces
    policy: str
    budget: float
    write: bool
    num_processes: int


class VerifyRequest(TypedDict):
    """Shards to compare with their ``dataset.json``."""

    target: ShardPlaces
    decode: bool
    num_processes: int


class StatsRequest(TypedDict):
    """The folder of a data set."""

    place: str


class SampleRequest(TypedDict):
    """Which samples are shown; an empty ``out`` writes nothing."""

    target: ShardPlaces
    split: str
    num_samples: int
    seed: int
    key: str
    out: str


class LookRequest(TypedDict):
    """A folder, file or URI of unknown content; see ``workloads.commands.look.look``."""

    place: str


class LookAnswer(TypedDict):
    """What was found; ``entry`` is the entry for ``datasets`` of a sweep."""

    form: str
    entry: dict[str, Any]
    num_samples: dict[str, int]
    num_classes: int
    levels: dict[str, int]
    incomplete: list[str]
    """Those of ``levels`` at which some classes have no value."""
    left_out: dict[str, str]
    """Columns that are no levels for their name alone, and why."""
    multi_label: bool
    notes: list[str]
    """Sentences about files that are left out and empty folders."""
    pixels: int
    gpus: int


class CountRequest(TypedDict):
    """Label spaces of a data set; ``files`` says where the files of their definitions lie."""

    dataset: Json
    num_train: int
    spaces: Sequence[Json]
    files: dict[str, str]


class ShowRequest(CountRequest):
    """Label spaces with their names; see ``workloads.commands.labels.describe_spaces``."""

    targets: Sequence[str]
    index: Json
    tree: Sequence[str]
    plot: str
    parents: NotRequired[bool]


class TableRequest(TypedDict):
    """A data set whose class table is wanted."""

    dataset: Json


class TableAnswer(TypedDict):
    """Its rows."""

    rows: list[dict[str, Any]]


class HierarchyRequest(TypedDict):
    """A data set whose classes get levels, from what; see ``workloads.labels.hierarchy``."""

    dataset: Json
    source: str
    wordnet: str


class HierarchyAnswer(TypedDict):
    """A table with a row per class, its column that tells them apart, its levels from coarse to fine, and notes."""

    rows: list[dict[str, str]]
    key: str
    levels: list[str]
    notes: list[str]


class CountAnswer(TypedDict):
    """For each space its fields of ``orchestrator.sweepfile.labels.Counted``."""

    counted: list[dict[str, Any]]


class PluginUse(TypedDict):
    """A plug-in as an identity names it, and the arguments that a sweep gives it."""

    group: str
    reference: str
    arguments: Json


class PluginProblem(TypedDict):
    """A problem of one plug-in: its number, the path below its arguments, and the reason."""

    use: int
    path: list[str | int]
    message: str


class PluginRequest(TypedDict):
    """All plug-ins of a sweep."""

    uses: Sequence[PluginUse]


class PluginAnswer(TypedDict):
    """All that is wrong."""

    problems: list[PluginProblem]


class ModelsRequest(TypedDict):
    """Models of timm: ``name``, ``image_size`` and ``kwargs`` of each; ``is_alone``: trained on norm groups of one."""

    models: Sequence[Json]


class ModelProblem(TypedDict):
    """A problem of one model: its number, the path below it, and the reason."""

    model: int
    path: list[str]
    message: str


class ModelsAnswer(TypedDict):
    """All that is wrong."""

    problems: list[ModelProblem]


class SimulationsRequest(TypedDict):
    """Simulations and their cells; see ``workloads.commands.simulations.check``."""

    simulations: Sequence[Json]


class SimulationsAnswer(TypedDict):
    """Names of the shipped simulations, and the answer for each requested one."""

    shipped: list[str]
    checked: list[dict[str, Any]]


class NodeRequest(TypedDict):
    """Which parts of a node are checked; times in s. See ``workloads.node_check``."""

    limit_s: float
    gpus: NotRequired[int]
    compile: NotRequired[bool]
    reduce_s: NotRequired[float]
    cache: NotRequired[str]
    store_uri: NotRequired[str]
    until_s: NotRequired[float]


class RankRequest(TypedDict):
    """Address at which the ranks of an all-reduce meet, and this rank."""

    rank: int
    world_size: int
    host: str
    port: int
    backend: str
    limit_s: float
    device: NotRequired[int]


# ------------------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Question(Generic[Asked, Told]):
    """A question: its name, the function that answers it (``module:function``), and the types of request and answer."""

    name: str
    handler: str
    request: type[Asked]
    answer: type[Told]


_Document = dict[str, Any]
SHARD: Final = Question("data.shard", "workloads.commands.data:shard", ConvertRequest, _Document)
LISTING: Final = Question("data.listing", "workloads.commands.data:listing", _Document, _Document)
INDEX: Final = Question("data.index", "workloads.commands.data:index", IndexRequest, _Document)
VERIFY: Final = Question("data.verify", "workloads.commands.data:verify", VerifyRequest, _Document)
STATS: Final = Question("data.stats", "workloads.commands.data:stats", StatsRequest, _Document)
SAMPLE: Final = Question("data.sample", "workloads.commands.data:sample", SampleRequest, _Document)
LOOK: Final = Question("data.look", "workloads.commands.look:look", LookRequest, LookAnswer)
COUNT: Final = Question("labels.count", "workloads.commands.labels:count", CountRequest, CountAnswer)
SHOW: Final = Question("labels.show", "workloads.commands.labels:show", ShowRequest, _Document)
TABLE: Final = Question("labels.table", "workloads.commands.labels:table", TableRequest, TableAnswer)
HIERARCHY: Final = Question(
    "labels.hierarchy", "workloads.commands.labels:hierarchy", HierarchyRequest, HierarchyAnswer
)
CHANGES: Final = Question("labels.changes", "workloads.commands.labels:changes", _Document, _Document)
SIMULATIONS: Final = Question(
    "simulations.check", "workloads.commands.simulations:check", SimulationsRequest, SimulationsAnswer
)
PLUGINS: Final = Question("plugins.check", "workloads.commands.plugins:check", PluginRequest, PluginAnswer)
MODELS: Final = Question("models.check", "workloads.commands.models:check", ModelsRequest, ModelsAnswer)
NODE: Final = Question("node.check", "workloads.node_check:main", NodeRequest, _Document)
RANK: Final = Question("node.all_reduce", "workloads.all_reduce:join", RankRequest, _Document)

QUESTIONS: Final[Mapping[str, Question[Any, Any]]] = {
    one.name: one
    for one in (
        *(SHARD, LISTING, INDEX, VERIFY, STATS, SAMPLE, LOOK),
        *(COUNT, SHOW, TABLE, HIERARCHY, CHANGES),
        *(SIMULATIONS, PLUGINS, MODELS, NODE, RANK),
    )
}
"""All of them by name."""


# -------------------------------------------------------------------------------------------------------- asking


class NoAnswerError(OrchestratorError):
    """A question was not answered; ``str`` says why in one line, ``exit_code`` is that of ``docs/cli.md``."""

    def __init__(self, why: str, exit_code: int = _FAILURE) -> None:
        super().__init__(why, exit_code)
        self.exit_code = exit_code

    def __str__(self) -> str:
        return str(self.args[0])


class LateAnswerError(NoAnswerError):
    """It was not answered in time."""


class Terminal(Enum):
    """How an answering process uses the terminal."""

    NONE = auto()
    """Nothing: it has its own session, all of which is killed when the caller does not wait any more."""
    SHARED = auto()
    """Its progress and warnings are shown, and Ctrl-C reaches it: it cleans up and ends by itself."""


def ask(
    question: Question[Asked, Told],
    request: Asked,
    *,
    limit_s: float | None = None,
    environment: Mapping[str, str] | None = None,
    terminal: Terminal = Terminal.NONE,
    wrap: Callable[[list[str]], list[str]] | None = None,
) -> Told:
    """The answer of a process of the data plane.

    Args:
        question: one of those above.
        request: its request.
        limit_s: how long to wait; None = until it ends.
        environment: of the process; None = ours.
        terminal: see `Terminal`.
        wrap: makes another command line of its command line.

    Raises:
        LateAnswerError: it took longer; it has been ended.
        NoAnswerError: it failed, and says why, or died, or gave something else than an answer.
        OSError: it cannot be started.
    """
    command = [sys.executable, "-m", _MODULE, question.name]
    is_shared = terminal is Terminal.SHARED
    with subprocess.Popen(
        wrap(command) if wrap else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if is_shared else subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=not is_shared,
    ) as process:
        try:
            stdout, stderr = process.communicate(json.dumps(request), timeout=limit_s)
        except BaseException as error:
            if is_shared and isinstance(error, KeyboardInterrupt):
                process.wait()  # it got the same signal, and prints how to continue
                raise
            with suppress(ProcessLookupError, PermissionError):
                process.kill() if is_shared else os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise LateAnswerError(f"no answer within {limit_s:g} s") from error
            raise
    return _read_reply(question, stdout, stderr or "", process.returncode)


def _read_reply(question: Question[Asked, Told], stdout: str, stderr: str, returncode: int) -> Told:
    lines = stdout.strip().splitlines()
    try:
        reply = json.loads(lines[-1]) if lines else {}
    except ValueError:
        reply = {}
    if not isinstance(reply, dict) or reply.keys() not in ({"answer"}, {"error"}):
        error_lines = [line for line in stderr.strip().splitlines() if line.strip()]
        code = f"it ended with code {returncode}"
        raise NoAnswerError(error_lines[-1] if error_lines else code, returncode if returncode > 0 else _FAILURE)
    if "error" in reply:
        raise NoAnswerError(str(reply["error"]), returncode or _FAILURE)
    try:
        return _checked(question.answer, reply["answer"])
    except ValueError as error:
        raise NoAnswerError(f"the answer to {question.name} is of another version: {_first_line(error)}") from error


# ------------------------------------------------------------------------------------------------------ answering


def answer(name: str) -> int:
    """Answer the question of this name, whose request is on stdin; returns the exit code of ``docs/cli.md``."""
    reply: dict[str, Any]
    code = 0
    try:
        with redirect_stdout(sys.stderr):
            question = QUESTIONS[name]
            request = _checked(question.request, json.load(sys.stdin))
            module, _, function = question.handler.partition(":")
            reply = {"answer": getattr(import_module(module), function)(request)}
    except OrchestratorError as error:
        reply, code = {"error": str(error)}, _NOT_FOUND if isinstance(error, NotFoundError) else _FAILURE
    except KeyboardInterrupt:
        reply, code = {"error": "interrupted; run the same command again to go on"}, _INTERRUPTED
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()
    return code


def _checked(kind: type[Told], value: object) -> Told:
    """A value of a `TypedDict`. Raises ``ValueError``; fields that the type does not have are refused, too."""
    from pydantic import ConfigDict, TypeAdapter  # imported only by processes that ask or answer

    if kind is dict or kind == dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("it is not a mapping")
        return value  # type: ignore[return-value] # which is the type
    kind.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined] # of typed dictionaries
    return TypeAdapter(kind).validate_python(value)


def _first_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:3])[:_SHOWN]
