"""Parts of a sweep's run other than its state: its origin, its report, and the registered best backbone.

The backbone is registered in MLflow's model registry once the sweep has finished, if it asks for that
(``register: best``).
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from uuid import UUID

from orchestrator.core.errors import CorruptObjectError, NotFoundError
from orchestrator.core.job_kinds import JobKind
from orchestrator.planning.graph.pairing import backbone_of
from orchestrator.planning.graph.plan import Job, Plan
from orchestrator.report.build import build_report
from orchestrator.report.inputs import read_learning
from orchestrator.report.render.files import DOCUMENT, MARKDOWN, PAGE, PNG, render_files, render_markdown, save_files
from orchestrator.report.render.numbers import among_complete, in_words, plus_minus
from orchestrator.report.render.page import render_page
from orchestrator.report.results import Report, Row, Table, best_first
from orchestrator.state.transitions import SweepState
from orchestrator.storage.artifacts import download_part, read_record
from orchestrator.storage.layout import submission_name
from orchestrator.storage.protocol import ObjectStore
from orchestrator.tracking.facts import RunIdentity, Timeline
from orchestrator.tracking.links import CURVE_IMAGE
from orchestrator.tracking.memory import Memory, RunMemory
from orchestrator.tracking.provenance import Provenance, load
from orchestrator.tracking.server import ModelVersion, TrackingServer

_PARTS = ("backbone.safetensors", "model.json")
FOLDER = "backbone"
"""Of the run's artifacts, where the registered files are."""
_DIFF = "uncommitted.diff"
_NO_DIFF = b"# No uncommitted changes are known of the present revision of the sweep.\n"
_LOG = logging.getLogger(__name__)
_IMAGE = f"images/{CURVE_IMAGE}+step+0+timestamp+1+{UUID(int=0)}"
"""Where MLflow's pages look for an image of a run, as its client names it; fixed, so that a later one replaces it."""
_MAX_NOTE_CHARACTERS = 7500
"""MLflow keeps 8000 characters of a tag."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A backbone, and why it is the best."""

    job: Job
    error: float
    """Mean of the metric over its transfer seeds; errors are in [0, 1]."""
    metric: str
    transfer: str
    reason: str
    """Of which row it is, by which mean, and of how many seeds it was chosen."""


def best_backbone(plan: Plan, report: Report) -> Best | None:
    """Of the label space that is best under the sweep's first transfer, the seed that transfers best.

    The first transfer has several tables where there are several blocks, or combinations of factors that are no rows:
    the best row of all of them counts. None while no transfer of them has a result.
    """
    if not report.headlines:
        return None
    first = report.headlines[0]
    alike = [table for table in report.headlines if table.transfer == first.transfer]
    ranked = best_first([row for table in alike for row in table.rows], first.better)
    if not ranked:
        return None
    jobs = plan.by_name()
    by_backbone: dict[str, list[float]] = {}
    for result in ranked[0].results:
        backbone = backbone_of(jobs[result.job], jobs)
        if backbone is not None and backbone.kind is JobKind.PRETRAIN:
            by_backbone.setdefault(backbone.name, []).append(result.metrics[report.metric])
    if not by_backbone:
        return None
    sign = first.better.sign
    error, name = min((sign * fmean(errors), name) for name, errors in by_backbone.items())
    return Best(
        job=jobs[name],
        error=sign * error,
        metric=report.metric,
        transfer=first.transfer,
        reason=_reason(ranked, first, len(by_backbone)),
    )


def _reason(ranked: Sequence[Row], table: Table, num_seeds: int) -> str:
    """``Best seed (of 3, chosen by val_error) of the label space with the lowest mean val_error, 4.75 ± 0.05 %``."""
    metric, summary = table.metric, ranked[0].summary
    seed = f"Best seed (of {num_seeds}, chosen by {metric})" if num_seeds > 1 else "The only seed"
    value = "" if summary is None else f", {plus_minus(summary, metric)}{in_words(metric)}"
    mean = f"{table.better.best} mean{among_complete(ranked, table)} {metric}{value}"
    return f"{seed} of the {table.noun} with the {mean}"


def register(store: ObjectStore, server: TrackingServer, plan: Plan, best: Best, run_id: str) -> bool:
    """Attach the backbone's files to its run and make them a version of the model, unless they are one already; the
    alias `best` points to it from now on. False, and nothing is done, if somebody has deleted the run.

    Raises:
        TrackingError: the server refuses; nothing but the registry lacks anything.
        NotFoundError: the artifact is gone from the store.
        CorruptObjectError: it is not what its record says.
    """
    facets = {name: str(value) for name, value in best.job.facets.items()}
    tags = {**facets, "sweep": plan.sweep, "key": best.job.key, best.metric: f"{best.error:.6g}"}
    version = ModelVersion(
        name=plan.sweep,
        run_id=run_id,
        folder=FOLDER,
        tags={**tags, "transfer": best.transfer, "store": store.uri},
        unless_tagged=("key", best.job.key),
        description=f"{best.reason}, under the transfer {best.transfer!r}; timm reads it",
    )
    known = server.number_of(version)
    if known:
        # Another one may have been the best since, or an earlier publisher died before it named this one.
        server.call_best(version.name, known)
        return True
    if not server.is_active(run_id):
        return False
    record = read_record(store, best.job.key)
    with tempfile.TemporaryDirectory(prefix="orchestrator-backbone-") as folder:
        for part in _PARTS:
            if part in record.parts:
                download_part(store, record, part, Path(folder, part))
        server.attach(run_id, Path(folder), FOLDER)
    server.register(version)
    return True


class Attachments:
    """Of one pass over one sweep."""

    def __init__(self, store: ObjectStore, server: TrackingServer, timeline: Timeline, plan: Plan) -> None:
        self._store, self._server, self._timeline, self._plan = store, server, timeline, plan
        self._is_over = timeline.snapshot.state.is_final
        self._is_later = timeline.snapshot.revision > 1
        self._computed: Report | None = None
        self._is_origin_damaged = False

    def has_news(self, memory: Memory) -> bool:
        """Whether the sweep's run lacks its report, its origin or its registered backbone."""
        if self.lacks_report(memory) or self._is_to_be_registered(memory):
            return True
        submission = self._timeline.submission
        is_told = not submission or memory.submission == submission
        return not is_told and self._store.exists(submission_name(self._plan.sweep, submission))

    def lacks_report(self, memory: Memory) -> bool:
        """Whether the sweep has ended, and its run has no report."""
        return self._is_over and MARKDOWN not in memory.attached

    def tags(self) -> dict[str, str]:
        """Tags of the sweep's run: where it was submitted from, and the report as its description."""
        told = {**_note(render_markdown(self._report)), "mlflow.loggedImages": "True"} if self._is_over else {}
        provenance = self._provenance()
        # Empty ones of a later revision, too: a tag that is not said again would keep the value of an earlier one.
        says_all = self._is_later and self._is_known(provenance)
        return {**{name: value for name, value in provenance.tags().items() if value or says_all}, **told}

    def publish(self, run_id: str, memory: Memory) -> None:
        """Attach the files that the run does not have yet."""
        provenance = self._provenance()
        files = {_DIFF: provenance.diff.encode()} if provenance.diff else {}
        if not files and self._is_later and self._is_known(provenance):
            files = {_DIFF: _NO_DIFF}  # an earlier revision may have attached one, and nothing takes it away
        if self._is_over:
            report = render_files(self._report)
            save_files(self._store, self._plan.sweep, report, keeps_costs=True)
            files |= report
            if PNG in report:
                files |= {f"{_IMAGE}.png": report[PNG], f"{_IMAGE}+compressed.webp": _as_webp(report[PNG])}
            if memory.attached.get(DOCUMENT) != _digest(report[DOCUMENT]):  # 5 MB, made only when it would differ
                files[PAGE] = render_page(self._report, self._plan, read_learning(self._store, self._plan.jobs))
        fresh = {name: content for name, content in files.items() if memory.attached.get(name) != _digest(content)}
        if fresh:
            self._attach(run_id, fresh)
            memory.attached |= {name: _digest(content) for name, content in fresh.items()}
        if self._is_known(provenance):
            memory.submission = self._timeline.submission

    def register(self, runs: MutableMapping[RunIdentity, RunMemory], memory: Memory) -> bool:
        """Put the best backbone of a sweep that succeeded into the model registry, if the sweep asks for it.

        False if the backbone has no run, because somebody deleted it: the next pass makes it anew and comes back. A
        damaged or lost backbone is not registered, and looked at again when the sweep has ended once more.
        """
        if not self._is_to_be_registered(memory):
            return True
        best = best_backbone(self._plan, self._report)
        registered_for = self._timeline.submission
        if best is not None:
            identity = (best.job.name, best.job.key)
            run = runs.get(identity)
            try:
                is_there = run is not None and register(self._store, self._server, self._plan, best, run.run_id)
            except (CorruptObjectError, NotFoundError) as error:  # another pass would find the same
                _LOG.warning("the best backbone of sweep %s is not registered: %s", self._plan.sweep, error)
                is_there, best, registered_for = True, None, self._this_end
            if not is_there:
                runs.pop(identity, None)
                return False
        memory.registered = "-" if best is None else best.job.key
        memory.registered_for = registered_for
        return True

    @property
    def _this_end(self) -> str:
        """Another end, also without another plan, may come after a damaged backbone was made anew."""
        return f"{self._timeline.submission} {self._timeline.snapshot.finished_at_s}"

    def _is_to_be_registered(self, memory: Memory) -> bool:
        succeeded = self._timeline.snapshot.state is SweepState.SUCCEEDED
        is_done = memory.registered and memory.registered_for in (self._timeline.submission, self._this_end)
        return succeeded and self._plan.register == "best" and not is_done

    def _is_known(self, provenance: Provenance) -> bool:
        """Whether nothing more will be known; of a damaged one, it is nothing at all."""
        return provenance != Provenance() or self._is_origin_damaged

    def _provenance(self) -> Provenance:
        """Empty while it is not known."""
        if not self._timeline.submission:
            return Provenance()
        try:
            return load(self._store, self._plan.sweep, self._timeline.submission)
        except NotFoundError:
            return Provenance()
        except CorruptObjectError as error:
            _LOG.warning("sweep %s is published without its origin: %s", self._plan.sweep, error)
            self._is_origin_damaged = True
            return Provenance()

    @property
    def _report(self) -> Report:
        if self._computed is None:
            self._computed = build_report(self._store, self._plan, self._timeline.snapshot.jobs)
        return self._computed

    def _attach(self, run_id: str, files: Mapping[str, bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="orchestrator-report-") as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(content)
            self._server.attach(run_id, Path(folder))


def _as_webp(png: bytes) -> bytes:
    """What MLflow's pages show before the image is opened."""
    from PIL import Image  # only where a report is published

    found = io.BytesIO()
    Image.open(io.BytesIO(png)).save(found, "WEBP", lossless=True)
    return found.getvalue()


def _note(text: str) -> dict[str, str]:
    """The report as the run's description, where MLflow's pages show it first."""
    if len(text) > _MAX_NOTE_CHARACTERS:
        text = text[:_MAX_NOTE_CHARACTERS].rpartition("\n")[0] + "\n\nThe rest is in the artifact `report.md`."
    return {"mlflow.note.content": text}


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
