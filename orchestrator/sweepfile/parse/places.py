"""Places without a scheme in a document: paths that start from the file that names them, as those of ``include`` do.

Pure: the folder from which names of files start is an argument. Results do not depend on it, for no place is identity.
"""

from __future__ import annotations

import os.path
import re
from typing import Any

from orchestrator.storage.open import as_uri, has_scheme
from orchestrator.sweepfile.parse.merge import Located
from orchestrator.sweepfile.parse.overrides import is_argument
from orchestrator.sweepfile.parse.tree import Path, Tree

_URIS = re.compile(
    r"store|datasets\.[^.]+\.(?:from|classes|shards(?:\..+)?)"
    r"|labels\.[^.]+\.clusters\.embed\.init\.uri|pretrain\.(?:[^.]+\.)?init\.uri"
)
"""Fields that hold URIs: a path there becomes one."""
_PATHS = re.compile(
    r"datasets\.[^.]+\.convert\.(?:source|labels|root)|labels\.[^.]+\.(?:wordnet\.file|classes\.file|taxonomy\.table)"
)
"""Fields that hold paths."""
_OUTSIDE = "${env:"


def with_places(tree: Tree, written: Any, folder: str) -> Tree:  # noqa: ANN401 - a document
    """The document with every relative place made absolute.

    Args:
        tree: the document, whose places are as they are read.
        written: the same before variables of the environment were filled in. What they begin is no path that the file
            names: it starts from ``folder``, as what stands on the command line does.
        folder: absolute path of the working directory, from which names of files start.
    """

    def resolved(at: Located, text: Any, path: Path) -> Any:  # noqa: ANN401
        if isinstance(at.value, dict | list):
            steps = list(at.value) if isinstance(at.value, dict) else range(len(at.value))
            parts = [resolved(at.child(step), _below(text, step), (*path, step)) for step in steps]
            return dict(zip(steps, parts, strict=True)) if isinstance(at.value, dict) else parts
        if not isinstance(at.value, str) or not at.value or has_scheme(at.value):
            return at.value
        name = ".".join(map(str, path))
        here = at.places.here
        outside = is_argument(here) or (isinstance(text, str) and text.startswith(_OUTSIDE))
        start = folder if outside else os.path.join(folder, os.path.dirname(here.file))  # noqa: PTH118, PTH120
        if _URIS.fullmatch(name):
            return as_uri(at.value, start)
        # Messages show what was written where the file lies in the working directory.
        is_elsewhere = _PATHS.fullmatch(name) is not None and os.path.normpath(start) != folder
        return os.path.normpath(os.path.join(start, at.value)) if is_elsewhere else at.value  # noqa: PTH118

    value = resolved(Located(tree.value, tree.places), written, ())
    return Tree(file=tree.file, value=value, places=tree.places)


def _below(value: Any, step: str | int) -> Any:  # noqa: ANN401
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None
