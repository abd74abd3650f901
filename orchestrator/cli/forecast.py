"""``orchestrator forecast``: the sweep on a cluster that need not exist, failures included, on virtual time."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from orchestrator.backends.simulated import ClusterSpec, Hazards, NodeGroup
from orchestrator.backends.simulated.clock import START_S
from orchestrator.cli.console import stderr_console, stdout_console
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.plan import check_accelerator, read_prices
from orchestrator.cli.settings import Settings
from orchestrator.contract import Resources
from orchestrator.errors import UserError
from orchestrator.plan.build import build_plan
from orchestrator.plan.costs import PriceTable
from orchestrator.plan.makespan import Fleet
from orchestrator.planning.fleets import StatedCluster, stated_fleet, this_machine
from orchestrator.planning.outlook import Outlook, make_outlook
from orchestrator.planning.sources import read_sweep
from orchestrator.simulation import Forecast, forecast
from orchestrator.state.transitions import SweepState
from orchestrator.units import format_duration, format_percent

_SAY_EVERY_S = 5.0
_MAX_REASONS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """Flags of the command."""

    cluster: StatedCluster
    spot: float = 0.0
    """Probability that a node is taken away within an hour; above 0, all nodes are spot."""
    gpu_mtbf_h: float = 0.0
    """Hours of one GPU between two faults; 0 = none."""
    replace_s: float = 300.0
    accelerator: str = ""
    prices: str = ""
    seed: int = 0
    png: str = ""
    html: str = ""
    overrides: tuple[str, ...] = ()
    scale: str = ""
    store: str = ""
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    """Money, where there is a price."""

    accelerator: str
    is_spot: bool
    prices: PriceTable | None

    def amount(self, hours: float, resource: str) -> float | None:
        """Of some hours of one GPU or CPU."""
        if self.prices is None:
            return None
        one = Resources(cpus=0.0, gpus=1.0) if resource == "GPU" else Resources(cpus=1.0)
        return self.prices.cost(3600.0 * hours, one, self.accelerator, is_spot=self.is_spot)

    def show(self, hours: float, resource: str) -> str:
        """``, 1,234.50 USD``; empty without a price."""
        amount = self.amount(hours, resource)
        return "" if amount is None or self.prices is None else f", {self.prices.show(amount)}"


def show_forecast(reference: str, options: ForecastOptions) -> ExitCode:
    """Simulate a sweep from its submission to its end and print what became of it."""
    _check(options)
    settings = Settings()
    sweep, _ = read_sweep(reference, options.overrides, scale=options.scale)
    plan = build_plan(sweep, store_uri=options.store or settings.store_uri(sweep))
    fleet = stated_fleet(options.cluster) if options.cluster.is_stated else this_machine()
    accelerator, prices = check_accelerator(options.accelerator), read_prices(options.prices)
    outlook = make_outlook(sweep, plan, fleet=fleet, accelerator=accelerator, prices=prices)
    for problem in outlook.found.problems:
        stderr_console().print(f"warning: {problem}", markup=False)
    found = _simulate(outlook, fleet, options)
    used = Counter(job.accelerator for job in outlook.estimates.jobs.values() if job.gpus)
    bill = _Bill(
        accelerator=accelerator or (used.most_common(1)[0][0] if used else ""),
        is_spot=options.spot > 0.0,
        prices=prices,
    )
    lines = _lines(found, fleet, outlook, bill)
    _write_charts(found, lines, options)
    if options.as_json:
        _print_json(found, bill)
    else:
        _print_table(found, lines)
    return _verdict(found)


def _check(options: ForecastOptions) -> None:
    if not 0.0 <= options.spot < 1.0:
        raise UserError(f"--spot {options.spot:g} is a probability per node and hour: give a number from 0 to below 1")
    if options.gpu_mtbf_h < 0.0 or options.replace_s < 0.0:
        raise UserError("--gpu-mtbf and --replace are times: give numbers from 0 up")


def _simulate(outlook: Outlook, fleet: Fleet, options: ForecastOptions) -> Forecast:
    done = outlook.found.reused
    committed = [job.key for job in outlook.plan.jobs if job.name in done]
    durations_s = {**dict.fromkeys(outlook.plan.by_name(), 0.0), **outlook.estimates.durations_s()}
    hazards = Hazards(
        gpu_mtbf_h=options.gpu_mtbf_h or float("inf"), spot_loss_per_h=options.spot, replace_s=options.replace_s
    )
    say = _Ticker()
    return forecast(
        outlook.plan,
        _spec_of(fleet, is_spot=options.spot > 0.0),
        durations_s,
        hazards=hazards,
        committed=committed,
        seed=options.seed,
        # A deadline is a moment of real time; without one, the same seed gives the same bits at any time.
        now=START_S if outlook.plan.policy.deadline_s is None else time.time(),
        on_round=say,
    )


def _spec_of(fleet: Fleet, *, is_spot: bool) -> ClusterSpec:
    groups = Counter(fleet.nodes)
    return ClusterSpec(
        groups=tuple(NodeGroup(count=count, shape=shape, is_spot=is_spot) for shape, count in groups.items())
    )


class _Ticker:
    """Tells that a long simulation goes on."""

    def __init__(self) -> None:
        self._at_s = time.monotonic() + _SAY_EVERY_S

    def __call__(self, elapsed_s: float) -> None:
        if time.monotonic() >= self._at_s:
            self._at_s = time.monotonic() + _SAY_EVERY_S
            stderr_console().print(f"simulated {format_duration(elapsed_s)} ...", markup=False)


def _lines(found: Forecast, fleet: Fleet, outlook: Outlook, bill: _Bill) -> list[str]:
    unit = f"{found.resource}-hours"
    held = sum(found.hours.values())
    used = bill.show(held, found.resource)
    rented = bill.show(found.available_hours, found.resource)
    least = format_duration(found.lower_bound_s)
    lines = [
        f"{found.num_jobs} jobs ({found.num_reused} reused) on {fleet.name}, seed {found.seed}: {found.state.value}",
        f"makespan {format_duration(found.makespan_s)}; at least {least} on a cluster that never fails",
        f"utilisation {format_percent(found.utilisation, digits=1)} % of {found.available_hours:,.1f} {unit}{rented}",
        f"goodput {format_percent(found.goodput)} % of the {held:,.1f} {unit} that attempts held{used}",
    ]
    assumed = outlook.estimates.assumed_accelerator
    return [*lines, *([f"durations assume {assumed} GPUs; say what they are with --accelerator"] if assumed else [])]


def _print_table(found: Forecast, lines: list[str]) -> None:
    console = stdout_console()
    for line in lines:
        console.print(line, markup=False)
    table = Table(title=f"{found.resource}-hours", title_justify="left")
    for column in ("held for", "hours", "%"):
        table.add_column(column, justify="left" if column == "held for" else "right")
    held = sum(found.hours.values()) or 1.0
    rows = [*found.hours.items(), *((f"  lost by {cause}", hours) for cause, hours in found.lost_hours.items())]
    for name, hours in rows:
        table.add_row(name, f"{hours:,.2f}", format_percent(hours / held))
    console.print(table)
    ends = ", ".join(f"{number} {ending}" for ending, number in found.num_ends.items())
    console.print(f"{found.num_attempts} attempts: {ends or 'none'}", markup=False)


def _print_json(found: Forecast, bill: _Bill) -> None:
    held = sum(found.hours.values())
    money = {
        "currency": bill.prices.currency if bill.prices else "",
        "cost_available": bill.amount(found.available_hours, found.resource),
        "cost_held": bill.amount(held, found.resource),
    }
    stdout_console().print_json(json.dumps({**found.to_json(), **money}))


def _write_charts(found: Forecast, lines: list[str], options: ForecastOptions) -> None:
    if not options.png and not options.html:
        return
    from orchestrator.simulation.gantt import make_chart

    chart, title = make_chart(found.spans, found.started_at_s), f"Forecast of sweep {found.sweep}"
    if options.png:
        from orchestrator.simulation.gantt_png import render_png

        _write(options.png, render_png(chart, title))
    if options.html:
        from orchestrator.simulation.gantt_html import render_html

        _write(options.html, render_html(chart, title, lines))


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UserError(f"the chart cannot be written to {path}: {error}; name another file") from error
    stderr_console().print(f"wrote {path}", markup=False)


def _verdict(found: Forecast) -> ExitCode:
    if found.state is SweepState.SUCCEEDED:
        return ExitCode.OK
    reasons = list(found.reasons.items())
    told = [f"{job}: {reason}" for job, reason in reasons[:_MAX_REASONS]]
    more = [f"... and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    complain("\n".join([f"the sweep would end as {found.state.value}", *told, *more]))
    return ExitCode.SWEEP_FAILED
