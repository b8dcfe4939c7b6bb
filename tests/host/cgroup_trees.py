"""Recorded cgroups of both versions, made to a test's wish."""

from __future__ import annotations

from pathlib import Path

from holdfast.collectors.contract import Roots, Sample


def named(samples: list[Sample]) -> dict[str, float]:
    return {f"{one.name}{{{one.subject}}}": one.value for one in samples}


class Version1:
    """A recorded machine whose memory controller has a hierarchy of its own."""

    def __init__(self, folder: Path, held: int) -> None:
        self.base = folder / "sys/fs/cgroup/memory"
        self.base.mkdir(parents=True)
        (folder / "proc").mkdir()
        self.proc = folder / "proc/cgroups"
        self.roots = Roots(proc=str(folder / "proc"), sys=str(folder / "sys"))
        (self.base / "release_agent").write_text("\n")
        self.holds(held)

    def holds(self, number: int) -> None:
        self.proc.write_text("#subsys_name\thierarchy\tnum_cgroups\tenabled\n"
                             f"cpuset\t3\t1\t1\nmemory\t4\t{number}\t1\n")

    def cgroup(self, path: str, limit: int = 1 << 62, usage: int = 0, cache: int = 0,
               kills: int = 0) -> None:
        place = self.base / path.strip("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (place / "memory.usage_in_bytes").write_text(f"{usage}\n")
        (place / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cache}\n")
        (place / "memory.oom_control").write_text(
            f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")


class Version2:
    """A recorded machine of the unified hierarchy."""

    def __init__(self, folder: Path) -> None:
        self.base = folder / "sys/fs/cgroup"
        self.base.mkdir(parents=True)
        self.roots = Roots(proc=str(folder), sys=str(folder / "sys"))
        (self.base / "cgroup.controllers").write_text("cpu memory pids\n")

    def cgroup(self, path: str, dying: int = 0, below: int = 0, **files: str) -> None:
        place = self.base / path.strip("/")
        place.mkdir(parents=True, exist_ok=True)
        (place / "cgroup.stat").write_text(
            f"nr_descendants {below}\nnr_dying_descendants {dying}\n")
        for name, text in files.items():
            (place / name.replace("__", ".").replace("_", ".", 1)).write_text(text)

    def kills(self, path: str, number: int) -> None:
        """The kernel kills so many more in a cgroup, and counts them in all above it as well."""
        local = self.base / path.strip("/") / "memory.events.local"
        local.write_text(f"oom_kill {number + killed(local)}\n")
        for above in (local.parent, *local.parent.parents):
            if above == self.base:
                break
            events = above / "memory.events"
            events.write_text(f"oom_kill {number + killed(events)}\n")


def killed(events: Path) -> int:
    return int(events.read_text().split()[-1]) if events.exists() else 0
