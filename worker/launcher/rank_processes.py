"""The launcher's processes: ranks, warm standbys and the generation's store.

Owns starting, assigning, stopping and reaping them.  It carries out commands and keeps levels; what
to start or stop is the agent's to decide.  One thing is done here at once, because it is a fact
and not a decision: when a rank of a trainer ends abnormally its generation is over, and the other
ranks are told to leave it, which unblocks them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from .. import exits
from .. import page as pages
from ..addresses import LOOPBACK, interface_environ
from ..permit import Permit
from ..rank import outcome, rank
from ..rank import snapshot as snapshots
from ..redact import redacted_head
from ..wire import FDS_MAX, Packet, cut, pair
from . import forking
from .forking import Child, StoreChild
from .process import (
    ERROR_LIMIT,
    Place,
    RankProcess,
    StartCommand,
    end_of,
    environ_of,
    error_line,
    place_environ,
)
from .run_state import RunState

STANDBYS_LOST_MAX = 3  # standbys that died by themselves; then none is made any more
CHORE_PAUSE_S = 30.0  # after one failed
PLACE_MAX = 64  # characters of a rank's part in the trainer's strategy
ENDPOINTS_MAX = 4  # generations whose stores are remembered
GONE_WITHIN_S = 5.0  # of SIGKILL; a longer wait is said
STANDBY_DELAY_S = 1.0  # a new standby is built when recovery is over, not while it goes on


class RankProcesses:
    """All processes of one launcher."""

    def __init__(self, state: RunState, environ: Dict[str, str], say: Callable[..., None]) -> None:
        self.state = state
        self.spec = state.spec
        self.environ = environ
        self.log_dir = state.log_dir
        self.say = say
        self.processes: List[RankProcess] = []
        self.launched = 0
        self.starts = 0
        self.generation = 0
        self.started: Optional[StartCommand] = None  # what runs now
        self.waiting: Optional[StartCommand] = None  # until those it replaces are gone
        self.waiting_s = 0.0
        self.standbys_lost = 0
        self.chores_at_s = 0.0
        self.store: Optional[StoreChild] = None
        self.next_store: Optional[StoreChild] = None
        self.endpoints: Dict[int, Tuple[str, int]] = {}  # generation -> its first node's store
        self.park_told = 0  # the newest generation that the agent had leave behind a step
        self.permit = Permit()  # of the newest generation
        self.snapshots: Dict[int, int] = {}  # rank -> memfd
        self.with_store = forking.has_torch()
        self.spawn_reason = ""
        self.standby_at_s = 0.0
        self.first_start_s = 0.0
        self.startup_s = 0.0
        self.on_folder: Callable[[str], None] = lambda folder: None  # before anybody writes there
        self.on_fork: Callable[[RankProcess], None] = lambda process: None
        self.on_start: Callable[[StartCommand], None] = lambda command: None
        self.on_page: Callable[[RankProcess], None] = lambda process: None

    # ------------------------------------------------------------------ looking

    def by_rank(self) -> Dict[int, RankProcess]:
        """Each rank's process of the newest generation; a standby is older than its rank.  Ranks
        that this node had in an older one are another node's by now."""
        seated = sorted(self.processes, key=lambda p: (p.generation, p.number))
        ours = self.started.ranks if self.started is not None else ()
        return {p.rank: p for p in seated if p.rank in ours}

    def standbys(self) -> List[RankProcess]:
        return [p for p in self.processes if p.rank < 0 and p.ended is None and not p.by_us]

    def living(self) -> List[RankProcess]:
        return [p for p in self.processes if p.ended is None]

    def moving(self) -> bool:
        """Whether every rank has finished a step here: then there is time for chores."""
        ranks = [p for p in self.living() if p.assigned]
        return bool(ranks) and all(p.fields[pages.F_STEP] for p in ranks)

    def startup(self) -> float:
        """First start to first finished step, once known."""
        if not self.startup_s and self.first_start_s and self.moving():
            self.startup_s = round(time.monotonic() - self.first_start_s, 3)
        return self.startup_s

    def level(self) -> str:
        """preparing (nothing may be planned yet) | idle | running | done."""
        if self.generation == 0:
            return "idle" if self.state.listed else "preparing"
        ranks = self.by_rank().values()
        done = bool(ranks) and all(p.ended is not None and p.ended["code"] == 0 for p in ranks)
        return "done" if done else "running"

    def snapshot_view(self) -> Optional[Dict[str, int]]:
        newest = snapshots.newest_whole(snapshots.shards_of(list(self.snapshots.values())))
        if newest is None:
            return None
        return {"generation": newest[0], "step": newest[1], "shards": newest[2]}

    # ------------------------------------------------------------------ starting

    def launch(self, rank_number: int, generation: int, local_rank: int = 0) -> RankProcess:
        """Forks (or spawns) one process.  Raises OSError when the machine refuses one."""
        self.launched += 1
        name = "rank-%d" % rank_number if rank_number >= 0 else "standby-%d" % self.launched
        home = os.path.join(self.log_dir, name)
        rank.make_home(home)
        self.on_folder(home)
        ours, theirs = pair()
        with contextlib.closing(theirs), contextlib.ExitStack() as undone:
            # A machine that refuses a process does so again each time: nothing of one may stay.
            undone.callback(ours.close)
            page_fd = pages.create()
            undone.callback(os.close, page_fd)
            process = RankProcess(self.launched, home, page_fd, ours)
            undone.pop_all()
            undone.callback(process.close)
            process.rank, process.generation = rank_number, generation
            process.local_rank = local_rank
            taken = {one.seat for one in self.living()}
            process.seat = min(set(range(len(taken) + 1)) - taken)
            process.child = self.fork(process, theirs.fileno())
            undone.pop_all()
        self.processes.append(process)
        self.on_fork(process)
        return process

    def fork(self, process: RankProcess, control_fd: int) -> Child:
        """The process itself, at its seat."""
        home, program = process.home, self.spec.program
        seat = rank.Seat(
            page_fd=process.page_fd, control_fd=control_fd,
            stdout=os.path.join(home, "stdout.log"), stderr=os.path.join(home, "stderr.log"),
            environ=self.rank_environ(process), launcher_pid=os.getpid(), threads=self.threads(),
            rank=process.rank, generation=process.generation,
        )
        if program.kind == "command":
            return forking.spawn_command(program, seat)
        if self.may_fork():
            return forking.fork_rank(program, seat)
        return forking.spawn_rank(program, seat)

    def may_fork(self) -> bool:
        """Whether a warm start is safe now; says once why not."""
        if self.spec.start_method == "spawn":
            return False
        reason = forking.why_not_fork()
        if reason and not self.spawn_reason:
            self.say("ranks start cold: %s (--preload none avoids it)" % reason)
        self.spawn_reason = reason or self.spawn_reason
        return not reason

    def threads(self) -> int:
        """torch's threads: the user's OMP_NUM_THREADS, which torch itself read as 1 here."""
        text = self.rank_threads()
        if text.isdigit() and int(text) > 0:
            return int(text)
        return len(os.sched_getaffinity(0))

    def rank_threads(self) -> str:
        return "1" if self.spec.nproc_unset_threads else self.environ.get("OMP_NUM_THREADS", "")

    def place(self) -> Place:
        """Where the generation that is started here lives."""
        started, store = self.started, self.store
        nproc = self.spec.nproc
        return Place(
            world=started.world if started else nproc,
            local_world=len(started.ranks) if started else nproc,
            host=store.host if store else LOOPBACK, port=store.port if store else 0,
            restarts=max(0, self.starts - 1),
            group=started.group if started else 0, groups=started.groups if started else 1)

    def rank_environ(self, process: RankProcess) -> Dict[str, str]:
        environ = environ_of(self.environ, self.spec, process, self.place())
        environ.update(interface_environ(self.state.interface, self.environ))
        return environ

    def prepare(self) -> None:
        """For a trainer: processes that build and wait, before anybody has planned anything."""
        wanted = self.spec.nproc + self.spec.standby
        self.guarded(lambda: [self.launch(-1, 0) for _ in range(wanted)])

    def fetch_store(self, command: StartCommand) -> StoreChild:
        """A store for the coming generation, started ahead where the port is free to choose; on
        every node but the first, the first one's."""
        if command.group:
            host, port = self.endpoints[command.generation]
            return StoreChild(Child(0, -1), port, host)
        host = self.state.address
        if not self.with_store:
            return StoreChild(Child(0, -1), self.spec.master_port or forking.free_port(), host)
        store, self.next_store = self.next_store, None
        return store or forking.start_store(self.spec.master_port, host)

    def learn_endpoint(self, generation: int, host: str, port: int) -> None:
        """Where the store of a generation is that another node hosts."""
        self.endpoints[generation] = (host, port)
        for old in sorted(self.endpoints)[:-ENDPOINTS_MAX]:
            del self.endpoints[old]

    def endpoint(self) -> Optional[Dict[str, Any]]:
        """Where the newest generation's store is, for the other nodes; None where another's is."""
        started, store = self.started, self.store
        if started is None or store is None or started.groups < 2 or started.group:
            return None
        return {"generation": started.generation, "host": store.host, "port": store.port}

    @staticmethod
    def kill_child(child: Child) -> None:
        """Ends a store child and reaps it; SIGKILL cannot be refused, so this returns."""
        if not child.pid:
            return  # an endpoint alone: to the kernel, pid 0 is this whole process group
        try:
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it died before
        if child.pidfd >= 0:
            os.close(child.pidfd)

    def begin(self, command: StartCommand) -> None:
        """Starts a generation; remembers when the first one began."""
        self.first_start_s = self.first_start_s or time.monotonic()
        self.guarded(lambda: self.start(command))

    def start_waiting(self) -> None:
        if self.waiting is not None:
            self.guarded(self.start_when_clear)

    def guarded(self, start: Callable[[], object]) -> None:
        """A machine that refuses processes or files cannot run this generation: elsewhere may."""
        try:
            start()
        except OSError as error:
            self.state.end(exits.RETRY, "a generation after %d could not be started here: %s"
                           % (self.generation, error))

    def start(self, command: StartCommand) -> None:
        """Begins a generation: at once, or as soon as those it replaces are gone."""
        for process in self.living():
            if process.rank < 0:
                continue
            if process.parked is None or not command.keeps(process.local_rank):
                self.kill(process, 0.0)
            elif process.kill_at_s:  # it came to the end of its step within the grace it had
                process.by_us, process.kill_at_s = False, 0.0
        self.waiting, self.waiting_s = command, time.monotonic()
        self.start_when_clear()

    def start_when_clear(self) -> bool:
        """Starts the waiting generation once every replaced process is gone from its device."""
        command = self.waiting
        if command is None or any(p.by_us for p in self.living()):
            return False
        if command.group and command.generation not in self.endpoints:
            return False  # until the first node's store is known
        self.waiting = None
        self.starts += 1
        if self.starts == 1 and command.resume.get("kind") == "disk":
            self.say("goes on from the checkpoint of step %d" % command.resume.get("step", 0))
        old_store, self.store = self.store, None
        if self.spec.master_port and old_store:
            self.kill_child(old_store.child)
            old_store = None
        self.on_start(command)
        self.started, self.generation = command, command.generation
        self.permit = Permit(command.generation, command.permit_ns)
        self.store = self.fetch_store(command)
        present = {command.ranks[p.local_rank]: p for p in self.living() if p.rank >= 0}
        self.carry_snapshots({p.rank: number for number, p in present.items()}, command.ranks)
        for number in command.ranks:
            self.seat_rank(number, present.get(number), command)
        if old_store is not None:
            self.kill_child(old_store.child)
        self.forget_ended()
        self.standby_at_s = time.monotonic() + STANDBY_DELAY_S
        return True

    def carry_snapshots(self, became: Dict[int, int], ranks: Tuple[int, ...]) -> None:
        """Of a node whose ranks have other numbers now: each process goes on writing to its own,
        and what nobody here writes to any more is let go."""
        if all(old == new for old, new in became.items()):
            became = {number: number for number in ranks}
        for number in [number for number in self.snapshots if number not in became]:
            os.close(self.snapshots.pop(number))
        self.snapshots = {became[number]: fd for number, fd in self.snapshots.items()}

    def seat_rank(self, number: int, kept: Optional[RankProcess], command: StartCommand) -> None:
        """Gives rank `number` a process: the survivor, a standby, or a new one."""
        process, local = kept, command.local(number)
        if process is None and self.spec.program.trainer:
            standbys = sorted(self.standbys(), key=lambda p: (not p.ready, p.number))
            process = standbys[0] if standbys else None
        if process is None:
            process = self.launch(number, command.generation, local)
        process.rank, process.local_rank = number, local
        process.generation = command.generation
        process.folder = os.path.join(self.log_dir, "rank-%d" % number)
        self.on_folder(process.folder)
        process.fields[pages.F_PERMIT] = command.permit_ns
        process.fields[pages.F_STOP_AFTER] = 0
        if self.spec.program.trainer:
            process.parked, process.raised, process.assigned = None, None, False
            outcome.write_page(process.fields, "", 0)  # it raised in the generation before
            if process.ready:
                self.assign(process)
        else:
            process.assigned = True
        self.on_page(process)

    def assign(self, process: RankProcess) -> None:
        command, store = self.started, self.store
        assert command is not None and store is not None
        from_memory = command.resume.get("kind") == "snapshot"
        fds = list(self.snapshots.values())[:FDS_MAX] if from_memory else []
        environ = place_environ(process, self.place())
        environ.update(interface_environ(self.state.interface, self.environ))
        process.channel.send(
            {"t": "assign", "run": self.spec.run, "generation": command.generation,
             "rank": process.rank, "local_rank": process.local_rank, "world": command.world,
             "store_host": store.host, "store_port": store.port, "resume": command.resume,
             "history": command.history, "node": os.uname().nodename, "environ": environ,
             "labels": command.labels}, fds)
        process.assigned, process.parked, process.place = True, None, ""
        process.flight = []

    def tend(self, now_s: float) -> None:
        """Work that may wait for a quiet moment: the next store, a new standby, overdue kills.

        The first store is made ahead too.  A command shows no steps, and its store child has to
        import torch for itself: that one is never waited for if it can be helped.
        """
        for process in self.living():
            if process.kill_at_s and now_s >= process.kill_at_s:
                self.signal_group(process, signal.SIGKILL)
                process.kill_at_s = 0.0
        self.end_with_permit()
        if self.waiting is not None:
            self.say_who_stays(now_s)
            return
        moving = self.moving()
        quiet = moving or self.generation == 0 or self.spec.program.kind == "command"
        try:
            self.make_ready(now_s, moving, quiet)
        except OSError as error:
            # A chore: what it would have made ready is made when it is needed.
            self.say("not made ahead: %s" % error)
            self.chores_at_s = now_s + CHORE_PAUSE_S

    def make_ready(self, now_s: float, moving: bool, quiet: bool) -> None:
        """The next generation's store, and a standby where one is wanted."""
        if now_s < self.chores_at_s or self.state.shutdown:
            return  # whoever is asked to end starts nothing more
        free = not self.spec.master_port and self.with_store
        if quiet and self.next_store is None and free and self.state.address:
            self.next_store = forking.start_store(host=self.state.address)
        wanted = self.spec.standby if self.standbys_lost < STANDBYS_LOST_MAX else 0
        lacks_standby = len(self.standbys()) < wanted
        if lacks_standby and moving and self.generation and now_s >= self.standby_at_s:
            self.launch(-1, 0)

    def say_who_stays(self, now_s: float) -> None:
        """A replaced rank that does not die (state D) holds its device: nobody may take it yet."""
        if now_s - self.waiting_s < GONE_WITHIN_S:
            return
        self.waiting_s = now_s
        stay = ", ".join(str(p.child.pid) for p in self.living() if p.by_us)
        if stay:
            self.say("waiting for pid %s to be gone: killed, and still there" % stay)
        elif self.waiting is not None:
            self.say("waiting for the first node of generation %d to say where its store is"
                     % self.waiting.generation)

    # ------------------------------------------------------------------ packets from ranks

    def on_packet(self, process: RankProcess, packet: Packet) -> Optional[Packet]:
        """Takes a rank's word; returns the packet when it is for the launcher."""
        kind = packet["t"]
        if kind == "ready":
            process.ready = True
            if process.rank >= 0 and not process.assigned and self.started is not None:
                self.assign(process)
            return packet
        if kind == "parked":
            if packet.get("generation") == process.generation:
                process.parked = {
                    "step": int(packet["step"]), "torn": bool(packet["torn"]),
                    "reason": str(packet["reason"]), "shard": int(packet.get("shard", 0)),
                    "shards": int(packet.get("shards", 1)),
                    "ready": bool(packet.get("ready", False))}
                if packet.get("error"):
                    process.raised = end_of(1, 0, "exception", redacted_head(
                        " ".join(str(packet["error"]).split()), ERROR_LIMIT), process.by_us)
                self.break_generation(process)
            return None
        if kind == "snapshot":
            self.give_snapshot(process, int(packet["nbytes"]))
            return None
        if kind == "place":
            process.place = cut(str(packet["text"]), PLACE_MAX)
            return None
        if kind == "flight":
            if packet.get("generation") == process.generation:
                process.flight = packet["entries"][-64:]
            return None
        return packet

    def give_snapshot(self, process: RankProcess, nbytes: int) -> None:
        """A memfd for this rank's shard: the one it had, while it is the same size."""
        fd = self.snapshots.get(process.rank)
        wanted = snapshots.HEADER_BYTES + 2 * snapshots.half_bytes(nbytes)
        if fd is None or os.fstat(fd).st_size != wanted:
            if wanted * self.spec.nproc > snapshots.budget_bytes():
                self.say("snapshots are off: %d MB do not fit the memory budget"
                         % (wanted * self.spec.nproc >> 20))
                process.channel.send({"t": "snapshot"})
                return
            if fd is not None:
                os.close(self.snapshots.pop(process.rank))
            try:
                fd = self.snapshots[process.rank] = snapshots.create(nbytes)
            except OSError as error:
                self.say("snapshots are off: %s" % error)
                process.channel.send({"t": "snapshot"})
                return
        process.channel.send({"t": "snapshot"}, [fd])

    def break_generation(self, culprit: Optional[RankProcess], generation: int = 0) -> None:
        """The generation of a lost or parked rank is over: its others leave it too.  With a
        generation, those of it alone: a rank of another node is the culprit."""
        if not self.spec.program.trainer:
            return
        for process in self.living():
            concerned = process.assigned and generation in (0, process.generation)
            if concerned and process.parked is None and process is not culprit:
                process.channel.send({"t": "leave", "generation": process.generation})

    def park(self, generation: int, after: int, save: bool) -> None:
        """Has a trainer's ranks leave this generation with their state: behind step `after`, or at
        once."""
        if not after:
            return self.break_generation(None, generation)
        self.park_told = generation
        for process in self.living():
            if process.assigned and process.generation == generation and process.parked is None:
                process.channel.send(
                    {"t": "park", "generation": generation, "after": after, "save": save})

    def renew_permit(self, generation: int, until_ns: int) -> None:
        """The ranks of this generation may compute until then (CLOCK_BOOTTIME)."""
        waiting = self.waiting
        if waiting is not None and waiting.generation == generation and waiting.permit_ns:
            self.waiting = waiting._replace(permit_ns=max(until_ns, waiting.permit_ns))
        if not self.permit.renew(generation, until_ns):
            return
        for process in self.living():
            if process.rank >= 0 and process.generation == generation:
                process.fields[pages.F_PERMIT] = until_ns

    def end_with_permit(self) -> None:
        """Nobody renewed it: another generation may start elsewhere, on the same checkpoints."""
        if not self.permit.is_over(time.clock_gettime_ns(time.CLOCK_BOOTTIME)):
            return
        self.permit = Permit()
        ranks = [p for p in self.living() if p.rank >= 0 and p.generation == self.generation]
        for process in ranks:
            self.kill(process, 0.0)
        if ranks:
            self.say("the permit of generation %d ran out, and nobody renewed it: its ranks here "
                     "are ended" % self.generation, "error")

    # ------------------------------------------------------------------ ending

    def kill(self, process: RankProcess, grace_s: float, number: int = signal.SIGTERM) -> None:
        """Ends a process on a command: politely when there is a grace, then for good."""
        process.by_us = True
        if grace_s <= 0:
            process.kill_at_s = 0.0
            self.signal_group(process, signal.SIGKILL)
            return
        process.kill_at_s = time.monotonic() + grace_s
        if not self.spec.program.trainer:
            self.signal_group(process, number)
            self.signal_group(process, signal.SIGCONT)

    def stop_at_step(self) -> None:
        """Asks a trainer to write a checkpoint and leave, all ranks after the same step."""
        processes = [p for p in self.living() if p.assigned]
        last = max((pages.count(p.fields[pages.F_STEP]) for p in processes), default=0) + 2
        for process in processes:
            if not process.fields[pages.F_STOP_AFTER]:
                process.fields[pages.F_STOP_AFTER] = last

    def signal_group(self, process: RankProcess, number: int) -> None:
        """A rank and what it started in its session."""
        try:
            os.killpg(process.child.pid, number)
        except ProcessLookupError:
            try:
                os.kill(process.child.pid, number)  # before its setsid, or already gone
            except ProcessLookupError:
                pass

    def reap(self) -> List[RankProcess]:
        """Collects every process that has ended; what it left behind is ended too."""
        ended = []
        for process in self.living():
            status = forking.reap(process.child.pid)
            if status is None:
                continue
            self.note_end(process, *status)
            try:
                os.killpg(process.child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it left nothing behind
            ended.append(process)
            abnormal = process.ended is not None and process.ended["code"] != 0
            if abnormal and process.assigned and process.generation == self.generation:
                self.break_generation(process)
        return ended

    def note_end(self, process: RankProcess, code: int, number: int) -> None:
        """The rank's own word where it left one; the wait status counts otherwise."""
        word = pages.OUTCOMES[min(process.fields[pages.F_OUTCOME], len(pages.OUTCOMES) - 1)]
        if word:
            code, number = int(process.fields[pages.F_CODE]) & 0xFF, 0
        # Who raised had ended then, whoever ended the process that stayed.
        process.ended = process.raised or end_of(
            code, number, word, error_line(process, number), process.by_us)

    def forget_ended(self) -> None:
        """Drops ended processes whose rank has a new one, and ended standbys."""
        newest = self.by_rank()
        for process in list(self.processes):
            if process.ended is not None and newest.get(process.rank) is not process:
                self.processes.remove(process)
                process.close()

    def end_all(self) -> None:
        """Kills and reaps everything, the store children too."""
        for process in self.living():
            self.kill(process, 0.0)
        deadline_s = time.monotonic() + GONE_WITHIN_S
        while self.living() and time.monotonic() < deadline_s:
            if not self.reap():
                time.sleep(0.005)  # bounded: a killed process is gone within microseconds
        for process in self.living():
            self.say("left behind: pid %d does not die (state D?)" % process.child.pid)
        if self.store is not None and self.store.child.pid:
            self.kill_child(self.store.child)
        if self.next_store is not None:
            self.kill_child(self.next_store.child)
