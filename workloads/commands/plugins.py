"""Checks that a sweep's plug-ins exist and accept its arguments, when the sweep is read."""

from __future__ import annotations

from orchestrator.core.data_plane import PluginAnswer, PluginProblem, PluginRequest, PluginUse
from orchestrator.core.errors import UserError
from orchestrator.core.plugins import GROUPS, short_name
from workloads.runtime.plugin_arguments import PluginArgumentsError, Problem, open_plugin


def check(request: PluginRequest) -> PluginAnswer:
    """All that is wrong with the plug-ins of a sweep; each is imported here, and called nowhere."""
    return {
        "problems": [
            PluginProblem(use=number, path=list(path), message=message)
            for number, use in enumerate(request["uses"])
            for path, message in _problems(use)
        ]
    }


def _problems(use: PluginUse) -> list[Problem]:
    try:
        open_plugin(use["reference"], use["group"], use["arguments"])
    except PluginArgumentsError as error:
        return list(error.problems)
    except UserError as error:
        return [((), str(error))]
    except Exception as error:  # noqa: BLE001 - whatever foreign code raises when it is imported
        return [((), f"the {GROUPS[use['group']]} {short_name(use['reference'])!r} cannot be loaded: {error!r}")]
    return []
