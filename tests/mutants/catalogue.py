"""Bugs that the simulation must find: what each of the program's guarantees hangs on, taken away."""

from __future__ import annotations

from tests.mutants.engine import Mutant

_CONTROLLER = "orchestrator.controller.controller:Controller"
_OWNED_SWEEPS = "orchestrator.controller.owned_sweeps:OwnedSweeps"
_EXECUTOR = "orchestrator.controller.execution:Executor"
_LAUNCHING = "orchestrator.scheduling.launching:Launching"
_FOLDING = "orchestrator.state.fold:_Folding"

MUTANTS = (
    # Fencing
    Mutant(
        name="new epoch is not announced to runners",
        where=f"{_CONTROLLER}._adopt_sweeps",
        old="self._backend.announce(epoch)",
        new="self._backend.announce(1)",
        seed=3,
    ),
    Mutant(
        name="epoch does not rise",
        where="orchestrator.sweeps.lease:Lease.acquire",
        old="else found[0].epoch) + 1",
        new="else found[0].epoch)",
        seed=3,
    ),
    Mutant(
        name="journal goes around another writer's segment",
        where="orchestrator.storage.journal:Journal.append",
        old="raise JournalFencedError(message) from error",
        new="self.next_sequence += 1; self.append(events); self.next_sequence -= 1; del message, error",
        seed=18,
    ),
    Mutant(
        name="adoption is not written",
        where="orchestrator.sweeps.ledger:SweepLedger.append",
        old="[*([self._adoption] if self._adoption else []), ",
        new="[",
        seed=3,
    ),
    Mutant(
        name="a sweep of an earlier epoch is not adopted",
        where=f"{_OWNED_SWEEPS}._load",
        old="needs_adoption = not is_ours or sweep in self._in_doubt",
        new="needs_adoption = snapshot.cluster != me.cluster",
        seed=3,
    ),
    # Intent before effect
    Mutant(
        name="launch before append",
        where=f"{_EXECUTOR}._carry_out",
        old="durable = owned.append_each(",
        new="[self._launch(batch.launches.pop()) for batch in batches for _ in tuple(batch.launches)]\n    "
        "durable = owned.append_each(",
        seed=0,
    ),
    Mutant(
        name="launch without append",
        where=f"{_EXECUTOR}._add_launch",
        old="batch.events.append(",
        new="[].append(",
        seed=0,
    ),
    Mutant(
        name="memory is trusted after a failed append",
        where=f"{_OWNED_SWEEPS}.guard",
        old="sweep in self._sweeps and sweep not in self._in_doubt",
        new="sweep in self._sweeps",
        seed=2,
    ),
    # Messages
    Mutant(
        name="message deleted before its event is durable",
        where=f"{_CONTROLLER}._settle",
        old="    if message.message_id not in",
        new=(
            "    discard(self._store, owned_sweep.snapshot.sweep, message.message_id)\n    if message.message_id not in"
        ),
        seed=3,
    ),
    Mutant(
        name="message settled twice",
        where=f"{_CONTROLLER}._settle",
        old="message.message_id not in owned_sweep.snapshot.handled",
        new="message.message_id",
        seed=13,
    ),
    Mutant(
        name="resubmitted sweep trusts what it knew of the store",
        where=f"{_CONTROLLER}._settle",
        old="self._keys.forget_all(owned_sweep.snapshot)",
        new="pass",
        seed=15,
    ),
    Mutant(
        name="a missing artifact is not noticed",
        where="orchestrator.sweeps.request_handling:missed_artifacts",
        old="not is_there()",
        new="False",
        seed=65,
    ),
    # Attempts
    Mutant(
        name="success believed without a record",
        where="orchestrator.controller.attempt_outcomes:_success",
        old="if record is None:",
        new="if False:",
        seed=5,
    ),
    Mutant(
        name="attempt number is not claimed",
        where="orchestrator.storage.claims:take_attempt_number",
        old="while not _take_number(store, key, number, document):",
        new="while False:",
        seed=3,
    ),
    Mutant(
        name="runner is not released",
        where=f"{_CONTROLLER}._record",
        old="self._tracker.release(event.attempt_id)",
        new="pass",
        seed=0,
    ),
    Mutant(
        name="released before its end is on record",
        where=f"{_CONTROLLER}._news_of",
        old="ended.append(event)",
        new="ended.append(event); self._tracker.release(event.attempt_id)",
        seed=3,
    ),
    Mutant(
        name="hang is not noticed",
        where="orchestrator.controller.attempt_tracker:Heartbeats._verdict",
        old="if silent_s <= limit_s:",
        new="if True:",
        seed=12,
    ),
    Mutant(
        name="stop is followed by no end",
        where="orchestrator.controller.attempt_tracker:StopRequests.retry_or_kill",
        old="if stop.waited_s >= stop.grace_s:",
        new="if False:",
        seed=1,
    ),
    Mutant(
        name="attempts of sweeps in trouble are forgotten",
        where=f"{_OWNED_SWEEPS}.shelved",
        old="return [found[sweep] for sweep in sorted(found)]",
        new="return []",
        seed=42,
    ),
    Mutant(
        name="controller that has not read all sweeps launches",
        where=f"{_OWNED_SWEEPS}.is_blind",
        old="bool(self._unseen)",
        new="False",
        seed=330,
    ),
    Mutant(
        name="claim is skipped",
        where="orchestrator.storage.claims:Claims.take",
        old="    obstacle = self._write(key, sweep, now)",
        new="    return None",
        seed=15,
    ),
    Mutant(
        name="claim of another is taken before it runs out",
        where="orchestrator.storage.claims:_may_replace",
        old="return is_ours or left_s <= -SKEW_TOLERANCE_S or left_s > _LONGEST_S",
        new="return True",
        seed=15,
    ),
    # Policy
    Mutant(
        name="preemptions are charged",
        where="orchestrator.state.failure_policy:judge",
        old="if POLICY[kind].charge is Charge.JOB)",
        new=")",
        seed=10,
    ),
    Mutant(
        name="backoff is ignored",
        where="orchestrator.state.failure_policy:_backoff_s",
        old="return min(",
        new="return 0.0 * min(",
        seed=0,
    ),
    Mutant(
        name="failures are never too many",
        where="orchestrator.state.failure_policy:_spent_budget",
        old="if rule.charge is Charge.JOB and charged >= max_failures:",
        new="if False:",
        seed=48,
    ),
    Mutant(
        name="what cannot succeed is retried",
        where="orchestrator.state.failure_policy:_spent_budget",
        old="if rule.action is FailureAction.FAIL_JOB:",
        new="if False:",
        seed=0,
    ),
    Mutant(
        name="failures are not counted",
        where=f"{_FOLDING}._fail",
        old="view.failures.get(kind, 0) + 1",
        new="view.failures.get(kind, 0)",
        seed=0,
    ),
    Mutant(
        name="a new chance keeps old failures",
        where=f"{_FOLDING}._reopen",
        old="**_ANEW",
        new="**{**_ANEW, 'failures': view.failures}",
        seed=37,
    ),
    Mutant(
        name="attempt is not told of memory failures",
        where="orchestrator.controller.execution:_with_history",
        old="view.failures.get(FailureKind.OUT_OF_MEMORY, 0)",
        new="0",
        seed=10,
    ),
    Mutant(
        name="dropped jobs' attempts are forgotten",
        where=f"{_FOLDING}._retire",
        old="(view.name, view.key) in kept",
        new="view.name",
        seed=11,
    ),
    # Scheduling
    Mutant(
        name="a key is worked on twice",
        where="orchestrator.scheduling.scheduler:_live_keys",
        old="index.holdings.keys for index in indexes",
        new="() for index in indexes",
        seed=15,
    ),
    Mutant(
        name="claims of others are not looked at",
        where="orchestrator.scheduling.scheduler:Scheduler.decide",
        old="keys = set(view.claimed).union(",
        new="keys = set().union(",
        seed=0,
    ),
    Mutant(
        name="room is not taken",
        where=f"{_LAUNCHING}._start",
        old="self._room.take(size, spread)",
        new="pass",
        seed=5,
    ),
    Mutant(
        name="caps of a sweep are ignored",
        where=f"{_LAUNCHING}._cap_refusal",
        old="def _cap_refusal(self, queue: SweepQueue, size: AttemptDemand) -> str:",
        new="def _cap_refusal(self, queue: SweepQueue, size: AttemptDemand) -> str:\n    return ''",
        seed=10,
    ),
    Mutant(
        name="paused sweep goes on",
        where="orchestrator.scheduling.scheduler:_starting",
        old="if one.snapshot.state is SweepState.RUNNING and",
        new="if one.snapshot.state in {SweepState.RUNNING, SweepState.PAUSED} and",
        seed=11,
    ),
    Mutant(
        name="drained cluster goes on",
        where=f"{_CONTROLLER}._view",
        old="may_start=self._drain is None and not owned.is_blind",
        new="may_start=not owned.is_blind",
        seed=26,
    ),
    Mutant(
        name="what needs a lost job waits for ever",
        where="orchestrator.scheduling.lifecycle:_settled",
        old="found |= _skips(",
        new="_skips(",
        seed=25,
    ),
    Mutant(
        name="sweep ends before dropped attempts have",
        where="orchestrator.scheduling.lifecycle:_ending",
        old="if snapshot.leaving or not all(",
        new="if not all(",
        seed=1,
    ),
    Mutant(
        name="cancelled sweep leaves its attempts running",
        where="orchestrator.scheduling.lifecycle:follow_up",
        old="commands = [*_cancelled(index), *stops]",
        new="commands = [*_cancelled(index)]",
        seed=16,
    ),
    Mutant(
        name="job is launched before all that it needs",
        where="orchestrator.scheduling.sweep_index:SweepIndex._enter",
        old="if self._unmet[place]:",
        new="if self._unmet[place] > 1:",
        seed=0,
    ),
    # Blame
    Mutant(
        name="a failure is told with another node than the one at fault",
        where="orchestrator.controller.attempt_outcomes:_judge_end",
        old="node=report.node,\n            rank=failure.rank,",
        new="node='',\n            rank=failure.rank,",
        seed=3,
    ),
    Mutant(
        name="wrong numbers at one step are tried again and again",
        where="orchestrator.state.failure_policy:_repetition",
        old="if not is_same_step(first, later):",
        new="if first is not None:",
        seed=25,
    ),
    Mutant(
        name="the node that passed a step is blamed for the one that did not",
        where="orchestrator.scheduling.node_exclusion:_not_repeated",
        old="last = view.numerics[-1]",
        new="last = replace(view.numerics[-1], node=(view.attempt.nodes or ('',))[0] if view.attempt else '')",
        seed=10,
    ),
    # Shares
    Mutant(
        name="who waits falls behind",
        where="orchestrator.scheduling.queues:aging",
        old="return min(MAX_AGING, max(0, ",
        new="return -min(MAX_AGING, max(0, ",
        seed=9,
    ),
    Mutant(
        name="waiting does not count",
        where="orchestrator.scheduling.scheduler:_ranked",
        old="queue.base_priority + aging(",
        new="queue.base_priority + 0 * aging(",
        seed=9,
    ),
    Mutant(
        name="waiting counts without end",
        where="orchestrator.scheduling.queues:aging",
        old="min(MAX_AGING, ",
        new="max(0, ",
        seed=69,
    ),
    Mutant(
        name="weights are not looked at",
        where="orchestrator.scheduling.fairness:entitle",
        old="fair_share.weight / total",
        new="1.0 / len(fair_shares)",
        seed=14,
    ),
    Mutant(
        name="who has most goes first",
        where="orchestrator.scheduling.fairness:FairShare.key",
        old="return 0, share / self.weight",
        new="return 0, -share / self.weight",
        seed=24,
    ),
    Mutant(
        name="nobody's due is kept",
        where="orchestrator.scheduling.fairness:FairShare.key",
        old="if after <= self.entitlement + 1e-9:",
        new="if after <= 2.0:",
        seed=14,
    ),
    Mutant(
        name="no share grows while a round goes on",
        where="orchestrator.scheduling.fairness:FairShare.add",
        old="self.live = plus(self.live, requested)",
        new="del asked",
        seed=4,
    ),
)
