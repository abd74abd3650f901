"""Recipes: what a sweep.yaml may write, by name or over a base, and what it resolves to for a protocol. Pure.

``orchestrator.core.hyper_parameters`` defines the fields of a training, their ranges and which go together, once for
both planes. This module has the forms in which a sweep.yaml writes them, and the recipes of probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, create_model, field_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.errors import SpecError
from orchestrator.core.hyper_parameters import (
    ARGUMENTS_OF,
    EXCLUSIVE,
    LOSSES,
    PARAMETERS,
    REGISTRIES,
    RELATIONS,
    SOFTMAX,
    Form,
    Parameter,
    PartialReader,
)
from orchestrator.core.plugins import AUGMENTATIONS, OBJECTIVES
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import Count, Strict, at_most, canonical
from orchestrator.sweepfile.parse.tree import MovedTree, Path, Tree
from orchestrator.sweepfile.plugin_uses import PluginUses
from orchestrator.sweepfile.problems import Complaints, shown_value, validate
from orchestrator.sweepfile.values import Dataset, LabelSpace

Recipe = Mapping[str, Any]
RecipeBook = Mapping[str, Recipe]
GivenRecipe = str | Recipe

TRAINING = "training"
"""Protocol of all trainings except probes and nearest neighbours."""
LOOK_FIELDS = ("resize", "interpolation", "decoder", "mean", "std", "precision")
"""Fields of the preprocessing of images for features; a field without a value is as in the pretraining."""
Holdout = Annotated[float, Field(gt=0, le=0.5)]
_UNREAD_BY: Final[Mapping[PartialReader, str]] = {
    PartialReader.PROBE: (
        "is ignored by protocol: probe, which trains a linear head on a frozen backbone; remove it, or choose finetune"
    ),
    PartialReader.CACHED: (
        "is ignored by features: cached, which were computed once, of whole images; remove it, or use features: online"
    ),
}
_UNREAD_BY_LBFGS = "lbfgs, which solves probes with features: cached, does not read it; remove it, or add solver: sgd"


# ------------------------------------------------------------------------------------------------- fields of a training


def _ascending(values: list[float]) -> list[float]:
    """The values, if each is larger than the one before."""
    for low, high in pairwise(values):
        if high < low:
            message = "{high} comes after {low}; write them in ascending order"
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


def _refuse_removed_option(removed: Mapping[str, str], value: object) -> object:
    """The value, unless it is a former option."""
    if isinstance(value, str) and value in removed:
        raise PydanticCustomError("removed", "{why}", {"why": removed[value]})
    return value


def _annotation(parameter: Parameter) -> Any:  # noqa: ANN401 - a type
    """How pydantic reads a hyper-parameter."""
    kind = _type_of(parameter)
    return kind | None if parameter.null else kind


_FINITE: Final = at_most(1_000_000_000, "networks compute in single precision, where larger numbers mean nothing")


def _type_of(parameter: Parameter) -> Any:  # noqa: ANN401 - a type
    if parameter.form in _PLAIN:
        return _PLAIN[parameter.form]
    if parameter.form is Form.CHOICE:
        return Annotated[
            Literal[parameter.options], BeforeValidator(partial(_refuse_removed_option, parameter.removed))
        ]
    bounds = parameter.bounds
    if parameter.form is Form.WHOLE and bounds.at_least == 1:
        return Count
    limits = {"gt": bounds.above, "ge": bounds.at_least, "lt": bounds.below, "le": bounds.at_most}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    number: Any = int if parameter.form is Form.WHOLE else float
    number = Annotated[number, Field(**given)] if given else number
    if bounds.at_most is None and bounds.below is None:
        number = Annotated[number, _FINITE]
    if parameter.form is not Form.NUMBERS:
        return number
    values: Any = list[number]
    if parameter.length is not None:
        values = Annotated[values, Field(min_length=parameter.length, max_length=parameter.length)]
    return Annotated[values, AfterValidator(_ascending)] if parameter.is_ascending else values


_PLAIN: Final[Mapping[Form, Any]] = {
    Form.FLAG: bool,
    Form.TEXT: Annotated[str, Field(min_length=1)],
    Form.FREEZE: Annotated[Any, AfterValidator(_frozen)],
    Form.REACTION: Annotated[Any, AfterValidator(_reaction)],
    Form.ARGUMENTS: dict[str, Annotated[Any, AfterValidator(canonical)]],
}


def _field(parameter: Parameter) -> tuple[Any, Any]:
    default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
    given: dict[str, Any] = {} if default is MISSING else {"default": default}
    return _annotation(parameter), Field(description=parameter.meaning, **given)


if TYPE_CHECKING:  # which cannot see what is made at run time
    Decoder: TypeAlias = str
    Interpolation: TypeAlias = str
    Precision: TypeAlias = str
    Mean: TypeAlias = list[float]
    Deviations: TypeAlias = list[float]

    class _TrainingFields(Strict):
        def __getattr__(self, name: str) -> Any: ...  # noqa: ANN401 - of several types

else:
    Decoder, Interpolation, Precision, Mean, Deviations = (
        _type_of(PARAMETERS[name]) for name in ("decoder", "interpolation", "precision", "mean", "std")
    )
    _TrainingFields = create_model(
        "_TrainingFields",
        __base__=Strict,
        __doc__="The hyper-parameters of ``orchestrator.core.hyper_parameters``.",
        **{name: _field(parameter) for name, parameter in PARAMETERS.items()},
    )


class RecipeSpec(_TrainingFields):
    """Training hyper-parameters. ``base`` names a shipped recipe whose fields this one overrides."""

    def resolved(self) -> dict[str, Any]:
        """The fields of an identity: those that are always in it, and others if they are not at their default."""
        defaults = {name: field.default for name, field in type(self).model_fields.items()}
        return {
            name: value
            for name, value in self.model_dump().items()
            if (name in PARAMETERS and PARAMETERS[name].always) or value != defaults[name]
        }

    # The data plane refuses the same; here it is refused before anything is created.
    @field_validator("*")
    @classmethod
    def _fits_the_others(cls, value: object, others: ValidationInfo) -> object:
        values = {**others.data, str(others.field_name): value}
        for relation in RELATIONS:
            if relation.refusal and relation.name == others.field_name and relation.is_broken(values):
                raise PydanticCustomError("relation", "{why}", {"why": relation.refusal.format(**values)})
        return value


# ----------------------------------------------------------------------------- recipes of probes and nearest neighbours


def _distinct(values: list[Any]) -> list[Any]:
    """The values, if none is given twice."""
    for position, value in enumerate(values):
        if value in values[:position]:
            raise PydanticCustomError("repeated", "{value} is given twice; keep one", {"value": value})
    return values


Strengths = Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1), AfterValidator(_distinct)]
Counts = Annotated[list[Count], Field(min_length=1), AfterValidator(_distinct)]
Views = Annotated[list[Literal["center", "mirrored"]], Field(min_length=1), AfterValidator(_distinct)]


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
        """The fields, with the source of the features."""
        return {**super().resolved(), "features": "cached", "solver": "sgd"}


class _Frozen(Strict):
    """Common fields of recipes on cached features."""

    select_holdout: Holdout = Field(
        0.1, description="Share of the training samples on which a choice is made, stratified and keyed by the seed."
    )
    resize: Count | None = Field(
        None, description="Shorter side before the centre square is cut out, pixels; default: as in pretraining."
    )
    interpolation: Interpolation | None = Field(None, description="Filter of resizing; default: as in pretraining.")
    decoder: Decoder | None = Field(None, description="Decoder; default: as in pretraining.")
    mean: Mean | None = Field(None, description="Channel means in [0, 1]; default: as in pretraining.")
    std: Deviations | None = Field(None, description="Channel standard deviations, > 0; default: as in pretraining.")
    precision: Precision = Field(
        "fp32", description="Arithmetic of the backbone; features are always stored in float16."
    )

    def resolved(self) -> dict[str, Any]:
        """All fields."""
        return self.model_dump()


class LogisticSpec(_Frozen):
    """Logistic regression on cached features, to its optimum; its strength is chosen on held-out training samples."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"features", "solver"})
    HINTS: ClassVar[Mapping[str, str]] = dict.fromkeys(CachedSgdSpec.model_fields, _UNREAD_BY_LBFGS)

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
        1e-4,
        gt=0,
        le=0.1,
        description="A fit ends when all further steps together are estimated to lower the objective by at most this "
        "share of it.",
    )


class KnnSpec(_Frozen):
    """Nearest neighbours by cosine; k is chosen on held-out training samples, and all are reported."""

    KEYS: ClassVar[frozenset[str]] = frozenset({"k", "temperature", "votes"})

    k: Counts = Field([1, 5, 10, 20, 50, 100, 200], description="Neighbours that vote: numbers to choose from.")
    votes: Literal["weighted", "equal"] = Field("weighted", description="weighted: by exp(cosine / temperature).")
    temperature: float = Field(0.07, gt=0, description="Of weighted votes.")


def schema_of(recipe: Mapping[str, Any], protocol: str = "") -> type[RecipeSpec | LogisticSpec | KnnSpec]:
    """The form of a recipe with the fields of its base; without a protocol it follows from its own fields."""
    if protocol == "knn" or (not protocol and KnnSpec.KEYS & recipe.keys()):
        return KnnSpec
    is_probe = protocol == "probe" or (not protocol and LogisticSpec.KEYS & recipe.keys())
    if is_probe and recipe.get("features") == "cached":
        return CachedSgdSpec if recipe.get("solver") == "sgd" else LogisticSpec
    return ProbeSpec if is_probe else RecipeSpec


# ---------------------------------------------------------------------------------------- fields that nothing reads


def ignored_fields(recipe: RecipeSpec, protocol: str = "") -> dict[str, str]:
    """Fields, given or not, that a training by this recipe never reads, and why; ``protocol`` is a transfer's."""
    readers = [PartialReader.PROBE] if protocol == "probe" else []
    readers += [PartialReader.CACHED] if getattr(recipe, "features", "") == "cached" else []
    found = {
        name: _UNREAD_BY[reader]
        for reader in readers
        for name, parameter in PARAMETERS.items()
        if reader in parameter.unread_by
    }
    for choice, options in REGISTRIES.items():
        chosen = getattr(recipe, choice)
        for name in dict.fromkeys(name for option in options.values() for name in option.reads):
            among = [other for other, option in options.items() if name in option.reads]
            if chosen not in among:
                found[name] = f"is ignored by {choice}: {chosen}; remove it, or choose {' or '.join(among)}"
    if recipe.loss in LOSSES:
        found["loss_arguments"] = f"is ignored by loss: {recipe.loss}; remove it, or name an installed objective"
    if recipe.augment_plugin is None:
        found["augment_arguments"] = "is ignored without augment_plugin; remove it, or name an installed augmentation"
    if not recipe.weight_decay:
        found["weight_decay_on"] = "is ignored without weight_decay; remove it, or set weight_decay > 0"
    if not (recipe.mixup or recipe.cutmix):
        found["mix_prob"] = "is ignored without mixing; remove it, or set mixup or cutmix > 0"
    if not (recipe.mixup and recipe.cutmix):
        found["cutmix_share"] = "is ignored unless images are both blended and cut; remove it, or set both > 0"
    return found


def off_default(recipe: Mapping[str, Any], protocol: str = "") -> dict[str, Any]:
    """Fields of a resolved recipe that are not at their defaults, as those are that it does not read."""
    known = schema_of(recipe, protocol or TRAINING).model_fields
    return {name: value for name, value in recipe.items() if value != known[name].default}


def missing_fields(recipe: RecipeSpec) -> dict[str, str]:
    """Missing fields of this recipe, and the options that need them."""
    return {
        name: f"'{name}' is missing, which {choice}: {getattr(recipe, choice)} needs; add it here"
        for choice, options in REGISTRIES.items()
        for name in options[getattr(recipe, choice)].needs
        if name not in recipe.model_fields_set
    }


# ------------------------------------------------------------------------------------------------------ recipes by name


def given_fields(given: GivenRecipe) -> dict[str, Any]:
    """A recipe of the file as a mapping: a name alone is a base."""
    return {"base": given} if isinstance(given, str) else dict(given)


def over_base(base: Recipe, given: Recipe) -> dict[str, Any]:
    """Fields over those of another recipe; of two that exclude each other the given one displaces the other."""
    displaced = {name for pair in EXCLUSIVE if not given.keys().isdisjoint(pair) for name in pair}
    return {**{name: value for name, value in base.items() if name not in displaced}, **given}


class Recipes(Mapping[str, Recipe]):
    """All recipes of a sweep by name, without bases; records which ones were used."""

    def __init__(
        self, own: Mapping[str, Recipe], shipped: Mapping[str, Recipe], tree: Tree, complaints: Complaints
    ) -> None:
        self._own, self._shipped = own, shipped
        self._tree, self._complaints = tree, complaints
        self._open: list[str] = []
        self._flat: dict[str, Recipe] = {}
        self.broken: set[str] = set()
        """Recipes of the file about which there are complaints."""
        self.used: dict[str, Recipe] = {}
        """The recipes that were used."""
        for name in own:
            self._flat[name] = self._resolve(name)

    def __getitem__(self, name: str) -> Recipe:
        recipe = self._flat[name] if name in self._flat else self._shipped[name]
        self.used[name] = recipe
        return recipe

    def __contains__(self, name: object) -> bool:
        return name in self._own or name in self._shipped

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._own, *self._shipped)))

    def __len__(self) -> int:
        return len(self._own.keys() | self._shipped.keys())

    def _resolve(self, name: str) -> Recipe:
        """A recipe of the file with its base; itself alone if something is wrong with that."""
        if name in self._flat:
            return self._flat[name]
        given = dict(self._own[name])
        base = given.pop("base", None)
        problem = self._problem_of_base(name, base)
        if problem:
            self._complaints.add(("recipes", name, "base"), problem)
            self.broken.add(name)
            return given
        self._open.append(name)
        inherited = self._base(name, base) if base is not None else {}
        self._open.pop()
        flat = over_base(inherited, given)
        self._check(name, given, flat, base)
        self._flat[name] = flat
        return flat

    def _base(self, name: str, base: str) -> Recipe:
        return self._resolve(base) if base in self._own and base != name else self._shipped[base]

    def _problem_of_base(self, name: str, base: object) -> str:
        if base is None or (base == name and name in self._shipped):  # over the shipped recipe of its own name
            return ""
        if not isinstance(base, str) or base not in self:
            return f"{base!r} is not a recipe: {did_you_mean(str(base), self)}"
        if base == name or base in self._open:
            chain = " -> ".join(
                [*self._open[self._open.index(base) :], name, base] if base in self._open else [name, base]
            )
            return f"the recipe '{base}' starts from itself ({chain}); break the circle"
        return ""

    def _check(self, name: str, given: Recipe, flat: Recipe, base: object) -> None:
        """Its own fields must be valid; missing ones come from the recipes that use it."""
        if base in self.broken:
            self.broken.add(name)
            return
        group, groups = flat.get("norm_group"), flat.get("data_groups")
        batch_size = 2 * group if isinstance(group, int) and group > 0 else 4096
        batch_size *= groups if isinstance(groups, int) and groups > 0 else 1  # each takes whole norm groups
        left_out = {"epochs": 1e6, "lr": 1e6, "batch_size": batch_size}
        try:
            schema = schema_of(flat)
            fields = {field: value for field, value in left_out.items() if field in schema.model_fields}
            validate(schema, {**fields, **flat}, self._tree, ("recipes", name))
        except SpecError as error:
            self._complaints.extend(error)
            self.broken.add(name)


class RecipeResolver:
    """Resolves the recipes of one sweep; ``complaints`` collects what is wrong with them."""

    def __init__(self, book: RecipeBook, plugins: PluginUses, tree: Tree, complaints: Complaints) -> None:
        self._book = book if isinstance(book, Recipes) else Recipes({}, book, tree, complaints)
        self.plugins, self._tree, self._complaints = plugins, tree, complaints

    def resolve(self, path: Path, recipe: str | Mapping[str, Any], protocol: str = "") -> Mapping[str, Any]:
        """All fields of the recipe that stands at ``path``, for a transfer's ``protocol``; nothing if it is wrong."""
        given, fields = given_fields(recipe), self.written_fields(recipe)
        base = given.pop("base", None)
        if fields is None:
            where = path if isinstance(recipe, str) else (*path, "base")
            self._complaints.add(where, f"{base!r} is not a recipe: {did_you_mean(str(base), self._book)}")
            return {}
        if base in self._book.broken:  # which is complained of at its own place
            return {}
        try:
            spec = validate(schema_of(fields, protocol or TRAINING), fields, self._tree, path)
            if isinstance(spec, KnnSpec) and spec.votes == "equal" and "temperature" in given:
                self._complaints.add((*path, "temperature"), "it has no effect with votes: equal; remove it")
            if not isinstance(spec, RecipeSpec):
                return spec.resolved()
            return self._checked(path, spec, given, ignored_fields(spec, protocol))
        except SpecError as error:
            self._complaints.extend(error)
            return {}

    def of(self, protocol: str) -> ProtocolRecipes:
        """The same for one protocol alone."""
        return ProtocolRecipes(self, protocol)

    def known_fields(self, recipe: str | Mapping[str, Any], protocol: str = "") -> tuple[str, ...]:
        """Names of the fields that such a recipe may have; none if its base is not known."""
        fields = self.written_fields(recipe)
        return () if fields is None else tuple(schema_of(fields, protocol or TRAINING).model_fields)

    def written_fields(self, recipe: str | Mapping[str, Any]) -> Recipe | None:
        """The fields of a recipe over those of its base, as they are written; None if its base is not known."""
        given = given_fields(recipe)
        base = given.pop("base", None)
        if base is not None and (not isinstance(base, str) or base not in self._book):
            return None
        return over_base(self._book[base] if base is not None else {}, given)

    def elsewhere(self, moved: Mapping[Path, Path]) -> tuple[RecipeResolver, Complaints]:
        """A resolver that reports some places as others, and its complaints."""
        complaints = Complaints(MovedTree.of(self._tree, moved))
        return RecipeResolver(self._book, self.plugins, complaints.tree, complaints), complaints

    def _checked(
        self, path: Path, spec: RecipeSpec, given: Mapping[str, Any], ignored: Mapping[str, str]
    ) -> Mapping[str, Any]:
        for name in given.keys() & ignored.keys():
            self._complaints.add((*path, name), f"{shown_value(given[name])} {ignored[name]}")
        for message in missing_fields(spec).values():
            self._complaints.add(path, message)
        # Fields of the base for an overridden optimiser or schedule are dropped.
        fields = {name: getattr(spec, name) for name in spec.model_fields_set - ignored.keys()}
        return type(spec).model_construct(**{**fields, **self._plugins_of(path, spec, given, ignored)}).resolved()

    def _plugins_of(
        self, path: Path, spec: RecipeSpec, given: Mapping[str, Any], ignored: Mapping[str, str]
    ) -> dict[str, str]:
        """The references for the plug-ins that a recipe names; a field that is not read names none."""
        found: dict[str, str] = {"loss": spec.loss}
        for field, group, builtin in (("loss", OBJECTIVES, LOSSES), ("augment_plugin", AUGMENTATIONS, ())):
            name = getattr(spec, field)
            if name is None or name in builtin or field in ignored:
                continue
            known = self.plugins.known(group)
            if name not in known:
                hint = did_you_mean(name, (*builtin, *known))
                self._complaints.add((*path, field), f"'{name}' is neither built in nor installed: {hint}")
                continue
            arguments = ARGUMENTS_OF[field]
            where = (*path, arguments) if arguments in given or arguments not in spec.model_fields_set else path
            found[field] = self.plugins.use(group, name, getattr(spec, arguments), self._tree, where)
        return found


@dataclass(frozen=True, slots=True)
class ProtocolRecipes:
    """A resolver of the recipes of one protocol."""

    resolver: RecipeResolver
    protocol: str

    def resolve(self, path: Path, recipe: str | Mapping[str, Any]) -> Mapping[str, Any]:
        """See `RecipeResolver`."""
        return self.resolver.resolve(path, recipe, self.protocol)

    def known_fields(self, recipe: str | Mapping[str, Any]) -> tuple[str, ...]:
        """See `RecipeResolver`."""
        return self.resolver.known_fields(recipe, self.protocol)

    def elsewhere(self, moved: Mapping[Path, Path]) -> tuple[ProtocolRecipes, Complaints]:
        """See `RecipeResolver`."""
        resolver, complaints = self.resolver.elsewhere(moved)
        return resolver.of(self.protocol), complaints


def check_recipe_on(path: Path, recipe: Mapping[str, Any], dataset: Dataset, complaints: Complaints) -> None:
    """Complain about a resolved recipe that cannot train on a data set whose size is known."""
    if "batch_size" not in recipe:  # it was refused, or takes all samples at once
        return
    if recipe.get("data_groups", 1) > 1 and dataset.parameters.get("mixture", {}).get("weights") is not None:
        message = (
            f"'{dataset.name}' is a mixture with weights, whose data sets have epochs of their own; data groups own"
        )
        complaints.add((*path, "data_groups"), f"{message} shards of one epoch; use 1, or a mixture without weights")
    batch_size, num_train = recipe["batch_size"], dataset.num_train - num_held_out(recipe, dataset.num_train)
    if batch_size > num_train:
        message = f"batch_size {batch_size} is more than the {num_train} training samples of '{dataset.name}'; lower it"
        complaints.add((*path, "batch_size"), message)
        return
    total = num_steps(recipe["epochs"], num_train, batch_size)
    if total < 1:
        message = f"{recipe['epochs']:g} epochs of the {num_train} training samples of '{dataset.name}' give no batch"
        complaints.add((*path, "epochs"), f"{message} of {batch_size}; train longer or in smaller batches")
    elif recipe.get("warmup_steps", 0) > total:
        message = f"the training on '{dataset.name}' has {total} steps; the warm-up of {recipe['warmup_steps']} would"
        complaints.add((*path, "warmup_steps"), f"{message} outlast it; use 0 to {total}")


def num_held_out(recipe: Mapping[str, Any], num_train: int) -> int:
    """Training samples that a recipe keeps out of training."""
    share: float = recipe.get("select_holdout", 0.0)
    return math.floor(share * num_train + 0.5)


def check_labels_of(
    path: Path, recipe: Mapping[str, Any], space: LabelSpace, dataset: Dataset, complaints: Complaints
) -> None:
    """Complain about a label space that the resolved recipe at ``path`` cannot learn; neighbours (k) take several."""
    if space.num_classes == 1:
        message = f"the recipe trains on '{space.name}', which has a single class: there is nothing to tell apart"
        complaints.add(path, f"{message}; use a label space of 2 classes or more")
    if has_several_targets(space, dataset) and "k" not in recipe and recipe.get("loss", SOFTMAX) == SOFTMAX:
        message = f"samples of '{space.name}' have several classes each, and a softmax can give only one of them"
        complaints.add((*path, "loss"), f"{message} probability 1; use loss: sigmoid")


def has_several_targets(space: LabelSpace, dataset: Dataset) -> bool:
    """Whether a sample may have several classes of a label space of this data set.

    Rules by sample give one to a sample of several leaf classes; of other rules it has the targets of all its classes.
    """
    by_sample = {"random", "split", "clusters", "binary"}
    has_one = bool(by_sample & space.space.keys()) or "contains" in space.space.get("wordnet", {})
    return space.multi_label or (dataset.multi_label and not has_one)


def num_steps(epochs: float, num_samples: int, batch_size: int) -> int:
    """Steps of a run, as the data plane counts them (a test compares the two): halves round up."""
    return math.floor(Fraction(repr(float(epochs))) * num_samples / batch_size + Fraction(1, 2))
