"""Accelerators: what their samples say for certain, device by device.

Owns which readings make a device unwell and which of those are faults of their own.  Only what the
driver itself declares is a fault here (lost, rows to be remapped, memory that could not be
corrected), and that a device of this boot is not there any more; the rest is shown as the device's
health.  Shown and counted, never acted on.  Pure.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

from ...model import DEGRADED, FATAL, OK, SEVERITIES, WARN, Rows, RunView, Verdict, labels_of
from ..detector import Detector, NodeView
from .absence import BOUND, KNOWN_MAX, Absence, Bus, address_of

PREFIX = "accelerator_"
PROCESS = f"{PREFIX}process"
LOST = f"{PREFIX}lost"
Key = tuple[str, str]  # vendor, device
Ranks = dict[Key, tuple[tuple[str, int], ...]]  # (run, rank) of the processes on each device
SUBJECTS_MAX = 8192
PROCESSES_MAX = 512  # looked at before a node is ordered away
MUTE_READINGS = 8  # two minutes: a reset, or a change of partitions, is over by then
SCOPE = {"neuron": "neuron"}  # vendor -> word of a subject; every other is a gpu


class Rule(NamedTuple):
    """A reading that is above zero makes the device unwell.  `label` must be in the subject."""

    name: str
    label: str
    severity: str
    why: str
    fault: str = ""
    vendor: str = ""


RULES = (
    Rule("lost", "", FATAL, "the driver says that it is lost", "accelerator_lost"),
    Rule("row_remap_failed", "", FATAL, "a row of memory could not be remapped",
         "row_remap_failed"),
    Rule("ecc_errors_total", "error=uncorrected,period=volatile", DEGRADED,
         "uncorrected memory errors since the driver was loaded", "neuron_memory_uncorrected",
         "neuron"),
    Rule("ecc_errors_total", "error=uncorrected,period=volatile", DEGRADED,
         "uncorrected memory errors since the driver was loaded"),
    Rule("recovery_action", "", DEGRADED, "the driver asks for {action}"),
    Rule("row_remap_pending", "", WARN, "rows of memory wait for a reset to be remapped",
         "row_remap_pending"),
    Rule("fabric_fault", "", WARN, "the fabric reports {fault}"),
    Rule("throttled", "reason=hw_", WARN, "clocks are held down: {reason}"),
    Rule("busy_at_idle_power", "", WARN, "fully busy at idle power"),
)
NAMES = frozenset(PREFIX + rule.name for rule in RULES)
WHAT_IT_IS = (f"{PREFIX}info", f"{PREFIX}firmware_info")  # known of old


class Sight(NamedTuple):
    """One device: its worst finding decides the health; faults are (name, severity, why)."""

    health: str
    why: str
    faults: tuple[tuple[str, str, str], ...] = ()


def ranks_of(samples: Rows, runs: tuple[RunView, ...]) -> Ranks:
    """Which ranks compute on which device, by the process ids that the driver lists."""
    by_pid = {
        rank.pid: (view.run, rank.rank)
        for view in runs for rank in view.ranks if rank.pid and rank.state != "ended"}
    found: Ranks = {}
    for sample in samples if by_pid else ():
        if sample[0] != PROCESS:
            continue
        labels = labels_of(sample[1])
        pid = labels.get("pid", "")
        rank = by_pid.get(int(pid)) if pid.isdecimal() else None
        if rank is not None:
            key = (labels.get("vendor", ""), labels.get("device", ""))
            found[key] = tuple(sorted({*found.get(key, ()), rank}))
    return found


def processes(samples: Rows) -> list[tuple[int, str]]:
    """(pid, device) of every process that a driver lists, at most PROCESSES_MAX."""
    found: dict[tuple[int, str], None] = {}
    for name, subject, _, _ in samples:
        if name != PROCESS:
            continue
        labels = labels_of(subject)
        pid = labels.get("pid", "")
        if pid.isdecimal() and len(pid) < 12 and len(found) < PROCESSES_MAX:
            device = f"{labels.get('vendor', '')} device {labels.get('device', '')}"
            found[(int(pid), device)] = None
    return list(found)


def sights(samples: Rows) -> dict[Key, Sight]:
    """Health of every device that the samples name, in their order."""
    found: dict[Key, list[tuple[str, str, str]]] = {}
    links: dict[Key, list[bool]] = {}
    for sample in samples:
        name, subject, value = sample[:3]
        if name == f"{PREFIX}link_up":
            links.setdefault(_whose(subject), []).append(value > 0)
        if name not in NAMES:
            continue
        labels = labels_of(subject)
        findings = found.setdefault(_key(labels), [])
        if value <= 0 or labels.get("action") == "none":
            continue
        words = defaultdict(str, labels)
        for rule in RULES:
            matches = name == PREFIX + rule.name and rule.label in subject
            if matches and rule.vendor in ("", labels.get("vendor")):
                findings.append((rule.fault, rule.severity, rule.why.format_map(words)))
                break
    for key, up in links.items():
        # All down is a card without a bridge; some down beside others is a broken link.
        if any(up) and not all(up):
            down = f"{up.count(False)} of {len(up)} links are down"
            found.setdefault(key, []).append(("", WARN, down))
    return {key: _sight(findings) for key, findings in found.items()}


def _key(labels: dict[str, str]) -> Key:
    return labels.get("vendor", ""), labels.get("device", "")


@lru_cache(maxsize=SUBJECTS_MAX)
def _whose(subject: str) -> Key:
    """The device of a subject.  Kept: eight GPUs have 1,300 of them, the same each time."""
    return _key(labels_of(subject))


def _sight(findings: list[tuple[str, str, str]]) -> Sight:
    worst = max((severity for _, severity, _ in findings), key=SEVERITIES.index, default=OK)
    whys = dict.fromkeys(why for _, severity, why in findings if severity == worst)
    return Sight(worst, "; ".join(whys), tuple(one for one in findings if one[0]))


class Accelerators(Detector):
    """The verdicts on this node's devices.  Readings are new every few seconds, steps come up to a
    hundred times a second: equal ones are looked at once.  Its memory: PCI address (its name where
    there is none) of each device of this boot -> its name, vendor/number."""

    name = "accelerator"
    reads = (PREFIX,)
    beside = ("runs", "host_pci_")  # the collector that lists who is on the bus
    warm_s = 120.0  # until a device that gives no reading is said to
    memory = dict[str, str]

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._own: Rows = ()
        self._ranks: tuple[tuple[str, int, int], ...] = ()
        self._runs: Ranks = {}  # last known, for when a lost device lists no process any more
        self._bus = Bus()
        self._bound: Rows = ()
        self._unlisted, self._mute = Absence(), Absence(MUTE_READINGS)
        self._verdicts: list[Verdict] = []

    def look(self, view: NodeView) -> list[Verdict]:
        own, runs, known = view.rows, view.observed.runs, view.memory
        ranks = tuple((run.run, rank.rank, rank.pid) for run in runs for rank in run.ranks)
        bound = view.observed.samples.of(BOUND)
        if own is not self._own or ranks != self._ranks or bound is not self._bound:
            self._own, self._ranks, self._bound = own, ranks, bound
            self._bus.take(bound, [one for one in known if ":" in one])
            computing, names = ranks_of(own, runs), {run.run for run in runs}
            self._runs = {
                key: left for key, there in (self._runs | computing).items()
                if (left := tuple(one for one in there if one[0] in names))}
            devices = self._devices(own, known)
            # A device that is well and lists no process has no ranks: no later fault concerns them.
            idle = answering(own) - {*computing, *(key for key, _ in devices)}
            self._runs = {key: there for key, there in self._runs.items() if key not in idle}
            self._verdicts = list(devices.values())
        return self._verdicts

    def _devices(self, samples: Rows, known: dict[str, str]) -> dict[tuple[Key, str], Verdict]:
        """By device and fault; what its driver says goes before what is concluded."""
        info = {
            _key(labels): labels
            for labels in (labels_of(one[1]) for one in samples if one[0] == f"{PREFIX}info")}
        found = {
            (key, fault): self._verdict(key, fault, severity, why, info.get(key, {}))
            for key, sight in sights(samples).items()
            for fault, severity, why in sight.faults}
        names = list(known.values())
        for place, severity, why in self._missing(samples, info, known):
            vendor, _, device = known[place].partition("/")
            key, labels_known = (vendor, device), info.get((vendor, device), {})
            if ":" in place and address_of(labels_known.get("pci", "")) != place:
                labels_known = {"pci": place}
                if key in info or names.count(known[place]) > 1:
                    key = vendor, place  # its number is another's by now
            if (key, "accelerator_lost") not in found:
                found[key, "accelerator_lost"] = self._verdict(
                    key, "accelerator_lost", severity, why, labels_known)
        return found

    def _verdict(
        self, key: Key, fault: str, severity: str, why: str, info: dict[str, str]
    ) -> Verdict:
        vendor, device = key
        where = f" at {info['pci']}" if info.get("pci") else ""
        ranks = ", ".join(f"rank {rank} of {run}" for run, rank in self._runs.get(key, ()))
        lived = f"; {ranks} computed there" if ranks else ""
        evidence = tuple((name, info[name]) for name in ("name", "uuid", "pci") if info.get(name))
        return self.node_verdict(
            fault, f"{SCOPE.get(vendor, 'gpu')}/{device}", severity,
            f"{vendor} device {device}{where}: {why}{lived}", evidence)

    def _missing(
        self, samples: Rows, info: dict[Key, dict[str, str]], known: dict[str, str]
    ) -> list[tuple[str, str, str]]:
        """(place, severity, why) of devices that were here in this boot and are not.  Their number
        says nothing: another partitioning of the same boards changes it."""
        places = {address_of(labels.get("pci", "")) or "/".join(key): key
                  for key, labels in info.items()}
        read_s = max((one[3] for one in samples if one[0] == f"{PREFIX}devices"), default=-1.0)
        names = [one for one in known if ":" not in one]
        listed = {"/".join(key) for key in info}
        unlisted = self._unlisted.take(read_s, listed, names) if read_s >= 0.0 else set()
        well = answering(samples)
        heard = {one for one, key in places.items() if key in well}
        mute = self._mute.take(read_s, heard, known) if read_s >= 0.0 else set()
        for place, key in places.items():
            is_here = place in self._bus.bound if ":" in place else True
            if is_here and (place in known or len(known) < KNOWN_MAX):
                known[place] = "/".join(key)
        left_the_bus = "it is not on the PCI bus any more, or no driver has it"
        silent = "it gives no reading any more, though it is on the PCI bus with its driver"
        lost = [(one, FATAL, left_the_bus) for one in sorted(self._bus.lost) if one in known]
        lost += [(one, FATAL, "it is not listed any more") for one in sorted(unlisted)]
        return lost + [(one, DEGRADED, silent) for one in sorted(mute)
                       if ":" in one and one in known and one in self._bus.bound]


def answering(samples: Rows) -> set[Key]:
    """Devices with any reading beyond what they are, and not said to be lost."""
    found = {_whose(one[1]) for one in samples if one[0] not in WHAT_IT_IS}
    lost = {_whose(one[1]) for one in samples if one[0] == LOST and one[2] > 0}
    return found - lost - {("", "")}
