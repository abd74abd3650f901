"""``orchestrator power``: how many seeds are needed to detect a difference, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from orchestrator.cli.arguments import PricesOption, ScaleOption, SetOption, StoreOption, scale_name
from orchestrator.cli.exits import ExitCode
from orchestrator.cli.output import DocumentForm, DocumentOption, print_document, stdout_console
from orchestrator.core.errors import UsageError, UserError
from orchestrator.planning.estimate.power import MOST_SEEDS, method_of
from orchestrator.planning.estimate.prices import PriceTable
from orchestrator.planning.graph.build import build_plan
from orchestrator.planning.graph.plan import Plan
from orchestrator.report.render.columns import TextTable, units
from orchestrator.report.render.curves import PowerPanel, draw_power, encode_png
from orchestrator.report.render.files import json_ready
from orchestrator.report.render.numbers import MISSING, in_words, number
from orchestrator.report.render.terminal import FittingTable
from orchestrator.report.statistics.intervals import is_fraction
from orchestrator.services.costs import read_prices
from orchestrator.services.power import EffectPower, JobCost, Option, PowerAnswer, PowerQuestion, answer_power
from orchestrator.services.preview import check_accelerator
from orchestrator.services.settings import Settings
from orchestrator.services.stores import find_plan
from orchestrator.services.terminal import stderr_console
from orchestrator.sweepfile import load_sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerOptions:
    """Flags of the command; differences and standard deviations in points where the metric is a rate."""

    difference: float
    power: float = 0.8
    transfer: str = ""
    like: str = ""
    std: float | None = None
    accelerator: str = ""
    prices: str = ""
    png: str = ""
    overrides: tuple[str, ...] = ()
    scale: str = ""
    form: DocumentForm = DocumentForm.TABLE
    store: str = ""


def power(  # noqa: PLR0913 - one parameter per flag
    sweep: Annotated[str, typer.Argument(help="A submitted sweep, a sweep.yaml or the name of a shipped sweep.")],
    *,
    difference: Annotated[
        float,
        typer.Option(
            help="Difference to the baseline that is to be detected, in percentage points (for a metric that is not a "
            "rate: in its own unit)."
        ),
    ],
    power: Annotated[float, typer.Option(help="Probability of detecting it, between 0 and 1.")] = 0.8,
    transfer: Annotated[str, typer.Option(help="Only this transfer; default: all.")] = "",
    like: Annotated[str, typer.Option(help="Take the noise between seeds from this submitted sweep.")] = "",
    std: Annotated[
        float | None,
        typer.Option(
            help="Standard deviation of the difference between pretraining seeds, in percentage points (for a "
            "metric that is not a rate: in its own unit); replaces any measured noise."
        ),
    ] = None,
    accelerator: Annotated[str, typer.Option(help="Type of the GPUs: A100, H100, ...")] = "",
    prices: PricesOption = "",
    png: Annotated[str, typer.Option(help="Plot the power over the number of seeds into this file.")] = "",
    overrides: SetOption = None,
    scale: ScaleOption = None,
    output: DocumentOption = DocumentForm.TABLE,
    store: StoreOption = "",
) -> None:
    """Compute how many seeds are needed to detect a difference, and what they cost. Changes nothing."""
    options = PowerOptions(
        difference=difference,
        power=power,
        transfer=transfer,
        like=like,
        std=std,
        accelerator=accelerator,
        prices=prices,
        png=png,
        overrides=tuple(overrides or ()),
        scale=scale_name(scale),
        form=output,
        store=store,
    )
    raise typer.Exit(show_power(sweep, options))


def show_power(reference: str, options: PowerOptions) -> ExitCode:
    """Print what each transfer of a sweep needs."""
    _check(options)
    plan, prices = _find_plan(reference, options), read_prices(options.prices)
    points = 100 if is_fraction(plan.metric) else 1
    question = PowerQuestion(
        difference=options.difference / points,
        transfer=options.transfer,
        like=options.like,
        std=None if options.std is None else options.std / points,
        target_power=options.power,
    )
    answers = answer_power(plan, question, accelerator=check_accelerator(options.accelerator), prices=prices)
    if options.png:
        _write(options.png, answers, plan.metric)
        stderr_console().print(f"wrote {options.png}")
    if options.form is not DocumentForm.TABLE:
        print_document(json_ready([_document(answer, prices) for answer in answers]), options.form)
        return ExitCode.OK
    for answer in answers:
        stdout_console().print(FittingTable(table=_table(answer, plan.metric, prices)))
        for line in _lines(answer, plan.metric):
            stdout_console().print(f"  {line}")
        if answer.effects:
            stdout_console().print(FittingTable(table=_effect_table(answer, plan.metric)))
            for line in _effect_lines(answer):
                stdout_console().print(f"  {line}")
    return ExitCode.OK


def _check(options: PowerOptions) -> None:
    if not 0 < options.difference < float("inf"):
        raise UsageError(f"--difference {options.difference:g} must be a number above 0, in points")
    if not 0 < options.power < 1:
        raise UsageError(f"--power {options.power:g} is a probability: give a number between 0 and 1, such as 0.8")
    if options.std is not None and not 0 < options.std < float("inf"):
        raise UsageError(f"--std {options.std:g} must be a number above 0, in points")


def _find_plan(reference: str, options: PowerOptions) -> Plan:
    """The plan of a submitted sweep, unless there is a file of this name or options change the sweep."""
    if options.overrides or options.scale:
        sweep, _ = load_sweep(reference, options.overrides, scale=options.scale)
        return build_plan(sweep, store_uri=options.store or Settings().store_uri(sweep))
    return find_plan(reference, options.store or Settings().store_uri())


def _document(answer: PowerAnswer, prices: PriceTable | None) -> dict[str, object]:
    cheapest = answer.cheapest
    noise = {**asdict(answer.noise), "ends": [asdict(end) for end in answer.noise.ends]}
    found = {"noise": noise, "is_known": answer.is_known, "currency": prices.currency if prices else ""}
    return {**asdict(answer), **found, "cheapest": asdict(cheapest) if cheapest else None}


def _table(answer: PowerAnswer, metric: str, prices: PriceTable | None) -> TextTable:
    header = ["transfer seeds", f"pretraining seeds for {answer.target_power:.0%}", "power", "GPU-hours more"]
    amounts: list[Callable[[JobCost], str]] = [lambda price: f"{price.gpu_hours:,.1f}"]
    if not any(option.added and option.added.gpu_hours for option in answer.options):
        header[-1] = "CPU-hours more"
        amounts = [lambda price: f"{price.cpu_hours:,.2f}"]
    if prices is not None:
        header.append("cost more")
        amounts.append(lambda price: "unknown" if price.cost is None else prices.show(price.cost))
    cheapest = answer.cheapest if answer.is_known else None
    return TextTable(
        title=_title(answer, metric),
        header=tuple(header),
        rows=tuple(_row(option, answer, amounts) for option in answer.options),
        best=answer.options.index(cheapest) if cheapest else None,
    )


def _title(answer: PowerAnswer, metric: str) -> str:
    against = f" to {answer.baseline}" if answer.baseline else ""
    difference = f"{number(answer.difference, metric)}{in_words(metric, of_difference=True)}"
    return f"{answer.place}: to see a difference of {difference}{against}"


def _row(option: Option, answer: PowerAnswer, amounts: Sequence[Callable[[JobCost], str]]) -> tuple[str, ...]:
    spread = _from_to(_seeds(option.least), _seeds(option.most))
    if not answer.is_known:
        ends = [
            _from_to(_amount(option.least_added, as_text), _amount(option.most_added, as_text)) for as_text in amounts
        ]
        return (str(option.num_transfer_seeds), spread, "-", *ends)
    seeds = _seeds(option.num_pretrain_seeds)
    shown = seeds if option.least == option.most else f"{seeds} ({spread})"
    chance = "-" if option.power is None else f"{option.power:.0%}"
    return (str(option.num_transfer_seeds), shown, chance, *(_amount(option.added, as_text) for as_text in amounts))


def _seeds(number: int | None) -> str:
    return f">{MOST_SEEDS}" if number is None else str(number)


def _amount(price: JobCost | None, as_text: Callable[[JobCost], str]) -> str:
    return "-" if price is None else as_text(price)


def _from_to(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _lines(answer: PowerAnswer, metric: str) -> Iterator[str]:
    """The noise on which the answer is based, the planned design, and the cheapest sufficient ones."""
    noise, unit = answer.noise, in_words(metric, of_difference=True)
    parts = [f"{number(noise.pretrain_std, metric)}{unit} between pretraining seeds"]
    parts += [] if noise.transfer_std is None else [f"{number(noise.transfer_std, metric)} between transfers of one"]
    seeds = f" on {noise.num_pretrain_seeds} pretraining seeds" if noise.num_pretrain_seeds else ""
    low, high = noise.ends
    spread = f"; 80 % range {number(low.pretrain_std, metric)} to {number(high.pretrain_std, metric)}" if seeds else ""
    yield f"noise of a difference: {' and '.join(parts)}, {answer.source}{seeds}{spread}"
    tests = method_of([answer.is_paired])
    yield f"tests: {answer.comparisons.total} comparison{'s' * (answer.comparisons.total > 1)}, {tests}"
    if answer.unpaired and answer.is_paired:
        names = ", ".join(answer.unpaired)
        yield f"not for {names}: runs share only the number of the seed, so the report compares them by Welch's t"
    planned, chances = answer.planned, answer.planned_range
    chance = _from_to(f"{chances[0]:.0%}", f"{chances[1]:.0%}")
    planned_power = f"{answer.planned_power:.0%}"
    if answer.is_known:
        chance = planned_power if chance == planned_power else f"{planned_power} ({chance})"
    seeds = f"{planned.num_pretrain_seeds} pretraining x {planned.num_transfer_seeds} transfer seeds"
    yield f"planned: {seeds}, power {chance}"
    if not answer.is_known:
        yield "fewer than 3 pretraining seeds estimate the noise only roughly, so a range is given"
    elif (best := answer.cheapest) is not None and best.num_pretrain_seeds is not None:
        more = best.num_pretrain_seeds - planned.num_pretrain_seeds
        extra = best.num_transfer_seeds - planned.num_transfer_seeds
        wanted = [f"{count} more {kind}" for count, kind in ((more, "pretraining"), (extra, "transfer")) if count]
        is_one = len(wanted) == 1 and more + extra == 1
        yield f"cheapest: {' and '.join(wanted)} seed{'' if is_one else 's'}" if wanted else "the plan is enough"
    if noise.transfer_std is None and noise.num_pretrain_seeds:
        yield "with one transfer per backbone, the effect of more transfer seeds cannot be estimated"


def _effect_table(answer: PowerAnswer, metric: str) -> TextTable:
    """What the planned seeds detect of each effect; effects that differ only in their values share a line."""
    alike: dict[tuple[str, ...], list[EffectPower]] = {}
    for effect in answer.effects:
        low, high = effect.smallest_range or (None, None)
        texts = [MISSING if value is None else number(value, metric) for value in (effect.smallest, low, high)]
        spread = "" if texts[1] == texts[2] else f" ({_from_to(texts[1], texts[2])})"
        power = MISSING if effect.power is None else f"{effect.power:.0%}"
        shown = (str(effect.num_matched), str(effect.num_pretrain_seeds), f"{texts[0]}{spread}", power)
        alike.setdefault((" x ".join(effect.factors), str(effect.is_asked), *shown), []).append(effect)
    rows = [(_effect_name(some, name), *shown) for (name, _, *shown), some in alike.items()]
    chance = f"power for {number(answer.difference, metric)}{in_words(metric, of_difference=True)}"
    smallest = f"smallest effect{units(metric)[1]} for {answer.target_power:.0%}"
    return TextTable(
        title=f"{answer.transfer}: what the planned seeds find of each effect",
        header=("effect", "cells", "seeds", smallest, chance),
        rows=tuple(rows),
    )


def _effect_name(alike: Sequence[EffectPower], factors: str) -> str:
    if len(alike) == 1:
        return alike[0].name
    kind = "contrasts with the baseline's value" if alike[0].is_asked else "contrasts"
    return f"{factors}: {len(alike)} {kind}"


def _effect_lines(answer: PowerAnswer) -> Iterator[str]:
    tested = [effect.is_paired for effect in answer.effects if effect.num_pretrain_seeds > 1]
    yield f"tests: {len(tested)} contrast{'s' * (len(tested) > 1)}, {method_of(tested)}"
    known = [effect for effect in answer.effects if effect.noise]
    if measured := [effect.noise.num_pretrain_seeds for effect in known if effect.is_measured and effect.noise]:
        yield f"noise: of each effect itself, measured in this sweep on {max(measured)} pretraining seeds"
    if any(not effect.is_measured for effect in known):
        yield "noise: of a difference, as above, over the matched cells, as if these varied independently over seeds"
    if len(known) < len(answer.effects):
        yield "effects of values that share the number of the seed only need results of this sweep: three seeds"


def _write(path: str, answers: Sequence[PowerAnswer], metric: str) -> None:
    panels = [
        PowerPanel(
            title=_title(answer, metric).replace(": ", ":\n", 1),
            noise=answer.noise,
            difference=answer.difference,
            comparisons=answer.comparisons,
            planned=answer.planned,
            target_power=answer.target_power,
            transfer_seeds=[option.num_transfer_seeds for option in answer.options],
            has_line=answer.is_known,
            is_paired=answer.is_paired,
            wanted=max((option.num_pretrain_seeds or option.least or 0 for option in answer.options), default=0),
        )
        for answer in answers
    ]
    try:
        Path(path).write_bytes(encode_png(draw_power(panels)))
    except OSError as error:
        raise UserError(f"the figure cannot be written to {path}: {error}; name another file") from error
