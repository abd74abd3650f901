"""``orchestrator labels``: shows the label spaces of a sweep or data set. The data plane reads the data."""

from __future__ import annotations

import csv
import fnmatch
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from rich.table import Table
from rich.tree import Tree

from orchestrator.cli.arguments import ScaleOption, scale_name
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.data_plane import HIERARCHY, SHOW, HierarchyRequest, ShowRequest
from orchestrator.core.errors import UserError
from orchestrator.core.suggest import did_you_mean
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.first_sweep import quoted, with_label_entry
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import say
from orchestrator.storage.artifacts import is_committed
from orchestrator.storage.dataset_files import (
    CLASSES_FILE,
    DATASET_FILE,
    level_counts,
    level_problem,
    read_class_table,
    read_dataset_file,
)
from orchestrator.storage.files import rewrite_text
from orchestrator.storage.open import is_initialised, open_store
from orchestrator.storage.protocol import is_name
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.survey import ask_labels, table_of
from orchestrator.sweepfile.values import ResolvedSweep

labels = typer.Typer(
    help="Show label spaces; give classes a hierarchy.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_MAX_CHILDREN = 12  # of a node of the tree; the rest is a number


@labels.command()
def show(
    reference: Annotated[str, typer.Argument(metavar="SWEEP|DATASET", help="Sweep file or name, or folder of shards.")],
    *,
    dataset: Annotated[str, typer.Option(help="Data set of the sweep; default: all.")] = "",
    target: Annotated[
        list[str] | None, typer.Option(help="Label space to compare with; default: the sweep's targets.")
    ] = None,
    space: Annotated[
        list[str] | None, typer.Option(metavar="NAME|GLOB", help="Show and plot only these label spaces; default: all.")
    ] = None,
    scale: ScaleOption = None,
    tree: Annotated[str, typer.Option(metavar="ENTRY", help="Print the tree of the label spaces of one entry.")] = "",
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Write a plot of class sizes to this file (png, svg, pdf); of several data sets one each, FILE-NAME."
        ),
    ] = None,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Show the classes of each label space: number, sizes, entropy, and whether each is part of one target class."""
    folder = _folder_uri(reference)
    if folder and (dataset or scale):
        raise typer.BadParameter("--dataset and --scale are for sweeps, and this is a folder of shards; leave them out")
    requests = _of_folder(folder, target) if folder else _of_sweep(reference, scale_name(scale), dataset, target, tree)
    requests = _only(requests, space) if space else requests
    if target:
        _check_targets(requests, target)
    found = []
    for name, request in requests.items():
        # One plot for each data set.
        file = plot.with_stem(f"{plot.stem}-{name}") if plot and len(requests) > 1 else plot
        asked = {"plot": str(file.resolve()) if file else "", "parents": output is not DocumentForm.TABLE}
        found.append(_described(name, cast("ShowRequest", request | asked)))
    if output is DocumentForm.YAML:
        print_document(found, output)
        return
    if output is DocumentForm.JSON:
        # Not indented: parents of 20,000 classes at 20 levels are a line for each otherwise.
        typer.echo(json.dumps(found))
        return
    for looked in found:
        stdout_console().print(_table(looked))
        if tree and looked["tree"]:
            stdout_console().print(_drawn(tree, looked["tree"], looked["lemmas"]))


@labels.command()
def hierarchy(
    reference: Annotated[str, typer.Argument(metavar="SWEEP|DATASET", help="Sweep file, or folder of shards.")],
    source: Annotated[
        str,
        typer.Argument(
            help="A table of the classes and their parents (csv, json, parquet), a folder with the classes in nested "
            "folders, or `wordnet`: by the classes' synsets or names."
        ),
    ],
    *,
    dataset: Annotated[str, typer.Option(help="Data set of the sweep; default: its only one.")] = "",
    out: Annotated[Path, typer.Option(help="Table to write.")] = Path("hierarchy.csv"),
    add: Annotated[bool, typer.Option("--add", help="Add the levels to the sweep file, too.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the table if it exists.")] = False,
    wordnet: Annotated[str, typer.Option(help="Folder of WordNet's data.noun; default: where packages put it.")] = "",
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Give the classes of a data set levels: write a table of them, show their tree, and print what the sweep says."""
    folder = _folder_uri(reference)
    if add and folder:
        raise typer.BadParameter("levels are added to a sweep file, and this is a folder of shards; name the sweep")
    if add and not Path(reference).is_file():
        raise typer.BadParameter(f"{reference} is no file here that levels could be added to; leave --add out")
    name, table = _dataset_of(reference, folder, dataset)
    request = HierarchyRequest(dataset=table, source=source, wordnet=wordnet)
    found = ask_labels(HIERARCHY, request, "the hierarchy could not be made")
    start = Path(reference).absolute().parent if Path(reference).is_file() else Path.cwd()
    place = os.path.relpath(out.absolute(), start)
    if refused := [level for level in found["levels"] if not is_name(level)]:
        message = f"{source}: no job can have the name of the level {refused[0]!r}; rename the column, with letters, "
        raise UserError(f"{message}digits and ._=@+,#~- alone")
    keys = "" if found["key"] == "name" else f", key: {found['key']}, class_key: {found['key']}"
    levels = ", ".join(map(quoted, found["levels"]))
    entry = f"hierarchy: {{dataset: {quoted(name)}, taxonomy: {{table: {quoted(place)}, levels: [{levels}]{keys}}}}}"
    added = with_label_entry(Path(reference).read_text(encoding="utf-8"), reference, entry) if add else ""
    _write_rows(out, found["rows"], force=force)
    if add:
        try:
            rewrite_text(Path(reference), added)
        except OSError as error:
            message = f"{reference} cannot be written: {error.strerror}; the table is there, add to labels: {entry}"
            raise UserError(message) from error
    if output is not DocumentForm.TABLE:
        print_document({**found, "table": str(out), "entry": entry}, output)
        return
    paths = [{"path": [row[level] for level in found["levels"]] + [row["name"]], "num": 1} for row in found["rows"]]
    stdout_console().print(_drawn(f"{name}: classes", paths, {}))
    for note in found["notes"]:
        say(f"note: {note}")
    say(f"Wrote {out}.")
    if add:
        say(f"Added to {reference}: {entry}")
    else:
        typer.echo(f'labels:\n  {entry}\npretrain:\n  labels: ["hierarchy/*", ...]')


def _dataset_of(reference: str, folder: str, dataset: str) -> tuple[str, dict[str, Any]]:
    """Name of a data set, and how the data plane gets its class table."""
    if folder:
        rows, _ = read_class_table(f"{folder}/{CLASSES_FILE}")
        return dataset or "my-data", {"rows": rows, "num_classes": len(rows)}
    sweep = load_sweep(reference)[0]
    if dataset and dataset not in sweep.datasets:
        raise typer.BadParameter(f"the sweep has no data set {dataset!r}; it has {', '.join(sweep.datasets)}")
    if not dataset and len(sweep.datasets) > 1:
        raise typer.BadParameter(f"name one of the sweep's data sets: --dataset {' or '.join(sweep.datasets)}")
    name = dataset or next(iter(sweep.datasets))
    return name, table_of(sweep.datasets[name])


def _write_rows(path: Path, rows: Sequence[Mapping[str, str]], *, force: bool) -> None:
    """Write a table. Raises ``UserError`` if it cannot, or if another one would be lost and nobody forces that."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    try:
        if not force and path.exists() and path.read_bytes() != text.getvalue().encode():
            raise UserError(
                f"{path} is there already and would be lost; name another table with --out, or pass --force"
            )
        rewrite_text(path, text.getvalue())
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another place with --out") from error


def _described(name: str, request: ShowRequest) -> dict[str, Any]:
    described = ask_labels(SHOW, request)
    return {"dataset": name, **described}


def _only(requests: dict[str, dict[str, Any]], wanted: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The requests with the wanted spaces alone."""
    known = [item["name"] for request in requests.values() for item in request["spaces"]]
    for pattern in wanted:
        if not fnmatch.filter(known, pattern):
            raise typer.BadParameter(f"no label space matches {pattern!r}. {_listed(known)}")
    for request in requests.values():
        request["spaces"] = [
            item for item in request["spaces"] if any(fnmatch.fnmatchcase(item["name"], one) for one in wanted)
        ]
    return {name: request for name, request in requests.items() if request["spaces"]}


def _check_targets(requests: Mapping[str, dict[str, Any]], targets: Sequence[str]) -> None:
    """Refuse to compare with a space that is not shown, or not there at all."""
    known = [item["name"] for request in requests.values() for item in request["spaces"]]
    for name in targets:
        if name not in known:
            raise typer.BadParameter(
                f"no label space that is shown has the name of --target {name!r}. {_listed(known)}"
            )


def _listed(known: Sequence[str]) -> str:
    names = ", ".join(known) or "none"
    return f"Spaces made of clusters can be shown once a run has made them. Known: {names}"


def _folder_uri(reference: str) -> str:
    """The URI of a folder of shards; empty if the reference is a sweep."""
    if "://" in reference:
        return reference.rstrip("/")
    return Path(reference).resolve().as_uri() if (Path(reference) / DATASET_FILE).is_file() else ""


def _of_folder(uri: str, targets: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Every level of the class table at which all classes have a value, coarse to fine.

    They are compared with ``targets``, or with the coarsest one.
    """
    described, (rows, _) = read_dataset_file(uri), read_class_table(f"{uri}/{CLASSES_FILE}")
    counts = level_counts(rows)
    problems = {level: level_problem(rows, level) for level, count in counts.items() if count > 1}
    for problem in filter(None, problems.values()):
        say(f"note: a level is left out: {problem}")
    levels = sorted((level for level, problem in problems.items() if not problem), key=counts.__getitem__)
    if not levels:
        why = f"{CLASSES_FILE} has no level at which every class has a value, and not all the same"
        say(
            f"note: there is no label space to show: {why}. Complete it, or make levels for a sweep: orchestrator "
            f"labels hierarchy {uri} wordnet (or a table of the classes' parents in place of wordnet)"
        )
    return {
        uri: {
            "dataset": {"rows": rows, "num_classes": described.num_classes},
            "num_train": described.num_samples("train"),
            "spaces": [{"name": level, "space": {"hierarchy": level}} for level in levels],
            "files": {},
            "targets": list(dict.fromkeys(targets or levels[:1])),
            "tree": levels,
            "index": {},
        }
    }


def _of_sweep(
    reference: str, scale: str, dataset: str, targets: Sequence[str] | None, tree: str
) -> dict[str, dict[str, Any]]:
    """A request for each data set."""
    sweep = load_sweep(reference, scale=scale)[0]
    used = list(dict.fromkeys(space.dataset for space in sweep.labels.values()))
    if dataset and dataset not in used:
        raise typer.BadParameter(f"no label space is of a data set {dataset!r}; there are {', '.join(used)}")
    entries = [space.entry for space in sweep.labels.values() if not dataset or space.dataset == dataset]
    if tree and tree not in entries:
        raise typer.BadParameter(f"no label space is of an entry {tree!r}: {did_you_mean(tree, entries)}")
    requests: dict[str, dict[str, Any]] = {}
    made = _made_of_clusters(sweep)
    for name in [dataset] if dataset else used:
        spaces = [space for space in sweep.labels.values() if space.dataset == name]
        levels = sorted((space for space in spaces if space.entry == tree), key=lambda space: space.num_classes)
        requests[name] = {
            "dataset": table_of(sweep.datasets[name]),
            "num_train": sweep.datasets[name].num_train,
            "spaces": [
                {
                    "name": space.name,
                    "space": space.space,
                    "made": made.get(f"labels/{space.name}", ""),
                    "files": dict(space.files),
                }
                for space in spaces
                if space.clustering is None or f"labels/{space.name}" in made
            ],
            "files": {},
            "targets": list(dict.fromkeys(targets or [item.target for item in sweep.transfer])),
            "tree": [space.name for space in levels],
            "index": _index(sweep, name),
        }
    return requests


def _made_of_clusters(sweep: ResolvedSweep) -> dict[str, str]:
    """Keys of the label maps that are made of clusters, if a run has made them; nothing is known of the others."""
    wanted = {f"labels/{space.name}" for space in sweep.labels.values() if space.clustering is not None}
    store_uri = Settings().store_uri(sweep)
    if not wanted or not is_initialised(store_uri):
        return {}
    jobs, store = build_plan(sweep, store_uri=store_uri).jobs, open_store(store_uri)
    return {job.name: job.key for job in jobs if job.name in wanted and is_committed(store, job.key)}


def _index(sweep: ResolvedSweep, dataset: str) -> dict[str, Any]:
    """Where the data set's index is, if a run has made it."""
    store_uri = Settings().store_uri(sweep)
    jobs = {job.name: job for job in build_plan(sweep, store_uri=store_uri).jobs}
    job = jobs.get(f"index/{dataset}")
    if job is None or not is_initialised(store_uri) or not is_committed(open_store(store_uri), job.key):
        return {}
    cache = Settings().home / "cache" / "labels"
    return {"store": store_uri, "key": job.key, "cache": str(cache), "location": dict(job.execution.data_location)}


def _table(looked: Mapping[str, Any]) -> Table:
    targets = list(dict.fromkeys(name for space in looked["spaces"] for name in space.get("nesting", {})))
    table = Table(title=f"{looked['dataset']}: {looked['counted']} per class", title_justify="left")
    table.add_column("label space")
    for heading in ("classes", "min", "median", "max", "empty", "entropy, bits"):
        table.add_column(heading, justify="right")
    for name in targets:
        table.add_column(f"mixes {name}", justify="right")
    for space in looked["spaces"]:
        nesting = space.get("nesting", {})
        mixing = ["" if name not in nesting else _mixing(nesting[name]) for name in targets]
        table.add_row(space["name"], str(space["num_classes"]), *_sizes(space), *mixing)
    return table


def _sizes(space: Mapping[str, Any]) -> list[str]:
    if "min" not in space:  # random ids have sizes once there are samples
        return ["-"] * 5
    sizes = [f"{space['min']}", f"{space['median']:g}", f"{space['max']}", f"{space['num_empty']}"]
    return [*sizes, f"{space['entropy_bits']:.2f}"]


def _mixing(nesting: Mapping[str, Any]) -> str:
    return "no" if nesting["refines"] else f"{100 * nesting['mixing']:.1f} %"


def _drawn(name: str, paths: Sequence[Mapping[str, Any]], lemmas: Mapping[str, str]) -> Tree:
    """The tree; class names that mean little to people have a lemma beside them."""
    root = Tree(f"{name} ({sum(path['num'] for path in paths)})")
    shown = [[f"{node} {lemmas[node]}" if node in lemmas else node for node in path["path"]] for path in paths]
    _grow(root, list(zip(shown, [path["num"] for path in paths], strict=True)))
    return root


def _grow(node: Tree, paths: Sequence[tuple[Sequence[str], int]]) -> None:
    below: dict[str, list[tuple[Sequence[str], int]]] = {}
    for path, num in paths:
        if path:
            below.setdefault(path[0], []).append((path[1:], num))
    for name, members in list(below.items())[:_MAX_CHILDREN]:
        _grow(node.add(f"{name} ({sum(num for _, num in members)})"), members)
    if len(below) > _MAX_CHILDREN:
        node.add(f"... {len(below) - _MAX_CHILDREN} more")
