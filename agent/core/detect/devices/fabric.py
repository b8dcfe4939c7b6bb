"""NVIDIA's NVLink fabric: GPUs that are not in it, and its manager that does not run.

Owns how long either may take.  GPUs look well by every other number while their fabric is not set
up: CUDA refuses to begin ("system not yet initialized", 802), or collectives go by PCIe.  The
manager's unit alone proves nothing where no switch is, for its package fails there by design.
Shown, never acted on.  Pure.
"""

from __future__ import annotations

from ...model import DEGRADED, WARN, Verdict, labels_of
from ...series.streak import Streak
from ..detector import Detector, NodeView

UNIT = "nvidia-fabricmanager.service"
STATE, OUTSIDE = "accelerator_fabric_state", "accelerator_fabric_fault"
ACTIVE, FAILED = "host_unit_active", "host_unit_failed"
SWITCHES = "host_pci_nvswitches"
NAMES = frozenset((STATE, OUTSIDE, ACTIVE, FAILED, SWITCHES))
STATES = ("not_started", "in_progress", "failed")  # other words are of a fabric that is set up
JOIN_S = 300.0  # after a boot, a reset or a restart of the manager GPUs need minutes
RESTART_S = 60.0
NAMED_MAX = 16  # GPUs


class Fabric(Detector):
    """The verdict on this node's fabric.  Windows begin anew with the agent."""

    name = "fabric"
    reads = tuple(sorted(NAMES))
    warm_s = JOIN_S

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._streak = Streak(2)

    def look(self, view: NodeView) -> list[Verdict]:
        outside: dict[str, str] = {}  # device -> state
        able = switches = 0
        active, failed, read_s = True, False, {STATE: 0.0, ACTIVE: 0.0}
        for name, subject, value, boot_s in view.rows:
            labels = labels_of(subject) if name in NAMES else {}
            if name == STATE:
                able += value > 0.0
                read_s[STATE] = boot_s
            elif name == OUTSIDE and value > 0.0 and labels.get("fault") in STATES:
                outside[labels.get("device", "")] = labels["fault"]
            elif name in (ACTIVE, FAILED) and labels.get("unit") == UNIT:
                active = active and (value > 0.0) == (name == ACTIVE)
                failed = failed or (name == FAILED and value > 0.0)
                read_s[ACTIVE] = boot_s
            elif name == SWITCHES:
                switches = int(value)
        out = self._streak.add("GPUs", read_s[STATE], bool(outside)).seconds >= JOIN_S
        down = self._streak.add("unit", read_s[ACTIVE], not active).seconds >= RESTART_S
        if not out and not (down and (switches or (failed and able))):
            return []
        return [self._verdict(outside if out else {}, able, down, failed)]

    def _verdict(self, outside: dict[str, str], able: int, down: bool, failed: bool) -> Verdict:
        whys, evidence = [], []
        if outside:
            words = ", ".join(sorted(set(outside.values())))
            whys.append(f"{len(outside)} of {able} GPUs are not in the NVLink fabric ({words})")
            named = list(outside.items())[:NAMED_MAX]
            evidence.append(("GPUs", ", ".join(f"{gpu} {state}" for gpu, state in named)))
        if down:
            whys.append(f"{UNIT} {'failed' if failed else 'does not run'}")
            evidence.append(("unit", UNIT))
        # GPUs that do not tell of their fabric (before H100) begin nothing without its manager.
        return self.node_verdict(
            "fabric_manager_down", "fabric", DEGRADED if outside or not able else WARN,
            "; ".join(whys), tuple(evidence))
