"""The JSON form of events."""

import json
from dataclasses import fields

import pytest

from orchestrator.core.contract import Outcome, Resources, Timings
from orchestrator.core.errors import ControllerError, FailureKind
from orchestrator.state import events
from orchestrator.state.events import EVENT_TYPES, Event, decode_event, encode_event, event_type
from orchestrator.state.spending import PricedAllocation

SAMPLES: list[Event] = [
    events.SweepAdopted(at_s=1.0, cluster="c", epoch=3, holder="h"),
    events.PlanAccepted(at_s=1.0, message_id="m", revision=2),
    events.SweepReopened(at_s=1.0, message_id="m"),
    events.CancelRequested(at_s=1.0, message_id="m"),
    events.SweepPaused(at_s=1.0, message_id="m", sender="ada", running=events.Running.CHECKPOINT),
    events.SweepResumed(at_s=1.0, message_id="m"),
    events.SweepStopping(at_s=1.0, message_id="m"),
    events.JobsCancelled(at_s=1.0, message_id="m", jobs=("i", "j")),
    events.JobsRetried(at_s=1.0, message_id="m", jobs=("i",)),
    events.PriorityChanged(at_s=1.0, message_id="m", priority=7),
    events.SweepTripped(at_s=1.0, reason="why"),
    events.NodeExcluded(at_s=1.0, node="n", reason="why", until_s=9.0),
    events.NodeDescribed(at_s=1.0, node="n", machine={"gpus": ["H100"], "driver": "550.54"}),
    events.AttemptPreempting(at_s=1.0, job="j", attempt_id="k.1", reason="why", grace_s=3.0),
    events.AttemptPlaced(
        at_s=1.0,
        job="j",
        attempt_id="k.1",
        nodes=("n",),
        lots=(PricedAllocation(accelerator="H100", is_spot=True, hourly=24.0),),
    ),
    events.AttemptLaunched(
        at_s=1.0,
        job="j",
        attempt_id="k.2",
        key="k",
        number=2,
        epoch=3,
        nodes=("n",),
        resources=Resources(cpus=2.0, gpus=1.0),
        num_workers=2,
        reason="room",
    ),
    events.MessageRefused(at_s=1.0, message_id="m", reason="why"),
    events.JobReused(at_s=1.0, job="j", key="k"),
    events.ArtifactMissed(at_s=1.0, job="j", key="k"),
    events.AttemptLaunched(at_s=1.0, job="j", attempt_id="k.1", key="k", number=1, epoch=3),
    events.AttemptSucceeded(
        at_s=1.0,
        job="j",
        attempt_id="k.1",
        outcome=Outcome.COMMITTED,
        metrics={"val_error": 0.5},
        timings=Timings(import_s=1.0, work_s=2.0),
        resumed_from_step=7,
    ),
    events.AttemptFailed(at_s=1.0, job="j", attempt_id="k.1", kind=FailureKind.OUT_OF_MEMORY, message="m\n\u2026"),
    events.AttemptLost(at_s=1.0, job="j", attempt_id="k.1", reason="gone"),
    events.JobFailed(at_s=1.0, job="j", reason="why"),
    events.JobSkipped(at_s=1.0, job="j", because="i"),
    events.JobCancelled(at_s=1.0, job="j"),
    events.SweepFinished(at_s=1.0, status=events.SweepEnding.FAILED),
]


def test_samples_cover_every_event_type() -> None:
    assert {type(event) for event in SAMPLES} == set(EVENT_TYPES)


@pytest.mark.parametrize("event", SAMPLES, ids=event_type)
def test_event_through_json_and_back_is_equal(event: Event) -> None:
    decoded = decode_event(json.loads(json.dumps(encode_event(event))))
    assert decoded == event
    kinds = {item.name: type(getattr(event, item.name)) for item in fields(event)}
    assert {item.name: type(getattr(decoded, item.name)) for item in fields(decoded)} == kinds


def test_event_written_before_a_field_existed_is_read_with_its_default() -> None:
    document = encode_event(next(event for event in SAMPLES if isinstance(event, events.AttemptSucceeded)))
    del document["resumed_from_step"]
    decoded = decode_event(document)
    assert isinstance(decoded, events.AttemptSucceeded)
    assert decoded.resumed_from_step is None


@pytest.mark.parametrize("change", [{"version": 2}, {"type": "job_levitated"}])
def test_event_of_a_newer_program_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ControllerError, match="does not know"):
        decode_event({**encode_event(SAMPLES[5]), **change})
