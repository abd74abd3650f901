"""All settings, and their sources: environment, ``.env``, the project's file, the user's file, defaults.

The first source that has a setting is used. A *context* is a named set of settings in the user's file; it comes
directly before the source that selected it: a flag, the environment, or a file.

Every setting is an environment variable. Values of files are put into this process's environment if the variable is not
set, so that all readers (S3 clients, Ray, MLflow, child processes) agree. Every command needs this
module, ``--help`` too: it imports nothing heavy.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from orchestrator.core.errors import SpecError
from orchestrator.core.security.references import is_reference
from orchestrator.core.suggest import did_you_mean
from orchestrator.services.setting_values import as_reference, problem_of_value, without_password

PROJECT_FILE = "orchestrator.toml"
DOTENV_FILE = ".env"
CHOICE = "context"
"""Key of the context in use, in TOML files."""
CONTEXTS = "contexts"
"""Table of contexts in the user's file."""
_USER_FILE = "orchestrator/config.toml"
CONTEXT_VARIABLE = "ORCHESTRATOR_CONTEXT"
CONTEXT_FLAG = "--context"
NO_CONTEXT = "none"
"""Name that selects no context, whatever other places choose."""
_OF_PROJECT = frozenset({DOTENV_FILE, PROJECT_FILE})
"""Places of settings that come with a project."""
_IN_USERS_FILE = (
    "put it into your own file: orchestrator config set-context NAME SETTING=VALUE ... "
    "(for a token: ray_token=file:/PATH)"
)
_NOT_OF_PROJECT = "a file that comes with a project, perhaps somebody else's, must not"
_RAY_MODE, _RAY_ON_KUBERNETES = "RAY_AUTH_MODE", "RAY_ENABLE_K8S_TOKEN_AUTH"
_POD_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path
_COPIED = re.compile(r"\$\{[^}:]*(?::-[^}]*)?\}")
"""What other programs replace in a ``.env`` by a variable; references to secrets (``${env:NAME}``) are not."""
_APPLIED: list[Resolved] = []
_FLAGGED: list[str] = []


class Code(StrEnum):
    """Which code a submit through a dashboard runs."""

    IMAGE = "image"
    """The code that is installed in the cluster's image."""
    WHEEL = "wheel"
    """The code of the command that submits it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting."""

    name: str
    """In files."""
    variable: str
    """In the environment."""
    meaning: str
    default: str = ""
    """The default value."""
    unset: str = ""
    """For people: the meaning of an unset setting without a default value."""
    aliases: tuple[str, ...] = ()
    """Other variables that mean the same; ``variable`` goes first."""
    choices: tuple[str, ...] = ()
    """All values that it can have; empty = any."""
    names_cluster: bool = False
    """Whether it names the cluster: a context with any of these settings defines all of them."""

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables for the setting; the first one that is set counts."""
        return (self.variable, *self.aliases)


RAY_TOKEN = Setting(
    name="ray_token",
    variable="ORCHESTRATOR_RAY_TOKEN",
    meaning="where the cluster's token is: file:/PATH, env:NAME, aws-secretsmanager:NAME or aws-ssm:NAME",
    aliases=("RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN"),
    names_cluster=True,
)
SETTINGS = (
    Setting(
        name="directory",
        variable="ORCHESTRATOR_DIRECTORY",
        meaning="the project's directory: store, MLflow database, stack",
        default=".orchestrator",
    ),
    Setting(name="store", variable="ORCHESTRATOR_STORE", meaning="object store URI", unset="store/ in directory"),
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
        meaning="an existing cluster to use; without any a local stack is started",
        aliases=("ORCHESTRATOR_RAY_ADDRESS",),
        names_cluster=True,
    ),
    Setting(
        name="dashboard_address",
        variable="RAY_API_SERVER_ADDRESS",
        meaning="a cluster to submit to through its dashboard: https://host:port",
        aliases=("ORCHESTRATOR_DASHBOARD_ADDRESS",),
        names_cluster=True,
    ),
    Setting(
        name="cluster",
        variable="ORCHESTRATOR_CLUSTER",
        meaning="name of the cluster in the store; with no address, submits go there through the store alone",
        unset="by its address",
        names_cluster=True,
    ),
    RAY_TOKEN,
    Setting(
        name="code",
        variable="ORCHESTRATOR_CODE",
        meaning="what a submit through the dashboard runs: image (what is installed there) or wheel (this code)",
        default="image",
        choices=("image", "wheel"),
    ),
    Setting(
        name="mlflow_tracking_uri",
        variable="MLFLOW_TRACKING_URI",
        meaning="where runs are published",
        unset="mlflow.db in directory",
    ),
    Setting(
        name="s3_endpoint_url",
        variable="AWS_ENDPOINT_URL_S3",
        meaning="S3-compatible server of all S3 clients",
        unset="AWS",
        aliases=("AWS_ENDPOINT_URL",),
    ),
    Setting(name="aws_profile", variable="AWS_PROFILE", meaning="profile of credentials", default="default"),
    Setting(name="aws_region", variable="AWS_REGION", meaning="region", aliases=("AWS_DEFAULT_REGION",)),
    Setting(
        name="s3_allowed_buckets",
        variable="ORCHESTRATOR_S3_ALLOWED_BUCKETS",
        meaning="comma-separated; any other bucket is refused",
        unset="all",
    ),
    Setting(
        name="prices",
        variable="ORCHESTRATOR_PRICES",
        meaning="YAML table of prices, as --prices FILE of plan, submit, forecast, status and report",
    ),
    Setting(
        name="notify_file",
        variable="ORCHESTRATOR_NOTIFY_FILE",
        meaning="YAML file with `notify:` for all sweeps of the cluster, read by its controller",
    ),
    Setting(
        name="allowed_uris",
        variable="ORCHESTRATOR_ALLOWED_URIS",
        meaning="URIs, below one of which every store, shard and file of a sweep must be",
        unset="all",
    ),
)
"""All settings."""


def setting_named(name: str) -> Setting | None:
    """The setting of a name."""
    return next((setting for setting in SETTINGS if setting.name == name), None)


def value_in(setting: Setting, variables: Mapping[str, str], variable: str) -> str:
    """The value of a setting from a variable: Ray's variables for tokens become references, never the token."""
    value = variables.get(variable, "")
    if setting is RAY_TOKEN and value:
        if variable == "RAY_AUTH_TOKEN_PATH":
            return f"file:{Path(value).expanduser().absolute()}"
        if variable == "RAY_AUTH_TOKEN":
            return "env:RAY_AUTH_TOKEN"
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """The content of a TOML file."""

    origin: str
    """Its name in messages."""
    values: Mapping[str, str] = field(default_factory=dict)
    """By name of the setting."""
    choice: str = ""
    """Name of the chosen context; empty = none."""
    contexts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Settings by name of the context."""


def user_file(environment: Mapping[str, str]) -> Path:
    """The user's file, which need not exist."""
    base = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME", "~")).expanduser() / ".config")
    return Path(base, _USER_FILE)


def read_user_file(path: Path) -> SettingsFile:
    """The user's file: settings, contexts, and the context in use.

    Raises:
        SpecError: it cannot be read, or says something that is not a setting.
    """
    content = _read_toml(path)
    origin, tables = str(path), content.pop(CONTEXTS, {})
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise SpecError((f"{origin}: {CONTEXTS} is not made of tables; write [{CONTEXTS}.NAME] with settings below",))
    choice = _choice_in(content, origin)
    contexts = {name: _values(table, f"{origin}: {CONTEXTS}.{name}") for name, table in tables.items()}
    return SettingsFile(origin=origin, values=_values(content, origin), choice=choice, contexts=contexts)


def read_project_file(path: Path) -> SettingsFile:
    """The project's file: settings, and perhaps the name of a context of the user.

    It comes with the project, perhaps somebody else's: it may neither define a context nor name a token, which would
    send the user's to a server of its choice.

    Raises:
        SpecError: as ``read_user_file``.
    """
    content = _read_toml(path)
    for name in (CONTEXTS, RAY_TOKEN.name):
        if name in content:
            raise SpecError((f"{path}: {name} is not allowed in a project's file; {_IN_USERS_FILE}",))
    choice = _choice_in(content, str(path))
    return SettingsFile(origin=PROJECT_FILE, values=_values(content, str(path)), choice=choice)


def read_dotenv(path: Path) -> dict[str, str]:
    """Variables of a ``.env`` file; none without the file.

    Raises:
        SpecError: it cannot be read, has a line that is not ``NAME=VALUE``, or would copy variables of the environment,
            perhaps secrets, into its own.
    """
    if not path.is_file():
        return {}
    from dotenv.parser import parse_stream

    try:
        with path.open(encoding="utf-8") as lines:
            found = list(parse_stream(lines))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError((f"{path}: cannot be read: {error}",)) from error
    if wrong := [str(binding.original.line) for binding in found if binding.error]:
        # Not quoted: the line may hold a secret.
        raise SpecError((f"{path}: line {', '.join(wrong)}: this is not NAME=VALUE",))
    values = {binding.key: binding.value for binding in found if binding.key and binding.value is not None}
    if copies := [name for name, value in values.items() if _COPIED.search(value)]:
        problem = (
            f"{path}: ${{NAME}} in the value of {', '.join(copies)} is not replaced, because this could copy a secret "
            "of the environment; write the value itself, or remove the line and set the variable in the environment"
        )
        raise SpecError((problem,))
    return values


def problem_of(name: str, value: object) -> str:
    """The error in a line of a file; empty if there is none."""
    known = [setting.name for setting in SETTINGS]
    if name not in known:
        return f"{name!r} is not a setting; {did_you_mean(name, known)}"
    if not isinstance(value, str | bool | int | float):
        return f"{name} is {value!r}; write a text, a number, true or false"
    if name == RAY_TOKEN.name and not is_reference(as_reference(str(value))):
        # Never shown: it may well be the token.
        return f"{name} is not file:/PATH or env:NAME; tokens are named, never written down here"
    return ""


def _choice_in(content: dict[str, Any], origin: str) -> str:
    choice = content.pop(CHOICE, "")
    if not isinstance(choice, str):
        raise SpecError((f"{origin}: {CHOICE} is {choice!r}; write the name of a context",))
    return choice


def _values(content: Mapping[str, Any], origin: str) -> dict[str, str]:
    problems = [problem for name, value in content.items() if (problem := problem_of(name, value))]
    if problems:
        raise SpecError(tuple(f"{origin}: {problem}" for problem in problems))
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in content.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError((f"{path}: cannot be read as TOML: {error}",)) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A setting's value and its source."""

    setting: Setting
    value: str
    """As in the environment; empty = the default counts."""
    origin: str
    """``environment RAY_ADDRESS``, ``.env``, a file, ``context prod (--context)``, or ``default``."""
    is_of_context: bool = False

    @property
    def shown(self) -> str:
        """The value as it may be printed: without passwords; for an unset setting its meaning."""
        return self.known or self.setting.unset

    @property
    def known(self) -> str:
        """The value that is set or the default's, without passwords; empty if there is none."""
        return without_password(self.value) if self.value else self.setting.default


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenContext:
    """The context in use."""

    name: str
    place: str
    """``--context``, ``environment ORCHESTRATOR_CONTEXT``, ``.env`` or a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One source of settings."""

    place: str
    choice: str = ""
    variables: Mapping[str, str] | None = None
    """Of the environment or ``.env``; None = it is a file."""
    values: Mapping[str, str] = field(default_factory=dict)
    """By name of the setting, of a file."""

    def value_of(self, setting: Setting) -> tuple[str, str]:
        """Value and origin; empty if it has none."""
        if self.variables is None:
            return self.values.get(setting.name, ""), self.place
        for variable in setting.variables:
            if value := value_in(setting, self.variables, variable):
                return value, f"{self.place} {variable}" if self.place == "environment" else self.place
        return "", ""


def resolve(directory: Path, environment: Mapping[str, str], context: str = "") -> list[Resolved]:
    """All settings with their origins. Pure but for the files it reads.

    Args:
        directory: the current one.
        environment: variables.
        context: name of a context, as the flag gave it.

    Raises:
        SpecError: a file cannot be read, or says something that is not a setting; or there is no such context; or a
            file of the project decides where the user's token goes.
    """
    layers, user = _layers(directory, environment, context)
    choice = _choice(layers)
    context_values = _context_values(choice, user)
    found = [_resolve(setting, layers, choice, context_values) for setting in SETTINGS]
    by_name = {each.setting.name: each for each in found}
    problems = [*map(_problem, found), _token_problem(by_name, layers)]
    if any(problems):
        raise SpecError(tuple(problem for problem in problems if problem))
    return found


def chosen_context(directory: Path, environment: Mapping[str, str], context: str = "") -> ChosenContext | None:
    """The context in use, and where it was chosen; None without one. Raises ``SpecError`` as ``resolve``."""
    layers, user = _layers(directory, environment, context)
    choice = _choice(layers)
    _context_values(choice, user)
    return choice


def apply(directory: Path, environment: MutableMapping[str, str], context: str = "") -> list[Resolved]:
    """Put settings of files into the environment if unset; from ``.env`` also variables that are no settings.

    Raises:
        SpecError: as ``resolve``.
    """
    found = resolve(directory, environment, context)
    for name, value in read_dotenv(directory / DOTENV_FILE).items():
        environment.setdefault(name, value)
    for resolved in found:
        _apply(resolved, environment)
    if context:
        environment[CONTEXT_VARIABLE] = context  # child processes use the same place
    _APPLIED[:], _FLAGGED[:] = found, [context]
    return found


def applied() -> list[Resolved]:
    """Result of the last ``apply`` of this process: afterwards, the environment does not show the sources of values."""
    return list(_APPLIED)


def flagged_context() -> str:
    """The context that the flag of this process chose, as long as its environment names it; empty without one."""
    context = "".join(_FLAGGED)
    return context if os.environ.get(CONTEXT_VARIABLE) == context else ""


def _apply(resolved: Resolved, environment: MutableMapping[str, str]) -> None:
    setting, value = resolved.setting, resolved.value
    if resolved.is_of_context:
        for variable in setting.variables:
            if value != f"env:{variable}":
                environment.pop(variable, None)
    # A reference to a token has a variable of its own beside those of Ray, which hold the token or its path.
    if value and (setting is RAY_TOKEN or not any(environment.get(variable) for variable in setting.variables)):
        environment[setting.variable] = value


def take_flag(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The context that a command line names, wherever on it, and the line without it.

    A flag without a name stays on the line; see ``lacks_name``.
    """
    rest, context = list(arguments), ""
    end = rest.index("--") if "--" in rest else len(rest)
    for position in range(end - 1, -1, -1):
        if rest[position] != f"{CONTEXT_FLAG}=" and rest[position].startswith(f"{CONTEXT_FLAG}="):
            named = rest.pop(position).partition("=")[2]
            context = context or named
        elif rest[position] == CONTEXT_FLAG and position + 1 < end and rest[position + 1]:
            context = context or rest[position + 1]
            del rest[position : position + 2]
    return context, rest


def lacks_name(arguments: Sequence[str]) -> bool:
    """Whether what ``take_flag`` left has the flag without a name, as an unset variable of a shell leaves it."""
    return bool({CONTEXT_FLAG, f"{CONTEXT_FLAG}="} & {*arguments[: [*arguments, "--"].index("--")]})


def _layers(directory: Path, environment: Mapping[str, str], context: str) -> tuple[list[_Layer], SettingsFile]:
    """The sources in their order, and the user's file, which has the contexts."""
    dotenv = read_dotenv(directory / DOTENV_FILE)
    project, user = read_project_file(directory / PROJECT_FILE), read_user_file(user_file(environment))
    layers = [
        _Layer(place=CONTEXT_FLAG, choice=context),
        _Layer(place="environment", choice=environment.get(CONTEXT_VARIABLE, ""), variables=environment),
        _Layer(place=DOTENV_FILE, choice=dotenv.get(CONTEXT_VARIABLE, ""), variables=dotenv),
        *(_Layer(place=file.origin, choice=file.choice, values=file.values) for file in (project, user)),
    ]
    return layers, user


def _choice(layers: Sequence[_Layer]) -> ChosenContext | None:
    for layer in layers:
        if layer.choice:
            place = f"{layer.place} {CONTEXT_VARIABLE}" if layer.place == "environment" else layer.place
            return None if layer.choice == NO_CONTEXT else ChosenContext(name=layer.choice, place=place)
    return None


def _context_values(choice: ChosenContext | None, user: SettingsFile) -> Mapping[str, str]:
    if choice is None:
        return {}
    if choice.name not in user.contexts:
        hint = did_you_mean(choice.name, [*user.contexts]) if user.contexts else "there is none yet"
        without = f"{CONTEXT_FLAG} {NO_CONTEXT}"
        how = f"make it with `orchestrator {without} config set-context`, or go without: {without}"
        problem = f"{choice.place} names the context {choice.name!r}, which {user.origin} lacks: {hint}; {how}"
        raise SpecError((problem,))
    return user.contexts[choice.name]


def _resolve(
    setting: Setting, layers: Sequence[_Layer], choice: ChosenContext | None, context_values: Mapping[str, str]
) -> Resolved:
    for layer, is_chooser in _in_order(layers, choice):
        if is_chooser and choice is not None:
            origin = f"context {choice.name} ({choice.place})"
            if setting.name in context_values:
                return Resolved(setting=setting, value=context_values[setting.name], origin=origin, is_of_context=True)
            if setting.names_cluster and any(
                known.names_cluster and known.name in context_values for known in SETTINGS
            ):
                # Else a variable left from another cluster would direct a part of the command there.
                return Resolved(setting=setting, value="", origin=origin, is_of_context=True)
        value, origin = layer.value_of(setting)
        if value:
            return Resolved(setting=setting, value=value, origin=origin)
    return Resolved(setting=setting, value="", origin="default")


def _problem(resolved: Resolved) -> str:
    # Other variables are other programs', too: whatever needs the value refuses it.
    is_ours = not resolved.origin.startswith("environment ") or resolved.origin.startswith("environment ORCHESTRATOR_")
    problem = problem_of_value(resolved.setting, resolved.value) if resolved.value and is_ours else ""
    return f"{resolved.origin}: {problem}" if problem else ""


def _token_problem(found: Mapping[str, Resolved], layers: Sequence[_Layer]) -> str:
    """The error where a file of the project would send a secret of the user away; empty if there is none."""
    token, address = found[RAY_TOKEN.name], found["ray_address"]
    is_joined = bool(address.value) and not address.value.startswith(("http://", "https://"))
    address = address if address.value else found["dashboard_address"]
    if token.origin == DOTENV_FILE and not _is_held(token.value, layers):
        return (
            f"{DOTENV_FILE} names a token that is elsewhere: {_NOT_OF_PROJECT} choose which secret is sent; name the "
            f"token in a context of yours, see: orchestrator config set-context --help, or set {RAY_TOKEN.variable}"
        )
    place = token.origin if token.value else _token_that_ray_finds(layers) if is_joined else ""
    if place and place not in _OF_PROJECT and address.value and address.origin in _OF_PROJECT:
        return (
            f"{address.origin} names the cluster {address.shown}, and the token comes from {place}: {_NOT_OF_PROJECT} "
            f"choose where your token goes; if you trust this address, set {address.setting.variable} to it, or, in "
            "another directory, make a context of address and token (orchestrator config set-context), for --context"
        )
    return ""


def _token_that_ray_finds(layers: Sequence[_Layer]) -> str:
    """The file whose token Ray sends to the cluster that it joins if no token is named; empty if it sends none."""
    environment, dotenv = _variables(layers)
    variables = {**dotenv, **environment}
    if variables.get(_RAY_MODE, "").lower() != "token":
        return ""
    own = os.access(_in_home(environment, ".ray/auth_token"), os.R_OK)
    of_pod = bool(variables.get(_RAY_ON_KUBERNETES)) and os.access(_POD_TOKEN, os.R_OK)
    return _POD_TOKEN if of_pod else "~/.ray/auth_token" if own else ""


def _in_home(environment: Mapping[str, str], path: str) -> Path:
    return Path(environment.get("HOME", "~"), path).expanduser()


def _variables(layers: Sequence[_Layer]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Those of the environment and of ``.env``."""
    found = {layer.place: layer.variables or {} for layer in layers}
    return found["environment"], found[DOTENV_FILE]


def _is_held(token: str, layers: Sequence[_Layer]) -> bool:
    """Whether a reference of ``.env`` means a variable of ``.env`` itself, and not one of the user's environment."""
    kind, _, name = token.removeprefix("${").removesuffix("}").partition(":")
    environment, dotenv = _variables(layers)
    return kind == "env" and name in dotenv and environment.get(name, dotenv[name]) == dotenv[name]


def _in_order(layers: Sequence[_Layer], choice: ChosenContext | None) -> Iterator[tuple[_Layer, bool]]:
    """Layers, each with whether it is the one that chose the context."""
    is_open = choice is not None
    for layer in layers:
        yield layer, is_open and bool(layer.choice)
        is_open = is_open and not layer.choice
