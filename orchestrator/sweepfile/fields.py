"""Common parts of the schema: the strict base class and scalars with their ranges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, ClassVar, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from orchestrator.core.ids import canonical_json
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.parse.tree import Path

MAX_INTEGER = 2**53 - 1  # the largest that canonical JSON encodes

MAX_SEEDS = 10_000
_BOUND = "{value} is refused: at most {limit}, because {reason}"


def at_most(limit: int, reason: str) -> AfterValidator:
    """Refuses larger numbers, with the reason for the limit."""

    def check(value: float) -> float:
        if value > limit:
            shown = f"{value:,}" if isinstance(value, int) else f"{value:g}"
            context = {"value": shown, "limit": f"{limit:,}", "reason": reason}
            raise PydanticCustomError("refused", _BOUND, context)
        return value

    return AfterValidator(check)


def _are_listed(seeds: object) -> object:
    if isinstance(seeds, int) and not isinstance(seeds, bool):
        message = "{seeds} is not a list; write whole numbers: [0, 1, 2]"
        raise PydanticCustomError("refused", message, {"seeds": str(seeds)})
    return seeds


def _few(seeds: list[int]) -> list[int]:
    if len(seeds) > MAX_SEEDS:
        context = {"number": f"{len(seeds):,}", "limit": f"{MAX_SEEDS:,}"}
        message = (
            "{number} seeds are refused: at most {limit}, because each is a training for every label space or backbone"
        )
        raise PydanticCustomError("refused", message, context)
    return seeds


NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$"
LEVEL_TEXT = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,62}$"
SYNSET = r"^n\d{8}$"
BACKBONE_KEY = r"^(pretrain|finetune)-\S+$"
IS_NO_NAME = "is not a name; begin with a letter or digit, then letters, digits, '_', '.', '-', at most 63 in all"
Name = Annotated[str, Field(pattern=NAME)]
Seed = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Samples = Annotated[Count, at_most(100_000_000_000, "the index of a data set has a row for each sample")]
Pixels = Annotated[Count, at_most(16_384, "a single image of that side has 3 GB as the network sees it")]
Seeds = Annotated[list[Seed], Field(min_length=1), AfterValidator(_few), BeforeValidator(_are_listed)]
Fraction = Annotated[float, Field(ge=0, le=1)]


_MOST_UNKNOWN = 20
"""Keys of one mapping that are reported."""


class Strict(BaseModel):
    """No coercion, no infinities, no unknown keys; an unknown key is answered with the nearest known one."""

    # Deferred: a class is compiled when it validates, and the parts of a sweep are compiled within the whole alone.
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)

    HINTS: ClassVar[Mapping[str, str]] = {}
    """By unknown key that people write: why it is none, and what to write in its place."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, value: object) -> object:
        if isinstance(value, Mapping):
            known = {field.alias or name: field for name, field in cls.model_fields.items()}
            unknown = [key for key in value if key not in known]
            shown = unknown[:_MOST_UNKNOWN]
            hints = {
                key: cls.HINTS.get(key) or _missing_colon(str(key), known) or did_you_mean(str(key), known)
                for key in shown
            }
            if len(shown) < len(unknown):
                hints[shown[-1]] += f"; {len(unknown) - len(shown)} more keys here are unknown"
            if hints:
                raise PydanticCustomError("unknown_keys", "unknown keys: {hints}", {"hints": hints})
        return value


def keys_of(class_name: str) -> list[str]:
    """Keys of the mapping that a schema reads; none if there is no such class."""
    waiting: list[type[BaseModel]] = [Strict]
    while waiting:
        schema = waiting.pop()
        if schema.__name__ == class_name:
            return [field.alias or name for name, field in schema.model_fields.items()]
        waiting += schema.__subclasses__()
    return []


def _missing_colon(key: str, known: Iterable[str]) -> str:
    """What to write in place of ``lr 0.1`` and ``lr:0.1``, which YAML reads as keys; empty for other keys."""
    name, _, value = key.partition(":" if ":" in key else " ")
    return f"write '{name}: {value.strip()}', with a blank after the colon" if value and name in known else ""


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


def canonical(value: object) -> object:
    """The value, if an identity can hold it."""
    for path, part in _unstable(value):
        context = {"part": repr(part), "at": path, "limit": MAX_INTEGER}
        message = "{part} is refused: JSON cannot hold it exactly; use text, finite numbers and integers up to {limit}"
        raise PydanticCustomError("refused", message, context)
    return value


def refuse_unread(model: BaseModel, fields: Iterable[str], why: str) -> None:
    """Refuse given fields that nothing reads; ``why`` ends the sentence "it has no effect ..."."""
    for name in fields:
        if name in model.model_fields_set:
            context = {"why": why, "at": (name,)}
            raise PydanticCustomError("refused", "it has no effect {why}; remove it", context)


class OneRule(Strict):
    """Exactly one of the fields in ``RULES`` is given, and of those in ``OF_RULE`` only such as belong to it."""

    RULES: ClassVar[tuple[str, ...]] = ()
    OF_RULE: ClassVar[Mapping[str, str]] = {}
    """Fields and the rule without which they mean nothing."""

    @model_validator(mode="after")
    def _exactly_one_rule(self) -> Self:
        given = [rule for rule in self.RULES if getattr(self, rule) is not None]
        if len(given) != 1:
            found = f"{', '.join(given)}; keep one" if given else "none; add one"
            context = {"found": found, "rules": ", ".join(self.RULES)}
            raise PydanticCustomError("one_rule", "this needs exactly one of {rules}; it has {found}", context)
        for field, rule in self.OF_RULE.items():
            if rule not in given:
                refuse_unread(self, (field,), f"without '{rule}'")
        return self
