"""A source that the jobs of a sweep convert on a Ray cluster, one of them killed while it writes."""

import signal
from contextlib import suppress
from io import BytesIO
from os import kill
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orchestrator.backends.ray.settings import RunnerSettings
from orchestrator.controller.connect import ensure_controller
from orchestrator.core.errors import NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.core.units import MIB
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import read_record
from orchestrator.storage.layout import checkpoints_folder
from orchestrator.sweeps.client import load_snapshot, read_progress, submit
from tests.conversions import fill
from tests.integration.conversion_runs import ENTRY_POINT, VICTIM
from tests.shared_writing import Written, shard_digests
from workloads.convert.items import ConvertRequest, WriteRequest
from workloads.convert.listing import CONVERTERS
from workloads.convert.write import write_dataset

CLUSTER = "conversion"
NUM_JOBS, NUM_IMAGES = 3, {"train": 24, "val": 8}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def picture(seed: int) -> bytes:
    """A quarter of a MiB: four to a shard."""
    buffer = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (290, 290, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
    return buffer.getvalue()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    files = {f"{split}/c{n % 4}/i{n}.png": picture(n) for split, number in NUM_IMAGES.items() for n in range(number)}
    return fill(tmp_path / "photos", files)


def shards_of_the_command(source: Path, place: Path) -> tuple[str, dict[str, str]]:
    """What `orchestrator data shard` makes of a source: the digest of the whole, and of each shard."""
    request = WriteRequest(destination_uri=place.as_uri(), shard_bytes=MIB)
    dataset = write_dataset(CONVERTERS["imagefolder"](ConvertRequest(source=source)), request, lambda _: None)
    return dataset.digest, {shard.name: shard.sha256 for shards in dataset.splits.values() for shard in shards}


def submit_writing(written: Written, source: Path) -> Plan:
    """The jobs of a sweep that write and index its data set."""
    entry = {"convert": {"format": "imagefolder", "source": str(source), "shard_mib": 1}, "jobs": NUM_JOBS}
    jobs = tuple(job for job in written.plan(entry).jobs if job.kind in {JobKind.DATASET, JobKind.INDEX})
    plan = Plan(sweep="conversion", revision=0, store_uri=written.store.uri, jobs=jobs, baseline="")
    submit(written.store, plan, "", CLUSTER)
    return plan


def test_conversion_by_jobs_on_ray_has_the_shards_of_the_command_whoever_is_killed(source, tmp_path, namespace, until):
    written = Written(tmp_path / "lab")
    store = written.store
    digest, shards = shards_of_the_command(source, tmp_path / "by_hand")
    link = ensure_controller(store.uri, CLUSTER, namespace, runners=RunnerSettings(entry_point=ENTRY_POINT))
    plan = submit_writing(written, source)
    link.wake(plan.sweep)
    victim = next(job for job in plan.jobs if job.name.endswith(VICTIM))

    def pid() -> int:
        line = read_progress(store, plan.sweep).get(victim.name)
        return int(line.progress.metrics.get("pid", 0)) if line and line.progress.step else 0

    until(pid)
    kill(pid(), signal.SIGKILL)

    def has_ended() -> bool:
        with suppress(NotFoundError):
            return load_snapshot(store, plan.sweep).state.is_final
        return False

    until(has_ended, 120)
    found = load_snapshot(store, plan.sweep)
    assert found.state is SweepState.SUCCEEDED
    assert {name for name, view in found.jobs.items() if view.num_attempts > 1} == {victim.name}
    records = {job.name: read_record(store, job.key) for job in plan.jobs}
    assert shard_digests(records["dataset/mine"]) == shards
    assert records["index/mine"].summary["dataset_digest"] == digest
    # What the killed one had finished is not written again, and each shard lies in the store once.
    assert records[victim.name].metrics["num_adopted"] == 1
    assert records["dataset/mine"].metrics["num_adopted"] == len(shards)
    folder = checkpoints_folder(plan.by_name()["dataset/mine"].key)
    assert len(list(store.list_children(f"{folder}/"))) == len(shards) > NUM_JOBS
