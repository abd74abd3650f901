"""A spot node of a real Ray cluster hears that it is taken back: its attempt goes on elsewhere, the node ends."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from orchestrator.core.contract import Resources, Spot
from orchestrator.core.errors import NotFoundError
from orchestrator.planning.graph.plan import Plan
from orchestrator.state.transitions import JobState
from orchestrator.storage.local import LocalStore
from orchestrator.sweeps.client import load_snapshot, submit
from tests.chaos.chain_jobs import chain_job, read_traces
from tests.chaos.ray_nodes import ROOT, RayNodes, new_home
from tests.chaos.verdict import journal_events, judge
from tests.clusters.metadata_server import serve_metadata
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
CLUSTER, SWEEP, GATE = "spot", "spot", "gate"
SPOT_LABELS = '{"ray.io/market-type": "spot"}'
WITHIN_S = 90.0
until = partial(wait_until, deadline_s=WITHIN_S)


class SpotNodes(RayNodes):
    """All nodes but the head are spot nodes, and say so as the launcher configurations make them."""

    def _member_command(self) -> list[str]:
        return ["env", f"RAY_OVERRIDE_LABELS={SPOT_LABELS}", *super()._member_command()]


@pytest.fixture(scope="module")
def nodes():
    home = new_home()
    made = SpotNodes(home, {}, num_nodes=2, dashboard=False)
    try:
        made.start()
        yield made
    finally:
        made.end()
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def spot_store(tmp_path):
    return LocalStore(tmp_path / "store")


@pytest.fixture
def long_job():
    job = chain_job("backbone", num_steps=2000, step_s=0.02, every=10**6, gate=GATE)
    return replace(job, resources=Resources(cpus=1.0, spot=Spot.REQUIRE))


def serve(nodes, store):
    command = [sys.executable, "-m", "tests.chaos.enlist", "serve", store.uri, CLUSTER, "spot", ""]
    environment = {**nodes.environment, "RAY_ADDRESS": nodes.address}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def watch(nodes, metadata, node_id):
    environment = {**nodes.environment, "ORCHESTRATOR_METADATA_ENDPOINT": metadata.endpoint}
    command = [sys.executable, "-m", "orchestrator.cluster.watch", "--provider", "aws", "--every", "0.1"]
    command += ["--address", nodes.address, "--node", node_id]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def running_attempt(store):
    try:
        snapshot = load_snapshot(store, SWEEP)
    except NotFoundError:
        return None
    return next((view.attempt for view in snapshot.jobs.values() if view.attempt), None)


def traces_of(store, job):
    return sorted(read_traces(store, job.key), key=lambda trace: trace.attempt_id)


def test_node_of_a_machine_with_several_must_be_named(nodes):
    command = [sys.executable, "-m", "orchestrator.cluster.leave", "--address", nodes.address, "--node", ""]
    done = subprocess.run(command, cwd=ROOT, env=nodes.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "name it with --node" in done.stderr


def test_attempt_of_a_node_with_a_notice_goes_on_elsewhere_from_its_checkpoint(nodes, spot_store, long_job):
    plan = Plan(sweep=SWEEP, revision=0, store_uri=spot_store.uri, jobs=(long_job,), baseline="")
    serve(nodes, spot_store)
    submit(spot_store, plan, "", CLUSTER)
    until(lambda: traces_of(spot_store, long_job), "the job works")
    (first_node,) = running_attempt(spot_store).nodes
    with serve_metadata() as metadata:
        watcher = watch(nodes, metadata, first_node.rpartition("/")[2])
        try:
            until(lambda: metadata.num_requests >= 2, "the watcher asks")
            assert watcher.poll() is None
            metadata.interrupt(60.0)
            status = watcher.wait(WITHIN_S)
        finally:
            watcher.kill()
    assert status == 0, watcher.stderr.read()
    second = until(lambda: (found := running_attempt(spot_store)) and found.number == 2 and found, "the second attempt")
    assert second.nodes != (first_node,)
    spot_store.put(GATE, b"")
    until(lambda: load_snapshot(spot_store, SWEEP).state.is_final, "the sweep ends")
    judge(spot_store, SWEEP, [long_job])
    told = [event for event in journal_events(spot_store, SWEEP) if event["type"] == "attempt_preempting"]
    assert [first_node in event["reason"] for event in told] == [True]
    view = load_snapshot(spot_store, SWEEP).jobs[long_job.name]
    assert (view.state, {str(kind): count for kind, count in view.failures.items()}) == (
        JobState.SUCCEEDED,
        {"preempted": 1},
    )
    first, last = [trace for trace in traces_of(spot_store, long_job) if trace.end != "started"]
    assert first.end == "preempted"
    assert last.first_step == first.last_step > 0
