"""What machines hear from their provider before they are taken back."""

from __future__ import annotations

import time

import pytest

from orchestrator.cluster.watch import (
    AwsNotices,
    GcpNotices,
    MetadataError,
    PreemptionNotice,
    Provider,
    source_of,
    wait_for_notice,
)
from orchestrator.core.errors import UserError
from tests.clusters.metadata_server import NOTHING, serve_metadata

ACTION = "/latest/meta-data/spot/instance-action"


@pytest.fixture
def metadata():
    with serve_metadata() as served:
        yield served


def test_aws_no_interruption_is_no_notice(metadata):
    assert AwsNotices(metadata.endpoint).ask(time.time()) is None


def test_aws_interruption_tells_the_seconds_left(metadata):
    metadata.paths[ACTION] = '{"action": "terminate", "time": "2026-01-01T00:02:00Z"}'
    notice = AwsNotices(metadata.endpoint).ask(1_767_225_600.0)  # 2026-01-01T00:00:00Z
    assert notice == PreemptionNotice(reason="AWS spot interruption (terminate)", seconds_left=120.0)


def test_aws_interruption_that_is_overdue_leaves_no_negative_time(metadata):
    metadata.paths[ACTION] = '{"action": "stop", "time": "2026-01-01T00:02:00Z"}'
    notice = AwsNotices(metadata.endpoint).ask(1_800_000_000.0)
    assert notice is not None
    assert notice.seconds_left == 0.0


def test_aws_token_that_has_ended_is_drawn_anew(metadata):
    source = AwsNotices(metadata.endpoint)
    source.ask(time.time())
    metadata.tokens = {"another"}
    assert source.ask(time.time()) is None
    assert len(metadata.tokens) == 2


def test_aws_token_is_in_no_representation(metadata):
    source = AwsNotices(metadata.endpoint)
    source.ask(time.time())
    assert "token0" not in repr(source)


@pytest.mark.parametrize("text", ["", "terminate", "[]", '{"action": "terminate"}', '{"action": "x", "time": "soon"}'])
def test_aws_notice_that_cannot_be_read_is_an_error_with_its_text(metadata, text):
    metadata.paths[ACTION] = text
    with pytest.raises(MetadataError, match="cannot be read"):
        AwsNotices(metadata.endpoint).ask(time.time())


def test_aws_service_that_is_no_aws_is_refused(metadata):
    metadata.status = 404
    with pytest.raises(MetadataError, match="no token"):
        AwsNotices(metadata.endpoint).ask(time.time())


def test_gcp_machine_that_stays_has_no_notice(metadata):
    metadata.paths |= NOTHING
    assert GcpNotices(metadata.endpoint).ask(time.time()) is None


def test_gcp_preemption_leaves_half_a_minute(metadata):
    metadata.paths |= {**NOTHING, "/computeMetadata/v1/instance/preempted": "TRUE"}
    notice = GcpNotices(metadata.endpoint).ask(time.time())
    assert notice == PreemptionNotice(reason="Google Cloud preempts the instance", seconds_left=30.0)


def test_gcp_maintenance_that_ends_the_machine_is_a_notice(metadata):
    metadata.paths |= {**NOTHING, "/computeMetadata/v1/instance/maintenance-event": "TERMINATE_ON_HOST_MAINTENANCE"}
    notice = GcpNotices(metadata.endpoint).ask(time.time())
    assert notice is not None
    assert notice.seconds_left == 3600.0


def test_service_that_is_away_is_an_error_that_names_it():
    with serve_metadata() as served:
        endpoint = served.endpoint
    with pytest.raises(MetadataError, match=endpoint):
        GcpNotices(endpoint).ask(time.time())


def test_watch_outlives_a_service_that_is_out_of_order(metadata):
    metadata.status = 503
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        if len(waits) == 5:
            metadata.status = 200
            metadata.interrupt(60.0)

    notice = wait_for_notice(AwsNotices(metadata.endpoint), every_s=0.5, sleep=sleep)
    assert waits == [0.5] * 5
    assert 55.0 < notice.seconds_left <= 60.0


def test_source_of_each_provider_asks_its_own_address():
    assert source_of(Provider.AWS, {}) == AwsNotices("http://169.254.169.254")
    assert source_of(Provider.GCP, {}) == GcpNotices("http://metadata.google.internal")


@pytest.mark.parametrize("endpoint", ["https://x", "file:///etc/passwd", "x:1"])
def test_source_at_no_http_address_is_refused(endpoint):
    with pytest.raises(UserError, match="ORCHESTRATOR_METADATA_ENDPOINT"):
        source_of(Provider.AWS, {"ORCHESTRATOR_METADATA_ENDPOINT": endpoint})
