"""Where settings come from: environment, ``.env``, the project's file, the user's file, defaults; the first one counts.

A *context* is a named set of settings in the user's file. It counts right before the place that chose it: a flag, the
environment, or a file.

Every setting is an environment variable. What a file says is put into this process's environment where the environment
itself says nothing, so that all who read it (S3 clients, Ray, MLflow, child processes) agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from orchestrator.cli.known_settings import RAY_TOKEN, SETTINGS, Setting, value_in
from orchestrator.cli.settings_files import (
    DOTENV_FILE,
    PROJECT_FILE,
    SettingsFile,
    read_dotenv,
    read_project_file,
    read_user_file,
    user_file,
)
from orchestrator.core.errors import SpecError

__all__ = [
    "SETTINGS",
    "Resolved",
    "applied",
    "apply",
    "chosen_context",
    "resolve",
    "take_flag",
    "user_file",
    "without_password",
]

CONTEXT_VARIABLE = "ORCHESTRATOR_CONTEXT"
CONTEXT_FLAG = "--context"
NO_CONTEXT = "none"
"""As the name of a context: none at all, whatever other places choose."""
_HIDDEN = "***"
_APPLIED: list[Resolved] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A setting's value, and who said so."""

    setting: Setting
    value: str
    """As in the environment; empty = the default counts."""
    origin: str
    """``environment RAY_ADDRESS``, ``.env``, a file, ``context prod (--context)``, or ``default``."""
    is_of_context: bool = False

    @property
    def shown(self) -> str:
        """The value as it may be printed: without passwords; for people where nobody says one."""
        return self.known or self.setting.unset

    @property
    def known(self) -> str:
        """The value that is set or the default's, without passwords; empty if there is none."""
        return without_password(self.value) if self.value else self.setting.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The context that counts."""

    name: str
    place: str
    """``--context``, ``environment ORCHESTRATOR_CONTEXT``, ``.env`` or a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One place that may say settings."""

    place: str
    choice: str = ""
    variables: Mapping[str, str] | None = None
    """Of the environment or ``.env``; None = it is a file."""
    values: Mapping[str, str] = field(default_factory=dict)
    """By name of the setting, of a file."""

    def look(self, setting: Setting) -> tuple[str, str]:
        """Value and origin; empty if it says nothing."""
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
        SpecError: a file cannot be read, or says something that is no setting; or there is no such context.
    """
    layers, user = _layers(directory, environment, context)
    choice = _choice(layers)
    said = _context_values(choice, user)
    found = [_resolve(setting, layers, choice, said) for setting in SETTINGS]
    if problems := tuple(problem for resolved in found if (problem := _problem(resolved))):
        raise SpecError(problems)
    return found


def chosen_context(directory: Path, environment: Mapping[str, str], context: str = "") -> Choice | None:
    """Which context counts here, and who says so; None without one. Raises ``SpecError`` as ``resolve``."""
    layers, user = _layers(directory, environment, context)
    choice = _choice(layers)
    _context_values(choice, user)
    return choice


def apply(directory: Path, environment: MutableMapping[str, str], context: str = "") -> list[Resolved]:
    """Put what files say into the environment, which goes first; of ``.env`` also variables that are no settings.

    Raises:
        SpecError: as ``resolve``.
    """
    found = resolve(directory, environment, context)
    for name, value in read_dotenv(directory / DOTENV_FILE).items():
        environment.setdefault(name, value)
    for resolved in found:
        _apply(resolved, environment)
    if context:
        environment[CONTEXT_VARIABLE] = context  # commands that this one starts mean the same place
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
            context = context or rest.pop(position).partition("=")[2]
        elif rest[position] == CONTEXT_FLAG and position + 1 < end and rest[position + 1]:
            context = context or rest[position + 1]
            del rest[position : position + 2]
    return context, rest


def lacks_name(arguments: Sequence[str]) -> bool:
    """Whether what ``take_flag`` left has the flag without a name, as an unset variable of a shell leaves it."""
    return bool({CONTEXT_FLAG, f"{CONTEXT_FLAG}="} & {*arguments[: [*arguments, "--"].index("--")]})


def _layers(directory: Path, environment: Mapping[str, str], context: str) -> tuple[list[_Layer], SettingsFile]:
    """The places in their order, and the user's file, which knows the contexts."""
    dotenv = read_dotenv(directory / DOTENV_FILE)
    project, user = read_project_file(directory / PROJECT_FILE), read_user_file(user_file(environment))
    layers = [
        _Layer(place=CONTEXT_FLAG, choice=context),
        _Layer(place="environment", choice=environment.get(CONTEXT_VARIABLE, ""), variables=environment),
        _Layer(place=DOTENV_FILE, choice=dotenv.get(CONTEXT_VARIABLE, ""), variables=dotenv),
        *(_Layer(place=file.origin, choice=file.choice, values=file.values) for file in (project, user)),
    ]
    return layers, user


def _choice(layers: Sequence[_Layer]) -> Choice | None:
    for layer in layers:
        if layer.choice:
            place = f"{layer.place} {CONTEXT_VARIABLE}" if layer.place == "environment" else layer.place
            return None if layer.choice == NO_CONTEXT else Choice(name=layer.choice, place=place)
    return None


def _context_values(choice: Choice | None, user: SettingsFile) -> Mapping[str, str]:
    if choice is None:
        return {}
    if choice.name not in user.contexts:
        from orchestrator.sweepfile.suggest import did_you_mean  # half a second of imports, which --help must not take

        hint = did_you_mean(choice.name, [*user.contexts]) if user.contexts else "there is none yet"
        without = f"{CONTEXT_FLAG} {NO_CONTEXT}"
        how = f"make it with `orchestrator {without} config set-context`, or go without: {without}"
        problem = f"{choice.place} names the context {choice.name!r}, which {user.origin} lacks: {hint}; {how}"
        raise SpecError((problem,))
    return user.contexts[choice.name]


def _resolve(setting: Setting, layers: Sequence[_Layer], choice: Choice | None, said: Mapping[str, str]) -> Resolved:
    for layer, is_chooser in _in_order(layers, choice):
        if is_chooser and choice is not None:
            origin = f"context {choice.name} ({choice.place})"
            if setting.name in said:
                return Resolved(setting=setting, value=said[setting.name], origin=origin, is_of_context=True)
            if setting.names_cluster and any(known.names_cluster and known.name in said for known in SETTINGS):
                # Else a variable left over from another cluster would lead a part of the command there.
                return Resolved(setting=setting, value="", origin=origin, is_of_context=True)
        value, origin = layer.look(setting)
        if value:
            return Resolved(setting=setting, value=value, origin=origin)
    return Resolved(setting=setting, value="", origin="default")


def _problem(resolved: Resolved) -> str:
    choices = resolved.setting.choices
    if not choices or not resolved.value or resolved.value in choices:
        return ""
    return f"{resolved.origin}: {resolved.setting.name} is {resolved.value!r}; write {' or '.join(choices)}"


def _in_order(layers: Sequence[_Layer], choice: Choice | None) -> Iterator[tuple[_Layer, bool]]:
    """Layers, each with whether it is the one that chose the context."""
    is_open = choice is not None
    for layer in layers:
        yield layer, is_open and bool(layer.choice)
        is_open = is_open and not layer.choice
