"""Where settings come from: environment, ``.env``, the project's file, the user's file, defaults; the first one counts.

Every setting is an environment variable. What a file says is put into this process's environment where the environment
itself says nothing, so that all who read it (S3 clients, Ray, MLflow, child processes) agree.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from orchestrator.errors import SpecError

PROJECT_FILE = "orchestrator.toml"
DOTENV_FILE = ".env"
_USER_FILE = "orchestrator/config.toml"
_HIDDEN = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    """In files."""
    variable: str
    """In the environment."""
    meaning: str
    default: str = ""
    aliases: tuple[str, ...] = ()
    """Other variables that mean the same; ``variable`` goes first."""


SETTINGS = (
    Setting(
        name="directory",
        variable="ORCHESTRATOR_DIRECTORY",
        meaning="the project's directory: store, MLflow database, stack",
        default=".orchestrator",
    ),
    Setting(name="store", variable="ORCHESTRATOR_STORE", meaning="object store URI", default="store/ in directory"),
    Setting(
        name="store_shared",
        variable="ORCHESTRATOR_STORE_SHARED",
        meaning="whether all hosts of the cluster see the directory of a file:// store",
        default="false",
    ),
    Setting(
        name="namespace",
        variable="ORCHESTRATOR_NAMESPACE",
        meaning="Ray namespace of controller and runners",
        default="orchestrator",
    ),
    Setting(
        name="ray_address",
        variable="RAY_ADDRESS",
        meaning="an existing cluster to use; without one a local stack is started",
        aliases=("ORCHESTRATOR_RAY_ADDRESS",),
    ),
    Setting(
        name="mlflow_tracking_uri",
        variable="MLFLOW_TRACKING_URI",
        meaning="where runs are published",
        default="mlflow.db in directory",
    ),
    Setting(
        name="s3_endpoint_url",
        variable="AWS_ENDPOINT_URL_S3",
        meaning="S3-compatible server of all S3 clients",
        default="AWS",
        aliases=("AWS_ENDPOINT_URL",),
    ),
    Setting(name="aws_profile", variable="AWS_PROFILE", meaning="profile of credentials", default="default"),
    Setting(name="aws_region", variable="AWS_REGION", meaning="region", aliases=("AWS_DEFAULT_REGION",)),
    Setting(
        name="s3_allowed_buckets",
        variable="ORCHESTRATOR_S3_ALLOWED_BUCKETS",
        meaning="comma-separated; any other bucket is refused",
        default="all",
    ),
)
"""What the files may say."""
_APPLIED: list[Resolved] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A setting's value, and who said so."""

    setting: Setting
    value: str
    """As in the environment; empty = the default counts."""
    origin: str
    """``environment RAY_ADDRESS``, ``.env``, a file, or ``default``."""

    @property
    def shown(self) -> str:
        """The value as it may be printed: without passwords."""
        return without_password(self.value) if self.value else self.setting.default


def user_file(environment: Mapping[str, str]) -> Path:
    """The user's file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".config")
    return Path(base, _USER_FILE)


def resolve(directory: Path, environment: Mapping[str, str]) -> list[Resolved]:
    """All settings with their origins. Pure but for the files it reads.

    Raises:
        SpecError: a file cannot be read, or says something that is no setting.
    """
    dotenv = _read_dotenv(directory / DOTENV_FILE)
    project, user = directory / PROJECT_FILE, user_file(environment)
    files = ((PROJECT_FILE, _read_toml(project)), (str(user), _read_toml(user)))
    return [_resolve(setting, environment, dotenv, files) for setting in SETTINGS]


def apply(directory: Path, environment: MutableMapping[str, str]) -> list[Resolved]:
    """Put what files say into the environment, which goes first; of ``.env`` also variables that are no settings.

    Raises:
        SpecError: as ``resolve``.
    """
    found = resolve(directory, environment)
    for name, value in _read_dotenv(directory / DOTENV_FILE).items():
        environment.setdefault(name, value)
    for resolved in found:
        if resolved.value and not any(name in environment for name in _names(resolved.setting)):
            environment[resolved.setting.variable] = resolved.value
    _APPLIED[:] = found
    return found


def applied() -> list[Resolved]:
    """What the last ``apply`` of this process found: afterwards, the environment hides where values come from."""
    return list(_APPLIED)


def without_password(text: str) -> str:
    """A URI whose password, if there is one, is hidden."""
    parts = urlsplit(text)
    if parts.password is None:
        return text
    user, host = parts.username or "", parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{_HIDDEN}@{host}"))


def _resolve(
    setting: Setting,
    environment: Mapping[str, str],
    dotenv: Mapping[str, str],
    files: tuple[tuple[str, Mapping[str, str]], ...],
) -> Resolved:
    for name in _names(setting):
        if environment.get(name):
            return Resolved(setting=setting, value=environment[name], origin=f"environment {name}")
    for name in _names(setting):
        if dotenv.get(name):
            return Resolved(setting=setting, value=dotenv[name], origin=DOTENV_FILE)
    for origin, content in files:
        if setting.name in content:
            return Resolved(setting=setting, value=content[setting.name], origin=origin)
    return Resolved(setting=setting, value="", origin="default")


def _names(setting: Setting) -> tuple[str, ...]:
    return (setting.variable, *setting.aliases)


def _read_dotenv(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        return {name: value for name, value in dotenv_values(path).items() if value is not None}
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError((f"{path}: cannot be read: {error}",)) from error


def _read_toml(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError((f"{path}: cannot be read as TOML: {error}",)) from error
    problems = [problem for name, value in content.items() if (problem := _problem(name, value))]
    if problems:
        raise SpecError(tuple(f"{path}: {problem}" for problem in problems))
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in content.items()}


def _problem(name: str, value: object) -> str:
    """What is wrong with a line of a file; empty if nothing is."""
    known = [setting.name for setting in SETTINGS]
    if name not in known:
        from orchestrator.spec.suggest import did_you_mean  # half a second of imports, which --help must not take

        return f"{name!r} is no setting; {did_you_mean(name, known)}"
    if not isinstance(value, str | bool | int | float):
        return f"{name} is {value!r}; write a text, a number, true or false"
    return ""
