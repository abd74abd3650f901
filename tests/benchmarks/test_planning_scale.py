"""How long planning takes, and how much memory: 1,000 to 100,000 jobs, in a process each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SIZES = (1_000, 10_000, 100_000)
_SCRIPT = """
import json, resource, sys, time
from pathlib import Path
from orchestrator.planning.graph.build import build_plan
from orchestrator.sweepfile import parse_sweep
size = int(sys.argv[1])
spaces, seeds = (10, 10) if size <= 1_000 else (100, 10) if size >= 100_000 else (50, 10)
transfers = max(1, round((size / (spaces * seeds) - 1) / 3))
recipe = "{epochs: 2, batch_size: 64, lr: 1e-3}"
text = f'''version: 1
name: scale
datasets: {{tree: {{builtin: synthetic-hierarchy, branching: [2, 4], num_train: 4096, num_val: 256}}}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1]}}
  random: {{dataset: tree, random: {{num_classes: {list(range(2, 2 + spaces))}}}}}
pretrain:
  model: {{name: test_vit, image_size: 32}}
  labels: ["random/*"]
  recipe: {recipe}
  seeds: {list(range(seeds))}
transfer:
''' + "".join(
    f"- {{name: t{n}, target: levels/depth1, protocol: finetune, recipe: {recipe}, seeds: [0, 1, 2]}}\\n"
    for n in range(transfers)
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.process_time()
sweep = parse_sweep(text, "scale.yaml", {})
read_s = time.process_time() - start
plan = build_plan(sweep, store_uri="file:///store")
plan_s = time.process_time() - start - read_s
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sizes = {"mib": peak / 1024, "grown_mib": (peak - before) / 1024}
print(json.dumps({"jobs": len(plan.jobs), "read_s": read_s, "plan_s": plan_s, **sizes}))
"""


def _measure(size: int) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, str(size)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.bench
def test_planning_grows_linearly() -> None:
    sys.stdout.write("\n    jobs  read s  plan s  us/job  peak MiB  KiB/job\n")
    for size in SIZES:
        found = min((_measure(size) for _ in range(3 if size <= 10_000 else 1)), key=lambda one: one["plan_s"])
        jobs = found["jobs"]
        per_job = f"{found['plan_s'] / jobs * 1e6:7.1f} {found['mib']:9.0f} {found['grown_mib'] * 1024 / jobs:8.2f}"
        sys.stdout.write(f"{jobs:8.0f} {found['read_s']:7.2f} {found['plan_s']:7.2f} {per_job}\n")
        assert jobs >= size * 0.9
