"""Looks at external data sets when a sweep.yaml is loaded: the one place where the language reads object stores.

It reads small files (``dataset.json``, ``classes.json``) and listings, never shards; sources that are to be converted
are listed by the data plane. What it finds goes into the pure resolution as values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from orchestrator.core.errors import BadDataError, NotFoundError, SpecError, StorageError, UserError
from orchestrator.storage.dataset_files import CLASSES_FILE, DatasetFile, read_class_table, read_dataset_file
from orchestrator.storage.listing import list_shards, listing_digest
from orchestrator.sweepfile.list_source import ask_listing, source_arguments, with_absolute_paths
from orchestrator.sweepfile.model import Sweep
from orchestrator.sweepfile.parse.tree import Path, Tree
from orchestrator.sweepfile.schema import SweepSpec
from orchestrator.sweepfile.schema_datasets import ConvertedShards, ExternalShards

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found of one external data set."""

    described: DatasetFile | None = None
    """Its ``dataset.json``, for ``from``."""
    listing: str = ""
    """Digest of names, sizes and versions of its shards; empty where the digest of their content is known."""
    class_table: Sequence[Mapping[str, Any]] = ()
    classes_uri: str = ""
    """Empty: classes are numbers."""
    classes_sha256: str = ""
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """URI patterns of ``shards``."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """How the source of a conversion is listed."""
    listed: Mapping[str, Any] = field(default_factory=dict)
    """What the source of a conversion holds; empty: nobody looked, since its listing is declared."""
    missing: str = ""
    """Why the data set cannot be read, where it is declared in full; empty if it was."""


Surveys = Mapping[str, Survey]


def survey_datasets(spec: SweepSpec, tree: Tree) -> Surveys:
    """Look at every external data set of a schema-valid sweep.

    Raises:
        SpecError: a store, shard or file is not there or not what it should be; one line each. Where a data set is
            declared in full, it need not be there, but what is there must be right.
    """
    surveys, problems = {}, []
    for name, entry in spec.datasets.items():
        if not isinstance(entry, ExternalShards | ConvertedShards):
            continue
        try:
            surveys[name] = _survey(entry) if isinstance(entry, ExternalShards) else _list(entry)
        except _SurveyError as error:
            problem = tree.problem(("datasets", name, *error.path), error.message)
            if isinstance(entry, ExternalShards) and entry.is_declared and not error.is_damage:
                surveys[name] = Survey(splits=_splits(entry), missing=problem)
            else:
                problems.append(problem)
    if problems:
        raise SpecError(tuple(problems))
    return surveys


def require_datasets(sweep: Sweep) -> None:
    """What may only be planned is not run. Raises ``SpecError``: a data set is declared, but not there."""
    missing = [dataset.missing for dataset in sweep.datasets.values() if dataset.missing]
    if missing:
        raise SpecError(tuple(f"{line}; what is declared suffices to plan, but not to run" for line in missing))


class _SurveyError(Exception):
    def __init__(self, path: Path, message: str, *, is_damage: bool) -> None:
        super().__init__(path, message)
        self.path, self.message, self.is_damage = path, message, is_damage


def _survey(entry: ExternalShards) -> Survey:
    if entry.from_:
        described = _at(("from",), lambda: read_dataset_file(entry.from_))
        uri = entry.classes or f"{entry.from_.rstrip('/')}/{CLASSES_FILE}"
        rows, digest = _at(("classes",) if entry.classes else ("from",), lambda: read_class_table(uri))
        return Survey(described=described, class_table=rows, classes_uri=uri, classes_sha256=digest)
    splits = _splits(entry)
    listed = {split: _at(("shards", split), _lister(patterns)) for split, patterns in splits.items()}
    listing = "" if entry.digest else listing_digest(listed)
    if not entry.classes:
        return Survey(listing=listing, splits=splits)
    rows, digest = _at(("classes",), lambda: read_class_table(entry.classes))
    return Survey(listing=listing, splits=splits, class_table=rows, classes_uri=entry.classes, classes_sha256=digest)


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


def _lister(patterns: tuple[str, ...]) -> Callable[[], Sequence[Any]]:
    return lambda: list_shards(patterns)


def _at(path: Path, read: Callable[[], Found]) -> Found:
    try:
        return read()
    except (StorageError, BadDataError) as error:
        message = str(error)
        # The reader speaks of stores; here somebody wrote a data set.
        if message.startswith("store "):
            message = message.replace("store", "data set", 1)
        if isinstance(error, NotFoundError):
            message += "; check the URI (`orchestrator data shard` and `orchestrator data index` print the entry)"
        raise _SurveyError(path, message, is_damage=isinstance(error, BadDataError)) from error
