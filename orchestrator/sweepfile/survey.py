"""Reads information outside of a sweep.yaml when it is loaded: data sets, sources to convert, classes of label spaces.

The one place where the language reads object stores and asks the data plane. It reads small files (``dataset.json``,
``classes.json``) and listings, never shards. Questions to the data plane are those of
``orchestrator.core.data_plane``. The results are passed to the pure resolution as values; digests of files become part
of identities.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

from orchestrator.core.code import package_digest
from orchestrator.core.data_plane import (
    COUNT,
    LISTING,
    MODELS,
    PLUGINS,
    SIMULATIONS,
    TABLE,
    Asked,
    CountRequest,
    LateAnswerError,
    ModelProblem,
    ModelsRequest,
    NoAnswerError,
    PluginProblem,
    PluginRequest,
    PluginUse,
    Question,
    SimulationsAnswer,
    SimulationsRequest,
    TableAnswer,
    TableRequest,
    Told,
    ask,
)
from orchestrator.core.errors import BadDataError, NotFoundError, SpecError, StorageError, UserError
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    DatasetFile,
    held_out_problem,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.listing import ListedShard, list_shards, listing_digest, not_held_out
from orchestrator.sweepfile.datasets import (
    ConvertedShards,
    ExternalShards,
    MixtureSpec,
    Survey,
    Surveys,
    source_arguments,
)
from orchestrator.sweepfile.label_counts import Counted, Definition
from orchestrator.sweepfile.parse.tree import Path as TreePath
from orchestrator.sweepfile.parse.tree import Tree
from orchestrator.sweepfile.sweep import SweepSpec
from orchestrator.sweepfile.values import Dataset, ResolvedSweep

Found = TypeVar("Found")
_Shards = Mapping[str, Sequence[ListedShard]]
"""By split."""
_LISTING_TIMEOUT_S: Final = 7200.0
_PATHS: Final = ("source", "labels", "root")
_FIELDS: Final = {
    "split": "splits",
    **{name.replace("_", "-"): name for name in ("val_fraction", "labels", "separator", "path_column", "label_column")},
    "level-column": "level_columns",
    "follow-links": "follow_links: true",
}
_SPLIT: Final = r"--split ([\w.-]+)=([^\s;,]+)"
SHARD_FLAG: Final = re.compile(rf"(?<!\S)--({'|'.join(_FIELDS)})(?![\w-])")
"""An option of ``orchestrator data shard`` in a message of the converters."""
_ANSWER_TIMEOUT_S: Final = 300.0
_COUNTING: Final = "label spaces could not be counted"
_MOST_ACCEPTED: Final = 1000
"""Networks that the user's cache remembers, the newest: a large sweep has dozens."""
_LOOK_AT_CODE: Final = "look at what their packages do when they are imported"


def survey_datasets(spec: SweepSpec, tree: Tree) -> Surveys:
    """Read the descriptions of every external data set of a schema-valid sweep.

    Raises:
        SpecError: a store, shard or file is not there or not what it should be; one line each. Where a data set is
            declared in full, it need not be there, but what is there must be right.
    """
    surveys, shards, problems = {}, dict[str, _Shards](), []
    for name, entry in spec.datasets.items():
        if not isinstance(entry, ExternalShards | ConvertedShards):
            continue
        try:
            if isinstance(entry, ExternalShards):
                surveys[name], shards[name] = _survey(entry)
            else:
                surveys[name] = _list(entry)
        except _SurveyError as error:
            problem = tree.problem(("datasets", name, *error.path), error.message)
            if isinstance(entry, ExternalShards) and entry.is_declared and not error.is_damage:
                surveys[name] = Survey(splits=_splits(entry), missing=problem)
            else:
                problems.append(problem)
    for name, entry in spec.datasets.items():
        if isinstance(entry, MixtureSpec) and (message := _mixed_up(entry, shards)):
            problems.append(tree.problem(("datasets", name, "mixture"), message))
    if problems:
        raise SpecError(tuple(problems))
    return surveys


def _mixed_up(entry: MixtureSpec, shards: Mapping[str, _Shards]) -> str:
    """Why a mixture would be measured on what it is trained on; empty if it would not, as far as shards are known."""
    splits: dict[str, list[ListedShard]] = {}
    for part in entry.mixture:
        for split, found in shards.get(part, {}).items():
            splits.setdefault(split, []).extend(found)
    return next((f"split '{split}': {message}" for split, message in not_held_out(splits).items()), "")


def require_datasets(sweep: ResolvedSweep) -> None:
    """Refuse to run a sweep that can only be planned. Raises ``SpecError``: a data set is declared, but not there."""
    missing = [dataset.missing for dataset in sweep.datasets.values() if dataset.missing]
    if missing:
        raise SpecError(tuple(f"{line}; the sweep can be planned without the data, but not run" for line in missing))


class _SurveyError(Exception):
    def __init__(self, path: TreePath, message: str, *, is_damage: bool) -> None:
        super().__init__(path, message)
        self.path, self.message, self.is_damage = path, message, is_damage


def _survey(entry: ExternalShards) -> tuple[Survey, _Shards]:
    """What is known of the data set, and its shards."""
    if entry.from_:
        described = _at(("from",), lambda: read_dataset_file(entry.from_))
        if problem := held_out_problem(described.splits):
            raise _SurveyError(("from",), problem, is_damage=True)
        uri = entry.classes or f"{entry.from_.rstrip('/')}/{CLASSES_FILE}"
        rows, digest = _at(("classes",) if entry.classes else ("from",), lambda: read_class_table(uri))
        found = Survey(described=described, class_table=rows, classes_uri=uri, classes_sha256=digest)
        return found, _described(described, entry.from_.rstrip("/"))
    splits = _splits(entry)
    listed = {split: _at(("shards", split), _lister(patterns)) for split, patterns in splits.items()}
    if shared := not_held_out(listed):
        split, message = next(iter(shared.items()))
        raise _SurveyError(("shards", split), message, is_damage=True)
    listing = "" if entry.digest else listing_digest(listed)
    if not entry.classes:
        return Survey(listing=listing, splits=splits), listed
    rows, digest = _at(("classes",), lambda: read_class_table(entry.classes))
    found = Survey(listing=listing, splits=splits, class_table=rows, classes_uri=entry.classes, classes_sha256=digest)
    return found, listed


def _described(described: DatasetFile, folder_uri: str) -> _Shards:
    """Where its shards lie; nobody looked at their versions."""
    place = partial(ListedShard, store_uri=folder_uri, version="")
    return {
        split: [place(name=shard.name, object_name=shard.name, size_bytes=shard.size_bytes) for shard in shards]
        for split, shards in described.splits.items()
    }


def _list(entry: ConvertedShards) -> Survey:
    arguments = with_absolute_paths(source_arguments(entry.convert))
    if entry.is_declared:
        return Survey(source=arguments)
    try:
        return Survey(source=arguments, listed=ask_listing(arguments))
    except UserError as error:
        raise _SurveyError(("convert", "source"), str(error), is_damage=True) from error


def _splits(entry: ExternalShards) -> dict[str, tuple[str, ...]]:
    return {
        split: (patterns,) if isinstance(patterns, str) else tuple(patterns) for split, patterns in entry.shards.items()
    }


def _lister(patterns: tuple[str, ...]) -> Callable[[], Sequence[ListedShard]]:
    return lambda: list_shards(patterns)


def _remedy(path: TreePath, message: str) -> str:
    """What to do where the objects of a data set are not there."""
    folder = Path(message.rpartition("file://")[2])
    if path == ("from",) and folder.is_dir():
        return (
            "the folder holds no shards. For a folder of images, `orchestrator init --from FOLDER` writes a sweep, and "
            "convert: {format: imagefolder, source: FOLDER} reads it here"
        )
    return "check the path or URI (`orchestrator data shard` and `orchestrator data index` print the entry)"


def _at(path: TreePath, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except (StorageError, BadDataError) as error:
        message = str(error)
        # The reader's message is about a store; here it must name the data set.
        if message.startswith("store "):
            message = message.replace("store", "data set", 1)
        if isinstance(error, NotFoundError):
            message += f"; {_remedy(path, message)}"
        raise _SurveyError(path, message, is_damage=isinstance(error, BadDataError)) from error


# --------------------------------------------------------------------------------------------------- sources to convert


def with_absolute_paths(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as jobs need them, which run in other directories."""
    return {**arguments, **{name: _absolute(arguments[name]) for name in _PATHS if arguments[name]}}


def ask_listing(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What a source holds: ``listing``, ``num_samples``, ``num_classes``, ``levels``, ``multi_label``, ``classes``.

    Raises:
        UserError: it is not there, does not fit the format, or cannot be listed in two hours.
    """
    late = f"{arguments['source']} was not listed within {_LISTING_TIMEOUT_S:g} s; declare convert.listing, or convert"
    try:
        return ask(LISTING, dict(arguments), limit_s=_LISTING_TIMEOUT_S)
    except LateAnswerError as error:
        raise UserError(f"{late} it with `orchestrator data shard`") from error
    except NoAnswerError as error:
        raise UserError(f"the source cannot be listed: {_in_fields(str(error))}") from error


def _in_fields(message: str) -> str:
    """A message of the converters, with the flags of ``orchestrator data shard`` replaced by fields of the sweep."""
    # Splits that follow each other are one field: a second field of the same name would replace the first.
    message = re.sub(rf"{_SPLIT}(?: {_SPLIT})*", lambda run: _splits_field(run.group()), message)
    return SHARD_FLAG.sub(lambda flag: _FIELDS[flag.group(1)], message)


def _splits_field(flags: str) -> str:
    places = (f"{split}: {place}" for split, place in re.findall(_SPLIT, flags))
    return f"splits: {{{', '.join(places)}}}"


def _absolute(path: str) -> str:
    return str(Path(path.removeprefix("file://")).absolute())


# ---------------------------------------------------------------------------------------------- classes of label spaces


def count_classes(dataset: Dataset, spaces: Sequence[Definition], files: Mapping[str, str]) -> Sequence[Counted]:
    """See ``CountClasses``. Raises ``UserError``: the data plane does not answer."""
    # Jobs run in other directories, on other machines: paths become absolute here.
    places = {role: place if "://" in place else str(Path(place).resolve()) for role, place in files.items()}
    request = CountRequest(
        dataset=table_of(dataset), num_train=dataset.num_train or 0, spaces=list(spaces), files=places
    )
    return [Counted(**counted, files=places) for counted in ask_labels(COUNT, request)["counted"]]


def read_table(dataset: Dataset) -> Sequence[Mapping[str, Any]]:
    """The class table of a built-in data set. Raises ``UserError``: the data plane does not answer."""
    answer: TableAnswer = ask_labels(TABLE, TableRequest(dataset=table_of(dataset)))
    return answer["rows"]


def table_of(dataset: Dataset) -> dict[str, Any]:
    """How the data plane gets the class table of a data set, or that nobody knows its classes yet (``unlisted``)."""
    if dataset.location or dataset.components or dataset.listing:
        unlisted = {"unlisted": True} if dataset.uncounted else {}
        return {"rows": dataset.class_table, "num_classes": dataset.num_classes, **unlisted}
    return {"builtin": dataset.parameters}


def check_plugins(uses: Sequence[PluginUse]) -> Sequence[PluginProblem]:
    """See ``CheckPlugins``. Raises ``UserError``: the data plane does not answer."""
    return _ask(PLUGINS, PluginRequest(uses=list(uses)), "plug-ins could not be checked", _LOOK_AT_CODE)["problems"]


def check_models(models: Sequence[Mapping[str, Any]]) -> Sequence[ModelProblem]:
    """See ``CheckModels``; asked once for each network. Raises ``UserError``: the data plane does not answer."""
    texts = [json.dumps(model, sort_keys=True) for model in models]
    # Cells of a sweep repeat a network, and other sweeps and other cells of it share it: each is known by itself.
    unknown = [text for text in dict.fromkeys(texts) if text not in _ANSWERS and not _is_accepted(text)]
    if unknown:
        _ask_about_models(unknown)
    return [
        ModelProblem(model=number, path=problem["path"], message=problem["message"])
        for number, text in enumerate(texts)
        for problem in _ANSWERS.get(text, ())
    ]


_ANSWERS: Final[dict[str, list[ModelProblem]]] = {}
"""Problems of each network that this process has asked about. Refusals are in no file: who reads one changes it."""


def _ask_about_models(models: Sequence[str]) -> None:
    request = ModelsRequest(models=[json.loads(model) for model in models])
    failed, hint = "arguments of models could not be checked", "remove model.kwargs, or try again"
    problems = _ask(MODELS, request, failed, hint)["problems"]
    for number, model in enumerate(models):
        _ANSWERS[model] = [problem for problem in problems if problem["model"] == number]
        if not _ANSWERS[model]:
            _remember_accepted(model)


def _is_accepted(model: str) -> bool:
    try:
        found = _accepted_model_file(model).lstat()
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def _remember_accepted(model: str) -> None:
    with suppress(OSError, RuntimeError):  # a home that cannot be written costs the next command some seconds
        file = _accepted_model_file(model)
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))  # EXCL follows no link
        # Each release of ours, timm and torch makes new names, and those of earlier ones are never looked for again.
        oldest_first = sorted(file.parent.iterdir(), key=lambda known: known.lstat().st_mtime_ns)
        for known in oldest_first[:-_MOST_ACCEPTED]:
            known.unlink()


def _accepted_model_file(model: str) -> Path:
    """An empty file in the user's cache, which says that this network was built once without a problem.

    Its name is a digest of all that the verdict depends on: the network, the releases that build it, and our code.
    """
    releases = [f"{package}=={version(package)}" for package in ("timm", "torch")]
    digest = sha256("\n".join([model, *releases, package_digest()]).encode()).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # to be ignored, says the specification of XDG's variables
        cache = Path.home() / ".cache"
    return cache / "pretraining-orchestrator" / "accepted-models" / digest


def check_simulations(simulations: Sequence[Mapping[str, Any]]) -> SimulationsAnswer:
    """The data plane's check of simulations and their parameters. Raises ``UserError``: it does not answer."""
    request = SimulationsRequest(simulations=[*simulations])
    return _ask(SIMULATIONS, request, "simulations could not be checked", _LOOK_AT_CODE)


def ask_labels(question: Question[Asked, Told], request: Asked, task: str = _COUNTING) -> Told:
    """The data plane's answer about label spaces. Raises ``UserError`` with ``task``, which failed, and the reason."""
    return _ask(question, request, task, "look at the files and images they name")


def _ask(question: Question[Asked, Told], request: Asked, task: str, hint: str) -> Told:
    try:
        return ask(question, request, limit_s=_ANSWER_TIMEOUT_S)
    except LateAnswerError as error:
        raise UserError(f"{task} within {_ANSWER_TIMEOUT_S:g} s; {hint}") from error
    except NoAnswerError as error:
        raise UserError(f"{task}: {error}") from error
