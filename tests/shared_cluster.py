"""Variables of the Ray cluster that tests share: programs that other tests start must not look for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from orchestrator.stack.attach import set_ray_environment

_cluster: dict[str, str] = {}
"""What the cluster's tests have in the environment and others do not; empty where no cluster runs."""
_before: dict[str, str | None] = {}
"""The same variables, as they were without it."""


def enter_cluster(variables: Mapping[str, str]) -> None:
    """Set its variables, for the tests that ask for it."""
    _cluster.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    _before.update({name: os.environ.get(name) for name in _cluster})
    set_ray_environment(variables)


def leave_cluster() -> None:
    """Its variables are as they were."""
    _hide()
    _cluster.clear()
    _before.clear()


@contextmanager
def without_cluster() -> Iterator[None]:
    """Inside the block, variables are as if there were no cluster."""
    hidden = _hide()
    yield
    if _cluster:  # it did not end inside
        os.environ.update(hidden)


def _hide() -> dict[str, str]:
    """Returns what it has taken away; what a cluster of a test's own has set stays."""
    hidden = {name: value for name, value in _cluster.items() if os.environ.get(name) == value}
    for name in hidden:
        value = _before[name]
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return hidden
