"""What other packages bring: the object behind an entry point, of the very version that a plan names."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from orchestrator.core.code import editable_digest
from orchestrator.core.errors import UserError


def load_plugin(what: str, group: str, name: str, sources: str = "") -> Any:  # noqa: ANN401 - foreign code
    """Load an entry point.

    Args:
        what: such as ``label space``, for errors.
        group: of entry points.
        name: ``<distribution>==<version>:<entry point>``.
        sources: digest of an editable installation's sources; empty = the version says all.

    Raises:
        UserError: it is not installed here, or in another version, or its sources have changed.
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
    if sources and editable_digest(installed, points[0].module) != sources:
        message = f"the sources of the {what} {entry!r} are not those that the sweep was planned with; "
        raise UserError(message + f"plan again, or install the {project} of then")
    return points[0].load()
