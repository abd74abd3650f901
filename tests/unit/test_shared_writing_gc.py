"""Garbage collection leaves the shards alone that part jobs wrote, before and after they are committed."""

from functools import partial
from pathlib import Path

from orchestrator.planning.graph.plan import Plan
from orchestrator.retention.fsck import Depth, check_store
from orchestrator.retention.gc import Collector
from orchestrator.retention.gc_rules import Graces, Roots
from tests.shared_writing import TREE, Written, shard_digests

A_YEAR_S = 365 * 86_400.0


def collect(written: Written, plan: Plan) -> set[str]:
    """Names of all objects that stay when nothing is spared for its youth; each one's reason is in the tally."""
    roots = Roots(keys=frozenset(job.key for job in plan.jobs))
    later_s = max(stat.modified_at_s for stat in written.store.list_objects("")) + A_YEAR_S
    for days in (0, 100):
        now_s = later_s + days * 86_400
        Collector(
            written.store, lambda _: roots, graces=Graces(age_s=0, trash_s=0), now=partial(float, now_s)
        ).collect()
    return {stat.name for stat in written.store.list_objects("artifacts/")}


def test_collection_between_the_parts_and_the_whole_loses_no_shard(tmp_path: Path) -> None:
    written = Written(tmp_path)
    plan = written.plan({**TREE, "jobs": 2})
    jobs = plan.by_name()
    for name in ("dataset/mine/part0", "dataset/mine/part1"):
        written.run(jobs[name])
    collect(written, plan)
    record = written.run(jobs["dataset/mine"])
    assert record.metrics["num_adopted"] == len(shard_digests(record)) == 5


def test_collection_after_the_commit_leaves_what_the_record_names_and_no_copies(tmp_path: Path) -> None:
    written = Written(tmp_path)
    plan = written.plan({**TREE, "jobs": 2})
    jobs = plan.by_name()
    written.run(jobs["dataset/mine/part0"])
    names = [stat.name for stat in written.store.list_objects(f"artifacts/dataset/{jobs['dataset/mine'].key}/")]
    folder = next(name for name in names if name.endswith("/train-000000.tar")).rpartition("/")[0]
    for name in ("manifest.json", "train-000000.tar"):
        written.store.put(f"{folder}copy/{name}", written.store.get(f"{folder}/{name}"))
    written.run_all(plan)
    kept = collect(written, plan)
    assert not [name for name in kept if f"{folder}copy" in name]
    assert list(check_store(written.store, Depth.CONTENT)) == []
    assert written.open(plan).split("train").num_samples == TREE["num_train"]
