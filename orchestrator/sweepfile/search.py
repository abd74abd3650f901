"""`search:` of a transfer: its schema, and the search that it resolves to. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, prod
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.errors import SpecError
from orchestrator.core.hyper_parameters import ARGUMENTS_OF
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.fields import Count, OneRule, Seed, Strict
from orchestrator.sweepfile.parse.tree import Path
from orchestrator.sweepfile.pretrain import path_of, shown_block
from orchestrator.sweepfile.problems import Complaints
from orchestrator.sweepfile.recipe import (
    LOOK_FIELDS,
    TRAINING,
    GivenRecipe,
    LogisticSpec,
    ProtocolRecipes,
    check_recipe_on,
    given_fields,
    has_several_targets,
    off_default,
    schema_of,
)
from orchestrator.sweepfile.resources import ResourceGroups, ResourcesSpec
from orchestrator.sweepfile.subset import labelled_part, thinned
from orchestrator.sweepfile.values import Dataset, LabelSpace, Pretrain, Search, Transfer

Ends = Annotated[list[float], Field(min_length=2, max_length=2)]
WholeEnds = Annotated[list[int], Field(min_length=2, max_length=2)]
DEFAULT_TRIALS: Final = 16
_JUDGED = "knn and probes solved by lbfgs choose on held-out samples themselves: there is nothing to search"


class AshaSpec(Strict):
    """Random draws, of which those that fall behind are stopped (asynchronous successive halving)."""

    reduction: float = Field(
        3.0, gt=1, le=100, description="At each rung, the best 1/reduction of the trials continue; > 1."
    )
    grace_epochs: Count | None = Field(
        None,
        description="Epochs of the first rung; each further one is reduction times as far. Default: the first "
        "validation.",
    )


class RandomSpec(Strict):
    """Independent draws, all of which run to their end."""


class OptunaSpec(Strict):
    """Optuna's tree-structured Parzen estimator; all trials run to their end. Needs the extra ``optuna``."""

    startup_trials: Count = Field(10, description="Random trials before the estimator proposes any.")


class RangeSpec(OneRule):
    """All numbers between two ends, both included."""

    RULES: ClassVar[tuple[str, ...]] = ("uniform", "log", "integer", "log_integer")

    uniform: Ends | None = Field(None, description="[low, high], equally likely.")
    log: Ends | None = Field(None, description="[low, high] > 0, equally likely on a logarithmic scale.")
    integer: WholeEnds | None = Field(None, description="[low, high], whole numbers, equally likely.")
    log_integer: WholeEnds | None = Field(None, description="[low, high] >= 1, whole numbers on a logarithmic scale.")

    @property
    def rule(self) -> str:
        """Which of the rules it is."""
        return next(rule for rule in self.RULES if getattr(self, rule) is not None)

    @model_validator(mode="after")
    def _is_a_range(self) -> Self:
        low, high = getattr(self, self.rule)
        if low >= high:
            context = {"low": f"{low:g}", "high": f"{high:g}", "at": (self.rule,)}
            raise PydanticCustomError(
                "refused", "{low} to {high} is not a range; give [low, high], low < high", context
            )
        if self.rule.startswith("log") and low <= 0:
            message = "a logarithmic scale needs ends above 0, and this begins at {low}; use a small positive number"
            raise PydanticCustomError("refused", message, {"low": f"{low:g}", "at": (self.rule,)})
        return self


def _form_of(values: object) -> str:
    """Only errors of the intended form are reported."""
    return "range" if isinstance(values, Mapping | RangeSpec) else "values"


Values = Annotated[
    Annotated[list[Any], Tag("values")] | Annotated[RangeSpec, Tag("range")],
    Discriminator(_form_of),
]


class SearchSpec(OneRule):
    """Trials of values for a recipe, or of label spaces, in place of a grid; the best one is used."""

    RULES: ClassVar[tuple[str, ...]] = ("asha", "random", "optuna")

    asha: AshaSpec | None = Field(None, description="Random draws; the worse trials are stopped early, at rungs.")
    random: RandomSpec | None = Field(None, description="Random draws; all trials run to their end.")
    optuna: OptunaSpec | None = Field(
        None, description="Proposals of Optuna, which learn from the trials that have ended."
    )
    over: Literal["recipe", "pretrain", "labels"] = Field(
        "recipe",
        description="recipe: fields of this transfer's recipe, for each label space; pretrain: fields of the "
        "pretraining's, for each label space; labels: which label space to pretrain with. The latter two are judged by "
        "a cached probe of the target, never by accuracy on their own labels.",
    )
    space: dict[str, Values] | None = Field(
        None, description="Recipe fields, each with a list of values or a range; not with over: labels."
    )
    trials: Count | None = Field(
        None, description="Trials in all; default: 16, or as many as there are combinations; with labels: all of them."
    )
    concurrent: Count = Field(
        1,
        description="Number of trials that run at the same time; the search reserves this many times the "
        "resources of one trial. Changes no key.",
    )
    seed: Seed = Field(0, description="Seed of the draws.")


# -------------------------------------------------------------------------------------------------- what it resolves to


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedRecipe:
    """A search as it stands in the file, and the recipe that it varies."""

    path: Path
    """Of the search."""
    spec: SearchSpec
    given: GivenRecipe
    recipe_path: Path


def resolve_search(
    searched: SearchedRecipe, recipes: ProtocolRecipes, complaints: Complaints, *, holds_out: Mapping[str, Any]
) -> tuple[Search, Mapping[str, Any]]:
    """A search over a recipe, and the recipe's other fields; complains of what is wrong and goes on.

    Args:
        searched: the search and its recipe.
        recipes: resolves the recipe.
        complaints: collects errors.
        holds_out: further fields of its trials' recipes, with which they are evaluated.
    """
    spec, space = searched.spec, searched.spec.space or {}
    search = _search(spec, trials=_num_trials(searched, complaints), holds_out=holds_out)
    problems = [*_problems(searched, recipes.known_fields(searched.given))]
    for place, message in problems:
        complaints.add(place, message)
    if problems:
        return search, {}
    recipe, names = _check_values(searched, recipes, complaints)
    search = replace(search, space={**search.space, **names})
    if complaints.doubts((*searched.path, "space")):
        return search, {}
    if recipe and "epochs" not in recipe:
        complaints.add(searched.path, f"{_JUDGED}; remove search, or choose a recipe with an optimiser")
        return search, {}
    return search, {name: value for name, value in recipe.items() if name not in space}


def pretrain_search(
    path: Path,
    spec: SearchSpec,
    blocks: Sequence[Pretrain],
    recipes: ProtocolRecipes,
    complaints: Complaints,
    *,
    probe: Mapping[str, Any],
) -> Search:
    """A search over fields of the recipe of each of some blocks; complains of what is wrong and goes on."""
    search, more = _search(spec, trials=None, probe=probe), dict[str, Mapping[str, Any]]()
    for block in blocks:
        if not block.recipe:  # which is reported at its own place
            continue
        given, where = block.written_recipe, (*path_of(block), "recipe")
        searched = SearchedRecipe(path=path, spec=spec, given=given, recipe_path=where)
        found, recipe = resolve_search(searched, recipes, complaints, holds_out={})
        read = off_default(recipe) if recipe else {}
        more[block.name] = {name: value for name, value in read.items() if block.recipe.get(name) != value}
        search = replace(found, probe=probe, more_read=more)
        check_grace(search, block.recipe, path, complaints)
    return search


def label_search(path: Path, spec: SearchSpec, complaints: Complaints, probe: Mapping[str, Any]) -> Search:
    """A search over label spaces; complains of a space."""
    if spec.space is not None:
        message = "over: labels tries the pretrained label spaces and takes no values; remove space (transfer."
        complaints.add((*path, "space"), f"{message}labels selects among them)")
    if spec.random is not None or spec.optuna is not None:
        rule = "random" if spec.random is not None else "optuna"
        message = "a search over labels tries all label spaces, and only asha stops some of them early; choose asha"
        complaints.add((*path, rule), message)
    return _search(spec, trials=spec.trials, probe=probe)


def check_grace(search: Search, recipe: Mapping[str, Any], path: Path, complaints: Complaints) -> None:
    """Complain of a first rung that trainings by a recipe do not reach in time."""
    if "asha" not in search.algorithm or ("epochs" not in recipe and "epochs" not in search.space):
        return
    if complaints.doubts((*path, "space")):  # its values may not even be numbers
        return
    grace, every = search.algorithm_for(recipe)["asha"]["grace_epochs"], int(recipe.get("eval_every_epochs", 1))
    epochs = max(_ends(search.space["epochs"])) if "epochs" in search.space else recipe["epochs"]
    is_given = search.algorithm["asha"]["grace_epochs"] is not None
    where = (*path, "asha", "grace_epochs") if is_given else (*path, "asha")
    if grace < every:
        message = f"{grace} is before the first validation, at epoch {every} (recipe.eval_every_epochs); "
        complaints.add(where, f"{message}use {every} or more, or validate more often")
    elif grace >= epochs:
        message = f"trainings of {epochs:g} epochs end before their first rung, at epoch {grace}: no trial is ever "
        complaints.add(where, f"{message}stopped; use a smaller one, validate more often, or choose random")


def judging_probe(
    transfer_recipe: Mapping[str, Any], target: LabelSpace | None, datasets: Mapping[str, Dataset]
) -> Mapping[str, Any]:
    """Recipe of the cached probe by which pretrainings are judged: the transfer's own where it is one."""
    if transfer_recipe.get("features") == "cached" and transfer_recipe.get("solver") == "lbfgs":
        return transfer_recipe
    has_several = target is not None and has_several_targets(target, datasets[target.dataset])
    return LogisticSpec(loss="sigmoid" if has_several else "softmax").resolved()


def check_searches(
    transfers: Sequence[Transfer],
    pretrains: Sequence[Pretrain],
    labels: Mapping[str, LabelSpace],
    groups: ResourceGroups,
    complaints: Complaints,
    *,
    datasets: Mapping[str, Dataset],
    max_gpus: float | None = None,
) -> None:
    """Complain about searches that cannot be run with these settings; ``max_gpus`` is the policy's."""
    for position, item in enumerate(transfers):
        if item.search is None:
            continue
        path: Path = ("transfer", position, "search")
        group = "pretrain" if item.searches_backbones else "transfer"
        blocks = [block for block in pretrains if block.name in item.pretrains]
        resources: ResourcesSpec = getattr(groups, group)
        if resources.num_workers > 1:
            message = f"a trial runs in one process, and resources.{group} asks for {resources.num_workers} workers"
            complaints.add(path, f"{message}; give it one GPU at most, and raise search.concurrent instead")
        elif max_gpus is not None and (problem := _lacks_gpus(item, blocks, resources.gpus, max_gpus)):
            complaints.add((*path, "concurrent"), problem)
        if item.searches_backbones:
            if item.checkpoints:
                message = "the backbones of a search have final weights only; remove it, or search over: recipe"
                complaints.add(("transfer", position, "from_checkpoints"), message)
            space: Path = (*path, "space")
            is_read = not complaints.doubts(space)  # asked before any block adds what does not suit it
            for block in blocks:
                _check_block(path, item, block, labels, complaints)
                if is_read and block.recipe:
                    measured = [labels[name] for name in block.labels if item.measures(name) and name in labels]
                    parts = [labelled_part(one, datasets) for one in measured]
                    _check_trials(space, item.search, block, parts, complaints)


def _lacks_gpus(item: Transfer, blocks: Sequence[Pretrain], gpus: float, max_gpus: float) -> str:
    """Why a search never starts whose trials take ``gpus`` each; empty if it may, or if a single trial cannot."""
    if item.search is None:
        return ""
    num_spaces = max((sum(map(item.measures, block.labels)) for block in blocks), default=0)
    at_once = item.search.num_at_a_time(num_spaces if item.search.over == "labels" else item.search.trials)
    if not gpus <= max_gpus < at_once * gpus - 1e-6:
        return ""
    return (
        f"{at_once} trials at once ask for {at_once * gpus:g} GPUs, and policy.max_gpus is {max_gpus:g}: the search "
        f"would never start; use {floor(max_gpus / gpus)} or fewer, or raise policy.max_gpus"
    )


def _check_trials(
    path: Path, search: Search, block: Pretrain, parts: Sequence[Dataset], complaints: Complaints
) -> None:
    """Complain of searched values with which no trial can train on the data, or ends an epoch that the block keeps.

    What fails with some values of other fields only is left to the trials: one that fails does not end the search.
    """
    quiet = Complaints(complaints.tree)  # the block's own subset is checked elsewhere
    thin = [thinned(part, block.subset, (*path_of(block), "subset"), quiet) for part in parts]
    for size in {size for values in search.space.get("batch_size", {}).values() for size in values if thin}:
        least = min(thin, key=lambda part: part.num_train)
        check_recipe_on(path, {"batch_size": size, "epochs": 1e6}, least, complaints)
    last, named = max(block.keep.get("epochs", ()), default=0), shown_block(block.name, complaints.tree)
    for rule, values in search.space.get("epochs", {}).items():
        for position, epochs in enumerate(values):
            if epochs < last:
                message = f"keep.epochs names epoch {last} of {named}, which trials of {epochs:g} epochs never"
                where = (*path, "epochs", *(() if rule == "values" else (rule,)), position)
                complaints.add(where, f"{message} end; search {last} epochs or more, or keep earlier ones", block.name)


def _check_block(
    path: Path, item: Transfer, block: Pretrain, labels: Mapping[str, LabelSpace], complaints: Complaints
) -> None:
    named = shown_block(block.name, complaints.tree)
    if block.initial_from is not None:
        message = f"{named} starts from other backbones of this sweep, which trials cannot; remove init"
        complaints.add(path, message, block.name)
    if item.search is None:
        return
    if item.search.over == "pretrain" and "retrain" in item.baselines:
        if item.target in block.labels and item.measures(item.target):
            message = f"retrain and the search over pretrain would both make the row '{item.target}' of the report"
            complaints.add((*path[:-1], "baselines"), f"{message}; remove one of them")
        return
    if item.search.over != "labels":
        return
    spaces = [space for space in block.labels if item.measures(space)]
    if len(spaces) == 1:
        message = f"{named} has the single label space '{spaces[0]}': there is nothing to choose from"
        complaints.add(path, f"{message}; pretrain with more, or search over: recipe", block.name)
    elif item.search.trials not in {None, len(spaces)}:
        message = (
            f"there is one trial for each label space of {named}, {len(spaces)} in all, and not {item.search.trials}"
        )
        remedy = "remove trials, or choose label spaces with transfer.labels"
        complaints.add((*path, "trials"), f"{message}; {remedy}", block.name)
    datasets = sorted({labels[space].dataset for space in spaces if space in labels})
    if len(datasets) > 1:
        message = f"{named} has label spaces of several data sets ({', '.join(datasets)}), whose epochs do not compare"
        complaints.add(path, f"{message}; make one transfer for each, with labels: [...]", block.name)


def _search(
    spec: SearchSpec,
    *,
    trials: int | None,
    probe: Mapping[str, Any] | None = None,
    holds_out: Mapping[str, Any] | None = None,
) -> Search:
    rule = next(rule for rule in SearchSpec.RULES if getattr(spec, rule) is not None)
    return Search(
        over=spec.over,
        algorithm={rule: getattr(spec, rule).model_dump()},
        space={name: _dimension(values) for name, values in (spec.space or {}).items()},
        trials=trials,
        concurrent=spec.concurrent,
        seed=spec.seed,
        probe=probe or {},
        holds_out=holds_out or {},
    )


def _dimension(values: list[Any] | RangeSpec) -> dict[str, Any]:
    return {"values": values} if isinstance(values, list) else {values.rule: getattr(values, values.rule)}


def _ends(dimension: Mapping[str, Any]) -> list[Any]:
    """Representative values: each of a list, both ends of a range."""
    ((_, values),) = dimension.items()
    return list(values)


def _num_trials(searched: SearchedRecipe, complaints: Complaints) -> int:
    spec, sizes = searched.spec, []
    for values in (searched.spec.space or {}).values():
        if isinstance(values, list):
            sizes.append(len(values))
        else:
            low, high = getattr(values, values.rule)
            sizes.append(high - low + 1 if "integer" in values.rule else 10**9)
    size = prod(sizes)
    if spec.trials is not None and sizes and spec.trials > size:
        message = f"{spec.trials} trials of a space of {size} combinations; use {size} or fewer, or a grid for all"
        complaints.add((*searched.path, "trials"), message)
    return spec.trials or min(DEFAULT_TRIALS, size)


def _problems(searched: SearchedRecipe, known: Sequence[str]) -> Iterator[tuple[Path, str]]:
    space, path = searched.spec.space, (*searched.path, "space")
    if not space:
        where = path if space is not None else searched.path
        yield where, "the space is empty; name recipe fields and their values (space: {lr: {log: [0.01, 1]}})"
        return
    for name, values in space.items():
        place: Path = (*path, name)
        if known and name not in known:
            yield place, f"'{name}' is not a field of this recipe: {did_you_mean(name, known)}"
        elif searched.spec.over == "recipe" and isinstance(searched.given, Mapping) and name in searched.given:
            yield place, f"recipe says {name}: {searched.given[name]!r} as well; keep one of the two"
        elif searched.spec.over == "pretrain" and name in LOOK_FIELDS and name != "precision":
            message = (
                f"'{name}' also decides how images of the target are seen, and trials are judged with the block's own"
            )
            yield place, f"{message} value; remove it from the space, and write a block for each value"
        elif name == "select_holdout":
            yield place, "what is held out is what trials are judged by, the same for all; write it into recipe"
        if isinstance(values, list):
            yield from problems_of_values(place, values)


def problems_of_values(place: Path, values: Sequence[Any]) -> Iterator[tuple[Path, str]]:
    """What is wrong with a list of values of which one is chosen, and where."""
    if len(values) < 2:
        held = f"the single value {values[0]!r}" if values else "no value"
        yield place, f"{held} gives no choice; give two or more values, or write the field into recipe"
    for position, value in enumerate(values):
        if value in values[:position]:
            yield (*place, position), f"{value!r} is given twice; keep one"


def _check_values(
    searched: SearchedRecipe, recipes: ProtocolRecipes, complaints: Complaints
) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, Any]]]:
    """Resolve the recipe at each listed value and each end of a range, with the first of all others.

    Returns:
        All fields that any of these recipes reads, and the parts of the space that name plug-ins, as references.
    """
    space = {name: _dimension(values) for name, values in (searched.spec.space or {}).items()}
    given, seen = given_fields(searched.given), set[str]()
    first, last = ({name: _ends(dimension)[end] for name, dimension in space.items()} for end in (0, -1))
    variants = [{**first, name: value} for name, dimension in space.items() for value in _ends(dimension)]
    # Some fields are read only where two others are both at later values; what is wrong there, the trial says.
    quiet = recipes.elsewhere({})[0]
    found_ones = [quiet.resolve(searched.recipe_path, {**given, **chosen}) for chosen in (*variants, last)]
    template, variants_found = _union(found_ones, recipes.protocol), iter(found_ones)
    references: dict[str, dict[str, list[Any]]] = {name: {"values": []} for name in space if name in ARGUMENTS_OF}
    for name, dimension in space.items():
        for position, value in enumerate(_ends(dimension)):
            inside = dict.fromkeys(space, 0) | {name: position}
            moved = {
                (*searched.recipe_path, field): (
                    *searched.path,
                    "space",
                    field,
                    *(() if key == "values" else (key,)),
                    place,
                )
                for field, place in inside.items()
                for key in space[field]
            }
            resolver, problems = recipes.elsewhere(moved)
            own = next(variants_found)
            # A field that another value of the space reads is not ignored by the search.
            shown = {field: one for field, one in given.items() if not own or own.get(field) == template.get(field)}
            found = resolver.resolve(searched.recipe_path, {**shown, **first, name: value})
            complaints.extend(SpecError(tuple(line for line in problems.problems if line not in seen)))
            seen.update(problems.problems)
            if problems.problems:
                complaints.doubt((*searched.path, "space"))
            if name in references:
                references[name]["values"].append(found.get(name, value))
            if found.get("features") == "cached" and name in LOOK_FIELDS:
                message = "decides how images become features, which are computed once; remove it from the space"
                complaints.add((*searched.path, "space", name), f"'{name}' {message}")
                return {}, {}
    return template, references


def _union(recipes: Sequence[Mapping[str, Any]], protocol: str) -> Mapping[str, Any]:
    """The first of some variants of one resolved recipe, with what others of its form read besides."""
    first, *others = [recipe for recipe in recipes if recipe] or [{}]
    form = schema_of(first, protocol or TRAINING)
    found = dict(first)
    for other in others:
        if schema_of(other, protocol or TRAINING) is form:
            found |= off_default(other, protocol)
    return found | off_default(first, protocol)
