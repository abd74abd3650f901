"""Hierarchies for classes: from a table of parents, a nested folder, or WordNet.

The result is a table with a row per class, ``name`` and one column per level from coarse to fine, which a sweep
reads as ``taxonomy: {table, levels}``. Each level is a function of the next finer one, and of the class.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from orchestrator.core.errors import UserError
from orchestrator.storage.dataset_files import node_of
from workloads.labels.inputs import ClassTable
from workloads.labels.taxonomy import check_nested, read_table
from workloads.labels.wordnet import Synset, WordNet, open_wordnet, read_senses

WORDNET: Final = "wordnet"
_SYNSET_COLUMN: Final = "synset"
_SYNSET: Final = re.compile(r"n\d{8}")
_SHOWN: Final = 5
Rows = list[dict[str, str]]


def make_hierarchy(request: Mapping[str, Any], classes: ClassTable) -> dict[str, Any]:
    """Levels of the classes.

    Args:
        request: ``source`` (a table, a folder, or ``wordnet``) and ``wordnet`` (place of WordNet; empty: installed).
        classes: of the data set.

    Returns:
        ``rows``, their column ``key`` that tells classes apart (``name``, or ``synset`` where names repeat), the names
        of ``levels`` from coarse to fine, and ``notes`` for people.

    Raises:
        UserError: the source is missing, lacks classes, or gives no level.
        BadDataError: it is not a table.
    """
    names, key = [str(row["name"]) for row in classes], "name"
    source, notes = str(request["source"]), list[str]()
    if len(set(names)) < len(names):
        synsets = [str(row.get(_SYNSET_COLUMN)) for row in classes]
        key = _SYNSET_COLUMN
        if source != WORDNET or len(set(synsets)) < len(synsets) or not all(map(_SYNSET.fullmatch, synsets)):
            raise UserError(
                "some classes of the data set share a name, by which a hierarchy finds them: rename folders, or give "
                "each class its synset and take the hierarchy from wordnet"
            )
        rows = _of_wordnet(synsets, synsets, open_wordnet(request["wordnet"]))
        rows = [row | {"name": name} for row, name in zip(rows, names, strict=True)]
    elif source == WORDNET:
        synsets = _synsets(classes, names, request["wordnet"], notes)
        rows = _of_wordnet(names, synsets, open_wordnet(request["wordnet"]))
    elif Path(source).is_dir():
        rows = _of_folder(names, Path(source))
    else:
        table, _ = read_table(source)
        rows = _of_table(names, table, source, request["wordnet"])
    levels = _levels(rows)
    if not levels:
        message = "it gives the classes no level: each has one group for itself, or all have the same"
        raise UserError(f"{source}: {message}; name groups of several classes")
    check_nested(rows, levels)
    kept = [{name: row[name] for name in ("name", _SYNSET_COLUMN, *levels) if name in row} for row in rows]
    return {"rows": kept, "key": key, "levels": levels, "notes": notes}


def _levels(rows: Rows) -> list[str]:
    """Columns that are levels, from coarse to fine; of columns with the same groups the first."""
    found: dict[tuple[int, ...], str] = {}
    for column in rows[0]:
        if column in {"name", _SYNSET_COLUMN}:
            continue
        nodes = {value: number for number, value in enumerate(dict.fromkeys(row[column] for row in rows))}
        if 2 <= len(nodes) < len(rows):
            found.setdefault(tuple(nodes[row[column]] for row in rows), column)
    return sorted(found.values(), key=lambda column: len({row[column] for row in rows}))


# ------------------------------------------------------------------------------------------------------------- a table


def _of_table(names: Sequence[str], table: Sequence[Mapping[str, Any]], source: str, wordnet: str) -> Rows:
    columns = list(table[0])
    key = next((column for column in ("name", "class", "taxonomic_class") if column in columns), columns[0])
    others = [column for column in columns if column != key]
    if not others:
        raise UserError(f"{source} has one column; it needs the class and its parents: class,kind,kingdom")
    is_of_synsets = _SYNSET_COLUMN in others
    by_name = _by_name(table, key, [_SYNSET_COLUMN] if is_of_synsets else others, source)
    if is_of_synsets:
        missing = [name for name in names if not by_name.get(name, {}).get(_SYNSET_COLUMN)]
        _refuse_missing(missing, source, "give each a synset")
        synsets = [str(by_name[name][_SYNSET_COLUMN]) for name in names]
        return _of_wordnet(names, synsets, open_wordnet(wordnet))
    _refuse_missing([name for name in names if name not in by_name], source, f"column {key!r} must hold their names")
    parents = {name: node_of(row, others[0]) or "" for name, row in by_name.items()}
    if len(others) == 1 and any(parent in parents for parent in parents.values()):
        return _of_parents(names, parents, source)
    blank = [name for name in names if any(node_of(by_name[name], column) is None for column in others)]
    _refuse_missing(blank, source, "each needs a value in every column", verb="has no value for")
    return [{"name": name, **{column: str(by_name[name][column]) for column in others}} for name in names]


def _by_name(
    table: Sequence[Mapping[str, Any]], key: str, columns: Sequence[str], source: str
) -> dict[str, Mapping[str, Any]]:
    """The row of each class or group. Raises ``UserError``: rows of one name differ."""
    found: dict[str, Mapping[str, Any]] = {}
    twice: dict[str, list[str]] = {}
    for row in table:
        name = str(row[key])
        known = found.setdefault(name, row)
        for column in columns:
            one, other = node_of(known, column), node_of(row, column)
            if one != other:
                twice.setdefault(f"{name!r} in column {column!r}", [repr(one)]).append(repr(other))
    if twice:
        shown = "; ".join(f"{name}: {', '.join(dict.fromkeys(values))}" for name, values in [*twice.items()][:_SHOWN])
        more = f"; ... ({len(twice)} in all)" if len(twice) > _SHOWN else ""
        raise UserError(f"{source} has different values for {shown}{more}; a class or group stands at one place")
    return found


def _of_parents(names: Sequence[str], parents: Mapping[str, str], source: str) -> Rows:
    """Of pairs of a class or group and its parent: level k is the group k steps below the root."""
    paths: dict[str, list[str]] = {}
    for name in names:
        path: list[str] = []
        node = parents[name]
        while node:
            if node in path or node == name:
                raise UserError(f"{source}: {node!r} is above itself; correct its parent")
            path.append(node)
            node = parents.get(node, "")
        if not path:
            raise UserError(f"{source}: {name!r} has no parent; give it one")
        paths[name] = path[::-1]
    return _from_paths(paths, {name: name for name in names})


def _from_paths(paths: Mapping[str, Sequence[str]], nodes: Mapping[str, str]) -> Rows:
    """Rows of the groups above each class; of shorter paths the finest group stands in for what they lack.

    A class that is itself a group of others (its own node is in ``nodes``) is in that group, as they are.
    """
    groups = {group for path in paths.values() for group in path}
    paths = {name: [*path, *({nodes[name]} & groups - {*path})] for name, path in paths.items()}
    depth = max(len(path) for path in paths.values())
    return [
        {"name": name, **{f"level{k + 1}": path[min(k, len(path) - 1)] for k in range(depth)}}
        for name, path in paths.items()
    ]


def _refuse_missing(missing: Sequence[str], source: str, hint: str, *, verb: str = "lacks") -> None:
    if missing:
        shown = ", ".join(map(repr, missing[:_SHOWN])) + (", ..." if len(missing) > _SHOWN else "")
        raise UserError(f"{source} {verb} {len(missing)} classes of the data set: {shown}; {hint}")


# ------------------------------------------------------------------------------------------------------------ a folder


def _of_folder(names: Sequence[str], root: Path) -> Rows:
    """Of folders in folders: what lies above the folder of a class is its path."""
    found: dict[str, list[str]] = {}
    wanted = set(names)
    for parts in _folders(root):
        # A class may be known by its whole path already, where another has its last part.
        name = next((name for name in (parts[-1], "/".join(parts)) if name in wanted), "")
        if name and found.setdefault(name, parts[:-1]) != parts[:-1]:
            raise UserError(f"{root} has two folders {parts[-1]!r}; the name of a class may occur in it only once")
    _refuse_missing([name for name in names if name not in found], str(root), "it needs a folder of each class's name")
    flat = [name for name in names if not found[name]]
    if flat:
        raise UserError(f"{root} has the folder {flat[0]!r} at its top; put it into one that names its group")
    paths = {name: ["/".join(found[name][: k + 1]) for k in range(len(found[name]))] for name in names}
    return _from_paths(paths, {name: f"{path[-1]}/{name.rpartition('/')[2]}" for name, path in paths.items()})


def _folders(root: Path) -> Iterator[list[str]]:
    for folder, below, _ in os.walk(root):
        below[:] = sorted(name for name in below if not name.startswith("."))
        here = list(Path(folder).relative_to(root).parts)
        yield from ([*here, name] for name in below)


# ------------------------------------------------------------------------------------------------------------- WordNet


def _synsets(classes: ClassTable, names: Sequence[str], place: str, notes: list[str]) -> list[Synset]:
    """The synset of each class: its column, its name, or the first sense that WordNet lists of its name."""
    if all(_SYNSET.fullmatch(str(row.get(_SYNSET_COLUMN))) for row in classes):
        return [str(row[_SYNSET_COLUMN]) for row in classes]
    if all(_SYNSET.fullmatch(name) for name in names):
        return list(names)
    known = read_senses(place)
    found = {name: next((known[word] for word in _words(name) if word in known), ()) for name in names}
    hint = "give a table with the columns name,synset, or one of their parents"
    _refuse_missing([name for name in names if not found[name]], "WordNet", hint)
    wordnet = open_wordnet(place)
    chosen = _nearest_senses(found, wordnet)
    for name, synset in chosen.items():
        if len(found[name]) > 1:
            above = wordnet.lemmas[(wordnet.hypernyms[synset] or (synset,))[0]].replace("_", " ")
            notes.append(f"{name!r} has {len(found[name])} senses in WordNet; taken: {synset}, a kind of {above}")
    return list(chosen.values())


def _nearest_senses(senses: Mapping[str, Sequence[Synset]], wordnet: WordNet) -> dict[str, Synset]:
    """Of each name the sense that shares most synsets above it with the other names; of equal ones the most frequent.

    An oak is a wood to WordNet first, and beside an elm and a dog a tree.
    """
    above = {synset: _above(synset, wordnet) for found in senses.values() for synset in found}
    shared = Counter(
        synset for found in senses.values() for synset in {node for sense in found for node in above[sense]}
    )
    return {
        name: max(found, key=lambda sense: sum(shared[node] - 1 for node in above[sense]))
        for name, found in senses.items()
    }


def _above(synset: Synset, wordnet: WordNet) -> frozenset[Synset]:
    wordnet.check_known([synset])
    return frozenset(_path(synset, wordnet))


def _path(synset: Synset, wordnet: WordNet) -> list[Synset]:
    """A synset and all on the way up over first hypernyms; an instance (a person) is below nothing."""
    path = [synset]
    while wordnet.hypernyms[path[-1]]:
        path.append(wordnet.hypernyms[path[-1]][0])
    return path


def _words(name: str) -> Iterator[str]:
    """As WordNet may list a name: ``Golden-Retrievers`` as ``golden_retriever``."""
    word = re.sub(r"[\s\-]+", "_", name.rpartition("/")[2].strip().lower())
    yield from (word, word.replace("_", "-"), word.replace("_", ""))
    for end, singular in (("ies", "y"), ("es", ""), ("s", "")):
        if word.endswith(end):
            yield word.removesuffix(end) + singular


def _of_wordnet(names: Sequence[str], synsets: Sequence[Synset], wordnet: WordNet) -> Rows:
    """Steps down from the root, over first hypernyms: classes at different depths of WordNet stay aligned."""
    wordnet.check_known(synsets)
    paths: dict[str, list[str]] = {}
    nodes: dict[str, str] = {}
    for name, synset in zip(names, synsets, strict=True):
        path = [f"{node} {wordnet.lemmas[node].replace('_', ' ')}" for node in _path(synset, wordnet)]
        paths[name], nodes[name] = path[:0:-1] or path, path[0]
    return [
        {"name": row.pop("name"), _SYNSET_COLUMN: synset, **row}
        for row, synset in zip(_from_paths(paths, nodes), synsets, strict=True)
    ]
