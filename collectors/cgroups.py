"""Memory cgroups: how many the kernel holds against those in use, and which of them are short.

Owns one walk of the hierarchy that has the memory controller (version 2, or version 1's memory
tree).  A removed cgroup lives on while anything is charged to it.  A unit that makes and leaves
cgroups by the thousand makes every walk of the kernel's own longer, until one core does nothing
else.  Reads only, bounded; a cgroup that vanishes during the walk is left out.

A pod, a job or a session has a cgroup of its own name.  Samples of single cgroups are for the
detectors and undeclared; the page shows the lasting part of the path (place_of).
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from .contract import SLOW, Metric, NoData, Roots, Sample, legible
from .sources.files import ODD, is_count, text_of

DIRECTORIES_MAX = 5000  # of one walk
DEPTH_MAX = 16
LOOK_MAX = 256  # cgroups whose files are read in one reading, outermost first
KILLS_READS_MAX = 1024  # on the way down to the cgroup of a killed process
KILLS_KEPT_S = 900.0  # a cgroup that ended with its killed processes is named for this long
NAMED_MAX = 64  # on the page
BIRTHS_MAX = 256  # cgroups below which births are counted
DYING_LOOK = 100  # from so many removed cgroups on, their holder is looked for
DYING_READS_MAX = 512
NO_LIMIT = 1 << 60  # version 1 writes a huge number
DIGIT = re.compile(r"\d")
Key = tuple[str, int]  # path, inode


class Tree(NamedTuple):
    """Where the memory controller's hierarchy is."""

    base: str
    version: int
    usage: str
    limit: str
    kills: str  # of the cgroup itself
    cache: str  # key of memory.stat: what is dropped before anything is killed


def find(roots: Roots) -> Tree:
    """NoData where no memory controller is to be seen."""
    base = f"{roots.sys}/fs/cgroup"
    if os.path.exists(f"{base}/cgroup.controllers"):
        return Tree(base, 2, "memory.current", "memory.max", "memory.events.local", "inactive_file")
    if os.path.isdir(f"{base}/memory"):
        return Tree(f"{base}/memory", 1, "memory.usage_in_bytes", "memory.limit_in_bytes",
                    "memory.oom_control", "total_inactive_file")
    raise NoData(f"no memory controller below {base}")


class Look(NamedTuple):
    """What a cgroup's own files say; 0 is no limit."""

    path: str
    label: str
    place: str
    limit: int
    used: int
    tasks: int
    tasks_max: int


class Grown(NamedTuple):
    """Processes of a cgroup that were killed while readings saw it."""

    label: str
    place: str
    kills: int
    last_s: float


class CgroupsCollector:
    """Counts, limits and kills of memory cgroups by place; single cgroups are undeclared."""

    name = "cgroups"
    pace = SLOW
    metrics = (
        Metric("host_memory_cgroups", "gauge",
               "Memory cgroups with a directory (in_use), and removed ones that the kernel "
               "still holds (dying).", ("state",), True),
        Metric("host_cgroup_births_total", "counter",
               "Cgroups made anew at this place or below it, as far as readings saw; jobs and pods "
               "count for the place that holds them.", ("cgroup",)),
        Metric("host_cgroup_oom_kills_total", "counter",
               "Processes at this place or below it that the kernel killed for memory, as far as "
               "readings saw.", ("cgroup",), True),
        Metric("host_cgroup_memory_ratio", "gauge",
               "Memory that cannot be dropped, as a share of its limit, of the fullest limited "
               "cgroup at this place or below it.", ("cgroup",)),
        Metric("host_cgroup_tasks_ratio", "gauge",
               "Tasks as a share of their limit, of the fullest limited cgroup at this place or "
               "below it.", ("cgroup",)),
    )

    def __init__(self) -> None:
        self._seen: dict[str, int] | None = None
        self._births: Counter[str] = Counter()
        self._born: Counter[str] = Counter()  # by place
        self._there: dict[str, int] | None = None  # the last walk, also one that was cut short
        self._kills: dict[Key, int] = {}  # as read last
        self._below: dict[Key, int] = {}  # the same with all that lie below, version 2
        self._cut = False  # whether that walk was
        self._partial = False  # whether the last reading left out some whose kills it never saw
        self._grown: dict[str, Grown] = {}  # by label: a unit's next cgroup goes on
        self._killed: Counter[str] = Counter()  # by place

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One walk.  NoData where no memory controller is to be seen."""
        tree = find(roots)
        found, cut = walk(tree.base)
        if not cut:
            if self._seen is not None:
                self._bear(births(self._seen, found))
            self._seen = found
        samples = [
            Sample("cgroup_births_total", f"cgroup={path},place={place_of(path)}", float(count),
                   boot_s)
            for path, count in self._births.most_common(NAMED_MAX)]
        samples += _named("host_cgroup_births_total", self._born, boot_s)
        counts = _counts_2(tree) if tree.version == 2 else _counts_1(roots, tree, found, cut)
        for state, count in counts.items():
            samples.append(Sample("host_memory_cgroups", f"state={state}", float(count), boot_s))
        if tree.version == 2 and counts.get("dying", 0) >= DYING_LOOK:
            path, held = holder(tree.base, list(found), counts["dying"])
            samples.append(Sample("cgroup_dying", f"cgroup={label(path)}", float(held), boot_s))
        looks = _look(tree, found)
        self._count_kills(tree, found, cut, boot_s)
        self._killed.update({one.place: 0 for one in looks if one.limit})
        self._there, self._cut = found, cut
        samples += _named("host_cgroup_oom_kills_total", self._killed, boot_s)
        samples += [
            Sample("cgroup_oom_kills_total", f"cgroup={one.label},place={one.place}",
                   float(one.kills), boot_s)
            for one in list(self._grown.values())[-NAMED_MAX:]]
        return samples + _limits(looks, boot_s)

    def _bear(self, born: Counter[str]) -> None:
        self._births = _most(self._births + born)
        for path, count in born.items():
            self._born[place_of(path)] += count
        self._born = _most(self._born)

    def _count_kills(self, tree: Tree, found: dict[str, int], cut: bool, boot_s: float) -> None:
        """Adds the kills that are new to the count of their place, which outlives a job's own
        cgroup.  Kills from before the first reading go to the page alone: nobody knows their
        time."""
        first, before = self._there is None, self._there or {}
        kills, whole = self._descend(tree, found) if tree.version == 2 else (
            _kills(tree, found), True)
        for path, count in kills.items():
            key = path, found[path]
            known = self._kills.pop(key, None)
            self._kills[key] = count  # at the end: the oldest goes first
            if known is None:
                # In version 2 the count was 0 before; else the cgroup must be new.
                is_new = before.get(path) != found[path] and not self._cut
                was_none = is_new or (tree.version == 2 and not self._partial)
                known = 0 if was_none else count
            more = max(0, count - known)
            place = place_of(label(path))
            seen = count if first else more
            if seen:
                self._killed[place] += seen
            if more and not first:
                name = label(path)
                so_far = self._grown.pop(name, None)
                total = more + (so_far.kills if so_far else 0)
                self._grown[name] = Grown(name, place, total, boot_s)
        here = {label(path) for path in found} if self._grown else set()
        self._grown = {
            name: one for name, one in list(self._grown.items())[-KILLS_READS_MAX:]
            if name in here or boot_s - one.last_s <= KILLS_KEPT_S}
        while len(self._kills) > DIRECTORIES_MAX:
            del self._kills[next(iter(self._kills))]
        self._partial = cut or not whole
        self._killed = _most(self._killed)

    def _descend(self, tree: Tree, found: dict[str, int]) -> tuple[dict[str, int], bool]:
        """(kills in the cgroups in or below which any are new, whether all of those were looked
        at).  Goes from the top: on a node of pods the cgroup with the kill may be the last of
        hundreds."""
        below = _by_parent(found)
        self._below = {key: n for key, n in self._below.items() if found.get(key[0]) == key[1]}
        kills: dict[str, int] = {}
        folders, reads = [""], 0
        while folders:
            for path in below.get(folders.pop(0), ()):
                if reads >= KILLS_READS_MAX:
                    return kills, False
                reads += 1
                key, folder = (path, found[path]), f"{tree.base}{path}"
                count = _stat(f"{folder}/memory.events").get("oom_kill", 0)
                if count != self._below.get(key, 0):
                    self._below[key] = count
                    kills[path] = _stat(f"{folder}/{tree.kills}").get("oom_kill", 0)
                    folders.append(path)
        return kills, True


def _most(counts: Counter[str]) -> Counter[str]:
    return Counter(dict(counts.most_common(BIRTHS_MAX)))


def walk(base: str) -> tuple[dict[str, int], bool]:
    """Path below `base` -> inode of every cgroup but the root, and whether the walk was cut short.
    A directory of cgroupfs with two links has none below, so most are never listed; other file
    systems say one."""
    found: dict[str, int] = {}
    folders, cut = [("", 0)], False
    while folders:
        folder, depth = folders.pop()
        try:
            entries = [one for one in os.scandir(f"{base}{folder}") if one.is_dir(
                follow_symlinks=False)]
        except OSError:
            continue
        for entry in sorted(entries, key=lambda one: one.name):
            if len(found) >= DIRECTORIES_MAX:
                return found, True
            try:
                links = entry.stat(follow_symlinks=False).st_nlink
            except OSError:
                continue  # removed meanwhile
            path = f"{folder}/{entry.name}"
            found[path] = entry.inode()
            if links != 2:
                cut = cut or depth >= DEPTH_MAX
                if depth < DEPTH_MAX:
                    folders.append((path, depth + 1))
    return found, cut


def births(before: dict[str, int], now: dict[str, int]) -> Counter[str]:
    """Counts cgroups that are new since the last walk, each for one place: a cgroup that was made
    again under its old name counts for itself, one under a new name for its parent.  Cgroups below
    a new one do not count again."""
    fresh: set[str] = set()
    found: Counter[str] = Counter()
    for path in sorted(now):
        parent = path.rpartition("/")[0]
        if before.get(path) == now[path] and parent not in fresh:
            continue
        if parent not in fresh:
            found[label(path if path in before else parent)] += 1
        fresh.add(path)
    return found


def _by_parent(paths: Iterable[str]) -> dict[str, list[str]]:
    below: dict[str, list[str]] = {}
    for path in paths:
        below.setdefault(path.rpartition("/")[0], []).append(path)
    return below


def holder(base: str, paths: list[str], dying: int) -> tuple[str, int]:
    """(innermost cgroup below which most of the removed ones are, how many)."""
    below = _by_parent(paths)
    place, held, reads = "", dying, 0
    while place in below and reads < DYING_READS_MAX:
        looked = below[place][: DYING_READS_MAX - reads]
        reads += len(looked)
        counts = {path: _stat(f"{base}{path}/cgroup.stat") for path in looked}
        most = max(looked, key=lambda path: (_dying(counts[path]), path))
        if 2 * _dying(counts[most]) < held or _dying(counts[most]) == 0:
            break
        place, held = most, _dying(counts[most])
    return place, held


def _counts_2(tree: Tree) -> dict[str, int]:
    """The kernel's own numbers, of this place and below."""
    stat = _stat(f"{tree.base}/cgroup.stat")
    in_use = stat.get("nr_subsys_memory", stat.get("nr_descendants", -1))
    return {"in_use": in_use, "dying": _dying(stat)} if in_use >= 0 else {}


def _counts_1(roots: Roots, tree: Tree, found: dict[str, int], cut: bool) -> dict[str, int]:
    """/proc/cgroups counts the whole machine's; a container sees fewer directories than that, and
    only the true root has release_agent."""
    in_use = len(found) + 1
    lines = text_of(f"{roots.proc}/cgroups").splitlines()
    rows = [line.split() for line in lines if line.startswith("memory")]
    held = int(rows[0][2]) if rows and len(rows[0]) > 2 and is_count(rows[0][2]) else 0
    if cut or held <= 0 or not os.path.exists(f"{tree.base}/release_agent"):
        return {"in_use": in_use}
    return {"in_use": in_use, "dying": max(0, held - in_use)}


def _stat(path: str) -> dict[str, int]:
    """Lines `key number`; {} when it cannot be read."""
    pairs = (line.split() for line in text_of(path, 1 << 16).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and is_count(pair[1])}


def _dying(stat: dict[str, int]) -> int:
    return stat.get("nr_dying_subsys_memory", stat.get("nr_dying_descendants", 0))


def _outermost(found: dict[str, int]) -> list[str]:
    return sorted(found, key=lambda one: (one.count("/"), one))[:LOOK_MAX]


def _kills(tree: Tree, found: dict[str, int]) -> dict[str, int]:
    """Version 1 counts in each cgroup by itself."""
    return {path: _stat(f"{tree.base}{path}/{tree.kills}").get("oom_kill", 0)
            for path in _outermost(found)}


def _look(tree: Tree, found: dict[str, int]) -> list[Look]:
    """The cgroups that have a limit, outermost first."""
    looks = []
    for path in _outermost(found):
        folder = f"{tree.base}{path}"
        limit = _number(f"{folder}/{tree.limit}")
        tasks_max = _number(f"{folder}/pids.max") if tree.version == 2 else 0
        used = tasks = 0
        if limit:
            cache = _stat(f"{folder}/memory.stat").get(tree.cache, 0)
            used = max(0, _number(f"{folder}/{tree.usage}") - cache)
        if tasks_max:
            tasks = _number(f"{folder}/pids.current")
        if limit or tasks_max:
            name = label(path)
            looks.append(Look(path, name, place_of(name), limit, used, tasks, tasks_max))
    return looks


def _limits(looks: list[Look], boot_s: float) -> list[Sample]:
    """How full each limited cgroup is, the fullest first; and the fullest of each place, for the
    page."""
    memory = [(one.used / one.limit, one) for one in looks if one.limit]
    tasks = [(one.tasks / one.tasks_max, one) for one in looks if one.tasks_max]
    found = []
    for share, one in _fullest(memory):
        subject = f"cgroup={one.label}"
        found.append(Sample("cgroup_memory_ratio", subject, share, boot_s))
        found.append(Sample("cgroup_memory_max_bytes", subject, float(one.limit), boot_s))
    for share, one in _fullest(tasks):
        found.append(Sample("cgroup_tasks_ratio", f"cgroup={one.label}", share, boot_s))
    for name, rows in (("host_cgroup_memory_ratio", memory), ("host_cgroup_tasks_ratio", tasks)):
        most: dict[str, float] = {}
        for share, one in rows:
            most[one.place] = max(share, most.get(one.place, 0.0))
        found += _named(name, most, boot_s)
    return found


def _fullest(rows: list[tuple[float, Look]]) -> list[tuple[float, Look]]:
    return sorted(rows, key=lambda one: -one[0])[:NAMED_MAX]


def _named(name: str, values: Mapping[str, float], boot_s: float) -> list[Sample]:
    """A series for each of at most NAMED_MAX places."""
    most = sorted(values, key=lambda place: (-values[place], place))[:NAMED_MAX]
    return [Sample(name, f"cgroup={place}", float(values[place]), boot_s) for place in most]


def _number(path: str) -> int:
    """A limit or count; 0 for "max", for the huge number of version 1, and for unreadable text."""
    text = text_of(path, 64).strip()
    number = int(text) if is_count(text) else 0
    return number if number < NO_LIMIT else 0


def label(path: str) -> str:
    """A path as it may stand in a subject; the root is /."""
    return legible(path).translate(ODD) or "/"


def place_of(path: str) -> str:
    """The outer part of a path that is the same tomorrow: up to the first name with a number in it,
    as pods, jobs, users, sessions and containers have.  A service keeps its own name, unless it is
    transient or an instance of a template."""
    kept = []
    for part in path.split("/")[1:]:
        is_own = part.endswith(".service") and "@" not in part and not part.startswith("run-")
        if not is_own and DIGIT.search(part):
            break
        kept.append(part)
    return "/" + "/".join(kept)
