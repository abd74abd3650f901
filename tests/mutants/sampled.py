"""Changes the program by chance, one place at a time, and looks which changes the tests notice.

``python -m tests.mutants.sampled`` draws mutants of the packages below with cosmic-ray's operators, the same for the
same seed, and runs the tests that judge the package over each. Everything happens in copies of the repository: the
working tree is never changed. A mutant that survives stands where a bug could: read it, and write the test, or see that
it changes nothing that anyone could notice.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from random import Random

from cosmic_ray.ast import get_ast
from cosmic_ray.mutating import MutationVisitor, mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).parents[2]
NUM_MUTANTS = 15
"""Of each package."""
_MAX_DRAWS = 200
"""For one mutant: most pairs of a file and a family of operators have no place in common."""
_SLOWER = 5.0
_GRACE_S = 60.0
"""A mutant is found if its tests take so many times as long as those of the program as it is, and this much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """What is changed, files or folders, and by which tests it is judged, the quickest first."""

    code: tuple[str, ...]
    tests: tuple[str, ...]


def _unit(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/unit/test_{name}.py" for name in names)


_SCHEDULER = _unit("scheduler", "scheduler_rules", "scheduler_bounds")
PACKAGES = {
    "state": Package(
        code=("orchestrator/state",),
        tests=(
            *_unit("state_events", "state_transitions", "policy", "spending", "older_journals", "journal_snapshots"),
            *_unit("node_health", "money", "wrong_numbers", "gang_blame", "waiting_for_room", "revised_budget"),
            *_unit("cli_brief", "places_to_act", "ray_deaths", "cli_status", "cli_steering", "cli_watch"),
            *_unit("store_faults", "controller_crashes", "controller_messages", "held_back", "report_facets"),
            *_SCHEDULER,
            *_unit("controller"),
            "tests/property/test_fold.py",
        ),
    ),
    "scheduling": Package(
        code=("orchestrator/scheduling",),
        tests=(
            *_SCHEDULER,
            *_unit("elastic_rules", "node_exclusions", "wrong_numbers", "waiting_for_room", "preflight", "held_back"),
            *_unit("hangs", "quotas", "zones", "revised_budget", "gang_blame", "remaining"),
            "tests/property/test_scheduling.py",
        ),
    ),
    "storage": Package(  # without s3, which a server judges: tests/contract, tests/integration
        code=tuple(f"orchestrator/storage/{path.name}" for path in (ROOT / "orchestrator/storage").glob("*.py")),
        tests=(
            *_unit("storage_local", "storage_local_errors", "storage_local_odd_files", "digests", "listing"),
            *_unit("artifacts", "claims", "logs", "object_bounds", "journal_snapshots", "store_faults", "samples"),
            *_unit("store_publication", "fsck", "external_shards", "search_study"),
            "tests/property/test_journal.py",
        ),
    ),
    "data order": Package(
        code=("workloads/data/order.py", "workloads/data/subset.py"),
        tests=(
            *_unit("order", "subset", "mixture", "class_mixing"),
            *(
                f"tests/property/test_{name}.py"
                for name in ("order", "order_groups", "holdout", "order_mixture", "order_schedules")
            ),
        ),
    ),
    "statistics": Package(
        code=("orchestrator/report/statistics",),
        tests=(
            *_unit("statistics", "report_statistics", "report_pooled", "report_effects", "report_verdict"),
            *_unit("report_simulations", "report_factors", "report_analyses", "power"),
            "tests/property/test_statistics_properties.py",
        ),
    ),
}
FAMILIES = (
    "ReplaceComparisonOperator",
    "ReplaceBinaryOperator",
    "ReplaceUnaryOperator",
    "NumberReplacer",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "ZeroIterationForLoop",
)
"""Names of cosmic-ray's operators begin with these. Others change annotations, decorators or nothing."""
_SAME_MEANING = ("_Is", "_IsNot", "Is_Eq", "IsNot_NotEq")
"""Between identity and equality of None, enums and small numbers nobody sees a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One changed file."""

    package: str
    file: str
    operator: str
    before: str
    after: str

    @property
    def shown(self) -> str:
        """The lines that change."""
        changed = difflib.unified_diff(self.before.splitlines(), self.after.splitlines(), n=0, lineterm="")
        lines = [line for line in changed if not line.startswith(("---", "+++"))]
        return "\n".join(f"    {line}" for line in (f"{self.file} {self.operator}", *lines))


class _Places(MutationVisitor):  # type: ignore[misc] # cosmic-ray has no types
    """Counts the places where an operator could change something."""

    def __init__(self, operator: object) -> None:
        super().__init__(-1, operator)
        self.number = 0

    def visit(self, node: object) -> object:
        self.number += sum(1 for _ in self.operator.mutation_positions(node))
        return node


@cache
def _operators(family: str) -> tuple[str, ...]:
    names = (name for name in operator_names() if name.partition("/")[2].startswith(family))
    return tuple(sorted(name for name in names if not name.endswith(_SAME_MEANING)))


@cache
def _num_places(file: Path, operator: str) -> int:
    places = _Places(get_operator(operator)())
    places.walk(get_ast(file.read_text(encoding="utf-8")))
    return places.number


def _files(package: Package) -> list[Path]:
    roots = [ROOT / place for place in package.code]
    return sorted(file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root]))


def sample(name: str, number: int, seed: int) -> list[Sampled]:
    """Different mutants of a package; large files have more of them."""
    random, files = Random(f"{seed} {name}"), _files(PACKAGES[name])  # noqa: S311 - a draw that can be repeated
    weights = [file.stat().st_size for file in files]
    found: dict[str, Sampled] = {}
    for _ in range(_MAX_DRAWS * number):
        (file,) = random.choices(files, weights)
        family = random.choice(FAMILIES)
        places = [(one, _num_places(file, one)) for one in _operators(family)]
        if not sum(count for _, count in places):
            continue
        (operator,) = random.choices([one for one, _ in places], [count for _, count in places])
        occurrence = random.randrange(dict(places)[operator])
        before = file.read_text(encoding="utf-8")
        after = mutate_code(before, get_operator(operator)(), occurrence)
        if after and after not in found and is_changed(before, after):
            path = str(file.relative_to(ROOT))
            found[after] = Sampled(package=name, file=path, operator=operator, before=before, after=after)
        if len(found) == number:
            break
    return list(found.values())


def is_changed(before: str, after: str) -> bool:
    """Whether more than annotations differ, which no module here evaluates; what cannot be parsed is no mutant."""
    with suppress(SyntaxError):
        return ast.dump(_Bare().visit(ast.parse(before))) != ast.dump(_Bare().visit(ast.parse(after)))
    return False


class _Bare(ast.NodeTransformer):
    """Takes away what changes no result: annotations, how dataclasses are made, and whether ``zip`` checks lengths."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []
        return self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> ast.AST | None:
        return None if node.arg == "strict" else self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(value=None)
        return self.generic_visit(node)


# ------------------------------------------------------------------------------------------------------------ the tests
@contextmanager
def copies(number: int) -> Iterator[list[Path]]:
    """Copies of what git knows and does not ignore."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        made = [Path(folder) / str(copy) for copy in range(number)]
        for copy in made:
            for name in filter(None, names):
                if (ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy / name)
        yield made


def run_tests(copy: Path, tests: Sequence[str], limit_s: float | None) -> str:
    """``passed``, ``failed`` or ``late``."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    # As in CI: hypothesis draws the same examples each time.
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "failed" if process.wait(limit_s) else "passed"
    except subprocess.TimeoutExpired:
        return "late"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
        process.wait()


def judge(mutant: Sampled, copy: Path, limit_s: float) -> str:
    """What the tests of its package say of a mutant."""
    target = copy / mutant.file
    target.write_text(mutant.after, encoding="utf-8")
    try:
        return run_tests(copy, PACKAGES[mutant.package].tests, limit_s)
    finally:
        target.write_text(mutant.before, encoding="utf-8")


def hunt(name: str, mutants: Sequence[Sampled], made: Sequence[Path]) -> int:
    """Judge all mutants of a package, print the survivors; returns how many were found."""
    begin_s = time.monotonic()
    if run_tests(made[0], PACKAGES[name].tests, None) != "passed":
        sys.exit(f"{name}: its tests fail over the program as it is: repair that first")
    took_s = time.monotonic() - begin_s
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in made:
        free.put(copy)

    def judged(mutant: Sampled) -> str:
        copy = free.get()
        try:
            return judge(mutant, copy, _SLOWER * took_s + _GRACE_S)
        finally:
            free.put(copy)

    num_found = 0
    with ThreadPoolExecutor(len(made)) as pool:
        for mutant, verdict in zip(mutants, pool.map(judged, mutants), strict=True):
            num_found += verdict != "passed"
            if verdict == "passed":
                sys.stdout.write(f"survives:\n{mutant.shown}\n")
                sys.stdout.flush()
    return num_found


def main(arguments: list[str] | None = None) -> None:
    """Print the score of each package."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.sampled")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="only this one; repeatable")
    parser.add_argument("--mutants", type=int, default=NUM_MUTANTS, help="of each package")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="show the mutants and run no test")
    parsed = parser.parse_args(arguments)
    names = parsed.package or list(PACKAGES)
    sampled = {name: sample(name, parsed.mutants, parsed.seed) for name in names}
    if parsed.list:
        for name, mutants in sampled.items():
            sys.stdout.write(f"{name}\n" + "".join(f"{mutant.shown}\n" for mutant in mutants))
        return
    lines = []
    with copies(parsed.processes) as made:
        for name, mutants in sampled.items():
            num_found = hunt(name, mutants, made)
            lines.append(f"{name:12} {num_found:3d} of {len(mutants):3d} found  {num_found / len(mutants):4.0%}")
            sys.stdout.write(f"{lines[-1]}\n")
            sys.stdout.flush()
    sys.stdout.write("\n".join(["", f"seed {parsed.seed}", *lines, ""]))


if __name__ == "__main__":
    main()
