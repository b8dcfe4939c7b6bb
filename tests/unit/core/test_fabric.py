"""The NVLink fabric: GPUs outside it, and a manager that does not run."""

from __future__ import annotations

import pytest
from detectors import judged

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.detect.devices.fabric import JOIN_S, RESTART_S, UNIT, Fabric
from holdfast.agent.core.model import (
    DEGRADED,
    WARN,
    Now,
    Observed,
    Settings,
    StoreView,
    readings_of,
)
from holdfast.agent.core.node import Node

LOOK_S = 15.0


def gpus(*states: str) -> list[tuple[str, str, float]]:
    """What NVML says of the fabric of each GPU; "" where it is not told (before H100)."""
    numbers = {"": 0, "not_started": 1, "in_progress": 2}
    rows = []
    for device, state in enumerate(states):
        where = f"vendor=nvidia,device={device}"
        rows.append(("accelerator_fabric_state", where, float(numbers.get(state, 3))))
        rows += [("accelerator_fabric_fault", f"{where},fault={one}", float(one == state))
                 for one in ("not_started", "in_progress", "failed", "degraded_bandwidth") if state]
    return rows


def unit(state: str) -> list[tuple[str, str, float]]:
    rows = [("host_unit_active", f"unit={UNIT}", float(state == "active"))]
    return rows + [("host_unit_failed", f"unit={UNIT}", 1.0)] * (state == "failed")


SWITCHES = [("host_pci_nvswitches", "", 4.0)]
WELL, OLD = gpus("well", "well"), gpus("", "")  # of an H100's node, of an A100's


def after(rows, seconds: float, fabric: Fabric | None = None, begin_s: float = 1000.0):
    """What stands after it was so for that long."""
    fabric, at_s = fabric or Fabric("a"), begin_s
    while True:
        found = judged(fabric, [(*row, at_s) for row in rows])
        if at_s - begin_s >= seconds:
            return found[0] if found else None
        at_s += LOOK_S


@pytest.mark.parametrize(("rows", "seconds", "severity", "reason"), [
    (WELL + unit("active") + SWITCHES, JOIN_S, "", ""),
    (gpus("well", "in_progress"), JOIN_S - LOOK_S, "", ""),  # it may join yet
    (gpus("well", "in_progress"), JOIN_S, DEGRADED,
     "1 of 2 GPUs are not in the NVLink fabric (in_progress)"),
    (gpus("failed", "not_started") + unit("failed") + SWITCHES, JOIN_S, DEGRADED,
     f"2 of 2 GPUs are not in the NVLink fabric (failed, not_started); {UNIT} failed"),
    (gpus("well", "degraded_bandwidth"), JOIN_S, "", ""),  # in the fabric: the device's health
    (OLD + unit("failed") + SWITCHES, RESTART_S, DEGRADED, f"{UNIT} failed"),
    (OLD + unit("inactive") + SWITCHES, RESTART_S, DEGRADED, f"{UNIT} does not run"),
    (OLD + unit("inactive") + SWITCHES, RESTART_S - LOOK_S, "", ""),  # it is started anew
    (WELL + unit("inactive") + SWITCHES, RESTART_S, WARN, f"{UNIT} does not run"),
    (WELL + unit("failed"), RESTART_S, WARN, f"{UNIT} failed"),  # B200: no switch of the host's
    (WELL + unit("inactive"), JOIN_S, "", ""),  # a guest, whose host manages the fabric
    (OLD + unit("failed"), JOIN_S, "", ""),  # no switch here: its package fails by design
    (OLD + SWITCHES, JOIN_S, "", ""),  # it runs in a container: no unit to be told of
])
def test_what_is_wrong_with_a_fabric(rows, seconds, severity, reason):
    verdict = after(rows, seconds)
    assert (verdict and (verdict.severity, verdict.reason) or ("", "")) == (severity, reason)
    assert verdict is None or (verdict.fault, verdict.subject, verdict.act) == (
        "fabric_manager_down", "node/a/fabric", False)


def test_one_good_reading_begins_the_wait_anew():
    fabric, bad = Fabric("a"), gpus("in_progress")
    assert after(bad, JOIN_S - LOOK_S, fabric) is None
    assert after(WELL, 0.0, fabric, 2000.0) is None
    assert after(bad, JOIN_S - LOOK_S, fabric, 3000.0) is None
    assert after(bad, 0.0, fabric, 3000.0 + JOIN_S) is not None


def test_the_same_reading_looked_at_again_is_no_longer_wait():
    fabric = Fabric("a")
    for _ in range(1000):
        assert after(gpus("in_progress"), 0.0, fabric) is None


def test_it_is_an_incident_that_names_the_gpus_and_closes():
    node, rows = Node("a", Settings(), load_runbooks()), gpus("well", "in_progress")
    incidents = {}
    for look in range(60):
        at_s = 1000.0 + look * LOOK_S
        said = rows if look < 30 else WELL
        samples = readings_of([(*row, at_s) for row in said])
        decision = node.step(Now(at_s, 1e9 + at_s, "b"),
                             Observed(samples=samples, store=StoreView(up=True)))
        incidents |= {one.id: one for one in decision.incidents}
    (incident,) = incidents.values()
    assert (incident.fault, incident.state) == ("fabric_manager_down", "closed")
    assert dict(incident.evidence)["GPUs"] == "1 in_progress"
    assert incident.would_have == "ask_person: a person's part"
