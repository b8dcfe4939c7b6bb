"""The parts of the agent that run beside its steps, each in a task of its own.

Owns their loops and intervals.  Each takes the daemon, wakes it or leaves something for its next
step, and may crash without touching another.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from holdfast.collectors.contract import NoData

from ..catalog.load import load as load_catalogue
from ..core.model import DEGRADED, UNKNOWN, WARN, Commit, Incident, Verdict
from ..core.parse.kernel_line import Catalogue
from ..history.incident_log import NODE, Narrator, Told
from ..history.journal import Count, Forgotten, Labels, Mark
from ..launchers import protocol
from ..system import procfs
from ..system.child_probe import Left
from ..system.side_thread import Aside
from ..system.systemd import notify, watchdog_s
from ..telemetry.collectors import Runner
from ..telemetry.journalctl import JournalReader
from ..telemetry.kernel_log import Record

if TYPE_CHECKING:
    from .daemon import Daemon

WATCH_S = 0.1  # how often scheduler states are read while ranks exist
IDLE_WATCH_S = 1.0
STORE_RETRY_S = 1.0
READY_MAX_S = 15.0  # after which systemd is told without api.sock; its own patience is 30 s
AFTER_BYE_S = 0.5  # a private agent ends this long after its launcher said bye
AFTER_LOSS_S = 5.0  # ... or this long after the launcher's process was gone
FIRST_HELLO_S = 30.0  # ... or when no launcher ever came
COMMITS_MAX = 4096
FORGOTTEN_MAX = 4096
FILE_MAX_BYTES = 1 << 20  # of an incident
HUNG_S = 5.0  # for a few kilobytes
REPORTED = ("checkpoint_bad", "checkpoint_failed", "snapshot_off")  # faults of a trainer's own
REPORTED_TEXT = ", ".join(REPORTED)
REPORTS_MAX = 512
REPORTS_PER_UID = 128  # one user never leaves the others without a word
REPORT_KEPT_S = 600.0
LAG_FADES = 0.9  # per look: the shown lag is the worst of about the last ten seconds


class Reported(NamedTuple):
    """What a rank said of itself."""

    text: str
    said_s: float  # CLOCK_MONOTONIC, the last time
    uid: int


async def watch_ranks(daemon: Daemon) -> None:
    """Reads scheduler states ten times a second, so that a stop is dated to 0.1 s, and measures
    how late the event loop is."""
    loop = asyncio.get_running_loop()
    while True:
        has_ranks = any(session.tracks for session in daemon.sessions.sessions())
        pause_s = WATCH_S if has_ranks else IDLE_WATCH_S
        due_s = loop.time() + pause_s
        await asyncio.sleep(pause_s)
        late_s = max(0.0, loop.time() - due_s)
        daemon.loop_lag_s = max(late_s, daemon.loop_lag_s * LAG_FADES ** (pause_s / WATCH_S))
        if has_ranks and daemon.sessions.look(time.monotonic()):
            daemon.wake("stop state")


async def feed_watchdog(daemon: Daemon) -> None:
    """WATCHDOG=1 as long as steps are made: a loop that turns without them is no agent."""
    every_s = watchdog_s()
    if not every_s:
        return
    seen = -1
    while True:
        if daemon.turns != seen:
            seen = daemon.turns
            notify("WATCHDOG=1")
        await asyncio.sleep(max(every_s, daemon.config.agent.tick_s))


async def recheck_store(daemon: Daemon) -> None:
    """Finds out whether a store that failed answers again."""
    while True:
        await asyncio.sleep(STORE_RETRY_S)
        if not daemon.store.view().up:
            await daemon.store.refresh()
            if daemon.store.view().up:
                daemon.wake("store is back")


async def collect(daemon: Daemon) -> None:
    """Runs the collectors."""
    await asyncio.sleep(0)
    daemon.runner = Runner(daemon.config, daemon.trouble)
    await daemon.runner.run()


def take_report(daemon: Daemon, run: str, packet: protocol.Report) -> None:
    """A trainer's own word about something that does not stop training: shown and counted.
    ValueError for what a trainer cannot know: any user's process may say this."""
    session = daemon.sessions.session(run)
    if not packet.fault or session is None:
        return  # for the run's own terminal alone
    if packet.fault not in REPORTED:
        raise ValueError(f"a report of {packet.fault[:64]!r}: a rank reports {REPORTED_TEXT} only")
    if not -1 <= packet.rank < session.hello.nproc:
        raise ValueError(f"a report of rank {packet.rank}: the run has {session.hello.nproc} ranks")
    key = (run, packet.fault, packet.rank)
    if key not in daemon.reports:
        own = sum(one.uid == session.uid for one in daemon.reports.values())
        if own >= REPORTS_PER_UID or len(daemon.reports) >= REPORTS_MAX:
            return
        count = Count("events", ("trainer", packet.fault, WARN, ""))
        daemon.journal.append(count)
        daemon.performer.count(count)
    daemon.reports[key] = Reported(packet.text[:500], time.monotonic(), session.uid)
    daemon.wake("report")


async def follow_kernel_log(daemon: Daemon) -> None:
    """Reads the kernel's log as it is written; a machine that does not let us is no fault."""
    watch, loop, failed = daemon.kernel, asyncio.get_running_loop(), asyncio.Event()
    catalogue = await asyncio.to_thread(load_catalogue)
    counters = daemon.performer.counters

    def record(counts: tuple[Count, ...], mark: Mark) -> None:
        daemon.journal.append(*counts, mark)
        daemon.performer.count(*counts)

    try:
        fd = watch.open(catalogue, counters)
    except NoData:
        return await follow_journald(daemon, catalogue, record)
    show_zeros(counters, catalogue)

    def readable() -> None:
        try:
            if watch.read(time.clock_gettime(time.CLOCK_BOOTTIME), record):
                daemon.wake("kernel line")
        except OSError as error:
            loop.remove_reader(fd)
            daemon.trouble("kernel log", error)
            failed.set()

    try:
        loop.add_reader(fd, readable)
    except OSError:  # a recorded log is a plain file: read once
        readable()
    try:
        await failed.wait()
    finally:
        loop.remove_reader(fd)
        watch.close()
    await follow_journald(daemon, catalogue, record)


async def follow_journald(daemon: Daemon, catalogue: Catalogue, record: Record) -> None:
    """The same by way of journald; a machine without it is no fault either."""
    watch, counters = daemon.kernel, daemon.performer.counters
    log = watch.fall_back(counters, time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)

    def feed(piece: bytes) -> None:
        if not log.heard:
            show_zeros(counters, catalogue)
        if watch.feed(piece, time.clock_gettime(time.CLOCK_BOOTTIME), record):
            daemon.wake("kernel line")

    tool = daemon.config.collectors.journalctl
    watch.journal = reader = JournalReader(tool, log, feed, daemon.trouble)
    try:
        await reader.follow()
    except NoData:
        return


def show_zeros(counters: dict[tuple[str, Labels], float], catalogue: Catalogue) -> None:
    """From now on the absence of an event means that none was seen."""
    for labels in catalogue.alerted():
        counters.setdefault(("events", labels), 0.0)


async def serve_web(daemon: Daemon) -> None:
    """Page, API and metrics.  Imported in a thread, after the launchers' socket is up: the import
    takes longer than everything before it."""
    try:
        site = await asyncio.to_thread(importlib.import_module, "holdfast.agent.web.server")
        await site.serve(daemon)
    finally:
        daemon.answers.set()  # it failed, which is said: launchers are served all the same


async def say_ready(daemon: Daemon) -> None:
    """READY=1 when what `After=holdfast.service` promises is so: both sockets answer.  A part for
    people that never gets there does not keep the agent from its work."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(daemon.answers.wait(), READY_MAX_S)
    notify("READY=1")


async def end_with_launcher(daemon: Daemon) -> None:
    """A private agent ends when its launcher has: soon after a bye, later after a death, because
    a launcher that merely lost its socket comes back."""
    if not daemon.options.private:
        return
    parent = os.getppid()
    while True:
        await asyncio.sleep(0.1)
        now_s = time.monotonic()
        connected = any(session.link is not None for session in daemon.sessions.sessions())
        if connected:
            continue
        if daemon.gone_s == 0.0:
            # Nobody came yet; the process that started this one may be dead already.
            if os.getppid() != parent or now_s - daemon.started_s > FIRST_HELLO_S:
                break
            continue
        gone_for_s = now_s - daemon.gone_s
        alive = any(
            procfs.process_alive(session.pid) for session in daemon.sessions.sessions()
        )
        if daemon.said_bye and gone_for_s > AFTER_BYE_S:
            break
        if not alive and gone_for_s > AFTER_LOSS_S:
            break
    daemon.stop.set()


def generation_of(body: bytes) -> int:
    """The generation in a run's document; 0 when there is none to be read."""
    try:
        plan = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return 0
    generation = plan.get("generation", 0) if isinstance(plan, dict) else 0
    return generation if isinstance(generation, int) else 0


def own_verdicts(daemon: Daemon) -> tuple[Verdict, ...]:
    """What is wrong with the agent itself and only its shell can see.  Shown, never acted on."""
    node = f"node/{daemon.name}"
    found = []
    if not daemon.reload_ok:
        found.append(Verdict(
            "agent_config_bad", node, WARN, 1.0, f"reload refused: {daemon.reload_error[:300]}",
            detector="config",
        ))
    for health in daemon.runner.health() if daemon.runner is not None else ():
        if not health.up and not health.absent and health.read_s:
            found.append(Verdict(
                "collector_failed", f"{node}/collector/{health.name}", UNKNOWN, 1.0,
                f"collector {health.name}: {health.error}", detector="collectors",
            ))
    now_s = time.monotonic()
    for left in left_behind(daemon):
        found.append(Verdict(
            "probe_stuck", f"{node}/probe/{left.name}", DEGRADED, 1.0,
            f"probe {left.name} (pid {left.pid}) cannot be ended: it hangs in {left.wchan} "
            f"since {now_s - left.since_s:.0f} s", detector="probes",
        ))
    for (run, fault, rank), said in list(daemon.reports.items()):
        if now_s - said.said_s > REPORT_KEPT_S:
            del daemon.reports[(run, fault, rank)]
            continue
        subject = f"run/{run}/rank/{rank}" if rank >= 0 else f"run/{run}"
        found.append(Verdict(fault, subject, WARN, 1.0, said.text, detector="trainer", run=run))
    return tuple(found)


def left_behind(daemon: Daemon) -> tuple[Left, ...]:
    """Children that cannot be ended, whoever started them."""
    starters = (daemon.runner, daemon.kernel.journal)
    return tuple(left for one in starters if one is not None for left in one.left_behind())


def history(daemon: Daemon) -> Narrator:
    """What the journal knows, and whose it is."""
    def owner_of(run: str) -> int:
        session = daemon.sessions.session(run)
        return session.uid if session is not None else NODE

    return Narrator(daemon.journal.seed.incidents, daemon.journal.seed.owners, owner_of)


def keep(daemon: Daemon, told: Told) -> None:
    """Counts what happened, and lets evidence.store and journal hold what the history holds."""
    for record in told.records:
        daemon.performer.count(*record.counts)
        keep_incident(daemon, record.incident)
    if told.forgotten:
        daemon.journal.append(Forgotten(tuple(one.id for one in told.forgotten)))
        if daemon.config.evidence.store:
            folder = Path(daemon.config.evidence.store)
            daemon.forgotten.extend(told.forgotten)
            _aside(daemon, "forgotten", functools.partial(remove, folder, daemon.forgotten))


def keep_incident(daemon: Daemon, incident: Incident) -> None:
    """Writes an incident to evidence.store, beside everything else, for a shared folder may hang:
    one write at a time, and of what waits the newest state of each incident.  The journal has it
    in any case."""
    folder = daemon.config.evidence.store
    if folder:
        write = functools.partial(write_incident, Path(folder), incident)
        _aside(daemon, incident.id, write)


def _aside(daemon: Daemon, id: str, work: Callable[[], None]) -> None:
    folder = daemon.config.evidence.store
    if daemon.evidence.busy_s > HUNG_S:
        daemon.trouble("evidence", f"{folder} does not answer: what happens now is written later")
    writing = daemon.evidence.do(id, work)

    def ended(done: asyncio.Future[None]) -> None:
        if done.cancelled():
            return daemon.trouble("evidence", f"{folder}: too much waits, the oldest is left out")
        error = done.exception()
        if error is not None:
            daemon.trouble("evidence", error)

    writing.add_done_callback(ended)


def remove(folder: Path, forgotten: deque[Incident]) -> None:
    """Takes their files away, as long as there are any.  Only those of these very incidents:
    another node's may have the same name there."""
    while forgotten:
        incident = forgotten.popleft()
        path = folder / f"{file_name(incident.id)}.json"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            with open(fd, "rb") as file:
                kept = msgspec.json.decode(file.read(FILE_MAX_BYTES), type=Incident)
            if kept.opened_wall_s == incident.opened_wall_s:
                path.unlink()
        except (FileNotFoundError, msgspec.DecodeError):
            continue  # it never came there, or is somebody else's


def file_name(id: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in id)[:200]


def write_incident(folder: Path, incident: Incident) -> None:
    """One file an incident, replaced whole at each change."""
    name = file_name(incident.id)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{name}.new"
    draft.unlink(missing_ok=True)
    with open(draft, "xb") as file:  # never through a link that somebody put there
        file.write(msgspec.json.encode(incident))
    draft.replace(folder / f"{name}.json")


class CommitClock:
    """When each run's checkpoints became durable, for people: the age that is shown."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}  # (run, path) -> wall_s
        self.aside = Aside("checkpoint times")  # because a file system may hang

    def age_s(self, run: str, commit: Commit) -> float:
        """Seconds since a checkpoint was committed; since it was first seen where its directory
        does not tell."""
        key = (run, commit.path)
        if key not in self._seen:
            if len(self._seen) >= COMMITS_MAX:
                self._seen.clear()
            self._seen[key] = time.time()
            self.aside.do(commit.path, functools.partial(self._stat, key))
        return max(0.0, time.time() - self._seen[key])

    def _stat(self, key: tuple[str, str]) -> None:
        try:
            self._seen[key] = min(time.time(), os.stat(key[1]).st_mtime)
        except OSError:
            pass  # the time at which it was first seen stays
