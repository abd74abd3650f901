"""``orchestrator forecast``: simulates a sweep on a cluster, with failures, in virtual time."""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self

import typer
from rich.table import Table

from orchestrator import simulation
from orchestrator.backends.simulated import ClusterSpec, Hazards, NodeGroup
from orchestrator.backends.simulated.clock import START_S
from orchestrator.cli.arguments import (
    CpusOption,
    GpusPerNodeOption,
    PricesOption,
    ScaleOption,
    SetOption,
    StoreOption,
    scale_name,
)
from orchestrator.cli.exits import ExitCode, complain
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.contract import Resources
from orchestrator.core.errors import UsageError, UserError
from orchestrator.core.units import format_bytes, format_duration, format_percent
from orchestrator.planning.estimate.estimates import price_name_of
from orchestrator.planning.estimate.eta import Fleet
from orchestrator.planning.estimate.prices import CPU_ENTRY, PriceTable
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.services.costs import read_prices
from orchestrator.services.fleets import StatedCluster, stated_fleet, this_machine
from orchestrator.services.preview import Preview, check_accelerator, make_preview
from orchestrator.services.settings import Settings
from orchestrator.services.terminal import stderr_console
from orchestrator.simulation import Forecast
from orchestrator.simulation.forecast import Assumptions, Traffic, imagined, join_plans
from orchestrator.state.transitions import SweepState
from orchestrator.sweepfile import load_sweep

_PRINT_EVERY_S = 5.0
_DEFAULT_ERROR_FACTOR: Final = 3.0
"""By how much estimates may be wrong in a store without results (docs/planning.md)."""
_MAX_REASONS = 5
_RemovedPng = Annotated[str, typer.Option("--png", hidden=True)]  # users of the old option learn what replaces it


def forecast(  # noqa: PLR0913 - one parameter per flag
    sweeps: Annotated[
        list[str],
        typer.Argument(help="Sweep files or shipped sweeps; several share one cluster and run common jobs once."),
    ],
    *,
    gpus: Annotated[int, typer.Option(help="GPUs of the cluster; default: this machine.", show_default=False)] = 0,
    gpus_per_node: GpusPerNodeOption = 0,
    cpus: CpusOption = 0,
    spot: Annotated[float, typer.Option(help="Use spot nodes; probability that a node is lost within an hour.")] = 0.0,
    gpu_mtbf: Annotated[float, typer.Option(help="Mean hours between faults of one GPU; 0: no faults.")] = 50_677.0,
    replace: Annotated[float, typer.Option(help="Seconds until a lost node is replaced.")] = 300.0,
    read_rate: Annotated[float, typer.Option(help="GB/s at which a node reads data that it does not hold yet.")] = 1.0,
    network: Annotated[float, typer.Option(help="Gbit/s of a node, for gradients that go to other nodes.")] = 100.0,
    accelerator: Annotated[str, typer.Option(help="Type of the GPUs: A100, H100, ...")] = "",
    prices: PricesOption = "",
    seed: Annotated[int, typer.Option(help="Seed of all random events.")] = 0,
    png: _RemovedPng = "",
    html: Annotated[str, typer.Option(help="Write an interactive Gantt chart to this HTML file.")] = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Simulate sweeps on a cluster with failures: how long they take, how busy the cluster is, what they cost.

    Changes nothing.
    """
    if png:
        raise UsageError("--png is gone: --html FILE draws the same as a page, which a browser prints")
    options = ForecastOptions(
        cluster=StatedCluster(gpus=gpus, gpus_per_node=gpus_per_node, cpus=cpus),
        spot=spot,
        gpu_mtbf_h=gpu_mtbf,
        replace_s=replace,
        read_gb_per_s=read_rate,
        network_gbit_per_s=network,
        accelerator=accelerator,
        prices=prices,
        seed=seed,
        html=html,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        store=store,
        form=output,
    )
    _check(options)
    fleet = stated_fleet(options.cluster) if options.cluster.is_stated else this_machine()
    table = read_prices(options.prices)
    expected = _expect(sweeps, fleet, table, options)
    found = _simulate(expected, fleet, options)
    bill = _Bill(accelerator=expected.price_names[0], is_spot=options.spot > 0.0, prices=table)
    bounds = [_simulate(one, fleet, options) for one in expected.bounds()]
    lines = _lines(found, bounds, fleet, expected, bill)
    _write_chart(found, lines, options)
    if options.form is DocumentForm.TABLE:
        _print_table(found, lines, has_hours=expected.uses(found.resource))
    else:
        print_document(_document(found, bounds, expected, bill), options.form)
    raise typer.Exit(_verdict(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastOptions:
    """Flags of the command."""

    cluster: StatedCluster
    spot: float = 0.0
    """Probability that a node is taken away within an hour; above 0, all nodes are spot."""
    gpu_mtbf_h: float = 0.0
    """Hours of one GPU between two faults; 0 = none."""
    replace_s: float = 300.0
    read_gb_per_s: float = 1.0
    network_gbit_per_s: float = 100.0
    accelerator: str = ""
    prices: str = ""
    seed: int = 0
    html: str = ""
    overrides: tuple[str, ...] = ()
    scale: str = ""
    store: str = ""
    form: DocumentForm = DocumentForm.TABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bill:
    """Money, where there is a price."""

    accelerator: str
    is_spot: bool
    prices: PriceTable | None

    def amount(self, hours: float, resource: str) -> float | None:
        """Cost of some hours of one GPU or CPU."""
        if self.prices is None:
            return None
        one = Resources(cpus=0.0, gpus=1.0) if resource == "GPU" else Resources(cpus=1.0)
        return self.prices.cost(3600.0 * hours, one, self.accelerator, is_spot=self.is_spot)

    def name(self, resource: str) -> str:
        """Currency of its entry in a table of prices."""
        return (self.accelerator or "these GPUs") if resource == "GPU" else CPU_ENTRY

    def show(self, hours: float, resource: str) -> str:
        """``, 1,234.50 USD``; empty without a price."""
        amount = self.amount(hours, resource)
        return "" if amount is None or self.prices is None else f", {self.prices.show(amount)}"

    def show_range(self, hours: Sequence[float], resource: str) -> str:
        """``, 1,000.00 USD to 9,000.00 USD``; empty without a price."""
        shown = [self.show(one, resource).removeprefix(", ") for one in hours]
        return f", {' to '.join(shown)}" if all(shown) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Expected:
    """The work of several sweeps on one cluster and one store, by name of the job in their common plan."""

    plan: Plan
    durations_s: Mapping[str, float]
    traffic: Mapping[str, Traffic]
    error_factor: float
    """By which all durations may be wrong, in both directions."""
    committed: Sequence[str]
    """Keys that the store has."""
    kept_bytes: int
    price_names: Sequence[str]
    """Entries in a table of prices of the GPUs that jobs ask for, those of most GPU-hours first, or of those that
    ``--accelerator`` names; an empty one = no job has any, and none are named."""
    assumed_accelerator: str
    """The assumed GPU type where none is given; empty = it is given."""

    def uses(self, resource: str) -> bool:
        """Whether any job holds ``GPU`` or ``CPU``, which a forecast counts."""
        return resource == "CPU" or any(job.resources.gpus for job in self.plan.jobs)

    def bounds(self) -> list[Self]:
        """As if everything took less, and more, by all that estimates may be wrong."""
        return [
            replace(self, durations_s={name: times * seconds for name, seconds in self.durations_s.items()})
            for times in (1.0 / self.error_factor, self.error_factor)
        ]


def _expect(references: Sequence[str], fleet: Fleet, prices: PriceTable | None, options: ForecastOptions) -> _Expected:
    accelerator = check_accelerator(options.accelerator)
    outlooks = [_outlook(reference, fleet, accelerator, prices, options) for reference in references]
    for problem in dict.fromkeys(problem for outlook in outlooks for problem in outlook.found.problems):
        stderr_console().print(f"warning: {problem}")
    study = join_plans([outlook.plan for outlook in outlooks])
    durations_s = dict.fromkeys(study.plan.by_name(), 0.0)
    kept: dict[str, int] = {}
    traffic: dict[str, Traffic] = {}
    errors = [outlook.model_error for outlook in outlooks]
    priced: dict[str, float] = defaultdict(float)  # GPU-seconds
    for outlook, names in zip(outlooks, study.names, strict=True):
        durations_s |= {names[name]: seconds for name, seconds in outlook.estimates.durations_s().items()}
        kept |= {names[name]: estimated.kept_bytes for name, estimated in outlook.estimates.jobs.items()}
        jobs = outlook.plan.by_name()
        traffic |= {
            names[name]: Traffic(
                reads=jobs[name].identity["inputs"].get("index", ""),
                read_bytes=job.read_bytes,
                gradient_bytes=job.gradient_bytes,
                num_steps=job.num_steps,
            )
            for name, job in outlook.estimates.jobs.items()
        }
        for estimated in outlook.estimates.jobs.values():
            if estimated.gpus:
                priced[estimated.price_name] += estimated.gpus * estimated.seconds
    done = {job.key for outlook in outlooks for job in outlook.plan.jobs if job.name in outlook.found.reused}
    return _Expected(
        plan=study.plan,
        durations_s=durations_s,
        traffic=traffic,
        error_factor=max(_DEFAULT_ERROR_FACTOR if error is None else error.within_calibrated for error in errors),
        committed=[job.key for job in study.plan.jobs if job.key in done],
        kept_bytes=sum(kept.values()),
        price_names=sorted(priced, key=lambda name: -priced[name]) or [price_name_of(prices, "", accelerator)],
        assumed_accelerator=next(filter(None, (one.estimates.assumed_accelerator for one in outlooks)), ""),
    )


def _outlook(
    reference: str, fleet: Fleet, accelerator: str, prices: PriceTable | None, options: ForecastOptions
) -> Preview:
    sweep, _ = load_sweep(reference, options.overrides, scale=options.scale)
    plan = build_plan(sweep, store_uri=options.store or Settings().store_uri(sweep))
    return make_preview(sweep, plan, fleet=fleet, accelerator=accelerator, prices=prices)


def _check(options: ForecastOptions) -> None:
    if not 0.0 <= options.spot < 1.0:
        raise UsageError(f"--spot {options.spot:g} is a probability per node and hour: give a number from 0 to below 1")
    if options.read_gb_per_s <= 0.0 or options.network_gbit_per_s <= 0.0:
        raise UsageError("--read-rate and --network are rates: give numbers above 0")
    if options.gpu_mtbf_h < 0.0 or options.replace_s < 0.0:
        raise UsageError("--gpu-mtbf and --replace are times: give numbers from 0 up")


def _simulate(expected: _Expected, fleet: Fleet, options: ForecastOptions) -> Forecast:
    hazards = Hazards(
        gpu_mtbf_h=options.gpu_mtbf_h or float("inf"), spot_loss_per_h=options.spot, replace_s=options.replace_s
    )
    ticker = _Ticker()
    return simulation.forecast(
        imagined(expected.plan, fleet),
        _spec_of(fleet, is_spot=options.spot > 0.0),
        expected.durations_s,
        hazards=hazards,
        assumptions=Assumptions(
            read_bytes_per_s=1e9 * options.read_gb_per_s, network_bytes_per_s=1e9 / 8.0 * options.network_gbit_per_s
        ),
        traffic=expected.traffic,
        committed=expected.committed,
        seed=options.seed,
        # A deadline is a real time; without one, the same seed gives the same bits at any time.
        now=START_S if expected.plan.policy.deadline_s is None else time.time(),
        on_round=ticker,
    )


def _spec_of(fleet: Fleet, *, is_spot: bool) -> ClusterSpec:
    groups = Counter(fleet.nodes)
    return ClusterSpec(
        groups=tuple(NodeGroup(count=count, shape=shape, is_spot=is_spot) for shape, count in groups.items())
    )


class _Ticker:
    """Prints that a long simulation continues."""

    def __init__(self) -> None:
        self._at_s = time.monotonic() + _PRINT_EVERY_S

    def __call__(self, elapsed_s: float) -> None:
        if time.monotonic() >= self._at_s:
            self._at_s = time.monotonic() + _PRINT_EVERY_S
            stderr_console().print(f"simulated {format_duration(elapsed_s)} ...")


def _lines(found: Forecast, bounds: Sequence[Forecast], fleet: Fleet, expected: _Expected, bill: _Bill) -> list[str]:
    unit = f"{found.resource}-hours"
    held = sum(found.hours.values())
    used = bill.show(held, found.resource)
    rented = bill.show(found.available_hours, found.resource)
    least = format_duration(found.lower_bound_s)
    costs = bill.show_range([one.available_hours for one in bounds], found.resource)
    lines = [
        f"{found.num_jobs} jobs ({found.num_reused} reused) on {fleet.name}, seed {found.seed}: {found.state.value}",
        f"makespan {format_duration(found.makespan_s)}; at least {least} on a cluster that never fails",
        f"with all durations {expected.error_factor:.1f} times shorter or longer: makespan {_from_to(bounds)}{costs}",
        _waits(found),
        f"utilisation {format_percent(found.utilisation, digits=1)} % of {found.available_hours:,.1f} {unit}{rented}",
        f"goodput {format_percent(found.goodput)} % of the {held:,.1f} {unit} that attempts held{used}"
        if expected.uses(found.resource)
        else "no job has a GPU: those of the cluster stand idle",
    ]
    if bill.prices is not None and not rented:
        lines.append(f"cost unknown: the table has no price of {bill.name(found.resource)}")
    elif rented and len(expected.price_names) > 1:
        first, *others = expected.price_names
        lines.append(
            f"cost as if all GPUs were {first}, which have most of the work; jobs ask for {', '.join(others)}, too"
        )
    lines.append(f"storage {format_bytes(expected.kept_bytes)} of artifacts that stay")
    assumed = expected.assumed_accelerator
    return [*lines, *([f"durations assume {assumed} GPUs; name their type with --accelerator"] if assumed else [])]


def _from_to(bounds: Sequence[Forecast]) -> str:
    """From the shorter makespan to the longer one; a sweep that does not come to its end tells why."""
    return " to ".join(f"{format_duration(one.makespan_s)}{_cut_off(one)}" for one in bounds)


def _cut_off(found: Forecast) -> str:
    """How a sweep ends that does not succeed, and why; empty for others."""
    if found.state is SweepState.SUCCEEDED:
        return ""
    why = found.stopped or next(iter(found.reasons.values()), "")
    return f" (it ends as {found.state.value}{f': {why}' if why else ''})"


def _waits(found: Forecast) -> str:
    """How long jobs waited for room."""
    waits = sorted(found.waits_s.items(), key=lambda item: item[1])
    if not waits:
        return "no job had to run"
    name, longest_s = waits[-1]
    median_s = statistics.median(seconds for _, seconds in waits)
    return f"queueing time: median {format_duration(median_s)}, longest {format_duration(longest_s)} ({name})"


def _print_table(found: Forecast, lines: list[str], *, has_hours: bool) -> None:
    console = stdout_console()
    for line in lines:
        console.print(line)
    table = Table(title=f"{found.resource}-hours", title_justify="left")
    for column in ("held for", "hours", "%"):
        table.add_column(column, justify="left" if column == "held for" else "right")
    held = sum(found.hours.values()) or 1.0
    rows = [*found.hours.items(), *((f"  lost by {cause}", hours) for cause, hours in found.lost_hours.items())]
    for name, hours in rows:
        table.add_row(name, f"{hours:,.2f}", format_percent(hours / held))
    if has_hours:
        console.print(table)
    ends = ", ".join(f"{number} {ending}" for ending, number in found.num_ends.items())
    console.print(f"{found.num_attempts} attempts: {ends or 'none'}")


def _document(found: Forecast, bounds: Sequence[Forecast], expected: _Expected, bill: _Bill) -> dict[str, Any]:
    held = sum(found.hours.values())
    money = {
        "currency": bill.prices.currency if bill.prices else "",
        "cost_available": bill.amount(found.available_hours, found.resource),
        "cost_held": bill.amount(held, found.resource),
    }
    wrong = {
        "factor": expected.error_factor,
        "makespan_s": [one.makespan_s for one in bounds],
        "states": [one.state.value for one in bounds],
        "available_hours": [one.available_hours for one in bounds],
    }
    return {**found.to_json(), **money, "duration_error": wrong, "kept_bytes": expected.kept_bytes}


def _write_chart(found: Forecast, lines: list[str], options: ForecastOptions) -> None:
    if not options.html:
        return
    from orchestrator.simulation.gantt import make_chart, render_html

    chart = make_chart(found.spans, found.started_at_s)
    _write(options.html, render_html(chart, f"Forecast of sweep {found.sweep}", lines))


def _write(path: str, content: bytes) -> None:
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UserError(f"the chart cannot be written to {path}: {error}; name another file") from error
    stderr_console().print(f"wrote {path}")


def _verdict(found: Forecast) -> ExitCode:
    if found.state is SweepState.SUCCEEDED:
        return ExitCode.OK
    reasons = list(found.reasons.items())
    shown = [*filter(None, [found.stopped]), *(f"{job}: {reason}" for job, reason in reasons[:_MAX_REASONS])]
    more = [f"... and {len(reasons) - _MAX_REASONS} more"] if len(reasons) > _MAX_REASONS else []
    complain("\n".join([f"the sweep would end as {found.state.value}", *shown, *more]))
    return ExitCode.SWEEP_FAILED
