"""The canonical form of a sweep.yaml: complete in itself, without includes, variables, overrides and scales. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from orchestrator.sweepfile.parse.tree import implicit_scalars
from orchestrator.sweepfile.sweep import SweepSpec


class _Dumper(yaml.SafeDumper):
    """Quotes what this language, or another reader of YAML, would take for something else than text."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ANN401 - PyYAML's signature
        return True


for _tag, _pattern, _first in implicit_scalars():
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


def canonical_text(document: Mapping[str, Any], recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """YAML text of an expanded document.

    Args:
        document: as ``Document.portable``: ``${env:NAME}`` stays, so that nothing of a machine gets into it.
        recipes: those that the sweep names, without bases; they are written out, whatever later releases ship.
    """
    order = [field.alias or name for name, field in SweepSpec.model_fields.items()]
    complete = {**document, "recipes": {name: dict(recipes[name]) for name in sorted(recipes)}}
    if not recipes:
        del complete["recipes"]
    sections = {name: complete[name] for name in order if name in complete}
    return yaml.dump(sections, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
