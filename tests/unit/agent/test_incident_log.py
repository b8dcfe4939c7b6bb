"""What is counted of an incident, and that a fault is one event."""

from __future__ import annotations

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
