"""``orchestrator cluster``: which tool is asked for what, and what is said where it is missing."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cluster.kinds import ToolError, ask_tool, find_tool, read_cluster
from orchestrator.cluster.start_stop import Confirmation, down_commands, job_name, status_commands, up_commands
from tests.commands import run_command

CLUSTERS = Path(__file__).parents[2] / "clusters"
SCRIPT = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --job-name=ray\nsrun true\n"


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "ray.sbatch"
    path.write_text(SCRIPT)
    return read_cluster(path)


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """Programs that write down how they are called, first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    calls = tmp_path / "calls"
    for name in ("sbatch", "scancel", "squeue"):
        (folder / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> {calls}\n[ "$1" = --test-only ] && [ -e {folder}/broken ] '
            "&& echo 'invalid partition' >&2 && exit 1\nexit 0\n"
        )
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder, calls


def invoke(*arguments):
    return CliRunner().invoke(app, ["cluster", *map(str, arguments)])


def test_each_kind_is_driven_by_its_own_tool(script):
    aws, kuberay = read_cluster(CLUSTERS / "aws.yaml"), read_cluster(CLUSTERS / "kuberay")
    assert up_commands(aws, Confirmation.ASK) == [["ray", "up", str(aws.path)]]
    assert down_commands(aws, Confirmation.GIVEN) == [["ray", "down", str(aws.path), "--yes"]]
    assert up_commands(kuberay, Confirmation.ASK) == [["kubectl", "apply", "-k", str(kuberay.path)]]
    assert "!pretraining-orchestrator/keep" in down_commands(kuberay, Confirmation.ASK)[0]
    assert up_commands(script, Confirmation.ASK) == [["sbatch", str(script.path)]]
    assert down_commands(script, Confirmation.ASK) == [["scancel", "--name=ray", "--me"]]
    assert status_commands(script) == [["squeue", "--name=ray", "--me"]]


@pytest.mark.parametrize(
    ("lines", "name"), [("#SBATCH -J short", "short"), ("#SBATCH --job-name long", "long"), ("", "x.sbatch")]
)
def test_job_name_is_what_the_script_says(tmp_path, lines, name):
    path = tmp_path / "x.sbatch"
    path.write_text(f"#!/bin/sh\n#SBATCH --nodes=1\n{lines}\n")
    assert job_name(read_cluster(path)) == name


def test_up_checks_first_and_then_starts(script, tools):
    _, calls = tools
    done = invoke("up", script.path)
    assert done.exit_code == 0, done.output
    assert calls.read_text().splitlines() == [f"sbatch --test-only {script.path}", f"sbatch {script.path}"]


def test_up_of_a_file_that_fails_a_check_starts_nothing(script, tools):
    folder, calls = tools
    (folder / "broken").touch()
    done = invoke("up", script.path)
    assert done.exit_code == 1
    assert "invalid partition" in done.output
    assert calls.read_text().splitlines() == [f"sbatch --test-only {script.path}"]


def test_up_with_check_starts_nothing(script, tools):
    _, calls = tools
    assert invoke("up", script.path, "--check").exit_code == 0
    assert calls.read_text().splitlines() == [f"sbatch --test-only {script.path}"]


def test_up_unchecked_starts_at_once(script, tools):
    _, calls = tools
    assert invoke("up", script.path, "--unchecked").exit_code == 0
    assert calls.read_text().splitlines() == [f"sbatch {script.path}"]


def test_down_and_status_ask_the_tool(script, tools):
    _, calls = tools
    assert invoke("status", script.path).exit_code == 0
    assert invoke("down", script.path, "--yes").exit_code == 0
    assert calls.read_text().splitlines() == ["squeue --name=ray --me", "scancel --name=ray --me"]


class Terminal(StringIO):
    """A person who types."""

    def isatty(self):
        return True


@pytest.mark.parametrize(("typed", "code", "ended"), [("n\n", 3, False), ("", 3, False), ("y\n", 0, True)])
def test_down_asks_a_person_where_the_tool_never_does(script, tools, monkeypatch, capsys, typed, code, ended):
    _, calls = tools
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    done = run_command(capsys, "cluster", "down", str(script.path))
    assert done.code == code
    assert f"Stop the cluster of {script.path} by scancel --name=ray --me? [y/N]" in done.message
    assert calls.exists() is ended


def test_down_without_a_terminal_or_with_a_yes_asks_nothing(script, tools, monkeypatch, capsys):
    _, calls = tools
    assert invoke("down", script.path).exit_code == 0
    monkeypatch.setattr("sys.stdin", Terminal())
    assert run_command(capsys, "cluster", "down", str(script.path), "-y").code == 0
    assert calls.read_text().splitlines() == ["scancel --name=ray --me"] * 2


def test_check_of_a_cloud_file_names_every_problem_as_json(tmp_path):
    config = yaml.safe_load((CLUSTERS / "gcp.yaml").read_text())
    config["provider"]["availability_zone"] = "europe-west4-b"
    path = tmp_path / "gcp.yaml"
    path.write_text(yaml.safe_dump(config))
    done = invoke("check", path, "-o", "json")
    assert done.exit_code == 1
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert found["region"]["verdict"] == found["project"]["verdict"] == found["placeholders"]["verdict"] == "failed"
    assert found["schema"]["verdict"] == "ok"
    assert found["quota"]["verdict"] == "skipped"


def test_tool_that_is_missing_is_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match="sbatch is not on this machine; run this on a login node"):
        find_tool("sbatch")
    script = tmp_path / "x.sbatch"
    script.write_text(SCRIPT)
    done = invoke("status", script)
    assert "squeue is not on this machine" in str(done.exception)


def test_tool_that_hangs_is_ended(tools):
    with pytest.raises(ToolError, match=r"did not end in 0\.2 s"):
        ask_tool(["sleep", "30"], timeout_s=0.2)


def test_file_that_is_no_cluster_ends_the_command(tmp_path):
    done = invoke("check", tmp_path / "absent.yaml")
    assert done.exit_code != 0
    assert "does not exist" in str(done.exception)
