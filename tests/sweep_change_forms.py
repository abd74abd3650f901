"""How the declared roles of fields are written; see ``tests/sweep_changes.py``."""

from __future__ import annotations

from tests.sweep_fields import Change, Role


def identity(*overrides: str, of: str, given: tuple[str, ...] = ()) -> Change:
    """The overrides change jobs of the kinds `of`, and what needs them."""
    return Change(Role.IDENTITY, overrides, frozenset(of.split()), given)


def runs(*overrides: str, given: tuple[str, ...] = ()) -> Change:
    """The overrides change no key."""
    return Change(Role.EXECUTION, overrides, frozenset(), given)


def picks(*overrides: str, of: str = "", given: tuple[str, ...] = ()) -> Change:
    """The overrides make jobs come or go."""
    return Change(Role.SELECTION, overrides, frozenset(of.split()), given)


def shares(*overrides: str) -> Change:
    """The overrides make jobs come that share the work of others."""
    return Change(Role.SHARING, overrides)
