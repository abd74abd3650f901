"""Heads over chunks of classes against heads that hold all logits: time of a step and memory, in turns."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import pytest
import torch
from torch import Tensor, nn

from workloads.train.large_head import CHUNK_CLASSES, LARGE_LOGITS, head_losses
from workloads.train.objective import SigmoidObjective, SoftmaxObjective

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
# Below, at and above the rule; ImageNet21k's classes with ViT-B's features, and a head of half a million.
CASES = [(64, 192, 21_843), (1024, 768, 21_843), (64, 256, 500_000)]
ROUNDS = 5


def _step(arm: str, features: Tensor, head: nn.Linear, targets: Tensor, loss: str) -> float:
    objective = (SoftmaxObjective if loss == "softmax" else SigmoidObjective)(head.out_features)
    for tensor in (features, *head.parameters()):
        tensor.grad = None  # its memory is used again
    started_s = time.process_time()
    if arm == "plain":
        losses = objective.losses(head(features), targets)
    else:
        losses, _ = head_losses(features, head, objective.linear_form(targets))
    losses.sum().backward()
    return time.process_time() - started_s


def _inputs(case: tuple[int, int, int]) -> tuple[Tensor, nn.Linear, Tensor]:
    batch_size, num_features, num_classes = case
    features = torch.randn(batch_size, num_features, requires_grad=True)
    return features, nn.Linear(num_features, num_classes), torch.randint(0, num_classes, (batch_size,))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("case", CASES, ids=["x".join(map(str, case)) for case in CASES])
def test_large_head_step_over_chunks_beside_all_logits(case: tuple[int, int, int], loss: str) -> None:
    torch.set_num_threads(1)
    inputs = _inputs(case)
    arms: dict[str, list[float]] = {"plain": [], "chunked": []}
    for turn in range(ROUNDS + 1):
        for arm in list(arms) if turn % 2 else list(reversed(arms)):
            seconds = _step(arm, *inputs, loss)
            arms[arm] += [seconds] if turn else []
    plain, chunked = (statistics.median(times) for times in arms.values())
    is_large = case[0] * case[2] >= LARGE_LOGITS
    memory = {arm: _peak_mib(arm, case, loss) for arm in arms}
    sys.stdout.write(
        f"\n{case[0]} x {case[2]} {loss}: chunks of {CHUNK_CLASSES} take {chunked / plain:.2f} of the time and "
        f"{memory['chunked']:.0f} instead of {memory['plain']:.0f} MiB; rule says {'chunks' if is_large else 'plain'}\n"
    )


def _peak_mib(arm: str, case: tuple[int, int, int], loss: str) -> float:
    """What a step takes at its peak beside weights, features and gradients, in a process of its own."""
    program = (
        "import json, pathlib, sys, torch\n"
        "from tests.benchmarks.test_large_head import _inputs, _step\n"
        "arm, case, loss = json.loads(sys.argv[1])\n"
        "torch.set_num_threads(1)\n"
        "inputs = _inputs(tuple(case))\n"
        "_step(arm, *_inputs((2, 8, 16)), loss)\n"
        "for parameter in inputs[1].parameters():\n"
        "    parameter.grad = torch.zeros_like(parameter)\n"
        "own = pathlib.Path('/proc/self')\n"
        "(own / 'clear_refs').write_text('5')  # the peak counts from here on\n"
        "status = lambda name: int((own / 'status').read_text().split(name)[1].split()[0])\n"
        "before = status('VmRSS:')\n"
        "_step(arm, *inputs, loss)\n"
        "print(status('VmHWM:') - before)\n"
    )
    command = [sys.executable, "-c", program, json.dumps([arm, case, loss])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) / 1024
