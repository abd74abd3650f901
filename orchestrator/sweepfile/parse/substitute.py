"""``${vars.NAME}`` and ``${env:NAME}`` in the texts of a document. Pure: the environment is an argument.

A text that is only one substitution becomes the value, with its type; within longer text it is written as text. ``$${``
is a plain ``${``. Variables of the environment are allowed only where they change no result: keys must not depend on
the machine that plans.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from orchestrator.core.errors import SourceLocation, SpecError
from orchestrator.core.security.references import is_reference
from orchestrator.core.security.secret_patterns import names_secret, secret_form
from orchestrator.core.suggest import did_you_mean
from orchestrator.sweepfile.parse.merge import Located, located
from orchestrator.sweepfile.parse.tree import (
    MAX_BYTES,
    MAX_NODES,
    Path,
    Places,
    Tree,
    dotted,
    pattern_path,
    plain_value,
)

_HOLE = re.compile(r"\$\$\{|\$\{([^}]*)(\}?)")
_VAR = re.compile(r"vars\.([A-Za-z0-9_][A-Za-z0-9_.-]*)")
_ENV = re.compile(r"env:([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?", re.DOTALL)
_FORMS = "${vars.NAME}, ${env:NAME} or ${env:NAME:-default}, and a plain '${' is '$${'"

_ENV_PATHS = tuple(
    re.compile(pattern)
    for pattern in (
        r"store",
        r"(?:tracking|resources|compute|policy)(?:\..+)?",
        r"datasets\.[^.]+\.(?:from|classes|shards(?:\..+)?|convert\.(?:source|labels|root))",
        r"labels\.[^.]+\.(?:wordnet\.file|classes\.file|taxonomy\.table|clusters\.embed\.init\.uri)",
        r"pretrain\.(?:[^.]+\.)?(?:factors\.[^.]+\.[^.]+\.)?init\.uri",
    )
)
_REFERENCE_PATHS = re.compile(r"notify\.[0-9]+\.(?:webhook|secret|slack|email\.password)")
"""Places where references to secrets are not substituted: the code that needs the secret reads it."""
_REFUSED_PATHS = re.compile(r"notify\.[0-9]+\.apprise")
"""Places that the schema refuses, whatever stands there."""
_ENV_PLACES = "store, tracking, resources, compute, policy, and places of data sets, label files and initial weights"


def variables_in(value: object) -> frozenset[str]:
    """Names of the vars that the texts of a value use."""
    if isinstance(value, str):
        holes = (_VAR.fullmatch(hole.group(1)) for hole in _HOLE.finditer(value) if hole.group(1) is not None)
        return frozenset(found.group(1) for found in holes if found is not None)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return frozenset().union(*map(variables_in, parts))


class Substitution:
    """Substitutes the variables of a document; collects its errors."""

    def __init__(self, variables: Mapping[str, Any], *, environment: Mapping[str, str] | None) -> None:
        self._variables, self._environment = variables, environment
        self._open: list[str] = []
        self._problems: list[str] = []
        self._num_values = self._num_characters = 0

    def fill(self, tree: Tree) -> Tree:
        """The document with vars, and with the environment if there is one. Raises ``SpecError``: all problems."""
        found = self._filled(Located(tree.value, tree.places), ())
        if self._problems:
            raise SpecError(tuple(self._problems))
        return Tree(file=tree.file, value=found.value, places=found.places)

    def _filled(self, at: Located, path: Path) -> Located:
        self._num_values += 1
        if self._num_values > MAX_NODES:
            self._refuse_growth(at, path)
        if isinstance(at.value, str):
            return Located(self._text(at, path), at.places) if "${" in at.value else at
        if not isinstance(at.value, dict | list):
            return at
        steps = at.value if isinstance(at.value, dict) else range(len(at.value))
        parts = {step: self._filled(at.child(step), (*path, step)) for step in steps}
        places = Places(at.places.here, {step: part.places for step, part in parts.items()})
        values = {step: part.value for step, part in parts.items()}
        return Located(values if isinstance(at.value, dict) else list(values.values()), places)

    def _text(self, at: Located, path: Path) -> Any:  # noqa: ANN401 - vars hold anything
        text: str = at.value
        place = ".".join(map(str, path))
        if _REFUSED_PATHS.fullmatch(place) or (is_reference(text) and _REFERENCE_PATHS.fullmatch(place)):
            return text
        whole = _HOLE.fullmatch(text)
        if whole is not None and whole.group(1) is not None:
            value, problem = self._value(whole, path, at.places.here)
        else:
            value, problem = self._within(text, path, at.places.here)
            self._num_characters += len(value)
            if self._num_characters > MAX_BYTES:
                self._refuse_growth(at, path)
        if problem:
            self._problems.append(f"{at.places.here}: {dotted(path)}: {problem}")
            return text
        return value

    def _refuse_growth(self, at: Located, path: Path) -> NoReturn:
        """Limit nested variables, which could fill the memory. Raises ``SpecError``."""
        limits = f"at most {MAX_BYTES} characters and {MAX_NODES} values"
        message = f"the variables grow without end as they are filled in; {limits} may come of a file"
        raise SpecError((f"{at.places.here}: {dotted(path)}: {message}",))

    def _within(self, text: str, path: Path, here: SourceLocation) -> tuple[str, str]:
        """Text with its variables substituted, or the error of one of them."""
        problems: list[str] = []

        def written(hole: re.Match[str]) -> str:
            if hole.group(1) is None:
                return "${" if self._environment is not None else hole.group()
            value, problem = self._value(hole, path, here)
            if not problem and isinstance(value, dict | list):
                problem = (
                    f"'{hole.group()}' is a list or mapping, which cannot be part of a text; use it as the whole value"
                )
            problems.extend([problem] if problem else [])
            return value if isinstance(value, str) else json.dumps(value)

        filled = _HOLE.sub(written, text)
        return filled, problems[0] if problems else ""

    def _value(self, hole: re.Match[str], path: Path, here: SourceLocation) -> tuple[Any, str]:
        """The value of a variable, or the error."""
        if variable := _VAR.fullmatch(hole.group(1)) if hole.group(2) else None:
            return self._variable(variable.group(1), path, here)
        if variable := _ENV.fullmatch(hole.group(1)) if hole.group(2) else None:
            return self._env(variable.group(1), variable.group(2), hole.group(), path)
        return None, f"'{hole.group()}' is not a substitution; write {_FORMS}"

    def _variable(self, name: str, path: Path, here: SourceLocation) -> tuple[Any, str]:
        if name not in self._variables:
            return None, f"there is no variable '{name}' in vars: {did_you_mean(name, self._variables)}"
        if name in self._open:
            chain = " -> ".join([*self._open[self._open.index(name) :], name])
            return None, f"the variable '{name}' needs itself ({chain}); break the circle"
        self._open.append(name)
        found = self._filled(located(self._variables[name], here), path).value
        self._open.pop()
        return found, ""

    def _env(self, name: str, default: str | None, hole: str, path: Path) -> tuple[Any, str]:
        steps = pattern_path(path)
        if path[:1] != ("vars",) and not any(pattern.fullmatch(steps) for pattern in _ENV_PATHS):
            message = f"'{hole}' is not allowed here: results must not depend on the machine that plans; use vars or "
            return None, f"{message}--set. It is allowed in {_ENV_PLACES}"
        if names_secret(name):
            return None, (
                f"{name} is the name of a secret, and plans are stored and shared; remove it here: the program that "
                "needs it reads it from the environment"
            )
        if self._environment is None:
            return hole, ""
        text = self._environment.get(name) or default
        if text is None:
            message = f"the environment variable {name} is not set, or empty; set it"
            return None, f"{message}, or write ${{env:{name}:-default}}"
        if form := secret_form(text):
            return (
                None,
                f"the environment variable {name} holds what looks like {form}, and plans are stored and shared",
            )
        return plain_value(text), ""
