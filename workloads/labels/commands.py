"""What the control plane asks about label spaces: how many classes they have, and how they look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.errors import OrchestratorError
from workloads.data.builtin import open_builtin
from workloads.labels.completed import completed
from workloads.labels.describe import describe_spaces
from workloads.labels.label_map import ClassLabels
from workloads.labels.setting import ClassTable, Setting
from workloads.labels.spaces import make_label_map
from workloads.labels.taxonomy import check_chains


def count(request: Mapping[str, Any]) -> dict[str, Any]:
    """The number of classes of each of ``spaces``, or why it does not fit the data set.

    Args:
        request: ``dataset`` (see `class_table`), ``num_train``, ``spaces`` and ``files``.
    """
    setting = setting_of(request)
    return {"counted": [_counted(space, setting) for space in request["spaces"]]}


def show(request: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes, nesting and entropy of each of ``spaces``; see `describe_spaces`."""
    return describe_spaces(request, setting_of(request))


def table(request: Mapping[str, Any]) -> dict[str, Any]:
    """The class table of ``dataset`` (see `class_table`)."""
    return {"rows": class_table(request["dataset"])}


def changes(request: Mapping[str, Any]) -> dict[str, Any]:
    """Where two networks differ on the validation images; see `show_changes`."""
    from workloads.labels.changes import show_changes  # drawing: no other command needs it

    return show_changes(request)


def setting_of(request: Mapping[str, Any]) -> Setting:
    """The data set of a request."""
    classes = class_table(request["dataset"])
    return Setting(classes=classes, num_train=request["num_train"], files=request["files"])


def class_table(dataset: Mapping[str, Any]) -> ClassTable:
    """Of ``{"builtin": parameters}``, or ``{"rows": class table, "num_classes": n}``, where rows may be missing."""
    if "builtin" in dataset:
        return open_builtin(dataset["builtin"]).classes
    rows: ClassTable = dataset["rows"]
    return rows or [{"class": leaf, "name": str(leaf)} for leaf in range(dataset["num_classes"])]


def _counted(space: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    try:
        check_chains(space, setting)
        definition = completed(space, setting)
        label_map = make_label_map(definition, setting.classes, num_train=setting.num_train, files=setting.files)
    except OrchestratorError as error:
        return {"problem": str(error)}
    several = isinstance(label_map, ClassLabels) and label_map.targets.ndim > 1
    return {"num_classes": label_map.num_classes, "multi_label": several, "space": definition}
