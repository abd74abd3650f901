"""From the text of a sweep.yaml to the document that the schema sees: includes, scale, overrides, substitution.

The order: included files, the file over them, its ``tiny:`` block if asked for, ``--set``, then ``${vars.NAME}``,
``${env:NAME}``, places without a scheme, and finally the cells of ``factors:``. Pure, except for the function that
reads included files.
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import SpecError
from orchestrator.core.security.references import is_reference
from orchestrator.core.simulation_files import file_reference
from orchestrator.core.suggest import did_you_mean
from orchestrator.storage.open import as_uri, has_scheme
from orchestrator.sweepfile.parse.factors import with_factors
from orchestrator.sweepfile.parse.include import Includer, ReadText
from orchestrator.sweepfile.parse.merge import Located, merged
from orchestrator.sweepfile.parse.overrides import is_argument, with_overrides
from orchestrator.sweepfile.parse.secrets import refuse_secrets
from orchestrator.sweepfile.parse.substitute import Substitution, variables_in
from orchestrator.sweepfile.parse.tree import Path, Tree, parse_tree, pattern_path

SCALES = ("tiny",)
_URIS = re.compile(
    r"store|datasets\.[^.]+\.(?:from|classes|shards(?:\..+)?)"
    r"|labels\.[^.]+\.clusters\.embed\.init\.uri"
    r"|pretrain\.(?:[^.]+\.)?(?:factors\.[^.]+\.[^.]+\.)?init\.uri"
)
"""Fields that hold URIs: a path there becomes one."""
_PATHS = re.compile(
    r"datasets\.[^.]+\.convert\.(?:source|labels|root)|labels\.[^.]+\.(?:wordnet\.file|classes\.file|taxonomy\.table)"
)
"""Fields that hold paths."""
_RUNS = re.compile(r"simulate\.[^.]+\.run")
"""Fields that may hold a path with a function behind it."""
_OUTSIDE = "${env:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Changes from outside the file."""

    overrides: Sequence[str] = ()
    """Arguments of ``--set``."""
    scale: str = ""
    """Name of the block that is merged over the file (``tiny``); empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document on its way into the schema."""

    tree: Tree
    """Complete."""
    portable: Mapping[str, Any]
    """The same, before variables of the environment and cells of factors were filled in."""
    is_own_text: bool
    """Whether the file's text alone is complete."""
    scales: tuple[str, ...]
    """Scales of the file itself, without those of included files."""


def read_document(
    text: str,
    file: str,
    *,
    path: str = "",
    changes: Changes | None = None,
    environment: Mapping[str, str] | None = None,
    read_text: ReadText | None = None,
    folder: str = "",
    home: str = "",
) -> Document:
    """Expand a sweep.yaml.

    Args:
        text: of the file.
        file: its name in errors.
        path: where it lies, for what it includes.
        changes: overrides and scale.
        environment: for ``${env:NAME}``.
        read_text: reads included files; None: there can be none.
        folder: absolute path from which names of files start; empty: relative places stay as they are.
        home: absolute path of the file's own folder, from which files of simulations start; default: ``folder``.

    Raises:
        SpecError: everything that is wrong up to the schema.
    """
    changes = changes or Changes()
    tree = parse_tree(text, file)
    refuse_secrets(tree, text)
    scales = tuple(name for name in SCALES if name in tree.value)
    is_own_text = "include" not in tree.value and not changes.scale and not changes.overrides
    tree = _included(tree, path or file, read_text)
    used_variables = variables_in(
        [tree.value, *changes.overrides]
    )  # scales and overrides may replace uses of variables
    _refuse_secret_overrides(changes.overrides)
    tree, scale = _scaled(tree, changes.scale)
    tree = with_overrides(tree, changes.overrides, scale)
    tree = _with_variables(tree, used_variables)
    portable = tree.value
    tree = Substitution({}, environment=environment or {}).fill(tree)
    if folder:
        # Relative places of the file would mean other places once it is stored elsewhere.
        complete = _with_places(tree, portable, folder, home=home or folder)
        is_own_text = is_own_text and complete.value == tree.value
        shown = _with_places(tree, portable, folder)
        portable = _kept(portable, tree.value, complete.value)
        tree = shown
    tree = with_factors(tree)
    return Document(tree=tree, portable=portable, is_own_text=is_own_text, scales=scales)


def _kept(written: Any, filled: Any, resolved: Any) -> Any:  # noqa: ANN401 - a document
    """The document as written, with absolute places; places with variables of the environment stay unchanged."""
    if isinstance(written, dict):
        return {name: _kept(item, filled[name], resolved[name]) for name, item in written.items()}
    if isinstance(written, list):
        return [_kept(*items) for items in zip(written, filled, resolved, strict=True)]
    return resolved if written == filled else written


def _included(tree: Tree, path: str, read_text: ReadText | None) -> Tree:
    if "include" not in tree.value:
        return tree
    if read_text is None:
        raise SpecError((tree.problem(("include",), "files can only be included by a file; write it out here"),))
    return Includer(read_text).expand(tree, path)


def _scaled(tree: Tree, scale: str) -> tuple[Tree, Mapping[str, Located]]:
    """The document without its scales, the chosen one merged over it; and this one by its name, if there is any."""
    blocks = {name: Located(tree.value, tree.places).child(name) for name in SCALES if name in tree.value}
    rest = Tree(
        file=tree.file,
        value={name: item for name, item in tree.value.items() if name not in SCALES},
        places=tree.places,
    )
    for name, block in blocks.items():
        if not isinstance(block.value, dict):
            raise SpecError((tree.problem((name,), "this is not a mapping of what to change; write tiny: {...}"),))
    if not scale:
        return rest, {}
    if scale not in SCALES:
        raise SpecError((f"{tree.file}:1:1: '{scale}' is not a scale: {did_you_mean(scale, SCALES)}",))
    if scale not in blocks:
        message = f"the file has no block '{scale}:', which makes the sweep small"
        raise SpecError((f"{tree.file}:1:1: {message}; add one, or leave the scale out",))
    return merged(rest, blocks[scale]), {scale: blocks[scale]}


def _refuse_secret_overrides(overrides: Sequence[str]) -> None:
    for override in overrides:
        path, _, value = override.partition("=")
        # Its last key alone: errors of later steps show the whole argument.
        text = value if is_reference(value) else "text"
        key = parse_tree(json.dumps({path.rpartition(".")[2].strip(): text}), f"--set {path}=...")
        refuse_secrets(key, override)


def _with_variables(tree: Tree, used_variables: frozenset[str]) -> Tree:
    variables = tree.value.get("vars", {})
    if not isinstance(variables, dict):
        raise SpecError((tree.problem(("vars",), "this is not a mapping; write vars: {name: value}"),))
    rest = Tree(
        file=tree.file, value={name: item for name, item in tree.value.items() if name != "vars"}, places=tree.places
    )
    filled = Substitution(variables, environment=None).fill(rest)
    unused = [name for name in variables if name not in used_variables]
    if unused:
        problem = "this variable is not used (${{vars.{0}}}); use it or remove it"
        raise SpecError(tuple(tree.problem(("vars", name), problem.format(name)) for name in unused))
    return filled


def _with_places(tree: Tree, written: Any, folder: str, *, home: str = "") -> Tree:  # noqa: ANN401 - a document
    """The document with its relative places made absolute.

    Args:
        tree: the document, whose places are as they are read.
        written: the same before variables of the environment were filled in. What they begin is no path that the file
            names: it starts from ``folder``, as what stands on the command line does.
        folder: absolute path of the working directory, from which names of files start.
        home: absolute path from which files of simulations start; empty: paths stay as they are written where the file
            lies in the working directory, and all those of simulations, because messages show them so.
    """

    def resolved(at: Located, text: Any, path: Path) -> Any:  # noqa: ANN401
        if isinstance(at.value, dict | list):
            steps = list(at.value) if isinstance(at.value, dict) else range(len(at.value))
            parts = [resolved(at.child(step), _below(text, step), (*path, step)) for step in steps]
            return dict(zip(steps, parts, strict=True)) if isinstance(at.value, dict) else parts
        if not isinstance(at.value, str) or not at.value:
            return at.value
        name = pattern_path(path)
        if home and _RUNS.fullmatch(name) and (reference := file_reference(at.value)) is not None:
            return f"{_joined(home, reference[0])}:{reference[1]}"
        if has_scheme(at.value):
            return at.value
        here = at.places.here
        outside = is_argument(here) or (isinstance(text, str) and text.startswith(_OUTSIDE))
        start = folder if outside else os.path.join(folder, os.path.dirname(here.file))  # noqa: PTH118, PTH120
        if _URIS.fullmatch(name):
            return as_uri(at.value, start)
        is_elsewhere = bool(home) or os.path.normpath(start) != folder
        return _joined(start, at.value) if is_elsewhere and _PATHS.fullmatch(name) else at.value

    value = resolved(Located(tree.value, tree.places), written, ())
    return Tree(file=tree.file, value=value, places=tree.places)


def _joined(folder: str, path: str) -> str:
    return os.path.normpath(os.path.join(folder, path))  # noqa: PTH118 - of texts, links unfollowed


def _below(value: Any, step: str | int) -> Any:  # noqa: ANN401
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None
