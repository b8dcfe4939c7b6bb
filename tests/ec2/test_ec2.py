"""EC2's instance metadata: documents -> samples -> /metrics text and verdicts, and a service that
is slow, refuses, breaks off, floods or speaks the first version alone.  HOLDFAST_GOLDEN=write
makes the golden file anew.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from detectors import of_node
from hypothesis import given
from hypothesis import strategies as st
from pages import page, same_as_golden

from holdfast.agent.config.load import load
from holdfast.agent.core.detect.cloud.ec2 import at, leaving
from holdfast.agent.core.model import Now, Observed, Settings, StoreView, readings_of
from holdfast.agent.core.node import Node
from holdfast.agent.telemetry.collectors import Runner
from holdfast.collectors import ALL, ec2
from holdfast.collectors.contract import NoData, Roots, Sample
from holdfast.collectors.ec2 import DOCUMENT, REBALANCE, SCHEDULED, SPOT, Ec2Collector
from holdfast.collectors.sources import imds
from holdfast.collectors.sources.imds import Refused

HERE = Path(__file__).resolve().parent
EVENT = {
    "NotBefore": "21 Nov 2026 09:00:43 GMT", "Code": "instance-retirement", "State": "active",
    "Description": "The instance is running on degraded hardware",
    "EventId": "instance-event-0d59937288b749b32", "NotAfter": "21 Nov 2026 09:17:23 GMT",
}


def announce(service) -> None:
    service.says(SPOT, {"action": "terminate", "time": "2026-11-20T10:02:00Z"})
    service.says(REBALANCE, {"noticeTime": "2026-11-20T09:50:00Z"})
    service.says(SCHEDULED, [EVENT, {**EVENT, "EventId": "old", "State": "completed"}])


def values(samples) -> dict[tuple[str, str], float]:
    return {(one.name.removeprefix("ec2_"), one.subject): one.value for one in samples}


def faults(samples) -> dict[str, str]:
    found = of_node(samples)
    return {one.fault: one.reason for one in found}


def test_everything_at_once_as_the_page_and_the_verdicts_show_it(service):
    announce(service)
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.collectors", "ec2", json.dumps(service.roots)],
        input="1.0\n", capture_output=True, text=True, timeout=30, check=True,
    )
    samples = [Sample(*one) for one in json.loads(done.stdout)["samples"]]
    text = page(samples, Ec2Collector.metrics)
    same_as_golden(HERE / "golden/spot.txt", text)
    assert faults(samples) == {
        "ec2_spot_interruption": "EC2 takes this spot instance back (terminate) at 2026-11-20 "
        "10:02:00 UTC; EC2 gives notice two minutes ahead",
        "ec2_rebalance_recommended": "EC2 says since 2026-11-20 09:50:00 UTC that this spot "
        "instance is likelier than others to be taken back",
        "ec2_scheduled_event": "EC2 retires this instance, not before 2026-11-21 09:00:43 UTC",
    }


def test_an_instance_of_which_nothing_is_announced(service):
    found = values(Ec2Collector().collect(service.roots, 1.0))
    (labels,) = (subject for name, subject in found if name == "instance_info")
    assert "type=p5.48xlarge" in labels and "placement_group=," in labels
    assert "123456789012" not in labels and "10.1.2.3" not in labels
    assert {name for name, _ in found} == {"instance_info", "metadata_rejected_total"}


def test_one_token_serves_many_questions_and_a_taken_back_one_is_renewed(service):
    collector = Ec2Collector()
    collector.collect(service.roots, 1.0)
    collector.collect(service.roots, 2.0)
    assert [verb for verb, _ in service.asked].count("PUT") == 1
    service.asked.clear()
    service.token = "another=="
    collector.collect(service.roots, 3.0)
    assert [verb for verb, _ in service.asked] == ["GET", "PUT", "GET", "GET", "GET"]


def test_version_one_alone_is_no_data(service):
    service.token_status = 404
    with pytest.raises(NoData, match="only version 2"):
        Ec2Collector().collect(service.roots, 1.0)
    assert [verb for verb, _ in service.asked] == ["PUT"], "nothing is asked without a token"


@pytest.mark.parametrize(("status", "token", "said"), [
    (403, "x", "HttpEndpoint=enabled"), (500, "x", "status 500 instead"),
    (200, "", "instead of a token"), (200, "a\tb", "instead of a token"),
    (200, "x" * 5000, "instead of a token"),
])
def test_a_refused_or_strange_token_is_an_error(service, status, token, said):
    service.token_status, service.token = status, token
    with pytest.raises(Refused, match=said):
        Ec2Collector().collect(service.roots, 1.0)


def test_a_refused_question_is_an_error_and_a_flood_ends_at_its_bound(service):
    service.status[SPOT] = 503
    with pytest.raises(Refused, match="status 503"):
        Ec2Collector().collect(service.roots, 1.0)
    service.status.clear()
    service.says(SPOT, "x" * (imds.ANSWER_MAX_BYTES + 1))
    with pytest.raises(Refused, match="longer than"):
        Ec2Collector().collect(service.roots, 1.0)


@pytest.mark.parametrize("path", ["token", SPOT])
def test_a_service_that_never_answers_is_given_up(service, monkeypatch, path):
    monkeypatch.setattr(imds, "TIMEOUT_S", 0.1)
    service.slow.add(path)
    with pytest.raises(Refused, match="hop limit must be 2"):
        Ec2Collector().collect(service.roots, 1.0)


def test_a_service_that_drips_is_given_up(service, monkeypatch):
    monkeypatch.setattr(imds, "TOTAL_S", 0.3)
    service.drip.add(SPOT)
    with pytest.raises(Refused, match="took longer than 0.3 s"):
        Ec2Collector().collect(service.roots, 1.0)


def test_nobody_there_is_an_error():
    roots = Roots(sys="/nowhere", ec2="127.0.0.1:9")
    with pytest.raises(OSError, match="refused"):
        Ec2Collector().collect(roots, 1.0)


@pytest.mark.parametrize("text", ["", '{"action": "termi', "[]", "null", "\x00\xff", "[" * 50000,
                                  '{"time": "2026-11-20T10:02:00Z"}'])
def test_a_spot_notice_that_cannot_be_read_is_still_a_notice(service, text):
    service.says(SPOT, text)
    service.says(REBALANCE, "{")
    samples = Ec2Collector().collect(service.roots, 1.0)
    rows = values(samples)
    assert rows["spot_action_timestamp_seconds", "action=unknown"] == 0
    assert rows["metadata_rejected_total", "document=spot_action"] == 1
    assert rows["metadata_rejected_total", "document=rebalance"] == 1
    assert "(unknown) at a time that it does not say" in faults(samples)["ec2_spot_interruption"]
    found = of_node(samples)
    assert found[0].severity == "unknown"
    assert leaving(found, Settings(allow=("drain_node",))) == "", "unknown ends nothing"
    assert "ec2_rebalance_recommended" not in faults(samples)


def test_an_answer_that_breaks_off_costs_itself(service):
    announce(service)
    service.cut.add(SPOT)
    found = values(Ec2Collector().collect(service.roots, 1.0))
    assert found["spot_action_timestamp_seconds", "action=unknown"] == 0
    assert "rebalance_recommended_timestamp_seconds" in {name for name, _ in found}


def test_one_bad_event_hides_no_other(service):
    service.says(SCHEDULED, [7, {**EVENT, "NotBefore": "soon"}])
    samples = Ec2Collector().collect(service.roots, 1.0)
    assert values(samples)["metadata_rejected_total", "document=scheduled_events"] == 1
    assert "not before a time that it does not say" in faults(samples)["ec2_scheduled_event"]


def test_identity_that_is_refused_costs_no_announcement(service):
    announce(service)
    service.status[DOCUMENT] = 500
    found = values(Ec2Collector().collect(service.roots, 1.0))
    assert found["metadata_rejected_total", "document=identity"] == 1
    assert ("spot_action_timestamp_seconds", "action=terminate") in found


def test_only_a_machine_of_ec2_is_asked(tmp_path):
    roots = Roots(sys=str(tmp_path))
    vendor = tmp_path / "class/dmi/id/sys_vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("Dell Inc.\n")
    assert Ec2Collector().here(roots) == "not an instance of EC2"
    with pytest.raises(NoData):
        Ec2Collector().collect(roots, 1.0)
    vendor.write_text("Amazon EC2\n")
    assert Ec2Collector().here(roots) == ""
    assert Ec2Collector().here(Roots(sys="/nowhere", ec2="10.0.0.1:80")) == ""


def test_a_service_that_hangs_never_delays_the_agent(service, tmp_path):
    """The whole way: runner, child, deadline."""
    service.slow.add("token")
    off = tuple(one.name for one in ALL if one.name != "ec2")
    config = load(None, {
        "collectors.disable": (off, "test"), "collectors.deadline_s": (0.2, "test"),
        "collectors.ec2_metadata": (service.address, "test"),
    }).config
    troubles: list[str] = []

    async def scenario() -> int:
        runner = Runner(config, lambda part, error: troubles.append(f"{part}: {error}"))
        task = asyncio.create_task(runner.run())
        turns = 0
        while not troubles:
            await asyncio.sleep(0.01)
            turns += 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return turns

    turns = asyncio.run(asyncio.wait_for(scenario(), 20.0))
    assert "ec2" in troubles[0]
    assert turns > 2, "the loop waited for the service"


def test_runs_end_only_where_the_operator_allows_it(service):
    announce(service)
    samples = tuple(Ec2Collector().collect(service.roots, 1.0))
    found = of_node(samples)
    assert leaving(found, Settings()) == ""
    assert "terminate" in leaving(found, Settings(allow=("drain_node",), single_node=False))
    assert "terminate" in leaving(found, Settings(allow=("drain_node",)))
    assert leaving(found[1:], Settings(allow=("drain_node",))) == ""


def test_with_a_store_the_announced_end_drains_the_node_itself(service):
    announce(service)
    samples = tuple(Ec2Collector().collect(service.roots, 1.0))
    node = Node("a", Settings(allow=("drain_node",), single_node=False), {})
    decision = node.step(Now(100.0, 1e9, "b"), Observed(
        samples=readings_of(samples), store=StoreView(up=True)))
    (body,) = [one.body.body for one in decision.effects
                if getattr(one.body, "key", "") == "node/a"]
    drained = msgspec.json.decode(body)
    assert drained["excluded"] and drained["draining"] and "terminate" in drained["reason"]


@given(st.integers(1, 253402300799))
def test_dates_are_those_of_the_calendar(unix_s):
    then = datetime.fromtimestamp(unix_s, UTC)
    assert at(float(unix_s)) == f"at {then:%Y-%m-%d %H:%M:%S} UTC"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["action", "time", "noticeTime", "NotBefore", "Code", "State", "EventId"]),
        inner, max_size=4),
    max_leaves=8,
)


@given(JSON, st.sampled_from([ec2.spot_action, ec2.rebalance, ec2.scheduled]))
def test_no_document_is_too_strange(document, understand):
    try:
        rows = list(understand(document))
    except ValueError:
        return
    for _, subject, value in rows:
        assert value >= 0 and subject.count("=") == subject.count(",") + bool(subject)
