"""Hyper-parameters of a training: each is defined once, here, and every reader derives from its definition.

The sweep language derives its schema, JSON schema, reference page and identities from them; the data plane reads a
recipe by them. A new hyper-parameter is a field of `HyperParameters` and the code that reads it. A new optimiser,
schedule, average, loss or augmentation is an entry of its registry here and a builder in the data plane
(``workloads.train.optim``, ``.schedule``, ``.learner``, ``.objective``; ``workloads.data.augment``). One that changes
the order of samples, or their crops, is also listed in ``orchestrator.planning.graph.pairing``. Invariants:

- Parameters with ``always`` are in every identity, as in the first release. One that was added later is left out at its
  default, so that a release with more parameters retrains nothing.
- So a default is part of results, and never changes without a new ``code_version``.
- The order of the fields is that of the JSON schema and the reference page, and a relation sees earlier fields alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum, auto
from itertools import pairwise
from typing import Any, Final

# ---------------------------------------------------------------------------------------------------------- registries


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistryEntry:
    """One value of a named choice."""

    reads: tuple[str, ...] = ()
    """Hyper-parameters that only options read which name them."""
    needs: tuple[str, ...] = ()
    """Those of them that a recipe must give, even if they have a default."""
    state_copies: int = 0
    """Tensors of the size of the weights that it keeps from step to step and that a checkpoint holds."""


OPTIMIZERS: Final[Mapping[str, RegistryEntry]] = {
    "sgd": RegistryEntry(reads=("momentum", "nesterov"), state_copies=1),
    "adam": RegistryEntry(reads=("betas", "eps"), state_copies=2),
    "adamw": RegistryEntry(reads=("betas", "eps"), state_copies=2),
    "lamb": RegistryEntry(reads=("betas", "eps"), state_copies=2),
    "lars": RegistryEntry(reads=("momentum", "nesterov", "eps"), state_copies=1),
}
SCHEDULES: Final[Mapping[str, RegistryEntry]] = {
    "constant": RegistryEntry(),
    "linear": RegistryEntry(reads=("constant_epochs", "lr_every", "lr_final")),
    "cosine": RegistryEntry(reads=("constant_epochs", "lr_every", "lr_final")),
    "step": RegistryEntry(reads=("decay_rate", "milestones"), needs=("milestones",)),
    "exponential": RegistryEntry(
        reads=("constant_epochs", "lr_every", "decay_rate", "decay_every_epochs"),
        needs=("decay_rate", "decay_every_epochs"),
    ),
}
AVERAGES: Final[Mapping[str, RegistryEntry]] = {
    "none": RegistryEntry(),
    "ema": RegistryEntry(reads=("average_decay", "average_start_epoch")),
    "polyak": RegistryEntry(reads=("average_start_epoch",)),
}
BUILT_IN_AUGMENTATIONS: Final[Mapping[str, RegistryEntry]] = {
    "none": RegistryEntry(),
    "flip": RegistryEntry(),
    "crop_flip": RegistryEntry(),
    "random_crop": RegistryEntry(),
    "random_crop_flip": RegistryEntry(),
    "random_resized_crop": RegistryEntry(reads=("crop_scale", "crop_ratio")),
    "random_resized_crop_flip": RegistryEntry(reads=("crop_scale", "crop_ratio")),
}
SOFTMAX, SIGMOID = "softmax", "sigmoid"
LOSSES: Final = (SOFTMAX, SIGMOID)
"""Those that are built in; packages bring others."""
ARGUMENTS_OF: Final = {"loss": "loss_arguments", "augment_plugin": "augment_arguments"}
"""Hyper-parameters that may name a plug-in, and those that hold its arguments."""
REGISTRIES: Final[Mapping[str, Mapping[str, RegistryEntry]]] = {
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "average": AVERAGES,
    "augment": BUILT_IN_AUGMENTATIONS,
}
"""By the hyper-parameter that chooses."""

# --------------------------------------------------------------------------------------------------------- definitions


class Form(Enum):
    """The form of a hyper-parameter's value."""

    NUMBER = auto()
    WHOLE = auto()
    FLAG = auto()
    CHOICE = auto()
    TEXT = auto()
    NUMBERS = auto()
    FREEZE = auto()
    """``none``, ``backbone`` or a list of patterns of names."""
    REACTION = auto()
    """``stop`` or ``{rewind: n}``."""
    ARGUMENTS = auto()
    """A mapping for a plug-in, which defines its fields."""


class PartialReader(Enum):
    """A protocol that differs from an ordinary training in what it reads."""

    PROBE = "probe"
    """Its backbone is frozen whatever the recipe says; only dropout acts as in training; its head is one layer."""
    CACHED = "cached"
    """Features were computed once, of whole images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number, or of each of a list; ``above`` and ``below`` are outside of it, None = no bound."""

    above: float | None = None
    at_least: float | None = None
    below: float | None = None
    at_most: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the number lies inside; NaN lies in no bounds."""
        return (
            (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        """``> 0``, ``>= 1``, ``in [0, 1)``."""
        is_open = self.at_least is None
        low, high = self.above if is_open else self.at_least, self.below if self.at_most is None else self.at_most
        if high is None:
            return f"{'>' if is_open else '>='} {low:g}"
        return f"in {'(' if is_open else '['}{low:g}, {high:g}{')' if self.at_most is None else ']'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The definition of a hyper-parameter."""

    meaning: str
    """For the reference page, with its unit."""
    form: Form
    default: Any = MISSING
    """As a sweep would write it; ``MISSING`` = it must be given."""
    always: bool = False
    """Whether every identity has it; see above."""
    bounds: Range = Range()
    options: tuple[str, ...] = ()
    """Of a choice."""
    removed: Mapping[str, str] = field(default_factory=dict)
    """Former options of a choice, which readers refuse with this text for one release."""
    length: int | None = None
    """Of a list of numbers; None = any."""
    is_ascending: bool = False
    items: str = "numbers"
    """What a list holds."""
    null: str = ""
    """Meaning of null; empty = it may not be null."""
    zero: str = ""
    """Meaning of 0, if 0 is not an ordinary number."""
    unread_by: tuple[PartialReader, ...] = ()


def _parameter(form: Form, meaning: str, default: Any = MISSING, *, value: Any = MISSING, **facts: Any) -> Any:  # noqa: ANN401 - a field of any type
    """A field of a dataclass with its definition.

    ``value`` is the default as the data plane holds it, where that is not ``default``. A recipe that is read must hold
    what every identity holds, so such a field has no default there.
    """
    definition = Parameter(meaning=meaning, form=form, default=default, **facts)
    metadata = {"definition": definition}
    if definition.always:
        return field(metadata=metadata)
    return field(default=default if value is MISSING else value, metadata=metadata)


def _number(meaning: str, default: Any = MISSING, **facts: Any) -> Any:  # noqa: ANN401 - see _parameter
    bounds = {name: facts.pop(name) for name in ("above", "at_least", "below", "at_most") if name in facts}
    return _parameter(facts.pop("form", Form.NUMBER), meaning, default, bounds=Range(**bounds), **facts)


def _count(meaning: str, default: Any = MISSING, *, at_least: int = 1, **facts: Any) -> Any:  # noqa: ANN401 - see _parameter
    return _number(meaning, default, at_least=at_least, form=Form.WHOLE, **facts)


def _numbers(meaning: str, default: tuple[float, ...], **facts: Any) -> Any:  # noqa: ANN401 - see _parameter
    return _number(meaning, default, form=Form.NUMBERS, **facts)


def _flag(meaning: str, **facts: Any) -> Any:  # noqa: ANN401 - see _parameter
    return _parameter(Form.FLAG, meaning, default=False, **facts)


def _choice(options: Mapping[str, RegistryEntry] | tuple[str, ...], default: str, meaning: str, **facts: Any) -> Any:  # noqa: ANN401 - see _parameter
    return _parameter(Form.CHOICE, meaning, default, options=tuple(options), **facts)


_ON_IMAGES: Final = (PartialReader.CACHED,)
_IN_BACKBONES: Final = (PartialReader.PROBE,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperParameters:
    """All hyper-parameters, as the data plane holds them. ``docs/recipes.md`` tells more of each."""

    epochs: float = _number(
        "Passes over the training split; steps = round(epochs * N / batch_size).", above=0, always=True
    )
    batch_size: int = _count("Global batch, samples.", always=True)
    lr: float = _number("Peak learning rate.", above=0, always=True)
    optimizer: str = _choice(OPTIMIZERS, "sgd", "Optimiser.", always=True)
    momentum: float = _number("Momentum (sgd, lars).", 0.9, at_least=0, below=1, always=True)
    nesterov: bool = _flag("Nesterov momentum (sgd, lars); needs momentum > 0.", always=True)
    betas: tuple[float, float] = _numbers(
        "Decay of both moments, in [0, 1) (adam, adamw, lamb).",
        (0.9, 0.999),
        length=2,
        at_least=0,
        below=1,
        always=True,
    )
    eps: float | None = _number(
        "Added to denominators (all but sgd); default 1e-8, in lamb 1e-6, as their authors have it.",
        None,
        above=0,
        null="the optimiser's own",
    )
    weight_decay: float = _number("Weight decay.", 0.0, at_least=0, always=True)
    weight_decay_on: str = _choice(
        ("all", "no_bias_norm"), "all", "Parameters that decay; no_bias_norm spares vectors and scalars."
    )
    schedule: str = _choice(SCHEDULES, "cosine", "Learning rate after warm-up and constant_epochs.", always=True)
    warmup_epochs: float = _number("Linear warm-up from 0, epochs; at most epochs.", 0.0, at_least=0, always=True)
    warmup_steps: int = _count("Linear warm-up from 0, steps; instead of warmup_epochs.", 0, at_least=0)
    constant_epochs: float = _number("Epochs at lr before the decay (linear, cosine, exponential).", 0.0, at_least=0)
    lr_final: float = _number("Learning rate at the end (linear, cosine); at most lr.", 0.0, at_least=0)
    lr_every: str = _choice(
        ("step", "half_epoch", "epoch"),
        "step",
        "How often a linear, cosine or exponential decay takes a new value.",
    )
    decay_rate: float = _number("Factor of a milestone (step) or period (exponential).", 0.1, above=0, at_most=1)
    decay_every_epochs: float = _number("Period of the exponential decay, epochs.", 1.0, above=0)
    milestones: tuple[float, ...] = _numbers(
        "Epochs at which the learning rate is multiplied by decay_rate (step).",
        (),
        above=0,
        is_ascending=True,
        items="epochs",
    )
    loss: str = _parameter(
        Form.TEXT,
        "softmax, sigmoid (several classes per sample), or the name of an installed objective.",
        SOFTMAX,
    )
    """In an identity, an objective of a package is its reference; see ``orchestrator.core.plugins``."""
    loss_arguments: Mapping[str, Any] | None = _parameter(
        Form.ARGUMENTS, "Arguments of an installed objective.", None, null="none"
    )
    label_smoothing: float = _number("Mass spread over all classes.", 0.0, at_least=0, below=1, always=True)
    head_bias: float | None = _number(
        "Initial bias of every output; default: PyTorch's random one.", None, null="PyTorch's random one"
    )
    head_init: str = _choice(("default", "zeros"), "default", "Initial weights of the head.")
    dropout: float = _number(
        "Dropout: in transformers within the blocks, else at the head.",
        0.0,
        at_least=0,
        below=1,
        unread_by=_ON_IMAGES,
    )
    drop_path: float = _number("Largest stochastic depth rate.", 0.0, at_least=0, below=1, unread_by=_IN_BACKBONES)
    mixup: float = _number(
        "Alpha of mixup's Beta distribution; 0 = none.", 0.0, at_least=0, zero="none", unread_by=_ON_IMAGES
    )
    cutmix: float = _number(
        "Alpha of CutMix's Beta distribution; 0 = none.", 0.0, at_least=0, zero="none", unread_by=_ON_IMAGES
    )
    mix_prob: float = _number(
        "Share of pairs of images that are mixed at all.", 1.0, above=0, at_most=1, unread_by=_ON_IMAGES
    )
    cutmix_share: float = _number(
        "Share of mixed pairs that are cut when both are on.", 0.5, above=0, below=1, unread_by=_ON_IMAGES
    )
    grad_clip: float = _number("Largest gradient norm; 0 = no clipping.", 0.0, at_least=0, zero="none", always=True)
    average: str = _choice(AVERAGES, "none", "Average of the weights that is the result.")
    average_decay: float = _number("What the average keeps at each step (ema).", 0.9999, at_least=0, below=1)
    average_start_epoch: float = _number("Epoch at which averaging begins; before epochs.", 0.0, at_least=0)
    freeze: tuple[str, ...] = _parameter(
        Form.FREEZE,
        "none, backbone, or patterns of names of parameters that do not learn.",
        "none",
        value=(),
        unread_by=_IN_BACKBONES,
    )
    """Patterns; ``backbone`` has become ``("backbone.*",)``."""
    on_numerics: int | None = _parameter(
        Form.REACTION,
        "After a NaN, infinity or spike: stop, or {rewind: n} updates and leave those batches out.",
        "stop",
        value=None,
    )
    """Updates to go back; None = stop."""
    grad_spike: float = _number(
        "Gradient norm above so many (> 1) times its running mean is a failure; 0 = never.", 0.0, at_least=0
    )
    augment: str = _choice(BUILT_IN_AUGMENTATIONS, "none", "Training augmentation.", always=True, unread_by=_ON_IMAGES)
    resize: int | None = _count(
        "Shorter side before a centre or random crop, pixels; default: the model's image size.",
        None,
        null="the model's image size",
    )
    interpolation: str = _choice(("bilinear", "bicubic"), "bilinear", "Filter of resizing.")
    crop_scale: tuple[float, float] = _numbers(
        "Least and largest share of the area (random_resized_crop).",
        (0.08, 1.0),
        length=2,
        above=0,
        at_most=1,
        is_ascending=True,
        unread_by=_ON_IMAGES,
    )
    crop_ratio: tuple[float, float] = _numbers(
        "Least and largest width / height (random_resized_crop).",
        (0.75, 4 / 3),
        length=2,
        above=0,
        is_ascending=True,
        unread_by=_ON_IMAGES,
    )
    color_jitter: float = _number(
        "Strength of brightness, contrast and saturation changes.",
        0.0,
        at_least=0,
        at_most=1,
        unread_by=_ON_IMAGES,
    )
    augment_plugin: str | None = _parameter(
        Form.TEXT,
        "An installed augmentation, which changes the pixels of what augment has cut out.",
        None,
        null="none",
        unread_by=_ON_IMAGES,
    )
    """In an identity its reference, as of an objective."""
    augment_arguments: Mapping[str, Any] | None = _parameter(
        Form.ARGUMENTS, "Arguments of augment_plugin.", None, null="none", unread_by=_ON_IMAGES
    )
    decoder: str = _choice(
        ("pillow", "turbo"),
        "pillow",
        "Decoder and resizer of images; turbo is faster; its resized pixels differ from pillow's by one "
        "level (bilinear), or by two and at hard edges more (bicubic).",
        removed={
            "nvjpeg": "it was removed, as it decoded one image at a time and copied the pixels to the host; use turbo"
        },
    )
    norm_group: int | None = _count(
        "Samples per BatchNorm statistic, a divisor of batch_size; default min(batch_size, 64).",
        None,
        null="min(batch_size, 64)",
        always=True,
        unread_by=_IN_BACKBONES,
    )
    precision: str = _choice(
        ("fp32", "bf16", "fp16"),
        "fp32",
        "Arithmetic of forward and backward passes; weights are fp32 always.",
        always=True,
    )
    tf32: bool = _flag("Let float32 products run as TF32 on NVIDIA GPUs.")
    grad_reduction: str = _choice(
        ("fp32", "bf16"),
        "fp32",
        "Number format in which the workers of a job sum gradients; bf16 halves what is sent, and results depend on "
        "the number of workers.",
    )
    shuffle_block_shards: int = _count("Shards whose samples are shuffled together.", 16, always=True)
    shuffle_chunk_samples: int | None = _count(
        "Neighbours that stay together when blocks are formed; default: whole shards.", None, null="whole shards"
    )
    data_groups: int = _count(
        "Groups that each own a part of an epoch's shards and fill the same part of every batch; where it is a "
        "multiple of a gang's nodes, each node reads its own groups' shards only.",
        1,
    )
    mean: tuple[float, float, float] = _numbers(
        "Channel means of the input in [0, 1].", (0.5, 0.5, 0.5), length=3, always=True
    )
    std: tuple[float, float, float] = _numbers(
        "Channel standard deviations of the input, > 0.", (0.5, 0.5, 0.5), length=3, above=0, always=True
    )
    eval_every_epochs: int = _count("Epochs between validations; the last epoch is always validated.", 1, always=True)
    select_holdout: float = _number(
        "Share of the training samples kept out of training, for select_error; 0 = none.", 0.0, at_least=0, at_most=0.5
    )


PARAMETERS: Final[Mapping[str, Parameter]] = {one.name: one.metadata["definition"] for one in fields(HyperParameters)}
"""The definitions by name, in order."""

# ----------------------------------------------------------------------------------------------------------- relations

MIXES: Final = 2
"""Images that are mixed together: the pair of positions p and p XOR 1."""
EXCLUSIVE: Final = (("warmup_epochs", "warmup_steps"),)
"""Pairs of which a recipe gives one: the one that overrides a base displaces the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """What one hyper-parameter must be because of others. Both texts may hold ``{name}`` of these."""

    name: str
    others: tuple[str, ...] = ()
    """Where there is a ``refusal``, those that stand before it."""
    holds: Callable[..., bool]
    """Takes its value and those of the others."""
    refusal: str = ""
    """Error text of the sweep language; empty = it does not check this, or checks it elsewhere."""
    wanted: str = ""
    """How the data plane ends the sentence "it must be ..."; empty = it does not check this."""

    def is_broken(self, values: Mapping[str, Any]) -> bool:
        """Whether the values do not fit; False where one of them is missing."""
        names = (self.name, *self.others)
        return values.keys() >= {*names} and not self.holds(*(values[name] for name in names))


def _is_mixed_in_pairs(batch_size: int, norm_group: int | None, mixup: float, cutmix: float) -> bool:
    return not (mixup or cutmix) or (batch_size % MIXES == 0 and (norm_group or MIXES) % MIXES == 0)


def _ascends(milestones: tuple[float, ...]) -> bool:
    return all(low < high for low, high in pairwise(milestones))


RELATIONS: Final = (
    Relation(
        name="nesterov",
        others=("momentum",),
        holds=lambda nesterov, momentum: not nesterov or momentum > 0,
        refusal="Nesterov's update needs momentum, which is 0; set momentum > 0 or nesterov: false",
        wanted="false when momentum is 0",
    ),
    Relation(
        name="warmup_epochs",
        others=("epochs",),
        holds=lambda warmup, epochs: warmup <= epochs,
        refusal="the warm-up would last longer than the training of {epochs:g} epochs; use 0 to {epochs:g}",
        wanted="in [0, epochs = {epochs:g}]",
    ),
    Relation(
        name="warmup_steps",
        others=("warmup_epochs",),
        holds=lambda steps, epochs: not (steps and epochs),
        refusal="warmup_epochs says {warmup_epochs:g} as well; keep one of the two",
        wanted="0 when warmup_epochs is given",
    ),
    Relation(
        name="constant_epochs",
        others=("warmup_epochs", "epochs"),
        holds=lambda constant, warmup, epochs: warmup + constant <= epochs,
        refusal="with {warmup_epochs:g} epochs of warm-up it lasts longer than the training of {epochs:g} epochs; "
        "use less",
        wanted="within epochs = {epochs:g}",
    ),
    Relation(
        name="lr_final",
        others=("lr",),
        holds=lambda lr_final, lr: lr_final <= lr,
        refusal="the learning rate would rise, from lr {lr:g}; use at most {lr:g}",
        wanted="at most lr = {lr:g}",
    ),
    Relation(
        name="milestones",
        holds=_ascends,
        refusal="an epoch is given twice; write each once, in ascending order",
        wanted="ascending epochs > 0",
    ),
    Relation(
        name="milestones",
        others=("schedule",),
        holds=lambda milestones, schedule: bool(milestones) or "milestones" not in SCHEDULES[schedule].needs,
        refusal="schedule: {schedule} needs one epoch or more; write for example [30, 60]",
        wanted="given with schedule: {schedule}",
    ),
    Relation(
        name="mixup",
        others=("batch_size",),
        holds=lambda alpha, batch_size: not alpha or batch_size % MIXES == 0,
        refusal="images are mixed in pairs, but batch_size {batch_size} is odd; make it even",
    ),
    Relation(
        name="cutmix",
        others=("batch_size",),
        holds=lambda alpha, batch_size: not alpha or batch_size % MIXES == 0,
        refusal="images are mixed in pairs, but batch_size {batch_size} is odd; make it even",
    ),
    Relation(
        name="batch_size",
        others=("norm_group", "mixup", "cutmix"),
        holds=_is_mixed_in_pairs,
        wanted="even, and norm_group too, because images are mixed in pairs",
    ),
    Relation(
        name="average_start_epoch",
        others=("epochs",),
        holds=lambda start, epochs: not start or start < epochs,
        refusal="the training of {epochs:g} epochs is over by then; use less",
        wanted="in [0, epochs = {epochs:g})",
    ),
    Relation(
        name="on_numerics",
        holds=lambda steps: not isinstance(steps, int) or steps >= 1,
        wanted="stop, or rewind by >= 1 steps",
    ),
    Relation(
        name="grad_spike",
        holds=lambda spike: not 0 < spike <= 1,
        refusal="every gradient norm would be a spike; use more than 1 (say 10), or 0 for none",
        wanted="> 1, or 0 for none",
    ),
    Relation(
        name="norm_group",
        others=("batch_size",),
        holds=lambda group, batch_size: not group or batch_size % group == 0,
        refusal="batch_size {batch_size} is not a whole number of norm groups; use a divisor of {batch_size}",
    ),
    Relation(
        name="norm_group",
        others=("batch_size", "mixup", "cutmix"),
        holds=lambda group, _, mixup, cutmix: _is_mixed_in_pairs(MIXES, group, mixup, cutmix),
        refusal="images are mixed in pairs, which odd norm groups cut; use an even divisor of {batch_size}",
    ),
    Relation(
        name="data_groups",
        others=("batch_size", "norm_group"),
        holds=lambda groups, batch_size, norm_group: groups == 1 or groups * (norm_group or 1) <= batch_size,
        refusal="each data group fills at least one sample of a batch of {batch_size}, with BatchNorm one norm group; "
        "use at most batch_size / norm_group of them",
        wanted="at most batch_size / norm_group",
    ),
    Relation(
        name="data_groups",
        others=("batch_size", "mixup", "cutmix"),
        holds=lambda groups, batch_size, mixup, cutmix: (
            groups == 1 or not (mixup or cutmix) or groups * MIXES <= batch_size
        ),
        refusal="images are mixed in pairs, and each data group fills at least one pair of a batch of {batch_size}; "
        "use at most batch_size / 2 of them",
        wanted="at most batch_size / 2 when images are mixed",
    ),
    Relation(
        name="data_groups",
        others=("shuffle_chunk_samples",),
        holds=lambda groups, chunk_samples: groups == 1 or chunk_samples is None,
        refusal="shuffle_chunk_samples is given: chunks mix runs of all shards, so that every group would read every "
        "shard; keep one of the two",
        wanted="1 when shuffle_chunk_samples is given",
    ),
)
