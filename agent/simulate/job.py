"""A virtual training job: ranks as small state machines that train together, or not at all.

Owns the truth about a run: which ranks live, how far each generation got, what was written to
disk and from which state each generation began.  Must not decide anything about recovery.  A
generation is a gang: it takes a step when every rank of its world is running and moving.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.model import TRAINER, Commit, Ended, Parked, Resume
from .disk import Disk, Origin
from .loop import Loop
from .machine import Machine

ECHOES = ("RuntimeError: Connection closed by peer", "PeerGone")  # of a peer's end
START, RUN, PARK, END = "starting", "running", "parked", "ended"


@dataclass(slots=True, eq=False)
class Rank:
    """One rank's process.  `hung` and `stopped` are the truth that the core has to find out."""

    rank: int
    local: int
    pid: int
    machine: Machine
    generation: int
    state: str = START
    step: int = 0
    moved_s: float = 0.0  # loop time at which the page last changed
    hung: bool = False
    holds_gil: bool = False
    stopped_at_s: float = -1.0
    waits_for: str = ""  # a path below a mount whose server is gone
    skipped_at: int = 0  # first step at whose end it had left a collective out; 0 = none
    ended: Ended | None = None
    ended_s: float = 0.0
    parked: Parked | None = None
    held: Origin = (0, 0)  # the state in memory, by lineage
    raised_at: int = -1  # the step in which its own code raised last, and it lived on
    ended_steps: int = 0  # what a trainer's page shows: the last step that this process ended
    gang: Gang | None = None

    def moves(self) -> bool:
        """Can this rank's main thread make progress now?"""
        live = self.state == RUN and not self.hung and self.stopped_at_s < 0 and not self.waits_for
        return live and self.machine.up and not self.machine.frozen


@dataclass(slots=True, eq=False)
class Gang:
    """One generation of ranks."""

    generation: int
    world: int
    resume: Resume
    ranks: dict[int, Rank] = field(default_factory=dict)
    step: int = 0
    best_before: int = 0  # the run's highest step when it began
    began_at: int = 0
    peak: int = 0  # its own highest
    formed: bool = False
    broken: bool = False
    torn: bool = False  # broke inside optimizer.step: survivors' state may be torn


class Job:
    """The truth about one run."""

    def __init__(self, loop: Loop, rng: random.Random, name: str, grade: str) -> None:
        self.loop = loop
        self.rng = rng
        self.name = name
        self.grade = grade
        self.disks = {f"/ckpt/{name}": Disk(f"/ckpt/{name}", rng.random() < 0.7)}
        self.folder = f"/ckpt/{name}"
        self.gangs: dict[int, Gang] = {}
        self.step_s = rng.choice((0.5, 0.8, 1.2))
        self.target = rng.choice((10**6, 10**6, 10**6, 60))
        self.commit_every = rng.choice((3, 5, 8))
        self.snapshot_every = rng.choice((0, 2, 4))
        self.torn_share = rng.choice((0.1, 0.1, 0.6))  # breaks that fall into optimizer.step
        self.bug_step = -1  # every generation dies here: a user's bug
        self.culprits: set[int] = set()  # processes that something was done to
        self.refused: set[str] = set()  # checkpoints that were read and did not prove
        self.bug_hits: list[int] = []  # generations that died of it
        self.hurt: dict[int, float] = {}  # generation -> since when a fault holds it up
        self.ends: dict[int, set[str]] = {}  # generation -> raised | echo | killed
        self.committed: dict[int, float] = {}  # generation -> when its first checkpoint was whole
        self.made_s: dict[str, float] = {}  # checkpoint -> when it was whole
        self.wrong: dict[int, int] = {}  # generation -> first step whose result is wrong
        self.slow_commit_s = 0.0
        self.best = 0  # highest step ever finished
        self.useful_s = 0.0
        self.patience = 99  # generations without a new step that its budgets allow
        self.own_step = 0  # a script's own newest checkpoint
        self.last_progress_s = 0.0
        self.reachable: Callable[[Machine, Machine], bool] = lambda _a, _b: True
        self.on_break: Callable[[Gang, Rank | None, str], None] = lambda *_: None
        self.load_snapshot: Callable[[Gang], bool] = lambda _: False
        self.on_snapshot: Callable[[Gang], None] = lambda _: None
        self.on_commit: Callable[[Job, int, int], None] = lambda *_: None
        self.on_step: Callable[[Job, Gang], None] = lambda *_: None
        self.on_resume: Callable[[Job, Gang, Origin], None] = lambda *_: None
        self.on_level: Callable[[Job], None] = lambda _: None

    @property
    def disk(self) -> Disk:
        """The checkpoint folder that the caller named last."""
        return self.disks[self.folder]

    def move(self, folder: str) -> None:
        """The caller starts the run again with another folder: what stands there is its state."""
        disk = self.disks.setdefault(folder, Disk(folder, self.disk.marks))
        self.folder = folder
        disk.lineage = self.disks[f"/ckpt/{self.name}"].lineage
        self.best = max((each.step for each in disk.listing() if not each.bad), default=0)

    def folder_of(self, path: str) -> str:
        """The folder of this run in which that checkpoint lies; "" for none of them."""
        return next((one for one in self.disks if path.startswith(f"{one}/")), "")

    def harm(self, generation: int, culprit: int = 0) -> None:
        """A fault holds this generation up: from now on replacing it has a cause; `culprit` is the
        process that it came over."""
        self.hurt.setdefault(generation, self.loop.now_s)
        self.culprits.add(culprit)

    def is_wrong(self, state: Origin) -> bool:
        """Was this state computed behind a collective that a rank left out?"""
        generation, step = state
        while generation:
            if 0 < self.wrong.get(generation, 0) <= step:
                return True
            generation, step = self.disk.lineage.get(generation, (0, 0))
        return False

    def join(self, rank: Rank, generation: int, world: int, resume: Resume) -> None:
        """`rank` stands ready in `generation`; the last one to come lets it begin."""
        gang = self.gangs.get(generation)
        again = gang is not None and rank.rank in gang.ranks
        if gang is None or (gang.broken and again):  # another launcher begins it once more
            gang = self.gangs[generation] = Gang(generation, world, resume)
        if gang.broken:
            self.loop.after(0.2, lambda: self.on_break(gang, None, "peer gone at rendezvous"))
        gang.ranks[rank.rank] = rank
        rank.gang = gang
        whole = len(gang.ranks) == world and not gang.formed and not gang.broken
        if whole and all(each.state == START for each in gang.ranks.values()):
            self._begin(gang)

    def _begin(self, gang: Gang) -> None:
        origin, trouble = self._load(gang)
        if origin is None:
            self.loop.note(self.name, "gen %d cannot load: %s", gang.generation, trouble)
            if gang.resume.kind in ("survivor", "snapshot"):
                self._refuse(gang, f"restore_failed: {trouble}")
                return
            # As in the trainer all agree on what was read, and every rank says what was wrong.
            bad = trouble.startswith("bad")
            word = "bad_checkpoint" if bad else "exception"
            for each in sorted(gang.ranks)[: None if bad else 1]:
                self.end(gang.ranks[each], Ended(1, outcome=word, error=f"LoadError: {trouble}"))
            return
        if self.grade == TRAINER:
            self.on_resume(self, gang, origin)
        self.disk.begin(gang.generation, origin)
        gang.step, gang.formed = origin[1], True
        gang.began_at, gang.peak, gang.best_before = origin[1], origin[1], self.best
        # A script's own state is not in the folder that its run was moved to.
        self.best = max(self.best, origin[1])
        for rank in gang.ranks.values():
            if rank.parked is None:  # its process is new: it did no step yet
                rank.raised_at, rank.ended_steps = gang.step, 0
            rank.state, rank.parked, rank.step = RUN, None, gang.step
            rank.moved_s, rank.held = self.loop.now_s, (gang.generation, gang.step)
            rank.skipped_at = 0
        self.loop.note(self.name, "gen %d begins at step %d from %s (state of gen %d)",
                       gang.generation, gang.step, gang.resume.kind, origin[0])
        self.on_level(self)
        self._beat(gang, self.step_s * 1.5)

    def _refuse(self, gang: Gang, reason: str) -> None:
        """The trainer does not believe state in memory: every rank parks again with what it has."""
        for rank in gang.ranks.values():
            had = rank.parked
            torn = had is None or had.torn or gang.resume.kind == "snapshot"
            rank.parked = Parked(step=had.step if had else 0, torn=torn, reason=reason)
            rank.state = PARK
        self.break_gang(gang, None, reason)
        self.on_level(self)

    def _load(self, gang: Gang) -> tuple[Origin | None, str]:
        resume = gang.resume
        if self.grade != TRAINER:
            return (self._parent(gang), self.own_step), ""
        if resume.kind == "fresh":
            return (0, 0), ""
        if resume.kind == "disk":
            path, commit = resume.path, self.disk.commits.get(resume.path)
            if commit is None:
                return None, f"no checkpoint gen {resume.generation} step {resume.step}"
            if path in self.disk.rotten or commit.bad:
                self.refused.add(path)
                if self.disk.marks:
                    self.disk.spoil(path, "digest mismatch")
                return None, f"bad checkpoint {path}"
            return (commit.generation, commit.step), ""
        if resume.kind == "snapshot":
            if self.load_snapshot(gang):
                return (resume.generation, resume.step), ""
            return None, f"no snapshot of step {resume.step} here"
        # As the trainer does: it takes the newest untorn state in the group, and refuses when that
        # is not the planned one, for the holder may have died since the plan was made.
        whole = [rank for rank in gang.ranks.values()
                 if rank.parked is not None and not rank.parked.torn]
        newest = max((rank.parked.step for rank in whole if rank.parked), default=-1)
        for rank in whole:
            if newest == resume.step and rank.parked and rank.parked.step == newest:
                return rank.held, ""
        return None, f"no survivor holds step {resume.step}, the newest is {newest}"

    def _parent(self, gang: Gang) -> int:
        return max((each for each in self.disk.lineage if each < gang.generation), default=0)

    def _beat(self, gang: Gang, delay_s: float) -> None:
        self.loop.after(delay_s, lambda: self._advance(gang))

    def _advance(self, gang: Gang) -> None:
        if gang.broken:
            return
        ranks = list(gang.ranks.values())
        if not all(rank.moves() for rank in ranks) or not self._connected(ranks):
            # Suspended from outside, or waiting for a server of files: nobody's fault.
            if not any(r.waits_for for r in ranks) and any(r.stopped_at_s < 0 for r in ranks):
                self.harm(gang.generation)
            self._beat(gang, self.step_s)
            return
        if gang.step + 1 == self.bug_step:
            self.bug_hits.append(gang.generation)
            self.raises(ranks[0], "ValueError: bad sample")
            return
        gang.step += 1
        gang.peak = max(gang.peak, gang.step)
        now = self.loop.now_s
        for rank in ranks:
            rank.step, rank.moved_s, rank.held = gang.step, now, (gang.generation, gang.step)
            rank.ended_steps = gang.step
        self.on_step(self, gang)
        if gang.step > self.best:
            self.best = gang.step
            self.useful_s += self.step_s
        self.last_progress_s = now
        if gang.step >= self.target:
            for rank in ranks:
                self.end(rank, Ended(0, outcome="done"))
            return
        self._save(gang, ranks)
        self._beat(gang, self.step_s)

    def _connected(self, ranks: list[Rank]) -> bool:
        machines = {rank.machine.name: rank.machine for rank in ranks}
        if len(machines) < 2:
            return True
        first, *rest = machines.values()
        return all(self.reachable(first, each) and self.reachable(each, first) for each in rest)

    def _save(self, gang: Gang, ranks: list[Rank]) -> None:
        if self.grade != TRAINER:
            if gang.step % self.commit_every == 0:
                self.own_step = max(self.own_step, gang.step)
            return
        if self.snapshot_every and gang.step % self.snapshot_every == 0:
            self.on_snapshot(gang)
        if gang.step % self.commit_every == 0:
            writer, step = gang.ranks[0], gang.step
            delay_s = self.rng.uniform(0.1, 0.6) + self.slow_commit_s * self.rng.random()
            writer.machine.after(delay_s, lambda: self._commit(gang, writer, step, ranks))

    def _commit(self, gang: Gang, writer: Rank, step: int, ranks: list[Rank]) -> None:
        """The marker, last; by a process that may have been frozen or told to join another
        generation since, and goes on with what it had begun."""
        if writer.state == END:
            return
        if writer.stopped_at_s >= 0 or any(each.stopped_at_s >= 0 for each in ranks):
            writer.machine.after(0.5, lambda: self._commit(gang, writer, step, ranks))
            return
        made = self.save_now(gang, step)
        if made is None:
            return
        if self.rng.random() < 0.03:
            self.disk.rot(made.path)
        self.on_commit(self, gang.generation, step)
        self.on_level(self)

    def save_now(self, gang: Gang, step: int) -> Commit | None:
        """A checkpoint that is whole at once; None where there is one already."""
        made = self.disk.create(gang.generation, step, gang.world)
        if made is not None:
            self.committed.setdefault(gang.generation, self.loop.now_s)
            self.made_s[made.path] = self.loop.now_s
            self.loop.note(self.name, "commit gen %d step %d", gang.generation, step)
        return made

    def raises(self, rank: Rank, error: str) -> None:
        """Its own code does.  A trainer's process lives on, unless it has done no step since it did
        so before."""
        stays = self.grade == TRAINER and rank.state == RUN and rank.step > rank.raised_at
        if not stays:
            return self.end(rank, Ended(1, outcome="exception", error=error))
        rank.raised_at, machine = rank.step, rank.machine
        rank.ended = Ended(
            1, outcome="exception", error=error, boot_s=machine.boot_s(),
            wall_s=machine.now().wall_s)
        self.harm(rank.generation, rank.pid)
        self.ends.setdefault(rank.generation, set()).add("raised")
        self.loop.note(self.name, "rank %d gen %d raised: %s", rank.rank, rank.generation, error)
        self.park(rank, f"raised: {error}")

    def end(self, rank: Rank, how: Ended) -> None:
        """The process of `rank` is over; abnormally, it takes its generation with it."""
        if rank.state == END:
            return
        was = rank.state
        rank.state, rank.ended_s = END, self.loop.now_s
        rank.ended = Ended(how.code, how.signal, how.outcome, how.error, how.by_us,
                           rank.machine.boot_s(), rank.machine.now().wall_s)
        rank.parked = None
        if not how.by_us and how.outcome != "done":
            self.harm(rank.generation, 0 if how.error.startswith(ECHOES) else rank.pid)
            kind = "killed" if how.outcome != "exception" else \
                "echo" if how.error.startswith(ECHOES) else "raised"
            self.ends.setdefault(rank.generation, set()).add(kind)
        if not how.by_us:
            self.loop.note(self.name, "rank %d gen %d ended (%s): code %d %s", rank.rank,
                           rank.generation, was, how.code, how.error)
        gang = rank.gang
        if gang is not None and how.outcome != "done" and gang.ranks.get(rank.rank) is rank:
            self.break_gang(gang, rank, how.error or f"rank {rank.rank} gone")
        self.on_level(self)

    def break_gang(
        self, gang: Gang, culprit: Rank | None, why: str, whole: bool = False
    ) -> None:
        """The generation takes no further step; its survivors will notice."""
        if gang.broken:
            return
        gang.broken = True
        self.harm(gang.generation)
        gang.torn = not whole and gang.formed and self.rng.random() < self.torn_share
        self.on_break(gang, culprit, why)

    def park(self, rank: Rank, why: str, whole: bool = False) -> None:
        """A trainer's survivor leaves its generation with its state in memory; `whole`: it was
        asked to, and does so between two steps."""
        if rank.state != RUN or not rank.moves():
            return
        torn = rank.gang is not None and rank.gang.torn and self.rng.random() < 0.8
        rank.state = PARK
        rank.parked = Parked(step=rank.step, torn=torn, reason=why)
        if rank.gang is not None:
            self.break_gang(rank.gang, rank if rank.ended else None, why, whole)
        self.on_level(self)

    def newest(self) -> Gang | None:
        """The newest generation that has begun."""
        formed = [gang for gang in self.gangs.values() if gang.formed]
        return max(formed, key=lambda gang: gang.generation) if formed else None
