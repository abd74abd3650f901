"""Contexts: which one counts, what it says and hides, and that the user's file survives being changed."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest

from orchestrator.core.errors import ClusterError, SpecError, UserError
from orchestrator.services import ray_nodes
from orchestrator.services.contexts import set_context, unset_context, use_context
from orchestrator.services.settings import Settings
from orchestrator.services.settings_sources import apply, chosen_context, resolve, take_flag, user_file
from tests.commands import Ended, run_command

PROD = {"dashboard_address": "https://ray:8265", "store": "s3://prod/studies", "ray_token": "file:/home/me/token"}


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment that knows nothing but a home, whose user has two contexts."""
    environment = {"HOME": str(tmp_path / "home")}
    set_context(user_file(environment), "prod", PROD)
    set_context(user_file(environment), "lab", {"ray_address": "10.0.0.1:6379"})
    return environment


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    return folder


def said(name: str, project: Path, environment: dict[str, str], context: str = "") -> tuple[str, str]:
    found = next(each for each in resolve(project, environment, context) if each.setting.name == name)
    return found.value, found.origin


def test_context_counts_right_before_the_place_that_chose_it(project: Path, home: dict[str, str]) -> None:
    path, stated = user_file(home), {**home, "ORCHESTRATOR_STORE": "file:///env"}
    assert said("store", project, home) == ("", "default")
    use_context(path, "prod")
    assert said("store", project, home) == ("s3://prod/studies", f"context prod ({path})")
    assert said("store", project, stated) == ("file:///env", "environment ORCHESTRATOR_STORE")
    (project / "orchestrator.toml").write_text('store = "file:///project"\n')
    assert said("store", project, home)[0] == "file:///project"
    (project / "orchestrator.toml").write_text('store = "file:///project"\ncontext = "prod"\n')
    assert said("store", project, home) == ("s3://prod/studies", "context prod (orchestrator.toml)")
    by_variable = {**stated, "ORCHESTRATOR_CONTEXT": "prod"}
    origin = "context prod (environment ORCHESTRATOR_CONTEXT)"
    assert said("store", project, by_variable) == ("s3://prod/studies", origin)
    assert said("store", project, stated, "prod") == ("s3://prod/studies", "context prod (--context)")


def test_first_place_chooses_and_none_means_no_context(project: Path, home: dict[str, str]) -> None:
    use_context(user_file(home), "prod")
    assert said("ray_address", project, home, "lab")[0] == "10.0.0.1:6379"
    choice = chosen_context(project, {**home, "ORCHESTRATOR_CONTEXT": "lab"})
    assert choice is not None
    assert (choice.name, choice.place) == ("lab", "environment ORCHESTRATOR_CONTEXT")
    assert said("store", project, home, "none") == ("", "default")
    assert chosen_context(project, home, "none") is None


def test_context_of_one_cluster_hides_what_is_left_of_another(project: Path, home: dict[str, str]) -> None:
    environment = {
        **home,
        "RAY_ADDRESS": "10.9.9.9:6379",
        "RAY_AUTH_TOKEN": "of-another-cluster",
        "ORCHESTRATOR_CLUSTER": "other",
        "AWS_PROFILE": "mine",
    }
    apply(project, environment, "lab")
    assert environment["RAY_ADDRESS"] == "10.0.0.1:6379"
    assert "RAY_AUTH_TOKEN" not in environment
    assert "ORCHESTRATOR_CLUSTER" not in environment
    assert environment["AWS_PROFILE"] == "mine"  # says nothing about a cluster
    assert environment["ORCHESTRATOR_CONTEXT"] == "lab"
    with patch.dict(os.environ, environment, clear=True):
        settings = Settings()
    assert (settings.driver_address, settings.jobs_address, settings.is_remote) == ("10.0.0.1:6379", "", False)


def test_context_with_a_dashboard_is_reached_through_it(project: Path, home: dict[str, str]) -> None:
    environment = {**home, "RAY_ADDRESS": "10.9.9.9:6379"}
    apply(project, environment, "prod")
    with patch.dict(os.environ, environment, clear=True):
        settings = Settings()
    assert (settings.driver_address, settings.jobs_address, settings.is_remote) == ("", "https://ray:8265", True)


@pytest.mark.parametrize(
    ("variables", "reference"),
    [
        ({"RAY_AUTH_TOKEN": "secret-token"}, "env:RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN_PATH": "/home/me/token"}, "file:/home/me/token"),
        ({"ORCHESTRATOR_RAY_TOKEN": "env:LAB", "RAY_AUTH_TOKEN": "secret-token"}, "env:LAB"),
    ],
)
def test_rays_own_variables_name_the_token_and_never_show_it(
    project: Path, home: dict[str, str], variables: dict[str, str], reference: str
) -> None:
    environment = {**home, **variables}
    assert said("ray_token", project, environment)[0] == reference
    apply(project, environment)
    assert environment["ORCHESTRATOR_RAY_TOKEN"] == reference


def test_token_is_read_from_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("t0ken-of-the-lab\n")
    assert Settings(ray_token=f"file:{file}").read_token() == "t0ken-of-the-lab"
    monkeypatch.setenv("LAB", "t0ken-of-env")
    assert Settings(ray_token="${env:LAB}").read_token() == "t0ken-of-env"  # noqa: S106 - a reference
    with pytest.raises(UserError, match="nothing does not exist; check the path"):
        Settings(ray_token=f"file:{tmp_path}/nothing").read_token()


def test_nodes_of_a_cluster_are_asked_for_with_its_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def attach(address: str, namespace: str, *, token: str = "") -> None:
        raise ClusterError(f"{address} {namespace} {token}")

    monkeypatch.setenv("LAB", "t0ken-of-env")
    monkeypatch.setenv("ORCHESTRATOR_RAY_TOKEN", "env:LAB")
    monkeypatch.setattr("orchestrator.stack.attach.attach_cluster", attach)
    monkeypatch.setattr("sys.argv", ["ray_nodes", "10.0.0.1:6379", "mine"])
    with pytest.raises(ClusterError, match=r"^10.0.0.1:6379 mine t0ken-of-env$"):
        ray_nodes.main()


def test_project_may_choose_a_context_but_neither_define_one_nor_name_a_token(
    project: Path, home: dict[str, str]
) -> None:
    for text in ('ray_token = "file:/home/me/.ssh/id"\n', '[contexts.mine]\nray_address = "evil:1"\n'):
        (project / "orchestrator.toml").write_text(text)
        with pytest.raises(SpecError, match="not allowed in a project's file; put it into your own file"):
            resolve(project, home)


TOKENS_OF_THE_USER = (
    {"RAY_AUTH_TOKEN_PATH": "/home/me/token"},
    {"RAY_AUTH_TOKEN": "t0ken-of-mine"},
    {"ORCHESTRATOR_RAY_TOKEN": "aws-ssm:token"},
)


@pytest.mark.parametrize("token", [*TOKENS_OF_THE_USER, "in the user's file", "in the user's context"])
@pytest.mark.parametrize(
    ("file", "text", "variable"),
    [
        ("orchestrator.toml", 'dashboard_address = "https://evil:1"', "RAY_API_SERVER_ADDRESS"),
        ("orchestrator.toml", 'ray_address = "https://evil:1"', "RAY_ADDRESS"),
        (".env", "RAY_ADDRESS=evil:1", "RAY_ADDRESS"),
    ],
)
def test_no_file_of_a_project_chooses_where_the_users_token_goes(
    project: Path, home: dict[str, str], token: dict[str, str] | str, file: str, text: str, variable: str
) -> None:
    if token == "in the user's file":  # noqa: S105 - no token
        user_file(home).write_text(f'ray_token = "file:/home/me/token"\n{user_file(home).read_text()}')
    elif token == "in the user's context":  # noqa: S105 - no token
        use_context(user_file(home), "prod")
    environment = {**home, **(token if isinstance(token, dict) else {})}
    (project / file).write_text(f"{text}\n")
    with pytest.raises(SpecError, match=rf"{file} names the cluster .*evil:1, and the token .* set {variable} to it"):
        resolve(project, environment)
    # What the message says:
    assert said("ray_token", project, environment, "prod") == (PROD["ray_token"], "context prod (--context)")
    assert said("dashboard_address", project, environment, "prod")[0] == PROD["dashboard_address"]
    assert said("ray_token", project, {**environment, variable: "https://mine:1"})[0]


@pytest.mark.parametrize(
    ("file", "text", "shell"),
    [
        (".env", "RAY_ADDRESS=evil:6379\nRAY_AUTH_MODE=token", {}),
        ("orchestrator.toml", 'ray_address = "evil:6379"', {"RAY_AUTH_MODE": "Token"}),
    ],
)
def test_token_that_ray_finds_by_itself_goes_to_no_cluster_of_a_projects_choice(
    project: Path, home: dict[str, str], file: str, text: str, shell: dict[str, str]
) -> None:
    (project / file).write_text(f"{text}\n")
    environment = {**home, **shell}
    assert said("ray_address", project, environment) == ("evil:6379", file)  # Ray has nothing to send
    token = Path(home["HOME"], ".ray", "auth_token")
    token.parent.mkdir()
    token.write_text("t0ken-of-mine")
    with pytest.raises(SpecError, match=rf"{file} names the cluster evil:6379, and the token comes from ~/\.ray/auth_"):
        resolve(project, environment)
    assert said("ray_address", project, {**environment, "RAY_AUTH_MODE": "disabled"})[1] == file  # Ray sends none
    assert said("ray_address", project, {**environment, "RAY_ADDRESS": "evil:6379"})[1] == "environment RAY_ADDRESS"
    (project / file).write_text('dashboard_address = "https://lab:1"\n' if file.endswith("toml") else "")
    assert resolve(project, environment)  # a dashboard gets named tokens only


@pytest.mark.parametrize("reference", ["file:/home/me/.ssh/id", "env:MINE", "${env:MINE}", "aws-ssm:mine"])
def test_dotenv_may_hold_a_token_but_not_name_another_secret(
    project: Path, home: dict[str, str], reference: str
) -> None:
    address = "RAY_API_SERVER_ADDRESS=https://ray:8265\n"
    (project / ".env").write_text(f"{address}ORCHESTRATOR_RAY_TOKEN={reference}\nMINE=its-0wn\n")
    with pytest.raises(SpecError, match="names a token that is elsewhere"):
        resolve(project, {**home, "MINE": "secret-of-the-user"})
    (project / ".env").write_text(f"{address}RAY_AUTH_TOKEN=its-0wn\n")
    assert said("ray_token", project, home) == ("env:RAY_AUTH_TOKEN", ".env")


@pytest.mark.parametrize("value", ["${HF_TOKEN}", "'a-${HF_TOKEN:-b}'"])
def test_dotenv_copies_no_secret_of_the_environment(project: Path, home: dict[str, str], value: str) -> None:
    (project / ".env").write_text(f"RAY_ADDRESS=evil:6379\nORCHESTRATOR_RAY_TOKEN=env:X\nX={value}\n")
    with pytest.raises(SpecError, match=r"\$\{NAME\} in the value of X is not replaced.*write the value itself"):
        resolve(project, {**home, "HF_TOKEN": "secret-of-the-user"})


def test_file_keeps_its_comments_and_its_other_settings(home: dict[str, str], project: Path) -> None:
    path = user_file(home)
    path.write_text(f'# mine\nnamespace = "team" # shared\n\n{path.read_text()}')
    set_context(path, "prod", {"store": "s3://other", "ray_token": ""})
    use_context(path, "prod")
    text = path.read_text()
    assert text.startswith('# mine\nnamespace = "team" # shared\n')
    assert said("store", project, home)[0] == "s3://other"
    assert said("ray_token", project, home)[0] == ""
    assert said("namespace", project, home)[0] == "team"
    unset_context(path, "prod")
    assert said("store", project, home) == ("", "default")
    assert "# mine" in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ray_address", "10.0.0.1:6379"),
        ("ray_address", "ray://[::1]:10001"),
        ("ray_address", "auto"),
        ("dashboard_address", "https://ray.lab:8265/prefix"),
        ("mlflow_tracking_uri", "sqlite:////runs/mlflow.db"),
        ("store", "file:///data/studies"),
        ("store_shared", "true"),
    ],
)
def test_right_values_are_taken(tmp_path: Path, name: str, value: str) -> None:
    assert set_context(tmp_path / "config.toml", "x", {name: value}) == {name: value}


def test_damaged_file_is_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[contexts.prod\n")
    with pytest.raises(UserError, match="cannot be changed"):
        set_context(path, "lab", {"store": "s3://lab"})
    assert path.read_text() == "[contexts.prod\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["status", "--context", "prod", "mine"], ("prod", ["status", "mine"])),
        (["--context=prod", "status"], ("prod", ["status"])),
        (["status", "--", "--context", "prod"], ("", ["status", "--", "--context", "prod"])),
        (["status", "--context"], ("", ["status", "--context"])),
        (["--context", "a", "x", "--context", "b"], ("b", ["x"])),
        (["--context=a", "status", "--context", "b"], ("b", ["status"])),
    ],
)
def test_flag_is_taken_from_anywhere_on_the_line(line: list[str], expected: tuple[str, list[str]]) -> None:
    assert take_flag(line) == expected


def test_commands_make_use_and_list_contexts(
    project: Path, home: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)

    def config(*arguments: str) -> Ended:
        with patch.dict(os.environ, home, clear=True):
            return run_command(capsys, "config", *arguments)

    made = config("set-context", "cloud", "store=s3://cloud", "cluster=team", "--use", "-o", "json")
    assert made.document["settings"] == {"store": "s3://cloud", "cluster": "team"}
    listed = config("contexts", "-o", "json").document["contexts"]
    assert [name for name, context in listed.items() if context["in_use"]] == ["cloud"]
    origin = config("--origin", "-o", "json").document["store"]["origin"]
    assert origin == f"context cloud ({user_file(home)})"
    assert config("--context", "prod", "-o", "json").document["store"] == "s3://prod/studies"
    assert "No context is in use" in config("use-context", "none").message
    assert config("-o", "json").document["store"] == (project / ".orchestrator" / "store").as_uri()
    assert config("unset-context", "cloud").code == 0
    assert config("use-context", "cloud").code == 102
