"""Uncommitted changes are published with a sweep: without the secrets in them, and so that git still applies them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.core.security.diffs import redacted_diff
from orchestrator.core.security.redaction import HIDDEN
from orchestrator.tracking.provenance import capture

KEY = "-----BEGIN RSA PRIVATE KEY-----\n" + 4 * "MIIEpAIBAAKCAQEA7bq0\n" + "-----END RSA PRIVATE KEY-----\n"
DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
# In pieces, so that no scanner of repositories takes them for real ones.
SECRETS = {
    "github": "ghp_" + "a1B2" * 9,
    "aws": "AKIA" + "QWERTYUIOPASDFGH",
    "stripe": "sk_" + "live_" + "4eC39HqLyjWDarjtT1zdp7dc",
    "sendgrid": "SG." + "ngeVfQFYQlKU0ufo8x5d1A" + "." + "TwL2iGABf9DHoTf-09kqeF8tAmbihYzrnopKc-1s5cr",
    "npm": "//registry.npmjs.org/:_authToken=" + "npm_" + "x9Y8" * 9,
    "twilio": "SK" + "0123456789abcdef" * 2,
    "discord": "MTk4NjIyNDgzNDcxOTI1MjQ4" + ".Cl2FMQ." + "ZnCjm1XVW7vRze4b7Cq4se7kKWs",
    "password": "tr0ub4dor-and-3",
    "uri": "hunter2hunter2",
    "known": "a-value-of-this-environment",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAB_SECRET", SECRETS["known"])
    folder = tmp_path / "work"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("".join(f"line_{number} = {number}\n" for number in range(60)))
    (folder / "old.py").write_text(
        f'import os\n\nTOKEN = "{SECRETS["github"]}"\nfirst = 1\nsecond = 2\nthird = 3\nfourth = 4\n'
    )
    (folder / "key.pem").write_text(KEY + "a\nb\nc\nd\ne\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def git(folder: Path, *arguments: str, given: str = "") -> str:
    identity = ["-c", "user.name=tester", "-c", "user.email=tester@localhost"]
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, input=given).stdout


def applied(folder: Path, diff: str) -> Path:
    """A fresh checkout of the commit, to which git applies what was published."""
    clone = folder.parent / "clone"
    git(folder.parent, "clone", "-q", str(folder), str(clone))
    git(clone, "apply", "--check", given=diff)
    git(clone, "apply", given=diff)
    return clone


def published(folder: Path) -> str:
    """What is published; none of the secrets is in it."""
    diff = capture(folder).diff
    assert [name for name, value in SECRETS.items() if value in diff] == []
    assert "MIIEpAIBAAKCAQEA7bq0" not in diff
    return diff


def test_added_secrets_are_replaced_and_the_rest_is_applied(repository: Path) -> None:
    text = (repository / "train.py").read_text().replace("line_30 = 30\n", "line_30 = 31\n")
    added = [f"{name} = {value!r}" for name, value in SECRETS.items() if name not in {"uri", "npm"}]
    added += [SECRETS["npm"], f"dsn = 'postgresql://ann:{SECRETS['uri']}@host/runs'", f"digest = '{DIGEST}'"]
    (repository / "train.py").write_text(
        text + "\n".join(added) + f"\n{KEY}password = argument\ntoken: Optional[str] = None\n"
    )
    (repository / "new.py").write_text(f"first = 1\nslack_password = '{SECRETS['password']}'\n")
    git(repository, "add", "-N", "new.py")
    clone = applied(repository, published(repository))
    lines = (clone / "train.py").read_text().splitlines()
    assert lines[:60] == text.splitlines()
    assert len(lines) == len((repository / "train.py").read_text().splitlines())
    assert {
        f"github = '{HIDDEN}'",
        f"digest = '{DIGEST}'",
        "password = argument",
        "token: Optional[str] = None",
    } <= set(lines)
    assert f"dsn = 'postgresql://{HIDDEN}@host/runs'" in lines
    assert (clone / "new.py").read_text() == f"first = 1\nslack_password = '{HIDDEN}'\n"


def test_secret_beside_a_change_is_left_out_with_the_context(repository: Path) -> None:
    path = repository / "old.py"
    path.write_text(path.read_text().replace("first = 1", "first = 11"))
    (repository / "key.pem").write_text((repository / "key.pem").read_text().replace("b\n", "bb\n"))
    clone = applied(repository, published(repository))
    for name in ("old.py", "key.pem"):
        assert (clone / name).read_text() == (repository / name).read_text()


def test_removed_secret_leaves_its_hunk_out_and_says_so(repository: Path) -> None:
    path = repository / "old.py"
    path.write_text(path.read_text().replace(SECRETS["github"], "other"))
    (repository / "train.py").write_text("changed = 1\n" + (repository / "train.py").read_text())
    diff = published(repository)
    assert diff.startswith("# Left out: a change of old.py, line 1, beside or of what looks like a secret\n")
    clone = applied(repository, diff)
    assert (clone / "train.py").read_text() == (repository / "train.py").read_text()
    git(repository, "checkout", "train.py")
    assert published(repository).splitlines() == diff.splitlines()[:1]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.removesuffix("\n"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: "diff --git a/x b/x\n@@ -1 +1 @@\n--- a\n+++ b\n" + text,
        lambda text: text.replace("line_5 = 5\n", "").replace("line_40 = 40\n", "\n\n\f\x0b\x85\n"),
    ],
)
def test_diff_without_secrets_stays_as_it_is(repository: Path, change: object) -> None:
    assert callable(change)
    path = repository / "train.py"
    path.write_bytes(change(path.read_text()).encode())
    diff = git(repository, "diff", "HEAD", "--no-color")
    assert diff
    assert redacted_diff(diff) == diff


def test_settings_of_the_user_change_no_diff(repository: Path) -> None:
    """Rules for values without quotes go by a file's name; a `textconv` shows what a repository stores encrypted."""
    (repository / ".gitattributes").write_text("*.vault diff=vault\n")
    (repository / "conf").mkdir()
    (repository / "conf/a.yaml").write_text("lr: 1\n\n\n")
    (repository / "keys.vault").write_text("encrypted 1\nrest\n")
    git(repository, "add", ".")
    git(repository, "commit", "-q", "-m", "second")
    (repository / "conf/a.yaml").write_text(f"lr: 2\n\n\nmore: 1\npassword: {SECRETS['password']}\n")
    (repository / "keys.vault").write_text("encrypted 2\nrest\n")
    (repository / "train.py").write_text((repository / "train.py").read_text().replace("line_30 = 30\n", ""))
    as_git_is = git(repository, "diff", "HEAD")
    diff = published(repository)
    settings = ["noprefix", "mnemonicPrefix", "relative", "suppressBlankEmpty"]
    for name in settings:
        git(repository, "config", f"diff.{name}", "true")
    others = {"context": "0", "interHunkContext": "9", "submodule": "log", "external": "false", "wordRegex": "."}
    for name, value in {**others, "vault.textconv": f"echo {SECRETS['aws']}; echo"}.items():
        git(repository, "config", f"diff.{name}", value)
    git(repository, "config", "color.ui", "always")
    assert published(repository) == published(repository / "conf") == diff
    assert f"+password: {HIDDEN}\n" in diff
    assert diff == as_git_is.replace(SECRETS["password"], HIDDEN)
    assert HIDDEN in redacted_diff(as_git_is.replace(" a/", " ").replace(" b/", " ")), "names without a prefix"


def test_names_of_untracked_files_are_told_without_secrets(repository: Path) -> None:
    (repository / f"dump-{SECRETS['known']}.txt").touch()
    assert capture(repository).untracked == (f"dump-{HIDDEN}.txt",)


def test_detectors_are_loaded_when_there_are_changes_only() -> None:
    program = (
        "import sys, orchestrator.tracking.provenance as p; print(p.redacted_diff(''), 'detect_secrets' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
