"""Short names of label spaces for keys, made of their definitions alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_SHORT: Mapping[str, Callable[[Any], str]] = {
    "hierarchy": str,
    "random": lambda rule: f"random{rule['num_classes']}" + ("within" if "within" in rule else ""),
    "modulo": lambda divisor: f"mod{divisor}",
    "split": lambda rule: f"split{rule['num']}",
    "merge": lambda rule: f"merged{rule['num_classes'] if 'num_classes' in rule else len(rule['groups'])}",
    "binary": lambda _: "binary",
    "wordnet": lambda rule: f"wordnet{rule.get('level', '')}{rule.get('contains', '')}",
    "taxonomy": lambda rule: str(rule["level"]),
    "clusters": lambda rule: (
        (f"clusters{rule['k']}" if "k" in rule else f"rebalanced{rule['rebalanced']['min_samples']}")
        + ("within" if rule["within"] else "")
    ),
    "plugin": lambda rule: str(rule["name"]).rpartition(":")[2],
}


def readable_rule(space: Mapping[str, Any]) -> str:
    """Such as ``genus``, ``random128`` or ``wordnet4``; spaces that differ in small print may share one."""
    rule = next(name for name in _SHORT if name in space)
    return _SHORT[rule](space[rule])
