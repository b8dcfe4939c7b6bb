"""A small world for the core's tests: one node, its store and its launchers as plain values.

`Lab.step()` performs the effects of the last step the way the edge would, as a pure function of
state, and feeds the outcomes back.  Tests move the clock and change the launcher's levels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from fleet import Flight, World

from holdfast.agent.core.checks.node_tests import found_of
from holdfast.agent.core.model import (
    Alert,
    Beat,
    CheckVerdict,
    Commit,
    Decision,
    Doc,
    Effect,
    EffectOutcome,
    Ended,
    Event,
    Incident,
    Lease,
    NodeTests,
    Now,
    Observed,
    Parked,
    Plan,
    RankView,
    Request,
    RunCheck,
    RunView,
    Settings,
    Start,
    Stop,
    StoreView,
    StoreWrite,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.run.stage import check_invariants

replace = msgspec.structs.replace


class Lab:
    """One node `a` with one run `r`; single node unless settings say otherwise."""

    def __init__(
        self, grade: str = "trainer", nproc: int = 2, settings: Settings | None = None,
        name: str = "a", **view: Any,
    ) -> None:
        self.name = name
        self.settings = settings or Settings()
        self.runbooks: dict[str, Any] = {}
        self.node = Node(name, self.settings, self.runbooks)
        view.setdefault("max_restarts", 3)
        view.setdefault("startup_s", 2.0)
        self.view = RunView(run="r", node=name, grade=grade, nproc=nproc, **view)
        self.boot_s, self.boot_id = 100.0, "b"
        self.ahead_s = 0.0  # of this machine's clock before the store's
        self.wall_ahead_s = 0.0  # of what it takes for the time of day
        self.docs: dict[str, Doc] = {}
        self.leases: dict[str, tuple[str, float]] = {}  # run -> holder, end; as the store keeps it
        self.outcomes: list[EffectOutcome] = []
        self.elsewhere: list[Effect] = []  # orders for other nodes
        self.requests: tuple[Request, ...] = ()
        self.orphans: tuple[Request, ...] = ()
        self.alerts: tuple[Alert, ...] = ()  # those that have an answer are settled by the edge
        self.firing: tuple[str, ...] = ()  # of alerts, settled or not
        self.beats: tuple[Beat, ...] = ()
        self.events: tuple[Event, ...] = ()
        self.samples: tuple[tuple[str, str, float, float], ...] = ()
        self.silent: tuple[str, ...] = ()  # names of readings whose collector does not answer
        self.checks: dict[str, CheckVerdict] = {}  # as made last
        self.passes: tuple[tuple[str, tuple[float, ...]], ...] = ()
        self.health: dict[str, CheckVerdict] = {}  # what a check would find; else it is well
        self.world = World()  # what tests between nodes find
        self.unwritable: dict[str, str] = {}  # path -> why
        self.evidence: dict[str, Any] = {}  # what is seen of a rank that is looked at, else usual
        self.store_up = True
        self.cluster = ""  # whose store it is
        self.journal_stalled = False
        self.hold: set[str] = set()  # kinds of effects that get no outcome
        self.log: list[Effect] = []
        self.decision = Decision()
        self.incidents: dict[str, Incident] = {}  # each that there ever was, as it was last
        self.refuse_puts = 0
        self.next_pid = 1000
        self.seen = Observed()

    # ------------------------------------------------------------ the step

    def observed(self) -> Observed:
        return Observed(
            runs=(self.view,),
            store=StoreView(
                up=self.store_up, docs=tuple(self.docs.values()), leases=self._lease_views(),
                cluster=self.cluster,
            ),
            outcomes=tuple(self.outcomes[-64:]), requests=self.requests, beats=self.beats,
            orphans=self.orphans, alerts=self.alerts, firing=self.firing,
            events=self.events, samples=readings_of(self.samples, self.silent),
            journal_stalled=self.journal_stalled, checks=tuple(self.checks.values()),
            passes=self.passes,
        )

    def step(self, seconds: float = 0.0) -> list[Effect]:
        """One step after so many seconds; its effects are performed before the next."""
        self.boot_s += seconds
        now = Now(boot_s=self.boot_s, wall_s=1e9 + self.boot_s + self.wall_ahead_s,
                  boot_id=self.boot_id)
        self.seen = self.observed()
        self.decision = self.node.step(now, self.seen)
        self.incidents |= {one.id: one for one in self.decision.incidents}
        assert not [one.reason for one in self.decision.verdicts if one.fault == "run_not_judged"]
        for case in self.node.cases.values():
            assert check_invariants(case.state) == ()
        effects = list(self.decision.effects)
        self.log += effects
        for effect in effects:
            self._perform(effect)
        return effects

    def settle(self, limit: int = 20) -> list[Effect]:
        """Step without time until nothing more is asked for."""
        asked: list[Effect] = []
        for _ in range(limit):
            effects = self.step()
            asked += effects
            if not effects:
                return asked
        raise AssertionError(f"still asking after {limit} steps: {asked[-3:]}")

    def _perform(self, effect: Effect) -> None:
        if effect.kind in self.hold:
            return
        ok, error, detail = True, "", ""
        body = effect.body
        if getattr(body, "node", "") and effect.kind in ("stop", "evidence", "logs"):
            self.elsewhere.append(effect)  # the cluster has it carried out there
            return
        if isinstance(body, StoreWrite):
            ok = self._put(body)
            error = "" if ok else "version conflict"
        elif isinstance(body, Start):
            self._start(body)
        elif isinstance(body, Stop):
            self._stop(body)
        elif isinstance(body, RunCheck) and body.run:
            detail = json.dumps([[one, self.unwritable.get(one, "")] for one in body.paths])
        elif isinstance(body, NodeTests):
            report = Flight(0, self.world, nodes=body.nodes).report
            detail = msgspec.json.encode(found_of(report)).decode()
        elif isinstance(body, RunCheck):
            for name in body.checks:
                found = self.health.get(name, CheckVerdict(name, "ok", "well"))
                self.checks[name] = replace(found, wall_s=1e9 + self.boot_s)
        elif effect.kind == "evidence":
            seen = {"where": "train.py:12 in step", "stack": [], "state": "S", "wchan": "x"}
            detail = json.dumps(seen | self.evidence)
        self.outcomes.append(EffectOutcome(effect.id, ok, error, detail))

    def _lease_views(self) -> tuple[Lease, ...]:
        ends = [(r, h, end + self.ahead_s) for r, (h, end) in self.leases.items()]
        held = [(r, h, end) for r, h, end in ends if end > self.boot_s]
        return tuple(Lease(r, h, end if h == self.name else 0.0) for r, h, end in held)

    def _put(self, body: StoreWrite) -> bool:
        if not self.store_up:
            return False
        holder, end = self.leases.get(body.lease, ("", 0.0))
        store_s = self.boot_s - self.ahead_s
        free = end <= store_s or holder in (self.name, body.over)
        if body.key.startswith("lease/"):
            if free:
                self.leases[body.lease] = (self.name, store_s + self.settings.lease_s)
            return free
        if body.lease and (holder != self.name or end <= store_s):
            return False
        now = self.docs[body.key].version if body.key in self.docs else 0
        if not self.store_up or now != body.expect_version or self.refuse_puts > 0:
            self.refuse_puts = max(0, self.refuse_puts - 1)
            return False
        self.docs[body.key] = Doc(body.key, now + 1, body.body)
        return True

    def _start(self, body: Start) -> None:
        ranks = []
        for rank in body.ranks:
            old = next((r for r in self.view.ranks if r.rank == rank), None)
            kept = rank in body.keep and old is not None
            self.next_pid += 1
            pid = old.pid if kept and old else self.next_pid
            ranks.append(
                # A page shows the steps that its process has ended: of a new one none.
                RankView(rank, self.name, pid, body.generation, "running",
                         step=old.step if kept and old else 0,
                         phase="startup", proc_state="S", beat_age_s=0.05)
            )
        self.view = replace(
            self.view, generation=body.generation, state="running", ranks=tuple(ranks)
        )

    def _stop(self, body: Stop) -> None:
        for rank in body.ranks or tuple(r.rank for r in self.view.ranks):
            if body.park and self.view.grade == "trainer":
                self.park(rank, self.rank(rank).step)
            elif self.rank(rank).state != "ended":
                self.end(rank, Ended(137, 9, by_us=True, boot_s=self.boot_s))

    # ------------------------------------------------------------ what happens to the job

    def rank(self, number: int) -> RankView:
        return next(r for r in self.view.ranks if r.rank == number)

    def change(self, number: int, **fields: Any) -> None:
        ranks = tuple(replace(r, **fields) if r.rank == number else r for r in self.view.ranks)
        self.view = replace(self.view, ranks=ranks)

    def all(self, **fields: Any) -> None:
        for rank in self.view.ranks:
            self.change(rank.rank, **fields)

    def end(self, number: int, ended: Ended) -> None:
        self.change(number, state="ended", ended=ended)

    def kill(self, number: int, signal: int = 9) -> None:
        self.end(number, Ended(128 + signal, signal, boot_s=self.boot_s))

    def raises(self, number: int, error: str, code: int = 1, after_s: float = 0.0) -> None:
        self.end(number, Ended(code, 0, "exception", error, boot_s=self.boot_s + after_s))

    def park(self, number: int, step: int, torn: bool = False) -> None:
        self.change(number, state="parked", parked=Parked(step, torn, "peer gone"))

    def begin(self) -> None:
        """Plan and start the first generation."""
        self.settle()
        assert self.view.state == "running", self.decision

    def train(self, to: int, seconds: float = 0.15, phase: str = "forward_backward") -> None:
        """Every rank finishes steps up to `to`."""
        done = max(self.rank(0).step, self.plan().resume.step)
        while done < to:
            done += 1
            ring = tuple((step, 2 * step) for step in range(max(1, done - 7), done + 1))
            self.all(step=done, phase=phase, still_s=0.0, step_time_s=seconds,
                     state="running", parked=None, step_seq=ring)
            self.step(seconds)

    def commit(self, step: int, generation: int | None = None, bad: str = "") -> None:
        generation = self.view.generation if generation is None else generation
        path = f"step-{step}.gen-{generation}"
        new = Commit(generation, step, path, bad=bad, verified=not bad)
        self.view = replace(self.view, commits=(*self.view.commits, new))

    # ------------------------------------------------------------ what is to be seen

    def plan(self) -> Plan:
        return msgspec.json.decode(self.docs["run/r"].body, type=Plan)

    def kinds(self, effects: list[Effect]) -> list[str]:
        return [e.kind for e in effects]

    def starts(self) -> list[Start]:
        return [e.body for e in self.log if isinstance(e.body, Start)]

    def finishes(self) -> list[int]:
        return [e.body.code for e in self.log if e.kind == "finish"]  # type: ignore[union-attr]

    def restart_agent(self) -> None:
        self.node = Node(self.name, self.settings, self.runbooks, self.node.memory())


class Cluster:
    """Several nodes of one run around one store, as values; beats travel each step."""

    def __init__(
        self, names: str = "abc", nnodes: int = 2, grade: str = "trainer", least: int = 0,
        settings: Settings | None = None, **view: Any,
    ) -> None:
        settings = settings or Settings(single_node=False)
        self.labs = {
            n: Lab(grade=grade, nproc=1, settings=settings, name=n,
                   nnodes_min=least or nnodes, nnodes_max=nnodes, **view) for n in names
        }
        self.docs: dict[str, Doc] = {}
        self.leases: dict[str, tuple[str, float]] = {}
        for lab in self.labs.values():
            lab.docs, lab.leases = self.docs, self.leases
        self.dead: set[str] = set()
        self.lost: set[str] = set()  # as the edge's failure detectors say
        self.deaf: set[str] = set()  # their agents have heard of no other yet
        self.fatal: dict[str, str] = {}
        self.part: dict[str, str] = {}  # of a node, of which its fault is; else the node itself
        self.wants: dict[str, str] = {}  # node -> what the driver instructs
        self.heard: dict[tuple[str, str], Beat] = {}  # as they were sent
        self.at_s: dict[tuple[str, str], float] = {}  # when, by the store's clock
        self.sides: tuple[str, ...] = ()  # who hears whom; () = all hear all
        self.before: dict[tuple[str, str], tuple[Beat, float]] = {}  # what was said before the cut

    def apart(self, **days: float) -> None:
        """The machines were booted that long before the store's clock began."""
        for name, more in days.items():
            lab = self.labs[name]
            lab.ahead_s += more * 86400.0
            lab.boot_s += more * 86400.0

    def step(self, seconds: float = 1.0) -> None:
        for name, lab in self.labs.items():
            if name in self.dead:
                lab.boot_s += seconds
                continue
            lab.beats = tuple(self._beats_at(lab)) if name not in self.deaf else ()
            lab.events = self._kernel_log(name)
            lab.step(seconds)
            for effect in lab.elsewhere:
                self._ask(lab, effect)
            lab.elsewhere.clear()
            for beat in lab.decision.beats:
                self.heard[name, beat.run] = beat
                self.at_s[name, beat.run] = lab.boot_s - lab.ahead_s

    def cut(self, *sides: str) -> None:
        """From now on nodes hear those of their own side alone; all of them reach the store."""
        self.sides = sides
        self.before = {key: (beat, self.at_s[key]) for key, beat in self.heard.items()}

    def heal(self) -> None:
        self.sides = ()

    def _beats_at(self, lab: Lab) -> Iterator[Beat]:
        """As one node hears the others.  Two of one side that hear nothing of a third make sure."""
        side = next((one for one in self.sides if lab.name in one), "".join(self.labs))
        observers = len(set(side) - self.dead)
        for key, beat in self.heard.items():
            at_s, inside = self.at_s[key], key[0] in side
            if not inside and key not in self.before:
                continue
            if not inside:
                beat, at_s = self.before[key]
            yield replace(beat, boot_s=at_s + lab.ahead_s,
                          lost=key[0] in self.lost or not inside and observers > 1)

    def _ask(self, lab: Lab, effect: Effect) -> None:
        """One node's order to another, whose agents are in touch unless one is dead."""
        other = self.labs[effect.body.node]  # type: ignore[union-attr]
        if other.name in self.dead:
            lab.outcomes.append(EffectOutcome(effect.id, False, f"{other.name}: it is lost"))
            return
        there = len(other.outcomes)
        other._perform(replace(effect, body=replace(effect.body, node="")))
        lab.outcomes += other.outcomes[there:]
        del other.outcomes[there:]

    def _kernel_log(self, name: str) -> tuple[Event, ...]:
        fault = self.fatal.get(name, "")
        return (Event("host", fault, "hardware", "watch", "fatal", fault, fault=fault,
                      subject=self.part.get(name, ""), action=self.wants.get(name, ""),
                      cursor=1),) if fault else ()

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.step()

    def plan(self) -> Plan:
        return msgspec.json.decode(self.docs["run/r"].body, type=Plan)

    def leader(self) -> str:
        return self.leases["r"][0]
