"""A virtual launcher: obeys start, stop, finish, evidence and delete, and tells levels.

Owns the processes of one run on one machine.  Must not decide about recovery: what it does by
itself is what the real launcher does by itself (tell the trainer's survivors to leave a broken
generation; refuse a generation that is not new; answer a known effect id with its known outcome).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from msgspec.structs import replace

from holdfast.worker.permit import Permit, RanOut, ordered_ns

from ..core import model
from ..core.actions import REMOVE_LOCK, RUN_CHECK
from ..core.model import (
    TRAINER,
    Commit,
    Effect,
    EffectOutcome,
    Ended,
    RankView,
    RunView,
    run_subject,
)
from .job import END, PARK, RUN, START, Gang, Job, Rank
from .machine import Machine

OUTCOMES_KEPT = 64
READ_AGAIN = 3  # of the newest checkpoints, by a rank 0 that begins
COMMITS_SENT = 100
PERMIT_LOOK_S = 0.1  # between two looks at a permit, as each rank's ticker has them
STEPS_SHOWN = 4  # whose ends a page remembers
Reply = Callable[[EffectOutcome], None]
BODIES = {"start": model.Start, "stop": model.Stop, "finish": model.Finish,
          "evidence": model.TakeEvidence, "logs": model.TakeEvidence, "delete": model.Delete,
          RUN_CHECK: model.RunCheck, REMOVE_LOCK: model.RemoveLock}


def order_of(run: str, fields: dict[str, object]) -> Effect:
    """An order, as it stands in an agent's packet."""
    kind = str(fields["kind"])
    body = msgspec.convert(fields["body"], BODIES[kind])
    return Effect(str(fields["id"]), kind, run_subject(run), "", 0.0, body)


class Launcher:
    """`holdfast run` on one machine."""

    def __init__(self, job: Job, machine: Machine, nproc: int, rng: random.Random,
                 nnodes: int = 1, least: int = 0) -> None:
        self.job, self.machine, self.nproc = job, machine, nproc
        self.nnodes, self.least, self.rng = nnodes, least or nnodes, rng
        self.alive = True
        self.exit_code: int | None = None
        self.exit_reason = ""
        self.generation = 0
        self.max_restarts = 3
        self.hang_limit_s = 0.0
        self.known: dict[str, Commit] | None = None  # checkpoints, once its trainer has listed them
        self.led: set[int] = set()  # generations whose rank 0 was started here
        self.shutdown = ""
        self.devices: tuple[str, ...] = ()  # that its ranks take
        self.suspended = False  # stopped from outside, with its ranks
        self.ranks: dict[int, Rank] = {}
        self.snapshot: tuple[int, int] | None = None
        self.outcomes: dict[str, EffectOutcome] = {}
        self.started_s = 0.0
        self.startup_s = 0.0
        self.registered_boot_s = machine.boot_s()
        self.permit = Permit()  # of its newest generation
        self.wake: Callable[[], None] = lambda: None
        self.on_start: Callable[[Launcher, model.Start], None] = lambda *_: None
        self.on_delete: Callable[[Launcher, model.Delete, str], None] = lambda *_: None

    # ------------------------------------------------------------ levels

    def view(self, since_s: float = 0.0) -> RunView:
        """The levels of this run on this machine.  The page of a rank that ended before `since_s`
        is not to be read any more by an agent that began then."""
        snapshot = None
        if self.snapshot is not None:
            snapshot = model.SnapshotView(self.snapshot[0], self.snapshot[1], self.nproc)
        state = "idle"
        if self.ranks:
            ends = [rank.ended for rank in self.ranks.values()]
            over = all(ended is not None and ended.outcome == "done" for ended in ends)
            state = "done" if over else "running"
        trainer = self.job.grade == TRAINER
        return RunView(
            run=self.job.name, node=self.machine.name, grade=self.job.grade, nproc=self.nproc,
            nnodes_min=self.least, nnodes_max=self.nnodes, generation=self.generation, state=state,
            max_restarts=self.max_restarts, hang_limit_s=self.hang_limit_s,
            ranks=tuple(self._rank_view(rank, since_s) for _, rank in sorted(self.ranks.items())),
            commits=self._commits() if trainer else (),
            checkpoint_dir=self.job.folder if trainer else "",
            snapshot=snapshot, shutdown=self.shutdown,
            suspended=self.suspended, devices=self.devices,
            startup_s=self.startup_s, registered_boot_s=self.registered_boot_s,
        )

    def _commits(self) -> tuple[Commit, ...]:
        """What stood there as its trainer began, and what a rank 0 that was started here commits
        and reads back; what others' rank 0 does it never hears, nor what their launchers delete.
        That one is bad is in its name, for all to see."""
        listed = self.job.disk.listing()
        if self.known is None:
            self.known = {one.path: replace(one, verified=False) for one in listed}
        reads = any(rank.rank == 0 and rank.state in (RUN, PARK) for rank in self.ranks.values())
        newest = {one.path for one in listed[-READ_AGAIN:]} if reads else ()
        for one in listed:
            if one.bad or one.path in newest or one.generation in self.led:
                self.known[one.path] = one
        found = sorted(self.known.values(), key=lambda one: (one.generation, one.step))
        return tuple(found[-COMMITS_SENT:])

    def _rank_view(self, rank: Rank, since_s: float) -> RankView:
        now_s = self.job.loop.now_s
        if rank.state == END and rank.ended_s < since_s:
            return RankView(
                rank=rank.rank, node=self.machine.name, pid=rank.pid, generation=rank.generation,
                state=rank.state, page=False, proc_state="Z", ended=rank.ended)
        stopped = rank.stopped_at_s >= 0
        waits = rank.state == RUN and not rank.hung and not rank.waits_for
        behind = int(rank.hung) + int(bool(rank.skipped_at))
        ends = tuple((step, 8 * step - int(0 < rank.skipped_at <= step))
                     for step in range(max(1, rank.step - STEPS_SHOWN + 1), rank.step + 1)
                     if rank.gang is not None and step > rank.gang.began_at)
        known = self.job.grade == TRAINER
        still_s = max(0.0, now_s - rank.moved_s)
        blocked = waits and still_s > self.job.step_s * 1.5
        beat_age_s = 0.05
        if stopped:
            beat_age_s = now_s - rank.stopped_at_s
        elif rank.holds_gil:
            beat_age_s = still_s
        phase = "unknown"
        if known:
            phase = "collective" if blocked else "forward_backward"
        return RankView(
            rank=rank.rank, node=self.machine.name, pid=rank.pid, generation=rank.generation,
            state=rank.state, step=rank.ended_steps if known else rank.step,
            phase="startup" if rank.state == START else phase,
            still_s=still_s, beat_age_s=beat_age_s,
            proc_state=_proc_state(rank),
            stopped_s=now_s - rank.stopped_at_s if stopped else 0.0,
            active=rank.moves() and not blocked,
            seq=((0, 8 * rank.step + 4 - behind),), step_seq=ends,
            step_time_s=self.job.step_s if rank.ended_steps or rank.step and not known else 0.0,
            ended=rank.ended, parked=rank.parked,
        )

    # ------------------------------------------------------------ orders

    def perform(
        self, effect: Effect, reply: Reply, fields: Mapping[str, object] | None = None
    ) -> None:
        """Obey one order; exactly one outcome, the same one for the same id.  `fields`: the packet
        that it stood in."""
        known = self.outcomes.get(effect.id)
        if known is not None:
            reply(known)
            return
        error, detail = self._obey(effect, fields or {})
        outcome = EffectOutcome(effect.id, not error, error, detail)
        self.outcomes[effect.id] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            del self.outcomes[next(iter(self.outcomes))]
        reply(outcome)
        self.wake()

    def _obey(self, effect: Effect, fields: Mapping[str, object]) -> tuple[str, str]:
        body = effect.body
        if isinstance(body, model.Start):
            said = fields.get("body", {"generation": body.generation, "permit_s": body.permit_s})
            assert isinstance(said, dict)
            try:
                until_ns = ordered_ns(said, self._now_ns())
            except RanOut as error:
                return f"refused: {error}", ""
            return self._start(body, until_ns), ""
        if isinstance(body, model.Stop):
            return self._stop(body), ""
        if isinstance(body, model.Finish):
            self.leave(body.code, body.reason)
            return "", ""
        if isinstance(body, model.TakeEvidence):
            rank = self.ranks.get(body.rank)
            if rank is None or rank.state == END:
                return "no such rank", ""
            where = "loader.py:41 in fetch" if rank.hung else "train.py:12 in step"
            wchan = "rpc_wait_bit_killable" if rank.waits_for else ""
            return "", (f'{{"where":"{where}","stack":[],"state":"{_proc_state(rank)}",'
                        f'"wchan":"{wchan}","path":"{rank.waits_for}"}}')
        if isinstance(body, model.Delete):
            return self._delete(body), ""
        return f"unknown order {effect.kind}", ""

    def _now_ns(self) -> int:
        return int(self.machine.boot_s() * 1e9)

    def _start(self, start: model.Start, until_ns: int) -> str:
        if start.generation <= self.generation:
            return f"refused: generation {start.generation} is not above {self.generation}"
        self.on_start(self, start)
        self.generation = start.generation
        if 0 in start.ranks:
            self.led.add(start.generation)
        self.permit = Permit(start.generation, until_ns)
        self._watch_permit(start.generation)
        self.started_s = self.job.loop.now_s
        survivors, places = dict[int, Rank](), sorted(start.ranks)
        for rank in list(self.ranks.values()):
            number = places[rank.local] if rank.local < len(places) else -1
            if number in start.keep and rank.state in (RUN, PARK, START) and rank.held != (0, 0):
                survivors[number] = rank
            else:
                self.job.end(rank, Ended(137, 9, by_us=True))
        self.ranks = {}
        for local, number in enumerate(sorted(start.ranks)):
            if number in survivors:
                self._take_along(survivors[number], number, start)
            else:
                self._fork(number, local, start)
        return ""

    def _take_along(self, rank: Rank, number: int, start: model.Start) -> None:
        if rank.state == RUN:
            self.job.park(rank, "told to leave")
        self.ranks[number] = rank
        if rank.state == RUN:  # it cannot move: it stays behind, and the gang never forms
            return
        rank.rank, rank.generation = number, start.generation
        rank.state, rank.moved_s, rank.gang, rank.ended = START, self.job.loop.now_s, None, None
        self.machine.after(self.rng.uniform(0.02, 0.1), lambda: self._ready(rank, start))

    def _fork(self, number: int, local: int, start: model.Start) -> None:
        self.job.loop.pid += 1
        rank = Rank(number, local, self.job.loop.pid, self.machine, start.generation,
                    moved_s=self.job.loop.now_s)
        self.ranks[number] = rank
        delay_s = self.rng.uniform(0.2, 0.5)
        if not self.startup_s:
            delay_s += 1.0  # the first start imports and preloads
        self.machine.after(delay_s, lambda: self._ready(rank, start))

    def _ready(self, rank: Rank, start: model.Start) -> None:
        if not self.alive or rank.state != START or rank.generation != start.generation:
            return
        if rank.stopped_at_s >= 0 or rank.hung:
            self.machine.after(0.5, lambda: self._ready(rank, start))
            return
        rank.moved_s = self.job.loop.now_s
        self.job.join(rank, start.generation, start.world, start.resume)

    def first_step(self) -> None:
        """A generation has begun: from now on this run's start-up time is known."""
        if not self.startup_s:
            self.startup_s = self.job.loop.now_s - self.started_s

    def _stop(self, stop: model.Stop) -> str:
        if stop.generation < self.generation:
            return f"refused: generation {stop.generation} is below {self.generation}"
        if stop.leave:
            self.shutdown = self.shutdown or "drained"
        for number, rank in list(self.ranks.items()):
            if stop.ranks and number not in stop.ranks:
                continue
            if stop.park and not stop.after and self.job.grade == TRAINER:
                self._park(rank, stop.reason)
                continue
            if stop.park and self.job.grade == TRAINER and rank.state == RUN:
                if stop.save and rank.gang is not None:
                    self.job.save_now(rank.gang, rank.step)
                self.job.park(rank, stop.reason, whole=True)
                continue
            wait_s = stop.grace_s if rank.stopped_at_s >= 0 or rank.hung else 0.05
            self.machine.after(wait_s, partial(self._ended_by_us, rank, rank.generation))
        return ""

    def _ended_by_us(self, rank: Rank, generation: int) -> None:
        if rank.generation != generation:
            return  # it parked in time, and the next plan has kept it
        self.job.end(rank, Ended(137, 9, by_us=True))
        self.wake()

    def _delete(self, delete: model.Delete) -> str:
        if delete.generation < self.generation:
            return f"refused: generation {delete.generation} is not the newest"
        for path in delete.paths:
            self.on_delete(self, delete, path)
            self.job.disk.delete(path)
            (self.known or {}).pop(path, None)
        return ""

    def leave(self, code: int, reason: str) -> None:
        """The launcher ends, and with it every rank."""
        if not self.alive:
            return
        self.alive = False
        self.exit_code, self.exit_reason = code, reason
        self.job.loop.note(self.machine.name, "launcher of %s leaves with %d: %s",
                           self.job.name, code, reason)
        self.drop_ranks()

    def drop_ranks(self) -> None:
        """Every rank dies with the launcher."""
        for rank in self.ranks.values():
            self.job.end(rank, Ended(137, 9, by_us=True))
        self.snapshot = None
        self.wake()

    # ------------------------------------------------------------ what happens by itself

    def leave_generation(self, gang: Gang, why: str) -> None:
        """The trainer's ranks leave a broken generation; a script's fail or stay blocked."""
        if not self.alive:
            return
        for rank in self.ranks.values():
            if rank.gang is not gang or rank.state == END:
                continue
            if self.job.grade == TRAINER:
                self._park(rank, why)
            elif self.rng.random() < 0.5 and rank.moves():
                self.job.end(rank, Ended(1, outcome="exception",
                                         error="RuntimeError: Connection closed by peer"))
        self.wake()

    def _park(self, rank: Rank, why: str) -> None:
        if rank.state == RUN:
            self.job.park(rank, why)
        elif rank.state == START and rank.parked is not None:
            rank.state = PARK
        elif rank.state == START:
            self.job.end(rank, Ended(1, outcome="exception", error=f"PeerGone: {why}"))

    def renew_permit(self, generation: int, until_ns: int) -> None:
        """The agent says until when this generation's ranks may compute."""
        self.permit.renew(generation, until_ns)

    def _watch_permit(self, generation: int) -> None:
        """Launcher and ranks look at it by themselves, whether an agent is there or not."""
        if self.alive and self.permit.until_ns and self.permit.generation == generation:
            self.check_permit()
            self.machine.after(PERMIT_LOOK_S, partial(self._watch_permit, generation))

    def check_permit(self) -> None:
        """A permit that ran out ends the ranks, whoever else is there or not."""
        if self.permit.is_over(self._now_ns()):
            self.job.loop.note(self.machine.name, "the permit of gen %d of %s ran out",
                               self.generation, self.job.name)
            for rank in self.ranks.values():
                self.job.harm(rank.generation, rank.pid)
                self.job.end(rank, Ended(137, 9, by_us=True))
            self.permit = Permit()
            self.wake()


def _proc_state(rank: Rank) -> str:
    if rank.state == END:
        return "Z"
    if rank.stopped_at_s >= 0:
        return "T"
    return "D" if rank.waits_for else "S"
