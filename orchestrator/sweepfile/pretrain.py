"""`pretrain:`: the schema of a block, and the backbones that it resolves to, with their initial backbones. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.plugins import is_reference
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.checkpoints import CheckpointsSpec, resolve_checkpoints, resolve_keep
from orchestrator.sweepfile.fields import Name, Seed, Seeds, Strict, refuse_unread
from orchestrator.sweepfile.known_models import shipped_models
from orchestrator.sweepfile.model import InitialSpec, ModelSpec, resolve_model
from orchestrator.sweepfile.parse.tree import Path, Tree
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import RecipeResolver
from orchestrator.sweepfile.subset import SubsetSpec
from orchestrator.sweepfile.values import BLOCK_FACTOR, LABELS_FACTOR, InitialBackbone, LabelSpace, Pretrain

SAME = "same"
_ONE, _NAMED = "one block", "named blocks"  # no key of a sweep.yaml, or errors would point there
_OUTSIDE = {"artifact", "uri", "sha256", "timm"}
"""Fields of initial weights that no job of this sweep makes."""
Backbone = tuple[str, str, int]
"""Block, label space and seed of a backbone that the sweep pretrains."""
RESERVED_FACTORS: Mapping[str, str] = {
    BLOCK_FACTOR: "named blocks are values of this factor; call it otherwise",
    LABELS_FACTOR: "label spaces are values of this factor; call it otherwise",
    "seed": "pretraining seeds are what all comparisons are averaged over; call it otherwise",
}
"""Names that no factor of a file can have, and why."""


class BackboneInitSpec(InitialSpec):
    """Initial weights of a backbone; exactly one of ``artifact``, ``uri``, ``timm`` and ``pretrain``."""

    SOURCES: ClassVar[tuple[str, ...]] = (*InitialSpec.SOURCES, "pretrain")

    pretrain: str | None = Field(
        None, description="Block of this sweep whose backbone it starts from; the block's own name is allowed."
    )
    labels: str = Field(
        SAME, description="With pretrain: label space of that backbone, by its path; same: that of this backbone."
    )
    seed: Seed | str = Field(SAME, description="With pretrain: seed of that backbone; same: that of this backbone.")

    @model_validator(mode="after")
    def _chooses_one_backbone(self) -> Self:
        if isinstance(self.seed, str) and self.seed != SAME:
            context = {"seed": repr(self.seed), "at": ("seed",)}
            raise PydanticCustomError("refused", "{seed} is not a seed; write a whole number or same", context)
        for field in ("labels", "seed"):
            if self.pretrain is None and field in self.model_fields_set:
                message = (
                    f"it says which backbone of this sweep to start from, but there is no 'pretrain'; remove {field}"
                )
                raise PydanticCustomError("refused", message, {"at": (field,)})
        return self


Scalar = str | int | float
FactorValues = Scalar | list[Scalar] | dict[str, dict[str, Any]]
"""A factor: the block's own value, values of a field, or the changes of each value."""


class PretrainSpec(Strict):
    """The backbones: label spaces x seeds."""

    model: ModelSpec = Field(description="The network.")
    init: BackboneInitSpec | None = Field(
        None, description="Initial weights of the backbone; default: random, by the seed."
    )
    labels: Annotated[list[str], Field(min_length=1)] = Field(description="Label spaces by name or glob (levels/*).")
    recipe: str | dict[str, Any] = Field(
        description="Name of a recipe, or its fields; base: NAME takes those of another recipe first."
    )
    seeds: Seeds = Field([0], description="Pretraining seeds.")
    subset: SubsetSpec | None = Field(None, description="Part of the training split to train on; default: all.")
    checkpoints: CheckpointsSpec = Field(CheckpointsSpec(), description="How often it is saved, and what of it stays.")
    factors: dict[str, FactorValues] = Field(
        default_factory=dict,
        description="What is compared besides label spaces, by name. A value is a partial block that is merged over "
        "this one (optimizer: {sgd: {}, lamb: {recipe: {optimizer: lamb}}}); a list gives values of the field at a "
        "path (recipe.lr: [0.1, 0.4]); text says which value this block is. Changes no key.",
    )
    design: Literal["full", "one_at_a_time"] | list[dict[str, Scalar]] = Field(
        "full",
        description="Cells to run: all combinations of the factors' values; one_at_a_time: the first values, and each "
        "other value beside the first ones; or a list of combinations, which have the first value of what they leave "
        "out. At most 1,000 cells.",
    )

    @model_validator(mode="after")
    def _has_factors_for_its_design(self) -> Self:
        refuse_unread(self, ("design",), "without 'factors' of several values")
        return self


def _form(value: object) -> str:
    """Several blocks if no key is a field of a block, and the values below the keys could be blocks."""
    if isinstance(value, Mapping) and value and not PretrainSpec.model_fields.keys() & value.keys():
        return _NAMED if all(isinstance(block, Mapping | PretrainSpec) for block in value.values()) else _ONE
    return _ONE


PretrainBlocks = Annotated[
    Annotated[PretrainSpec, Tag(_ONE)] | Annotated[dict[Name, PretrainSpec], Tag(_NAMED)], Discriminator(_form)
]

# -------------------------------------------------------------------------------------------------- what it resolves to


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block of ``pretrain:`` and where it stands; a single block has no name."""

    name: str
    path: Path
    spec: PretrainSpec


def blocks_of(spec: PretrainSpec | Mapping[str, PretrainSpec]) -> tuple[Block, ...]:
    """The blocks in the order of the file."""
    if isinstance(spec, PretrainSpec):
        return (Block(name="", path=("pretrain",), spec=spec),)
    return tuple(Block(name=name, path=("pretrain", name), spec=block) for name, block in spec.items())


def resolve_pretrain(
    block: Block, labels: Mapping[str, LabelSpace], recipes: RecipeResolver, complaints: Complaints
) -> Pretrain:
    """One block; complains of what is wrong and goes on."""
    spec, path = block.spec, block.path
    complaints.refuse_repeats((*path, "seeds"), [str(seed) for seed in spec.seeds])
    recipe = recipes.resolve((*path, "recipe"), spec.recipe)
    _check_timm_tag((*path, "init", "timm"), spec, complaints)
    return Pretrain(
        name=block.name,
        model=resolve_model((*path, "model"), spec.model, shipped_models(), recipes.plugins, complaints.tree),
        labels=_globs((*path, "labels"), spec.labels, labels, complaints),
        recipe=recipe,
        written_recipe=spec.recipe,
        seeds=tuple(spec.seeds),
        subset=spec.subset.resolved() if spec.subset else {},
        subset_seed=spec.subset.given_seed if spec.subset else None,
        initial=spec.init.model_dump(include=_OUTSIDE, exclude_none=True) if spec.init else {},
        initial_from=_initial_from(spec.init),
        keep=resolve_keep(spec.checkpoints.keep, recipe, (*path, "checkpoints", "keep"), complaints),
        checkpoints=resolve_checkpoints(spec.checkpoints),
        factors={name: str(value) for name, value in spec.factors.items()},
        cell_of=_cell_of(block, complaints.tree),
    )


def _cell_of(block: Block, tree: Tree) -> str:
    origin = tree.origin_of(block.name)
    return str(origin[-1]) if len(origin) > 1 and origin != block.path else ""


def shown_block(block: str, tree: Tree) -> str:
    """How messages name a block of ``pretrain``; a cell is the block of the file that it was made of."""
    origin = tree.origin_of(block)
    return f"block '{origin[-1]}'" if len(origin) > 1 else "the pretraining"


def _initial_from(spec: BackboneInitSpec | None) -> InitialBackbone | None:
    if spec is None or spec.pretrain is None:
        return None
    return InitialBackbone(
        pretrain=spec.pretrain,
        labels="" if spec.labels == SAME else spec.labels,
        seed=spec.seed if isinstance(spec.seed, int) else None,
    )


def _check_timm_tag(path: Path, spec: PretrainSpec, complaints: Complaints) -> None:
    if spec.init is not None and spec.init.timm is not None:
        problem = shipped_models().tag_problem(spec.model.name, spec.init.timm)
        if problem:
            complaints.add(path, problem)


def _globs(
    path: Path, globs: Sequence[str], labels: Mapping[str, LabelSpace], complaints: Complaints
) -> tuple[str, ...]:
    chosen: dict[str, None] = {}
    for position, glob in enumerate(globs):
        matches = [name for name in labels if fnmatchcase(name, glob)]
        # An error of the entry is reported at the entry, and not again here.
        if not matches and not complaints.doubts(("labels", glob.partition("/")[0])):
            complaints.add((*path, position), f"'{glob}' matches no label space: {did_you_mean(glob, labels)}")
        chosen.update(dict.fromkeys(matches))
    return tuple(chosen)


def is_in_doubt(space: str, blocks: Sequence[Pretrain], complaints: Complaints) -> bool:
    """Whether an error that is reported already may be why none of the blocks pretrains a label space."""
    return complaints.doubts(("labels", space.partition("/")[0])) or any(
        complaints.doubts((*path_of(block), "labels")) for block in blocks
    )


# ----------------------------------------------------------------------------------------- backbones that need others


@dataclass(frozen=True, slots=True)
class _Need:
    """One backbone waits for another; ``path`` is what names it."""

    backbone: Backbone
    path: Path
    remedy: str


def check_origins(pretrains: Sequence[Pretrain], labels: Mapping[str, LabelSpace], complaints: Complaints) -> None:
    """Complain of initial weights and embeddings that this sweep does not pretrain, or that wait for themselves."""
    blocks = {pretrain.name: pretrain for pretrain in pretrains}
    for pretrain in pretrains:
        if pretrain.initial_from is not None:
            _check_initial(pretrain, pretrain.initial_from, blocks, complaints)
    seen: set[Path] = set()
    for circle in _circles(blocks, labels):
        for position, need in enumerate(circle):
            if need.path not in seen:
                seen.add(need.path)
                around = [*circle[position:], *circle[: position + 1]]
                complaints.add(need.path, f"{need.remedy.format(circle=_shown(around))}")


def _check_initial(
    pretrain: Pretrain,
    origin: InitialBackbone,
    blocks: Mapping[str, Pretrain],
    complaints: Complaints,
) -> None:
    path: Path = (*path_of(pretrain), "init")
    other = blocks.get(origin.pretrain)
    if other is None:
        named = did_you_mean(origin.pretrain, blocks)
        hint = "the only block has no name; write pretrain: {NAME: {model: ...}, ...}" if "" in blocks else named
        complaints.add((*path, "pretrain"), f"'{origin.pretrain}' is not a block of pretrain: {hint}")
        return
    for space in (origin.labels,) if origin.labels else pretrain.labels:
        if other.labels and space not in other.labels and not is_in_doubt(space, [other], complaints):
            where = (*path, "labels") if origin.labels else (*path, "pretrain")
            message = f"block '{other.name}' pretrains no backbone on '{space}': {did_you_mean(space, other.labels)}"
            complaints.add(where, message)
            break
    for seed in pretrain.seeds if origin.seed is None else (origin.seed,):
        if seed not in other.seeds:
            where = (*path, "pretrain") if origin.seed is None else (*path, "seed")
            message = f"block '{other.name}' pretrains no backbone with seed {seed}; its seeds are {list(other.seeds)}"
            complaints.add(where, f"{message}; add it there, or name one by init.seed")
            break
    if _architecture(other) != _architecture(pretrain):
        message = f"block '{other.name}' trains {other.model.name}, whose weights do not fit {pretrain.model.name}"
        complaints.add((*path, "pretrain"), f"{message}; start from a block of the same architecture")


def _architecture(pretrain: Pretrain) -> str:
    name = pretrain.model.name
    return name if is_reference(name) else name.partition(".")[0]


def path_of(pretrain: Pretrain) -> Path:
    """Where a block stands in the file."""
    return ("pretrain", pretrain.name) if pretrain.name else ("pretrain",)


def _circles(blocks: Mapping[str, Pretrain], labels: Mapping[str, LabelSpace]) -> Iterator[list[_Need]]:
    """Chains of needs that come back to where they began; linear in the number of backbones."""
    done: set[Backbone] = set()
    for block in blocks.values():
        for root in ((block.name, space, seed) for space in block.labels for seed in block.seeds):
            if root not in done:
                yield from _circles_from(root, blocks, labels, done)


def _circles_from(
    root: Backbone,
    blocks: Mapping[str, Pretrain],
    labels: Mapping[str, LabelSpace],
    done: set[Backbone],
) -> Iterator[list[_Need]]:
    trail: list[_Need] = []
    on_trail: dict[Backbone, int] = {root: 0}
    open_needs = [_needs(root, blocks, labels)]
    while open_needs:
        need = next(open_needs[-1], None)
        if need is None:
            open_needs.pop()
            done.add(trail.pop().backbone if trail else root)
            continue
        if need.backbone in on_trail and need.backbone not in done:
            yield [*trail[on_trail[need.backbone] :], need]
        elif need.backbone not in done:
            trail.append(need)
            on_trail[need.backbone] = len(trail)
            open_needs.append(_needs(need.backbone, blocks, labels))


def _needs(backbone: Backbone, blocks: Mapping[str, Pretrain], labels: Mapping[str, LabelSpace]) -> Iterator[_Need]:
    """The backbones that one is made from."""
    name, space, seed = backbone
    block, label_space = blocks.get(name), labels.get(space)
    if block is not None and (origin := block.initial_from) is not None:
        other = (origin.pretrain, origin.labels or space, seed if origin.seed is None else origin.seed)
        remedy = "this backbone starts from one that starts from it ({circle}); break the circle"
        yield _Need(other, (*path_of(block), "init", "pretrain"), remedy)
    if label_space is not None and label_space.clustering is not None:
        embedding = label_space.clustering.embedding
        if embedding.backbone is not None:
            path = ("labels", label_space.entry, "clusters", "embed", "backbone", "labels")
            remedy = "these clusters need a backbone that needs these clusters ({circle}); embed another backbone"
            yield _Need((embedding.pretrain, embedding.backbone, embedding.seed), path, remedy)


def _shown(circle: Sequence[_Need]) -> str:
    """Such as ``pretrain/a -> pretrain/b -> pretrain/a``, with seeds where they differ."""
    with_seeds = len({need.backbone[2] for need in circle}) > 1
    names = []
    for need in circle:
        block, space, seed = need.backbone
        names.append("/".join(part for part in ("pretrain", block, space, f"seed{seed}" * with_seeds) if part))
    return " -> ".join(names)
