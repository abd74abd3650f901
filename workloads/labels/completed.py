"""Definitions of label spaces with the digests of the files that they are made from: what identities hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workloads.labels.setting import Setting
from workloads.labels.taxonomy import table_digest


def completed(space: Mapping[str, Any], setting: Setting) -> dict[str, Any]:
    """The definition with every digest, and without what is only checked while planning (``chain``).

    Raises:
        UserError: a file is missing.
    """
    filled = {name: _filled(name, value, setting) for name, value in space.items()}
    return {name: value for name, value in filled.items() if name != "chain"}


def _filled(name: str, value: Any, setting: Setting) -> Any:  # noqa: ANN401 - JSON
    if not isinstance(value, Mapping):
        return value
    if name == "taxonomy" and "digest" in value:
        value = {**value, "digest": value["digest"] or table_digest(setting)}
    elif "digest" in value:  # wordnet, and classes under a synset
        setting.synsets(value["key"])  # the nearer cause: without synsets no WordNet helps
        value = {**value, "digest": value["digest"] or setting.wordnet("").digest}
    return completed(value, setting)
