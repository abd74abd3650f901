"""What sweeps used lately: past use decides who goes first once every sweep has its share. Pure."""

from __future__ import annotations

from orchestrator.state.amounts import NOTHING, Amount

HALF_LIFE_S = 24 * 3600.0
"""Use counts half as much after a day: long enough for gangs that run half a day, as Slurm's default of a week."""
_BUCKET_S = 3600.0
_MAX_BUCKETS = 240


class History:
    """Amount-seconds of ended attempts by the hour of their end. In whole numbers: see ``Measured``."""

    __slots__ = ("_gpu_ms", "_hours")

    def __init__(self) -> None:
        self._hours: dict[int, Amount] = {}
        self._gpu_ms = 0

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all time."""
        return self._gpu_ms / 10_000 / 3.6e6

    def add(self, amount: Amount, ran_s: float, ended_at_s: float, count: int) -> None:
        """Add what a job used (``count`` 1), or take it out again (-1)."""
        hour, ms = int(ended_at_s // _BUCKET_S), count * int(ran_s * 1000)
        old = self._hours.get(hour, NOTHING)
        new = (old[0] + amount[0] * ms, old[1] + amount[1] * ms, old[2] + amount[2] * ms)
        if new == NOTHING:
            self._hours.pop(hour, None)
        else:
            self._hours[hour] = new
        self._gpu_ms += amount[1] * ms

    def decayed_s(self, now: float) -> tuple[float, float, float]:
        """Amount-seconds, halved for every half-life since."""
        cpus = gpus = memory = 0.0
        this = int(now // _BUCKET_S)
        for hour in sorted(self._hours):
            if this - hour < _MAX_BUCKETS:
                weight = 0.5 ** (max(0, this - hour) * _BUCKET_S / HALF_LIFE_S) / 1000.0
                used = self._hours[hour]
                cpus, gpus, memory = cpus + used[0] * weight, gpus + used[1] * weight, memory + used[2] * weight
        return cpus, gpus, memory
