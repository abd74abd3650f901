"""Settings: which source counts, what a file may say, and that passwords stay hidden."""

from __future__ import annotations

import os
from contextlib import chdir
from pathlib import Path
from unittest.mock import patch

import pytest

from orchestrator.core.errors import SpecError
from orchestrator.services.setting_values import without_password
from orchestrator.services.settings import Settings
from orchestrator.services.settings_sources import SETTINGS, Code, apply, resolve, user_file
from orchestrator.storage.s3.settings import S3Settings
from tests.commands import run_command


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment that knows nothing but a home."""
    return {"HOME": str(tmp_path / "home")}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def write_user_file(home: dict[str, str], text: str) -> None:
    path = user_file(home)
    path.parent.mkdir(parents=True)
    path.write_text(text)


def value_of(name: str, project: Path, environment: dict[str, str]) -> tuple[str, str]:
    found = next(each for each in resolve(project, environment) if each.setting.name == name)
    return found.value, found.origin


def test_each_source_goes_before_the_next(project: Path, home: dict[str, str]) -> None:
    assert value_of("namespace", project, home) == ("", "default")
    write_user_file(home, 'namespace = "of-user"')
    assert value_of("namespace", project, home) == ("of-user", str(user_file(home)))
    (project / "orchestrator.toml").write_text('namespace = "of-project"')
    assert value_of("namespace", project, home) == ("of-project", "orchestrator.toml")
    (project / ".env").write_text("ORCHESTRATOR_NAMESPACE=of-dotenv\n")
    assert value_of("namespace", project, home) == ("of-dotenv", ".env")
    stated = {**home, "ORCHESTRATOR_NAMESPACE": "of-environment"}
    assert value_of("namespace", project, stated) == ("of-environment", "environment ORCHESTRATOR_NAMESPACE")


def test_standard_variables_count_and_feed_every_client(project: Path, home: dict[str, str]) -> None:
    (project / "orchestrator.toml").write_text('s3_endpoint_url = "http://127.0.0.1:9000"\nstore_shared = true\n')
    (project / ".env").write_text("OMP_NUM_THREADS=3\n")
    environment = dict(home)
    apply(project, environment)
    assert environment["AWS_ENDPOINT_URL_S3"] == "http://127.0.0.1:9000"
    assert environment["ORCHESTRATOR_STORE_SHARED"] == "true"
    assert environment["OMP_NUM_THREADS"] == "3"
    with patch.dict(os.environ, environment, clear=True):
        assert S3Settings().endpoint_url == "http://127.0.0.1:9000"
    stated = {**home, "AWS_ENDPOINT_URL": "http://other:1"}
    apply(project, stated)
    assert "AWS_ENDPOINT_URL_S3" not in stated


def test_empty_variables_are_unset_ones_for_commands_as_for_config(project: Path, home: dict[str, str]) -> None:
    names = ("store_shared", "directory", "namespace", "code")
    empty = {f"ORCHESTRATOR_{name.upper()}": "" for name in names}
    environment = {**home, **empty, "RAY_ADDRESS": "", "ORCHESTRATOR_RAY_ADDRESS": "head:6379"}
    with patch.dict(os.environ, environment, clear=True):
        settings = Settings()
    defaults = (False, Path(".orchestrator"), "orchestrator", Code.IMAGE)
    assert tuple(getattr(settings, name) for name in names) == defaults
    assert {value_of(name, project, environment) for name in names} == {("", "default")}
    assert settings.ray_address == value_of("ray_address", project, environment)[0] == "head:6379"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('ray_adress = "a:1"', "did you mean 'ray_address'"),
        ("store = [1]", "store is [1]; write a text"),
        ('store_shared = "maybe"', "store_shared is 'maybe'; write true or false"),
        ("store = ", "cannot be read as TOML"),
        ('store = "lab/x"', "store 'lab/x' has no scheme"),
        ('ray_address = "head"', "ray_address is 'head'; write host:port"),
    ],
)
def test_wrong_file_is_refused_with_its_place(project: Path, home: dict[str, str], text: str, told: str) -> None:
    (project / "orchestrator.toml").write_text(text)
    with pytest.raises(SpecError, match=r"orchestrator\.toml") as refused:
        resolve(project, home)
    assert told in str(refused.value)


def test_wrong_value_of_the_environment_is_refused_with_its_variable(project: Path, home: dict[str, str]) -> None:
    with pytest.raises(SpecError, match=r"^environment ORCHESTRATOR_RAY_ADDRESS: ray_address is 'head'"):
        resolve(project, {**home, "ORCHESTRATOR_RAY_ADDRESS": "head"})
    assert value_of("ray_address", project, {**home, "RAY_ADDRESS": "head"})[0] == "head"  # Ray may know what it means


@pytest.mark.parametrize(
    "value", ["https://hunter2@host:x", "minio:hunter2@host:9000", "https://ann:hunter2@host:99999"]
)
def test_refused_value_is_shown_without_its_password(project: Path, home: dict[str, str], value: str) -> None:
    (project / "orchestrator.toml").write_text(f'mlflow_tracking_uri = "https:{value}"\ns3_endpoint_url = "{value}"\n')
    with pytest.raises(SpecError, match=r"s3_endpoint_url is .*\[hidden\]@host") as refused:
        resolve(project, home)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("line", ["ORCHESTRATOR_STORE s3://lab/x", "ORCHESTRATOR_STORE: s3://lab/x"])
def test_line_of_dotenv_that_is_no_assignment_is_refused_and_not_shown(
    project: Path, home: dict[str, str], line: str
) -> None:
    (project / ".env").write_text(f"# ours\nexport A='b'\n{line}\n")
    with pytest.raises(SpecError, match=r"\.env: line 3: this is not NAME=VALUE$"):
        resolve(project, home)


def test_config_command_shows_values_and_origins_and_no_password(
    project: Path, home: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "orchestrator.toml").write_text('mlflow_tracking_uri = "http://ann:hunter2@tracking:5000"\n')
    with patch.dict(os.environ, {**home, "ORCHESTRATOR_RAY_TOKEN": "file:/home/ann/token"}, clear=True):
        result = run_command(capsys, "config", "--origin", "-o", "json")
        table = run_command(capsys, "config", "--origin")
    assert result.document["mlflow_tracking_uri"] == {
        "value": "http://[hidden]@tracking:5000",
        "origin": "orchestrator.toml",
        "variable": "MLFLOW_TRACKING_URI",
    }
    assert set(result.document) == {setting.name for setting in SETTINGS}
    assert result.document["store"]["value"] == (project / ".orchestrator" / "store").as_uri()
    assert result.document["s3_allowed_buckets"]["value"] is None
    assert result.document["namespace"]["value"] == "orchestrator"
    assert result.document["ray_token"]["value"] == "file:/home/ann/token"
    assert "hunter2" not in table.out


def test_wrong_project_file_ends_any_command_with_2(
    project: Path, home: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    (project / "orchestrator.toml").write_text("nothing = 1\n")
    with patch.dict(os.environ, home, clear=True):
        assert run_command(capsys, "status").code == 2


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://h/db?user=a&password=hunter2&sslmode=require", "?user=a&password=[hidden]&sslmode=require"),
        ("postgresql://ann:hunt@er2@h/db", "postgresql://[hidden]@h/db"),
        ("https://hunter2@h:5000/path", "https://[hidden]@h:5000/path"),
        ("s3://[hunter2", "s3://[hunter2"),
        ("postgresql://ann@host/runs", "postgresql://ann@host/runs"),
        ("file:///a b", "file:///a b"),
        ("env:HUNTER", "env:HUNTER"),
    ],
)
def test_config_shows_values_without_passwords_and_tokens(
    project: Path, home: dict[str, str], capsys: pytest.CaptureFixture[str], text: str, shown: str
) -> None:
    assert without_password(text).endswith(shown)
    write_user_file(home, f'[contexts.lab]\nmlflow_tracking_uri = "{text}"\n')
    with patch.dict(os.environ, {**home, "ORCHESTRATOR_CONTEXT": "lab"}, clear=True), chdir(project):
        assert run_command(capsys, "config", "-o", "json").document["mlflow_tracking_uri"].endswith(shown)
        contexts = run_command(capsys, "config", "contexts", "-o", "json").document["contexts"]
        changed = run_command(capsys, "config", "set-context", "lab", "aws_region=eu", "-o", "json")
    assert contexts["lab"]["settings"]["mlflow_tracking_uri"].endswith(shown)
    assert changed.document["settings"]["mlflow_tracking_uri"].endswith(shown)


def test_version_names_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    result = run_command(capsys, "--version")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("orchestrator ")
    assert "(code " in result.out
