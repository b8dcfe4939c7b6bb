"""What is counted of an incident, and that a fault is one event."""

from __future__ import annotations

import msgspec

from holdfast.agent.core.model import Decision, Incident, Verdict
from holdfast.agent.history.incident_log import IncidentLog


def test_an_incident_of_the_kernels_is_no_second_event():
    incident = Incident(
        "i1", "gpu_fell_off_bus", "node/a/gpu/0000:4e:00", "fatal", "", 0, 1.0, 1.0, "XID 79",
        "GPU 3 of a",
    )
    verdict = Verdict(incident.fault, incident.subject, "fatal", 1.0, "XID 79", detector="kernel")
    log = IncidentLog(())
    (record,) = log.follow(Decision(incidents=(incident,), verdicts=(verdict,))).records
    assert [(one.name, one.labels) for one in record.counts] == [
        ("incidents", ("kernel", "gpu_fell_off_bus", "fatal"))
    ]
    assert not log.follow(Decision(incidents=(incident,), verdicts=(verdict,))).records


def test_a_plan_is_told_once_however_many_incidents_it_answers():
    told = "planned generation 2 from the beginning"
    found = tuple(Incident(
        f"r/{number}", "rank_failed", f"run/r/rank/{number}", "degraded", "r", 1, 1.0, 1.0,
        "exit 1", f"rank {number}", timeline=((1.0, told),)) for number in range(3))
    log = IncidentLog(())
    texts = [line.text for line in log.follow(Decision(incidents=found)).lines]
    assert sum(told in text for text in texts) == 1 and len(texts) == 4
    again = [msgspec.structs.replace(one, timeline=(*one.timeline, (2.0, told[:19] + "3")))
             for one in found]
    texts = [line.text for line in log.follow(Decision(incidents=tuple(again))).lines]
    assert texts == [f"rank_failed: {told[:19]}3"]
