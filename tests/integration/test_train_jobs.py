"""Pretrain, finetune and probe end to end on a tiny real data set: what they commit and what they refuse."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load as load_tensors

from orchestrator.core.contract import Execution, JobResult, Progress
from orchestrator.core.errors import NumericsError, UserError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import Record, download_part, read_part, read_record
from orchestrator.storage.layout import metrics_segment
from orchestrator.storage.local import LocalStore
from tests.tiny_training import BATCHNORM, NO_BATCHNORM, RECIPE, TinyTraining
from workloads.data.index import SampleIndex
from workloads.data.source import SampleSource
from workloads.jobs import probe
from workloads.jobs.networks import pretrained_backbone
from workloads.labels.label_map import LabelMap
from workloads.models.batchnorm import batchnorm_layers
from workloads.runtime.device import pick_device
from workloads.train.samples import LabelledSamples
from workloads.train.task import JobContext

DEPTH1 = {"hierarchy": "depth1"}
RANDOM = {"random": {"num_classes": 8, "seed": 0}}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyTraining:
    folder = tmp_path_factory.mktemp("tiny")
    return TinyTraining(LocalStore(folder / "store"), folder)


@pytest.fixture(scope="module")
def pretrained(tiny: TinyTraining) -> JobResult:
    return tiny.run(tiny.training(model=BATCHNORM))


def _record(tiny: TinyTraining, result: JobResult) -> Record:
    return read_record(tiny.store, result.key)


def _logits_on_val(tiny: TinyTraining, record: Record, backbone_record: Record, folder: Path) -> torch.Tensor:
    """What an outsider computes with nothing but timm and the artifact's parts."""
    document = json.loads(read_part(tiny.store, record, "model.json"))
    path = download_part(tiny.store, backbone_record, "backbone.safetensors", folder / "backbone.safetensors")
    backbone = timm.create_model(document["name"], num_classes=0, checkpoint_path=path, **document["timm_kwargs"])
    head = torch.nn.Linear(document["num_features"], document["num_classes"])
    head.load_state_dict(load_tensors(read_part(tiny.store, record, "head.safetensors")))
    index = SampleIndex.open(tiny.store, tiny.index, tiny.folder / "cache")
    source = SampleSource(tiny.store, index, "val", cache_dir=tiny.folder / "cache", image_size=document["image_size"])
    pixels = torch.from_numpy(source.images(torch.arange(index.split("val").num_samples).numpy()))
    images = (pixels / 255 - torch.tensor(document["mean"])) / torch.tensor(document["std"])
    with torch.no_grad():
        logits: torch.Tensor = head(backbone.eval()(images.permute(0, 3, 1, 2)))
    return logits


def _val_targets(tiny: TinyTraining, record: Record) -> torch.Tensor:
    index = SampleIndex.open(tiny.store, tiny.index, tiny.folder / "cache")
    label_map = LabelMap.open(tiny.store, record.identity["inputs"]["labels"])
    return torch.from_numpy(label_map.resolve_targets(index.split("val")).targets_N())


@pytest.mark.parametrize("model", [NO_BATCHNORM, BATCHNORM], ids=["vit", "resnet"])
def test_pretrain_artifact_loaded_by_timm_has_the_committed_val_error(
    tiny: TinyTraining, model: dict[str, object], tmp_path: Path
) -> None:
    record = _record(tiny, tiny.run(tiny.training(model=model)))
    logits, targets = _logits_on_val(tiny, record, record, tmp_path), _val_targets(tiny, record)
    assert record.metrics["val_error"] == pytest.approx(float((logits.argmax(1) != targets).double().mean()))
    loss = torch.nn.functional.cross_entropy(logits, targets)
    assert record.metrics["val_loss"] == pytest.approx(float(loss), rel=1e-5)


def test_pretrain_record_says_what_reports_need(tiny: TinyTraining, pretrained: JobResult) -> None:
    record = _record(tiny, pretrained)
    rates = ["train_error", "val_error", "best_val_error", "val_error_hard", "val_error_normal"]
    assert all(0 <= record.metrics[name] <= 1 for name in rates)
    halves = (record.metrics["val_error_hard"] + record.metrics["val_error_normal"]) / 2
    assert record.metrics["val_error"] == pytest.approx(halves)
    assert record.metrics["best_val_error"] <= record.metrics["val_error"]
    assert record.metrics["num_steps"] == 15
    assert record.summary["weights_sha256"] != record.summary["init_weights_sha256"]
    assert record.summary["fingerprint"]["torch"] == torch.__version__
    assert record.package_digest


def test_pretrain_times_tell_setup_from_work(tiny: TinyTraining) -> None:
    timings = tiny.run(tiny.training(model=BATCHNORM, seed=3)).timings
    assert 0 <= timings.import_s < timings.setup_s < timings.work_s


def test_pretrain_metrics_segments_follow_each_other(tiny: TinyTraining, pretrained: JobResult) -> None:
    bounds = [(0, 6), (6, 12), (12, 15)]
    texts = [tiny.store.get(metrics_segment(pretrained.key, 1, low, high)).decode() for low, high in bounds]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    assert [line["step"] for line in lines] == [6, 12, 15]
    assert [line["epoch"] for line in lines] == [1.0, 2.0, 2.5]
    expected = {"train_loss", "train_error", "lr", "images_per_s", "val_error", "val_loss"}
    assert all(expected <= line["metrics"].keys() for line in lines)
    assert lines[-1]["metrics"]["val_error"] == pretrained.metrics["val_error"]


def test_pretrain_same_seed_other_labels_starts_from_equal_backbone(tiny: TinyTraining, pretrained: JobResult) -> None:
    def initial(result: JobResult) -> str:
        return str(_record(tiny, result).summary["init_weights_sha256"])

    random = tiny.run(tiny.training(model=BATCHNORM, space=RANDOM))
    assert random.metrics["num_classes"] != pretrained.metrics["num_classes"]
    assert initial(random) == initial(pretrained)
    assert initial(tiny.run(tiny.training(model=BATCHNORM, seed=1))) != initial(pretrained)


def test_pretrain_reports_progress_towards_the_end(tiny: TinyTraining) -> None:
    seen: list[Progress] = []
    tiny.run(tiny.training(model=BATCHNORM, seed=2), report=seen.append)
    assert [seen[0].phase, seen[-1].phase] == ["setup", "write"]
    assert {progress.phase for progress in seen[1:-1]} == {"train", "evaluate"}
    assert all(progress.total_steps == 15 for progress in seen[1:])
    assert sorted(progress.step for progress in seen) == [progress.step for progress in seen]
    assert seen[-1].metrics["val_error"] <= 1


def test_pretrain_sparse_evaluation_evaluates_the_last_step(tiny: TinyTraining) -> None:
    result = tiny.run(tiny.training(model=BATCHNORM, recipe={"eval_every_epochs": 2}))
    lines = [json.loads(tiny.store.get(metrics_segment(result.key, 1, low, high))) for low, high in ((0, 6), (6, 12))]
    assert ["val_error" in line["metrics"] for line in lines] == [False, True]
    assert 0 <= result.metrics["val_error"] <= 1


def test_pretrain_diverging_loss_names_step_and_samples(tiny: TinyTraining) -> None:
    with pytest.raises(NumericsError, match=r"at step \d+ of .*train-000000\.tar:"):
        tiny.run(tiny.training(recipe={"lr": 1e30, "schedule": "constant", "warmup_epochs": 0.0}))


def test_pretrain_uneven_norm_group_is_a_user_error(tiny: TinyTraining) -> None:
    with pytest.raises(UserError, match="norm_group 6"):
        tiny.run(tiny.training(model=BATCHNORM, recipe={"norm_group": 6}))


def test_finetune_starts_from_the_pretrained_backbone(
    tiny: TinyTraining, pretrained: JobResult, tmp_path: Path
) -> None:
    request = tiny.training(JobKind.FINETUNE, model=BATCHNORM, backbone=pretrained.key, space=DEPTH1, seed=5)
    record = _record(tiny, tiny.run(request))
    assert record.summary["init_weights_sha256"] == _record(tiny, pretrained).summary["backbone_sha256"]
    assert record.summary["backbone_sha256"] != record.summary["init_weights_sha256"]
    logits, targets = _logits_on_val(tiny, record, record, tmp_path), _val_targets(tiny, record)
    assert record.metrics["val_error"] == pytest.approx(float((logits.argmax(1) != targets).double().mean()))


def test_probe_trains_the_head_only(tiny: TinyTraining, pretrained: JobResult, tmp_path: Path) -> None:
    request = tiny.training(JobKind.PROBE, model=BATCHNORM, backbone=pretrained.key, space=DEPTH1)
    record, backbone_record = _record(tiny, tiny.run(request)), _record(tiny, pretrained)
    assert "backbone.safetensors" not in record.parts
    assert record.summary["backbone_sha256"] == backbone_record.summary["backbone_sha256"]
    assert record.metrics["num_trained_parameters"] < record.metrics["num_parameters"]
    logits, targets = _logits_on_val(tiny, record, backbone_record, tmp_path), _val_targets(tiny, record)
    assert record.metrics["val_error"] == pytest.approx(float((logits.argmax(1) != targets).double().mean()))
    assert record.metrics["train_loss"] < math.log(2)


def test_transfer_that_normalises_images_in_another_way_than_the_pretraining_notes_both(
    tiny: TinyTraining, pretrained: JobResult
) -> None:
    def notes(recipe: dict[str, Any]) -> list[str]:
        request = tiny.training(JobKind.PROBE, model=BATCHNORM, backbone=pretrained.key, recipe={"epochs": 1, **recipe})
        found: list[str] = _record(tiny, tiny.run(request)).summary.get("notes", [])
        return found

    (note,) = notes({"mean": [0.4, 0.5, 0.6]})
    assert "with mean [0.4, 0.5, 0.6] and std [0.25, 0.25, 0.25], those of the pretraining with mean [0.5" in note
    assert notes({}) == []


def call_before_backbone(
    monkeypatch: pytest.MonkeyPatch, hook: Callable[[torch.nn.Module, tuple[torch.Tensor, ...]], None]
) -> None:
    """Have a hook called with the pretrained backbone of a probe and what that is given."""

    def backbone_of(job: JobContext, samples: LabelledSamples) -> tuple[torch.nn.Module, int]:
        backbone, num_features = pretrained_backbone(job, samples)
        backbone.register_forward_pre_hook(hook)
        return backbone, num_features

    monkeypatch.setattr(probe, "pretrained_backbone", backbone_of)


@pytest.mark.parametrize("augment", ["none", "flip"])
def test_probe_in_bf16_computes_all_features_in_it(
    tiny: TinyTraining, pretrained: JobResult, monkeypatch: pytest.MonkeyPatch, augment: str
) -> None:
    seen: list[tuple[bool, bool]] = []

    def note(*_: object) -> None:
        seen.append((torch.is_autocast_enabled(pick_device().type), torch.is_inference_mode_enabled()))

    call_before_backbone(monkeypatch, note)
    recipe = {"precision": "bf16", "augment": augment, "epochs": 0.5}
    tiny.run(tiny.training(JobKind.PROBE, model=BATCHNORM, recipe=recipe, backbone=pretrained.key, space=DEPTH1))
    assert {is_validation for _, is_validation in seen} == {True, False}
    assert all(is_bf16 for is_bf16, _ in seen)


def test_probe_with_dropout_drops_while_the_head_learns_and_keeps_the_statistics_of_batchnorm(
    tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {"name": "test_resnet", "image_size": 16, "kwargs": {}}
    origin = tiny.run(tiny.training(model=plain, recipe={"epochs": 0.5}))
    seen: list[tuple[bool, bool, bool]] = []

    def note(backbone: torch.nn.Module, _: object) -> None:
        is_normalising = any(layer.training for layer in batchnorm_layers(backbone))
        seen.append((backbone.training, is_normalising, torch.is_inference_mode_enabled()))

    call_before_backbone(monkeypatch, note)

    def head(dropout: float) -> bytes:
        execution = Execution(deterministic=True, micro_batch=16)  # else a GPU is tried with passes that drop nothing
        recipe = {"epochs": 1, "dropout": dropout}
        request = tiny.training(
            JobKind.PROBE, model=plain, recipe=recipe, backbone=origin.key, space=DEPTH1, execution=execution
        )
        record = _record(tiny, tiny.run(request))
        assert record.summary["backbone_sha256"] == _record(tiny, origin).summary["backbone_sha256"]
        return read_part(tiny.store, record, "head.safetensors")

    dropped = head(0.5)
    assert {drops for drops, _, is_validation in seen if not is_validation} == {True}
    assert {drops for drops, _, is_validation in seen if is_validation} == {False}
    assert not any(moves for _, moves, _ in seen)
    assert head(0.25) != dropped
    assert head(0.0) != dropped


@pytest.mark.parametrize("fields", [{"augment": "flip"}, {"dropout": 0.5}], ids=str)
@pytest.mark.parametrize(
    ("limits", "seed"),
    [({"micro_batch": 8}, 5), ({"memory_retries": 1}, 6), ({"micro_batch": 64, "memory_retries": 1}, 7)],
    ids=str,
)
def test_probe_of_changing_features_sends_no_more_than_a_micro_batch_through_the_backbone(
    tiny: TinyTraining, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limits: dict[str, Any], seed: int
) -> None:
    """With dropout it was the whole batch, also after that had not fitted."""
    sizes: list[int] = []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if not torch.is_inference_mode_enabled():  # which validation is
            if len(given[0]) > 8:
                raise torch.OutOfMemoryError("out of memory")
            sizes.append(len(given[0]))

    call_before_backbone(monkeypatch, note)
    plain = {"name": "test_resnet", "image_size": 16, "kwargs": {}}
    origin = tiny.run(tiny.training(model=plain, recipe={"epochs": 0.5}))
    execution, recipe = Execution(deterministic=True, **limits), {"epochs": 1, **fields}
    wanted: dict[str, Any] = {"model": plain, "recipe": recipe, "space": DEPTH1, "backbone": origin.key}
    tiny.run(tiny.training(JobKind.PROBE, seed=seed, execution=execution, **wanted))
    assert sizes == [8] * 12  # 6 batches of 16


def test_probe_of_features_that_stay_equal_computes_them_in_halves_where_a_batch_does_not_fit(
    tiny: TinyTraining, pretrained: JobResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def note(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        sizes.append(len(given[0]))
        if len(given[0]) > 30:
            raise torch.OutOfMemoryError("out of memory")

    def metrics(seed: int) -> Mapping[str, float]:
        wanted: dict[str, Any] = {"model": BATCHNORM, "recipe": {"epochs": 1, "lr": 0.0, "head_init": "zeros"}}
        request = tiny.training(JobKind.PROBE, seed=seed, space=DEPTH1, backbone=pretrained.key, **wanted)
        return tiny.run(request).metrics

    whole = metrics(31)
    call_before_backbone(monkeypatch, note)
    assert metrics(32)["val_error"] == whole["val_error"]
    assert sizes == [96, 48, 24, 24, 24, 24, 24, 24]  # samples of training, then of validation


def test_transfer_head_follows_the_transfer_seed_alone(tiny: TinyTraining, pretrained: JobResult) -> None:
    # Learning rate 0: what is committed is what the head started from.
    frozen = {"lr": 0.0, "epochs": 0.5}
    other = tiny.run(tiny.training(model=BATCHNORM, seed=1))

    def head(backbone: JobResult, seed: int) -> bytes:
        wanted: dict[str, Any] = {"model": BATCHNORM, "recipe": frozen, "space": DEPTH1, "backbone": backbone.key}
        record = _record(tiny, tiny.run(tiny.training(JobKind.PROBE, seed=seed, **wanted)))
        return read_part(tiny.store, record, "head.safetensors")

    assert head(pretrained, 0) == head(other, 0)
    assert head(pretrained, 0) != head(pretrained, 1)


def test_transfer_to_another_model_is_a_user_error(tiny: TinyTraining, pretrained: JobResult) -> None:
    with pytest.raises(UserError, match=f"asks for the model .*test_vit.*{pretrained.key}"):
        tiny.run(tiny.training(JobKind.FINETUNE, model=NO_BATCHNORM, backbone=pretrained.key, space=DEPTH1))


def test_pretrain_recipe_lr_of_zero_changes_no_parameter(tiny: TinyTraining) -> None:
    recipe = {"lr": 0.0, "weight_decay": RECIPE["weight_decay"]}
    record = _record(tiny, tiny.run(tiny.training(model=NO_BATCHNORM, recipe=recipe)))
    assert record.summary["backbone_sha256"] == record.summary["init_weights_sha256"]
