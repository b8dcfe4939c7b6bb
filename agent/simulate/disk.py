"""The shared checkpoint directory of a run, and the truth about where each state came from.

Owns commit markers (created exclusively) and lineage: which generation began from which state.
Lineage is the simulator's own knowledge; the core never sees it, it is what the core's validity
rule is judged by.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..core.model import Commit

Origin = tuple[int, int]  # (generation, step) of a state


class Disk:
    """The durable state in one folder."""

    def __init__(self, folder: str, marks: bool = True) -> None:
        self.folder = folder
        self.marks = marks  # what is found to be bad can be renamed, so that all see it
        self.commits: dict[str, Commit] = {}
        self.rotten: set[str] = set()  # bytes are wrong; nobody knows before reading them
        self.lineage: dict[int, Origin] = {}  # generation -> the state it began from
        self.deleted: list[str] = []
        self._listing: tuple[Commit, ...] | None = None

    def create(self, generation: int, step: int, world: int) -> Commit | None:
        """The exclusive create of a commit marker; None when it exists."""
        path = f"{self.folder}/step-{step:09d}.gen-{generation}"
        if path in self.commits:
            return None
        self._listing = None
        self.commits[path] = Commit(generation=generation, step=step, path=path, world=world)
        return self.commits[path]

    def rot(self, path: str) -> None:
        """A byte flips before the checkpoint is read back: it never counts as verified."""
        self.rotten.add(path)
        self._listing = None

    def spoil(self, path: str, why: str) -> None:
        """Quarantine: everybody sees from now on that this one is bad."""
        old = self.commits[path]
        self.commits[path] = Commit(old.generation, old.step, old.path, old.world, why)
        self._listing = None

    def delete(self, path: str) -> bool:
        """Remove one checkpoint; False when it is not there."""
        self._listing = None
        if self.commits.pop(path, None) is None:
            return False
        self.deleted.append(path)
        return True

    def listing(self) -> tuple[Commit, ...]:
        """What a directory listing shows, in order of step and generation."""
        if self._listing is None:
            found = sorted(self.commits.values(), key=lambda each: (each.step, each.generation))
            self._listing = tuple(
                replace(each, verified=each.path not in self.rotten) for each in found)
        return self._listing

    def begin(self, generation: int, origin: Origin) -> None:
        """Record from which state `generation` really began."""
        self.lineage[generation] = origin

    def descends(self, older: Origin, newer: Origin) -> bool:
        """Is the state `newer` a continuation of the state `older`?"""
        generation, step = newer
        while generation > older[0]:
            parent = self.lineage.get(generation)
            if parent is None or parent[0] >= generation:
                return False
            generation, step = parent[0], min(step, parent[1])
        return generation == older[0] and step >= older[1]


def void_by(commit: Commit, resumes: list[tuple[int, int]]) -> tuple[int, int] | None:
    """The later plan that voids `commit`, by the rule of DESIGN 3, written here a second time so
    that the core's own is checked against something.  `resumes` = (generation, resume step)."""
    for generation, step in resumes:
        if generation > commit.generation and step < commit.step:
            return generation, step
    return None
