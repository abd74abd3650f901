"""Redaction, references to secrets, and what places and servers may be named."""

from __future__ import annotations

import ast
import io
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.errors import StorageDeniedError, UserError
from orchestrator.core.security import redaction
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import HIDDEN, RedactedStream, redacted, redacted_values
from orchestrator.core.security.references import is_reference, resolve_secret
from orchestrator.core.security.secret_patterns import names_secret, points_to_secret
from orchestrator.core.security.secret_values import read_small, secret_values
from orchestrator.core.security.urls import check_url
from orchestrator.storage.open import (
    VARIABLE,
    check_allowed,
    find_objects,
    is_initialised,
    is_same_place,
    open_store,
)

ROOT = Path(__file__).parents[2]
SECRET = "correct horse battery"  # noqa: S105 - nobody's


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("DB_PASSWORD", SECRET)
    return SECRET


@pytest.mark.parametrize(
    "text",
    [
        "AKIAABCDEFGHIJKLMNOP",
        "ghp_" + "a" * 36,
        "hf_" + "b" * 34,
        "glpat-" + "c" * 20,
        "-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----",
        "password=hunter2222",
        "token: abcdef123456",
        'api_key": "abcdef123456',
        "Authorization: Bearer abcdef.123456-7890",
        "https://x/y?X-Amz-Signature=0123456789abcdef",
    ],
)
def test_redacted_secret_form_is_hidden(text: str) -> None:
    told = redacted(f"before {text} after")
    assert HIDDEN in told
    assert told.startswith("before ")
    assert all(word not in told for word in ("ABCDEFGH", "hunter", "abcdef", "0123456", "MIIE", "aaaa", "bbbb", "cccc"))


@pytest.mark.parametrize(
    "text",
    [
        "step 100 loss 0.1 tokens=12345678 num_tokens: 12345678a",
        "tokenizer: bpe32000abc",
        "RAY_AUTH_TOKEN_PATH=/tmp/x/ray_token",
        "set AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; a token: see docs/security.md",
        "pretrain-resnet-18-depth2-seed0-1c73df961811dd5f.1 of s3://bucket/a@b",
        "postgresql://host/runs",
        "",
    ],
)
def test_redacted_ordinary_text_stays_as_it_is(text: str) -> None:
    assert redacted(text) == text


def test_redacted_uri_keeps_what_is_no_secret() -> None:
    assert redacted("postgresql://ann:hunter2@host/runs failed") == f"postgresql://{HIDDEN}@host/runs failed"


@given(before=st.text(max_size=30), after=st.text(max_size=30))
def test_redacted_known_value_is_hidden_in_any_text(before: str, after: str) -> None:
    redaction.add_secret("a-value-that-is-known")
    assert "a-value-that-is-known" not in redacted(f"{before}a-value-that-is-known{after}")


def test_redacted_program_text_keeps_names_and_loses_values(known: str) -> None:
    told = redacted_values(f"+ password: Optional[str123]\n+ PASSWORD = '{known}'\n+ TOKEN = 'ghp_{'a' * 36}'\n")
    assert told == f"+ password: Optional[str123]\n+ PASSWORD = '{HIDDEN}'\n+ TOKEN = '{HIDDEN}'\n"


def test_known_values_are_found_where_the_environment_says(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[x]\naws_secret_access_key = from-aws-file\n")
    (tmp_path / "token").write_text("from-token-file\n")
    environment = {
        "HOME": str(tmp_path),
        "MY_TOKEN_PATH": str(tmp_path / "token"),
        "URL": "amqp://ann:from%2Duri-00@host",
        "MY_SECRET": "from-variable",
        "SHORT_TOKEN": "abc",
        "TOKENIZERS_PARALLELISM": "false-false",
        "PWD": "/home/some/where",
    }
    found = secret_values(environment, read_small)
    assert {"from-aws-file", "from-token-file", "from-variable", "from%2Duri-00", "from-uri-00"} <= found
    assert not {"abc", "false-false", "/home/some/where", str(tmp_path / "token")} & found


def test_known_value_that_appears_later_is_hidden_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert redacted("a-later-secret") == "a-later-secret"
    monkeypatch.setenv("LATER_SECRET", "a-later-secret")
    assert redacted("a-later-secret") == HIDDEN
    monkeypatch.delenv("LATER_SECRET")
    assert redacted("a-later-secret") == "a-later-secret"


def test_stream_secret_in_pieces_is_hidden_and_lines_go_on_at_once(known: str) -> None:
    target = io.StringIO()
    stream = RedactedStream(target)
    for sign in f"x {known} y\n":
        stream.write(sign)
    assert target.getvalue() == f"x {HIDDEN} y\n"
    stream.write(f"50%\r{known}")
    assert target.getvalue() == f"x {HIDDEN} y\n50%\r"
    stream.finish()
    assert target.getvalue() == f"x {HIDDEN} y\n50%\r{HIDDEN}"


def test_stream_private_key_line_by_line_is_hidden_to_its_end() -> None:
    target = io.StringIO()
    stream = RedactedStream(target)
    for line in ("-----BEGIN PRIVATE KEY-----", "MIIEabc", "def", "-----END PRIVATE KEY-----", "after"):
        stream.write(f"{line}\n")
    assert target.getvalue() == f"{HIDDEN}\n" * 4 + "after\n"


def test_install_log_records_and_uncaught_errors_are_redacted() -> None:
    program = (
        "import logging, os\n"
        "from orchestrator.core.security import redaction\n"
        "os.environ['X_SECRET'] = 'correct horse battery'\n"
        "redaction.install(); redaction.install()\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "logging.info('say %s', os.environ['X_SECRET'])\n"
        "try:\n    raise ValueError(os.environ['X_SECRET'])\n"
        "except ValueError:\n    logging.exception('caught')\n"
        "logging.info('%d', 'bad argument')\n"
        "raise ValueError(os.environ['X_SECRET'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert SECRET not in done.stderr.replace("'correct horse battery'", "")
    assert done.stderr.count(HIDDEN) >= 3
    assert f"ValueError: {HIDDEN}" in done.stderr.splitlines()[-1]


def test_record_factory_without_secrets_leaves_records_alone() -> None:
    record = redaction._cleaned_record(logging.LogRecord("a", 20, "f", 1, "epoch %d", (3,), None))
    assert (record.msg, record.args) == ("epoch %d", (3,))


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "DB_PASSWORD", "SMTP_PWD", "MY_CREDENTIALS"])
def test_names_of_secrets_are_known(name: str) -> None:
    assert names_secret(name)
    assert not points_to_secret(name)
    assert points_to_secret(f"{name}_FILE")


def test_reference_is_resolved_and_hidden_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "a-hook-of-mine")
    (tmp_path / "key").write_text("a-key-of-mine\n")
    assert resolve_secret("${env:HOOK}") == "a-hook-of-mine"
    assert resolve_secret(f"${{file:{tmp_path / 'key'}}}") == "a-key-of-mine"
    assert redacted("a-hook-of-mine a-key-of-mine") == f"{HIDDEN} {HIDDEN}"
    assert is_reference("${env:HOOK}")
    assert not is_reference("a-hook-of-mine")


@pytest.mark.parametrize(
    "reference",
    [
        "a-literal-secret",
        "${env:NOT_SET_ANYWHERE}",
        "${file:relative}",
        "${file:/nonexistent}",
        "${vault:x}",
        "${file:/dev/zero}",
    ],
)
def test_reference_to_nothing_is_refused_without_showing_a_literal(reference: str) -> None:
    with pytest.raises(UserError) as caught:
        resolve_secret(reference, what="the webhook's key")
    assert "the webhook's key" in str(caught.value)
    assert "a-literal-secret" not in str(caught.value)


def test_reference_to_aws_is_asked_and_its_errors_quote_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import boto3

    class Client:
        def get_secret_value(self, SecretId: str) -> dict[str, str]:
            return {"SecretString": '{"password": "from-aws-manager"}'} if SecretId == "lab/mlflow" else {}

    monkeypatch.setattr(boto3.session.Session, "client", lambda *_: Client())
    assert resolve_secret("${aws-secretsmanager:lab/mlflow#password}") == "from-aws-manager"
    with pytest.raises(UserError, match="no field"):
        resolve_secret("${aws-secretsmanager:lab/mlflow#other}")
    with pytest.raises(UserError, match="AWS"):
        resolve_secret("${aws-secretsmanager:other}")


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:5000",
        "https://mlflow.example.org/x?y=z",
        "http://[::1]:80/",
        "http://[64:ff9b::93.184.216.34]/",
        "http://[64:ff9b:1::93.184.216.34]/",
        "http://[2001:db8::1]/",
    ],
)
def test_url_of_a_server_is_allowed(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("uri", "is_allowed"),
    [
        ("s3://lab/public", True),
        ("s3://lab/public/x/y", True),
        ("s3://lab/public-not", False),
        ("s3://lab", False),
        ("s3://other/public", False),
        ("s3://anything", False),
        ("file:///etc", False),
    ],
)
def test_allowed_uris_are_compared_part_by_part(uri: str, is_allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "s3://lab/public, file:///data")
    if is_allowed:
        check_allowed(uri)
        return
    with pytest.raises(StorageDeniedError, match=VARIABLE):
        check_allowed(uri)
    with pytest.raises(StorageDeniedError):
        open_store(uri)
    with pytest.raises(StorageDeniedError):
        is_initialised(uri)


@pytest.mark.parametrize("path", ["team-a/../team-b", "team-a/%2e%2e/team-b", "team-a/..%2fteam-b"])
def test_allowed_uris_hold_no_path_that_leads_out_of_them(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "https://host/team-a")
    check_allowed("https://host/team-a/x..y")
    with pytest.raises(StorageDeniedError, match=VARIABLE):
        check_allowed(f"https://host/{path}")


def test_allowed_uris_follow_links_on_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "secret").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "secret")
    monkeypatch.setenv(VARIABLE, f"{(tmp_path / 'data').as_uri()} s3://")
    check_allowed(f"{(tmp_path / 'data').as_uri()}/deeper")
    check_allowed("s3://any/thing")
    with pytest.raises(StorageDeniedError):
        check_allowed(f"{(tmp_path / 'data').as_uri()}/link/x")
    with pytest.raises(StorageDeniedError):
        open_store(next(iter(find_objects([f"{(tmp_path / 'secret').as_uri()}/a.tar"]).values()))[0])


def test_places_are_the_same_whatever_spells_them(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "store")
    assert is_same_place((tmp_path / "store").as_uri(), f"{(tmp_path / 'link').as_uri()}/")
    assert is_same_place("s3://lab/a", "S3://lab/a/")
    for uri, other in [("s3://lab/a", "s3://lab/a/b"), ("s3://lab", "s3://second"), ("s3://lab/a", "file:///lab/a")]:
        assert not is_same_place(uri, other)
        assert not is_same_place(other, uri)


def test_json_of_others_is_a_value_error_whatever_is_wrong() -> None:
    for content in (b"[" * 100_000, b"\xff\xfe", b"{", b"9" * 100_000):
        with pytest.raises(ValueError, match=r"\w"):
            parse_json(content)
    with pytest.raises(ValueError, match="at most"):
        parse_json(b'"xxxxxxxxxx"', max_bytes=5)
    assert parse_json('{"a": [1]}') == {"a": [1]}


def test_no_image_is_opened_in_a_format_whose_parser_may_run_a_program() -> None:
    files = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "workloads").rglob("*.py")}
    calls = {
        f"{path.name}:{call.lineno}": {keyword.arg for keyword in call.keywords}
        for path, tree in files.items()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Image.open"
    }
    assert len(calls) > 4
    assert [place for place, given in calls.items() if "formats" not in given] == []
