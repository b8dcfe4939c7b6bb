"""Network mounts, drives and names that this node asks and gets no answer from.

Owns how late is slow and how long is hung.  Shown, never acted on: what hangs may be
the server's matter, and every node sees it.  Pure.
"""

from __future__ import annotations

from ...model import DEGRADED, WARN, Reading, Verdict, labels_of
from ...series.streak import Streak
from ..detector import Detector, NodeView

HUNG_S = 10.0  # a question without an answer
SLOW_S = 2.0  # an answer; usual is some ms, and a server under a checkpoint's load 0.1 s
SLOW_COUNT = 3  # such answers after each other
FAILED_COUNT = 2  # a lookup that failed once may have been a lost packet
KEYS_MAX = 256
NAMES = frozenset((
    "host_mount_response_seconds", "host_mount_waiting_seconds", "host_mount_failed",
    "host_nvme_waiting_seconds", "host_dns_waiting_seconds", "host_dns_failed",
    "host_dns_lookup_seconds",
))
ERRORS = {
    "ENOTCONN": "the program that serves it is dead", "ESTALE": "its server does not know it",
    "EAI_AGAIN": "no server answered", "EAI_NONAME": "there is no such name",
}


class Reach(Detector):
    """The verdicts on what this node waits for."""

    name = "reach"
    reads = tuple(sorted(NAMES))
    warm_s = 60.0

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._streak = Streak(KEYS_MAX)
        self._last: dict[str, Verdict] = {}  # of what is bad in a row: stays while it waits again

    def look(self, view: NodeView) -> list[Verdict]:
        own = [one for one in view.rows if one[0] in NAMES]
        failed = {one[1].rpartition(",error=")[0]: one for one in own
                  if one[0] == "host_dns_failed"}
        found: list[Verdict] = []
        for name, subject, value, boot_s in own:
            labels = labels_of(subject)
            if name.endswith("_waiting_seconds"):
                if value >= HUNG_S:
                    found.append(self._hung(name, labels, value))
                elif value > 0.0 and subject in self._last:
                    found.append(self._last[subject])
            elif name == "host_mount_failed":
                found.append(self._mount_failed(labels))
            elif name == "host_mount_response_seconds":
                if self._streak.add(subject, boot_s, value >= SLOW_S).readings >= SLOW_COUNT:
                    self._last[subject] = self._slow(labels, value)
                    found.append(self._last[subject])
            elif name == "host_dns_lookup_seconds":
                bad = subject in failed or value >= SLOW_S
                if self._streak.add(subject, boot_s, bad).readings >= FAILED_COUNT:
                    asked = labels.get("name", "")
                    self._last[subject] = self._dns(asked, value, failed.get(subject))
                    found.append(self._last[subject])
        self._forget({one[1] for one in own})
        return list({(one.fault, one.subject): one for one in found}.values())

    def _forget(self, seen: set[str]) -> None:
        """What is no longer asked, and what is well again."""
        self._streak.keep(seen)
        self._last = {key: one for key, one in self._last.items() if self._streak.goes_on(key)}

    def _hung(self, name: str, labels: dict[str, str], waited_s: float) -> Verdict:
        since = f"for {waited_s:.0f} s"
        if name == "host_mount_waiting_seconds":
            mount, fstype = labels.get("mount", ""), labels.get("fstype", "")
            return self.node_verdict(
                "mount_hung", f"mount{mount}", DEGRADED,
                f"{mount} ({fstype}) has not answered {since}: whoever touches it waits as well",
                (("mount", mount), ("fstype", fstype)))
        if name == "host_nvme_waiting_seconds":
            device = labels.get("device", "")
            return self.node_verdict(
                "nvme_failing", f"drive/{device}", DEGRADED,
                f"{device} has not answered {since} ({labels.get('question', '')})")
        return self._dns(labels.get("name", ""), waited_s, None)

    def _slow(self, labels: dict[str, str], took_s: float) -> Verdict:
        mount, fstype = labels.get("mount", ""), labels.get("fstype", "")
        return self.node_verdict(
            "mount_slow", f"mount{mount}", WARN,
            f"{mount} ({fstype}) took {took_s:.1f} s to answer, and over {SLOW_S:g} s each of the "
            f"last {SLOW_COUNT} times",
            (("mount", mount), ("fstype", fstype)),
        )

    def _mount_failed(self, labels: dict[str, str]) -> Verdict:
        mount, error = labels.get("mount", ""), labels.get("error", "")
        meaning = f": {ERRORS[error]}" if error in ERRORS else ""
        return self.node_verdict(
            "mount_failed", f"mount{mount}", DEGRADED,
            f"{mount} ({labels.get('fstype', '')}) answers with {error}{meaning}",
            (("mount", mount), ("error", error)))

    def _dns(self, name: str, took_s: float, failed: Reading | None) -> Verdict:
        why = f"takes {took_s:.1f} s to resolve"
        if failed is not None:
            error = failed[1].rpartition(",error=")[2]
            why = f"does not resolve: {ERRORS.get(error, error)} ({took_s:.1f} s)"
        return self.node_verdict("dns_failed", f"name/{name}", DEGRADED, f"{name} {why}",
                             (("name", name),))
