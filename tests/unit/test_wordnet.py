"""WordNet: published class counts against the real file, and small made-up nets."""

import os
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from orchestrator.core.errors import BadDataError, UserError
from workloads.commands.labels import describe_spaces
from workloads.data.index import LeafSets, SplitIndex
from workloads.labels import wordnet as module
from workloads.labels.inputs import LabelInputs
from workloads.labels.label_map import ClassLabels
from workloads.labels.rules import make_label_map
from workloads.labels.wordnet import Paths, WordNet, level_of, open_wordnet

PUBLISHED = {0: 21843, 1: 5995, 2: 2281, 4: 519, 6: 160, 9: 38}
"""Classes at each level of ImageNet-21k, as the paper's tables give them."""
LIVING_THING, BIRD = "n00004258", "n01503061"

LICENCE = "  1 This software and database is being provided to you\n"
# entity <- thing <- {plant, tool} ; tree <- {plant, tool} ; oak <- tree ; famous_oak @i oak
NET = f"""{LICENCE}00000001 03 n 01 entity 0 000 | what is
00000002 03 n 02 thing 0 object 0 002 @ 00000001 n 0000 ~ 00000003 n 0000 | a thing | with a bar
00000003 20 n 01 plant 0 001 @ 00000002 n 0000 | grows
00000004 06 n 01 tool 0 001 @ 00000002 n 0000 | used
00000005 20 n 01 tree 0 003 @ 00000003 n 0000 @ 00000004 n 0000 + 00000009 v 0101 | both
00000006 20 n 01 oak 0 001 @ 00000005 n 0000 | a tree
00000007 20 n 01 Famous_Oak 0 001 @i 00000006 n 0000 | one oak"""
ENTITY, THING, PLANT, TOOL, TREE, OAK, FAMOUS = (f"n{number:08d}" for number in range(1, 8))


@pytest.fixture(scope="session")
def real() -> WordNet:
    try:
        return open_wordnet()
    except UserError:
        if os.environ.get("REQUIRE_WORDNET") == "1":
            raise
        pytest.skip("needs WordNet 3.0: apt-get install wordnet-base (REQUIRE_WORDNET=1 makes this a failure)")


def shipped(name: str) -> list[str]:
    found = find_spec("timm")  # not imported: that takes seconds
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / "data" / "_info" / name).read_text().split()


@pytest.fixture(scope="session")
def imagenet21k() -> list[str]:
    return shipped("imagenet21k_goog_synsets.txt")


@pytest.fixture
def net() -> WordNet:
    return WordNet.parse(NET)


def ancestors(net: WordNet, synset: str) -> set[str]:
    """All synsets on any path upwards, with the synset itself."""
    found, frontier = {synset}, [synset]
    while frontier:
        fresh = set(net.hypernyms[frontier.pop()]) - found
        found |= fresh
        frontier += fresh
    return found


@pytest.mark.parametrize(("level", "num_classes"), PUBLISHED.items())
def test_wordnet_levels_of_imagenet21k_have_the_published_numbers_of_classes(
    real: WordNet, imagenet21k: list[str], level: int, num_classes: int
) -> None:
    classes = [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate(imagenet21k)]
    space = {"wordnet": {"level": level, "paths": "all", "key": "synset", "digest": real.digest}}
    label_map = make_label_map(space, classes, num_train=0)
    assert isinstance(label_map, ClassLabels)
    assert label_map.num_classes == num_classes
    assert set(np.unique(label_map.targets)) - {-1} == set(range(num_classes))
    assert (label_map.targets.ndim > 1) == (level > 0)


@pytest.mark.parametrize(
    ("name", "counts"),
    [("imagenet22k_synsets.txt", [21841, 5995, 2281]), ("imagenet_synsets.txt", [1000, 578, 325])],
)
def test_wordnet_other_lists_of_imagenet_are_known(real: WordNet, name: str, counts: list[int]) -> None:
    synsets = shipped(name)
    found = [len({end for ends in level_of(synsets, level, real) for end in ends}) for level in range(3)]
    assert found == counts


def test_wordnet_living_things_are_those_with_it_on_any_path(real: WordNet, imagenet21k: list[str]) -> None:
    is_living = real.below(LIVING_THING, imagenet21k)
    assert is_living == [LIVING_THING in ancestors(real, synset) for synset in imagenet21k]
    assert sum(is_living) == 10899
    assert real.lemmas[LIVING_THING] == "living_thing"
    inner = "n00007846"  # person, a class itself
    assert real.below(inner, imagenet21k) == [inner in (synset, *ancestors(real, synset)) for synset in imagenet21k]


def test_wordnet_subtree_leaves_other_classes_out(real: WordNet) -> None:
    synsets = shipped("imagenet_synsets.txt")
    classes = [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate(synsets)]
    space = {
        "wordnet": {"level": 0, "key": "synset", "digest": ""},
        "classes": {"under": BIRD, "key": "synset", "digest": ""},
    }
    label_map = make_label_map(space, classes, num_train=0)
    assert label_map.num_classes == 59  # ImageNet's birds
    assert all(BIRD in ancestors(real, name) for name in label_map.class_names)


def test_wordnet_levels_are_all_end_points_and_roots_stay(net: WordNet) -> None:
    synsets = [ENTITY, TREE, OAK, FAMOUS]
    assert level_of(synsets, 0, net) == [[ENTITY], [TREE], [OAK], [FAMOUS]]
    assert level_of(synsets, 1, net) == [[ENTITY], [PLANT, TOOL], [TREE], [FAMOUS]]
    assert level_of(synsets, 2, net) == [[ENTITY], [THING], [PLANT, TOOL], [FAMOUS]]
    assert level_of(synsets, 9, net) == [[ENTITY], [ENTITY], [ENTITY], [FAMOUS]]


def test_wordnet_first_and_random_paths_have_one_end_point(net: WordNet) -> None:
    assert level_of([TREE, OAK], 1, net, paths=Paths.FIRST) == [[PLANT], [TREE]]
    chosen = {level_of([TREE], 1, net, paths=Paths.RANDOM, seed=seed)[0][0] for seed in range(16)}
    assert chosen == {PLANT, TOOL}


def test_wordnet_random_paths_of_a_level_are_those_of_the_next_one_cut_short(net: WordNet) -> None:
    for seed in range(8):
        (one,) = level_of([TREE], 1, net, paths=Paths.RANDOM, seed=seed)
        (two,) = level_of([OAK], 2, net, paths=Paths.RANDOM, seed=seed)
        assert one == two


def test_wordnet_digest_is_of_the_relation_not_of_the_text(net: WordNet) -> None:
    assert WordNet.parse(NET.replace("grows", "sprouts").replace(LICENCE, LICENCE * 3)).digest == net.digest
    assert WordNet.parse(NET.replace("@ 00000005", "@ 00000003")).digest != net.digest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (NET.replace("000 | what is", "001 @ 00000006 n 0000 | what is"), "cycle of hypernyms: n0000"),
        (NET.replace("@ 00000005 n", "@ 00000099 n"), "names the hypernym n00000099, but does not hold it"),
        (NET + "\nnot a synset", "data.noun:9: not a line of WordNet"),
        (NET[:-60], "not a line of WordNet"),
        (LICENCE, "no synsets"),
        (NET.replace(" n 01 plant", " v 01 plant"), "data.noun:4"),
    ],
)
def test_wordnet_damaged_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadDataError, match=message):
        WordNet.parse(text)


def test_wordnet_missing_says_which_package_brings_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "PLACES", (tmp_path,))
    with pytest.raises(UserError, match="wordnet-base"):
        open_wordnet()
    with pytest.raises(UserError, match="wordnet-base"):
        open_wordnet(str(tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="wordnet-base"):
        open_wordnet((tmp_path / "data.noun").as_uri())


def test_wordnet_opens_by_folder_file_and_uri(tmp_path: Path, net: WordNet) -> None:
    (tmp_path / "data.noun").write_text(NET)
    for place in (str(tmp_path), str(tmp_path / "data.noun"), tmp_path.as_uri(), (tmp_path / "data.noun").as_uri()):
        assert open_wordnet(place).digest == net.digest


def test_wordnet_unknown_synsets_are_listed(net: WordNet) -> None:
    with pytest.raises(UserError, match=r"2 synsets are unknown to WordNet.*'n00000042', 'oak'"):
        level_of([OAK, "n00000042", "oak"], 1, net)


CLASSES = [{"class": number, "name": synset, "synset": synset} for number, synset in enumerate([OAK, PLANT, TOOL])]


def definition(**rule: object) -> dict[str, object]:
    return {"wordnet": {"key": "synset", "digest": "", **rule}}


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "data.noun").write_text(NET)
    return {"wordnet": str(tmp_path)}


def test_wordnet_space_gives_classes_all_their_labels(place: dict[str, str]) -> None:
    label_map = make_label_map(definition(level=2), CLASSES, num_train=0, files=place)
    assert label_map.class_names == (PLANT, TOOL, ENTITY)
    assert isinstance(label_map, ClassLabels)
    assert label_map.targets.tolist() == [[0, 1], [2, -1], [2, -1]]
    contains = make_label_map(definition(contains=PLANT), CLASSES, num_train=0, files=place)
    assert isinstance(contains, ClassLabels)
    assert contains.targets.tolist() == [1, 1, 0]
    # A sample of a class below it and of one that is not: it is on a path of the sample.
    sets = LeafSets(offsets=np.array([0, 2, 3]), values=np.array([0, 2, 2]))
    split = SplitIndex.in_memory(leaves=np.array([0, 2]), leaf_sets=sets)
    assert contains.resolve_targets(split).take(np.arange(2)).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"level": 1, "digest": "0" * 64}, "other hypernyms than the one that the sweep was planned with"),
        ({"level": 1, "key": "wnid"}, "needs a column 'wnid'"),
        ({"contains": ENTITY}, "every class has n00000001 above it"),
        ({"contains": FAMOUS}, "no class has n00000007 above it"),
        ({"contains": "n00000042"}, "unknown to WordNet"),
    ],
)
def test_wordnet_space_that_does_not_fit_is_a_user_error(
    place: dict[str, str], rule: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make_label_map(definition(**rule), CLASSES, num_train=0, files=place)


def test_wordnet_trees_have_the_first_lemma_of_each_synset(place: dict[str, str]) -> None:
    classes = [{"class": leaf, "name": synset, "synset": synset} for leaf, synset in enumerate((OAK, FAMOUS, TOOL))]
    rule = {"paths": "first", "key": "synset", "digest": ""}
    spaces = [{"name": f"nouns/{level}", "space": {"wordnet": {"level": level, **rule}}} for level in (1, 0)]
    request = {"spaces": spaces, "targets": [], "index": {}, "tree": ["nouns/1", "nouns/0"], "plot": ""}
    found = describe_spaces(request, LabelInputs(classes=classes, num_train=0, files=place))
    assert [TREE, OAK] in [path["path"] for path in found["tree"]]
    assert (found["lemmas"][TREE], found["lemmas"][FAMOUS]) == ("tree", "Famous Oak")
