"""The job ``theory``: a simulation at one set of parameters for a block of seeds, resumable by seeds.

Parameters of the identity: ``simulation`` (see ``workloads.theory.loading``), ``parameters`` and ``seeds``
(``{"first", "stop"}``). Parts of the artifact: ``runs.parquet`` with
a row per seed (``seed`` and one column per metric, null where a seed has none), and what the simulation saved. Finished
seeds are durable before the artifact is: an attempt that died leaves them to the next.
"""

from __future__ import annotations

import io
import json
import math
import re
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import unquote, urlsplit

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from orchestrator.core.contract import ExecutionContext, JobRequest, JobResult, Progress
from orchestrator.core.errors import CorruptObjectError, NotFoundError, PreemptedError, StorageError, UserError
from orchestrator.core.simulation_files import FILE_ROLE
from orchestrator.storage import ObjectStore
from orchestrator.storage.artifacts import ArtifactWriter
from orchestrator.storage.digests import digest_of
from orchestrator.storage.layout import checkpoint_name, checkpoints_folder
from orchestrator.storage.request_pool import RequestPool
from workloads.runtime.device import pick_device
from workloads.runtime.fingerprint import deterministic_numerics, numerics_fingerprint
from workloads.runtime.manifest import MANIFEST, Entry, decode_manifest, write_folder
from workloads.runtime.npy import npy_bytes
from workloads.runtime.plugin_arguments import is_fault_of_code
from workloads.runtime.publish import publish
from workloads.theory.loading import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RUNS_PART: Final = "runs.parquet"
SEED_COLUMN: Final = "seed"
NUM_SEEDS: Final = "num_seeds"
"""The metric of the record that counts the rows."""
_ROWS: Final = "rows.json"
_READ: Final = (MANIFEST, _ROWS)
_FLUSH_EVERY_S, _FLUSH_SHARE = 0.5, 0.001
"""Seconds between two writes, and the least share of the time that the attempt has run: each leaves a folder, which the
next attempt reads. A killed attempt loses what was finished within this time and that of one write."""
_METRIC: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,120}")
_NO_PARTS: Final = frozenset({"", ".", ".."})
"""Between the slashes of a metric's name: MLflow reads it as a path, and refuses one that has a shorter form."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,80}")


def run_theory(request: JobRequest, context: ExecutionContext) -> JobResult:
    """Commit the metrics of every seed of the block; seeds that an earlier attempt finished are not run again.

    Raises:
        UserError: the simulation is not installed here as it was planned, refuses its parameters, or yields what is no
            mapping of finite numbers for each seed.
        PreemptedError, StorageError: why there is no commit.
    """
    context.report(Progress(phase="setup"))
    parameters, device = request.parameters, pick_device(context)
    file = request.execution.label_files.get(FILE_ROLE, "")
    _refuse_stored(file, request.store_uri)
    simulation = Simulation.load(parameters["simulation"], file)
    given = simulation.checked(parameters["parameters"])
    seeds = range(parameters["seeds"]["first"], parameters["seeds"]["stop"])
    num_threads = request.execution.num_threads
    # Sums of linear algebra depend on the number of threads: without the limit, on the cores of the node. It holds for
    # libraries that are loaded by now, as the simulation's module is. Set again later, it would make seeds differ.
    with deterministic_numerics(num_threads), threadpool_limits(limits=num_threads):
        with FinishedSeeds(context.store, request.key, context.activity.tick) as finished:
            num_resumed, began_s = len(finished.rows), time.perf_counter()
            todo = [seed for seed in seeds if seed not in finished.rows]
            saved = SavedObjects(device=device)
            # Before the first seed, which may take hours: the limits of `setup` are not for it.
            context.report(Progress(phase="simulate", step=num_resumed, total_steps=len(seeds)))
            running = _run(simulation, given, todo, saved)
            for seed, metrics in _each_seed(simulation.name, running, todo):
                finished.add(seed, metrics, saved.take(seed))
                eta_s = (time.perf_counter() - began_s) / (len(finished.rows) - num_resumed)
                eta_s *= len(seeds) - len(finished.rows)
                _tick(request, context, done=len(finished.rows), total=len(seeds), eta_s=eta_s)
            if next(running, None) is not None:
                finished.discard()  # nobody can say which of the rows belongs to which seed
                message = f"the simulation {simulation.name!r} yielded more than its {len(todo)} seeds"
                raise UserError(f"{message}; yield once for each seed")
        return _commit(request, context, finished, device=device, num_resumed=num_resumed)


def _refuse_stored(file: str, store_uri: str) -> None:
    """Whoever may write results may not thereby say what code runs."""
    store = urlsplit(store_uri)
    if file and store.scheme == "file" and Path(file).resolve().is_relative_to(Path(unquote(store.path)).resolve()):
        raise UserError(f"the simulation {file} is in the store, from which no code is run; move the file")


def _run(simulation: Simulation, given: object, seeds: Sequence[int], saved: SavedObjects) -> Iterator[object]:
    """What the simulation yields. Raises ``UserError``: its code did."""
    num_done = 0
    try:
        for metrics in simulation.function(given, seeds, saved) if seeds else ():
            yield metrics
            num_done += 1
    except Exception as error:
        if not is_fault_of_code(error):
            raise
        where = f"at seed {seeds[num_done]}" if num_done < len(seeds) else "after its last seed"
        message = f"the simulation {simulation.name!r} failed {where}: {error!r}"
        raise UserError(f"{message}; correct it or its parameters, and submit again") from error


def _each_seed(name: str, running: Iterator[object], seeds: Sequence[int]) -> Iterator[tuple[int, dict[str, float]]]:
    """Each seed with its metrics as they come."""
    for place, seed in enumerate(seeds):
        metrics = next(running, None)
        if metrics is None:
            message = f"the simulation {name!r} ended before seed {seed}, after {place} of {len(seeds)} seeds"
            raise UserError(f"{message}; yield one mapping for each, an empty one for a seed without metrics")
        yield seed, _plain(name, seed, metrics)


def _plain(name: str, seed: int, metrics: object) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        message = f"the simulation {name!r} yielded {type(metrics).__name__} for seed {seed}, not a mapping of metrics"
        raise UserError(f"{message}; yield {{name: number}}")
    plain: dict[str, float] = {}
    for metric, value in metrics.items():
        if not isinstance(metric, str) or not _is_metric(metric):
            message = (
                f"the simulation {name!r} calls a metric {metric!r}; use letters, digits, '_', '-', '.' and '/', no "
                "empty part, '.' or '..' between slashes, and"
            )
            raise UserError(f"{message} another name than {SEED_COLUMN!r} and {NUM_SEEDS!r}")
        try:
            plain[metric] = float(value)
        except (TypeError, ValueError, OverflowError) as error:
            message = f"metric {metric} of the simulation {name!r} is {value!r:.200} for seed {seed}"
            raise UserError(f"{message}; yield numbers that a float can hold") from error
        if not math.isfinite(plain[metric]):
            message = f"metric {metric} of the simulation {name!r} is {plain[metric]} for seed {seed}; leave it out"
            raise UserError(f"{message} for a seed that has none, or choose parameters under which it is finite")
    return plain


def _is_metric(name: str) -> bool:
    """Whether the table of runs, the record and MLflow can all hold a metric of this name."""
    is_well_formed = _METRIC.fullmatch(name) is not None and _NO_PARTS.isdisjoint(name.split("/"))
    return is_well_formed and name not in {SEED_COLUMN, NUM_SEEDS}


def _tick(request: JobRequest, context: ExecutionContext, *, done: int, total: int, eta_s: float) -> None:
    context.report(Progress(phase="simulate", step=done, total_steps=total, eta_s=eta_s))
    if context.should_stop() and done < total:
        raise PreemptedError(f"{request.job} was asked to stop; it goes on from its finished seeds when it runs again")


def _commit(
    request: JobRequest, context: ExecutionContext, finished: FinishedSeeds, *, device: torch.device, num_resumed: int
) -> JobResult:
    writer = ArtifactWriter(context.store, request)
    writer.add(RUNS_PART, runs_table(finished.rows))
    finished.adopt_files(writer)
    columns = sorted({name for row in finished.rows.values() for name in row})
    means = {
        name: math.fsum(values) / len(values)
        for name in columns
        if (values := [row[name] for _, row in sorted(finished.rows.items()) if name in row])
    }
    fingerprint = numerics_fingerprint(device, num_threads=request.execution.num_threads, micro_batch=0)
    summary = {"metrics": columns, "fingerprint": fingerprint, "rows_of_earlier_attempts": num_resumed}
    metrics = {**means, NUM_SEEDS: float(len(finished.rows))}
    return publish(writer, request, metrics=metrics, summary=summary)


def runs_table(rows: Mapping[int, Mapping[str, float]]) -> bytes:
    """Rows by seed as Parquet, by ascending seed and name of the metric: the same bytes however they came about."""
    seeds, columns = sorted(rows), sorted({name for row in rows.values() for name in row})
    arrays = [pa.array(seeds, type=pa.int64())]
    arrays += [pa.array([rows[seed].get(name) for seed in seeds], type=pa.float64()) for name in columns]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_arrays(arrays, names=[SEED_COLUMN, *columns]), file, compression="zstd")
    return file.getvalue()


class SavedObjects:
    """The ``SimulationContext`` of a job: keeps what is saved until its seed has ended."""

    def __init__(self, *, device: torch.device) -> None:
        self._device = device
        self._content: dict[str, bytes] = {}

    @property
    def device(self) -> torch.device:
        """See ``SimulationContext``."""
        return self._device

    def save_array(self, name: str, value: NDArray[np.generic]) -> None:
        """See ``SimulationContext``."""
        self._keep("arrays", name, "npy", npy_bytes(np.asarray(value)))

    def save_figure(self, name: str, figure: Figure) -> None:
        """See ``SimulationContext``."""
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=144, metadata={"Software": None})  # no version: the same bytes
        self._keep("figures", name, "png", drawn.getvalue())

    def take(self, seed: int) -> dict[str, bytes]:
        """What was saved since the last seed, by the name of its part."""
        taken = {place.format(seed=seed): content for place, content in self._content.items()}
        self._content = {}
        return taken

    def _keep(self, folder: str, name: str, suffix: str, content: bytes) -> None:
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} cannot name what is saved; use 1 to 80 letters, digits, '_' and '-'")
        self._content[f"{folder}/{{seed}}/{name}.{suffix}"] = content


def pause_s(elapsed_s: float) -> float:
    """Seconds between two writes of finished seeds, by those that the attempt has run."""
    return max(_FLUSH_EVERY_S, _FLUSH_SHARE * elapsed_s)


@dataclass(slots=True)
class _Unwritten:
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)


class FinishedSeeds:
    """The finished seeds of one job, by whichever attempt; a thread writes new ones, at first every half second.

    They lie in folders like checkpoints: ``<largest seed + 1>-<nonce>/`` with ``rows.json``, the files that were saved,
    and last a manifest, without which nothing there counts. What is not written yet at a regular end becomes part of
    the artifact at once. ``on_alive`` is called again and again while those of earlier attempts are read.
    """

    def __init__(self, store: ObjectStore, key: str, on_alive: Callable[[], None]) -> None:
        self._store, self._root, self._on_alive = store, checkpoints_folder(key), on_alive
        self.rows: dict[int, dict[str, float]] = {}
        """Metrics by seed."""
        self._written: dict[str, tuple[str, Entry]] = {}
        """Object and entry by the name of the part."""
        self._unwritten = _Unwritten()
        self._lock, self._writing, self._ended = threading.Lock(), threading.Lock(), threading.Event()
        self._has_failed = False
        """Whether the last write was not possible."""
        self._thread = threading.Thread(target=self._write_regularly, name="finished seeds", daemon=True)

    def __enter__(self) -> Self:
        found: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for one in self._store.list_objects(f"{self._root}/"):
            self._on_alive()
            folder, _, name = one.name.removeprefix(f"{self._root}/").partition("/")
            found[folder][name] = one.size_bytes
        whole = [(f"{self._root}/{folder}", sizes) for folder, sizes in sorted(found.items()) if MANIFEST in sizes]
        with RequestPool.of(self._store.uri).batch(self._on_alive) as batch:
            asked = [[batch.start(self._store.get, f"{folder}/{name}") for name in _READ] for folder, _ in whole]
            for (folder, sizes), (manifest, rows) in zip(whole, asked, strict=True):
                self._take(folder, sizes, manifest, rows)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if error is not None:
            self._write()  # for the next attempt

    def add(self, seed: int, metrics: dict[str, float], files: Mapping[str, bytes]) -> None:
        """A seed has ended. Raises ``StorageError`` where earlier ones could not be written, nor can they be now."""
        self.rows[seed] = metrics
        with self._lock:
            self._unwritten.rows[seed] = metrics
            self._unwritten.files.update(files)
        if self._has_failed:
            self._write()

    def discard(self) -> None:
        """Forget every finished seed, those of earlier attempts too: no later attempt starts from them."""
        self._ended.set()
        self._thread.join()
        self._unwritten, self.rows, self._written = _Unwritten(), {}, {}
        for name in self._store.list_children(f"{self._root}/"):
            self._store.delete(f"{self._root}/{name.rstrip('/')}/{MANIFEST}")

    def adopt_files(self, writer: ArtifactWriter) -> None:
        """Make what was saved parts of the artifact."""
        for part, (name, entry) in sorted(self._written.items()):
            writer.adopt(part, name, size_bytes=entry.size_bytes, digests=entry.digests)
        for part, content in sorted(self._unwritten.files.items()):
            writer.add(part, content)

    def _write_regularly(self) -> None:
        began_s = time.monotonic()
        while not self._ended.wait(pause_s(time.monotonic() - began_s)):
            try:
                self._write()
            except StorageError:
                self._has_failed = True  # it is tried again after the next seed, and here

    def _write(self) -> None:
        with self._writing:
            with self._lock:
                taken = _Unwritten(rows=dict(self._unwritten.rows), files=dict(self._unwritten.files))
            if taken.rows:
                self._write_folder(taken)
            self._has_failed = False

    def _write_folder(self, taken: _Unwritten) -> None:
        stop = max(taken.rows) + 1
        folder = f"{self._root}/{checkpoint_name(stop, secrets.token_hex(8))}"
        rows = {str(seed): metrics for seed, metrics in sorted(taken.rows.items())}
        contents = {_ROWS: json.dumps(rows).encode(), **taken.files}
        self._remember(folder, write_folder(self._store, folder, stop, contents))
        with self._lock:
            for seed in taken.rows:
                del self._unwritten.rows[seed]
            for name in taken.files:
                del self._unwritten.files[name]

    def _take(
        self, folder: str, sizes: Mapping[str, int], manifest: Callable[[], bytes], rows_read: Callable[[], bytes]
    ) -> None:
        try:
            entries, content = decode_manifest(manifest()), rows_read()
        except (NotFoundError, CorruptObjectError):
            return  # an attempt ended while it wrote them
        digests = entries[_ROWS].digests if _ROWS in entries else None
        if digests is None or not digests.match(digest_of(content, digests.algorithm)):
            return
        # What was saved is not read: that may take longer than the seeds. See ``remedy_of``.
        if any(sizes.get(name) != entry.size_bytes for name, entry in entries.items()):
            return
        rows: dict[int, dict[str, float]] = {int(seed): metrics for seed, metrics in json.loads(content).items()}
        # Another attempt, or a write whose acknowledgement was lost, may have written some of the same seeds.
        if not rows.keys() <= self.rows.keys():
            self.rows |= rows
            self._remember(folder, entries)

    def _remember(self, folder: str, entries: Mapping[str, Entry]) -> None:
        self._written |= {name: (f"{folder}/{name}", entry) for name, entry in entries.items() if name != _ROWS}
