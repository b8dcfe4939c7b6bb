"""The agent's process: one event loop around one deterministic core.

Owns the loop, its clocks and signals, and the order in which things start: first the socket that
launchers wait for, then everything else.  Decides nothing about training.  A failing part is
counted, said once, and never stops another.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from holdfast.collectors.contract import legible

from ..actions import preconditions, root_client
from ..actions.performer import Performer
from ..config.load import ConfigError, Loaded, load
from ..config.runbooks import load_runbooks
from ..core.model import Decision, Incident, Now, Observed, Readings, Request, Runbook, Settings
from ..history.incident_log import Narrator
from ..history.journal import Journal, Memory
from ..launchers import log_child, protocol
from ..launchers.run_session import Session
from ..launchers.server import Sessions
from ..store.sqlite import DirectoryLock, SqliteStore
from ..system import procfs
from ..system.clocks import instant
from ..system.errors import Troubles, say
from ..system.side_thread import Aside
from ..system.systemd import notify
from ..telemetry.collectors import Runner
from ..telemetry.kernel_log import KernelWatch
from . import background

URGENT_GAP_S = 0.01  # urgent steps are at least this, and the last one's time, apart
MEMORY_S = 10.0  # the core's memory is saved this often when nothing else saves it
REQUEST_KEPT_S = 60.0
REQUESTS_MAX = 64
RESTART_PART_S = 1.0
ASIDE_END_S = 1.0  # for what is still to be written to a folder that may hang


class Node(Protocol):
    """The core, as the daemon uses it."""

    def step(self, now: Now, observed: Observed) -> Decision: ...

    def memory(self) -> bytes: ...


NodeFactory = Callable[[str, Settings, Mapping[str, Runbook], bytes], Node]


class Options(NamedTuple):
    """How this agent was started."""

    private: bool = False
    run: str = ""
    config_file: Path | None = None
    overrides: dict[str, tuple[object, str]] = {}


class Snapshot(NamedTuple):
    """The last step, as people and metrics see it.  `number` grows with every step."""

    number: int
    now: Now
    observed: Observed
    decision: Decision


def boot_id() -> str:
    """Tells one boot of the machine from another, for clocks that start anew with it."""
    return procfs.read_small("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


class Daemon:
    """One agent.  `run()` returns the exit code."""

    def __init__(self, loaded: Loaded, options: Options, make_node: NodeFactory) -> None:
        self.loaded = loaded
        self.options = options
        self.config = loaded.config
        self.troubles = Troubles()
        self.reload_ok = True
        self.reload_error = ""
        self.started_s = time.monotonic()
        self.loop_lag_s = 0.0
        self.step_s = 0.0
        self.steps = 0
        self.turns = 0  # steps begun, whether or not the core got through
        self.snapshot = Snapshot(0, Now(0.0, 0.0), Observed(), Decision())
        self.name = legible(self.config.agent.node or socket.gethostname())
        self.address = ""
        self.answers = asyncio.Event()  # people may ask at api.sock, or it is said why not
        self._make_node = make_node
        self.boot_id = boot_id()
        self._requests: dict[str, tuple[Request, float]] = {}
        self._urgent: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.last_step_s = 0.0
        self._last_tick_s = 0.0
        self._memory = b""
        self._memory_s = 0.0
        self.gone_s = 0.0  # CLOCK_MONOTONIC when the last launcher went, 0 while one is here
        self.said_bye = False
        self.runner: Runner | None = None
        collectors = self.config.collectors
        self.kernel = KernelWatch(collectors.kmsg, self.boot_id, collectors.kmsg_users)
        self.commits = background.CommitClock()
        self.evidence = Aside("evidence")  # writes to evidence.store, which may hang
        self.forgotten: deque[Incident] = deque(maxlen=background.FORGOTTEN_MAX)  # to go from there
        self.gate = preconditions.UNSEEN
        self.reports: dict[tuple[str, str, int], background.Reported] = {}  # run, fault, rank
        self._orders: dict[str, asyncio.Future[protocol.Outcome]] = {}

    # ------------------------------------------------------------- life

    async def run(self) -> int:
        """Serves until a signal, or until a private agent's launcher is gone."""
        state, runtime = Path(self.config.agent.state_dir), Path(self.config.agent.runtime_dir)
        self.stop = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        lock = DirectoryLock(state)
        try:
            self._open(state, runtime)
            try:
                await self._serve()
            finally:
                await self._shut(runtime)
        finally:
            lock.release()
        return 0

    def _open(self, state: Path, runtime: Path) -> None:
        """Everything that must be there before launchers may connect; the socket comes last."""
        self.store = SqliteStore(state)
        self.journal = Journal(
            state, trouble=lambda why: self.loop.call_soon_threadsafe(self.trouble, "journal", why)
        )
        self.runbooks = load_runbooks(Path(self.config.runbooks.directory))
        seed = self.journal.seed
        self.narrator: Narrator = background.history(self)
        self.performer = Performer(
            self.journal, self.store, self._order, self.wake, self.trouble,
            lambda run: self.sessions.identity(run),
            functools.partial(root_client.perform, self),
        )
        self.node = self._new_node(seed.memory)
        proc = self.config.collectors.proc
        self.sessions = Sessions(self, self.name, self.options.run, proc, self.performer.where)
        self.sessions.highest_generation = self._highest_generation
        self.store.living = self.sessions.runs
        runtime.mkdir(parents=True, exist_ok=True, mode=0o700 if self.options.private else 0o755)
        self._socket_path = runtime / "agent.sock"
        self.sessions.listen(self._socket_path, 0o600 if self.options.private else 0o666)

    def _new_node(self, memory: bytes) -> Node:
        settings = self.config.core_settings()
        try:
            return self._make_node(self.name, settings, self.runbooks, memory)
        except Exception as error:  # border: memory of another release must not stop the agent
            self.trouble("memory", error)
            return self._make_node(self.name, settings, self.runbooks, b"")

    async def _serve(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.stop.set)
        self.loop.add_signal_handler(signal.SIGHUP, self.reload)
        self.wake("start")
        say(f"node {self.name}, pid {os.getpid()}, launchers come to {self._socket_path}")
        gc.collect()
        gc.freeze()  # what exists now lives as long as the process: no need to look at it again
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._guard(part, work))
                for part, work in (
                    ("watch", background.watch_ranks),
                    ("watchdog", background.feed_watchdog),
                    ("store", background.recheck_store),
                    ("collectors", background.collect),
                    ("kernel log", background.follow_kernel_log),
                    ("web", background.serve_web),
                    ("ready", background.say_ready),
                    ("node orders", preconditions.watch_gate),
                    ("private", background.end_with_launcher),
                )
            ]
            await self.stop.wait()
            notify("STOPPING=1")
            for task in tasks:
                task.cancel()

    async def _shut(self, runtime: Path) -> None:
        for handle in (self._urgent, self._timer):
            if handle is not None:
                handle.cancel()
        await self.performer.close()
        self.sessions.close(self._socket_path)
        self.journal.append(Memory(self._remembered()))
        closing = Aside("journal's end")  # whatever hangs elsewhere does not hold this up
        await closing.do("journal", self.journal.close)
        self.store.close()
        for aside in (closing, self.commits.aside, self.evidence):
            await aside.close(ASIDE_END_S)
        (runtime / "address").unlink(missing_ok=True)

    async def _guard(self, part: str, work: Callable[[Daemon], Awaitable[None]]) -> None:
        """Runs one part for ever: its crash is counted, said, and it starts again."""
        while True:
            try:
                await work(self)
                return
            except Exception as error:  # border of a part: promise 1
                self.trouble(part, error)
            await asyncio.sleep(RESTART_PART_S)

    def trouble(self, part: str, error: BaseException | str) -> None:
        self.troubles(part, error)

    # ------------------------------------------------------------- stepping

    def wake(self, why: str) -> None:
        """Asks for a step soon: at once when the last is long ago."""
        if self._urgent is not None:
            return
        wait_s = self.last_step_s + max(URGENT_GAP_S, self.step_s) - time.monotonic()
        if wait_s <= 0.0:
            self._urgent = self.loop.call_soon(self._step)
        else:
            self._urgent = self.loop.call_later(wait_s, self._step)

    def _step(self) -> None:
        """One step of the core and what follows from it.  A crash of ours is counted; the next
        step starts from the same levels."""
        for handle in (self._urgent, self._timer):
            if handle is not None:
                handle.cancel()
        self._urgent = None
        self.turns += 1
        begin_s = time.monotonic()
        tick_s = self.config.agent.tick_s
        is_tick = begin_s - self._last_tick_s >= 0.9 * tick_s
        if is_tick:
            self._last_tick_s = begin_s
        next_s = tick_s
        try:
            decision = self._decide(is_tick)
            next_s = min(tick_s, max(URGENT_GAP_S, decision.next_step_s))
        except Exception as error:  # border of a step: promise 1
            self.trouble("core", error)
        finally:
            self.last_step_s = time.monotonic()
            self.step_s = self.last_step_s - begin_s
            self._timer = self.loop.call_later(next_s, self._step)

    def _decide(self, is_tick: bool) -> Decision:
        now_s, boot_s = instant()
        now = Now(boot_s, time.time(), self.boot_id)
        listed = [effect.id for effect in self.snapshot.decision.effects]
        observed = Observed(
            runs=self.sessions.run_views(now_s, is_tick),
            samples=self.runner.known() if self.runner is not None else Readings(),
            lines=self.kernel.log.lines(now.boot_s),
            events=self.kernel.events(now.boot_s),
            store=self.store.view(),
            outcomes=self.performer.outcomes(listed, now_s),
            requests=self._pending_requests(now_s),
            journal_stalled=self.journal.stalled, gate=self.gate,
        )
        decision = self.node.step(now, observed)
        self.steps += 1
        for verdict in decision.verdicts:
            if verdict.fault == "run_not_judged":
                self.trouble("core", verdict.reason)
        own = background.own_verdicts(self)
        if own:
            decision = msgspec.structs.replace(decision, verdicts=decision.verdicts + own)
        self.snapshot = Snapshot(self.steps, now, observed, decision)
        self._follow(decision, now_s)
        return decision

    def _follow(self, decision: Decision, now_s: float) -> None:
        """Effects, incidents and memory of one decision, journal first."""
        told = self.narrator.follow(decision)
        fresh = [self.narrator.with_fault(effect)
                 for effect in self.performer.fresh(decision.effects)]
        memory: bytes | None = None
        if fresh or told.records or now_s - self._memory_s > MEMORY_S:
            latest = self._remembered()
            self._memory_s = now_s
            if latest != self._memory:
                self._memory = memory = latest
        if told.records or (memory is not None and not fresh):
            remembered = (Memory(memory),) if memory is not None and not fresh else ()
            self.journal.append(*told.records, *remembered)
        background.keep(self, told)
        self.performer.perform(fresh, memory)
        for line in told.lines:
            self.sessions.order(line.run, {
                "t": "say", "text": line.text, "level": line.level, "fault": line.fault,
                "rank": line.rank,
            })

    def _remembered(self) -> bytes:
        """The core's memory; the last that could be written where this one cannot: what was decided
        is carried out all the same."""
        try:
            return self.node.memory()
        except (ValueError, OverflowError) as error:  # text or a number that JSON cannot hold
            self.trouble("memory", error)
            return self._memory or self.journal.seed.memory

    # ------------------------------------------------------------- what people ask

    def request(self, request: Request) -> bool:
        """Hands an operator's wish to the core; False when too many wait already."""
        if len(self._requests) >= REQUESTS_MAX:
            return False
        self._requests[request.id] = (request, time.monotonic())
        self._memory_s = -MEMORY_S  # the core keeps it from its next step on, come what may
        self.wake("request")
        return True

    def _pending_requests(self, now_s: float) -> tuple[Request, ...]:
        granted = {one for plan in self.snapshot.decision.plans for one in plan.granted}
        for key, (_, since_s) in list(self._requests.items()):
            if key in granted or now_s - since_s > REQUEST_KEPT_S:
                del self._requests[key]
        return tuple(request for request, _ in self._requests.values())

    def reload(self) -> None:
        """SIGHUP: reads configuration and runbooks again; what is bad keeps the old ones."""
        try:
            loaded = load(self.options.config_file, self.options.overrides)
            runbooks = load_runbooks(Path(loaded.config.runbooks.directory))
        except (ConfigError, ValueError) as error:
            self.reload_ok, self.reload_error = False, str(error)
            say(f"reload refused, the old configuration stays:\n{error}")
            return
        self.loaded, self.config, self.runbooks = loaded, loaded.config, runbooks
        self.node = self._new_node(self._remembered())
        log_child.tell(self.sessions.sessions(), loaded)
        self.reload_ok, self.reload_error = True, ""
        say("configuration reloaded; listen and directories change at the next start")
        self.wake("reload")

    async def direct(self, run: str, fields: dict[str, object], limit_s: float) -> protocol.Outcome:
        """Sends an order that is no effect of the core (a fault on purpose) and waits for its
        outcome.  TimeoutError when none comes, ConnectionError without a launcher."""
        key = str(fields["id"])
        answer: asyncio.Future[protocol.Outcome] = self.loop.create_future()
        self._orders[key] = answer
        try:
            why_not = self._order(run, fields)
            if why_not:
                raise ConnectionError(why_not)
            return await asyncio.wait_for(answer, limit_s)
        finally:
            del self._orders[key]

    # ------------------------------------------------------------- what launchers bring

    def _order(self, run: str, fields: dict[str, object]) -> str:
        return self.sessions.order(run, fields)

    def launcher_outcome(self, run: str, packet: protocol.Outcome) -> None:
        waiting = self._orders.get(packet.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(packet)
            return
        self.performer.launcher_outcome(run, packet)

    def rank_reported(self, run: str, packet: protocol.Report) -> None:
        background.take_report(self, run, packet)

    def launcher_came(self, session: Session) -> None:
        self.gone_s, self.said_bye = 0.0, False
        log_child.tell((session,), self.loaded)
        self.performer.launcher_came(session.hello.run)

    def launcher_went(self, session: Session, said_bye: bool) -> None:
        self.said_bye = said_bye
        self.gone_s = time.monotonic()

    def _highest_generation(self, run: str) -> int:
        key = f"run/{run}"
        for doc in self.store.view().docs:
            if doc.key == key:
                return background.generation_of(doc.body)
        return 0
