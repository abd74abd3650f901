"""How good a backbone is for a target while it is still being trained: a cached probe, in memory, by this process."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from orchestrator.core.contract import Evaluation, ExecutionContext, JobRequest
from orchestrator.core.errors import NumericsError, PreemptedError
from orchestrator.core.job_kinds import JobKind
from orchestrator.storage.artifacts import read_record
from workloads.checkpoint.retention import read_backbone
from workloads.data.index import SampleIndex
from workloads.data.source import SampleSource
from workloads.data.subset import SampleView, Subset
from workloads.features.artifact import FeatureTable
from workloads.features.backbone import FrozenBackbone, Preprocessing
from workloads.jobs.cached_features import CachedSamples
from workloads.jobs.embed import unlabelled_loader
from workloads.jobs.logistic_probe import measure
from workloads.labels.label_map import LabelMap
from workloads.models.build import build_backbone
from workloads.models.spec import ModelSpec
from workloads.models.weights import decode_tensors
from workloads.runtime.device import pick_device
from workloads.runtime.enums import Precision
from workloads.runtime.fingerprint import deterministic_numerics
from workloads.runtime.precision import Arithmetic
from workloads.train.recipe import Recipe

PREFIX: Final = "target_"
"""Before the names of what a probe of the target says of a pretraining: ``target_val_error``."""
_CENTER: Final = "center"
"""The view of images as they are: of validation samples, and by default of training samples."""


class TargetProbe:
    """Called with a backbone: embeds the target's images and fits the probe of ``Watch.probe``.

    It works on a copy in evaluation mode and draws no random numbers, so the training goes on as if it had not been.
    """

    def __init__(
        self,
        request: JobRequest,
        context: ExecutionContext,
        probe: Mapping[str, Any],
        *,
        document: Mapping[str, Any],
        device: torch.device,
    ) -> None:
        self._context = context
        self._request = _probe_request(request, probe)
        look = self._request.parameters["look"]
        # As an embed job and a cached probe compute, whatever the training does: trials are compared by one measure.
        precision = Precision(look.get("precision", Precision.FP32))
        self._arithmetic = Arithmetic(device, precision=precision, deterministic=request.execution.deterministic)
        self.preprocessing = Preprocessing.of(look, document)
        """How the target's images are seen: as those of the pretraining."""

    def __call__(self, backbone: nn.Module) -> dict[str, float]:
        """Errors and losses of the target in [0, 1], by names that begin with ``target_``.

        Raises:
            UserError, BadDataError, NumericsError, PreemptedError, StorageError: why it cannot be judged.
        """
        with torch.random.fork_rng(devices=[]):  # nothing here should draw; should a library do so, nobody notices
            return self.of_frozen(
                FrozenBackbone(copy.deepcopy(backbone), 0, self.preprocessing, self._arithmetic.device)
            )

    def of_frozen(self, backbone: FrozenBackbone) -> dict[str, float]:
        """The same of a backbone that nobody trains."""
        with self._arithmetic.numerics():
            found = measure(self._request, self._samples(backbone), self._poll)
        return {f"{PREFIX}{name}": value for name, value in found.metrics.items() if name.endswith(("error", "loss"))}

    def _samples(self, backbone: FrozenBackbone) -> CachedSamples:
        request, context = self._request, self._context
        location = request.execution.data_location
        index = SampleIndex.open(context.store, request.inputs["index"], context.cache, location)
        label_map = LabelMap.open(context.store, request.inputs["labels"])
        tables = {"val": self._table(index, label_map, "val", backbone)}
        has_all = request.parameters.get("has_all_views", False)
        for view in request.parameters["recipe"]["views"] if has_all else [_CENTER]:
            role = "train" if view == _CENTER else f"train_{view}"
            tables[role] = self._table(index, label_map, "train", self._behind(view, backbone))
        return CachedSamples.of(request, context, tables, self._arithmetic.device)

    def _behind(self, view: str, backbone: FrozenBackbone) -> FrozenBackbone:
        """The same network, which sees images as an embed job of the view does."""
        look = replace(backbone.preprocessing, is_mirrored=view == "mirrored")
        return FrozenBackbone(backbone.network, backbone.num_features, look, self._arithmetic.device)

    def _table(self, index: SampleIndex, label_map: LabelMap, split: str, backbone: FrozenBackbone) -> FeatureTable:
        """Features of a split. Of training samples only those that the probe's subset keeps are computed."""
        pixels = backbone.preprocessing.pixels
        source = SampleSource(
            self._context.store, index, split, cache_dir=self._context.cache, pixels=pixels, cache_bytes=0
        )
        with closing(source):
            subset = Subset.of(self._request.parameters.get("subset")) if split == "train" else None
            ordinals = SampleView.of(source.split, label_map.resolve_targets(source.split), subset).ordinals()
            batches = list(self._embedded(source, ordinals, backbone))
            number = source.split.num_samples
        found = np.concatenate([np.empty(0, dtype=np.int64), *(ordinals_B for ordinals_B, _ in batches)])
        dim = batches[0][1].shape[1] if batches else 1
        features_ND = np.zeros((number, dim), dtype=np.float16)
        for ordinals_B, features_BD in batches:
            features_ND[ordinals_B] = features_BD
        return FeatureTable(
            key=f"{split} of {index.key} while {self._request.job} trains",
            split=split,
            index_key=index.key,
            dataset_digest="",
            dim=dim,
            starts=np.zeros(1, dtype=np.int64),
            parts=(features_ND,),
            missing=np.setdiff1d(np.arange(number, dtype=np.int64), found),
        )

    def _embedded(
        self, source: SampleSource, ordinals: NDArray[np.int64], backbone: FrozenBackbone
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float16]]]:
        num_threads = self._request.execution.num_threads
        for batch in unlabelled_loader(source, ordinals, num_threads=num_threads, device=self._arithmetic.device):
            self._poll(0)
            with torch.inference_mode(), self._arithmetic.autocast():
                features_BD = backbone(batch.images_BCHW).to(torch.float16)
            if not bool(torch.isfinite(features_BD).all()):
                message = f"features of {self._request.job} are NaN, infinite or beyond float16 (65504): it diverges; "
                raise NumericsError(message + "lower recipe.lr")
            yield batch.ordinals_B, features_BD.cpu().numpy()

    def _poll(self, _: int) -> None:
        self._context.activity.tick()
        if self._context.should_stop():
            raise PreemptedError(f"{self._request.job} was asked to stop while it was judged")


def target_probe_of(
    request: JobRequest, context: ExecutionContext, *, document: Mapping[str, Any], device: torch.device
) -> TargetProbe | None:
    """The probe that a search asks for; None where trials judge themselves."""
    if context.watch is None or not context.watch.probe:
        return None
    return TargetProbe(request, context, context.watch.probe, document=document, device=device)


def judge_committed(request: JobRequest, context: ExecutionContext) -> None:
    """Tell a search of a pretraining that was over before it asked: what its probe says of the committed weights."""
    recipe = Recipe.from_mapping(request.parameters["recipe"])
    device, started_s = pick_device(context), time.perf_counter()
    look = {"mean": recipe.mean, "std": recipe.std}
    probe = target_probe_of(request, context, document=look, device=device)
    if probe is None or context.watch is None:
        return
    record = read_record(context.store, request.key, identity=request.identity)
    with deterministic_numerics(request.execution.num_threads):
        backbone, num_features = build_backbone(ModelSpec.from_mapping(request.parameters["model"]), 0)
        backbone.load_state_dict(decode_tensors(read_backbone(context.store, record, {})))
        found = probe.of_frozen(FrozenBackbone(backbone, num_features, probe.preprocessing, device))
    spent_s = time.perf_counter() - started_s
    step = int(record.metrics["num_steps"])
    metrics = {**record.metrics, **found}
    context.watch.tell(Evaluation(step=step, epoch=recipe.epochs, metrics=metrics, spent_s=spent_s))


def _probe_request(request: JobRequest, probe: Mapping[str, Any]) -> JobRequest:
    """A request as that of a cached probe of the target; nothing is ever committed under it."""
    identity = {"kind": JobKind.PROBE.value, "parameters": probe["parameters"], "inputs": probe["inputs"]}
    return JobRequest(
        attempt_id=request.attempt_id,
        attempt_number=request.attempt_number,
        sweep=request.sweep,
        job=request.job,
        key=request.key,
        kind=JobKind.PROBE,
        identity=identity,
        store_uri=request.store_uri,
        execution=replace(request.execution, data_location=probe["location"]),
    )
