"""Runs seeds of the simulation: ``python -m tests.simulation --seeds 0-49``; one again: ``--seed 17 --trace``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import time
import traceback

from orchestrator.storage import request_pool
from tests.simulation.audit import Violation
from tests.simulation.families import scenario_of
from tests.simulation.recovery import PART, run_with_recoveries
from tests.simulation.world import World


def run_seed(seed: int, *, num_jobs: int = 0, part: float = PART, trace: bool = False) -> World:
    """Run one seed. Raises ``Violation``."""
    try:
        return run_with_recoveries(scenario_of(seed, num_jobs=num_jobs), part=part, verbose=trace)
    except BaseException as error:
        error.add_note(f"python -m tests.simulation --seed {seed} --trace")
        raise


def main(arguments: list[str] | None = None) -> int:
    """Run the seeds asked for; the exit code is 1 if one found something."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    parser.add_argument("--seeds", default="0-49", help="first-last, or several: 0-5,9,12-14")
    parser.add_argument("--seed", type=int, help="one seed alone")
    parser.add_argument("--jobs", type=int, default=0, help="this many jobs instead of up to 40")
    parser.add_argument("--every-append", action="store_true", help="kill everything after each append, not some")
    parser.add_argument("--side-by-side", action="store_true", help="requests as to a distant store; no exact replays")
    parser.add_argument("--trace", action="store_true", help="tell everything that happens")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parsed = parser.parse_args(arguments)
    seeds = [parsed.seed] if parsed.seed is not None else _numbers(parsed.seeds)
    gc.set_threshold(50_000)  # worlds are small, and gone with their seed
    logging.getLogger("orchestrator").propagate = False
    if parsed.side_by_side:
        request_pool._LOCAL = ()  # type: ignore[assignment]
    failures, begin_s = [], time.monotonic()
    events = 0
    for seed in seeds:
        try:
            part = 1.0 if parsed.every_append else PART
            world = run_seed(seed, num_jobs=parsed.jobs, part=part, trace=parsed.trace)
            events += world.audit.num_events
        except (Violation, Exception) as error:  # noqa: BLE001
            failures.append(seed)
            sys.stdout.write(f"seed {seed}: {type(error).__name__}: {error}\n")
            if parsed.seed is not None or not isinstance(error, Violation):
                traceback.print_exc()
            if parsed.stop:
                break
    seconds = time.monotonic() - begin_s
    told = f"{len(failures)} failed {failures[:20]}"
    sys.stdout.write(f"{len(seeds)} seeds, {events} events, {told}, {seconds:.1f} s\n")
    return 1 if failures else 0


def _numbers(text: str) -> list[int]:
    """Of ``0-5,9``: six and one."""
    parts = [part.partition("-") for part in text.split(",")]
    return [number for first, _, last in parts for number in range(int(first), int(last or first) + 1)]


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of text would differ from run to run, and with it the order of writes and faults.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])  # noqa: S606
    sys.exit(main())
