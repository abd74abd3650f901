"""A training step of this checkout beside that of another one: CPU time and memory, in turns.

    python benchmarks/bench_two_checkouts.py ../before [--rounds 15]

Both run whole `pretrain` jobs through ``workloads.run:execute``, each in a process of its own with its own code. A
round runs a short and a long training in each process, in turns; what is longer is steps alone, so the start of a job,
its validation and its files do not count. Printed are the medians, the ratio of each round's two numbers with an
interval for its median, and the peak of each process' memory. Nothing else should use the machine; CPU time is what
counts where something does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
ROUNDS = 15
BATCH_SIZE, SHORT_STEPS, LONG_STEPS = 32, 8, 40
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"name": "test_vit", "image_size": 32, "kwargs": {}},
    "resnet": {"name": "test_resnet", "image_size": 32, "kwargs": {}},
}
DATASET = {"builtin": "synthetic-hierarchy", "version": 1, "branching": [2, 4], "image_size": 32, "patch_size": 4}
NUM_TRAIN = BATCH_SIZE * SHORT_STEPS
RECIPE = {
    "batch_size": BATCH_SIZE,
    "optimizer": "sgd",
    "lr": 0.05,
    "momentum": 0.9,
    "nesterov": False,
    "betas": [0.9, 0.999],
    "weight_decay": 1e-4,
    "schedule": "cosine",
    "warmup_epochs": 0.0,
    "label_smoothing": 0.1,
    "grad_clip": 1.0,
    "augment": "random_resized_crop_flip",
    "norm_group": None,
    "precision": "fp32",
    "shuffle_block_shards": 4,
    "mean": [0.5, 0.5, 0.5],
    "std": [0.25, 0.25, 0.25],
    "eval_every_epochs": 1000,
}


def say(line: str) -> None:
    """Write a line to stdout, at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def answer(folder: Path) -> None:
    """One arm: reads lines ``[model, steps, number]``, and writes the CPU seconds of a training of that length."""
    import time

    try:
        from orchestrator.core.contract import ExecutionContext, JobKind, JobRequest  # type: ignore[attr-defined]
        from orchestrator.core.ids import make_key
    except ModuleNotFoundError:  # commits before there was a core
        from orchestrator.contract import ExecutionContext, JobKind, JobRequest  # type: ignore[import-not-found,no-redef]
        from orchestrator.ids import make_key  # type: ignore[import-not-found,no-redef]
    versions: dict[JobKind, int | None] = {}
    with suppress(ModuleNotFoundError):  # commits before there was this module run jobs of any version
        from orchestrator.core.job_kinds import KINDS

        versions = {kind: row.code_version for kind, row in KINDS.items()}
    from orchestrator.storage.local import LocalStore
    from workloads.run import execute

    store = LocalStore(folder / "store")
    context = ExecutionContext(store=store, scratch=folder / "scratch", cache=folder / "cache")
    context.scratch.mkdir(parents=True)

    def run(kind: JobKind, parameters: dict[str, Any], inputs: dict[str, str]) -> str:
        identity = {
            "kind": kind.value,
            "code_version": versions.get(kind, 1),
            "parameters": parameters,
            "inputs": inputs,
        }
        key = make_key(kind.value, "", identity)
        execute(
            JobRequest(
                attempt_id=f"{key}.1",
                attempt_number=1,
                sweep="bench",
                job=f"{kind.value}/bench",
                key=key,
                kind=kind,
                identity=identity,
                store_uri=store.uri,
            ),
            context,
        )
        return key

    dataset = run(JobKind.DATASET, {**DATASET, "num_train": NUM_TRAIN, "num_val": 64}, {})
    index = run(JobKind.INDEX, {}, {"dataset": dataset})
    labels = run(JobKind.LABELS, {"space": {"hierarchy": "depth2"}}, {"index": index})
    say("ready")
    for line in sys.stdin:
        model, steps, number = json.loads(line)
        recipe = {**RECIPE, "epochs": steps / SHORT_STEPS}
        parameters = {"model": MODELS[model], "recipe": recipe, "seed": number}
        started_s = time.process_time()
        run(JobKind.PRETRAIN, parameters, {"index": index, "labels": labels})
        say(str(time.process_time() - started_s))


class Arm:
    """A process that trains with the code of one checkout."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(Path(__file__).resolve()), "--answer", str(folder)]
        self._process = subprocess.Popen(
            command, cwd=checkout, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._read()
        self._number = 0

    def step_ms(self, model: str) -> float:
        """CPU milliseconds of a step, of the difference of two trainings."""
        short_s, long_s = (self._train(model, steps) for steps in (SHORT_STEPS, LONG_STEPS))
        return 1000 * (long_s - short_s) / (LONG_STEPS - SHORT_STEPS)

    def peak_mib(self) -> float:
        """The most memory that was resident so far, MiB; the process runs on."""
        status = Path(f"/proc/{self._process.pid}/status").read_text(encoding="utf-8")
        return float(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _train(self, model: str, steps: int) -> float:
        self._number += 1
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([model, steps, self._number]) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("an arm has died; what it said stands above")
        return line.strip()


def interval_of_median(values: Sequence[float]) -> tuple[float, float, float]:
    """An interval of order statistics for the median of any distribution, and its coverage, 95 % or more.

    The largest k for which the k-th values from below and from above enclose the median with that probability: below
    the k-th value are fewer than k of n with the probability of a binomial tail (Conover, Practical Nonparametric
    Statistics, section 3.2).
    """
    from scipy.stats import binom

    ordered, count = sorted(values), len(values)
    k = max((k for k in range(1, count // 2 + 1) if 1 - 2 * binom.cdf(k - 1, count, 0.5) >= 0.95), default=1)
    return ordered[k - 1], ordered[count - k], float(1 - 2 * binom.cdf(k - 1, count, 0.5))


def compare(other: Path, rounds: int) -> None:
    """Run both in turns and print."""
    with tempfile.TemporaryDirectory(prefix="bench-checkouts-") as folder:
        arms = {"before": Arm(other, Path(folder) / "before"), "after": Arm(HERE, Path(folder) / "after")}
        try:
            for model in MODELS:
                for arm in arms.values():
                    arm.step_ms(model)  # the first training of a process pays for imports and kernels
                times: dict[str, list[float]] = {name: [] for name in arms}
                for number in range(rounds):
                    for name in sorted(arms, reverse=bool(number % 2)):
                        times[name].append(arms[name].step_ms(model))
                ratios = [after / before for after, before in zip(times["after"], times["before"], strict=True)]
                low, high, coverage = interval_of_median(ratios)
                middle = statistics.median(ratios)
                medians = {name: statistics.median(values) for name, values in times.items()}
                say(
                    f"{model}: a step takes {medians['before']:.2f} ms of CPU before, {medians['after']:.2f} after; "
                    f"median ratio {middle:.3f} [{low:.3f}, {high:.3f}] ({coverage:.1%}, {rounds} rounds)"
                )
            peaks = {name: arm.peak_mib() for name, arm in arms.items()}
            ratio = peaks["after"] / peaks["before"]
            say(f"peak memory {peaks['before']:.0f} MiB before, {peaks['after']:.0f} after: {ratio:.3f}")
        finally:
            for arm in arms.values():
                arm.close()


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("other", type=Path, help="folder of the other checkout (git worktree add ../before COMMIT)")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer(given.other)
    else:
        compare(given.other.resolve(), given.rounds)


if __name__ == "__main__":
    main()
