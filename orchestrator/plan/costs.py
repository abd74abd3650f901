"""What hours cost: a table of prices by accelerator. Pure, except that somebody must read the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from orchestrator.contract import Resources
from orchestrator.errors import SpecError, UserError
from orchestrator.spec.tree import parse_value

CPU_ENTRY = "cpu"
_EXAMPLE = "{currency: USD, A100: {hour: 2.2, spot: 0.9}, cpu: {hour: 0.05}}"
_FIELDS = ("hour", "spot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Of one GPU, or of one CPU core, for an hour."""

    hour: float
    spot: float | None = None
    """Of a spot instance; None = as ``hour``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices by name of the accelerator; ``cpu`` is a core's, charged only for jobs without GPUs."""

    prices: Mapping[str, Price]
    currency: str = ""

    @classmethod
    def parse(cls, text: str, file: str) -> Self:
        """From YAML. Raises ``UserError`` saying what is wrong and where."""
        try:
            # As a sweep.yaml: aliases that multiply would fill any memory as they are shown in an error.
            document = parse_value(text, file)
        except SpecError as error:
            raise UserError(f"{error}; this is not YAML of a table of prices such as {_EXAMPLE}") from error
        if not isinstance(document, Mapping) or not document:
            raise UserError(f"{file}: no table of prices; write one such as {_EXAMPLE}")
        entries = {str(name): entry for name, entry in document.items() if name != "currency"}
        prices = {name: _price(name, entry, file) for name, entry in entries.items()}
        return cls(prices=prices, currency=str(document.get("currency", "")))

    def cost(self, seconds: float, resources: Resources, accelerator: str, *, is_spot: bool) -> float | None:
        """Of an attempt; None if the table has no such price."""
        found = self.prices.get(accelerator) if resources.gpus else self.prices.get(CPU_ENTRY)
        if found is None:
            return None
        rate = found.spot if is_spot and found.spot is not None else found.hour
        return seconds / 3600 * rate * (resources.gpus or resources.cpus)

    def show(self, amount: float) -> str:
        """``1,234.50 USD``."""
        return f"{amount:,.2f} {self.currency}".rstrip()


def _price(name: str, entry: Any, file: str) -> Price:  # noqa: ANN401 - whatever the file holds
    fields = entry if isinstance(entry, Mapping) else {"hour": entry}
    unknown = sorted(set(map(str, fields)) - set(_FIELDS))
    if unknown or "hour" not in fields:
        what = f"has {', '.join(unknown)}" if unknown else "lacks 'hour'"
        raise UserError(f"{file}: the price of {name} {what}; its fields are hour and, if you like, spot: {_EXAMPLE}")
    for field, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UserError(f"{file}: {name}.{field} is {value!r}; a price is a number from 0 up: {_EXAMPLE}")
    spot = fields.get("spot")
    return Price(hour=float(fields["hour"]), spot=None if spot is None else float(spot))
