"""The simulations that come with this package, by the name that a sweep gives as ``run``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SIMULATIONS: Final[Mapping[str, str]] = {
    "two-layer-granularity": "workloads.theory.granularity:simulate_granularity",
}
"""Name -> ``module:function``; see ``workloads.theory.context`` for what such a function is."""
