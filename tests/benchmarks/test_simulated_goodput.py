"""How well a simulated cluster of 1,000 GPUs is used: goodput under losses, and what simulating costs."""

from __future__ import annotations

import resource
import time

import pytest

from orchestrator.backends.simulated import LLAMA3_GPU_MTBF_H, ClusterSpec, Hazards
from orchestrator.simulation import Assumptions, Forecast, forecast
from orchestrator.state.transitions import SweepState
from tests.simulation.sweeps import training_sweep

pytestmark = [pytest.mark.bench, pytest.mark.timeout(0)]

NODE_MTBF_S = 19.5 * 3600.0
"""Of a spot node that is lost with 5 % in an hour."""


def run(hazards: Hazards, *, spot: bool) -> tuple[Forecast, float]:
    plan, durations_s = training_sweep(num_pretrains=60, num_transfers=50)
    # Gangs of 8 to 32 GPUs lie on one to four nodes.
    assumptions = Assumptions(mtbf_s=NODE_MTBF_S / 4 if spot else 0.0)
    begin_s = time.process_time()
    found = forecast(plan, ClusterSpec.uniform(1000, spot=spot), durations_s, hazards=hazards, assumptions=assumptions)
    return found, time.process_time() - begin_s


@pytest.mark.parametrize(
    ("name", "hazards", "asked"),
    [
        ("1 fault per 50,677 GPU-hours", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H), 0.99),
        ("and spot, 2 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.02), None),
        ("and spot, 5 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.05), 0.98),
        ("and spot, 20 % per node-hour", Hazards(gpu_mtbf_h=LLAMA3_GPU_MTBF_H, spot_loss_per_h=0.2), None),
    ],
)
def test_goodput_of_a_thousand_gpus(name: str, hazards: Hazards, asked: float | None) -> None:
    found, cpu_s = run(hazards, spot=hazards.spot_loss_per_h > 0.0)
    assert found.state is SweepState.SUCCEEDED
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(  # noqa: T201
        f"\n{name}: goodput {found.goodput:.4f} (asked {asked}), utilisation {found.utilisation:.3f}, makespan "
        f"{found.makespan_s / 3600:.2f} h of at least {found.lower_bound_s / 3600:.2f} h, {found.num_attempts} "
        f"attempts of {found.num_jobs} jobs, {found.num_rounds} rounds, {cpu_s:.1f} s of CPU, peak {peak_mib:.0f} MiB"
    )
