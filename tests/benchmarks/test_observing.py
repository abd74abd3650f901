"""Searching the logs of 1,000 attempts, and a look of `top` at a sweep of 10,000 jobs."""

from __future__ import annotations

import asyncio
import re
import statistics
import sys
import time
from pathlib import Path

import pytest

from orchestrator.cli.commands.top import TopApp
from orchestrator.storage.layout import log_name
from orchestrator.storage.local import LocalStore
from orchestrator.storage.logs import (
    LogContext,
    LogQuery,
    LogRecord,
    encode,
    find_logs,
    finish_log,
    format_time,
    search_logs,
)
from tests.live_sweep import SWEEP, write_live_sweep

NUM_ATTEMPTS, NUM_LINES = 1_000, 500
KEY = "finetune-x-0123456789abcdef"


@pytest.mark.bench
def test_search_of_the_logs_of_a_thousand_attempts(tmp_path: Path) -> None:
    store, num_bytes = LocalStore(tmp_path), 0
    for number in range(NUM_ATTEMPTS):
        job = f"finetune/near/levels/depth{number % 4}/seed{number}"
        context = LogContext(sweep="s", job=job, attempt=1)
        lines = (
            LogRecord(
                context=context,
                time=format_time(1.7e9 + number + line / 1000),
                level="error" if line == 499 and number % 100 == 0 else "info",
                source="stdout",
                message="ValueError: no such model"
                if line == 499 and number % 100 == 0
                else f"step {line} loss 2.{line}",
            )
            for line in range(NUM_LINES)
        )
        content = "".join(map(encode, lines)).encode()
        num_bytes += len(content)
        finish_log(store, log_name("s", job, 1, key=KEY), content)
    queries = {
        "a word": LogQuery(pattern=re.compile("ValueError")),
        "an expression": LogQuery(pattern=re.compile(r"(Value|Key)Error: \w+")),
        "errors": LogQuery(level="error"),
        "the last seconds": LogQuery(since=format_time(1.7e9 + NUM_ATTEMPTS - 5)),
    }
    told = []
    for name, query in queries.items():
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        found = list(search_logs(store, find_logs(store, "s"), query))
        took = f"{time.perf_counter() - began_s:.2f} s ({time.process_time() - began_cpu_s:.2f} s CPU)"
        told.append(f"{name}: {len(found)} records in {took}")
        assert found
    sys.stdout.write(f"\n{NUM_ATTEMPTS} logs, {num_bytes / 1e6:.0f} MB: {'; '.join(told)}\n")


@pytest.mark.bench
def test_look_of_top_at_a_large_sweep(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    plan = write_live_sweep(store, num_transfers=10_000, now=time.time(), is_served=True)
    app = TopApp(store, SWEEP, every_s=3600.0)
    reads: list[float] = []
    shows: list[float] = []
    cpu: list[float] = []

    async def run() -> None:
        async with app.run_test(size=(160, 50)) as pilot:
            while not app.shown.jobs:
                await pilot.pause(0.05)
            for number in range(11):
                began_s = time.perf_counter()
                frame = app._reader.look(SWEEP, search="" if number % 2 else "finetune")
                reads.append(time.perf_counter() - began_s)
                began_s, began_cpu_s = time.perf_counter(), time.thread_time()
                app.show_frame(frame)
                await pilot.pause()
                shows.append(time.perf_counter() - began_s)
                cpu.append(time.thread_time() - began_cpu_s)

    asyncio.run(run())
    sys.stdout.write(
        f"\ntop of {len(plan.jobs)} jobs: median look {1e3 * statistics.median(reads):.0f} ms, "
        f"median show {1e3 * statistics.median(shows):.0f} ms ({1e3 * statistics.median(cpu):.0f} ms CPU; all rows "
        f"anew), longest {1e3 * max(shows):.0f} ms\n"
    )
