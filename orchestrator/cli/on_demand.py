"""Commands as the parser sees them, each made from its function when it is asked for.

Making all forty takes 40 ms of every command, making the one that is called takes 1 ms; only what lists them with
their options or help, as ``--help`` does, makes them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from copy import copy
from functools import partial
from typing import Any, TypeAlias, cast

import typer
from typer.core import TyperGroup
from typer.main import get_command, get_command_from_info, get_command_name, get_group_from_info
from typer.models import CommandInfo, TyperInfo

_Command: TypeAlias = Any
"""Of a class that typer keeps private."""


def command_line(app: typer.Typer) -> TyperGroup:
    """All commands of an app that has a callback, in its order.

    Calling the result runs the command of ``sys.argv``; other than calling ``app``, it leaves ``sys.excepthook`` alone.
    """
    bare = copy(app)
    bare.registered_commands, bare.registered_groups = [], []
    group = cast("TyperGroup", get_command(bare))
    group.commands = _Commands(app)
    return group


class _Commands(MutableMapping[str, _Command]):
    """Names in the order of the app; making one is left to its first look-up."""

    def __init__(self, app: typer.Typer) -> None:
        commands = {_name_of(info): partial(_made_command, app, info) for info in app.registered_commands}
        groups = {str(info.name): partial(_made_group, app, info) for info in app.registered_groups}
        self._makers: dict[str, Callable[[], _Command]] = {**commands, **groups}
        self._made: dict[str, _Command] = {}

    def __getitem__(self, name: str) -> _Command:
        if name not in self._made:
            self._made[name] = self._makers[name]()
        return self._made[name]

    def __setitem__(self, name: str, command: _Command) -> None:
        self._makers[name] = lambda: command
        self._made[name] = command

    def __delitem__(self, name: str) -> None:
        del self._makers[name]
        self._made.pop(name, None)

    def __contains__(self, name: object) -> bool:
        return name in self._makers

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def _name_of(info: CommandInfo) -> str:
    return info.name or get_command_name(getattr(info.callback, "__name__", ""))


def _made_command(app: typer.Typer, info: CommandInfo) -> _Command:
    return get_command_from_info(
        info, pretty_exceptions_short=app.pretty_exceptions_short, rich_markup_mode=app.rich_markup_mode
    )


def _made_group(app: typer.Typer, info: TyperInfo) -> _Command:
    return get_group_from_info(
        info,
        pretty_exceptions_short=app.pretty_exceptions_short,
        suggest_commands=app.suggest_commands,
        rich_markup_mode=app.rich_markup_mode,
    )
