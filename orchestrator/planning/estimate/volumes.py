"""The work and the output of each job of a plan, computed only from the identities of the plan. Pure.

Sizes of data sets that are known only after indexing are taken from ``sizes`` if the caller has them, else from the
sweep.yaml. If it declares none they are 0, and estimates say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from orchestrator.core.hyper_parameters import OPTIMIZERS
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.estimate.flops import (
    FORWARD_PASSES_PER_STEP,
    OPERATIONS_PER_MAC,
    Fit,
    Network,
    Work,
    network_of,
)
from orchestrator.planning.graph.data_checks import clustering_operations, most_clusters
from orchestrator.planning.graph.identity import subject_of
from orchestrator.planning.graph.plan import LABELLED, Job, Plan
from orchestrator.planning.graph.transfers import LABEL_SPACE
from orchestrator.sweepfile.datasets import digits_split

_FLOAT_BYTES = 4
_FEATURE_BYTES = 2
_INDEX_BYTES_PER_SAMPLE = 80
_TAR_BYTES_PER_SAMPLE = 3072
"""Headers and padding of an image and its metadata in a tar."""
_IMAGE_BYTES = 110_000
"""Of an image of external shards: a JPEG of 500 x 375 pixels, as in ImageNet."""
_RECORD_BYTES = 4096
_DIGITS_VAL_FRACTION, _DIGITS_CLASSES = 0.2, 10
_SCAN_S, _WRITE_S, _LABEL_S = 0.00012, 0.0004, 0.5
"""Core-seconds to index and to write a sample, and of a label space."""
_PASSES = 3  # forward, and the products of both factors backward


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetSize:
    """Samples of both splits, and leaf classes; 0 = not known."""

    num_train: int = 0
    num_val: int = 0
    num_classes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Volume:
    """Work and output of a job; ``caveat`` says what had to be assumed."""

    work: Work = field(default_factory=Work)
    subject: str = ""
    """On what speed depends beside the kind: the model, in canonical form; empty for kinds without one."""
    kept_bytes: int = _RECORD_BYTES
    """Of the artifact."""
    checkpoint_bytes: int = 0
    """At most, beside it, while the job runs."""
    read_bytes: int = 0
    """Of the images that it reads, once; 0 = not known, or nothing that counts."""
    gradient_bytes: int = 0
    """That its workers exchange at each update."""
    caveat: str = ""
    is_measured: bool = True
    """Whether results of such jobs have measured durations."""


class Volumes:
    """Volumes of a plan's jobs; facts that many jobs share are found once."""

    def __init__(self, plan: Plan, sizes: Mapping[str, DatasetSize] | None = None) -> None:
        """``sizes`` is by name of the ``index`` job."""
        self._plan, self._given = plan, dict(sizes or {})
        self._sizes: dict[str, DatasetSize] = {}
        self._networks: dict[str, Network] = {}

    def of(self, job: Job) -> Volume:
        """Volume of a job of the plan."""
        return _BY_KIND.get(job.kind, _of_unknown)(self, self._with_recipe(job))

    def _with_recipe(self, job: Job) -> Job:
        """The job with typical values of what a search finds for it."""
        search, parameters = self.input(job, "search"), job.identity["parameters"]
        if search is None or "recipe" not in parameters or search.identity["parameters"]["over"] != "recipe":
            return job
        recipe = filled(parameters["recipe"], search.identity["parameters"]["space"])
        return replace(job, identity={**job.identity, "parameters": {**parameters, "recipe": recipe}})

    @cached_property
    def by_key(self) -> Mapping[str, Job]:
        """Jobs by the keys that other jobs name as their inputs."""
        return {job.key: job for job in self._plan.jobs}

    def input(self, job: Job, *roles: str) -> Job | None:
        """The job behind the first of some roles that a job has and the plan knows."""
        keys: Mapping[str, str] = job.identity["inputs"]
        return next((self.by_key[keys[role]] for role in roles if keys.get(role) in self.by_key), None)

    def network(self, job: Job) -> tuple[str, Network]:
        """Canonical form of a job's ``model``, and what it is."""
        subject = subject_of(job.identity)
        if subject not in self._networks:
            self._networks[subject] = network_of(job.identity["parameters"]["model"])
        return subject, self._networks[subject]

    def size(self, index: Job | None) -> DatasetSize:
        """Samples behind an index."""
        if index is None:
            return DatasetSize()
        if index.name not in self._sizes:
            self._sizes[index.name] = self._find_size(index)
        return self._sizes[index.name]

    def trained_size(self, job: Job) -> DatasetSize:
        """Samples that have a target and are in the job's subset."""
        whole, labels = self.size(self.input(job, "index")), self.input(job, "labels")
        labelled = None if labels is None else labels.facets.get(LABELLED)
        share = min(1.0, int(labelled) / whole.num_train) if labelled and whole.num_train else 1.0
        return thinned(scaled(whole, share), job.identity["parameters"].get("subset", {}))

    def unlabelled(self, job: Job) -> str:
        """What is assumed where nobody knows how many samples have a target; empty elsewhere."""
        labels = self.input(job, "labels")
        is_unknown = labels is not None and labels.facets.get(LABELLED) == 0
        return "how many samples its label space leaves out is not known; none is assumed" if is_unknown else ""

    def num_classes(self, job: Job) -> int:
        """Outputs of a job's head; 0 if only the label space's record will tell."""
        labels = self.input(job, "labels")
        found = (labels or job).facets.get("granularity", 0)
        return int(found)

    def sample_bytes(self, index: Job | None) -> int:
        """Bytes of a sample in its shard."""
        dataset = None if index is None else self.input(index, "dataset")
        if dataset is None or "image_size" not in dataset.identity["parameters"]:
            return _IMAGE_BYTES + _TAR_BYTES_PER_SAMPLE
        return int(dataset.identity["parameters"]["image_size"]) ** 2 * 3 + _TAR_BYTES_PER_SAMPLE

    def _find_size(self, index: Job) -> DatasetSize:
        if index.name in self._given:
            return self._given[index.name]
        dataset = self.input(index, "dataset")
        if dataset is not None and "num_samples" not in index.execution.data_location:
            return builtin_size(dataset.identity["parameters"])
        parts = [self.by_key[key] for role, key in index.identity["inputs"].items() if role.startswith("part")]
        if parts:
            found = [self.size(part) for part in parts]
            return DatasetSize(  # classes at most: parts share those of one name
                num_train=sum(size.num_train for size in found),
                num_val=sum(size.num_val for size in found),
                num_classes=sum(size.num_classes for size in found),
            )
        declared = index.execution.data_location.get("num_samples", {})
        return DatasetSize(num_train=declared.get("train", 0), num_val=declared.get("val", 0))


def builtin_size(parameters: Mapping[str, Any]) -> DatasetSize:
    """Samples of a built-in data set, by its parameters."""
    num_train, num_val = parameters.get("num_train", 0), parameters.get("num_val", 0)
    num_classes = math.prod(parameters.get("branching", ())) if "branching" in parameters else 0
    if parameters.get("builtin") == "digits":
        num_train, num_val = digits_split(parameters.get("val_fraction", _DIGITS_VAL_FRACTION))
        num_classes = _DIGITS_CLASSES
    num_parts = parameters.get("part", {}).get("num", 1)  # a part job writes its share
    return DatasetSize(
        num_train=math.ceil(num_train / num_parts), num_val=math.ceil(num_val / num_parts), num_classes=num_classes
    )


def training_work(
    recipe: Mapping[str, Any], network: Network, image_size: int, *, size: DatasetSize, num_classes: int, kind: JobKind
) -> Work:
    """The work of a recipe: updates of the network, and evaluations of the whole validation split."""
    epochs, batch_size = float(recipe["epochs"]), int(recipe["batch_size"])
    num_steps = math.floor(epochs * size.num_train / batch_size + 0.5)
    num_evals = max(1, math.ceil(epochs / float(recipe.get("eval_every_epochs") or 1)))
    is_frozen = kind is JobKind.PROBE or recipe.get("freeze") == "backbone"
    passes = 1 if is_frozen else FORWARD_PASSES_PER_STEP
    images, eval_images = num_steps * batch_size, num_evals * size.num_val
    if kind is JobKind.PROBE:  # features of the validation split, and of images that always look the same, once
        eval_images = size.num_val
        is_plain = recipe.get("augment", "none") == "none" and not recipe.get("augment_plugin")
        has_one_look = is_plain and not recipe.get("dropout")
        images = size.num_train if has_one_look else images
    forward = OPERATIONS_PER_MAC * (network.macs + network.num_features * num_classes)
    return Work(
        operations=passes * forward * images,
        eval_operations=forward * eval_images,
        images=images,
        eval_images=eval_images,
        image_size=image_size,
        num_steps=num_steps,
        precision=recipe.get("precision", "fp32"),
        tf32=bool(recipe.get("tf32", False)),
        has_batchnorm=network.has_batchnorm,
    )


def scan_work(size: DatasetSize) -> Work:
    """Of indexing both splits."""
    return Work(core_s=_SCAN_S * (size.num_train + size.num_val))


def writing_work(size: DatasetSize) -> Work:
    """Of making the shards of a built-in data set."""
    return Work(core_s=_WRITE_S * (size.num_train + size.num_val))


def label_work() -> Work:
    """Of making a label space."""
    return Work(core_s=_LABEL_S)


def simulation_work(parameters: Mapping[str, Any]) -> Work:
    """Volume of a block of seeds, at a second each: the true time is known only from results."""
    return Work(core_s=float(parameters["seeds"]["stop"] - parameters["seeds"]["first"]))


def embed_work(parameters: Mapping[str, Any], network: Network, num_samples: float) -> Work:
    """Of the features of a split."""
    return Work(
        operations=OPERATIONS_PER_MAC * network.macs * num_samples,
        images=num_samples,
        image_size=int(parameters["model"]["image_size"]),
        precision=parameters.get("precision") or "fp32",
        has_batchnorm=network.has_batchnorm,
    )


def scaled(size: DatasetSize, share: float) -> DatasetSize:
    """A share of the classes, with their samples, as if all were equally large."""
    return DatasetSize(
        num_train=round(size.num_train * share),
        num_val=round(size.num_val * share),
        num_classes=math.ceil(size.num_classes * share),
    )


def thinned(size: DatasetSize, subset: Mapping[str, Any]) -> DatasetSize:
    """Size of the part of a training split that a subset leaves, about; caps are those of leaf classes."""
    left = size.num_train * float(subset.get("fraction", 1.0))
    if subset.get("max_per_class") and size.num_classes:
        left = min(left, subset["max_per_class"] * size.num_classes)
    left = min(left, subset.get("num_samples") or left)
    return replace(size, num_train=math.ceil(left))


def filled(recipe: Mapping[str, Any], space: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A recipe with typical values of the searched fields: the middle of a range or list."""
    return {**recipe, **{field: _typical(values) for field, values in space.items() if field != LABEL_SPACE}}


def typical_trial(job: Job) -> Job:
    """The job that a search's middle trial is, with the search's name and inputs."""
    parameters, trial = job.identity["parameters"], job.identity["parameters"]["trial"]
    recipe = filled(trial["parameters"]["recipe"], parameters["space"])
    own = {**trial["parameters"], "recipe": recipe}
    labels = next((key for role, key in job.identity["inputs"].items() if role.startswith("labels")), "")
    inputs = {"labels": labels, **job.identity["inputs"]}
    identity = {**job.identity, "kind": trial["kind"], "parameters": own, "inputs": inputs}
    return replace(job, kind=JobKind(trial["kind"]), identity=identity)


def num_full_trials(job: Job) -> float:
    """Whole trials that a search's trials are worth: at each rung all but the best ``1 / reduction`` are stopped."""
    before, done, stages = 0.0, 0.0, _stages(job)
    if len(stages) == 1:
        return stages[0][1]
    for epoch, number in stages:
        before, done = epoch, done + number * (epoch - before)
    return done / before


def _stages(job: Job) -> list[tuple[float, float]]:
    """Epochs at which trials of a search are judged, the last one being their end, and how many come so far."""
    parameters = job.identity["parameters"]
    left, options = float(parameters["trials"]), parameters["algorithm"].get("asha")
    epochs = float(typical_trial(job).identity["parameters"]["recipe"].get("epochs", 0.0))
    stages: list[tuple[float, float]] = []
    rung = epochs if options is None else float(options["grace_epochs"] or 1)
    while rung < epochs:
        stages.append((rung, left))
        rung, left = rung * options["reduction"], max(1.0, left / options["reduction"])
    return [*stages, (epochs or 1.0, left)]


def _judging_work(volumes: Volumes, job: Job) -> Work:
    """Of all judgements of a search for backbones: each embeds the target, as ``embed`` jobs do; nothing for others."""
    probe = job.identity["parameters"].get("probe")
    if probe is None:
        return Work()
    size = volumes.size(volumes.input(job, "target_index"))
    num_views = len(probe["recipe"].get("views", ())) if probe.get("has_all_views") else 1
    num_images = num_views * thinned(size, probe.get("subset", {})).num_train + size.num_val
    num_judgements = sum(number for _, number in _stages(job))
    return embed_work(probe["look"], network_of(probe["model"]), num_judgements * num_images)


def times(work: Work, factor: float) -> Work:
    """So many times the work."""
    return replace(
        work,
        operations=work.operations * factor,
        eval_operations=work.eval_operations * factor,
        images=work.images * factor,
        eval_images=work.eval_images * factor,
        num_steps=round(work.num_steps * factor),
        core_s=work.core_s * factor,
    )


def _typical(values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - recipe fields are of any JSON type
    ((scale, content),) = values.items()
    if scale == "values":
        return content[len(content) // 2]
    low, high = content
    middle = (low * high) ** 0.5 if scale.startswith("log") else (low + high) / 2
    return round(middle) if "integer" in scale else middle


def _of_training(volumes: Volumes, job: Job) -> Volume:
    parameters: Mapping[str, Any] = job.identity["parameters"]
    if is_cached(job.identity):
        return _of_features(volumes, job)
    subject, network = volumes.network(job)
    recipe, num_classes = parameters["recipe"], volumes.num_classes(job)
    index = volumes.input(job, "index")
    whole = volumes.size(index)
    size = volumes.trained_size(job)
    work = training_work(
        recipe,
        network,
        int(parameters["model"]["image_size"]),
        size=size,
        num_classes=num_classes,
        kind=job.kind,
    )
    weights = _FLOAT_BYTES * (network.num_features + 1) * num_classes
    weights += 0 if job.kind is JobKind.PROBE else _FLOAT_BYTES * network.num_parameters
    keep = parameters.get("keep", {})
    num_kept = len(keep.get("epochs", ())) + int((keep.get("best") or {}).get("k", 0))
    copies = 1 + OPTIMIZERS[recipe.get("optimizer", "sgd")].state_copies + (recipe.get("average", "none") != "none")
    return Volume(
        work=work,
        subject=subject,
        kept_bytes=_RECORD_BYTES + weights * (1 + num_kept),
        checkpoint_bytes=weights * copies * (job.execution.checkpoint_keep_last + num_kept),
        read_bytes=whole.num_train * volumes.sample_bytes(index),
        gradient_bytes=weights // (2 if recipe.get("grad_reduction") == "bf16" else 1),
        caveat="; ".join(filter(None, (_caveat(network, whole), volumes.unlabelled(job)))),
    )


def _of_features(volumes: Volumes, job: Job) -> Volume:
    """A probe or nearest neighbours on features that ``embed`` jobs made: products of matrices, without any image."""
    recipe: Mapping[str, Any] = job.identity["parameters"]["recipe"]
    size, num_classes = volumes.trained_size(job), max(2, volumes.num_classes(job))
    subject, network = volumes.network(job)
    num_steps = 0
    if job.kind is JobKind.KNN:
        products = float(size.num_train) * size.num_val
    elif "epochs" in recipe:
        num_steps = math.floor(float(recipe["epochs"]) * size.num_train / int(recipe["batch_size"]) + 0.5)
        products = _PASSES * float(recipe["epochs"]) * size.num_train * num_classes
    else:  # L-BFGS, once per strength of regularisation, warm-started: far from its last iteration
        tries, iterations = len(recipe.get("l2", (0,))), int(recipe.get("max_iterations", 100))
        products = _PASSES * 0.1 * tries * iterations * float(size.num_train) * num_classes
    work = Work(operations=OPERATIONS_PER_MAC * network.num_features * products, num_steps=num_steps, core_s=_LABEL_S)
    weights = 0 if job.kind is JobKind.KNN else _FLOAT_BYTES * (network.num_features + 1) * num_classes
    return Volume(
        work=work,
        subject=subject,
        kept_bytes=_RECORD_BYTES + weights,
        caveat=_unknown_size(size),
        is_measured=False,
    )


def is_cached(identity: Mapping[str, Any]) -> bool:
    """Whether a job trains on features that are there already."""
    found: bool = identity["parameters"].get("recipe", {}).get("features") == "cached"
    return found


def _of_embed(volumes: Volumes, job: Job) -> Volume:
    subject, network = volumes.network(job)
    parameters: Mapping[str, Any] = job.identity["parameters"]
    index = volumes.input(job, "index")
    size = volumes.size(index)
    number = size.num_train if parameters.get("split") == "train" else size.num_val
    work = embed_work(parameters, network, number)
    kept_bytes = _RECORD_BYTES + number * network.num_features * _FEATURE_BYTES
    return Volume(
        work=work,
        subject=subject,
        kept_bytes=kept_bytes,
        read_bytes=number * volumes.sample_bytes(index),
        caveat=_caveat(network, size),
    )


def _of_cluster(volumes: Volumes, job: Job) -> Volume:
    rule: Mapping[str, Any] = job.identity["parameters"]
    size = volumes.size(volumes.input(job, "index"))
    features = volumes.input(job, "train")
    dim = volumes.network(features)[1].num_features if features is not None else 1024
    operations = clustering_operations(rule, size.num_train, dim)
    kept_bytes = _RECORD_BYTES + _FLOAT_BYTES * (size.num_train + size.num_val + most_clusters(rule) * dim)
    return Volume(work=Work(operations=operations), kept_bytes=kept_bytes, caveat=_unknown_size(size))


def _of_dataset(_: Volumes, job: Job) -> Volume:
    parameters: Mapping[str, Any] = job.identity["parameters"]
    size = DatasetSize() if job.needs else builtin_size(parameters)  # of shards that part jobs write it commits a list
    number = size.num_train + size.num_val
    per_sample = _TAR_BYTES_PER_SAMPLE + 3 * int(parameters.get("image_size", 8)) ** 2
    return Volume(work=writing_work(size), kept_bytes=_RECORD_BYTES + number * per_sample)


def _of_index(volumes: Volumes, job: Job) -> Volume:
    size = volumes.size(job)
    number = size.num_train + size.num_val
    return Volume(
        work=scan_work(size),
        kept_bytes=_RECORD_BYTES + number * _INDEX_BYTES_PER_SAMPLE,
        caveat=_unknown_size(size),
    )


def _of_labels(volumes: Volumes, job: Job) -> Volume:
    by_sample = "clusters" in job.identity["inputs"]
    size = volumes.size(volumes.input(job, "index")) if by_sample else DatasetSize()
    kept_bytes = _RECORD_BYTES + _FLOAT_BYTES * (size.num_train + size.num_val)
    return Volume(work=label_work(), kept_bytes=kept_bytes)


def _of_search(volumes: Volumes, job: Job) -> Volume:
    """Of all trials together, which share what the search holds; their artifacts stay, those of stopped ones go."""
    trial = volumes.of(typical_trial(job))
    number, num_at_once = num_full_trials(job), job.execution.num_workers
    work, judging = times(trial.work, number), _judging_work(volumes, job)
    work = replace(
        work,
        eval_operations=work.eval_operations + judging.operations,
        eval_images=work.eval_images + judging.images,
        # Workers share the operations of a step, but trials that run at the same time make their steps side by side.
        num_steps=round(work.num_steps / num_at_once),
    )
    return replace(
        trial,
        work=work,
        kept_bytes=_RECORD_BYTES + math.ceil(number) * trial.kept_bytes,
        checkpoint_bytes=num_at_once * trial.checkpoint_bytes,
        gradient_bytes=0,
        is_measured=False,
    )


def _of_theory(_: Volumes, job: Job) -> Volume:
    caveat = "none of its seeds has run yet; a second is assumed for each"
    return Volume(work=simulation_work(job.identity["parameters"]), subject=subject_of(job.identity), caveat=caveat)


def _of_analysis(volumes: Volumes, job: Job) -> Volume:
    """Passes over features: two products of a matrix by itself for the classes trained on and two for the others.

    Besides, the samples that pass through the backbone.
    """
    size, roles = volumes.size(volumes.input(job, "index")), job.identity["inputs"]
    parameters: Mapping[str, Any] = job.identity["parameters"]
    tables = [
        found for role in roles if (found := volumes.input(job, role)) is not None and found.kind is JobKind.EMBED
    ]
    dim = max((volumes.network(table)[1].num_features for table in tables), default=1024)
    number = max(size.num_train, size.num_val) if "train" in roles else size.num_val
    operations = float(OPERATIONS_PER_MAC) * number * dim * dim * max(4, len(tables) ** 2)
    work = Work()
    if "backbone" in roles:
        num_passed = min(parameters["measures"]["sparsity"]["samples"], number or math.inf)
        work = embed_work(parameters, volumes.network(job)[1], num_passed)
    return Volume(
        work=replace(work, operations=work.operations + operations, core_s=_LABEL_S),
        kept_bytes=_RECORD_BYTES * 16,
        caveat=_unknown_size(size),
        is_measured=False,
    )


def _of_unknown(_: Volumes, job: Job) -> Volume:
    return Volume(work=Work(core_s=1.0), caveat=f"nothing is known about the work of {job.kind} jobs")


def _caveat(network: Network, size: DatasetSize) -> str:
    texts = {
        Fit.KNOWN: "",
        Fit.CHANGED: "kwargs change the network; its cost is taken for that of the unchanged one",
        Fit.UNKNOWN: "the network is not in the table of models; a ResNet-50 is assumed",
    }
    return "; ".join(text for text in (texts[network.fit], _unknown_size(size)) if text)


def _unknown_size(size: DatasetSize) -> str:
    return "" if size.num_train else "the size of the data set is unknown until it is indexed: declare num_train"


_BY_KIND: Mapping[JobKind, Callable[[Volumes, Job], Volume]] = {
    JobKind.DATASET: _of_dataset,
    JobKind.INDEX: _of_index,
    JobKind.LABELS: _of_labels,
    JobKind.EMBED: _of_embed,
    JobKind.CLUSTER: _of_cluster,
    JobKind.PRETRAIN: _of_training,
    JobKind.FINETUNE: _of_training,
    JobKind.PROBE: _of_training,
    JobKind.KNN: _of_features,
    JobKind.SEARCH: _of_search,
    JobKind.THEORY: _of_theory,
    JobKind.ANALYZE: _of_analysis,
}
