"""All object names are made here (the table of names is in ``docs/design.md``)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from orchestrator.core.ids import is_key

_FLIGHT_RECORD = "/flight-record.json"
_PLAN = re.compile(r"plan-\d{4,}\.json", re.ASCII)
_PROBE = re.compile(r"probes/(?:(?:node-)?[0-9a-f]{16}|doctor-[0-9a-f]{16}(?:/.+)?)")
_TOMBSTONES = re.compile(r"trash/\d{12,}-[0-9a-f]{8}/\d{6,}\.json", re.ASCII)
_SHOWN = re.compile(r"sweeps/[^/]+/(?:report/[^/]+|progress\.json)|mlflow/[^/]+/[0-9a-f]{32}/artifacts/.+")
_NUMBERED = re.compile(r"(\d{8,})\.jsonl", re.ASCII)


def artifact_folder(key: str) -> str:
    """Folder of everything that belongs to a key; its kind is the key's first part."""
    return f"artifacts/{key.partition('-')[0]}/{key}"


def record_name(key: str) -> str:
    """The object whose existence is the commit of ``key``."""
    return f"{artifact_folder(key)}/record.json"


def parts_folder(key: str, attempt_number: int, nonce: str) -> str:
    """Folder of the payload of one attempt."""
    return f"{artifact_folder(key)}/parts/{attempt_number}-{nonce}"


def checkpoints_folder(key: str) -> str:
    """Folder of a job's checkpoints, one sub-folder ``checkpoint_name`` each."""
    return f"{artifact_folder(key)}/checkpoints"


def checkpoint_name(step: int, nonce: str) -> str:
    """Name of one checkpoint: names sort as their steps do."""
    return f"{step:012d}-{nonce}"


def metrics_segment(key: str, attempt_number: int, from_step: int, to_step: int) -> str:
    """Metrics of the steps ``from_step < step <= to_step`` of one attempt."""
    return f"metrics/{key}/{attempt_number:06d}/{from_step:012d}-{to_step:012d}.jsonl"


def metrics_folder(key: str) -> str:
    """Folder of all metric segments of a key."""
    return f"metrics/{key}/"


def is_of_key(name: str) -> bool:
    """Whether an object lies in the folder of a key's artifact or metrics: others may use the store's bucket, too."""
    return any(
        is_key(part) and name.startswith((f"{artifact_folder(part)}/", metrics_folder(part)))
        for part in name.split("/")[1:3]
    )


def attempts_folder(key: str) -> str:
    """Folder of the objects that allocate the attempts of a job."""
    return f"jobs/{key}/attempts/"


def attempt_name(key: str, number: int) -> str:
    """The object that allocates attempt ``number`` of a job."""
    return f"{attempts_folder(key)}{number:06d}.json"


def claim_name(key: str) -> str:
    """The claim on a job, over all sweeps and clusters."""
    return f"jobs/{key}/claim.json"


def job_logs_folder(sweep: str, job: str) -> str:
    """Folder of the logs of all attempts at a job, under whatever keys it had."""
    return f"logs/{sweep}/{job}/"


def attempt_logs_folder(sweep: str, job: str, attempt_number: int, key: str) -> str:
    """Folder of the logs of one attempt.

    Attempts are counted by key, so that after a change of the sweep another attempt 1 follows: the folder names both.
    With an empty key it is the folder of stores written before that.
    """
    return f"{job_logs_folder(sweep, job)}{attempt_number:06d}{f'-{short_hash(key)}' if key else ''}/"


def short_hash(key: str) -> str:
    """The first 8 hexadecimal digits of a key's hash."""
    return key.rpartition("-")[2][:8]


def log_name(sweep: str, job: str, attempt_number: int, rank: int = 0, *, key: str) -> str:
    """Text log of one rank of an attempt at a key; an attempt of one worker has rank 0 only."""
    return f"{attempt_logs_folder(sweep, job, attempt_number, key)}rank{rank}.log"


def flight_record_name(name: str) -> str:
    """The flight record of a rank whose gang hung, beside the log of this name."""
    return f"{name.removesuffix('.log')}{_FLIGHT_RECORD}"


def log_beside(name: str) -> str:
    """Inverse of ``flight_record_name``; any other name stays."""
    return f"{name.removesuffix(_FLIGHT_RECORD)}.log" if name.endswith(_FLIGHT_RECORD) else name


def lease_name(cluster: str) -> str:
    """The lease of the controller of a cluster."""
    return f"controllers/{cluster}/lease.json"


def drain_name(cluster: str) -> str:
    """The drain of a cluster, and whether it is complete."""
    return f"controllers/{cluster}/drain.json"


def nodes_name(cluster: str) -> str:
    """The nodes of a cluster and their idle runners, as last written by its controller."""
    return f"controllers/{cluster}/nodes.json"


def quotas_name(cluster: str) -> str:
    """The quotas of users on a cluster."""
    return f"controllers/{cluster}/quotas.json"


def probe_name(nonce: str) -> str:
    """A small object that checks a store; deleted at once."""
    return f"probes/{nonce}"


def is_probe(name: str) -> bool:
    """Whether an object is one that checks a store: of `probe_name`, of the doctor or of a node's check."""
    return _PROBE.fullmatch(name) is not None


def is_tombstones(name: str) -> bool:
    """Whether an object is a batch of tombstones of garbage collection; others may have a folder ``trash/``, too."""
    return _TOMBSTONES.fullmatch(name) is not None


def is_shown(name: str) -> bool:
    """Whether an object is for people alone: a sweep's report or progress, or a file of a run, as MLflow names it in
    the place that ``TrackingServer`` gives to an experiment.
    """
    return _SHOWN.fullmatch(name) is not None


def sweep_folder(sweep: str) -> str:
    """Folder of everything about one sweep."""
    return f"sweeps/{sweep}"


def spec_name(sweep: str, revision: int) -> str:
    """The resolved sweep.yaml of a plan revision."""
    return f"{sweep_folder(sweep)}/spec-{revision:04d}.yaml"


def plan_name(sweep: str, revision: int) -> str:
    """The plan of a revision."""
    return f"{sweep_folder(sweep)}/plan-{revision:04d}.json"


def is_plan(child: str) -> bool:
    """Whether something in a sweep's folder is the plan of a revision."""
    return _PLAN.fullmatch(child) is not None


def provenance_name(sweep: str, revision: int) -> str:
    """The provenance of a plan revision."""
    return f"{sweep_folder(sweep)}/provenance-{revision:04d}.json"


def submission_name(sweep: str, message_id: str) -> str:
    """The provenance of a submit, by the id of its message."""
    return f"{sweep_folder(sweep)}/provenance/{message_id}.json"


def journal_folder(sweep: str) -> str:
    """Folder of the journal's segments."""
    return f"{sweep_folder(sweep)}/journal/"


def journal_segment(sweep: str, sequence: int) -> str:
    """One segment of a sweep's journal."""
    return f"{journal_folder(sweep)}{sequence:08d}.jsonl"


def segment_numbers(children: Iterable[str]) -> list[int]:
    """Numbers of the segments (of a journal, of the log of a search) or snapshots in a folder, ascending."""
    return sorted(int(match[1]) for child in children if (match := _NUMBERED.fullmatch(child)))


def snapshots_folder(sweep: str) -> str:
    """Folder of the sweep's states at some points of its journal."""
    return f"{sweep_folder(sweep)}/snapshots/"


def snapshot_name(sweep: str, next_sequence: int) -> str:
    """The state after all segments of the journal before ``next_sequence``."""
    return f"{snapshots_folder(sweep)}{next_sequence:08d}.jsonl"


def inbox_folder(sweep: str) -> str:
    """Folder of clients' messages about a sweep."""
    return f"{sweep_folder(sweep)}/inbox/"


def inbox_message(sweep: str, message_id: str) -> str:
    """One message of a client."""
    return f"{inbox_folder(sweep)}{message_id}.json"


MARKERS = "inbox/"
"""Folder of the markers of messages: one list for all sweeps."""


def marker_name(sweep: str, message_id: str) -> str:
    """Marker of a message in a sweep's inbox, present or past; empty."""
    return f"{MARKERS}{sweep}/{message_id}"


def progress_name(sweep: str) -> str:
    """Live progress, overwritten every few seconds; only for display."""
    return f"{sweep_folder(sweep)}/progress.json"


def tracking_name(sweep: str, server: str) -> str:
    """The publisher's memory of one tracking server."""
    return f"{sweep_folder(sweep)}/tracking/{server}.json"


def publication_name(sweep: str) -> str:
    """Why a sweep is not published to its tracking server now; absent if it is."""
    return f"{sweep_folder(sweep)}/publication.json"


def report_name(sweep: str, file: str) -> str:
    """One file of the latest report."""
    return f"{sweep_folder(sweep)}/report/{file}"


def search_log_folder(key: str) -> str:
    """Folder of the questions and answers of a search job."""
    return f"searches/{key}/"


def search_log_head(key: str) -> str:
    """The head of a search's log, which names the folder of its segments."""
    return f"{search_log_folder(key)}log.json"


def search_log_segment(key: str, folder: str, sequence: int) -> str:
    """One segment of the log of a search job."""
    return f"{search_log_folder(key)}{folder}/{sequence:08d}.jsonl"


def notifications_folder(sweep: str) -> str:
    """Folder of the notifications of a sweep, sent or pending."""
    return f"{sweep_folder(sweep)}/notifications/"


def notification_name(sweep: str, notification_id: str) -> str:
    """One notification, with the state of each channel."""
    return f"{notifications_folder(sweep)}{notification_id}.json"


def notification_cursor(sweep: str) -> str:
    """Position up to which the journal was read for notifications."""
    return f"{sweep_folder(sweep)}/notified.json"


def notifications_since(cluster: str) -> str:
    """Time from which a cluster sends notifications: earlier events are not sent."""
    return f"controllers/{cluster}/notifications.json"
