"""One arm of the planning benchmark, in a process of its own: ``python -m tests.benchmarks.planning_arm NUM_JOBS``."""

from __future__ import annotations

import json
import resource
import sys
import time

from orchestrator.planning.estimate.estimates import estimate
from orchestrator.planning.estimate.eta import critical_path, list_schedule
from orchestrator.planning.graph.build import build_plan
from orchestrator.services.artifact_lookup import lookup_artifacts
from orchestrator.services.fleets import StatedCluster, stated_fleet
from orchestrator.sweepfile import parse_sweep

_SPACES, _TRANSFERS = 8, 9
_TEXT = """\
version: 1
name: large
datasets:
  tree: {{builtin: synthetic-hierarchy, branching: [2, 2, 2, 2, 2, 2, 2, 2], num_train: 51200, num_val: 2560,
         image_size: 64, patch_size: 16, num_common_patches: 1, num_subclass_patches: 1}}
labels:
  levels: {{dataset: tree, hierarchy: [depth1, depth2, depth3, depth4, depth5, depth6, depth7, depth8]}}
pretrain:
  model: {{name: resnet50, image_size: 224}}
  labels: ["levels/*"]
  recipe: {{epochs: 90, batch_size: 512, lr: 0.1}}
  seeds: [{seeds}]
transfer:
{transfers}
resources: {{pretrain: {{gpus: 8, cpus: 64}}, transfer: {{gpus: 1, cpus: 8}}}}
"""
_TRANSFER = (
    "  - {{name: t{n}, target: levels/depth1, protocol: finetune, recipe: {{epochs: {n}, batch_size: 256, lr: 0.1}}}}"
)


def main() -> None:
    """Plan a sweep of about so many jobs on 1,000 GPUs; print seconds by step and the peak of memory."""
    num_jobs = int(sys.argv[1])
    seeds = ", ".join(str(seed) for seed in range(max(1, num_jobs // (_SPACES * (1 + _TRANSFERS)))))
    transfers = "\n".join(_TRANSFER.format(n=number) for number in range(1, _TRANSFERS + 1))
    text, marks = _TEXT.format(seeds=seeds, transfers=transfers), [("start", time.perf_counter())]

    def mark(name: str) -> None:
        marks.append((name, time.perf_counter()))

    sweep = parse_sweep(text, "sweep.yaml", {})
    mark("read")
    plan = build_plan(sweep, store_uri="file:///nowhere")
    mark("build")
    found = lookup_artifacts(plan)
    mark("look up")
    estimates = estimate(plan, skip=found.reused)
    mark("estimate")
    durations_s = estimates.durations_s()
    critical_path(plan, durations_s)
    makespan = list_schedule(plan, durations_s, stated_fleet(StatedCluster(gpus=1000)))
    mark("schedule")
    steps = {name: at - marks[number][1] for number, (name, at) in enumerate(marks[1:])}
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ratio = makespan.seconds / makespan.bound_s
    sys.stdout.write(json.dumps({"jobs": len(plan.jobs), "steps": steps, "peak_mib": peak_mib, "makespan": ratio}))


if __name__ == "__main__":
    main()
