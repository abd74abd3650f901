"""``init --from``: what is found in a folder, and that the sweep made of it is right."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
import yaml
from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

from orchestrator.cli.commands.init import init
from orchestrator.core.data_plane import LookAnswer, LookRequest, NoAnswerError
from orchestrator.core.errors import UserError
from orchestrator.services.first_sweep import first_sweep
from orchestrator.sweepfile import load_sweep
from tests.conversions import convert, fill, photo
from tests.golden_refusals import count_here
from tests.unit.test_convert_huggingface import FEATURES, save
from workloads.commands.look import look
from workloads.convert.listing import describe_conversion, list_source

RANKS = (
    "00000_Animalia_Chordata_Mammalia_Carnivora_Felidae_Felis_catus",
    "00001_Animalia_Chordata_Mammalia_Carnivora_Canidae_Canis_lupus",
    "00002_Plantae_Tracheophyta_Magnoliopsida_Fagales_Fagaceae_Quercus_robur",
)


def folders(root: Path, *names: str, num: int = 10) -> Path:
    return fill(root, {f"{name}/{n}.jpg": photo(n + 100 * k) for k, name in enumerate(names) for n in range(num)})


def cifar(root: Path) -> None:
    source = root / "cifar-100-binary"
    source.mkdir(parents=True)
    for split, num in (("train", 40), ("test", 8)):
        rows = [bytes([(n % 4) // 2, n % 4]) + np.full(3072, n, np.uint8).tobytes() for n in range(num)]
        (source / f"{split}.bin").write_bytes(b"".join(rows))
    (source / "fine_label_names.txt").write_text("a\nb\nc\nd\n")
    (source / "coarse_label_names.txt").write_text("x\ny\n")


def shards(root: Path) -> None:
    folders(root / "images", "a/b", "a/c", "d/e")
    convert("imagefolder", root / "images", root / "shards", val_fraction=0.2)


def bare_shards(root: Path) -> None:
    shards(root)
    (root / "shards" / "dataset.json").unlink()


def unnamed(root: Path) -> None:
    kinds: dict[str, list[Any]] = {
        name: [int(n % 3 == 2) for n in range(12)] for name in ("Super kind", "_kin", "2020")
    }
    kinds["gap"] = [None if n % 3 == 2 else n % 3 for n in range(12)]
    features = {"image": FEATURES["image"], "label": FEATURES["label"], **dict.fromkeys(kinds, FEATURES["kind"])}
    save(root, range(12), kinds, features)


def table(root: Path) -> None:
    """One of its columns follows from the label and joins classes."""
    names = ("cat", "dog", "elm", "oak")
    rows = [
        {"path": f"{n}.jpg", "label": name, "kind,latin": name < "e", "family": name[:2], "name": name, "size": n}
        for n, name in enumerate(names * 10)
    ]
    folders(root, "one", num=40)
    for n in range(40):
        (root / "one" / f"{n}.jpg").rename(root / f"{n}.jpg")
    pd.DataFrame(rows).to_csv(root / "train.csv", index=False)


CASES: dict[str, tuple[Callable[[Path], Any], str, str, list[str]]] = {
    "flat": (lambda root: folders(root, "cat", "dog", "elm", "oak"), "", "imagefolder", ["leaf"]),
    "nested": (lambda root: folders(root, "a/cat", "a/dog", "p/oak"), "", "imagefolder", ["depth1", "leaf"]),
    "splits": (
        lambda root: folders(root, "train/cat", "train/dog", "val/cat", "val/dog"),
        "",
        "imagefolder",
        ["leaf"],
    ),
    "inat": (
        lambda root: folders(root, *(f"{split}/{name}" for split in ("train_mini", "val") for name in RANKS)),
        "",
        "inat2021",
        ["kingdom", "phylum", "taxonomic_class", "order", "leaf"],
    ),
    "species": (
        lambda root: folders(root, *RANKS),
        "",
        "inat2021",
        ["kingdom", "phylum", "taxonomic_class", "order", "leaf"],
    ),
    "cifar": (cifar, "", "cifar100", ["superclass", "leaf"]),
    "saved": (lambda root: save(root, range(12)), "", "huggingface", ["kind", "leaf"]),
    "unnamed": (unnamed, "", "huggingface", ["_kin", "2020", "leaf"]),
    "table": (table, "", "csv", ["kind,latin", "leaf"]),
    "shards": (shards, "shards", "WebDataset shards", ["depth1", "leaf"]),
    "bare-shards": (bare_shards, "shards", "WebDataset shards", ["depth1", "leaf"]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("gpus", [0, 2])
def test_images_in_any_form_become_a_sweep_that_is_right(case: str, gpus: int, tmp_path: Path) -> None:
    make, below, form, levels = CASES[case]
    make(tmp_path / "data")
    (tmp_path / "studies").mkdir()
    with (
        chdir(tmp_path),
        patch("workloads.commands.look._num_gpus", lambda: gpus),
        patch("orchestrator.sweepfile.load.count_classes", count_here),
        patch("orchestrator.sweepfile.survey.ask_listing", lambda asked: describe_conversion(list_source(asked))),
    ):
        found: LookAnswer = look({"place": f"data/{below}".rstrip("/")})  # type: ignore[assignment]
        assert found["form"] == form
        text = first_sweep(found, f"data/{below}", str(tmp_path / "studies"), "studies/sweep.yaml", 8)
        assert "# Next:             orchestrator submit studies/sweep.yaml" in text
        for why in ("'Super kind', since no job can have this name", "'gap', since some classes have no value at it"):
            assert (f"# Left out: level {why}" in text) == (case == "unnamed")
        Path("studies/sweep.yaml").write_text(text)
        sweep, _ = load_sweep("studies/sweep.yaml")
    assert [name for name in sweep.labels if name.startswith("levels/")] == [f"levels/{level}" for level in levels]
    assert len(sweep.labels) > 1  # something to compare
    (dataset,) = sweep.datasets.values()
    assert dataset.has_val
    assert dataset.num_train >= yaml.safe_load(text)["pretrain"]["recipe"]["batch_size"] >= 2


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("others", "levels", "left_out"),
    [
        ({"taxonomic_class": "kind", "class": "number"}, ["taxonomic_class"], {}),
        ({"class": "number", "taxonomic_class": "kind"}, ["taxonomic_class"], {}),
        ({"taxonomic_class": "size", "class": "kind"}, ["class"], {}),
        (
            {"taxonomic_class": "kind", "class": "half"},
            ["taxonomic_class"],
            {"class": "of the column 'taxonomic_class'"},
        ),
        ({"leaf": "half", "family": "kind"}, ["family"], {"leaf": "means the classes themselves; rename its column"}),
        ({"leaf": "number", "family": "kind"}, ["family"], {}),
    ],
)
def test_level_columns_of_a_table_whose_names_mean_something_else(
    suffix: str, others: dict[str, str], levels: list[str], left_out: dict[str, str], tmp_path: Path
) -> None:
    """A level is lost for its name only if another one has it, and that is said in the sweep."""
    fill(tmp_path, {f"{n}.jpg": photo(0) for n in range(40)})
    values = {"number": [n % 4 for n in range(40)], "kind": [n % 4 // 3 for n in range(40)]}
    values |= {"half": [n % 4 // 2 for n in range(40)], "size": list(range(40))}
    rows = {"path": [f"{n}.jpg" for n in range(40)], "label": [f"c{n % 4}" for n in range(40)]}
    table = pd.DataFrame({**rows, **{name: values[what] for name, what in others.items()}})
    (table.to_csv if suffix == "csv" else table.to_parquet)(tmp_path / f"train.{suffix}", index=False)
    found: LookAnswer = look({"place": str(tmp_path)})  # type: ignore[assignment]
    assert found["entry"]["convert"]["level_columns"] == levels
    assert found["levels"] == {"taxonomic_class" if name == "class" else name: 2 for name in levels}
    text = first_sweep(found, str(tmp_path), str(tmp_path), "sweep.yaml", 8)
    lines = [line for line in text.splitlines() if "# Left out" in line]
    assert len(lines) == len(left_out)
    for line, (name, why) in zip(lines, left_out.items(), strict=True):
        assert line.startswith(f"  # Left out: level '{name}', since ")
        assert why in line


def test_what_the_converters_lack_is_named_by_the_command_that_takes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.csv").write_text("file,label\n0.jpg,a\n")

    def ask(_: object, request: LookRequest, **__: object) -> dict[str, Any]:
        try:
            return look(request)
        except UserError as error:
            raise NoAnswerError(str(error)) from error

    monkeypatch.setattr("orchestrator.core.data_plane.ask", ask)
    with pytest.raises(UserError, match=r"and --level-column \(options of `orchestrator data shard`, of whose shards"):
        init(tmp_path / "sweep.yaml", source=str(tmp_path / "list.csv"))
    with pytest.raises(UserError, match=r"name the folder that holds the images$"):
        init(tmp_path / "sweep.yaml", source=__file__)


def test_folder_without_images_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folders(tmp_path / "photos", "cat", "dog") / "elm").mkdir()
    monkeypatch.setattr("orchestrator.core.data_plane.ask", lambda _, request, **__: look(request))
    with chdir(tmp_path):
        init(Path("sweep.yaml"), source="photos")
    assert "note: 1 empty folder without a class: elm; " in capsys.readouterr().err


def test_what_has_no_images_or_no_validation_images_is_said(tmp_path: Path) -> None:
    fill(tmp_path, {"empty/readme.txt": b"", "list.txt": b""})
    with pytest.raises(UserError, match="has no images in class folders, and no data set in a form that is known"):
        look({"place": str(tmp_path / "empty")})
    fill(tmp_path, {"tars/train-000000.tar": b""})
    with pytest.raises(UserError, match=r"holds tars and no classes\.json"):
        look({"place": str(tmp_path / "tars")})
    with pytest.raises(UserError, match="is a file that is not a table"):
        look({"place": str(tmp_path / "list.txt")})
    with pytest.raises(UserError, match="does not exist"):
        look({"place": str(tmp_path / "phtos")})
    folders(tmp_path / "images", "a", "b")
    convert("imagefolder", tmp_path / "images", tmp_path / "shards")
    with pytest.raises(UserError, match="no shards of a split 'val'"):
        look({"place": str(tmp_path / "shards")})


@pytest.mark.parametrize(
    "column",
    ["caption", "numbering", "damaged", "leaf"],
    ids=["too-long", "of-labels-that-are-one", "unreadable", "named-as-the-classes-themselves"],
)
def test_columns_of_a_table_that_are_no_levels_hinder_nothing(
    column: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parquet with labels `07` and `7`, which are one class, and a level that the converter reads."""
    fill(tmp_path, {f"{n}.jpg": photo(n) for n in range(40)})
    labels = [f"{n % 5:02}" if n < 20 else str(n % 5) for n in range(40)]
    rows = {"path": [f"{n}.jpg" for n in range(40)], "label": labels, "kind": [str(n % 5 > 2) for n in range(40)]}
    values = {"caption": [f"{n}" * 1000 for n in range(40)], "numbering": [str(len(text)) for text in labels]}
    values["leaf"] = rows["kind"]
    pd.DataFrame({**rows, column: values.get(column, labels)}).to_parquet(tmp_path / "train.parquet")
    monkeypatch.setattr("workloads.convert.tabular._MAX_GROUP_BYTES", 10_000)
    if column == "damaged":
        chunk = ParquetFile(tmp_path / "train.parquet").metadata.row_group(0).column(3)
        with (tmp_path / "train.parquet").open("r+b") as file:
            file.seek(chunk.dictionary_page_offset)
            file.write(b"\xff" * chunk.total_compressed_size)
    found = look({"place": str(tmp_path)})
    assert found["num_classes"] == 5
    assert found["levels"] == ({} if column == "damaged" else {"kind": 2})
