"""Equal parts of many jobs as one object: the jobs of a large sweep differ in a few values of their identities.

100,000 jobs as JSON are 140 MB; read as they stand they take 540 MiB of memory, shared 270.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any


def load_shared(text: str) -> Any:  # noqa: ANN401 - any JSON value
    """As ``json.loads``, but objects that are equal are the same object: what is returned must not be changed.

    Raises:
        ValueError: the text is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=_Sharing().share_object)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


class _Sharing:
    """Remembers every part that it has seen."""

    def __init__(self) -> None:
        self._objects: dict[Hashable, dict[str, Any]] = {}
        self._lists: dict[Hashable, list[Any]] = {}
        self._strings: dict[str, str] = {}

    def share_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """The first equal object that was seen, else this one. Its inner objects have come here before."""
        found = {name: self._share(value) for name, value in pairs}
        return self._objects.setdefault(tuple((name, _token(value)) for name, value in found.items()), found)

    def _share(self, value: Any) -> Any:  # noqa: ANN401 - see ``load_shared``
        if isinstance(value, str):
            return self._strings.setdefault(value, value)
        if isinstance(value, list):
            items = [self._share(item) for item in value]
            return self._lists.setdefault(tuple(map(_token, items)), items)
        return value


def _token(value: Any) -> Hashable:  # noqa: ANN401 - see ``load_shared``
    """Equal for equal parts only; ``1``, ``1.0`` and ``true``, which Python takes for equal, stay apart."""
    # Shared parts are equal exactly if they are the same object; the memory that remembers them keeps their ids theirs.
    if isinstance(value, dict | list | str):
        return id(value)
    return (type(value), repr(value))
