"""The edge: what a sweep.yaml may say. Strict pydantic; nothing behind this module sees it.

Every field has a description with its unit and range, because the schema is also the reference of the language.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.ids import canonical_json
from orchestrator.spec.suggest import did_you_mean
from orchestrator.spec.tree import Path

_MAX_INTEGER = 2**53 - 1  # the largest that canonical JSON encodes
# What the data plane passes to timm itself; a test keeps this equal to its list.
RESERVED_KWARGS = frozenset({"checkpoint_path", "features_only", "in_chans", "num_classes", "pretrained", "scriptable"})

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")]
Seed = Annotated[int, Field(ge=0, le=_MAX_INTEGER)]
Count = Annotated[int, Field(ge=1, le=_MAX_INTEGER)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Triple = Annotated[list[float], Field(min_length=3, max_length=3)]
Scales = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=3, max_length=3)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class Strict(BaseModel):
    """No coercion, no infinities, no unknown keys; an unknown key is answered with the nearest known one."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: object) -> object:
        if isinstance(value, Mapping):
            for key in value:
                if key not in cls.model_fields:
                    context = {"key": key, "hint": did_you_mean(str(key), cls.model_fields)}
                    raise PydanticCustomError("unknown_key", "unknown key '{key}': {hint}", context)
        return value


class SyntheticHierarchy(Strict):
    """Procedural images of a label tree; levels are ``depth1`` (coarsest) ... ``depthN`` (leaf)."""

    builtin: Literal["synthetic-hierarchy"]
    branching: Annotated[list[Count], Field(min_length=2, max_length=8)] = Field(
        [2, 4, 4, 4], description="Children per node, from the root down; the product is the number of leaf classes."
    )
    num_train: Count = Field(4096, description="Training samples.")
    num_val: Count = Field(2048, description="Validation samples.")
    image_size: Count = Field(32, description="Side of the square images, pixels; a multiple of patch_size.")
    patch_size: Count = Field(8, description="Side of a patch, pixels.")
    hard_fraction: Fraction = Field(0.5, description="Share of validation samples without common-feature patches.")
    noise: float = Field(1.0, ge=0, description="Standard deviation of the pixel noise.")
    feature_amplitude: float = Field(1.0, gt=0, description="Root-mean-square pixel value of a feature patch.")
    amplitude_jitter: float = Field(
        0.2, ge=0, lt=1, description="iota: squared amplitudes lie in [1 - iota, 1 + iota]."
    )
    weak_amplitude: Fraction = Field(0.2, description="gamma: largest amplitude of a weak feature of another class.")
    num_weak_features: int = Field(2, ge=0, le=_MAX_INTEGER, description="Weak features in each remaining patch.")
    num_common_patches: Count = Field(4, description="Patches that name the superclass, in a normal sample.")
    num_subclass_patches: Count = Field(1, description="Patches that name each finer level.")
    seed: Seed = Field(0, description="Seed of the generator.")


class Digits(Strict):
    """The handwritten digits inside scikit-learn: 1,797 real scans of 8x8 pixels; one level, ``digit``."""

    builtin: Literal["digits"]
    val_fraction: float = Field(0.2, gt=0, lt=1, description="Share of samples held out for validation, per class.")
    seed: Seed = Field(0, description="Seed of the split.")


DatasetSpec = Annotated[SyntheticHierarchy | Digits, Field(discriminator="builtin")]


class RandomIds(Strict):
    """Random label ids, balanced: a keyed permutation of the samples modulo ``num_classes``."""

    num_classes: Annotated[list[Annotated[int, Field(ge=2)]], Field(min_length=1)] = Field(
        description="One label space per number."
    )
    seed: Seed = Field(0, description="Seed of the permutation; never follows the pretrain seed.")


class LabelEntry(Strict):
    """One entry of ``labels``: a data set and exactly one rule."""

    RULES: ClassVar[tuple[str, ...]] = ("hierarchy", "random", "modulo")

    dataset: str = Field(description="Name of an entry of datasets.")
    hierarchy: Annotated[list[str], Field(min_length=1)] | None = Field(None, description="Levels of the hierarchy.")
    random: RandomIds | None = Field(None, description="Random ids.")
    modulo: int | None = Field(None, ge=2, description="Leaf class modulo this number.")

    @model_validator(mode="after")
    def _exactly_one_rule(self) -> LabelEntry:
        given = [rule for rule in self.RULES if getattr(self, rule) is not None]
        if len(given) != 1:
            context = {"given": ", ".join(given) or "none", "rules": ", ".join(self.RULES)}
            raise PydanticCustomError("one_rule", "needs exactly one of {rules}; it has {given}", context)
        return self


def _unstable(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """The keys and values inside a value that have no canonical JSON form, with the steps to each."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unstable(key, (*path, key))
            yield from _unstable(item, (*path, key))
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _unstable(item, (*path, position))
    else:
        try:
            canonical_json(value)
        except ValueError:
            yield path, value


def _canonical(value: object) -> object:
    """The value, if an identity can hold it."""
    for path, part in _unstable(value):
        context = {"part": repr(part), "at": path, "limit": _MAX_INTEGER}
        message = "{part} is refused: it has no stable encoding; use text, finite numbers and integers up to {limit}"
        raise PydanticCustomError("refused", message, context)
    return value


def _not_reserved(name: str) -> str:
    """The name of an argument that a sweep may set."""
    if name in RESERVED_KWARGS:
        raise PydanticCustomError("reserved", "the product sets this argument itself; remove it")
    return name


class ModelSpec(Strict):
    """A network by its timm name."""

    name: Annotated[str, Field(min_length=1)] = Field(description="Any timm model name.")
    image_size: Count = Field(description="Side of the square input, pixels.")
    kwargs: dict[Annotated[str, AfterValidator(_not_reserved)], Annotated[Any, AfterValidator(_canonical)]] = Field(
        default_factory=dict, description="Arguments for timm.create_model: plain JSON, none that the product sets."
    )


class RecipeSpec(Strict):
    """Training hyper-parameters. ``base`` names a shipped recipe whose fields this one overrides."""

    epochs: float = Field(gt=0, description="Passes over the training split; steps = round(epochs * N / batch_size).")
    batch_size: Count = Field(description="Global batch, samples.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="Optimiser.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum.")
    nesterov: bool = Field(default=False, description="Nesterov momentum (SGD); needs momentum > 0.")
    betas: Betas = Field([0.9, 0.999], description="Adam betas, in [0, 1).")
    weight_decay: float = Field(0.0, ge=0, description="Weight decay of all parameters.")
    schedule: Literal["constant", "linear", "cosine"] = Field("cosine", description="Shape after warm-up, down to 0.")
    warmup_epochs: float = Field(0.0, ge=0, description="Linear warm-up from 0, epochs; at most epochs.")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Mass spread over all classes.")
    grad_clip: float = Field(0.0, ge=0, description="Largest gradient norm; 0 = no clipping.")
    augment: Literal["none", "flip", "crop_flip"] = Field("none", description="Training augmentation.")
    norm_group: Count | None = Field(
        None, description="Samples per BatchNorm statistic, a divisor of batch_size; default min(batch_size, 64)."
    )
    precision: Literal["fp32"] = Field("fp32", description="Arithmetic of forward and backward passes.")
    shuffle_block_shards: Count = Field(16, description="Shards whose samples are shuffled together.")
    mean: Triple = Field([0.5, 0.5, 0.5], description="Channel means of the input in [0, 1].")
    std: Scales = Field([0.5, 0.5, 0.5], description="Channel standard deviations of the input, > 0.")
    eval_every_epochs: Count = Field(1, description="Epochs between validations; the last epoch is always validated.")

    # The data plane refuses the same; here it is refused before anything is created.
    @field_validator("nesterov")
    @classmethod
    def _needs_momentum(cls, nesterov: bool, others: ValidationInfo) -> bool:  # noqa: FBT001 - pydantic's signature
        if nesterov and others.data.get("momentum") == 0:
            message = "Nesterov's update needs momentum, which is 0; set momentum > 0 or nesterov: false"
            raise PydanticCustomError("no_momentum", message)
        return nesterov

    @field_validator("warmup_epochs")
    @classmethod
    def _ends_before_training(cls, warmup_epochs: float, others: ValidationInfo) -> float:
        epochs = others.data.get("epochs", warmup_epochs)
        if warmup_epochs > epochs:
            message = "the warm-up would last longer than the training of {epochs} epochs; use 0 to {epochs}"
            raise PydanticCustomError("long_warmup", message, {"epochs": f"{epochs:g}"})
        return warmup_epochs

    @field_validator("norm_group")
    @classmethod
    def _divides_the_batch(cls, norm_group: int | None, others: ValidationInfo) -> int | None:
        batch_size = others.data.get("batch_size")
        if norm_group and batch_size and batch_size % norm_group:
            message = "batch_size {batch_size} is not a whole number of norm groups; use a divisor of {batch_size}"
            raise PydanticCustomError("uneven_groups", message, {"batch_size": batch_size})
        return norm_group


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(description="A shipped recipe's name, or the fields themselves.")
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Pretraining seeds.")


class TransferSpec(Strict):
    """One measurement of every backbone."""

    name: Name
    target: str = Field(description="Label space to transfer to, by its path (levels/depth1).")
    protocol: Literal["finetune", "probe"] = Field(
        description="Train everything, or a linear head on a frozen backbone."
    )
    recipe: str | dict[str, Any] | None = Field(
        None, description="As in pretrain; default: the protocol's shipped one."
    )
    seeds: Annotated[list[Seed], Field(min_length=1)] = Field([0], description="Transfer seeds.")


class ReportSpec(Strict):
    """The answer."""

    baseline: str | None = Field(
        None, description="Label space to compare with: pretrained on the target's own labels."
    )
    metric: Literal["val_error", "best_val_error"] = Field("val_error", description="What is compared.")


class ResourcesSpec(Strict):
    """What one attempt occupies."""

    cpus: float = Field(1, ge=0, description="CPU cores; the attempt computes with as many threads.")
    gpus: float = Field(0, ge=0, description="GPUs.")
    memory_gib: float = Field(0, ge=0, description="Memory to reserve, GiB; 0 = not reserved.")


class ResourceGroups(Strict):
    """Resources by group of kinds: data = dataset, index, labels; transfer = finetune, probe."""

    data: ResourcesSpec = ResourcesSpec()
    pretrain: ResourcesSpec = ResourcesSpec()
    transfer: ResourcesSpec = ResourcesSpec()


class TrackingSpec(Strict):
    """Where MLflow is."""

    uri: str = Field("", description="Tracking URI without user and password; default: the project's own.")
    experiment: str = Field("", description="Experiment; default: the sweep's name.")

    @field_validator("uri")
    @classmethod
    def _refuse_credentials(cls, uri: str) -> str:
        # No message shows the URI: what stands before an @ may be a password.
        try:
            authority = urlsplit(uri).netloc
        except ValueError:
            message = "this is not a URI; write http(s)://host:port or sqlite:///absolute/path"
            raise PydanticCustomError("refused", message) from None
        if "@" in authority:
            message = (
                "a URI with a user or password is refused, because sweeps are stored and shared; "
                "remove it and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
            raise PydanticCustomError("refused", message)
        return uri


class PolicySpec(Strict):
    """What to do when jobs fail."""

    failures: Count = Field(3, description="Failed attempts before a job fails; preemptions do not count.")


class SweepSpec(Strict):
    """A whole sweep.yaml."""

    version: Literal[1]
    name: Name
    datasets: Annotated[dict[Name, DatasetSpec], Field(min_length=1)]
    labels: Annotated[dict[Name, LabelEntry], Field(min_length=1)]
    pretrain: PretrainSpec
    transfer: list[TransferSpec] = Field(default_factory=list)
    report: ReportSpec = ReportSpec()
    resources: ResourceGroups = ResourceGroups()
    store: str = Field("", description="URI of the object store; default: the project's own directory.")
    tracking: TrackingSpec = TrackingSpec()
    policy: PolicySpec = PolicySpec()
