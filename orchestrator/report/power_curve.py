"""The figure of ``orchestrator power``: the chance to find a difference by the number of pretraining seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.planning.estimate.power import Comparisons, Design, Noise, power_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
"""The palette of Okabe and Ito, which colour-blind readers can tell apart."""
_LEAST_SEEDS, _MOST_SEEDS = 8, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerPanel:
    """One transfer."""

    title: str
    noise: Noise
    difference: float
    comparisons: Comparisons
    planned: Design
    target_power: float
    transfer_seeds: Sequence[int]
    """A line for each."""
    has_line: bool
    """False where the noise is known so badly that only the range is drawn."""
    wanted: int
    """Pretrain seeds that the axis should reach."""


def draw_power(panels: Sequence[PowerPanel]) -> Figure:
    """Draw a panel for each transfer, one below the other; encode it with ``curves.encode_png``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.4, 3.2 * len(panels)), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel)
    return figure


def _draw_panel(axis: Axes, panel: PowerPanel) -> None:
    from matplotlib.ticker import MaxNLocator

    last = min(_MOST_SEEDS, max(_LEAST_SEEDS, panel.wanted + 2, panel.planned.num_pretrain_seeds + 1))
    seeds = list(range(2, last + 1))

    def curve(noise: Noise, transfers: int) -> list[float]:
        designs = (Design(num_pretrain_seeds=num, num_transfer_seeds=transfers) for num in seeds)
        return [100 * power_of(design, noise, panel.difference, panel.comparisons) for design in designs]

    low, high = panel.noise.ends
    first = panel.transfer_seeds[0]
    if low != high:
        label = f"80 % range of the noise, {_named(first)}"
        axis.fill_between(seeds, curve(high, first), curve(low, first), color=_COLORS[0], alpha=0.15, lw=0, label=label)
    for transfers, color in zip(panel.transfer_seeds if panel.has_line else (), _COLORS, strict=False):
        axis.plot(seeds, curve(panel.noise, transfers), "o-", color=color, markersize=3, label=_named(transfers))
    axis.axhline(100 * panel.target_power, color="#555555", linewidth=0.8, linestyle="--")
    axis.axvline(panel.planned.num_pretrain_seeds, color="#999999", linewidth=0.8, linestyle=":", label="planned")
    axis.set(ylim=(0, 102), xlim=(min(2, panel.planned.num_pretrain_seeds) - 0.3, last + 0.3))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("pretraining seeds")
    axis.set_ylabel("power [%]")
    axis.set_title(panel.title, fontsize=9, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _named(transfers: int) -> str:
    return f"{transfers} transfer seed{'s' * (transfers > 1)}"
