"""The host's limits and shortages: what is nearly used up, who is stuck, whom the kernel killed.

Owns the thresholds of single readings and their sentences, which name ranks where a process or a
cgroup is one of theirs.  Keeps nothing: what must last is decided by host.py beside it.  Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...model import DEGRADED, WARN, RunView, Verdict, node_subject

DETECTOR = "host"
LIMIT_WARN, LIMIT_DEGRADED = 0.7, 0.9  # gpud's line for handles and pids; then little is left
CGROUP_TASKS = 0.9
ZOMBIES_WARN, ZOMBIES_DEGRADED = 100, 1000  # gpud: degraded at a thousand
BLOCKED_WARN_S, BLOCKED_DEGRADED_S = 60.0, 300.0  # GCM: five minutes in state D
SHM_WARN, SHM_DEGRADED = 0.9, 0.98
AVAILABLE_MIN = 0.03  # of the machine's memory
CGROUP_MEMORY = 0.95
LISTED_MAX = 4
EVIDENCE_MAX = 16  # rows; each its own kind, so that one more is news to an open incident
MEGABYTE, GIGABYTE = 1 << 20, 1 << 30
Rows = dict[str, list[tuple[dict[str, str], float]]]  # name -> (labels, value)
# (name of a reading and what of it, whether it is so now) -> it was so for a while
Lasts = Callable[[str, bool], bool]


class Place(NamedTuple):
    """One rank and where it lives."""

    run: str
    rank: int
    pid: int
    cgroup: str

    @property
    def words(self) -> str:
        return f"rank {self.rank} of run {self.run}"


def places_of(runs: tuple[RunView, ...]) -> list[Place]:
    return [
        Place(view.run, rank.rank, rank.pid, rank.cgroup)
        for view in runs for rank in view.ranks if rank.state != "ended"]


def inside(place: Place, cgroup: str) -> bool:
    """Whether a rank lives in a cgroup or below it; the root is nobody's."""
    return cgroup != "/" and f"{place.cgroup}/".startswith(f"{cgroup}/")


def one(rows: Rows, name: str) -> float:
    """A reading without labels; -1 when there is none."""
    found = rows.get(name)
    return found[0][1] if found else -1.0


def verdict(
    node: str, fault: str, tail: str, severity: str, reason: str,
    evidence: tuple[tuple[str, str], ...] = (), confidence: float = 1.0,
    explains: tuple[str, ...] = (),
) -> Verdict:
    return Verdict(
        fault=fault, subject=node_subject(node, tail.removeprefix("/")), severity=severity,
        confidence=confidence,
        reason=reason, evidence=evidence, detector=DETECTOR, explains=explains)


def limits(node: str, rows: Rows, places: list[Place]) -> list[Verdict]:
    """File handles and tasks of the machine, of a process, of a cgroup."""
    tasks_max = [most for name in ("host_processes_max", "host_threads_max")
                 if (most := one(rows, name)) > 0]
    found = []
    for tail, word, used, most in (
        ("open-files", "file handles", one(rows, "host_open_files"),
         one(rows, "host_open_files_max")),
        ("tasks", "tasks", one(rows, "host_processes"), min(tasks_max, default=-1.0)),
    ):
        if most > 0 and used >= LIMIT_WARN * most:
            severity = DEGRADED if used >= LIMIT_DEGRADED * most else WARN
            found.append(verdict(
                node, "host_limit_near", f"/limit/{tail}", severity,
                f"{used:.0f} of {most:.0f} {word} that the kernel allows are in use on {node}"))
    found += _process_files(node, rows, places)
    full = [(labels.get("cgroup", ""), share)
            for labels, share in rows.get("cgroup_tasks_ratio", ()) if share >= CGROUP_TASKS]
    if full:
        found.append(verdict(
            node, "host_limit_near", "/limit/cgroup-tasks", WARN,
            several([f"cgroup {cgroup} has {share:.0%} of the tasks that its limit allows"
                     f"{living(cgroup, places)}" for cgroup, share in full]),
            tuple((f"cgroup {cgroup}", f"{share:.0%}") for cgroup, share in full[:EVIDENCE_MAX]),
        ))
    return found


def _process_files(node: str, rows: Rows, places: list[Place]) -> list[Verdict]:
    """One verdict for all processes of a name; their ids are evidence, and no part of a subject,
    which becomes a label on the page."""
    near: dict[str, list[tuple[float, str]]] = {}
    for labels, share in rows.get("task_open_files_ratio", ()):
        name = labels.get("name", "?").replace("/", "_")
        near.setdefault(name, []).append((share, process(labels, places)))
    found = []
    for name, those in list(near.items())[:LISTED_MAX]:
        severity = DEGRADED if max(those)[0] >= LIMIT_DEGRADED else WARN
        found.append(verdict(
            node, "host_limit_near", f"/limit/open-files/{name}", severity,
            several([f"{who} has {share:.0%} of the open files that its own limit allows"
                     for share, who in those]),
            tuple((who, f"{share:.0%}") for share, who in those[:EVIDENCE_MAX]),
        ))
    return found


def zombies(node: str, rows: Rows, lasts: Lasts) -> list[Verdict]:
    """Many processes that nobody collects; a wave at a job's end passes within seconds."""
    count = one(rows, "host_zombies")
    if not lasts("host_zombies", count >= ZOMBIES_WARN):
        return []
    severity = DEGRADED if count >= ZOMBIES_DEGRADED else WARN
    parents = [
        (f"{labels.get('name', '?')} (pid {labels.get('pid', '?')})", number)
        for labels, number in rows.get("task_zombies", ())]
    most = f"; {parents[0][1]:.0f} of them are {parents[0][0]}'s" if parents else ""
    return [verdict(
        node, "host_zombies", "/zombies", severity,
        f"{count:.0f} processes on {node} ended and nobody collects them{most}",
        tuple(("parent", f"{who}: {number:.0f}") for who, number in parents[:LISTED_MAX]))]


def blocked(node: str, rows: Rows, places: list[Place]) -> list[Verdict]:
    """Processes that have waited in the kernel since, without running at all."""
    stuck = [(age_s, labels) for labels, age_s in rows.get("task_blocked_seconds", ())
             if age_s >= BLOCKED_WARN_S]
    if not stuck:
        return []
    longest_s = max(age_s for age_s, _ in stuck)
    named = "; ".join(
        f"{process(labels, places)} for {age_s:.0f} s in {labels.get('wait', '?')}"
        for age_s, labels in stuck[:LISTED_MAX])
    more = f"; and {len(stuck) - LISTED_MAX} more" if len(stuck) > LISTED_MAX else ""
    return [verdict(
        node, "host_hung_task", "/processes", DEGRADED if longest_s >= BLOCKED_DEGRADED_S else WARN,
        f"stuck in the kernel on {node}: {named}{more}",
        tuple(("process", f"pid {labels.get('pid', '?')}") for _, labels in stuck[:LISTED_MAX]))]


def shared_memory(node: str, rows: Rows) -> list[Verdict]:
    """/dev/shm nearly full: whoever writes into it next is killed by SIGBUS."""
    size, used = one(rows, "host_shm_size_bytes"), one(rows, "host_shm_used_bytes")
    if size <= 0 or used < SHM_WARN * size:
        return []
    unlinked = one(rows, "host_shm_unlinked_bytes")
    evidence = tuple(
        ("holds", f"{labels.get('name', '?')} (pid {labels.get('pid', '?')}): {memory(held)}")
        for labels, held in rows.get("shm_resident_bytes", ()))
    lost = f", {memory(unlinked)} of it under no name any more" if unlinked >= MEGABYTE else ""
    return [verdict(
        node, "host_shm_full", "/shm", DEGRADED if used >= SHM_DEGRADED * size else WARN,
        f"/dev/shm of {node} is {used / size:.0%} full: {memory(used)} of {memory(size)}{lost}",
        evidence)]


def shortage(
    node: str, rows: Rows, places: list[Place], stalled: float, lasts: Lasts
) -> list[Verdict]:
    """Memory of the machine and of limited cgroups.  `stalled`: share of the last minute in which
    all tasks waited for memory."""
    found = []
    total, left = one(rows, "host_memory_total_bytes"), one(rows, "host_memory_available_bytes")
    short = total > 0 and 0 <= left < AVAILABLE_MIN * total
    waits = stalled >= 0.1
    if lasts("host_memory_available_bytes", short) or waits:
        what = [f"{memory(left)} of {memory(total)} are left"] if short else []
        what += [f"all tasks waited for memory in {stalled:.0%} of the last minute"] * waits
        found.append(verdict(
            node, "host_memory_low", "/memory", DEGRADED if stalled >= 0.4 else WARN,
            f"{node} is short of memory: {'; '.join(what)}"))
    limit = {labels.get("cgroup", ""): value
             for labels, value in rows.get("cgroup_memory_max_bytes", ())}
    full = [(labels.get("cgroup", ""), share)
            for labels, share in rows.get("cgroup_memory_ratio", ())]
    full = [(cgroup, share) for cgroup, share in full
            if lasts(f"cgroup_memory_ratio {cgroup}", share >= CGROUP_MEMORY)]
    if full:
        found.append(verdict(
            node, "host_memory_low", "/cgroups", WARN,
            several([f"cgroup {cgroup} uses {share:.0%} of its limit of "
                     f"{memory(limit.get(cgroup, 0.0))}, not counting what can be dropped"
                     f"{living(cgroup, places)}" for cgroup, share in full]),
            tuple((f"cgroup {cgroup}", f"{share:.0%}") for cgroup, share in full[:EVIDENCE_MAX]),
        ))
    return found


def process(labels: dict[str, str], places: list[Place]) -> str:
    """A process in words, with the rank that it is."""
    pid = labels.get("pid", "")
    rank = next((f", {one.words}" for one in places if str(one.pid) == pid), "")
    return f"{labels.get('name', '?')} (pid {pid}{rank})"


def living(cgroup: str, places: list[Place]) -> str:
    """"; rank 3 of run m5 lives there", or nothing."""
    there = [place.words for place in places if inside(place, cgroup)]
    return f"; {listed(there)} {'lives' if len(there) == 1 else 'live'} there" if there else ""


def listed(words: list[str], most: int = 8) -> str:
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return f"{', '.join(words[:most])}{more}"


def several(sentences: list[str]) -> str:
    """Sentences of the same kind: the first few in words, the rest as a number."""
    more = [f"and {len(sentences) - LISTED_MAX} more"] if len(sentences) > LISTED_MAX else []
    return "; ".join(sentences[:LISTED_MAX] + more)


def memory(size: float) -> str:
    """Bytes for a person."""
    if size >= GIGABYTE:
        return f"{size / GIGABYTE:.1f} GiB"
    return f"{size / MEGABYTE:.0f} MiB"
