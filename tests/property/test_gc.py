"""Random sweeps, searches, pins and collections: nothing reachable goes, everything unreachable goes past its grace."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from orchestrator.planning.graph.plan import Job
from orchestrator.retention.gc import LOCK_DURATION_S
from orchestrator.retention.roots import forget, read_sweep
from orchestrator.search.log import SearchFencedError, SearchLog, TrialAsked, kept_trials
from orchestrator.state import events
from orchestrator.storage.artifacts import is_committed, read_record
from orchestrator.storage.layout import artifact_folder, metrics_folder, search_log_folder
from orchestrator.storage.pins import remove_pin
from orchestrator.storage.trials import trials_folder
from tests.gc_store import GRACE_S, TRASH_S, Lab, contents, crash, make_job, make_search

NUM_JOBS = 5
SEARCH = NUM_JOBS
"""Number of the job that searches."""
SWEEPS = ("red", "green")
WAITS_S = st.sampled_from([0.0, GRACE_S + 1, TRASH_S + 1])
INPUTS = st.integers(0, NUM_JOBS - 1)
NUMBERS = st.integers(0, SEARCH)
SUBSETS = st.sets(NUMBERS, min_size=1, max_size=4)


class Collections(RuleBasedStateMachine):
    """The model knows who asks for what; the store alone knows what is there."""

    @initialize(inputs=st.lists(st.sets(INPUTS, max_size=2), min_size=NUM_JOBS, max_size=NUM_JOBS))
    def start(self, inputs: list[set[int]]) -> None:
        self.lab = Lab()
        self.jobs: list[Job] = []
        for number, chosen in enumerate(inputs):
            self.jobs.append(make_job(number, *(self.jobs[i] for i in sorted(chosen) if i < number)))
        first, second = self.jobs[:2]
        self.search = make_search(first, second)
        self.jobs.append(self.search)
        # Jobs like any other (the first one plans have, too), which read nothing that their search does not.
        self.trials = [first, make_job(8, first), make_job(13, second), make_job(18, first, second)]
        self.planned: dict[str, list[Job]] = {}
        self.posted: dict[str, list[Job]] = {}
        self.running: dict[tuple[str, str], tuple[Job, str]] = {}
        self.forgotten: set[str] = set()
        self.pins: dict[str, str] = {}

    # ----------------------------------------------------------------------------------------------- things that happen
    @rule(number=NUMBERS)
    def commit(self, number: int) -> None:
        self.lab.commit(self.jobs[number])

    @rule(number=NUMBERS, wait_s=st.sampled_from([0.0, GRACE_S / 2]))
    def write_around(self, number: int, wait_s: float) -> None:
        self.lab.write_parts(self.jobs[number])
        self.lab.clock.advance(wait_s)
        self.lab.write_metrics(self.jobs[number])

    @rule(number=NUMBERS, finished=st.booleans(), pin=st.booleans())
    def write_checkpoint(self, number: int, finished: bool, pin: bool) -> None:
        reference = self.lab.write_checkpoint(self.jobs[number], finished=finished)
        if pin and finished:
            self._pin(reference)

    @rule(sweep=st.sampled_from(SWEEPS), chosen=SUBSETS, accepted=st.booleans())
    def submit(self, sweep: str, chosen: set[int], accepted: bool) -> None:
        jobs = [self.jobs[number] for number in sorted(chosen)]
        self.forgotten.discard(sweep)
        if not accepted:
            self.lab.post(sweep, jobs)
            self.posted.setdefault(sweep, []).extend(jobs)
            return
        self.lab.accept(sweep, jobs)
        self.planned[sweep] = jobs
        self.lab.write_log(sweep, jobs[0])

    @precondition(lambda self: self.planned)
    @rule(choice=st.randoms(use_true_random=False))
    def launch(self, choice) -> None:
        sweep = choice.choice(sorted(self.planned))
        job = choice.choice(self.planned[sweep])
        if sweep not in self.forgotten and (sweep, job.key) not in self.running and self._is_open(sweep):
            self.running[sweep, job.key] = (job, self.lab.launch(sweep, job))
            self.lab.write_parts(job)
            self.lab.write_checkpoint(job, finished=False)

    @rule(
        sweep=st.sampled_from(SWEEPS),
        asked=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=3),
        end=st.sampled_from(["none", "lost", "committed"]),
    )
    def run_search(self, sweep: str, asked: list[tuple[int, bool]], end: str) -> None:
        """An attempt at the search asks for some trials, and may die or commit."""
        if self.search not in self.planned.get(sweep, ()):
            self.submit(sweep, {0, SEARCH}, accepted=True)
        identity = (sweep, self.search.key)
        if sweep in self.forgotten or not self._is_open(sweep):
            return
        if identity not in self.running:
            self.running[identity] = (self.search, self.lab.launch(sweep, self.search))
        if is_committed(self.lab.store, self.search.key):
            return
        for number, completed in asked:
            self.lab.ask_trial(self.search, self.trials[number], completed=completed)
        if end == "committed":
            self.lab.commit(self.search)
        if end != "none":
            _, attempt_id = self.running.pop(identity)
            self.lab.lose(sweep, self.search, attempt_id)

    @precondition(lambda self: self.running)
    @rule(choice=st.randoms(use_true_random=False))
    def lose(self, choice) -> None:
        sweep, key = choice.choice(sorted(self.running))
        job, attempt_id = self.running.pop((sweep, key))
        self.lab.lose(sweep, job, attempt_id)

    @precondition(lambda self: self.planned)
    @rule(choice=st.randoms(use_true_random=False))
    def forget(self, choice) -> None:
        sweep = choice.choice(sorted(self.planned))
        if sweep in self.posted or any(name == sweep for name, _ in self.running):
            return
        if self._is_open(sweep):
            status = events.SweepEnding.FAILED
            self.lab.append(sweep, events.SweepFinished(at_s=self.lab.clock(), status=status))
        forget(self.lab.store, sweep, now=self.lab.clock())
        self.forgotten.add(sweep)

    @rule(number=NUMBERS)
    def pin(self, number: int) -> None:
        if is_committed(self.lab.store, self.jobs[number].key):
            self._pin(self.jobs[number].key)

    @precondition(lambda self: self.pins)
    @rule(choice=st.randoms(use_true_random=False))
    def unpin(self, choice) -> None:
        name = choice.choice(sorted(self.pins))
        del self.pins[name]
        remove_pin(self.lab.store, name)

    # ------------------------------------------------------------------------------------------------------ collections
    @rule(wait_s=WAITS_S, nth=st.none() | st.integers(1, 150))
    def collect(self, wait_s: float, nth: int | None) -> None:
        self.lab.clock.advance(wait_s)
        before = contents(self.lab.store, self._reachable())
        self.lab.collect_meddled({nth: crash} if nth else {})
        self._check_kept(before)
        self.lab.clock.advance(LOCK_DURATION_S + 1)

    @rule(
        wait_s=WAITS_S,
        nth=st.integers(1, 150),
        later=st.integers(0, 30),
        death=st.none() | st.integers(1, 30),
        chosen=SUBSETS,
    )
    def collect_while_a_sweep_starts(
        self, wait_s: float, nth: int, later: int, death: int | None, chosen: set[int]
    ) -> None:
        """A client posts, and a controller finds some keys committed: it relies on them from then on."""
        self.lab.clock.advance(wait_s)
        before = contents(self.lab.store, self._reachable())
        jobs = [self.jobs[number] for number in sorted(chosen)]
        relied_on: list[Job] = []
        begun: list[TrialAsked] = []

        def post() -> None:
            self.lab.post("black", jobs)
            self.posted.setdefault("black", []).extend(jobs)
            if not later:
                look_up()

        def look_up() -> None:
            relied_on.extend(job for job in jobs if is_committed(self.lab.store, job.key))
            if self.search in jobs and self.search not in relied_on:
                begun.extend(self._search_on())

        at = {nth: post, nth + later: look_up if later else post}
        if death:
            at[nth + later + death] = crash
        self.lab.collect_meddled(at)
        self._check_kept(before)
        self.lab.clock.advance(LOCK_DURATION_S + 1)
        if death:
            self.lab.collect()
        assert all(is_committed(self.lab.store, job.key) for job in relied_on)
        assert SearchLog(self.lab.store, self.search.key).read()[-len(begun) :] == begun or not begun

    @invariant()
    def every_visible_record_is_whole(self) -> None:
        if hasattr(self, "lab"):
            self.lab.check_intact(self.jobs)

    def teardown(self) -> None:
        if hasattr(self, "lab"):
            # What a collection that died had hidden and others have asked for again stays restorable for one more
            # grace from when that is noticed, superfluous checkpoints along with it; what is restored is as young as if
            # it were new.
            for wait_s in (0.0, TRASH_S + 1):
                self.lab.clock.advance(wait_s)
                self.lab.collect()
            self.lab.collect_until_freed()
            assert self.lab.payload() == self._reachable()
            assert self.lab.trash() == set()

    def _search_on(self) -> list[TrialAsked]:
        """An attempt at the search goes on from its log, or begins it: one more trial."""
        log = SearchLog(self.lab.store, self.search.key)
        number = len({event.trial for event in log.read()})
        asked = TrialAsked(trial=number, at_s=self.lab.clock(), key=self.trials[number % 4].key, params={})
        try:
            log.append([asked])
        except SearchFencedError:
            return []
        return [asked]

    # ----------------------------------------------------------------------------------------------------------- oracle
    def _reachable(self) -> set[str]:
        """Names of all objects that must stay, from who asks for what and the records that are visible."""
        kept = {sweep: jobs for sweep, jobs in self.planned.items() if sweep not in self.forgotten}
        asked = [job for jobs in (*kept.values(), *self.posted.values()) for job in jobs]
        asked += [job for job, _ in self.running.values()]
        pinned = {reference.partition("/")[0] for reference in self.pins.values()}
        wanted: set[str] = set()
        if self.search in asked or self.search.key in pinned:
            wanted.update(kept_trials(self.lab.store, self.search.key))
        if self.search in asked:  # of one that is only pinned, nobody knows what its unfinished trials read
            asked += [trial for trial in self.trials if trial.key in wanted]
        keys = pinned | {job.key for job in asked} | wanted
        by_key = {job.key: job for job in (*self.jobs, *self.trials)}
        waiting = [key for job in asked for key in job.identity["inputs"].values()] + sorted(keys)
        while waiting:
            key = waiting.pop()
            keys.add(key)
            if is_committed(self.lab.store, key):
                waiting += [found for found in by_key[key].identity["inputs"].values() if found not in keys]
        live = {job.key for job, _ in self.running.values()}
        names = {name for key in keys for name in self._needed(key)}
        for key in live | keys:
            names |= self.lab.names(metrics_folder(key))
            names |= self.lab.names(search_log_folder(key)) | self.lab.names(trials_folder(key))
        for key in live:
            names |= self.lab.names(artifact_folder(key) + "/")
        for sweep in {*kept, *self.posted}:
            names |= self.lab.names(f"logs/{sweep}/")
        return names

    def _needed(self, key: str) -> set[str]:
        folder = artifact_folder(key)
        here = self.lab.names(f"{folder}/")
        checkpoints = {name for name in here if name.startswith(f"{folder}/checkpoints/")}
        if not is_committed(self.lab.store, key):
            return {name for name in checkpoints if name.rpartition("/")[0] + "/manifest.json" in here}
        parts = {f"{folder}/{part.path}" for part in read_record(self.lab.store, key).parts.values()}
        named = {name for name in checkpoints if self._is_pinned(name)}
        return {f"{folder}/record.json"} | parts | named

    def _check_kept(self, before: Mapping[str, bytes]) -> None:
        lost = before.keys() - self.lab.names()
        # A record that comes back out of the trash makes the checkpoints superfluous that were begun without it.
        pinned = {name for name in lost if self._is_pinned(name)}
        excused = {
            name for name in lost if "/checkpoints/" in name and is_committed(self.lab.store, name.split("/")[2])
        }
        # So does a search's record the trials that it does not name.
        came_back = f"{artifact_folder(self.search.key)}/record.json" not in before
        if came_back and is_committed(self.lab.store, self.search.key):
            begun = {trial.key for trial in self.trials[1:]} - set(kept_trials(self.lab.store, self.search.key))
            excused |= {name for name in lost if begun & set(name.split("/"))}
        assert (lost - excused, pinned) == (set(), set())
        left = before.keys() & self.lab.names()
        assert contents(self.lab.store, left) == {name: before[name] for name in left}

    def _is_pinned(self, name: str) -> bool:
        """Whether a pin names the very checkpoint that an object belongs to."""
        return "/".join(name.split("/")[2:5]) in self.pins.values()

    def _is_open(self, sweep: str) -> bool:
        return not read_sweep(self.lab.store, sweep)[0].state.is_final

    def _pin(self, reference: str) -> None:
        name = f"pin{self.lab.clock.now_s:.3f}-{len(self.pins)}".replace(".", "-")
        if name not in self.pins:
            self.lab.pin(name, reference)
            self.pins[name] = reference


class ManyCollections(Collections):
    """More of them."""


def _settings(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, stateful_step_count=30, suppress_health_check=list(HealthCheck), deadline=None
    )


TestCollections = Collections.TestCase
TestCollections.settings = _settings(150)
TestManyCollections = ManyCollections.TestCase
TestManyCollections.settings = _settings(750)
pytest.mark.slow(pytest.mark.timeout(900)(TestManyCollections))
