"""Recipes as a sweep.yaml states them: hyper-parameters, and which of them mean nothing beside others. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.sweepfile.fields import Count, Strict

Positive = Annotated[float, Field(gt=0)]
Triple = Annotated[list[float], Field(min_length=3, max_length=3)]
Scales = Annotated[list[Positive], Field(min_length=3, max_length=3)]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


def _ascending(values: list[float]) -> list[float]:
    """The values, if each is larger than the one before."""
    for low, high in pairwise(values):
        if high < low:
            message = "{high} stands after {low}; write them in ascending order"
            raise PydanticCustomError("descending", message, {"low": low, "high": high})
    return values


def _frozen(value: object) -> object:
    """``none``, ``backbone`` or a list of patterns."""
    if value in ("none", "backbone") or (
        isinstance(value, list) and value and all(isinstance(item, str) and item for item in value)
    ):
        return value
    message = "write none, backbone or a list of patterns of parameter names (['backbone.blocks.0.*'])"
    raise PydanticCustomError("freeze", message)


def _reaction(value: object) -> object:
    """``stop`` or ``{rewind: n}``."""
    if value == "stop":
        return value
    steps = value.get("rewind") if isinstance(value, Mapping) and value.keys() == {"rewind"} else None
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
        return value
    raise PydanticCustomError("on_numerics", "write stop or {rewind: n}, n >= 1 updates")


Pair = Annotated[list[Positive], Field(min_length=2, max_length=2), AfterValidator(_ascending)]
Shares = Annotated[
    list[Annotated[float, Field(gt=0, le=1)]], Field(min_length=2, max_length=2), AfterValidator(_ascending)
]
Frozen = Annotated[Any, AfterValidator(_frozen)]
Reaction = Annotated[Any, AfterValidator(_reaction)]

# These stand in every identity, as they did in the first release. A field that came later is left out at its default,
# so that a release with more fields retrains nothing; such a default never changes without a bump of code_version.
ALWAYS_RESOLVED = frozenset(
    {"epochs", "batch_size", "lr", "optimizer", "momentum", "nesterov", "betas", "weight_decay", "grad_clip"}
    | {"schedule", "warmup_epochs", "label_smoothing", "augment", "norm_group", "precision", "shuffle_block_shards"}
    | {"mean", "std", "eval_every_epochs"}
)


class RecipeSpec(Strict):
    """Training hyper-parameters. ``base`` names a shipped recipe whose fields this one overrides."""

    epochs: float = Field(gt=0, description="Passes over the training split; steps = round(epochs * N / batch_size).")
    batch_size: Count = Field(description="Global batch, samples.")
    lr: float = Field(gt=0, description="Peak learning rate.")
    optimizer: Literal["sgd", "adam", "adamw", "lamb", "lars"] = Field("sgd", description="Optimiser.")
    momentum: float = Field(0.9, ge=0, lt=1, description="Momentum (sgd, lars).")
    nesterov: bool = Field(default=False, description="Nesterov momentum (sgd, lars); needs momentum > 0.")
    betas: Betas = Field([0.9, 0.999], description="Decay of both moments, in [0, 1) (adam, adamw, lamb).")
    eps: Positive | None = Field(
        None, description="Added to denominators (all but sgd); default 1e-8, in lamb 1e-6, as their authors have it."
    )
    weight_decay: float = Field(0.0, ge=0, description="Weight decay.")
    weight_decay_on: Literal["all", "no_bias_norm"] = Field(
        "all", description="Parameters that decay; no_bias_norm spares vectors and scalars."
    )
    schedule: Literal["constant", "linear", "cosine", "step", "exponential"] = Field(
        "cosine", description="Learning rate after warm-up and constant_epochs."
    )
    warmup_epochs: float = Field(0.0, ge=0, description="Linear warm-up from 0, epochs; at most epochs.")
    warmup_steps: int = Field(0, ge=0, description="Linear warm-up from 0, steps; instead of warmup_epochs.")
    constant_epochs: float = Field(
        0.0, ge=0, description="Epochs at lr before the decay (linear, cosine, exponential)."
    )
    lr_final: float = Field(0.0, ge=0, description="Learning rate at the end (linear, cosine); at most lr.")
    lr_every: Literal["step", "half_epoch", "epoch"] = Field(
        "step", description="How often a linear, cosine or exponential decay takes a new value."
    )
    decay_rate: float = Field(0.1, gt=0, le=1, description="Factor of a milestone (step) or period (exponential).")
    decay_every_epochs: Positive = Field(1.0, description="Period of the exponential decay, epochs.")
    milestones: Annotated[list[Positive], AfterValidator(_ascending)] = Field(
        [], description="Epochs at which the learning rate is multiplied by decay_rate (step)."
    )
    loss: Annotated[str, Field(min_length=1)] = Field(
        "softmax", description="softmax, sigmoid (several classes per sample), or the name of an installed objective."
    )
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="Mass spread over all classes.")
    head_bias: float | None = Field(None, description="Initial bias of every output; default: PyTorch's random one.")
    head_init: Literal["default", "zeros"] = Field("default", description="Initial weights of the head.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout: in transformers within the blocks, else at the head.")
    drop_path: float = Field(0.0, ge=0, lt=1, description="Largest stochastic depth rate.")
    mixup: float = Field(0.0, ge=0, description="Alpha of mixup's Beta distribution; 0 = none.")
    cutmix: float = Field(0.0, ge=0, description="Alpha of CutMix's Beta distribution; 0 = none.")
    mix_prob: float = Field(1.0, gt=0, le=1, description="Share of pairs of images that are mixed at all.")
    cutmix_share: float = Field(0.5, gt=0, lt=1, description="Share of mixed pairs that are cut when both are on.")
    grad_clip: float = Field(0.0, ge=0, description="Largest gradient norm; 0 = no clipping.")
    average: Literal["none", "ema", "polyak"] = Field("none", description="Average of the weights that is the result.")
    average_decay: float = Field(0.9999, ge=0, lt=1, description="What the average keeps at each step (ema).")
    average_start_epoch: float = Field(0.0, ge=0, description="Epoch at which averaging begins; before epochs.")
    freeze: Frozen = Field("none", description="none, backbone, or patterns of names of parameters that do not learn.")
    on_numerics: Reaction = Field(
        "stop", description="After a NaN, infinity or spike: stop, or {rewind: n} updates and leave those batches out."
    )
    grad_spike: float = Field(
        0.0, ge=0, description="Gradient norm above so many (> 1) times its running mean is a failure; 0 = never."
    )
    augment: Literal[
        "none",
        "flip",
        "crop_flip",
        "random_crop",
        "random_crop_flip",
        "random_resized_crop",
        "random_resized_crop_flip",
    ] = Field("none", description="Training augmentation.")
    resize: Count | None = Field(
        None, description="Shorter side before a centre or random crop, pixels; default: the model's image size."
    )
    interpolation: Literal["bilinear", "bicubic"] = Field("bilinear", description="Filter of resizing.")
    crop_scale: Shares = Field([0.08, 1.0], description="Least and largest share of the area (random_resized_crop).")
    crop_ratio: Pair = Field([0.75, 4 / 3], description="Least and largest width / height (random_resized_crop).")
    color_jitter: float = Field(0.0, ge=0, le=1, description="Strength of brightness, contrast and saturation changes.")
    decoder: Literal["pillow", "turbo", "nvjpeg"] = Field(
        "pillow",
        description="Decoder and resizer of images; turbo is faster; its resized pixels differ from pillow's by one "
        "level (bilinear), or by two and at hard edges more (bicubic).",
    )
    norm_group: Count | None = Field(
        None, description="Samples per BatchNorm statistic, a divisor of batch_size; default min(batch_size, 64)."
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Arithmetic of forward and backward passes; weights are fp32 always."
    )
    tf32: bool = Field(default=False, description="Let float32 products run as TF32 on NVIDIA GPUs.")
    shuffle_block_shards: Count = Field(16, description="Shards whose samples are shuffled together.")
    shuffle_chunk_samples: Count | None = Field(
        None, description="Neighbours that stay together when blocks are formed; default: whole shards."
    )
    mean: Triple = Field([0.5, 0.5, 0.5], description="Channel means of the input in [0, 1].")
    std: Scales = Field([0.5, 0.5, 0.5], description="Channel standard deviations of the input, > 0.")
    eval_every_epochs: Count = Field(1, description="Epochs between validations; the last epoch is always validated.")
    select_holdout: float = Field(
        0.0, ge=0, le=0.5, description="Share of the training samples kept out of training, for select_error; 0 = none."
    )

    def resolved(self) -> dict[str, Any]:
        """The fields of an identity: those of ``ALWAYS_RESOLVED``, and the others where they are not at default."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        return {
            name: value
            for name, value in self.model_dump().items()
            if name in ALWAYS_RESOLVED or value != defaults[name]
        }

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

    @field_validator("warmup_steps")
    @classmethod
    def _is_the_only_warmup(cls, warmup_steps: int, others: ValidationInfo) -> int:
        if warmup_steps and others.data.get("warmup_epochs"):
            message = "warmup_epochs says {epochs} as well; keep one of the two"
            raise PydanticCustomError("two_warmups", message, {"epochs": f"{others.data['warmup_epochs']:g}"})
        return warmup_steps

    @field_validator("constant_epochs")
    @classmethod
    def _leaves_time_to_decay(cls, constant_epochs: float, others: ValidationInfo) -> float:
        warmup, epochs = others.data.get("warmup_epochs", 0), others.data.get("epochs", constant_epochs)
        if constant_epochs + warmup > epochs:
            message = "with {warmup} epochs of warm-up it lasts longer than the training of {epochs} epochs; use less"
            raise PydanticCustomError("long_rest", message, {"warmup": f"{warmup:g}", "epochs": f"{epochs:g}"})
        return constant_epochs

    @field_validator("lr_final")
    @classmethod
    def _is_not_above_the_peak(cls, lr_final: float, others: ValidationInfo) -> float:
        if lr_final > others.data.get("lr", lr_final):
            message = "the learning rate would rise, from lr {lr}; use at most {lr}"
            raise PydanticCustomError("rising_rate", message, {"lr": f"{others.data['lr']:g}"})
        return lr_final

    @field_validator("mixup", "cutmix")
    @classmethod
    def _has_whole_pairs(cls, alpha: float, others: ValidationInfo) -> float:
        if alpha and others.data.get("batch_size", 2) % 2:
            message = "images are mixed in pairs, but batch_size {batch_size} is odd; make it even"
            raise PydanticCustomError("odd_batch", message, {"batch_size": others.data["batch_size"]})
        return alpha

    @field_validator("average_start_epoch")
    @classmethod
    def _leaves_something_to_average(cls, start: float, others: ValidationInfo) -> float:
        if start and start >= others.data.get("epochs", start + 1):
            message = "the training of {epochs} epochs is over by then; use less"
            raise PydanticCustomError("late_average", message, {"epochs": f"{others.data['epochs']:g}"})
        return start

    @field_validator("grad_spike")
    @classmethod
    def _is_a_spike(cls, grad_spike: float) -> float:
        if 0 < grad_spike <= 1:
            message = "every gradient norm would be a spike; use more than 1 (say 10), or 0 for none"
            raise PydanticCustomError("no_spike", message)
        return grad_spike

    @field_validator("norm_group")
    @classmethod
    def _divides_the_batch(cls, norm_group: int | None, others: ValidationInfo) -> int | None:
        batch_size = others.data.get("batch_size")
        if norm_group and batch_size and batch_size % norm_group:
            message = "batch_size {batch_size} is not a whole number of norm groups; use a divisor of {batch_size}"
            raise PydanticCustomError("uneven_groups", message, {"batch_size": batch_size})
        if norm_group and norm_group % 2 and (others.data.get("mixup") or others.data.get("cutmix")):
            message = "images are mixed in pairs, which odd norm groups cut; use an even divisor of {batch_size}"
            raise PydanticCustomError("odd_groups", message, {"batch_size": batch_size})
        return norm_group


TRAINING = "training"
"""Protocol of what is neither a probe nor nearest neighbours: all else that trains."""
LOOK_FIELDS = ("resize", "interpolation", "decoder", "mean", "std", "precision")
"""How images are seen before they become features; where a recipe leaves one open, as in the pretraining."""


def _distinct(values: list[Any]) -> list[Any]:
    """The values, if none stands there twice."""
    for position, value in enumerate(values):
        if value in values[:position]:
            raise PydanticCustomError("repeated", "{value} stands here a second time; keep one", {"value": value})
    return values


Strengths = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1), AfterValidator(_distinct)]
Counts = Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)]
Views = Annotated[list[Literal["center", "mirrored"]], Field(min_length=1), AfterValidator(_distinct)]
Holdout = Annotated[float, Field(gt=0, le=0.5)]


class ProbeSpec(RecipeSpec):
    """A linear head trained by the recipe's optimiser on images, as any other training."""

    features: Literal["online", "cached"] = Field(
        "online", description="online: images go through the backbone in this job; cached: embed jobs did that."
    )

    def resolved(self) -> dict[str, Any]:
        """As any training: nothing says ``online`` in an identity."""
        return {name: value for name, value in super().resolved().items() if name not in {"features", "solver"}}


class CachedSgdSpec(ProbeSpec):
    """The same head and optimiser on features that embed jobs computed; images are seen unaugmented."""

    solver: Literal["lbfgs", "sgd"] = Field("sgd", description="lbfgs: to the optimum; sgd: as the recipe says.")

    def resolved(self) -> dict[str, Any]:
        """With where the features come from."""
        return {**super().resolved(), "features": "cached", "solver": "sgd"}


class _Frozen(Strict):
    """What recipes on cached features share."""

    select_holdout: Holdout = Field(
        0.1, description="Share of the training samples on which a choice is made, stratified and keyed by the seed."
    )
    resize: Count | None = Field(
        None, description="Shorter side before the centre square is cut out, pixels; default: as in pretraining."
    )
    interpolation: Literal["bilinear", "bicubic"] | None = Field(
        None, description="Filter of resizing; default: as in pretraining."
    )
    decoder: Literal["pillow", "turbo", "nvjpeg"] | None = Field(
        None, description="Decoder; default: as in pretraining."
    )
    mean: Triple | None = Field(None, description="Channel means in [0, 1]; default: as in pretraining.")
    std: Scales | None = Field(None, description="Channel standard deviations, > 0; default: as in pretraining.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Arithmetic of the backbone; features are stored in float16, whatever this says."
    )

    def resolved(self) -> dict[str, Any]:
        """All fields."""
        return self.model_dump()


class LogisticSpec(_Frozen):
    """Logistic regression on cached features, to its optimum; its strength is chosen on held-out training samples."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"features", "solver"})

    features: Literal["online", "cached"] = Field("cached", description="Read from embed jobs that all probes share.")
    solver: Literal["lbfgs", "sgd"] = Field("lbfgs", description="lbfgs: to the optimum; sgd: as a recipe says.")
    l2: Strengths = Field(
        [1.0, 0.1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6],
        description="Strengths to choose from: l2 / 2 * |weights|^2 is added to the mean loss; 1 / (l2 N) is called C.",
    )
    loss: Literal["softmax", "sigmoid"] = Field("softmax", description="sigmoid: several classes per sample.")
    scaling: Literal["standardize", "none"] = Field(
        "standardize", description="Whether weights act on features of deviation 1 while they are regularised."
    )
    views: Views = Field(["center"], description="Views of every training sample; validation samples: center.")
    max_iterations: Count = Field(500, description="Iterations per strength at most; a note says where that ended one.")
    tolerance: float = Field(
        1e-4, gt=0, le=0.1, description="A fit ends when a Newton step would lower the objective by less, relatively."
    )


class KnnSpec(_Frozen):
    """Nearest neighbours by cosine; k is chosen on held-out training samples, and all are reported."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"k", "temperature", "votes"})

    k: Counts = Field([1, 5, 10, 20, 50, 100, 200], description="Neighbours that vote: numbers to choose from.")
    votes: Literal["weighted", "equal"] = Field("weighted", description="weighted: by exp(cosine / temperature).")
    temperature: float = Field(0.07, gt=0, description="Of weighted votes.")


def schema_of(recipe: Mapping[str, Any], protocol: str = "") -> type[RecipeSpec | LogisticSpec | KnnSpec]:
    """What a recipe, with the fields of its base, may say; without a protocol as its own fields tell."""
    if protocol == "knn" or (not protocol and KnnSpec.KEYS & recipe.keys()):
        return KnnSpec
    is_probe = protocol == "probe" or (not protocol and LogisticSpec.KEYS & recipe.keys())
    if is_probe and recipe.get("features") == "cached":
        return CachedSgdSpec if recipe.get("solver") == "sgd" else LogisticSpec
    return ProbeSpec if is_probe else RecipeSpec


_ADAMS = ("adam", "adamw", "lamb")
_DECAYS = ("linear", "cosine", "exponential")
_RESIZED_CROPS = ("random_resized_crop", "random_resized_crop_flip")

EXCLUSIVE = (("warmup_epochs", "warmup_steps"),)
"""Pairs of which a recipe gives one: the one that overrides a base displaces the other."""


# The backbone of a probe is frozen whatever its recipe says, and of what training does only drops out; the head is one
# linear layer.
_UNREAD_BY_PROBES = dict.fromkeys(
    ("freeze", "drop_path", "norm_group"),
    "is ignored by protocol: probe, which trains a linear head on a frozen backbone; remove it, or choose finetune",
)
_UNREAD_FROM_CACHE = dict.fromkeys(
    ("augment", "crop_scale", "crop_ratio", "color_jitter", "mixup", "cutmix", "mix_prob", "cutmix_share", "dropout"),
    "is ignored by features: cached, which were computed once, of whole images; remove it, or use features: online",
)


@dataclass(frozen=True, slots=True)
class _ReadBy:
    """Who reads a field: recipes whose field ``of`` is one of ``among``."""

    field: str
    of: str
    among: tuple[str, ...]


_USES = (
    _ReadBy("momentum", "optimizer", ("sgd", "lars")),
    _ReadBy("nesterov", "optimizer", ("sgd", "lars")),
    _ReadBy("betas", "optimizer", _ADAMS),
    _ReadBy("eps", "optimizer", (*_ADAMS, "lars")),
    _ReadBy("constant_epochs", "schedule", _DECAYS),
    _ReadBy("lr_every", "schedule", _DECAYS),
    _ReadBy("lr_final", "schedule", ("linear", "cosine")),
    _ReadBy("decay_rate", "schedule", ("step", "exponential")),
    _ReadBy("decay_every_epochs", "schedule", ("exponential",)),
    _ReadBy("milestones", "schedule", ("step",)),
    _ReadBy("average_decay", "average", ("ema",)),
    _ReadBy("average_start_epoch", "average", ("ema", "polyak")),
    _ReadBy("crop_scale", "augment", _RESIZED_CROPS),
    _ReadBy("crop_ratio", "augment", _RESIZED_CROPS),
)
_NEEDS = (
    _ReadBy("milestones", "schedule", ("step",)),
    _ReadBy("decay_rate", "schedule", ("exponential",)),
    _ReadBy("decay_every_epochs", "schedule", ("exponential",)),
)


def ignored_fields(recipe: RecipeSpec, protocol: str = "") -> dict[str, str]:
    """Fields, given or not, that a training by this recipe never reads, and why; ``protocol`` is a transfer's."""
    found = dict(_UNREAD_BY_PROBES) if protocol == "probe" else {}
    found |= _UNREAD_FROM_CACHE if getattr(recipe, "features", "") == "cached" else {}
    found |= {
        use.field: f"is ignored by {use.of}: {chosen}; remove it, or choose {' or '.join(use.among)}"
        for use in _USES
        if (chosen := getattr(recipe, use.of)) not in use.among
    }
    if not recipe.weight_decay:
        found["weight_decay_on"] = "is ignored without weight_decay; remove it, or set weight_decay > 0"
    if not (recipe.mixup or recipe.cutmix):
        found["mix_prob"] = "is ignored without mixing; remove it, or set mixup or cutmix > 0"
    if not (recipe.mixup and recipe.cutmix):
        found["cutmix_share"] = "is ignored unless images are both blended and cut; remove it, or set both > 0"
    return found


def missing_fields(recipe: RecipeSpec) -> dict[str, str]:
    """Fields that this recipe needs and does not give, and who needs them."""
    return {
        use.field: f"'{use.field}' is missing, which {use.of}: {getattr(recipe, use.of)} needs; add it here"
        for use in _NEEDS
        if getattr(recipe, use.of) in use.among and use.field not in recipe.model_fields_set
    }


GivenRecipe = str | Mapping[str, Any]
