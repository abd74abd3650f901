"""The noun hierarchy of WordNet, read from its own ``data.noun`` (format: man page wndb(5WN)).

Only hypernyms (``@``) lead upwards, never those of instances (``@i``). A synset is named as ImageNet does: ``n`` and
the eight digits of its offset. Level k of a synset is the set of end points of every k-step walk upwards, where a
walk stays at a synset without hypernym; so a synset may have several labels at a level.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Final, Self

import numpy as np

from orchestrator.core.errors import BadDataError, NotFoundError, UserError
from orchestrator.storage.open import check_allowed, open_store, split_object_uri
from workloads.runtime.streams import Purpose, Stage, seed_sequence

PLACES: Final = (Path("/usr/share/wordnet"), Path("/usr/local/share/wordnet"), Path("/usr/local/WordNet-3.0/dict"))
_FILE: Final = "data.noun"
_SENSES: Final = "index.noun"
_SYNSET: Final = re.compile(r"n\d{8}")
_ADVICE: Final = "install Debian's package wordnet-base (WordNet 3.0), or name the place of a data.noun: file: <path>"

Synset = str
Parents = Callable[[Synset], Sequence[Synset]]


class Paths(StrEnum):
    """Which hypernyms a walk follows where a synset has several."""

    ALL = "all"
    FIRST = "first"
    """The one that WordNet lists first."""
    RANDOM = "random"
    """One at random, the same in all walks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WordNet:
    """Hypernyms of all noun synsets."""

    hypernyms: Mapping[Synset, tuple[Synset, ...]]
    """In the order in which WordNet lists them."""
    lemmas: Mapping[Synset, str]
    """First word of each synset."""
    digest: str
    """Sha256 of the hypernym relation: that of any copy of the same WordNet, however its text is laid out."""

    @classmethod
    def parse(cls, text: str, place: str = _FILE) -> Self:
        """Parse the content of ``data.noun``. Raises ``BadDataError`` naming ``place`` and line."""
        hypernyms: dict[Synset, tuple[Synset, ...]] = {}
        lemmas: dict[Synset, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            if not line or line.startswith("  "):  # the licence
                continue
            try:
                synset, lemma, parents = _parse_line(line)
            except (ValueError, IndexError) as error:
                raise BadDataError(f"{place}:{number}: not a line of WordNet's data.noun: {line[:60]!r}") from error
            hypernyms[synset], lemmas[synset] = parents, lemma
        if not hypernyms:
            raise BadDataError(f"{place} has no synsets; it is not WordNet's data.noun")
        lines = (f"{synset} {' '.join(parents)}\n" for synset, parents in sorted(hypernyms.items()))
        wordnet = cls(hypernyms=hypernyms, lemmas=lemmas, digest=sha256("".join(lines).encode()).hexdigest())
        wordnet.check_acyclic(place)
        return wordnet

    def check_acyclic(self, place: str = _FILE) -> None:
        """Raises ``BadDataError``: a synset is above itself, or a hypernym is missing."""
        done: set[Synset] = set()
        for start in self.hypernyms:
            path: dict[Synset, None] = {}
            stack = [(start, False)]
            while stack:
                synset, is_left = stack.pop()
                if is_left:
                    path.pop(synset)
                    done.add(synset)
                elif synset in path:
                    cycle = [*list(path)[list(path).index(synset) :], synset]
                    raise BadDataError(f"{place} has a cycle of hypernyms: {' -> '.join(cycle)}")
                elif synset not in done:
                    if synset not in self.hypernyms:
                        raise BadDataError(f"{place} names the hypernym {synset}, but does not hold it: it is cut off")
                    path[synset] = None
                    stack.append((synset, True))
                    stack.extend((parent, False) for parent in self.hypernyms[synset])

    def check_known(self, synsets: Iterable[Synset]) -> None:
        """Raises ``UserError`` that lists the synsets which this WordNet does not have."""
        unknown = [synset for synset in synsets if synset not in self.hypernyms]
        if unknown:
            shown = ", ".join(map(repr, unknown[:5])) + (", ..." if len(unknown) > 5 else "")
            message = f"{len(unknown)} synsets are unknown to WordNet's data.noun: {shown}; "
            raise UserError(message + "they must be named as by ImageNet (n01440764) and come from the same version")

    def parents(self, paths: Paths = Paths.ALL, seed: int = 0) -> Parents:
        """What a step upwards from a synset leads to: itself if nothing is above it."""
        if paths is Paths.FIRST:
            return lambda synset: self.hypernyms[synset][:1] or (synset,)
        if paths is Paths.RANDOM:
            return lambda synset: (_chosen(synset, self.hypernyms[synset], seed),)
        return lambda synset: self.hypernyms[synset] or (synset,)

    def below(self, root: Synset, synsets: Iterable[Synset]) -> list[bool]:
        """Which of the synsets have ``root`` on any path upwards, or are it. Raises ``UserError`` for unknown ones."""
        asked = list(synsets)
        self.check_known([root, *asked])
        is_below: dict[Synset, bool] = {root: True}

        def search(start: Synset) -> bool:
            stack = [start]
            while stack:
                synset = stack[-1]
                open_ones = [parent for parent in self.hypernyms[synset] if parent not in is_below]
                if synset in is_below:
                    stack.pop()
                elif open_ones:
                    stack += open_ones
                else:
                    is_below[synset] = any(is_below[parent] for parent in self.hypernyms[synset])
            return is_below[start]

        return [search(synset) for synset in asked]


def level_of(
    synsets: Sequence[Synset], level: int, wordnet: WordNet, *, paths: Paths = Paths.ALL, seed: int = 0
) -> list[list[Synset]]:
    """For each synset the end points of its ``level``-step walks upwards, sorted.

    Raises:
        UserError: a synset is unknown.
    """
    return next(islice(walked_levels(synsets, wordnet, paths=paths, seed=seed), level, None))


def walked_levels(
    synsets: Sequence[Synset], wordnet: WordNet, *, paths: Paths = Paths.ALL, seed: int = 0
) -> Iterator[list[list[Synset]]]:
    """`level_of` for level 0, 1, 2 and so on without end; each costs one step. Raises ``UserError`` as that does."""
    wordnet.check_known(synsets)
    parents = wordnet.parents(paths, seed)
    ends = [frozenset([synset]) for synset in synsets]
    while True:
        in_order = {found: sorted(found) for found in set(ends)}
        yield [in_order[found] for found in ends]
        after = {found: frozenset(parent for end in found for parent in parents(end)) for found in in_order}
        ends = [after[found] for found in ends]


def open_wordnet(uri: str = "") -> WordNet:
    """Read WordNet from a path or URI of ``data.noun`` or of its folder; by default where packages put it.

    Raises:
        UserError: there is none.
        BadDataError: the file is not what it should be.
    """
    place = uri or _found()
    text = _read(place)
    digest = sha256(text.encode("latin-1")).hexdigest()
    if digest not in _parsed:  # a sweep asks for many levels, and parsing takes half a second
        _parsed.clear()
        _parsed[digest] = WordNet.parse(text, place)
    return _parsed[digest]


_parsed: dict[str, WordNet] = {}


def read_senses(uri: str = "") -> dict[str, tuple[Synset, ...]]:
    """Synsets of each noun, its most frequent sense first, from the ``index.noun`` beside a ``data.noun``.

    Raises:
        UserError: there is none.
    """
    place = uri or _found()
    folder = place.removesuffix(_FILE).rstrip("/")
    senses: dict[str, tuple[Synset, ...]] = {}
    for line in _read(f"{folder}/{_SENSES}", _SENSES).splitlines():
        fields = line.split()
        if line.startswith("  ") or len(fields) < 3 or not fields[2].isdigit():  # the licence
            continue
        senses[fields[0]] = tuple(f"n{offset}" for offset in fields[-int(fields[2]) :])
    return senses


def _found() -> str:
    for folder in PLACES:
        if (folder / _FILE).is_file():
            return str(folder / _FILE)
    raise UserError(f"WordNet is not installed: {_FILE} is in none of {', '.join(map(str, PLACES))}; {_ADVICE}")


def _read(uri: str, file: str = _FILE) -> str:
    if "://" not in uri:
        path = Path(uri)
        path = path / file if path.is_dir() else path
        try:
            if path.parent not in PLACES:  # packages put it there, not whoever wrote the sweep
                check_allowed(path.absolute().as_uri())
            return path.read_text(encoding="latin-1")
        except OSError as error:
            raise UserError(f"WordNet cannot be read: {path}: {error.strerror}; {_ADVICE}") from error
    folder, name = split_object_uri(uri if uri.endswith(file) else f"{uri.rstrip('/')}/{file}")
    try:
        return open_store(folder).get(name).decode("latin-1")
    except NotFoundError as error:
        raise UserError(f"WordNet cannot be read: there is no {uri}; {_ADVICE}") from error


def _parse_line(line: str) -> tuple[Synset, str, tuple[Synset, ...]]:
    """Synset, first word and hypernyms: ``offset lex_filenum ss_type w_cnt word lex_id ... p_cnt ptr ... | gloss``."""
    fields = line.partition(" | ")[0].split(" ")
    first_pointer = 4 + 2 * int(fields[3], 16)
    num_pointers = int(fields[first_pointer])
    first = first_pointer + 1
    pointers = [fields[start : start + 4] for start in range(first, first + 4 * num_pointers, 4)]
    parents = tuple(f"n{offset}" for symbol, offset, part, _ in pointers if symbol == "@" and part == "n")
    synset = f"n{fields[0]}"
    if not _SYNSET.fullmatch(synset) or fields[2] != "n":
        raise ValueError(synset)
    return synset, fields[4], parents


def _chosen(synset: Synset, parents: Sequence[Synset], seed: int) -> Synset:
    if len(parents) < 2:
        return parents[0] if parents else synset
    stream = seed_sequence(seed, Stage.LABELS, Purpose.PATHS, int(synset[1:]))
    word = int(np.random.PCG64(stream).random_raw())
    return parents[word * len(parents) >> 64]
