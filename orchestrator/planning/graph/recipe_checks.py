"""Checks of a sweep's recipes: what trains without an error, but not as the file suggests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Final

from orchestrator.sweepfile.values import ResolvedSweep

_NORMALIZATION: Final = ("mean", "std")


def other_normalizations(sweep: ResolvedSweep) -> Iterator[str]:
    """Warnings of transfers whose pixels are normalised in another way than in the pretraining.

    A recipe with an optimiser has a mean and a deviation of its own, 0.5 where it does not say: those of image probes,
    fine-tuning, and SGD on cached features. Recipes without an optimiser inherit those of the pretraining.
    """
    alike: dict[tuple[str, str, str], list[str]] = {}
    for transfer in sweep.transfer:
        for block, cell in product(transfer.pretrains, transfer.cells):
            mine, trained = cell.recipe, sweep.pretrain(block).recipe
            if "lr" not in mine or all(mine.get(name) == trained.get(name) for name in _NORMALIZATION):
                continue
            # Another size by itself is often meant.
            names = [*_NORMALIZATION, *(["resize"] if mine.get("resize") != trained.get("resize") else [])]
            alike.setdefault((block, _fields(mine, names), _fields(trained, names)), []).append(transfer.name)
    for (block, mine_told, trained_told), transfers in alike.items():
        pretraining = f"the pretraining {block}" if block else "the pretraining"
        yield (
            f"{', '.join(dict.fromkeys(transfers))}: images are prepared with {mine_told}, those of {pretraining} with "
            f"{trained_told}; a recipe with an optimiser does not inherit these fields: unless this is meant, write "
            f"{trained_told} into the recipe of the transfer"
        )


def _fields(recipe: Mapping[str, Any], names: list[str]) -> str:
    """Lines of a recipe."""
    lines = [f"`{name}: {json.dumps(recipe.get(name))}`" for name in names]
    return f"{', '.join(lines[:-1])} and {lines[-1]}"
