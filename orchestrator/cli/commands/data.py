"""``orchestrator data``: shards from published data sets, and their content. The data plane does the work."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.table import Table

from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.data_plane import (
    INDEX,
    SAMPLE,
    SHARD,
    STATS,
    VERIFY,
    Asked,
    ConvertRequest,
    IndexRequest,
    NoAnswerError,
    Question,
    SampleRequest,
    ShardPlaces,
    StatsRequest,
    Terminal,
    Told,
    VerifyRequest,
    ask,
)
from orchestrator.core.units import MIB, format_bytes
from orchestrator.planning.graph.data_checks import SPREAD_FIELD, ClassSpread, Shuffle
from orchestrator.services.terminal import say, stderr_console
from orchestrator.stack.children import bound_to_parent
from orchestrator.sweepfile.datasets import FORMATS_OF_FIELDS, ConversionSpec

data = typer.Typer(
    help="Convert data sets to WebDataset shards; index, verify and show shards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
Workers = Annotated[int, typer.Option("-j", "--workers", min=0, help="Processes; 0 = one per core.")]
Splits = Annotated[
    list[str] | None, typer.Option("--split", metavar="NAME=PLACE", help="One split, as NAME=PLACE; may be repeated.")
]
Folder = Annotated[
    str, typer.Argument(metavar="PLACE", help="Folder of shards with its dataset.json; path, file:// or s3:// URI.")
]
PlaceOrSplits = Annotated[
    str, typer.Argument(metavar="PLACE", help="Folder, tar or brace pattern of shards; or give each --split.")
]
Classes = Annotated[str, typer.Option(help="Class table (classes.json); default: the one in the folder of the shards.")]
NumClasses = Annotated[int, typer.Option(min=0, help="Number of classes, if there is no class table.")]
MultiLabel = Annotated[
    bool, typer.Option("--multi-label", help="Multi-label: a sample may have any number of classes.")
]


class Converter(StrEnum):
    """Published forms of data sets that can be converted."""

    IMAGEFOLDER = "imagefolder"
    IMAGENET1K = "imagenet1k"
    IMAGENET21K = "imagenet21k"
    INAT2021 = "inat2021"
    CIFAR10 = "cifar10"
    CIFAR100 = "cifar100"
    MNIST = "mnist"
    SVHN = "svhn"
    HUGGINGFACE = "huggingface"
    CSV = "csv"
    PARQUET = "parquet"


class BadSamplePolicy(StrEnum):
    """What bad samples do."""

    FAIL = "fail"
    REPLACE = "replace"


@data.command()
def shard(  # noqa: PLR0913 - one argument per option
    converter: Annotated[Converter, typer.Argument(help="Format of the source.")],
    source: Annotated[
        str,
        typer.Argument(help="Folder or file of the data set as it was published; huggingface: also a name on the hub."),
    ],
    destination: Annotated[str, typer.Argument(help="Folder for shards, class table and dataset.json; path or URI.")],
    *,
    split: Splits = None,
    val_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Fraction of each class to hold out as val.")
    ] = 0.0,
    shard_mib: Annotated[int, typer.Option(min=1, help="Size of a shard in MiB.")] = 256,
    shuffle: Annotated[bool, typer.Option(help="Write samples in random order, or one class after the other.")] = True,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the order and of the choice of held-out samples.")] = 0,
    workers: Workers = 0,
    labels: Annotated[str, typer.Option(help="imagenet1k: file with the classes of the validation images.")] = "",
    path_column: Annotated[str, typer.Option(help="csv, parquet: column with the paths of the images.")] = "path",
    label_column: Annotated[str, typer.Option(help="csv, parquet, huggingface: column with the labels.")] = "label",
    separator: Annotated[str, typer.Option(help="csv, parquet: separator between several labels of a sample.")] = "",
    level_column: Annotated[
        list[str] | None, typer.Option(help="csv, parquet, huggingface: column with a coarser level; may be repeated.")
    ] = None,
    root: Annotated[str, typer.Option(help="csv, parquet: folder to which relative paths are relative.")] = "",
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Follow links that lead out of the source.")
    ] = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Convert a published data set to shards. After an interruption, run the same command again to continue."""
    wanted = {
        "source": source,
        "splits": _pairs(split),
        "val_fraction": val_fraction,
        "seed": seed,
        "labels": labels,
        "path_column": path_column,
        "label_column": label_column,
        "separator": separator,
        "level_columns": level_column or [],
        "root": root,
        "follow_links": follow_links,
    }
    _refuse_unread(converter, wanted)
    write = {
        "destination_uri": destination,
        "shard_bytes": shard_mib * MIB,
        "shuffle": shuffle,
        "seed": seed,
        "num_processes": _num_processes(workers),
    }
    found = _run(SHARD, ConvertRequest(converter=converter.value, source=wanted, write=write))
    _show(found, output, f"datasets:\n  my-data: {{from: {found['uri']}}}")
    for note in found.get("notes", ()):
        say(f"note: {note}")


@data.command()
def index(  # noqa: PLR0913 - see shard
    place: PlaceOrSplits = "",
    *,
    split: Splits = None,
    classes: Classes = "",
    num_classes: NumClasses = 0,
    multi_label: MultiLabel = False,
    policy: Annotated[
        BadSamplePolicy, typer.Option(help="What to do with bad samples; replace: count them and leave them out.")
    ] = BadSamplePolicy.FAIL,
    budget: Annotated[float, typer.Option(min=0, max=1, help="Largest accepted share of bad samples.")] = 0.01,
    write: Annotated[bool, typer.Option("--write", help="Write a dataset.json into the folder of the shards.")] = False,
    workers: Workers = 0,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Read shards once and print samples, classes, bad samples, and the entry to paste into a sweep.yaml."""
    arguments: IndexRequest = {
        "target": _target(place, split, classes, num_classes, multi_label=multi_label),
        "policy": policy.value,
        "budget": budget,
        "write": write,
        "num_processes": _num_processes(workers),
    }
    found = _run(INDEX, arguments)
    found["warnings"] = [*found.get("warnings", ()), *_mixing_warnings(found)]
    _show(found, output, _yaml({"datasets": {"my-data": found["entry"]}}))
    for warning in found["warnings"]:
        say(f"warning: {warning}")
    if output is DocumentForm.TABLE and "val" not in found["splits"]:
        say(
            "note: a sweep needs a split 'val', and the digest is of all splits together: index them in one command, "
            "with --split train=... --split val=..."
        )


@data.command()
def verify(
    place: Folder,
    *,
    decode: Annotated[bool, typer.Option("--decode", help="Also decode every image.")] = False,
    workers: Workers = 0,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Read every shard and the class table, and compare them with the dataset.json beside them."""
    arguments: VerifyRequest = {
        "target": _target(place, None, "", 0),
        "decode": decode,
        "num_processes": _num_processes(workers),
    }
    found = _run(VERIFY, arguments)
    is_good = found["is_same"] and not found["num_bad"]
    verdict = "all shards are as recorded" if is_good else "there are differences"
    if not found["is_same_class_table"]:
        verdict = "there are differences: the class table is not the one that the shards were written with"
    _show(found, output, f"{verdict}; digest: {found['digest']}")
    raise typer.Exit(0 if is_good else 1)


@data.command()
def stats(place: Folder, *, output: DocumentOption = DocumentForm.TABLE) -> None:
    """Show the sizes of splits, levels and classes, without reading the shards."""
    found = _run(STATS, StatsRequest(place=place))
    _show(found, output, f"digest: {found['digest']}")


@data.command()
def sample(  # noqa: PLR0913 - see shard
    place: PlaceOrSplits = "",
    *,
    name: Annotated[str, typer.Option("--of", help="Split.")] = "train",
    num: Annotated[int, typer.Option("-n", "--num", min=1, help="How many.")] = 9,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random choice of shard and samples.")] = 0,
    key: Annotated[str, typer.Option(help="Only the sample with this key.")] = "",
    out: Annotated[str, typer.Option(help="Folder for the images and labels.json.")] = "",
    split: Splits = None,
    classes: Classes = "",
    num_classes: NumClasses = 0,
    multi_label: MultiLabel = False,
    output: DocumentOption = DocumentForm.TABLE,
) -> None:
    """Show a few samples, or write their images."""
    arguments: SampleRequest = {
        "target": _target(place, split, classes, num_classes, multi_label=multi_label),
        "split": name,
        "num_samples": num,
        "seed": seed,
        "key": key,
        "out": out,
    }

    found = _run(SAMPLE, arguments)
    if output is not DocumentForm.TABLE:
        print_document(found, output)
        return
    stdout_console().print(samples_table(found["samples"]))


def _run(question: Question[Asked, Told], request: Asked) -> Told:
    """Ask the data plane; its progress goes to stderr, and so does why it did not answer."""
    try:
        # As after Ctrl-C: it ends its own processes, and removes what they have not finished.
        return ask(
            question, request, terminal=Terminal.SHARED, wrap=lambda command: bound_to_parent(command, signal.SIGINT)
        )
    except NoAnswerError as error:
        say(f"error: {error}")
        raise typer.Exit(error.exit_code) from error


def _mixing_warnings(found: Mapping[str, Any]) -> list[str]:
    """Of the recipes' default shuffle; `plan` judges those of a sweep."""
    spread = found.get(SPREAD_FIELD, {}).get("train")
    complaint = ClassSpread.from_json(spread).complaint(Shuffle()) if spread else ""
    return [complaint] if complaint else []


def _show(found: dict[str, Any], output: DocumentForm, last_line: str) -> None:
    if output is not DocumentForm.TABLE:
        print_document(found, output)
        return
    for table in dataset_tables(found):
        stdout_console().print(table)
    if found.get("bad_samples"):
        stderr_console().print(bad_table(found["bad_samples"]))
    stdout_console().print(last_line, highlight=False, soft_wrap=True)


def _yaml(document: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(document, sort_keys=False, width=10_000, allow_unicode=True).rstrip()


def _target(
    place: str, split: Sequence[str] | None, classes: str, num_classes: int, *, multi_label: bool = False
) -> ShardPlaces:
    if bool(place) == bool(split):
        raise typer.BadParameter(
            "name the shards either by PLACE or by one --split NAME=PLACE for each split, not both"
        )
    return {
        "place": place,
        "splits": _pairs(split),
        "classes": classes,
        "num_classes": num_classes,
        "multi_label": multi_label,
    }


def _refuse_unread(converter: Converter, wanted: Mapping[str, Any]) -> None:
    """Refuse an option that the converter would pass over, with the name that it gives."""
    for fields, formats, why in FORMATS_OF_FIELDS:
        for field in fields if converter.value not in formats else ():
            if wanted[field] != ConversionSpec.model_fields[field].get_default(call_default_factory=True):
                option = "--level-column" if field == "level_columns" else f"--{field.replace('_', '-')}"
                raise typer.BadParameter(f"{option} has no effect on {converter.value}: {why}; leave it out")


def _pairs(texts: Sequence[str] | None) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in texts or ():
        name, _, place = text.partition("=")
        if not name or not place:
            raise typer.BadParameter(f"--split {text!r} is not NAME=PLACE, such as train=train_mini")
        if name in pairs:
            both = f"{pairs[name]} and {place}"
            raise typer.BadParameter(f"--split {name} is given twice, as {both}; name one place for each split")
        pairs[name] = place
    return pairs


def _num_processes(workers: int) -> int:
    return workers or len(os.sched_getaffinity(0))


def dataset_tables(found: Mapping[str, Any]) -> Iterator[Table]:
    """Splits; then, where they are known, sizes of classes by level."""
    table = Table(title=found["uri"], title_justify="left")
    table.add_column("split")
    for column in ("shards", "samples", "size"):
        table.add_column(column, justify="right")
    for split, sizes in found["splits"].items():
        size = format_bytes(sizes["size_bytes"])
        table.add_row(split, str(sizes["num_shards"]), f"{sizes['num_samples']:,}", size)
    table.caption, table.caption_justify = _classes(found), "left"
    yield table
    if found.get("samples_per_class"):
        yield _sizes_table(found["samples_per_class"])


def bad_table(bad_samples: Mapping[str, Any]) -> Table:
    """Bad samples by split and reason, with the first of each."""
    table = Table("split", "reason", "samples", "the first", title="Samples that cannot be used", title_justify="left")
    for split, reasons in bad_samples.items():
        for reason, found in reasons.items():
            table.add_row(split, reason, str(found["count"]), found["first"][0])
    return table


def samples_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One row per sample."""
    table = Table("shard", "key", "class", "name", "pixels", "size")
    for row in rows:
        classes, names = " ".join(map(str, row["classes"])), ", ".join(row["names"])
        size = f"{row['width']}x{row['height']}"
        table.add_row(row["shard"], row["key"], classes, names, size, format_bytes(row["length_bytes"]))
    return table


def _classes(found: Mapping[str, Any]) -> str:
    levels = ", ".join(f"{level} {count:,}" for level, count in found["levels"].items())
    kind = "multi-label, " if found["multi_label"] else ""
    return f"{kind}{found['num_classes']:,} classes" + (f"; levels: {levels}" if levels else "")


def _sizes_table(sizes: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Table:
    table = Table("split", "level", title="Samples per class", title_justify="left")
    columns = {"num_nodes": "classes", "min": "min", "median": "median", "max": "max", "empty": "without samples"}
    for title in columns.values():
        table.add_column(title, justify="right")
    for split, levels in sizes.items():
        for level, found in levels.items():
            table.add_row(split, level, *(f"{found[column]:,g}" for column in columns))
    return table
