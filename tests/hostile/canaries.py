"""Fifty secrets, planted wherever a lab keeps its own: variables, URIs, files, the repository, and words of a job.

None of them is real, and each is another one, so that whatever is found tells where it came from.
"""
# ruff: noqa: E501 - a table of names

from __future__ import annotations

import json
import secrets
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

LIST_VARIABLE = "HOSTILE_LIST"
"""Names the file with all canaries, for the job that tells them to everybody."""
_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "GITHUB_TOKEN", "DB_PASSWORD", "SMTP_PASSWORD",
    "OPENAI_API_KEY", "VAULT_TOKEN", "SLACK_TOKEN", "MY_SECRET", "SECRET_KEY_BASE", "LAB_PASSWD", "COMET_API_KEY", "NPM_TOKEN",
    "AZURE_CLIENT_SECRET", "GCP_CREDENTIALS", "DEPLOY_PRIVATE_KEY", "CI_JOB_TOKEN", "SIGNING_SECRET",
)  # fmt: skip
_IN_URIS = {
    "DATABASE_URL": "postgresql://ann:{}@127.0.0.1:1/x",
    "HTTP_ARCHIVE": "https://ann:{}@example.org/a",
    "BROKER": "amqp://ann:{}@127.0.0.1/v",
    "INDEX_MIRROR": "https://ann:{}@example.org/simple",
    "CACHE_SERVER": "redis://:{}@127.0.0.1:1/0",
}
_SPECIAL = ("with blank {}", 'with"quote{}', "with'quote{}", "with+/={}", "with%41{}", "with\\slash{}", "ünïcode{}")


@dataclass(slots=True)
class Canaries:
    """What was planted, and the environment in which it is found."""

    known: dict[str, str] = field(default_factory=dict)
    """Values by where they are: found by their place."""
    formed: dict[str, str] = field(default_factory=dict)
    """Values that only a job knows: found by their form, or the name before them."""
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def all(self) -> dict[str, str]:
        """Every value by where it came from."""
        return {**self.known, **self.formed}


def plant(home: Path, checkout: Path) -> Canaries:
    """Write files below a home directory and a repository; returns what else must be in the environment."""
    found = Canaries()
    _plant_variables(found)
    _plant_files(found, home)
    _plant_formed(found)
    _plant_repository(found, checkout)
    told = home / "told.json"
    told.write_text(json.dumps({"known": found.known, "formed": found.formed}), encoding="utf-8")
    found.environment[LIST_VARIABLE] = str(told)
    found.environment["HOME"] = str(home)
    return found


def _fresh(mark: str) -> str:
    return f"canary-{mark}-{secrets.token_hex(10)}"


def _plant_variables(found: Canaries) -> None:
    for number, name in enumerate(_VARIABLES):
        value = _fresh("v")
        found.known[name] = _SPECIAL[number - 5].format(value) if 5 <= number < 5 + len(_SPECIAL) else value
    key_lines = "\n".join(secrets.token_hex(32) for _ in range(3))
    found.known["DEPLOY_PRIVATE_KEY"] = key_lines
    found.environment |= found.known
    found.environment["DEPLOY_PRIVATE_KEY"] = f"-----BEGIN PRIVATE KEY-----\n{key_lines}\n-----END PRIVATE KEY-----\n"
    for name, form in _IN_URIS.items():
        found.known[name] = _fresh("u")
        found.environment[name] = form.format(found.known[name])


def _plant_files(found: Canaries, home: Path) -> None:
    files = {
        ".aws/credentials": "[default]\naws_access_key_id = AKIDX\naws_secret_access_key = {}\n",
        ".mlflow/credentials": "[mlflow]\nmlflow_tracking_username = ann\nmlflow_tracking_password = {}\n",
        ".netrc": "machine example.org login ann password {}\n",
        ".cache/huggingface/token": "{}",
        ".ray/auth_token": "{}\n",
        "secrets/smtp": "{}\n",
        "secrets/hook": "{}\n",
    }
    for name, form in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        found.known[name] = _fresh("f")
        path.write_text(form.format(found.known[name]), encoding="utf-8")
        path.chmod(0o600)
    found.environment["SMTP_PASSWORD_FILE"] = str(home / "secrets/smtp")
    found.environment["WEBHOOK_SECRET_PATH"] = str(home / "secrets/hook")


def _plant_formed(found: Canaries) -> None:
    token = secrets.token_hex
    found.formed |= {
        "an AWS key": f"AKIA{token(8).upper()}",
        "a GitHub token": f"ghp_{token(18)}",
        "a GitLab token": f"glpat-{token(12)}",
        "a Hugging Face token": f"hf_{token(17)}",
        "a Slack token": f"xoxb-{token(12)}",
        "an API key": f"sk-{token(16)}",
        "a Google key": f"AIza{token(20)[:35]}",
        "a Vault token": f"hvs.{token(14)}",
        "a web token": f"eyJ{token(8)}.eyJ{token(8)}.{token(8)}",
        "a Slack webhook": f"https://hooks.slack.com/services/{token(12)}",
        "password=": f"{token(10)}",
        "token: ": f"{token(10)}a1",
        "Authorization: Bearer ": f"{token(20)}",
        "Authorization: Basic ": f"{token(20)}==",
        "https://ann:": f"{token(10)}",
        '"api_key": "': f"{token(10)}b2",
    }


def _plant_repository(found: Canaries, checkout: Path) -> None:
    checkout.mkdir(parents=True, exist_ok=True)
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", checkout, *identity, *arguments], check=True, capture_output=True)

    (checkout / "train.py").write_text("KEY = None\n")
    git("init", "-q")
    git("add", "train.py")
    git("commit", "-q", "-m", "first")
    found.known["remote"] = _fresh("r")
    git("remote", "add", "origin", f"https://ann:{found.known['remote']}@example.org/lab.git")
    found.formed["uncommitted"] = f"ghp_{secrets.token_hex(18)}"
    (checkout / "train.py").write_text(
        f'KEY = "{found.formed["uncommitted"]}"\nPASSWORD = "{found.known["DB_PASSWORD"]}"\n'
    )


def sentences(told: dict[str, dict[str, str]]) -> list[str]:
    """What a careless program prints: each secret as it would stand in a log."""
    lines = [f"using {value} of {name}" for name, value in told["known"].items() if name != "remote"]
    for name, value in told["formed"].items():
        after = {"https://ann:": "@example.org/x", '"api_key": "': '"'}.get(name, "")
        has_name = name.endswith((":", " ", "=", '"'))
        lines.append(f"{name if has_name else 'got '}{value}{after}")
    return lines
