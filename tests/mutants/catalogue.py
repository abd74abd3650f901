"""Bugs that the simulation must find: what each of the program's guarantees hangs on, taken away."""

from __future__ import annotations

from tests.mutants.engine import Mutant
from tests.simulation.families import Family

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
        family=Family.DEATHS,
    ),
    Mutant(
        name="epoch does not rise",
        where="orchestrator.sweeps.lease:Lease.acquire",
        old="else found[0].epoch) + 1",
        new="else found[0].epoch)",
        family=Family.DEATHS,
    ),
    Mutant(
        name="journal goes around another writer's segment",
        where="orchestrator.storage.journal:Journal.append",
        old="raise JournalFencedError(message) from error",
        new="self.next_sequence += 1; self.append(events); self.next_sequence -= 1; del message, error",
        family=Family.DEATHS,
    ),
    Mutant(
        name="adoption is not written",
        where="orchestrator.sweeps.ledger:SweepLedger.append",
        old="[*([self._adoption] if self._adoption else []), ",
        new="[",
        family=Family.DEATHS,
    ),
    Mutant(
        name="a sweep of an earlier epoch is not adopted",
        where=f"{_OWNED_SWEEPS}._load",
        old="needs_adoption = not is_ours or sweep in self._in_doubt",
        new="needs_adoption = snapshot.cluster != me.cluster",
        family=Family.DEATHS,
    ),
    # Intent before effect
    Mutant(
        name="launch before append",
        where=f"{_EXECUTOR}._carry_out",
        old="durable = owned.append_each(",
        new="[self._launch(batch.launches.pop()) for batch in batches for _ in tuple(batch.launches)]\n    "
        "durable = owned.append_each(",
    ),
    Mutant(
        name="launch without append",
        where=f"{_EXECUTOR}._add_launch",
        old="batch.events.append(",
        new="[].append(",
    ),
    Mutant(
        name="memory is trusted after a failed append",
        where=f"{_OWNED_SWEEPS}.guard",
        old="sweep in self._sweeps and sweep not in self._in_doubt",
        new="sweep in self._sweeps",
        family=Family.STORMS,
    ),
    # Messages
    Mutant(
        name="message deleted before its event is durable",
        where=f"{_CONTROLLER}._settle",
        old="    if message.message_id not in",
        new=(
            "    discard(self._store, owned_sweep.snapshot.sweep, message.message_id)\n    if message.message_id not in"
        ),
        family=Family.DEATHS,
    ),
    Mutant(
        name="message settled twice",
        where=f"{_CONTROLLER}._settle",
        old="message.message_id not in owned_sweep.snapshot.handled",
        new="message.message_id",
        family=Family.DEATHS,
    ),
    Mutant(
        name="resubmitted sweep trusts what it knew of the store",
        where=f"{_CONTROLLER}._settle",
        old="self._keys.forget_all(owned_sweep.snapshot)",
        new="pass",
    ),
    Mutant(
        name="a missing artifact is not noticed",
        where="orchestrator.sweeps.request_handling:missed_artifacts",
        old="not is_there()",
        new="False",
    ),
    # Attempts
    Mutant(
        name="success believed without a record",
        where="orchestrator.controller.attempt_outcomes:_success",
        old="if record is None:",
        new="if False:",
    ),
    Mutant(
        name="attempt number is not claimed",
        where="orchestrator.controller.attempt_requests:allocate_attempt",
        old="while not _claim(store, job, number, claimant):",
        new="while False:",
        family=Family.DEATHS,
    ),
    Mutant(
        name="runner is not released",
        where=f"{_CONTROLLER}._record",
        old="self._tracker.release(event.attempt_id)",
        new="pass",
    ),
    Mutant(
        name="released before its end is on record",
        where=f"{_CONTROLLER}._news_of",
        old="ended.append(event)",
        new="ended.append(event); self._tracker.release(event.attempt_id)",
        family=Family.DEATHS,
    ),
    Mutant(
        name="hang is not noticed",
        where="orchestrator.controller.attempt_tracker:Heartbeats._verdict",
        old="if silent_s <= limit_s:",
        new="if True:",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="stop is followed by no end",
        where="orchestrator.controller.attempt_tracker:StopRequests.retry_or_kill",
        old="if stop.waited_s >= stop.grace_s:",
        new="if False:",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="attempts of sweeps in trouble are forgotten",
        where=f"{_OWNED_SWEEPS}.shelved",
        old="return [found[sweep] for sweep in sorted(found)]",
        new="return []",
        family=Family.STORMS,
    ),
    Mutant(
        name="controller that has not read all sweeps launches",
        where=f"{_OWNED_SWEEPS}.is_blind",
        old="bool(self._unseen)",
        new="False",
        family=Family.ALL,
    ),
    Mutant(
        name="claim is skipped",
        where="orchestrator.storage.claims:Claims.take",
        old="    obstacle = self._write(key, sweep, now)",
        new="    return None",
    ),
    Mutant(
        name="claim of another is taken before it runs out",
        where="orchestrator.storage.claims:_may_replace",
        old="return is_ours or left_s <= -SKEW_TOLERANCE_S or left_s > _LONGEST_S",
        new="return True",
    ),
    # Policy
    Mutant(
        name="preemptions are charged",
        where="orchestrator.state.failure_policy:judge",
        old="if POLICY[kind].charge is Charge.JOB)",
        new=")",
    ),
    Mutant(
        name="backoff is ignored",
        where="orchestrator.state.failure_policy:_backoff_s",
        old="return min(",
        new="return 0.0 * min(",
    ),
    Mutant(
        name="failures are never too many",
        where="orchestrator.state.failure_policy:_spent_budget",
        old="if rule.charge is Charge.JOB and charged >= max_failures:",
        new="if False:",
    ),
    Mutant(
        name="what cannot succeed is retried",
        where="orchestrator.state.failure_policy:_spent_budget",
        old="if rule.action is FailureAction.FAIL_JOB:",
        new="if False:",
    ),
    Mutant(
        name="failures are not counted",
        where=f"{_FOLDING}._fail",
        old="view.failures.get(kind, 0) + 1",
        new="view.failures.get(kind, 0)",
    ),
    Mutant(
        name="a new chance keeps old failures",
        where=f"{_FOLDING}._reopen",
        old="**_ANEW",
        new="**{**_ANEW, 'failures': view.failures}",
        family=Family.STORMS,
    ),
    Mutant(
        name="attempt is not told of memory failures",
        where="orchestrator.controller.execution:_with_history",
        old="view.failures.get(FailureKind.OUT_OF_MEMORY, 0)",
        new="0",
    ),
    Mutant(
        name="dropped jobs' attempts are forgotten",
        where=f"{_FOLDING}._retire",
        old="(view.name, view.key) in kept",
        new="view.name",
        family=Family.CLIENTS,
    ),
    # Scheduling
    Mutant(
        name="a key is worked on twice",
        where="orchestrator.scheduling.scheduler:_live_keys",
        old="index.holdings.keys for index in indexes",
        new="() for index in indexes",
    ),
    Mutant(
        name="claims of others are not looked at",
        where="orchestrator.scheduling.scheduler:Scheduler.decide",
        old="keys = set(view.claimed).union(",
        new="keys = set().union(",
    ),
    Mutant(
        name="room is not taken",
        where=f"{_LAUNCHING}._start",
        old="self._room.take(size, spread)",
        new="pass",
    ),
    Mutant(
        name="caps of a sweep are ignored",
        where=f"{_LAUNCHING}._cap_refusal",
        old="def _cap_refusal(self, queue: SweepQueue, size: AttemptDemand) -> str:",
        new="def _cap_refusal(self, queue: SweepQueue, size: AttemptDemand) -> str:\n    return ''",
    ),
    Mutant(
        name="paused sweep goes on",
        where="orchestrator.scheduling.scheduler:_starting",
        old="if one.snapshot.state is SweepState.RUNNING and",
        new="if one.snapshot.state in {SweepState.RUNNING, SweepState.PAUSED} and",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="drained cluster goes on",
        where=f"{_CONTROLLER}._view",
        old="may_start=self._drain is None and not owned.is_blind",
        new="may_start=not owned.is_blind",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="what needs a lost job waits for ever",
        where="orchestrator.scheduling.lifecycle:_settled",
        old="found |= _skips(",
        new="_skips(",
    ),
    Mutant(
        name="sweep ends before dropped attempts have",
        where="orchestrator.scheduling.lifecycle:_ending",
        old="if snapshot.leaving or not all(",
        new="if not all(",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="cancelled sweep leaves its attempts running",
        where="orchestrator.scheduling.lifecycle:follow_up",
        old="commands = [*_cancelled(index), *stops]",
        new="commands = [*_cancelled(index)]",
        family=Family.CLIENTS,
    ),
    Mutant(
        name="job is launched before all that it needs",
        where="orchestrator.scheduling.sweep_index:SweepIndex._enter",
        old="if self._unmet[place]:",
        new="if self._unmet[place] > 1:",
    ),
    # Blame
    Mutant(
        name="a failure is told with another node than the one at fault",
        where="orchestrator.controller.attempt_outcomes:_judge_end",
        old="node=report.node,\n            rank=failure.rank,",
        new="node='',\n            rank=failure.rank,",
        family=Family.DEATHS,
    ),
    Mutant(
        name="wrong numbers at one step are tried again and again",
        where="orchestrator.state.failure_policy:_repetition",
        old="if not is_same_step(first, later):",
        new="if first is not None:",
    ),
    Mutant(
        name="the node that passed a step is blamed for the one that did not",
        where="orchestrator.scheduling.node_exclusion:_not_repeated",
        old="last = view.numerics[-1]",
        new="last = replace(view.numerics[-1], node=(view.attempt.nodes or ('',))[0] if view.attempt else '')",
    ),
    # Shares
    Mutant(
        name="who waits falls behind",
        where="orchestrator.scheduling.queues:aging",
        old="return min(MAX_AGING, max(0, ",
        new="return -min(MAX_AGING, max(0, ",
        family=Family.SHARES,
    ),
    Mutant(
        name="waiting does not count",
        where="orchestrator.scheduling.scheduler:_ranked",
        old="queue.base_priority + aging(",
        new="queue.base_priority + 0 * aging(",
        family=Family.SHARES,
    ),
    Mutant(
        name="waiting counts without end",
        where="orchestrator.scheduling.queues:aging",
        old="min(MAX_AGING, ",
        new="max(0, ",
        family=Family.SHARES,
    ),
    Mutant(
        name="weights are not looked at",
        where="orchestrator.scheduling.fairness:entitle",
        old="fair_share.weight / total",
        new="1.0 / len(fair_shares)",
        family=Family.SHARES,
    ),
    Mutant(
        name="who has most goes first",
        where="orchestrator.scheduling.fairness:FairShare.key",
        old="return 0, share / self.weight",
        new="return 0, -share / self.weight",
        family=Family.SHARES,
    ),
    Mutant(
        name="nobody's due is kept",
        where="orchestrator.scheduling.fairness:FairShare.key",
        old="if after <= self.entitlement + 1e-9:",
        new="if after <= 2.0:",
        family=Family.SHARES,
    ),
    Mutant(
        name="no share grows while a round goes on",
        where="orchestrator.scheduling.fairness:FairShare.add",
        old="self.live = plus(self.live, requested)",
        new="del asked",
        family=Family.SHARES,
    ),
)
