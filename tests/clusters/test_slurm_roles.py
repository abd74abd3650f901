"""Roles in an allocation, without Slurm: what its script asks ``srun`` for, and which members outlive their head."""

from __future__ import annotations

import os
import re
import subprocess
import time
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "clusters" / "slurm" / "ray.sbatch"
NODE_SCRIPT = ROOT / "clusters" / "node.sh"
# The head is lost at the first start of a member, and answers again at the third question; after the second start it
# has ended on purpose. The start of a head stays until it is killed.
RAY = """#!/bin/sh
[ ! -e /proc/self/fd/9 ] || echo "$@" >>locking
echo "$1" >>calls
echo "$@" >>words
case "$1 $2" in
  "start --head") touch up; exec /bin/sleep 60 ;;
  start*) rm -f up; [ "$(grep -c start calls)" = 1 ] || touch shared/ended; exit 1 ;;
esac
[ -e up ] && exit
[ "$(grep -c health calls)" -lt 3 ] || touch up
exit 1
"""

SLEEP = """#!/bin/sh
[ ! -e /proc/self/fd/9 ] || echo sleep >>locking
"""
NOTICE = "kill -TERM $PPID"


def start(
    tmp_path: Path, before: str = "", *, state: str = "RUNNING None", **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script; it prints what a stand-in for ``srun`` was called with, at last the role of the allocation.

    ``before`` is what ``srun`` does first. ``squeue`` says that the script was submitted a minute ago, its state and
    reason. ``scontrol`` leaves the file ``requeued``.
    """
    shared, programs = tmp_path / "shared", tmp_path / "bin"
    shared.mkdir(exist_ok=True)
    programs.mkdir(exist_ok=True)
    (tmp_path / "requeued").unlink(missing_ok=True)
    (shared / "address").write_text("10.0.0.1:6379")
    submitted = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - 60))
    stand_ins = {
        "srun": f'{before}\nprintf "%s\\n" "$@"',
        "squeue": f'case "$*" in *%T*) echo {state} ;; *) echo {submitted} ;; esac',
        "scontrol": f"touch {tmp_path}/requeued",
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_SUBMIT_DIR": str(ROOT)}
    ours = {"ORCHESTRATOR_STORE": "s3://bucket/prefix", "ORCHESTRATOR_SHARED": str(shared), "HOME": str(tmp_path)}
    path = f"{programs}:{os.environ['PATH']}"
    return subprocess.run(
        ["bash", str(SCRIPT)],
        env={"PATH": path, **slurm, **ours, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        umask=0o022,
    )


@pytest.mark.parametrize(
    ("variables", "role"),
    [
        ({}, "head"),
        ({"SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MIN": "0"}, "head"),
        ({"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"}, "member"),
        ({"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1", "ORCHESTRATOR_ROLE": "member"}, "member"),
        ({"ORCHESTRATOR_ROLE": "member"}, "member"),
    ],
)
def test_allocation_has_the_head_unless_it_joins_another_one(
    tmp_path: Path, variables: dict[str, str], role: str
) -> None:
    done = start(tmp_path, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == role
    # Only who has the head takes away the address of the former one.
    assert (tmp_path / "shared" / "address").exists() is (role == "member")


def test_tasks_have_the_cpus_of_the_allocation(tmp_path: Path) -> None:
    done = start(tmp_path, SLURM_CPUS_PER_TASK="96")
    assert "--cpus-per-task=96" in done.stdout.splitlines()


def test_role_that_is_none_is_refused(tmp_path: Path) -> None:
    done = start(tmp_path, ORCHESTRATOR_ROLE="worker")
    assert done.returncode == 2
    assert "write head or member" in done.stderr


@pytest.mark.parametrize(("age_s", "is_over"), [(0.0, True), (120.0, False)])
def test_member_is_not_queued_again_once_the_head_has_ended_after_it_was_submitted(
    tmp_path: Path, age_s: float, is_over: bool
) -> None:
    """A head that has ended before was another one: the member's own may be queued still."""
    ended = tmp_path / "shared" / "ended"
    ended.parent.mkdir()
    ended.touch()
    os.utime(ended, (time.time() - age_s, time.time() - age_s))
    done = start(tmp_path, NOTICE, ORCHESTRATOR_ROLE="member")
    assert "the allocation is taken back" in done.stdout, done.stderr
    assert ended.exists() is is_over
    assert (tmp_path / "requeued").exists() is not is_over


@pytest.mark.parametrize("before", [NOTICE, "exit 143"])
@pytest.mark.parametrize(
    ("state", "is_queued"),
    [
        ("RUNNING None", True),
        ("COMPLETING None", False),  # after scancel, or Slurm queues it again itself
        ("COMPLETING TimeLimit", True),
        ("", True),  # Slurm does not answer
    ],
)
def test_job_that_slurm_has_ended_for_good_is_not_queued_again(
    tmp_path: Path, before: str, state: str, is_queued: bool
) -> None:
    done = start(tmp_path, before, state=state)
    assert (tmp_path / "requeued").exists() is is_queued, done.stdout


def test_failed_job_is_queued_again_three_times_however_often_it_was_preempted(tmp_path: Path) -> None:
    queued = []
    for restarts in (5, 6, 7, 8):
        start(tmp_path, "exit 3", SLURM_RESTART_COUNT=str(restarts))
        queued.append((tmp_path / "requeued").exists())
    assert queued == [True, True, True, False]
    start(tmp_path, "exit 3")  # another job, whose id was used before
    assert (tmp_path / "requeued").exists()


def test_token_is_private_and_results_have_the_mode_that_the_user_wants(tmp_path: Path) -> None:
    shared = tmp_path / "new" / "shared"
    done = start(tmp_path, "umask", ORCHESTRATOR_SHARED=str(shared))
    assert done.stdout.splitlines()[0] == "0022", done.stderr
    assert [path.stat().st_mode & 0o777 for path in (shared, shared / "token")] == [0o700, 0o600]


def run_node(
    folder: Path, *roles: str, serve_status: int = 0, script: Path = NODE_SCRIPT, job: str = "7", **more: str
) -> subprocess.CompletedProcess[str]:
    """Run a node's script in an allocation, with stand-ins for Ray and the controller; without ``job``, on a host."""
    programs = {"ray": RAY, "python3": f"#!/bin/sh\nexit {serve_status}\n", "sleep": SLEEP}
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "shared").mkdir(exist_ok=True)
    if script is NODE_SCRIPT:
        (folder / "shared" / "address").write_text("10.0.0.1:6379")
    (folder / "token").write_text("0" * 64)
    variables = {
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        **({"SLURM_JOB_ID": job} if job else {}),
        "ORCHESTRATOR_SHARED": str(folder / "shared"),
        "ORCHESTRATOR_RAY_TMP": str(folder / "ray"),
        "ORCHESTRATOR_NODE_ADDRESS": "10.0.0.2",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        **more,
    }
    words = ["bash", str(script), *roles]
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize(("allocation", "num_starts"), [("member", 2), ("head", 1)])
def test_member_of_another_allocation_waits_for_a_head_that_is_lost_and_ends_with_one_that_is_done(
    tmp_path: Path, allocation: str, num_starts: int
) -> None:
    (tmp_path / "up").touch()
    done = run_node(tmp_path, "member", allocation)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "calls").read_text().split().count("start") == num_starts, done.stdout


def test_member_that_starts_after_the_head_has_ended_does_not_wait_for_ever(tmp_path: Path) -> None:
    """Its patience is over at once, and every try counts as a long one."""
    text = NODE_SCRIPT.read_text()
    for setting in ("start_s", "join_s"):
        text = re.sub(rf"^{setting}=\d+", f"{setting}=-1", text, count=1, flags=re.MULTILINE)
    (tmp_path / "node.sh").write_text(text)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "ended").touch()
    done = run_node(tmp_path, "member", "member", script=tmp_path / "node.sh")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "calls").exists()


@pytest.mark.parametrize(("serve_status", "is_told"), [(0, True), (101, False)])
def test_head_tells_members_of_other_allocations_that_no_sweep_is_left(
    tmp_path: Path, serve_status: int, is_told: bool
) -> None:
    """Not when it is preempted: then it comes back."""
    done = run_node(tmp_path, "head", "head", serve_status=serve_status)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "shared" / "ended").exists() is is_told


def test_node_deletes_only_its_own_folder_of_sessions(tmp_path: Path) -> None:
    """On one machine, and where nodes share the directory, each has another one."""
    theirs = tmp_path / "ray" / "results.csv"
    theirs.parent.mkdir()
    theirs.touch()
    for number, (role, job) in enumerate([("head", ""), ("member", ""), ("member", "7")], 1):
        (tmp_path / "up").touch()
        run_node(tmp_path, role, job=job)
        words = (tmp_path / "words").read_text()
        assert len(set(re.findall(r"--temp-dir=(\S+)", words))) == number
        assert len(set(re.findall(r"--labels=(\S+)", words))) == number
    assert list(theirs.parent.iterdir()) == [theirs]


def temporary_folders(folder: Path) -> list[str]:
    """Where Ray's own folder stood, of each of its starts."""
    return re.findall(r"--temp-dir=(\S+)/r ", (folder / "words").read_text())


def test_nodes_of_several_clusters_on_one_machine_have_folders_of_their_own(tmp_path: Path) -> None:
    for port in ("6379", "6380"):
        (tmp_path / "up").touch()
        run_node(tmp_path, "head", job="", ORCHESTRATOR_RAY_PORT=port)
        (tmp_path / "up").touch()
        run_node(tmp_path, "member", job="", ORCHESTRATOR_HEAD=f"10.0.0.1:{port}")
    assert len(set(temporary_folders(tmp_path))) == 4


def test_second_node_of_a_cluster_on_one_machine_is_refused_and_the_first_keeps_its_folder(tmp_path: Path) -> None:
    run_node(tmp_path, "head", job="")
    (folder,) = map(Path, temporary_folders(tmp_path))
    folder.mkdir(mode=0o700)
    (folder / "r").mkdir()
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        done = run_node(tmp_path, "head", job="")
    assert done.returncode == 2
    assert done.stdout.count("error: a head of this cluster runs on this machine already") == 1
    assert (folder / "r").is_dir()
    assert len(temporary_folders(tmp_path)) == 1
    assert run_node(tmp_path, "head", job="").returncode == 0  # the first one was killed, and its folder is there still


@pytest.mark.parametrize("role", ["head", "member"])
def test_nothing_that_may_outlive_a_killed_node_holds_its_lock(tmp_path: Path, role: str) -> None:
    """The next start would be refused until it has ended. The script is killed with SIGKILL, or for want of memory."""
    done = run_node(tmp_path, role, "member")
    assert "start" in (tmp_path / "calls").read_text().split(), done.stdout
    assert not (tmp_path / "locking").exists(), (tmp_path / "locking").read_text()


def test_file_system_without_locks_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "flock").write_text("#!/bin/sh\nexit 71\n")
    (tmp_path / "bin" / "flock").chmod(0o755)
    done = run_node(tmp_path, "head")
    assert done.returncode == 2
    assert "has no locks: set ORCHESTRATOR_RAY_TMP" in done.stdout
    assert "runs on this machine already" not in done.stdout


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    run_node(tmp_path, "head", job="")
    (folder,) = map(Path, temporary_folders(tmp_path))
    folder.mkdir()
    folder.chmod(0o777)
    done = run_node(tmp_path, "head", job="")
    assert done.returncode == 2
    assert "is open to other users (it needs mode 0700)" in done.stdout
    assert folder.is_dir()
