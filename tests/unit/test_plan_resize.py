"""A shorter side from which no square of the network's size can be cut is refused when the sweep is planned."""

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.load import parse_sweep, shipped_recipes
from orchestrator.sweepfile.values import ResolvedSweep

SWEEP = """\
version: 1
name: small
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {{name: test_resnet, image_size: {image_size}}}
  labels: [{labels}]
  recipe: {recipe}
transfer:
  - {{name: top, target: levels/depth1, protocol: {protocol}, recipe: {transfer}}}
"""
PLAIN = "{epochs: 2, batch_size: 64, lr: 1e-3}"
SMALL = "{epochs: 2, batch_size: 64, lr: 1e-3, resize: 31}"
EQUAL = "{epochs: 2, batch_size: 64, lr: 1e-3, resize: 32}"


def sweep(**fields: str) -> ResolvedSweep:
    defaults = {
        "recipe": PLAIN,
        "transfer": PLAIN,
        "protocol": "finetune",
        "image_size": "32",
        "labels": "levels/*",
    }
    return parse_sweep(SWEEP.format(**{**defaults, **fields}), "sweep.yaml", shipped_recipes())


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"recipe": SMALL}, "sweep.yaml:10:49: pretrain.recipe.resize"),
        ({"transfer": SMALL}, "transfer[0].recipe.resize"),
        ({"transfer": SMALL, "protocol": "probe"}, "transfer[0].recipe.resize"),
        ({"transfer": "{resize: 31}", "protocol": "knn"}, "transfer[0].recipe.resize"),
    ],
)
def test_resize_below_the_image_size_is_refused_where_it_stands(fields: dict[str, str], place: str) -> None:
    with pytest.raises(SpecError) as caught:
        sweep(**fields)
    assert place in str(caught.value)
    said = (
        "resize 31 is below the model's image_size 32: no square of that size could be cut out; use 32 or more, or null"
    )
    assert said in str(caught.value)


def test_resize_of_a_shipped_recipe_is_refused_for_larger_images() -> None:
    probe = {"transfer": "linear-probe-40ep", "protocol": "probe"}
    assert sweep(**probe, image_size="256").transfer
    with pytest.raises(SpecError, match="resize 256 is below the model's image_size 288"):
        sweep(**probe, image_size="288")


@pytest.mark.parametrize("protocol", ["finetune", "probe"])
def test_resize_of_at_least_the_image_size_is_accepted(protocol: str) -> None:
    assert sweep(recipe=EQUAL, transfer=EQUAL, protocol=protocol).transfer


CLUSTERS = "\n  groups: {{dataset: tree, clusters: {{k: [4], embed: {embed}}}}}"


@pytest.mark.parametrize(
    "embed",
    [
        "{{backbone: {{labels: levels/depth1}}, resize: 31}}",
        "{{model: {{name: test_resnet, image_size: 32}}, init: {{timm: r160_in1k}}, resize: 31}}",
    ],
)
def test_resize_of_an_embedding_below_the_image_size_is_refused(embed: str) -> None:
    text = SWEEP.replace("[depth1, depth2]}}", "[depth1, depth2]}}" + CLUSTERS.replace("{embed}", embed))
    fields = {"image_size": "32", "recipe": PLAIN, "transfer": PLAIN, "protocol": "probe", "labels": "levels/depth1"}
    with pytest.raises(SpecError, match=r"labels\.groups\.clusters\.embed\.resize: resize 31 is below"):
        parse_sweep(text.format(**fields), "sweep.yaml", {})
    assert parse_sweep(text.replace("resize: 31", "resize: 32").format(**fields), "sweep.yaml", {}).labels
