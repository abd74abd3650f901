"""Whether the expectations of a shipped simulation hold with other seeds: ``seed_blocks.py LOG SWEEP...``.

Runs the simulations of a sweep with blocks of seeds that the sweep does not have, one after another on one thread and
without a cluster, and judges every block by itself with the code of the report. Cells that no expectation is about are
left out. LOG is a file of JSON lines with all rows: a run that was ended goes on from it, and ``--blocks 0`` prints
what is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.report.statistics.expectations import Judgement, SimulationRuns, judge
from orchestrator.sweepfile import load_sweep
from orchestrator.sweepfile.values import SimulatedCell, Simulation, cell_name
from workloads.jobs.theory import SavedObjects
from workloads.runtime.device import pick_device
from workloads.runtime.fingerprint import deterministic_numerics
from workloads.theory.loading import Simulation as Code


def main(arguments: Sequence[str]) -> None:
    """Run, and print a line for each expectation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("sweeps", nargs="+")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--whole", action="store_true", help="blocks of as many seeds as the sweep has, not a job's")
    parser.add_argument("--until", type=float, default=float("inf"), help="seconds since 1970 at which to end")
    options = parser.parse_args(arguments)
    done = read_log(options.log)
    simulations = [(name, one) for name in options.sweeps for one in load_sweep(name)[0].simulations]
    with deterministic_numerics(1):
        for block in range(1, options.blocks + 1):
            for name, simulation in simulations:
                seeds = seeds_of(simulation, block, whole=options.whole)
                for cell in judged_cells(simulation):
                    at = (name, simulation.name, len(seeds), block, cell_name(cell.factors))
                    if at not in done and time.time() < options.until:
                        done[at] = run_cell(simulation, cell.parameters, seeds)
                        with options.log.open("a") as file:
                            file.write(f"{json.dumps([at, done[at]])}\n")
    for name, simulation in simulations:
        num = len(seeds_of(simulation, 1, whole=options.whole))
        blocks = {at[3]: at for at in done if at[:3] == (name, simulation.name, num)}
        for line in summary(name, simulation, num, done, sorted(blocks)):
            sys.stdout.write(f"{line}\n")


def seeds_of(simulation: Simulation, block: int, *, whole: bool) -> range:
    """Seeds beyond those of the sweep. A job with one seed has no error bar, so the sweep's number it is then."""
    size = simulation.num_seeds if whole or simulation.per_job == 1 else min(simulation.per_job, simulation.num_seeds)
    first = simulation.first_seed + simulation.num_seeds + (block - 1) * size
    return range(first, first + size)


def judged_cells(simulation: Simulation) -> list[SimulatedCell]:
    """The cells that an expectation is about."""
    return [cell for cell in simulation.cells if any(claim.covers(cell.factors) for claim in simulation.expectations)]


def run_cell(simulation: Simulation, parameters: Any, seeds: Sequence[int]) -> dict[str, Any]:
    """Rows and CPU seconds."""
    code, began_s = Code.load(simulation.run), time.process_time()
    context = SavedObjects(device=pick_device())
    rows = []
    for seed, row in zip(seeds, code.function(code.checked(parameters), seeds, context), strict=True):
        context.take(seed)
        rows.append({name: float(value) for name, value in row.items()})
    return {"rows": rows, "cpu_s": time.process_time() - began_s}


def summary(name: str, simulation: Simulation, num: int, done: dict[Any, Any], blocks: Sequence[int]) -> Iterator[str]:
    """For each expectation in how many blocks it holds, and the numbers of the others."""
    cells = judged_cells(simulation)
    judged: list[Counter[Judgement]] = [Counter() for _ in simulation.expectations]
    whys: list[list[str]] = [[] for _ in simulation.expectations]
    whole, cpu_s = 0, 0.0
    for block in blocks:
        places = [(name, simulation.name, num, block, cell_name(cell.factors)) for cell in cells]
        if any(at not in done for at in places):
            continue
        found = [done[at] for at in places]
        whole, cpu_s = whole + 1, cpu_s + sum(one["cpu_s"] for one in found)
        metrics = sorted({metric for one in found for row in one["rows"] for metric in row})
        values = {
            metric: np.array([[row.get(metric, np.nan) for row in one["rows"]] for one in found]).T
            for metric in metrics
        }
        runs = SimulationRuns(cells=[cell.factors for cell in cells], values=values)
        for position, claim in enumerate(simulation.expectations):
            result = judge(claim, runs, simulation.metric)
            judged[position][result.judgement] += 1
            if result.judgement is not Judgement.HOLDS:
                numbers = [(one.name, one.value, one.low, one.high) for one in result.numbers]
                whys[position].append(f"    block {block}: {result.judgement.value} {numbers}")
    sweep_s = cpu_s / max(1, whole * num) * simulation.num_seeds
    yield f"{name} {simulation.name}: {whole} blocks of {num}; {sweep_s:.1f} CPU s for {simulation.num_seeds} seeds"
    for claim, count, why in zip(simulation.expectations, judged, whys, strict=True):
        yield f"  {claim.rule} {claim.metric} {dict(claim.where)}: holds in {count[Judgement.HOLDS]} of {whole}"
        yield from why


def read_log(log: Path) -> dict[Any, Any]:
    """By sweep, simulation, seeds of a block, block and cell."""
    lines = log.read_text().splitlines() if log.is_file() else []
    return {tuple(at): found for at, found in map(json.loads, lines)}


if __name__ == "__main__":
    main(sys.argv[1:])
