"""The agent's process: one event loop around one deterministic core.

Owns the loop, its clocks and signals, and the order in which things start: first the socket that
launchers wait for, then everything else.  Decides nothing about training.  A failing part is
counted, said once, and never stops another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from holdfast.worker import exits

from ..actions import root_client
from ..actions.evidence_store import EvidenceStore
from ..actions.performer import Performer
from ..config import child as config_child
from ..config.load import ConfigError, Loaded, within_limit
from ..config.runbooks import load_in_force
from ..core.model import (
    UNREADABLE,
    Decision,
    Now,
    Observed,
    Readings,
    Runbook,
    Settings,
    run_subject,
)
from ..core.nodes.labels import NodeLabels
from ..core.run.state import Suspension
from ..core.series.gradient_pace import GradientPace
from ..history.audit import Audit
from ..history.incident_log import NODE, IncidentLog
from ..history.job_log import JobLog, Seen, read_jobs
from ..history.journal import Attempt, Forgotten, Journal, Memory, Review
from ..history.old_runs import remove_runtime
from ..launchers import log_child, protocol
from ..launchers.run_session import RunSession
from ..launchers.server import LauncherServer
from ..store import own_etcd
from ..store.base import Store
from ..store.sqlite import DirectoryLock, SqliteStore
from ..system.child_probe import Prober
from ..system.clocks import instant
from ..system.errors import say
from ..system.side_thread import SideThread
from ..system.systemd import notify
from ..web import books
from . import own_faults
from .alerts import Alerts
from .operators import Operators
from .other_nodes import OtherNodes
from .parts import Part
from .parts.checks import Checks
from .parts.collectors import Collectors
from .parts.kernel_log import KernelLogPart
from .parts.node_order_gate import NodeOrderGate
from .parts.old_runs import OldRuns
from .parts.peers import PeerPart
from .parts.permits import Permits
from .parts.private_life import PrivateLife
from .parts.rank_watch import RankWatch
from .parts.readiness import Readiness
from .parts.rendezvous import Rendezvous
from .parts.store_watch import StoreWatch
from .parts.watchdog import Watchdog
from .parts.web import Web
from .peer_rounds import PeerRounds
from .state import AgentState, Snapshot
from .trainer_reports import TrainerReports

URGENT_GAP_S = 0.01  # urgent steps are at least this, and the last one's time, apart
MEMORY_S = 10.0  # the core's memory is saved this often when nothing else saves it
RESTART_PART_S = 1.0
SIDE_THREAD_END_S = 1.0  # for what is still to be written to a folder that may hang


class Node(Protocol):
    """The core, as the daemon uses it."""

    def step(self, now: Now, observed: Observed) -> Decision: ...

    def memory(self) -> bytes: ...

    def stages(self) -> dict[str, str]: ...
    def paces(self) -> dict[str, GradientPace]: ...

    def endings(self) -> dict[str, tuple[int, str]]: ...

    def paused_until(self) -> dict[str, float]: ...

    def suspended(self) -> dict[str, Suspension]: ...

    def configure(self, settings: Settings, runbooks: Mapping[str, Runbook]) -> None: ...

    def outlook(self, fault: str) -> Sequence[object]: ...


NodeFactory = Callable[[str, Settings, Mapping[str, Runbook], bytes], Node]


class Options(NamedTuple):
    """How this agent was started."""

    private: bool = False
    run: str = ""
    config_file: Path | None = None
    overrides: dict[str, tuple[object, str]] = {}
    rendezvous: str = ""  # --rdzv-endpoint, where the store of a run without [store] is
    place: own_etcd.Place | None = None  # the same, as this node found it


class Daemon:
    """One agent.  `run()` returns the exit code."""

    def __init__(self, loaded: Loaded, options: Options, make_node: NodeFactory) -> None:
        self.options = options
        self.state = AgentState(loaded, options.private)
        self._make_node = make_node
        self._urgent: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_tick_s = 0.0
        self._memory = b""
        self._memory_s = 0.0
        self._prober = Prober()
        self._labels = NodeLabels()
        self._reloads = 0
        self._reloading: asyncio.Task[None] | None = None

    # ------------------------------------------------------------- life

    async def run(self) -> int:
        """Serves until a signal, or until a private agent's launcher is gone."""
        agent = self.state.config.agent
        state, runtime = Path(agent.state_dir), Path(agent.runtime_dir)
        self.stop = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        lock = DirectoryLock(state)
        try:
            self._open(state, runtime)
            try:
                if not self.store.view().up:
                    await self.store.refresh()  # bounded; a node starts without its store too
                await self._serve()
            finally:
                await self._shut(runtime)
        finally:
            lock.release()
        if self.rendezvous.refusal:
            say(self.rendezvous.refusal)
            return exits.CONFIGURATION
        if self.private_life.is_unserved:
            say(f"no launcher of run {self.options.run} came: nothing was watched")
            return exits.FAILED
        return exits.DONE

    def _open(self, directory: Path, runtime: Path) -> None:
        """Everything that must be there before launchers may connect; the socket comes last."""
        state = self.state
        self.rendezvous = Rendezvous(state, self.options.place)
        self.rendezvous.open()
        self.store = self._open_store(directory)
        state.store_traffic = self.store.traffic
        state.journal = self.journal = Journal(
            directory,
            on_error=lambda why: self.loop.call_soon_threadsafe(self.on_error, "journal", why),
        )
        state.audit = Audit(self.journal.append, functools.partial(self.on_error, "audit"),
                            self.journal.seed.refused)
        with within_limit("holdfast agent", self.options.config_file):
            state.runbooks, state.site_pages = load_in_force(Path(state.config.runbooks.directory))
        seed = self.journal.seed
        state.incident_log = self.incident_log = IncidentLog(
            seed.incidents, seed.owners, self._owner_of, seed.reviews
        )
        state.jobs = JobLog(read_jobs(seed.jobs))
        self.evidence = EvidenceStore(state)
        self.checks = Checks(state, self.wake)
        self.checks.begin()
        self.performer = Performer(
            self.journal, self.store, self._order, self.wake, self.on_error,
            lambda run: self.launchers.identity(run),
            functools.partial(root_client.perform, state, self.evidence), self.checks.perform,
        )
        state.counters = self.performer.counters
        self.node = self._new_node(seed.memory)
        state.outlook = self.node.outlook
        state.keep = self._keep_review
        proc, only_run = state.config.collectors.proc, self.options.run
        self.launchers = LauncherServer(self, state.name, only_run, proc, self.performer.where)
        state.launchers = self.launchers
        self.launchers.highest_generation = self._highest_generation
        self.store.living = self.launchers.runs
        self.peers = self._open_peers()
        self.performer.many_nodes = self.peers is not None
        alerts = Alerts(self.store, lambda: state.snapshot.decision.plans, self.wake, self.on_error)
        self.operators = Operators(
            self._order, self._requested, alerts, self.journal.append, seed.asked)
        rounds = PeerRounds(state, self.peers, self.checks.folder) if self.peers else None
        self.others = OtherNodes(state, self.peers.peers if self.peers else None,
                                 self.performer, self.operators, rounds)
        if rounds is not None:
            self.performer.tests = rounds.arrange
        self.rounds = rounds
        if self.peers is not None:
            self.peers.answer = self.others.asked
            state.refused_nodes = self.peers.peers.refused
            state.out_of_touch = self.peers.peers.out_of_touch
        self.reports = TrainerReports(self.journal, self.performer)
        self.node_order_gate = NodeOrderGate(state, self.evidence)
        self.rendezvous.joined(self.store, self.launchers, self.peers, self.stop)
        self.private_life = PrivateLife(state, self.launchers, self.stop, self.rendezvous.lingers)
        private = self.options.private
        runtime.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o755)
        self._socket_path = runtime / "agent.sock"
        self.launchers.listen(self._socket_path, 0o600 if private else 0o666)

    def _open_store(self, directory: Path) -> Store:
        config = self.state.config
        if not config.store.url:
            return SqliteStore(directory)
        from ..store.etcd import open_etcd  # 3 MB that one node does without

        return open_etcd(config.store, self.state.name, directory,
                         lambda: self.state.config.detect.lease_s, run=self.options.run,
                         makes=self.rendezvous.makes_store)

    def _open_peers(self) -> PeerPart | None:
        if not self.state.config.store.url:
            return None
        peers = PeerPart(self.state, self.store, self.launchers, self.wake, self.on_error,
                         self.options.run if self.options.private else "")
        self.launchers.many_nodes, self.launchers.host = True, peers.host
        return peers

    def _parts(self) -> tuple[Part, ...]:
        """Everything that runs beside the steps, in the order in which it begins."""
        state, wake, answers = self.state, self.wake, asyncio.Event()
        return (
            RankWatch(state, self.launchers, wake),
            Watchdog(state),
            StoreWatch(self.store, wake),
            Collectors(state),
            KernelLogPart(state, self.journal, self.performer, wake),
            Web(state, self.operators, self.others, self.launchers.announce, answers),
            Readiness(answers),
            self.node_order_gate,
            self.private_life,
            OldRuns(state),
            self.checks,
            *self._parts_of_many(),
        )

    def _parts_of_many(self) -> tuple[Part, ...]:
        if self.peers is None:
            return ()
        state = self.state
        permits = Permits(
            state.name, lambda: state.config.detect.lease_s,
            lambda: state.snapshot.decision.plans, self.store, self.launchers, self.peers)
        return self.peers, permits, self.rendezvous

    def _owner_of(self, run: str) -> int:
        session = self.launchers.session(run)
        return session.uid if session is not None else NODE

    def _new_node(self, memory: bytes) -> Node:
        settings = self._core_settings(self.state.loaded)
        try:
            return self._make_node(self.state.name, settings, self.state.runbooks, memory)
        except Exception as error:  # border: memory of another release must not stop the agent
            self.on_error("memory", error)
            return self._make_node(self.state.name, settings, self.state.runbooks, b"")

    def _core_settings(self, loaded: Loaded) -> Settings:
        place = self.options.place
        settings = loaded.config.core_settings()
        return msgspec.structs.replace(settings, store_node=place.name) if place else settings

    async def _serve(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop.set)
        self.loop.add_signal_handler(signal.SIGHUP, self._hangup)
        self.wake("start")
        say(f"node {self.state.name}, pid {os.getpid()}, launchers come to {self._socket_path}")
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process: no need to look at it again
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._guard(part)) for part in self._parts()]
            await self.stop.wait()
            notify("STOPPING=1")
            for task in tasks:
                task.cancel()

    async def _shut(self, runtime: Path) -> None:
        for handle in (self._urgent, self._timer):
            if handle is not None:
                handle.cancel()
        await self.performer.close()
        if self.rounds is not None:
            await self.rounds.close()
        # A launcher that ends an agent which it has lost says nothing before.
        is_over = self.private_life.is_over or not any(
            one.connection is not None for one in self.launchers.sessions())
        self.launchers.close(self._socket_path)
        self.state.audit.settle(time.monotonic(), all_of_it=True)
        if self.private_life.is_over:
            for record in self.state.jobs.lose(time.time() - self.private_life.left_for_s()):
                self.journal.append(record)
        self.journal.append(Memory(self._remembered()))
        closing = SideThread("journal's end")  # whatever hangs elsewhere does not hold this up
        await closing.do("journal", self.journal.close)
        store_closed = self.store.close()
        if store_closed is not None:
            await store_closed
        self.rendezvous.close(is_over)
        for thread in (closing, self.state.checkpoints.side_thread, self.evidence.side_thread):
            await thread.close(SIDE_THREAD_END_S)
        (runtime / "address").unlink(missing_ok=True)
        if self.options.private:
            with contextlib.suppress(OSError):
                remove_runtime(runtime)

    async def _guard(self, part: Part) -> None:
        """Runs one part for ever: its crash is counted, said, and it starts again."""
        while True:
            try:
                await part.run()
                return
            except Exception as error:  # border of a part: promise 1
                self.on_error(part.name, error)
            await asyncio.sleep(RESTART_PART_S)

    def on_error(self, part: str, error: BaseException | str) -> None:
        self.state.errors(part, error)

    # ------------------------------------------------------------- stepping

    def wake(self, why: str) -> None:
        """Asks for a step soon: at once when the last is long ago."""
        if self._urgent is not None:
            return
        gap_s = max(URGENT_GAP_S, self.state.step_s)
        wait_s = self.state.last_step_s + gap_s - time.monotonic()
        if wait_s <= 0.0:
            self._urgent = self.loop.call_soon(self._step)
        else:
            self._urgent = self.loop.call_later(wait_s, self._step)

    def _step(self) -> None:
        """One step of the core and what follows from it.  A crash of ours is counted; the next
        step starts from the same levels."""
        state = self.state
        for handle in (self._urgent, self._timer):
            if handle is not None:
                handle.cancel()
        self._urgent = None
        state.turns += 1
        begin_s = time.monotonic()
        tick_s = state.config.agent.tick_s
        is_tick = begin_s - self._last_tick_s >= 0.9 * tick_s
        if is_tick:
            self._last_tick_s = begin_s
        next_s = tick_s
        try:
            decision = self._decide(is_tick)
            next_s = min(tick_s, max(URGENT_GAP_S, decision.next_step_s))
        except Exception as error:  # border of a step: promise 1
            self.on_error("core", error)
        finally:
            state.last_step_s = time.monotonic()
            state.step_s = state.last_step_s - begin_s
            self._timer = self.loop.call_later(next_s, self._step)

    def _decide(self, is_tick: bool) -> Decision:
        state = self.state
        now_s, boot_s = instant()
        now = Now(boot_s, time.time(), state.boot_id)
        listed = [effect.id for effect in state.snapshot.decision.effects]
        samples = state.runner.known() if state.runner is not None else Readings()
        observed = Observed(
            runs=self.launchers.run_views(now_s, is_tick),
            coming=self.launchers.coming(),
            samples=samples,
            events=state.kernel.events(now.boot_s),
            store=self.store.view(),
            outcomes=self.performer.outcomes(listed, now_s),
            requests=self.operators.pending(state.snapshot.decision.answers),
            orphans=self.operators.orphans(),
            alerts=self.operators.alerts.pending(state.snapshot.decision.answers),
            firing=self.operators.alerts.firing(),
            journal_stalled=bool(self._disk_problem()) or self.journal.stalled,
            gate=self.node_order_gate.gate,
            checks=state.checks,
            passes=state.passes,
            beats=self.peers.heard() if self.peers is not None else (),
            labels=self._labels.of(state.config.cluster.labels.items(), samples),
        )
        decision = self.node.step(now, observed)
        state.steps += 1
        for verdict in decision.verdicts:
            if verdict.fault == "run_not_judged":
                self.on_error("core", verdict.reason)
        own = own_faults.verdicts(state) + self.reports.verdicts()
        if own:
            decision = msgspec.structs.replace(decision, verdicts=decision.verdicts + own)
        state.snapshot = Snapshot(state.steps, now, observed, decision,
                                  self.node.paused_until(), self.node.stages(), self.node.paces(),
                                  self.node.suspended())
        self._follow(decision, now_s)
        return decision

    def _disk_problem(self) -> str:
        """Why journal or store take no writes, said to every run when it begins and ends; a disk
        that is only slow is shown, and not said."""
        failing = f"{self.journal.path}: {self.journal.error}" if self.journal.error else ""
        problem = self.store.problem or failing
        if bool(problem) != bool(self.state.disk_problem):
            text = (f"state is not kept: {problem}. Training and restarts go on from memory; make "
                    "room" if problem else "state is kept again")
            level = "error" if problem else "info"
            self.on_error("disk", text)
            for run in self.launchers.runs():
                self.launchers.order(run, {"t": "say", "text": text, "level": level})
        self.state.disk_problem = problem
        return problem

    def _follow(self, decision: Decision, now_s: float) -> None:
        """Effects, incidents and memory of one decision, journal first."""
        if self.peers is not None:
            self.peers.tell(decision)
        self.operators.made(decision.asked)
        changes = self.incident_log.follow(decision)
        fresh = [self.incident_log.with_fault(effect)
                 for effect in self.performer.fresh(decision.effects)]
        memory: bytes | None = None
        if fresh or changes.records or now_s - self._memory_s > MEMORY_S:
            latest = self._remembered()
            self._memory_s = now_s
            if latest != self._memory:
                self._memory = memory = latest
        if changes.records or (memory is not None and not fresh):
            remembered = (Memory(memory),) if memory is not None and not fresh else ()
            self.journal.append(*changes.records, *remembered)
        for record in changes.records:
            self.performer.count(*record.counts)
            self.evidence.keep(record.incident)
        self._keep_jobs()
        books.draw(self.state)
        if changes.forgotten:
            self.journal.append(Forgotten(tuple(incident.id for incident in changes.forgotten)))
            self.evidence.forget(changes.forgotten)
        self.performer.perform(fresh, memory)
        for line in changes.lines:
            self.launchers.order(line.run, {
                "t": "say", "text": line.text, "level": line.level, "fault": line.fault,
                "rank": line.rank,
            })

    def _keep_jobs(self) -> None:
        """Each attempt's begin, first step and end."""
        snapshot = self.state.snapshot
        launchers = [
            Seen(view, launcher_key(session, self.state.boot_id), session.hello.user,
                 session.hello.goal.team, session.hello.goal.queued_wall_s,
                 snapshot.now.wall_s - snapshot.now.boot_s + session.hello.started_boot_s,
                 (self.state.config.cost.node_hour, self.state.config.cost.currency))
            for view in snapshot.observed.runs
            if (session := self.launchers.session(view.run)) is not None]
        for record in self.state.jobs.follow(
                snapshot.now.wall_s, launchers, snapshot.decision.run_ledger,
                self.node.endings()):
            self.journal.append(record)
            self.performer.count(*record.counts)

    def _keep_review(self, review: Review) -> None:
        self.journal.append(review)
        self.performer.count(*review.counts)

    def _remembered(self) -> bytes:
        """The core's memory; the last that could be written where this one cannot: what was decided
        is carried out all the same."""
        try:
            return self.node.memory()
        except (ValueError, OverflowError) as error:  # text or a number that JSON cannot hold
            self.on_error("memory", error)
            return self._memory or self.journal.seed.memory

    # ------------------------------------------------------------- what people ask

    def _requested(self) -> None:
        self._memory_s = -MEMORY_S  # the core keeps it from its next step on, come what may
        self.wake("request")

    def _hangup(self) -> None:
        """SIGHUP.  One that comes while the files are read has them read once more."""
        self._reloads += 1
        if self._reloads == 1:
            self._reloading = self.loop.create_task(self._reload_all())

    async def _reload_all(self) -> None:
        while self._reloads:
            begun = self._reloads
            await self.reload()
            self._reloads = 0 if self._reloads == begun else 1

    async def reload(self) -> None:
        """Reads configuration and runbooks again; what is bad keeps the old ones."""
        state = self.state
        try:
            loaded, books = await config_child.read(
                self._prober, self.options.config_file, self.options.overrides)
        except (ConfigError, ValueError) as error:
            state.reload_ok, state.reload_error = False, str(error)
            say(f"reload refused, the old configuration stays:\n{error}")
            self.wake("reload")
            return
        state.loaded, (state.runbooks, state.site_pages) = loaded, books
        self.node.configure(self._core_settings(loaded), books.runbooks)
        log_child.tell(self.launchers.sessions(), loaded)
        state.reload_ok, state.reload_error = True, ""
        say("configuration reloaded; listen and directories change at the next start")
        self.wake("reload")

    # ------------------------------------------------------------- what launchers bring

    def _order(self, run: str, fields: dict[str, object]) -> str:
        if self.peers is not None and fields.get("kind") == "start":
            fields = self.peers.placed(run, fields)
        return self.launchers.order(run, fields)

    def launcher_outcome(self, run: str, packet: protocol.Outcome) -> None:
        if not self.operators.launcher_outcome(packet):
            self.performer.launcher_outcome(run, packet)

    def rank_reported(self, run: str, packet: protocol.Report) -> None:
        session = self.launchers.session(run)
        if session is not None and self.reports.take(session, packet):
            self.wake("report")

    def refused(self, uid: int, what: str, why: str, example: str) -> None:
        self.state.audit.refused(uid, what, why, example)

    def launcher_came(self, session: RunSession) -> None:
        self.private_life.launcher_came()
        if self.options.private:
            self.journal.append(Attempt(launcher_key(session, self.state.boot_id), time.time()))
        log_child.tell((session,), self.state.loaded)
        if self.peers is not None:
            self.peers.launcher_came(session.hello.run)
        self.performer.launcher_came(session.hello.run)

    def launcher_went(self, session: RunSession, said_bye: bool) -> None:
        self.private_life.launcher_went(said_bye)

    def _highest_generation(self, run: str) -> int:
        return generation_of(self.store.view().docs.get(run_subject(run)).body)


def launcher_key(session: RunSession, boot_id: str) -> str:
    """The same for a launcher that comes again, and no other's."""
    return f"{session.pid} {session.hello.started_boot_s:.3f} {boot_id}"


def generation_of(body: bytes) -> int:
    """The generation in a run's document; 0 when there is none to be read."""
    try:
        plan = msgspec.json.decode(body)
    except UNREADABLE:
        return 0
    generation = plan.get("generation", 0) if isinstance(plan, dict) else 0
    return generation if isinstance(generation, int) else 0
