"""What the rules of label spaces read of a data set: its class table, WordNet, other tables, names of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.errors import UserError
from workloads.labels.label_map import ClassLabels
from workloads.labels.wordnet import Synset, WordNet, open_wordnet

ClassTable = Sequence[Mapping[str, Any]]
"""Row c describes leaf class c with ``class``, ``name`` and one column per level."""

WORDNET_FILE = "wordnet"
TABLE_FILE = "table"


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelInputs:
    """A data set as far as label spaces depend on it."""

    classes: ClassTable
    num_train: int
    """Training samples, the most classes that random ids can have; 0 = unknown."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Where the files lie that definitions name by their digest: ``wordnet``, ``table``."""

    def wordnet(self, digest: str | None) -> WordNet:
        """WordNet, if it is the one of the definition; with an empty digest any one. Raises ``UserError``."""
        wordnet = open_wordnet(self.files.get(WORDNET_FILE, ""))
        if digest and wordnet.digest != digest:
            message = "this machine's WordNet has other hypernyms than the one that the sweep was planned with "
            raise UserError(message + f"({wordnet.digest[:12]} in place of {digest[:12]}); give all machines one file")
        return wordnet

    def synsets(self, column: str) -> list[Synset]:
        """Synset of each leaf class. Raises ``UserError``: the class table has none."""
        missing = [row["class"] for row in self.classes if row.get(column) is None]
        if missing:
            message = f"class {missing[0]} has no synset: the class table needs a column {column!r} of names like "
            raise UserError(message + f"n01440764 (its columns are {', '.join(self.classes[missing[0]])})")
        return [str(row[column]) for row in self.classes]


def class_numbers(references: Sequence[object], names: Sequence[str], table: ClassTable | None = None) -> list[int]:
    """Classes by number or name; of leaf classes (``table``) also by any other text that only one row holds.

    Raises:
        UserError: there is no such class, or several, or a number is also the name of another class.
    """
    known: dict[str, int | None] = {}
    for number, name in enumerate(names):
        known[name] = None if name in known else number
    others: dict[str, int | None] = {}
    for row in table or ():
        for text in {str(value) for column, value in row.items() if column != "class" and value is not None}:
            number = int(row["class"])
            others[text] = number if others.get(text, number) == number else None
    known = others | known
    _check_numbers([reference for reference in references if isinstance(reference, int)], names)
    return [_class_number(reference, known, len(names)) for reference in references]


def _check_numbers(numbers: Sequence[int], names: Sequence[str]) -> None:
    known = frozenset(names)
    for number in numbers:
        if not 0 <= number < len(names):
            raise UserError(f"there is no class {number}; classes count from 0 to {len(names) - 1}")
        name = names[number]
        # Folders 0 to 19 are sorted as text, and so are whole numbers that a table holds as 2.0.
        text = next((text for text in (str(number), f"{number}.0") if text in known), name)
        if text != name:
            message = f'{number} is class number {number}, called "{name}", and another class is called "{text}"; '
            raise UserError(message + f'write "{text}" in quotes, or the name "{name}"')


def _class_number(reference: object, known: Mapping[str, int | None], num_classes: int) -> int:
    if isinstance(reference, int):
        return reference
    number = known.get(str(reference))
    if number is None:
        what = "names several classes" if str(reference) in known else "is not a class"
        raise UserError(f"{reference!r} {what} of the {num_classes}; give a class's number or full name")
    return number


def named_labels(found: Sequence[Sequence[str]]) -> ClassLabels:
    """From the names of each class's targets; ids count them by first appearance."""
    target_of: dict[str, int] = {}
    sets = [sorted({target_of.setdefault(name, len(target_of)) for name in names}) for names in found]
    return ClassLabels.of_sets(sets, list(target_of))
