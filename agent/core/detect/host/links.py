"""The links of the host's chain of causes: a lost core, leaking cgroups, a unit that crashes.

Owns what each link is and how it is said.  Draws no conclusion: host.py does.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

from . import levels
from .cores import Core
from .levels import Place, Rows

HELD_WARN, HELD_DEGRADED = 1000, 20_000  # removed cgroups that the kernel holds
HELD_FACTOR = 4  # ... and this many times those in use: a busy node has some hundreds


class Leak(NamedTuple):
    """Removed memory cgroups that pile up."""

    dying: int
    in_use: int
    grown: int  # within the last ten minutes
    place: str  # below which most of them are; "" unknown

    @property
    def is_many(self) -> bool:
        return self.dying >= HELD_WARN and self.dying >= HELD_FACTOR * self.in_use


class Loop(NamedTuple):
    """Somebody who starts again and again."""

    name: str  # "unit/ecs.service" | "cgroup/ecs/task"
    starts: int  # within the last ten minutes
    how: str
    confidence: float
    beside: tuple[str, ...] = ()  # others that do so as well


def core_words(cores: list[Core]) -> str:
    named = levels.listed([f"core {one.cpu}" for one in cores], 4)
    worst = cores[0]
    return (f"{named} spent {worst.share:.0%} of the last minute in the kernel, while all "
            f"{worst.cores} cores together spent {worst.mean:.0%}")


def busiest(rows: Rows) -> list[str]:
    return [
        f"{labels.get('name', '?')} (pid {labels.get('pid', '?')}) {share:.0%} of a core, last "
        f"on core {labels.get('cpu', '?')}"
        for labels, share in rows.get("task_kernel_ratio", ())]


def owner(cgroup: str) -> str:
    """The outermost unit that a cgroup belongs to, else the cgroup itself.  The names below a unit
    are its owner's to choose, and say nothing about anybody else."""
    for part in cgroup.split("/"):
        if part.endswith(".service"):
            return f"unit/{part}"
    return f"cgroup{cgroup}"


def where_of(loop: Loop, rows: Rows) -> str:
    """The end of a verdict's subject: the unit, or the lasting part of the cgroup's path, since a
    pod's own cgroup has another name tomorrow."""
    for labels, _ in rows.get("cgroup_births_total", ()):
        cgroup = labels.get("cgroup", "")
        if loop.name == f"cgroup{cgroup}":
            return f"/cgroup{labels.get('place', cgroup)}".rstrip("/")
    return f"/{loop.name}"


def unit_of(loop: Loop) -> str:
    return loop.name.rpartition("/")[2]


def words_of(name: str) -> str:
    kind, _, rest = name.partition("/")
    return f"unit {rest}" if kind == "unit" else f"whoever starts below cgroup /{rest}"


def living_in(loop: Loop, places: list[Place]) -> str:
    """The ranks that are part of it: a job's own service may be what crashes."""
    name = unit_of(loop)
    there = [one.words for one in places if name and name in one.cgroup.split("/")]
    return f"{levels.listed(there)} {'lives' if len(there) == 1 else 'live'} there" if there else ""
