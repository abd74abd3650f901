"""Functions of other packages, by what identities hold of them: ``<distribution>==<version>:<entry point>``."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from orchestrator.core.errors import UserError


def load_plugin(name: str, group: str, what: str) -> Any:  # noqa: ANN401 - foreign code
    """The object behind an entry point.

    Args:
        name: ``<distribution>==<version>:<entry point>``.
        group: of the entry point.
        what: what errors call it, such as ``measure``.

    Raises:
        UserError: it is not installed in this version.
    """
    package, _, entry = name.partition(":")
    project, _, version = package.partition("==")
    try:
        installed = distribution(project)
    except PackageNotFoundError as error:
        raise UserError(f"the {what} {entry!r} comes from {project}, which is not installed here") from error
    if installed.version != version:
        message = f"the {what} {entry!r} was planned with {project} {version}; {installed.version} is installed: "
        raise UserError(message + "install that version, or plan again")
    points = [point for point in installed.entry_points if (point.group, point.name) == (group, entry)]
    if not points:
        raise UserError(f"{project} {version} has no {what} {entry!r} (group {group})")
    return points[0].load()
