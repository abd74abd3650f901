"""Taxonomies from tables and names: counts, nesting, and tables that do not fit."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from orchestrator.core.errors import BadDataError, UserError
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import ClassLabels
from workloads.labels.rules import make_label_map
from workloads.labels.taxonomy import check_chains, folder_rows, read_table, violations

RANKS = ("supercategory", "kingdom", "phylum", "class", "order", "family", "genus")
COUNTS = {"supercategory": 2, "kingdom": 1, "phylum": 2, "class": 3, "order": 6, "family": 12, "genus": 24}
NUM_SPECIES, NUM_EPITHETS = 48, 10
PUBLISHED = {"supercategory": 11, "phylum": 13, "class": 51, "order": 273, "family": 1103, "genus": 4884}
"""Nodes of iNaturalist 2021, as the paper's tables give them; 6,485 are the distinct epithets."""
NUM_PUBLISHED_EPITHETS = 6485


def inaturalist() -> dict[str, Any]:
    """A file as iNaturalist 2021 publishes them; epithets repeat across genera."""
    categories = []
    for number in range(NUM_SPECIES):
        row = {rank: f"{rank}{number * count // NUM_SPECIES}" for rank, count in COUNTS.items()}
        epithet = f"epithet{number % NUM_EPITHETS}"
        binomial = f"{row['genus']} {epithet}"
        folder = "_".join([f"{number:05d}", *(row[rank] for rank in RANKS[1:]), epithet])
        categories.append(
            {"id": number, **row, "specific_epithet": epithet, "name": binomial, "image_dir_name": folder}
        )
    return {"info": {}, "images": [], "categories": categories, "annotations": []}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "train.json"
    file.write_text(json.dumps(inaturalist()))
    return file


CLASSES = [{"class": number, "name": row["name"]} for number, row in enumerate(inaturalist()["categories"])]


def level(table: Path, name: str, classes: list[dict[str, Any]] = CLASSES, **rule: Any) -> ClassLabels:
    definition = {"level": name, "digest": "", "key": "name", "class_key": "name", **rule}
    found = make_label_map({"taxonomy": definition}, classes, num_train=0, files={"table": str(table)})
    assert isinstance(found, ClassLabels)
    return found


@pytest.mark.parametrize(
    ("name", "num_classes"),
    [
        ("supercategory", 2),
        ("phylum", 2),
        ("taxonomic_class", 3),
        ("order", 6),
        ("family", 12),
        ("genus", 24),
        ("specific_epithet", NUM_EPITHETS),
        ("species", NUM_SPECIES),
    ],
)
def test_taxonomy_levels_of_an_inaturalist_file_have_its_counts(table: Path, name: str, num_classes: int) -> None:
    assert level(table, name).num_classes == num_classes


def test_taxonomy_of_one_kingdom_is_refused(table: Path) -> None:
    with pytest.raises(UserError, match="single class 'kingdom0'"):
        level(table, "kingdom")


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_taxonomy_any_table_gives_the_same_levels(table: Path, tmp_path: Path, suffix: str) -> None:
    rows = inaturalist()["categories"][::-1]  # another order of rows changes nothing
    file = tmp_path / f"table.{suffix}"
    if suffix == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    elif suffix == "parquet":
        pd.DataFrame(rows).to_parquet(file)
    else:
        file.write_text(json.dumps(rows))
    for name in ("order", "species"):
        assert np.array_equal(level(file, name).targets, level(table, name).targets)
        assert level(file, name).class_names == level(table, name).class_names


def test_taxonomy_families_refine_orders_but_epithets_do_not(table: Path) -> None:
    rows, _ = read_table(str(table))
    assert violations(rows, "order", "family") == []
    found = violations(rows, "order", "specific_epithet")
    assert len(found) == NUM_EPITHETS
    assert found[0].startswith("epithet0 (order0, order1")


def test_taxonomy_level_that_is_no_function_of_its_child_is_listed(table: Path) -> None:
    document = inaturalist()
    document["categories"][7]["family"] = "family11"
    table.write_text(json.dumps(document))
    definition = {"level": "order", "digest": "", "key": "name", "class_key": "name", "chain": ["family", "order"]}
    inputs = LabelInputs(classes=CLASSES, num_train=0, files={"table": str(table)})
    with pytest.raises(
        UserError, match=r"'order' is not a function of 'family': 1 of its nodes.*family11 \(order0, order5\)"
    ):
        check_chains({"taxonomy": definition}, inputs)
    check_chains({"taxonomy": {**definition, "chain": ["order"]}}, inputs)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
@pytest.mark.parametrize("blank", [None, "", "  ", float("nan")])
def test_taxonomy_class_without_a_node_is_named(tmp_path: Path, suffix: str, blank: object) -> None:
    """An empty cell is no node of its own, whatever the file calls it."""
    rows = [{"name": f"kind{number}", "order": f"order{number % 2}", "rank": number % 3} for number in range(9)]
    rows[4]["order"] = rows[7]["rank"] = blank
    file = tmp_path / f"table.{suffix}"
    frame = pd.DataFrame(rows)
    if suffix == "csv":
        frame.to_csv(file, index=False)
    elif suffix == "parquet":
        frame.astype({"rank": "string"} if isinstance(blank, str) else {}).to_parquet(file)
    else:
        file.write_text(json.dumps(rows))
    classes = [{"class": number, "name": row["name"]} for number, row in enumerate(rows)]
    for name, number in (("order", 4), ("rank", 7)):
        expected = rf"class {number} \('kind{number}'\) has no value at level '{name}'; complete the class table"
        with pytest.raises(UserError, match=expected):
            level(file, name, classes)
        definition = {"level": name, "digest": "", "key": "name", "class_key": "name", "chain": [name, "name"]}
        with pytest.raises(UserError, match=expected):
            check_chains(
                {"taxonomy": definition}, LabelInputs(classes=classes, num_train=0, files={"table": str(file)})
            )


def _written(rows: list[dict[str, Any]], file: Path) -> Path:
    frame = pd.DataFrame(rows)
    if file.suffix == ".csv":
        frame.to_csv(file, index=False)
    elif file.suffix == ".parquet":
        frame.to_parquet(file)
    else:
        file.write_text(json.dumps(rows))
    return file


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_taxonomy_class_without_an_epithet_has_no_species(tmp_path: Path, suffix: str) -> None:
    rows: list[dict[str, Any]] = [
        {"name": f"n{number}", "genus": "Rosa", "specific_epithet": f"e{number}"} for number in range(4)
    ]
    rows[1] |= {"specific_epithet": None}
    rows[2] |= {"genus": None, "specific_epithet": None}
    classes = [{"class": number, "name": row["name"]} for number, row in enumerate(rows)]
    with pytest.raises(UserError, match=r"class 1 \('n1'\), 2 \('n2'\) have no value at level 'species'"):
        level(_written(rows, tmp_path / f"table.{suffix}"), "species", classes)


@pytest.mark.parametrize("suffix", ["csv", "parquet", "json"])
def test_taxonomy_rows_without_a_key_are_of_no_class(tmp_path: Path, suffix: str) -> None:
    keys = ["n0", None, "n2", None]
    file = _written([{"synset": key, "kind": f"k{row}"} for row, key in enumerate(keys)], tmp_path / f"t.{suffix}")
    classes: list[dict[str, Any]] = [{"class": leaf, "name": f"c{leaf}", "synset": f"n{2 * leaf}"} for leaf in range(2)]
    by_synset = {"key": "synset", "class_key": "synset"}
    assert level(file, "kind", classes, **by_synset).class_names == ("k0", "k2")
    classes.append({"class": 2, "name": "c2", "synset": None})
    with pytest.raises(UserError, match=r"by column 'synset': class 2 \('c2'\) has no value .*use another class_key"):
        level(file, "kind", classes, **by_synset)


def test_taxonomy_classes_without_nodes_are_counted() -> None:
    classes = [{"class": number, "name": f"c{number}", "order": "" if number < 7 else "a"} for number in range(9)]
    expected = r"class 0 \('c0'\), 1 \('c1'\), .*4 \('c4'\), \.\.\. \(7 in all\) have no value at level 'order'"
    with pytest.raises(UserError, match=expected):
        make_label_map({"hierarchy": "order"}, classes, num_train=0)


def test_taxonomy_row_with_more_cells_than_the_header_is_bad_data(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    file.write_text("name,order\na,b\nc,d,e\n")
    with pytest.raises(BadDataError, match=r"table\.csv is not a table.*line 3 has more cells than the header"):
        read_table(str(file))


def test_taxonomy_of_inaturalist_2021s_size_has_the_published_numbers_of_classes(tmp_path: Path) -> None:
    """A file as large as the real one, whose nodes and epithets are as many as those of the data set."""
    sizes = PUBLISHED | {"species": 10_000}
    categories = []
    for number in range(sizes["species"]):
        row = {rank: f"{rank}{number * size // sizes['species']}" for rank, size in PUBLISHED.items()}
        epithet = f"epithet{number % NUM_PUBLISHED_EPITHETS}"
        categories.append({"id": number, **row, "specific_epithet": epithet, "name": f"{row['genus']} {epithet}"})
    file = tmp_path / "train.json"
    file.write_text(json.dumps({"categories": categories}))
    classes = [{"class": number, "name": row["name"]} for number, row in enumerate(categories)]
    for name, num_classes in (sizes | {"specific_epithet": NUM_PUBLISHED_EPITHETS}).items():
        assert level(file, "taxonomic_class" if name == "class" else name, classes).num_classes == num_classes


def test_taxonomy_folder_names_are_levels() -> None:
    names = [row["image_dir_name"] for row in inaturalist()["categories"]]
    classes = [{"class": number, "name": name} for number, name in enumerate(names)]
    levels = ["id", "kingdom", "phylum", "class", "order", "family", "genus", "epithet"]
    space = {"taxonomy": {"level": "family", "folders": levels, "separator": "_"}}
    assert make_label_map(space, classes, num_train=0).num_classes == COUNTS["family"]
    assert folder_rows(classes, levels, "_")[3]["epithet"] == "epithet3"


def test_taxonomy_folder_name_with_other_parts_is_named() -> None:
    with pytest.raises(UserError, match="'plants/rose/red' has 3 parts between '/', but 2 levels"):
        folder_rows([{"class": 0, "name": "plants/rose/red"}], ["kingdom", "genus"], "/")


def test_taxonomy_class_that_the_table_lacks_is_listed(table: Path) -> None:
    classes = [*CLASSES, {"class": 48, "name": "Bigfoot"}]
    with pytest.raises(UserError, match="lacks 1 classes of the data set: 'Bigfoot'"):
        level(table, "order", classes)


def test_taxonomy_classes_of_one_name_get_no_row_by_name(tmp_path: Path) -> None:
    file, named = tmp_path / "table.csv", ("crane", "crane", "owl")
    file.write_text("synset,name,kind\nn2,owl,bird\nn1,crane (tool),tool\nn0,crane,bird\n")
    classes = [{"class": leaf, "name": name, "synset": f"n{leaf}"} for leaf, name in enumerate(named)]
    with pytest.raises(UserError, match=r"the name 'crane', and would get one row of .*class_key: synset, key: synset"):
        level(file, "kind", classes)
    joined = level(file, "kind", classes, key="synset", class_key="synset")
    assert [joined.class_names[row[0]] for row in joined.table_CM.tolist()] == ["bird", "tool", "bird"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"key": "nom"}, "has no column 'nom'; its columns are id, supercategory"),
        ({"key": "genus"}, "has 'genus0' twice in column 'genus'"),
        ({"digest": "0" * 64}, "has changed since the sweep was planned"),
    ],
)
def test_taxonomy_table_that_does_not_fit_is_a_user_error(table: Path, rule: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        level(table, "order", **rule)


@pytest.mark.parametrize("content", ["", "{}", "[1, 2]", '{"categories": 3}', "[]"])
def test_taxonomy_file_that_is_no_table_is_bad_data(tmp_path: Path, content: str) -> None:
    file = tmp_path / "table.json"
    file.write_text(content)
    with pytest.raises(BadDataError, match=r"table\.json"):
        read_table(str(file))


def test_taxonomy_missing_file_is_a_user_error(tmp_path: Path) -> None:
    for place in (str(tmp_path / "none.csv"), (tmp_path / "none.csv").as_uri()):
        with pytest.raises(UserError, match=r"none\.csv cannot be read"):
            read_table(place)
