"""Plug-ins that a sweep names: their references in identities, and checks of their arguments. Pure.

Names are found in the metadata of installed packages. Only the plug-in itself can check its arguments, so the data
plane is asked, once for many; errors are reported at their place in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.core.data_plane import Json, PluginProblem, PluginUse
from orchestrator.core.errors import SpecError
from orchestrator.sweepfile.parse.tree import Path, Tree
from orchestrator.sweepfile.problems import Complaints

CheckPlugins = Callable[[Sequence[PluginUse]], Sequence[PluginProblem]]
"""Asks the data plane to check the arguments of plug-ins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSources:
    """The installed plug-ins, and the function that checks their arguments."""

    installed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By group of entry points: name -> reference."""
    check: CheckPlugins | None = None
    """None: arguments are not checked before a job runs."""


class PluginUses:
    """The plug-ins of one sweep; ``complaints`` takes what is wrong with them."""

    def __init__(self, sources: PluginSources, complaints: Complaints) -> None:
        self._sources, self._complaints = sources, complaints
        self._open: dict[tuple[str, str], tuple[Tree, Path, PluginUse]] = {}

    def known(self, group: str) -> Mapping[str, str]:
        """Installed plug-ins of a group: name -> reference."""
        return self._sources.installed.get(group, {})

    def use(self, group: str, name: str, arguments: Json | None, tree: Tree, path: Path) -> str:
        """The reference of an installed plug-in, whose arguments stand at ``path`` of a tree and are checked later."""
        reference = self.known(group)[name]
        use = PluginUse(group=group, reference=reference, arguments=dict(arguments or {}))
        self._open.setdefault((reference, tree.problem(path, repr(use["arguments"]))), (tree, path, use))
        return reference

    def check(self) -> None:
        """Complain about plug-ins used since the last call whose arguments are wrong."""
        used, self._open = tuple(self._open.values()), {}
        if not used or self._sources.check is None:
            return
        for problem in self._sources.check([use for _, _, use in used]):
            tree, path, _ = used[problem["use"]]
            line = tree.problem((*path, *problem["path"]), problem["message"])
            self._complaints.doubt(path)
            self._complaints.extend(SpecError((line,)))
