"""A table of prices per hour by accelerator. Pure, except for reading the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from unicodedata import category

from orchestrator.core.contract import Resources
from orchestrator.core.errors import SpecError, UserError
from orchestrator.core.units import format_money
from orchestrator.sweepfile.parse.tree import parse_value

CPU_ENTRY = "cpu"
_EXAMPLE = "{currency: USD, A100: {hour: 2.2, spot: 0.9}, cpu: {hour: 0.05}}"
_FIELDS = ("hour", "spot")
_MAX_CURRENCY = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcePrice:
    """Of one GPU, or of one CPU core, for an hour."""

    hour: float
    spot: float | None = None
    """Of a spot instance; None = as ``hour``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    """Prices by name of the accelerator; ``cpu`` is a core's, charged only for jobs without GPUs."""

    prices: Mapping[str, ResourcePrice]
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
        currency = _currency(document["currency"], file) if "currency" in document else ""
        return cls(prices=prices, currency=currency)

    def cost(self, seconds: float, resources: Resources, accelerator: str, *, is_spot: bool) -> float | None:
        """Of an attempt; None if the table has no such price."""
        found = self.prices.get(accelerator) if resources.gpus else self.prices.get(CPU_ENTRY)
        if found is None:
            return None
        rate = found.spot if is_spot and found.spot is not None else found.hour
        return seconds / 3600 * rate * (resources.gpus or resources.cpus)

    def show(self, amount: float) -> str:
        """``1,234.50 USD``, ``0.0012 USD``."""
        return f"{format_money(amount)} {self.currency}".rstrip()


def _currency(given: Any, file: str) -> str:  # noqa: ANN401 - whatever the file holds
    is_text = isinstance(given, str) and 1 <= len(given) <= _MAX_CURRENCY
    if not is_text or not all(sign.isalpha() or category(sign) == "Sc" for sign in given):
        raise UserError(
            f"{file}: currency is {given!r}; it is a text of 1 to {_MAX_CURRENCY} letters or signs such as USD or €, "
            f"in quotes where YAML would read something else: {_EXAMPLE}"
        )
    return str(given)


def _price(name: str, entry: Any, file: str) -> ResourcePrice:  # noqa: ANN401 - whatever the file holds
    fields = entry if isinstance(entry, Mapping) else {"hour": entry}
    unknown = sorted(set(map(str, fields)) - set(_FIELDS))
    if unknown or "hour" not in fields:
        what = f"has {', '.join(unknown)}" if unknown else "lacks 'hour'"
        raise UserError(f"{file}: the price of {name} {what}; its fields are hour and, if you like, spot: {_EXAMPLE}")
    for field, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise UserError(f"{file}: {name}.{field} is {value!r}; a price is a number from 0 up: {_EXAMPLE}")
    spot = fields.get("spot")
    return ResourcePrice(hour=float(fields["hour"]), spot=None if spot is None else float(spot))
