"""The host's own pathologies: a core lost to the kernel, cgroups that pile up, units that crash.

Owns the windows over the host's samples and one conclusion across them: a unit that crashes again
and again, the cgroups that it leaves behind, the core that walks them, and the network card that is
starved meanwhile are one fault, of that unit and of no run.  Shown and counted, never acted on.
Pure; a restart of the agent begins its windows anew, which is the careful side.
"""

from __future__ import annotations

from ...model import DEGRADED, WARN, Event, RunView, Verdict, labels_of, readings
from ...series.streak import Streak
from ...series.window import CounterWindow
from ..detector import Detector, NodeView
from . import cores as host_cores
from . import levels
from .cores import Core, Cores
from .levels import Place, Rows, verdict
from .links import (
    HELD_DEGRADED,
    Leak,
    Loop,
    busiest,
    core_words,
    living_in,
    owner,
    unit_of,
    where_of,
    words_of,
)

PRESSURE_S = 50.0  # of the last minute must be known
RESTARTS = 5  # in ten minutes
RECENT_S = 600.0
GROWTH_MIN = 20  # more of them within the ten minutes: it still goes on
LEFT_EACH = 0.2  # of a cgroup left behind by each start, at least, to belong to it
LASTS_S = 40.0  # three readings of the slow set
KILLS_KEPT = 64
RESETS_KEPT = 32
HOMES_MAX, SERIES_MAX, STREAKS_MAX = 4096, 1024, 256
TIMEOUTS = "network_transmit_timeouts_total"  # after each the driver resets its card
OURS = ("host_", "task_", "cgroup_", "shm_", TIMEOUTS)
# `host_` alone are also the disk's, the clock's, ...
RESTS_ON = ("host_cpu_", "host_memory_", "host_pressure_", "host_cgroup_", "host_oom_", "host_unit",
            "host_zombies", "host_blocked_", "host_open_files", "host_process", "host_threads_",
            "host_shm_", "host_swap_", "task_", "cgroup_", TIMEOUTS)
COUNTED = {"host_unit_restarts_total": "unit", "cgroup_births_total": "cgroup",
           "cgroup_oom_kills_total": "cgroup"}
# a reading of the same collector that is there whenever it was read at all
TOKEN = {"host_unit_restarts_total": "host_units", "cgroup_births_total":
         "host_memory_cgroups", "cgroup_oom_kills_total": "host_memory_cgroups"}


class Host(Detector):
    """The verdicts on this node.  Steps come up to a hundred times a second, samples every few
    seconds: an equal tuple is looked at once."""

    name = levels.DETECTOR
    beside = ("runs", "events", *RESTS_ON)
    warm_s = RECENT_S

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._samples = readings.Readings()
        self._cores = Cores()
        self._pressure = CounterWindow(60.0, 5.0, SERIES_MAX)
        self._taken: dict[str, readings.Rows] = {}  # as read last
        self._rows: Rows = {}  # the same, with labels
        self._series = CounterWindow(RECENT_S, 15.0, SERIES_MAX)
        self._held = CounterWindow(RECENT_S, 15.0, 1, falls=True)
        self._read_s: dict[str, float] = {}
        self._streak = Streak(STREAKS_MAX)
        self._resets: list[Event] = []
        self._killed: dict[tuple[str, int, int], float] = {}  # run, rank, pid -> when
        self._homes: dict[int, str] = {}  # pid of a rank -> its cgroup
        self._boot_s = 0.0
        self._verdicts: list[Verdict] = []

    def look(self, view: NodeView) -> list[Verdict]:
        observed = view.observed
        self._take(observed.events)
        if observed.runs:
            self._watch_ranks(observed.runs)
        if observed.samples is not self._samples:
            self._samples = observed.samples
            self._intake(observed.samples)
            self._verdicts = self._judge(self._rows, levels.places_of(observed.runs))
        return self._verdicts

    # ------------------------------------------------------------ what comes in

    def _take(self, events: tuple[Event, ...]) -> None:
        """Keeps what the kernel says of network cards; the log shows the last minute alone."""
        newest = self._resets[-1].boot_s if self._resets else -1.0
        known = {(one.cursor, one.boot_s) for one in self._resets}
        for event in events:
            if event.fault == "nic_error" and event.boot_s >= newest \
                    and (event.cursor, event.boot_s) not in known:
                self._resets = [*self._resets[1 - RESETS_KEPT :], event]

    def _watch_ranks(self, runs: tuple[RunView, ...]) -> None:
        """Remembers where ranks live and which were killed: soon others stand in their place."""
        for view in runs:
            for rank in view.ranks:
                if rank.cgroup:
                    self._homes[rank.pid] = rank.cgroup
                if rank.ended is not None and rank.ended.signal == 9 and not rank.ended.by_us:
                    self._killed[view.run, rank.rank, rank.pid] = rank.ended.boot_s
        while len(self._homes) > HOMES_MAX:
            del self._homes[next(iter(self._homes))]
        while len(self._killed) > KILLS_KEPT:
            del self._killed[next(iter(self._killed))]

    def _intake(self, samples: readings.Readings) -> None:
        """Samples by name, counters into their windows.  A name that was not read since is as it
        was."""
        self._boot_s = max(self._boot_s, self._cores.take(samples.of(host_cores.NAME)))
        ours = {name: samples.of(name) for name in samples.names()
                if name.startswith(OURS) and name != host_cores.NAME}
        newer = [name for name, rows in ours.items() if rows is not self._taken.get(name)]
        self._taken = ours
        self._rows = {name: rows for name, rows in self._rows.items() if name in ours}
        for name in newer:
            self._rows[name] = [(labels_of(subject), value) for _, subject, value, _ in ours[name]]
            self._note(name, ours[name])
        self._read_s |= {name: ours[name][-1][3] for name in newer}
        self._boot_s = max(self._boot_s, *(self._read_s[name] for name in newer), 0.0)

    def _note(self, name: str, samples: readings.Rows) -> None:
        """Counters into their windows."""
        for (labels, _), (_, subject, value, boot_s) in zip(self._rows[name], samples):
            if name in COUNTED:
                self._count(name, labels.get(COUNTED[name], ""), boot_s, value)
            elif name == TIMEOUTS:
                self._series.add((name, labels.get("device", "")), boot_s, value)
            elif name == "host_pressure_seconds_total":
                self._pressure.add(subject, boot_s, value)
            elif name == "host_memory_cgroups" and subject == "state=dying":
                self._held.add("dying", boot_s, value)

    def _count(self, name: str, key: str, boot_s: float, value: float) -> None:
        """A counter that is shown from its first count on: before, it was zero."""
        before_s = self._read_s.get(TOKEN[name], -1.0)
        if self._series.newest_s((name, key)) < 0.0 <= before_s < boot_s:
            self._series.add((name, key), before_s, 0.0)
        self._series.add((name, key), boot_s, value)

    def _lasts(self, what: str, is_so: bool) -> bool:
        """Whether it was so in every reading of the last while.  `what` begins with a reading's
        name: what is known of a collector that fell silent grows no older."""
        read_s = self._read_s.get(what.partition(" ")[0], 0.0)
        return self._streak.add(what, read_s, is_so).seconds >= LASTS_S

    # ------------------------------------------------------------ what follows

    def _judge(self, rows: Rows, places: list[Place]) -> list[Verdict]:
        pressure = self._pressure.grown("resource=memory,kind=full")
        stalled = pressure.per_s if pressure.seconds >= PRESSURE_S else 0.0
        return [
            *self._chain(rows, places), *levels.limits(self._node, rows, places),
            *levels.zombies(self._node, rows, self._lasts),
            *levels.blocked(self._node, rows, places), *levels.shared_memory(self._node, rows),
            *levels.shortage(self._node, rows, places, stalled, self._lasts),
            *self._kills(rows, places),
        ]

    def _chain(self, rows: Rows, places: list[Place]) -> list[Verdict]:
        """Units, cgroups and cores: one verdict when they explain each other, else each its own."""
        leak, cores = self._leak(rows), self._cores.pinned(self._boot_s)
        loops = self._loops(rows)
        root = self._root(leak, loops)
        busy = busiest(rows)
        found = []
        if root is not None and leak is not None:
            found.append(self._explained(
                root, where_of(root, rows), leak, cores if leak.is_many else [], busy,
                living_in(root, places)))
        found += [self._loop(loop) for loop in loops if root is None or loop.name != root.name]
        if leak is not None and leak.is_many and root is None:
            found.append(self._leaks(leak))
        if cores and not (root is not None and leak is not None and leak.is_many):
            found.append(self._burns(cores, busy))
        return found

    def _leak(self, rows: Rows) -> Leak | None:
        counts = {labels.get("state"): int(value)
                  for labels, value in rows.get("host_memory_cgroups", ())}
        if "dying" not in counts:
            return None
        places = [labels.get("cgroup", "") for labels, _ in rows.get("cgroup_dying", ())]
        grown = int(self._held.grown("dying").amount)
        return Leak(counts["dying"], counts.get("in_use", 0), grown, places[0] if places else "")

    def _loops(self, rows: Rows) -> list[Loop]:
        """Units that systemd started again and again, most first."""
        found = []
        for labels, _ in rows.get("host_unit_restarts_total", ()):
            unit = labels.get("unit", "")
            starts = int(self._series.grown(("host_unit_restarts_total", unit)).amount)
            if starts >= RESTARTS:
                found.append(Loop(f"unit/{unit}", starts, "systemd started it", 0.9))
        return sorted(found, key=lambda one: (-one.starts, one.name))

    def _root(self, leak: Leak | None, loops: list[Loop]) -> Loop | None:
        """Who leaves the cgroups behind: only somebody whose starts keep step with them."""
        if leak is None or leak.grown < GROWTH_MIN:
            return None
        able = [one for one in loops if leak.grown >= LEFT_EACH * one.starts]
        born = self._born()
        if not able:
            able = [one for one in born if leak.grown >= LEFT_EACH * one.starts]
        if not able:
            return None
        below = [one for one in able if unit_of(one) in leak.place.split("/")]
        seen = [one for one in able if any(one.name == other.name for other in born)]
        best = (below or seen or able)[0]
        others = tuple(one.name for one in able if one.name != best.name)
        certain = bool(below or (seen and len(seen) == 1)) or not others
        return best._replace(confidence=best.confidence if certain else 0.6, beside=others)

    def _born(self) -> list[Loop]:
        """Places where cgroups were made again and again, most first."""
        found: dict[str, int] = {}
        for key in self._series.keys():
            if isinstance(key, tuple) and key[0] == "cgroup_births_total":
                starts = int(self._series.grown(key).amount)
                fresh = self._boot_s - self._series.newest_s(key) <= 60.0
                if fresh and starts >= RESTARTS:
                    found[owner(key[1])] = max(starts, found.get(owner(key[1]), 0))
        made = "its cgroup was made anew at least"
        loops = [Loop(name, starts, made, 0.7) for name, starts in found.items()]
        return sorted(loops, key=lambda one: (-one.starts, one.name))

    # ------------------------------------------------------------ words

    def _explained(
        self, root: Loop, where: str, leak: Leak, cores: list[Core], busy: list[str], living: str
    ) -> Verdict:
        sentences = [f"{words_of(root.name)} of {self._node} crashes again and again ({root.how} "
                f"{root.starts} times in ten minutes) and leaves memory cgroups behind: the "
                f"kernel holds {leak.dying} removed ones beside {leak.in_use} in use, "
                f"{leak.grown} more in that time"]
        evidence = [("starts", f"{root.starts} in ten minutes: {root.how}"),
                    ("cgroups", f"{leak.dying} removed and held, {leak.in_use} in use, "
                     f"{leak.grown} more in ten minutes")]
        if leak.place:
            evidence.append(("most below", leak.place))
        if cores:
            sentences.append(core_words(cores))
            evidence += [("core", core_words([core])) for core in cores[:4]]
            evidence += [("in kernel", one) for one in busy[:2]]
        if cores and (resets := self._resets_words()):
            sentences.append(f"meanwhile {resets}")
            evidence += [("kernel line", one.text) for one in self._recent_resets()[-1:]]
            evidence += [("network card", resets)]
        evidence += [("also", words_of(name)) for name in root.beside[:4]]
        sentences.append(living or "no run is to blame")
        return verdict(
            self._node, "unit_crash_loop", where, DEGRADED if cores else WARN,
            "; ".join(sentences), tuple(evidence), root.confidence,
            ("host_cgroup_leak", "host_core_pinned") if cores else ("host_cgroup_leak",))

    def _loop(self, loop: Loop) -> Verdict:
        return verdict(
            self._node, "unit_crash_loop", f"/{loop.name}", WARN,
            f"{words_of(loop.name)} of {self._node} crashes again and again: {loop.how} "
            f"{loop.starts} times in ten minutes",
            (("starts", f"{loop.starts} in ten minutes"),),
        )

    def _leaks(self, leak: Leak) -> Verdict:
        grows = f", {leak.grown} more in ten minutes" if leak.grown > 0 else ""
        below = f"; most of them below {leak.place}" if leak.place not in ("", "/") else ""
        return verdict(
            self._node, "host_cgroup_leak", "/cgroups",
            DEGRADED if leak.dying >= HELD_DEGRADED else WARN,
            f"the kernel of {self._node} holds {leak.dying} removed memory cgroups beside "
            f"{leak.in_use} in use{grows}{below}; nobody was seen to make them",
        )

    def _burns(self, cores: list[Core], busy: list[str]) -> Verdict:
        return verdict(
            self._node, "host_core_pinned", "/cpu", WARN, f"{core_words(cores)} on {self._node}",
            tuple(("in kernel", one) for one in busy[:4]))

    def _recent_resets(self) -> list[Event]:
        return [one for one in self._resets if self._boot_s - one.boot_s <= RECENT_S]

    def _resets_words(self) -> str:
        """What the kernel's log or the cards' own counters say of cards in trouble."""
        lines = self._recent_resets()
        counted = {
            str(key[1]): int(self._series.grown(key).amount)
            for key in self._series.keys() if isinstance(key, tuple) and key[0] == TIMEOUTS}
        named = {one.subject.removeprefix("nic/") for one in lines if one.subject}
        named |= {device for device, times in counted.items() if times > 0}
        times = max(len(lines), sum(counted.values()))
        if not times:
            return ""
        where = f"network card {levels.listed(sorted(named), 4)}" if named else "a network card"
        return f"{where} was in trouble {'once' if times == 1 else f'{times} times'}"

    def _kills(self, rows: Rows, places: list[Place]) -> list[Verdict]:
        """Cgroups in which the kernel killed for memory within the last ten minutes: a verdict for
        each place that holds such, because a job's own cgroup is another tomorrow."""
        limit = {labels.get("cgroup", ""): value
                 for labels, value in rows.get("cgroup_memory_max_bytes", ())}
        found: dict[str, list[tuple[str, str, int]]] = {}
        for labels, _ in rows.get("cgroup_oom_kills_total", ()):
            cgroup = labels.get("cgroup", "")
            killed = int(self._series.grown(("cgroup_oom_kills_total", cgroup)).amount)
            if killed > 0:
                bound = f" (limit {levels.memory(limit[cgroup])})" if limit.get(cgroup) else ""
                number = "a process" if killed == 1 else f"{killed} processes"
                sentence = f"{number} of cgroup {cgroup}{bound}{self._lost(cgroup, places)}"
                place = labels.get("place", cgroup)
                found.setdefault(place, []).append((sentence, cgroup, killed))
        return [
            verdict(
                self._node, "host_oom", f"/cgroup{place}".rstrip("/"), WARN,
                "the kernel killed for memory, within the last ten minutes: "
                + levels.several([sentence for sentence, _, _ in those]),
                tuple((f"cgroup {cgroup}", f"{killed} killed")
                      for _, cgroup, killed in those[: levels.EVIDENCE_MAX]),
            )
            for place, those in found.items()
        ]

    def _lost(self, cgroup: str, places: list[Place]) -> str:
        dead = [
            Place(run, rank, pid, self._homes.get(pid, ""))
            for (run, rank, pid), at_s in self._killed.items() if self._boot_s - at_s <= RECENT_S]
        lost = levels.listed([one.words for one in dead if levels.inside(one, cgroup)])
        return f" where {lost} ended by SIGKILL" if lost else levels.living(cgroup, places)
