"""Plants one bug after the other and looks whether the simulation finds it: ``python -m tests.mutants``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context

from tests.mutants.catalogue import MUTANTS
from tests.mutants.engine import Mutant, StaleMutantError, planted
from tests.simulation.families import scenario_of
from tests.simulation.world import World

NUM_SEEDS = 350
"""Seeds that are tried after a bug's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What became of one mutant."""

    name: str
    is_caught: bool
    told: str
    seconds: float
    num_tried: int = 0


def hunt(mutant: Mutant, num_seeds: int = NUM_SEEDS) -> Finding:
    """Try the seed that found the bug before, then all others, until one finds it."""
    begin_s = time.monotonic()
    try:
        with planted(mutant):
            found = _first_error([mutant.seed, *(seed for seed in range(num_seeds) if seed != mutant.seed)])
    except StaleMutantError as error:
        return Finding(name=mutant.name, is_caught=False, told=str(error), seconds=time.monotonic() - begin_s)
    seconds = time.monotonic() - begin_s
    if found is None:
        return Finding(name=mutant.name, is_caught=False, told="MISSED", seconds=seconds)
    number, seed, told = found
    if fault := _without_bugs(seed):
        told = f"seed {seed} fails without the bug, too; repair that first: {fault}"
        return Finding(name=mutant.name, is_caught=False, told=told, seconds=seconds)
    return Finding(name=mutant.name, is_caught=True, told=f"seed {seed}: {told}", seconds=seconds, num_tried=number + 1)


@cache
def _without_bugs(seed: int) -> str:
    """What this seed finds in the program as it is."""
    found = _first_error([seed])
    return "" if found is None else found[2]


def _first_error(seeds: Sequence[int]) -> tuple[int, int, str] | None:
    """Which of the seeds notices something first, and what."""
    for number, seed in enumerate(seeds):
        try:
            World(scenario_of(seed)).run()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a bug may show itself in any way
            text = str(error).strip() or repr(error)
            return number, seed, text.splitlines()[-1][:110]
    return None


def main(arguments: list[str] | None = None) -> int:
    """Try all; the exit code is 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", action="append", default=[], help="mutants whose name contains this; repeatable")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="after its own seed, try those below this number")
    parser.add_argument("--processes", type=int, default=2)
    parsed = parser.parse_args(arguments)
    logging.getLogger("orchestrator").propagate = False
    chosen = [m for m in MUTANTS if not parsed.only or any(part in m.name for part in parsed.only)]
    missed = 0
    with ProcessPoolExecutor(parsed.processes, mp_context=get_context("fork")) as pool:
        for finding in pool.map(hunt, chosen, [parsed.seeds] * len(chosen)):
            missed += not finding.is_caught
            tried = f"{finding.num_tried:3d} tried" if finding.num_tried else ""
            sys.stdout.write(f"{finding.name:55} {finding.seconds:5.1f} s  {tried:9}  {finding.told}\n")
            sys.stdout.flush()
    sys.stdout.write(f"caught {len(chosen) - missed}/{len(chosen)}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]])  # noqa: S606
    sys.exit(main())
