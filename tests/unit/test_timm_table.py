"""The shipped table of timm's models: what the installed timm says, and what planning refuses because of it."""

from __future__ import annotations

import random
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import timm
import torch

from orchestrator.core.errors import SpecError
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile import ResolvedSweep, parse_sweep
from orchestrator.sweepfile.known_models import FILE, TimmModel, shipped_models
from orchestrator.sweepfile.model import DEFAULT_NORM_GROUP
from workloads.models import batchnorm, table
from workloads.models.spec import ModelSpec
from workloads.models.table import encode_rows, measure_model, timm_kwargs

# One of every kind of input rule, and a keyed sample of the rest: another one with every version of timm.
KINDS = ("test_resnet", "test_vit", "levit_128")
SAMPLE = random.Random(timm.__version__).sample(timm.list_models(), 2)  # noqa: S311 - a sample, not a secret


def _model(name: str) -> TimmModel:
    found = shipped_models().find(name)
    assert found is not None
    return found


def test_table_has_exactly_the_models_of_the_installed_timm() -> None:
    assert shipped_models().timm_version == timm.__version__
    assert list(shipped_models().rows) == sorted(timm.list_models())


@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLE)])
def test_table_row_is_what_the_installed_timm_says(name: str) -> None:
    model = _model(name)
    if model.num_parameters is None or model.num_parameters > 3e8:
        pytest.skip("building it takes longer than all other tests of this file")
    assert encode_rows({name: measure_model(name)}).splitlines()[1].rstrip(",") in FILE.read_text().replace(",\n", "\n")


def test_table_columns_are_those_of_the_generator_and_of_the_reader() -> None:
    assert shipped_models().columns == table.COLUMNS
    assert {field.name for field in fields(TimmModel)} == {"name", *table.COLUMNS}


def test_table_facts_of_known_models_are_those_of_the_literature() -> None:
    resnet, vit = _model("resnet50"), _model("vit_base_patch16_224")
    assert (resnet.num_parameters, resnet.num_features, resnet.has_batchnorm) == (23_508_032, 2048, True)
    assert resnet.macs == pytest.approx(4.09e9, rel=0.01)
    assert (vit.num_features, vit.has_batchnorm, vit.image_size, vit.is_fixed_size) == (768, False, 224, True)
    assert vit.macs == pytest.approx(17.6e9, rel=0.01)
    assert vit.tags[0] == timm.get_pretrained_cfg("vit_base_patch16_224").tag  # type: ignore[union-attr]


def test_table_almost_all_models_are_measured_and_build_at_their_own_size() -> None:
    models = [_model(name) for name in shipped_models().rows]
    # The rest returns maps or several tensors per image, which a head cannot take.
    assert sum(model.macs is not None for model in models) > 0.95 * len(models)
    assert sum(model.size_step is not None for model in models) > 0.9 * len(models)


def test_table_sizes_that_it_calls_good_or_bad_are() -> None:
    for name in ("test_vit", "levit_128"):
        model = _model(name)
        assert model.size_step is not None
        good = model.image_size + 2 * model.size_step
        assert model.size_problem(good) == ""
        for size, works in ((good, True), (good + 1, model.size_step == 1)):
            assert table._accepts(name, size) is works
            assert (model.size_problem(size) == "") is works


def test_norm_group_default_is_the_same_in_both_planes() -> None:
    assert DEFAULT_NORM_GROUP == batchnorm.DEFAULT_NORM_GROUP


SWEEP = """\
version: 1
name: small
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 512, num_val: 256}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2]}}
pretrain:
  model: {model}
  labels: ["levels/*"]
  recipe: {recipe}
transfer:
  - {{name: top, target: levels/depth1, protocol: {protocol}, recipe: {transfer}}}
"""
GOOD = "{epochs: 2, batch_size: 64, lr: 1e-3}"


def _sweep(
    model: str = "{name: test_resnet, image_size: 32}",
    *,
    recipe: str = GOOD,
    transfer: str = GOOD,
    protocol: str = "finetune",
    extra: str = "",
) -> ResolvedSweep:
    text = SWEEP.format(model=model, recipe=recipe, transfer=transfer, protocol=protocol) + extra
    return parse_sweep(text, "sweep.yaml", {})


def _problems(model: str = "{name: test_resnet, image_size: 32}", **changes: str) -> str:
    with pytest.raises(SpecError) as caught:
        _sweep(model, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("{name: resnt50, image_size: 32}", ["sweep.yaml:8:11", "'resnt50' is not a model of timm", "'resnet50'"]),
        ("{name: ViT_Base_Patch16_224, image_size: 224}", ["sweep.yaml:8:11", "'vit_base_patch16_224'"]),
        ("{name: resnet50.nonsense, image_size: 32}", ["knows no weights 'nonsense' of resnet50", "a1_in1k"]),
        ("{name: test_vit, image_size: 40}", ["sweep.yaml:8:27", "image_size 40 is refused", "use 32 or 48"]),
        ("{name: test_convnext, image_size: 8}", ["sweep.yaml:8:32", "needs images larger than"]),
        (
            "{name: test_vit, image_size: 4, kwargs: {patch_size: 8}}",
            ["sweep.yaml:8:27", "image_size 4 is refused: kwargs.patch_size 8 is larger", "image_size 8 or more"],
        ),
        ("{name: test_vit, image_size: 8, kwargs: {patch_size: [8, 16]}}", ["kwargs.patch_size [8, 16]", "16 or more"]),
    ],
)
def test_plan_model_that_timm_refuses_is_refused_with_place_and_remedy(model: str, said: list[str]) -> None:
    problem = _problems(model)
    assert all(part in problem for part in said), problem


@pytest.mark.parametrize(
    "model",
    [
        "{name: resnet50.a1_in1k, image_size: 33}",
        "{name: test_vit, image_size: 48, kwargs: {drop_path_rate: 0.1}}",
        # Another patch size makes another rule, which only timm knows.
        "{name: test_vit, image_size: 40, kwargs: {patch_size: 8}}",
        "{name: test_vit, image_size: 16, kwargs: {patch_size: 16}}",
        "{name: test_vit, image_size: 8, kwargs: {patch_size: 16, dynamic_img_pad: true}}",
        "{name: xcit_nano_12_p16_224, image_size: 8, kwargs: {patch_size: 16}}",
    ],
)
def test_plan_model_that_timm_takes_is_accepted(model: str) -> None:
    assert _sweep(model).pretrains[0].model.image_size > 0


def test_plan_batch_not_of_whole_norm_groups_is_refused_where_a_backbone_is_trained() -> None:
    uneven = "{epochs: 2, batch_size: 96, lr: 1e-3}"
    problem = _problems(recipe=uneven)
    assert "sweep.yaml:10:" in problem
    assert "batch_size 96 is not a multiple of 64" in problem
    assert "norm_group" in problem
    assert "batch_size 96" in _problems(transfer=uneven)
    assert _sweep(transfer=uneven, protocol="probe").name
    assert _sweep(recipe="{epochs: 2, batch_size: 96, lr: 1e-3, norm_group: 32}").name
    assert _sweep(recipe="{epochs: 2, batch_size: 48, lr: 1e-3}").name
    assert _sweep("{name: test_vit, image_size: 32}", recipe=uneven).name
    # Whether other layers normalise is for the data plane to see.
    assert _sweep("{name: test_resnet, image_size: 32, kwargs: {norm_layer: layernorm2d}}", recipe=uneven).name


@pytest.mark.parametrize("group", ["pretrain", "transfer"])
def test_plan_more_workers_than_norm_groups_are_refused(group: str) -> None:
    gang = f"resources: {{{group}: {{cpus: 4, workers: 4}}}}\n"
    fits, grouped = "{epochs: 2, batch_size: 256, lr: 1e-3}", "{epochs: 2, batch_size: 64, lr: 1e-3, norm_group: 16}"
    problem = _problems(extra=gang)
    assert "batch_size 64 has 1 norm groups of 64 samples, and each of 4 workers needs a whole one" in problem
    assert f"{group}" in problem
    assert "set norm_group to at most 16 (this changes the key)" in problem
    for recipe in (fits, grouped):
        assert _sweep(recipe=recipe, transfer=recipe, extra=gang).name
    assert _sweep("{name: test_vit, image_size: 32}", extra=gang).name


def test_plan_remedies_for_too_many_workers_are_ones_that_planning_takes() -> None:
    gang = "resources: {pretrain: {cpus: 3, workers: 3}}\n"
    mixed = "{epochs: 2, batch_size: 64, lr: 1e-3, mixup: 0.2"
    assert "at most 16 (" in _problems(recipe=mixed + "}", extra=gang)
    assert _sweep(recipe=mixed + ", norm_group: 16}", extra=gang).name
    grouped = _problems(recipe="{epochs: 2, batch_size: 64, lr: 1e-3, norm_group: 32}", extra=gang)
    assert "recipe.norm_group: batch_size 64 has 2 norm groups of 32 samples" in grouped
    none = _problems(recipe="{epochs: 2, batch_size: 2, lr: 1e-3}", extra=gang)
    assert "use fewer workers" in none
    assert "set norm_group" not in none


def test_plan_dropout_of_a_model_without_is_refused() -> None:
    convnext = next(name for name in shipped_models().rows if not _model(name).has_drop_path)
    size = _model(convnext).image_size
    problem = _problems(f"{{name: {convnext}, image_size: {size}}}", recipe=GOOD[:-1] + ", drop_path: 0.1}")
    assert f"{convnext} has no drop_path" in problem


@pytest.mark.parametrize("name", ["levit_128", "efficientvit_m0"])
def test_plan_dropout_of_a_model_that_drops_in_its_cut_off_classifier_alone_is_refused(name: str) -> None:
    problem = _problems(f"{{name: {name}, image_size: 224}}", recipe=GOOD[:-1] + ", dropout: 0.1}")
    assert f"recipe.dropout: timm model {name} has no dropout; remove it" in problem


DIGEST = "ab" * 32


def _with_init(init: str) -> ResolvedSweep:
    return _sweep(f"{{name: test_resnet, image_size: 32}}\n  init: {init}")


def test_plan_initial_weights_are_identity_and_their_place_is_not() -> None:
    def plan(init: str) -> tuple[str, str, dict[str, object]]:
        jobs = build_plan(_with_init(init), store_uri="file:///s").jobs
        job = next(job for job in jobs if job.kind == "pretrain")
        return job.key, job.execution.initial_uri, dict(job.identity["parameters"])

    here, there = (plan(f"{{uri: 'file:///{folder}/w.safetensors', sha256: {DIGEST}}}") for folder in ("a", "b"))
    assert here[0] == there[0]
    assert (here[1], there[1]) == ("file:///a/w.safetensors", "file:///b/w.safetensors")
    assert here[2]["initial"] == {"sha256": DIGEST}
    tag = plan("{timm: r160_in1k}")
    assert tag[2]["initial"] == {"timm": "r160_in1k"}
    plain = next(job for job in build_plan(_sweep(), store_uri="file:///s").jobs if job.kind == "pretrain")
    assert "initial" not in plain.identity["parameters"]
    assert len({here[0], tag[0], plain.key}) == 3


@pytest.mark.parametrize(
    ("init", "said"),
    [
        ("{}", "exactly one of artifact, uri, timm and pretrain; here: none of them"),
        ("{timm: r160_in1k, artifact: pretrain-a-0123456789abcdef}", "here: artifact and timm"),
        ("{uri: 'file:///x/w.safetensors'}", "uri and sha256 belong together"),
        (f"{{uri: 'https://x/w.safetensors', sha256: {DIGEST}}}", "supported: file:///absolute/path, s3://bucket"),
        (f"{{uri: r18.pth.tar, sha256: {DIGEST}}}", "URI 'r18.pth.tar' has no scheme; supported: file:///absolute"),
        (f"{{uri: /a/w.pth, sha256: {DIGEST}}}", "URI '/a/w.pth' has no scheme; write file:///a/w.pth"),
        (f"{{uri: 'file:///w.pth', sha256: {DIGEST}}}", "'file:///w.pth' names no object"),
        (f"{{uri: 'file:///folder/', sha256: {DIGEST}}}", "names a folder"),
        ("{timm: r161_in1k}", "did you mean 'r160_in1k'?"),
        ("{artifact: labels-x-0123456789abcdef}", "sweep.yaml:9:"),
    ],
)
def test_plan_wrong_initial_weights_are_refused(init: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        _with_init(init)
    assert said in str(caught.value)
    assert "sweep.yaml:9:" in str(caught.value)


def test_plan_compute_changes_no_key_and_reaches_training_alone() -> None:
    plain = build_plan(_sweep(), store_uri="file:///s")
    changed = _sweep(
        extra="compute: {compile: default, deterministic: true, micro_batch: 64, activation_checkpointing: true}\n"
    )
    plan = build_plan(changed, store_uri="file:///s")
    assert [job.key for job in plan.jobs] == [job.key for job in plain.jobs]
    for job in plan.jobs:
        trains = job.kind in {"pretrain", "finetune", "probe"}
        execution = job.execution
        asked = (execution.compile, execution.deterministic, execution.micro_batch, execution.activation_checkpointing)
        assert asked == (("default", True, 64, True) if trains else ("off", False, 0, False))


def test_meta_backbone_holds_no_memory_and_equals_the_real_one() -> None:
    spec = ModelSpec(name="test_resnet", image_size=32)
    meta = table.meta_backbone(spec)
    real = timm.create_model("test_resnet", num_classes=0, **timm_kwargs(spec))
    assert {parameter.device for parameter in meta.parameters()} == {torch.device("meta")}
    assert {name: tensor.shape for name, tensor in meta.state_dict().items()} == {
        name: tensor.shape for name, tensor in real.state_dict().items()
    }


def test_table_generator_writes_what_it_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "list_models", lambda *_, **__: ["test_resnet"])
    file = tmp_path / "models.json"
    monkeypatch.setattr(sys, "argv", ["table", str(file)])
    assert table.main() == 0
    monkeypatch.setattr(sys, "argv", ["table", str(file), "--check"])
    assert table.main() == 0
    file.write_text(file.read_text().replace("true", "false", 1))
    assert table.main() == 1
