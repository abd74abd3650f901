"""References to secrets: files and settings name the place of a secret, and only the code that uses it reads it.

``${env:NAME}``, ``${file:/path}`` (also what Vault Agent, Kubernetes and the CSI drivers of clouds mount),
``${aws-secretsmanager:NAME}``, ``${aws-secretsmanager:NAME#FIELD}`` and ``${aws-ssm:NAME}``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.core.errors import UserError
from orchestrator.core.security.json_text import parse_json
from orchestrator.core.security.redaction import add_secret

_REFERENCE = re.compile(r"\$\{(env|file|aws-secretsmanager|aws-ssm):([^}]+)\}")
_FORMS = "${env:NAME}, ${file:/path}, ${aws-secretsmanager:NAME#FIELD} or ${aws-ssm:NAME}"
_MAX_BYTES = 64 * 1024


def is_reference(text: str) -> bool:
    """Whether a text is a reference to a secret, and no secret itself."""
    return _REFERENCE.fullmatch(text) is not None


def resolve_secret(reference: str, *, what: str = "the secret") -> str:
    """The secret that a reference names; from now on it is hidden in all output of this process.

    Raises:
        UserError: the text is no reference (it is not shown: it may be the secret itself), or nothing is there.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise UserError(f"{what} is not given by reference: files are copied and shared; write {_FORMS}")
    secret = _READERS[found.group(1)](found.group(2), what)
    if not secret:
        raise UserError(f"{what} is empty at {reference}; write it there")
    add_secret(secret)
    return secret


def _from_environment(name: str, what: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise UserError(f"{what}: the environment variable {name} is not set; set it where this runs")
    return value


def _from_file(path: str, what: str) -> str:
    file = Path(path).expanduser()
    if not file.is_absolute():
        raise UserError(f"{what}: {path} is not absolute, so that it depends on where this runs; write the whole path")
    try:
        if not file.exists():
            raise UserError(f"{what}: {path} does not exist; check the path")
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            raise UserError(f"{what}: {path} is not a file of at most {_MAX_BYTES} bytes; check the path")
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what}: {path} cannot be read ({type(error).__name__}); check its permissions") from None


def _from_secrets_service(name: str, what: str) -> str:
    name, _, field = name.partition("#")
    text = _ask_aws("secretsmanager", lambda client: str(client.get_secret_value(SecretId=name)["SecretString"]), what)
    if not field:
        return text
    try:
        fields: Mapping[str, object] = parse_json(text)
        return str(fields[field])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{what}: the secret {name} has no field {field!r}; check its JSON") from None


def _from_parameter_store(name: str, what: str) -> str:
    return _ask_aws(
        "ssm", lambda client: str(client.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]), what
    )


def _ask_aws(service: str, ask: Callable[..., str], what: str) -> str:
    import boto3  # a third of a second
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return ask(boto3.session.Session().client(service))  # type: ignore[call-overload]
    except (BotoCoreError, ClientError, KeyError) as error:
        # Not `from error`: botocore's errors may quote parts of requests.
        code = error.response["Error"]["Code"] if isinstance(error, ClientError) else type(error).__name__
        raise UserError(
            f"{what}: AWS ({service}) did not give it: {code}; check name, region and permissions"
        ) from None


_READERS = {
    "env": _from_environment,
    "file": _from_file,
    "aws-secretsmanager": _from_secrets_service,
    "aws-ssm": _from_parameter_store,
}
