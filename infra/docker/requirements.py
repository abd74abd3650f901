"""Print the requirements of a project's pyproject.toml and of some of its extras, one a line."""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path


def main() -> None:
    """Arguments: the file, then extras. Ends with an error for an extra that there is not."""
    path, *extras = sys.argv[1:]
    project = tomllib.loads(Path(path).read_text(encoding="utf-8"))["project"]
    known = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(known))
    if unknown:
        sys.exit(f"{path} has no extra {', '.join(unknown)}; it has {', '.join(known)}")
    lines = [*project["dependencies"], *_requirements(project["name"], known, extras)]
    sys.stdout.write("\n".join(dict.fromkeys(lines)) + "\n")


def _requirements(name: str, known: Mapping[str, list[str]], extras: list[str]) -> Iterator[str]:
    """Of some extras, with those that they take over from other extras of the project."""
    for extra in extras:
        for one in known[extra]:
            own = re.fullmatch(re.escape(name) + r"\[([^\]]+)\]", one)
            if own:
                yield from _requirements(name, known, [part.strip() for part in own.group(1).split(",")])
            else:
                yield one


if __name__ == "__main__":
    main()
