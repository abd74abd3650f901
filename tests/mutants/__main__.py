"""Plants one bug after the other and looks whether the simulation finds it: ``python -m tests.mutants``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time

from tests.mutants.catalogue import MUTANTS
from tests.mutants.engine import Mutant, StaleMutantError, planted
from tests.simulation.scenario import make_scenario
from tests.simulation.world import World

SEEDS = range(200)


def find(mutant: Mutant, seeds: range = SEEDS) -> tuple[int, BaseException] | None:
    """The first seed that notices a bug, and how it does; ``None`` if none of them does."""
    with planted(mutant):
        return _first_error(seeds)


def _first_error(seeds: range) -> tuple[int, BaseException] | None:
    for seed in seeds:
        try:
            World(make_scenario(seed)).run()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a bug may show itself in any way
            return seed, error
    return None


def main(arguments: list[str] | None = None) -> int:
    """Try all; the exit code is 1 if one was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", action="append", default=[], help="mutants whose name contains this; repeatable")
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parsed = parser.parse_args(arguments)
    logging.getLogger("orchestrator").propagate = False
    if error := _first_error(range(parsed.seeds)):
        sys.stdout.write(f"the program as it is fails {error}: repair that first\n")
        return 1
    chosen = [m for m in MUTANTS if not parsed.only or any(part in m.name for part in parsed.only)]
    missed = []
    for mutant in chosen:
        begin_s = time.monotonic()
        try:
            found = find(mutant, range(parsed.seeds))
            told = "MISSED"
        except StaleMutantError as error:
            found, told = None, str(error)
        seconds = time.monotonic() - begin_s
        if found is None:
            missed.append(mutant.name)
        else:
            told = f"seed {found[0]}: {str(found[1]).strip().splitlines()[-1][:110]}"
        sys.stdout.write(f"{mutant.name:55} {seconds:5.1f} s  {told}\n")
        sys.stdout.flush()
    sys.stdout.write(f"caught {len(chosen) - len(missed)}/{len(chosen)}\n")
    return 1 if missed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.mutants", *sys.argv[1:]])  # noqa: S606
    sys.exit(main())
