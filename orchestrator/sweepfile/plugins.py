"""Plug-ins of the data plane, by entry point, found without importing them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import entry_points

OBJECTIVES = "pretraining_orchestrator.objectives"
LABEL_SPACES = "pretraining_orchestrator.label_spaces"


class InstalledPlugins(Mapping[str, str]):
    """Entry points of one group: name -> ``<distribution>==<version>:<name>``, which is what identities hold.

    Installed packages are searched at the first look, because few sweeps name a plug-in.
    """

    def __init__(self, group: str) -> None:
        self._group = group

    @cached_property
    def _found(self) -> Mapping[str, str]:
        return {
            point.name: f"{point.dist.name}=={point.dist.version}:{point.name}"
            for point in entry_points(group=self._group)
            if point.dist is not None
        }

    def __getitem__(self, name: str) -> str:
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)
