"""Label spaces of other packages, by entry point.

An entry point of the group ``pretraining_orchestrator.label_spaces`` names a function ``(classes, arguments) ->
targets``: ``classes`` is the class table, ``arguments`` what the sweep gives, and the result holds for each leaf class
the name of its target, a list of several, or None for a class that is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any, Final

from orchestrator.core.errors import UserError
from workloads.labels.label_map import ClassLabels
from workloads.labels.setting import ClassTable

GROUP: Final = "pretraining_orchestrator.label_spaces"


def plugin_labels(definition: Mapping[str, Any], classes: ClassTable) -> ClassLabels:
    """The space of ``{"name": "<distribution>==<version>:<entry point>", "arguments": {...}}``.

    Raises:
        UserError: it is not installed in this version, or gives no label space.
    """
    make = _load(definition["name"])
    try:
        found = make(list(classes), dict(definition["arguments"]))
    except Exception as error:
        raise UserError(f"the label space {definition['name']} failed: {error!r}") from error
    return _labels(found, definition["name"], len(classes))


def named_labels(found: Sequence[Sequence[str]]) -> ClassLabels:
    """From the names of each class's targets; ids count them by first appearance."""
    target_of: dict[str, int] = {}
    sets = [sorted({target_of.setdefault(name, len(target_of)) for name in names}) for names in found]
    return ClassLabels.of_sets(sets, list(target_of))


def _load(name: str) -> Any:  # noqa: ANN401 - foreign code
    package, _, entry = name.partition(":")
    project, _, version = package.partition("==")
    try:
        installed = distribution(project)
    except PackageNotFoundError as error:
        raise UserError(f"the label space {entry!r} comes from {project}, which is not installed here") from error
    if installed.version != version:
        message = f"the label space {entry!r} was planned with {project} {version}; {installed.version} is installed: "
        raise UserError(message + "install that version, or plan again")
    points = [point for point in installed.entry_points if (point.group, point.name) == (GROUP, entry)]
    if not points:
        raise UserError(f"{project} {version} has no label space {entry!r} (group {GROUP})")
    return points[0].load()


def _labels(found: Any, name: str, num_classes: int) -> ClassLabels:  # noqa: ANN401 - foreign values
    if not isinstance(found, Sequence) or len(found) != num_classes:
        raise UserError(f"the label space {name} gave {type(found).__name__} in place of {num_classes} targets")
    rows = [[] if row is None else list(row) if isinstance(row, (list, tuple)) else [row] for row in found]
    if not all(isinstance(target, str) for row in rows for target in row):
        raise UserError(f"the label space {name} gave targets that are no names; use text, lists of text or None")
    return named_labels(rows)
