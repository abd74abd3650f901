"""Names of clusters, jobs, files and nodes that a shell or a program would take for something else."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from orchestrator.cluster.kinds import ClusterKind, read_cluster
from orchestrator.cluster.start_stop import Confirmation, down_commands, job_name, status_commands, up_commands
from orchestrator.core.errors import UserError

ROOT = Path(__file__).parents[2]
BATCH = "#!/bin/bash\n#SBATCH --job-name={name}\n"
NAMES = (
    "$(touch MARKER)", "`touch MARKER`", "x; touch MARKER", "x\ntouch MARKER", "x|touch MARKER", "x&touch MARKER",
    '"; touch MARKER; "', "'; touch MARKER; '", "-x; touch MARKER", "--wrap=touch MARKER", "../../MARKER",
    "x[$(touch MARKER)]", "${IFS}touch${IFS}MARKER", "~/x", "*", "",
)  # fmt: skip


def tool(folder: Path, name: str, line: str = "exit 0") -> None:
    """A program that notes what it was given, each argument on its own."""
    path = folder / name
    path.write_text(f'#!/bin/bash\nprintf "<%s>" {name} "$@" >>"$NOTES"\n{line}\n')
    path.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Programs of Slurm and Ray that only note what they were given."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("srun", "scontrol", "ray"):
        tool(tools, name)
    tool(tools, "hostname", "echo 127.0.0.1")
    (tmp_path / "home").mkdir()
    (tmp_path / "token").write_text("0" * 64)
    return {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOME": str(tmp_path / "home"),
        "NOTES": str(tmp_path / "notes"),
        "ORCHESTRATOR_STORE": "s3://bucket/x",
        "ORCHESTRATOR_RAY_TMP": str(tmp_path / "ray"),
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "SLURM_JOB_ID": "7",
        "SLURM_PROCID": "1",
    }


def run_script(name: str, *arguments: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Exit code and standard error of one of our scripts."""
    command = ["bash", str(ROOT / "clusters" / name), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip
    assert not list(folder.rglob("*MARKER*"))
    assert not (folder.parent / "MARKER").exists()
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", [name for name in NAMES if name])
def test_batch_script_refuses_a_hostile_cluster_name(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "1", "ORCHESTRATOR_CLUSTER": name}
    code, told = run_script("slurm/ray.sbatch", folder=tmp_path, environment=environment | variables)
    assert code == 2
    assert "ORCHESTRATOR_CLUSTER" in told
    assert not list((tmp_path / "home").iterdir())


def test_batch_script_takes_an_ordinary_cluster_name(environment: dict[str, str], tmp_path: Path) -> None:
    variables = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": "1", "ORCHESTRATOR_CLUSTER": "lab-7.a_b"}
    code, told = run_script("slurm/ray.sbatch", folder=tmp_path, environment=environment | variables)
    assert code == 0, told
    assert (tmp_path / "home/.orchestrator/slurm/lab-7.a_b/token").stat().st_mode & 0o077 == 0


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variable", ["ORCHESTRATOR_CLUSTER", "ORCHESTRATOR_HEAD", "ORCHESTRATOR_NODE_LABELS"])
def test_node_script_gives_hostile_names_on_as_one_argument(
    name: str, variable: str, environment: dict[str, str], tmp_path: Path
) -> None:
    given = environment | {"ORCHESTRATOR_HEAD": "127.0.0.1:1"} | {variable: name}
    code, _ = run_script("node.sh", "member", folder=tmp_path, environment=given)
    if variable == "ORCHESTRATOR_HEAD" and not name:
        assert code == 2
        return
    wanted = {
        "ORCHESTRATOR_CLUSTER": "<start>",
        "ORCHESTRATOR_HEAD": f"<--address={name}>",
        "ORCHESTRATOR_NODE_LABELS": f"<--labels=orchestrator/node=7-1{',' + name if name else ''}>",
    }
    assert wanted[variable] in (tmp_path / "notes").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_job_name_that_is_no_word_is_refused_before_anything_is_cancelled(name: str, tmp_path: Path) -> None:
    script = tmp_path / "a.sbatch"
    script.write_text(BATCH.format(name=name))
    file = read_cluster(script)
    if "\n" in name:  # the second line is the script's own
        assert job_name(file) == "x"
        return
    with pytest.raises(UserError, match="names its job"):
        down_commands(file, Confirmation.GIVEN)
    with pytest.raises(UserError, match="names its job"):
        status_commands(file)


def test_job_name_of_the_shipped_script_is_taken() -> None:
    shipped = read_cluster(ROOT / "clusters/slurm/ray.sbatch")
    assert down_commands(shipped, Confirmation.GIVEN) == [["scancel", "--name=pretraining", "--me"]]


@pytest.mark.parametrize("name", ["--wrap=touch MARKER", "-oProxyCommand=touch MARKER", "-x.yaml"])
@pytest.mark.parametrize("text", [BATCH.format(name="x"), "cluster_name: x\n", "kind: RayCluster\n"])
def test_file_whose_name_looks_like_an_option_is_given_on_as_a_path(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    file = read_cluster(Path(name))
    commands = up_commands(file, Confirmation.GIVEN)
    if file.kind is not ClusterKind.SLURM:
        commands += down_commands(file, Confirmation.GIVEN) + status_commands(file)
    assert {argument for command in commands for argument in command if name in argument} == {f"./{name}"}
