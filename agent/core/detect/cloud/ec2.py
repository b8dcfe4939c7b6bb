"""What EC2 has announced for this instance: taken back, likely to be, or an event planned.

Owns which announcement is which fault, and what an operator may let it do.  The instance's health
says nothing of these: they are news of its owner.  Shown and counted; only the end of a spot
instance is acted on, and only where the operator allows `drain_node`.  Pure.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from ...actions import DRAIN_NODE
from ...model import DEGRADED, UNKNOWN, WARN, Settings, Verdict, labels_of
from ..detector import Detector, NodeView

SPOT_FAULT = "ec2_spot_interruption"
NOTICE = "EC2 gives notice two minutes ahead"
# Codes of events after which the instance is not where it was, or not at all.
ENDS = {
    "instance-stop": "stops this instance", "instance-retirement": "retires this instance",
    "instance-reboot": "reboots this instance", "system-reboot": "reboots this instance's host",
    "system-maintenance": "interrupts this instance's network or power",
}
TAKEN = ("terminate", "stop", "hibernate")  # any other action, or none to be read, is unknown
PREFIX = "ec2_"
LASTING = ("instance-stop", "instance-retirement")


class Ec2(Detector):
    """The verdicts on what is announced for this instance, one for each announcement."""

    name = "ec2"
    reads = (PREFIX,)

    def look(self, view: NodeView) -> list[Verdict]:
        found = []
        for name, subject, unix_s, _ in view.rows:
            if not name.startswith(PREFIX):
                continue
            labels = labels_of(subject)
            if name == "ec2_spot_action_timestamp_seconds":
                action = labels.get("action", "unknown")
                severity = DEGRADED if action in TAKEN else UNKNOWN
                found.append(self.node_verdict(
                    SPOT_FAULT, "", severity,
                    f"EC2 takes this spot instance back ({action}) {at(unix_s)}; {NOTICE}",
                    (("action", action),)))
            elif name == "ec2_rebalance_recommended_timestamp_seconds":
                found.append(self.node_verdict(
                    "ec2_rebalance_recommended", "", WARN,
                    f"EC2 says since {at(unix_s).removeprefix('at ')} that this spot instance is "
                    "likelier than others to be taken back"))
            elif name == "ec2_scheduled_event_timestamp_seconds":
                code, event = labels.get("code", ""), labels.get("event", "")
                found.append(self.node_verdict(
                    "ec2_scheduled_event", f"event/{event}",
                    DEGRADED if code in LASTING else WARN,
                    f"EC2 {ENDS.get(code, f'has planned {code} for this instance')}, "
                    f"not before {at(unix_s).removeprefix('at ')}",
                    (("event", event), ("code", code)),
                ))
        return found


def leaving(found: list[Verdict], settings: Settings) -> str:
    """Why the runs of this node are to leave it before its end; "" when they are not, or when the
    operator does not let that happen.  A notice that could not be understood ends nothing."""
    if DRAIN_NODE not in settings.allow:
        return ""
    known = (one for one in found if one.fault == SPOT_FAULT and one.severity == DEGRADED)
    return next((one.reason for one in known), "")


def acted(found: list[Verdict]) -> list[Verdict]:
    """The same, with the notice that is acted on marked as such."""
    return [msgspec.structs.replace(one, act=True) if one.fault == SPOT_FAULT else one
            for one in found]


def at(unix_s: float) -> str:
    """at 2026-11-20 10:02:00 UTC."""
    if not 0 < unix_s < 253402300800:  # the year 10000
        return "at a time that it does not say"
    return f"at {datetime.fromtimestamp(int(unix_s), UTC):%Y-%m-%d %H:%M:%S} UTC"
