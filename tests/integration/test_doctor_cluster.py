"""``orchestrator doctor`` on a running cluster: every node asked, nothing left behind."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from orchestrator.core.errors import BadDataError, NotFoundError
from orchestrator.doctor.sweep_inputs import read_beginnings, sample_shards
from orchestrator.sweepfile.values import Dataset, ResolvedSweep
from tests.commands import run_command


@pytest.fixture
def address(ray_cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    found = ray_cluster.get_runtime_context().gcs_address
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", found)
    monkeypatch.setenv("ORCHESTRATOR_NAMESPACE", namespace)
    monkeypatch.setenv("ORCHESTRATOR_STORE", (tmp_path / "store").as_uri())
    return str(found)


def by_name(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in document["checks"]}


@pytest.mark.slow
def test_doctor_asks_every_node_of_a_cluster(address: str, capsys, tmp_path: Path, ray_cluster) -> None:
    result = run_command(capsys, "doctor", "-o", "json")
    checks = by_name(result.document)
    failed = {name: check["detail"] for name, check in checks.items() if check["verdict"] == "failed"}
    assert failed == {}
    assert {
        "cluster",
        "versions",
        "code",
        "GPUs",
        "cache disk",
        "shared memory",
        "token",
        "clocks",
        "controller",
        "store from nodes",
        "tracking from the head",
        "all-reduce gloo",
    } <= checks.keys()
    assert checks["versions"]["node"]
    assert "2 ranks on 1 node" in checks["all-reduce gloo"]["detail"]
    assert checks["token"]["verdict"] == "ok"
    assert result.code == 0
    assert not list((tmp_path / "store").glob("probes/*"))
    actors = ray_cluster.util.list_named_actors(all_namespaces=True)
    assert not [actor for actor in actors if "octor" in actor["name"]]


def test_doctor_without_a_cluster_skips_it_and_says_how_to_start_one(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    result = run_command(capsys, "doctor", "--store", (tmp_path / "store").as_uri(), "-o", "yaml")
    assert result.code == 0
    assert "orchestrator up" in result.out


def test_doctor_cluster_that_is_away_fails_soon_with_a_remedy(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    result = run_command(capsys, "doctor", "--store", (tmp_path / "store").as_uri(), "-o", "json")
    assert result.code == 1
    cluster = by_name(json.loads(result.out))["cluster"]
    assert "nobody answers at 127.0.0.1:9" in cluster["detail"]
    assert cluster["remedy"]


# ------------------------------------------------------------------------------------------------------------ shards
def write_tar(path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        entry = tarfile.TarInfo("0.cls")
        entry.size = 1
        tar.addfile(entry, io.BytesIO(b"1"))


def sweep_of(folder: Path) -> ResolvedSweep:
    location = {"splits": {"train": [f"{folder.as_uri()}/a-{{0..4}}.tar"], "val": [f"{folder.as_uri()}/v.tar"]}}
    dataset = Dataset(name="d", readable="d", parameters={}, levels={}, num_classes=2, num_train=5, location=location)
    return cast("ResolvedSweep", SimpleNamespace(datasets={"d": dataset}))


def test_some_shards_of_every_split_are_read(tmp_path: Path) -> None:
    for name in (*(f"a-{number}" for number in range(5)), "v"):
        write_tar(tmp_path / f"{name}.tar")
    samples = sample_shards(sweep_of(tmp_path))
    assert [name for _, name in samples] == ["a-0.tar", "a-2.tar", "a-4.tar", "v.tar"]
    assert read_beginnings(samples) == "4 shards read"
    (tmp_path / "a-2.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(BadDataError, match=r"a-2\.tar does not begin as a tar"):
        read_beginnings(samples)
    (tmp_path / "a-3.tar").unlink()
    with pytest.raises(NotFoundError, match=r"a-3\.tar"):
        sample_shards(sweep_of(tmp_path))
