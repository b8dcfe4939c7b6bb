"""`holdfast run`: the launcher, root of the job's processes.

Owns the loop that ties the crew (ranks), the line to the agent and the terminal together.  It
runs where the caller put it, as the caller's user, in the caller's cgroup, under the job's
interpreter.  It reports levels and carries out orders; it decides only what must not depend on an
agent: that an interrupt ends everything, and that a run without any agent still ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from .. import exits
from .. import page as pages
from ..rank import rank
from ..wire import Packet
from . import compiling, forking, levels, spec
from .agent_link import AgentLink, Places, places
from .child_tasks import Errand, Errands
from .commands import Orders
from .log_watch import LogWatch
from .process import Order, RankProcess
from .rank_processes import STANDBYS_LOST_MAX, Crew
from .terminal import Terminal
from .without_agent import Alone

BEAT_S = 0.1
PR_SET_CHILD_SUBREAPER = 36
INTERRUPT_GRACE_S = 2.0
FORCED_END_S = 5.0  # beyond the grace: a rank in state D keeps nobody here


class Launcher:
    """One run on this node."""

    def __init__(self, options: spec.Spec, environ: Dict[str, str], where: Places) -> None:
        self.spec = options
        self.environ = environ
        self.terminal = Terminal(options.tee)
        self.log_dir = options.log_dir or os.path.join(where.state_dir, "logs")
        self.crew = Crew(options, forking.user_environ(environ), self.log_dir, self.terminal.say)
        self.crew.on_fork = self.watch_rank
        self.crew.on_page = self.send_page
        self.link = AgentLink(options.run, where, forking.user_environ(environ))
        self.errands = Errands()
        self.errands.on_close = self.forget_errand
        self.orders = Orders(self)
        self.inherited = forking.children()  # what `x & exec holdfast run` left: not ours to end
        self.selector = selectors.DefaultSelector()
        self.logs = LogWatch(self.crew, self.log_dir, self.link.environ, self.selector)
        self.crew.on_start = self.logs.begin_generation
        self.outcomes: List[Packet] = []
        self.commits: Dict[str, Dict[str, Any]] = {}
        self.checkpoint_dir = ""
        self.keep = 0
        self.listed = not options.program.trainer
        self.shutdown = ""
        self.shutdown_s = 0.0
        self.exit_code: Optional[int] = None
        self.sent_levels: Dict[str, Any] = {}
        self.levels_number = 0
        self.started_boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.first_start_s = 0.0
        self.startup_s = 0.0
        self.address = ""
        self.alone = Alone(self)
        self.compiling = compiling.Watch(environ)
        self.wake_reader, self.wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # ------------------------------------------------------------------ set-up

    def run(self) -> int:
        """Runs to the end; returns the exit code.  Everything started is gone afterwards."""
        os.makedirs(self.log_dir, exist_ok=True)
        rank.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.take_signals()
        if self.link.tend():  # a private agent starts while this process imports
            # One that is there already is greeted after the imports: a hello has a deadline.
            self.link.drop()
        for problem in forking.preload(self.preloads()):
            self.terminal.say(problem, "warn")
        try:
            if self.spec.program.trainer:
                self.crew.prepare()
            while self.exit_code is None:
                self.once()
        finally:
            self.end()
        return self.exit_code if self.exit_code is not None else 1

    def preloads(self) -> List[str]:
        names = [] if self.spec.start_method == "spawn" else self.spec.preload
        return names if forking.has_torch() else [n for n in names if not n.startswith("torch")]

    def take_signals(self) -> None:
        signal.set_wakeup_fd(self.wake_writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, "wake")

    def on_signal(self, number: int, _frame: Any) -> None:
        """The caller wants the run to end; a second interrupt ends it at once."""
        if self.shutdown and number == signal.SIGINT:
            self.exit_code = exits.INTERRUPTED
        elif not self.shutdown:
            self.shutdown = "interrupted" if number == signal.SIGINT else "preempted"
            self.shutdown_s = time.monotonic()

    # ------------------------------------------------------------------ the loop

    def once(self) -> None:
        """One turn: wait for anything, handle all of it, tell the agent what changed."""
        for key, _ in self.selector.select(BEAT_S):
            source = key.data
            if source == "wake":
                self.drain_wake()
            elif source == "agent":
                self.read_agent()
            elif isinstance(source, LogWatch):
                source.read()
            elif isinstance(source, RankProcess):
                self.read_rank(source)
            elif isinstance(source, Errand) and source.read():
                self.errands.finish(source)
        self.reap()
        if self.crew.waiting is not None:
            self.guarded(self.crew.start_when_clear)
        now_s = time.monotonic()
        if self.link.tend():
            self.greet()
        self.crew.tend(now_s, self.moving())
        self.errands.tend(now_s)
        self.logs.tend(now_s)
        self.watch_shutdown(now_s)
        self.alone.watch(now_s)
        self.compiling.look(self.crew.living(), now_s)
        self.send_levels()
        self.show()

    def drain_wake(self) -> None:
        try:
            os.read(self.wake_reader, 4096)
        except BlockingIOError:
            pass  # another turn of the loop took it

    def moving(self) -> bool:
        """Whether every rank has finished a step here: then there is time for chores."""
        ranks = [p for p in self.crew.living() if p.assigned]
        return bool(ranks) and all(p.fields[pages.F_STEP] for p in ranks)

    def watch_rank(self, process: RankProcess) -> None:
        self.selector.register(process.channel.fileno(), selectors.EVENT_READ, process)
        self.terminal.skip_existing(process.home)

    def unwatch(self, process: RankProcess) -> None:
        """Must come before its channel is closed: the descriptor's number is soon another's."""
        if process.channel.fileno() in self.selector.get_map():
            self.selector.unregister(process.channel.fileno())

    def read_rank(self, process: RankProcess) -> None:
        try:
            packet, _ = process.channel.receive(fds=0)
        except (ValueError, OSError) as error:
            self.terminal.say("rank %d sent rubbish: %s" % (process.rank, error), "warn")
            return
        if packet is None:
            self.unwatch(process)
            return
        rest = self.crew.on_packet(process, packet)
        if rest is not None:
            self.on_rank_word(process, rest)

    def on_rank_word(self, process: RankProcess, packet: Packet) -> None:
        kind = packet["t"]
        if kind == "ready" and not self.listed:
            self.checkpoint_dir = str(packet.get("checkpoint_dir") or "")
            self.keep = int(packet.get("keep") or 0)
            self.commits = {str(c["path"]): c for c in packet.get("commits") or ()}
            self.listed = True
        elif kind == "committed":
            path = str(packet["path"])
            self.commits[path] = {"generation": packet["generation"], "step": packet["step"],
                                  "path": path, "world": packet["world"], "bad": ""}
        elif kind == "bad_checkpoint":
            path = str(packet["path"])
            known = self.commits.setdefault(path, {"generation": 0, "step": 0, "path": path,
                                                   "world": 0, "bad": ""})
            known["bad"] = packet["why"] or "bad"
            self.terminal.say("checkpoint put aside: %s: %s" % (path, packet["why"]), "warn")
        elif kind == "report":
            self.terminal.say(packet["text"], "warn" if packet.get("fault") else "info")
            self.orders.tell({"t": "report", "rank": process.rank, "fault": packet["fault"],
                              "text": packet["text"]})

    def add_errand(self, errand: Optional[Errand]) -> None:
        if errand is not None:
            self.selector.register(errand, selectors.EVENT_READ, errand)

    def forget_errand(self, errand: Errand) -> None:
        if errand.fileno() in self.selector.get_map():
            self.selector.unregister(errand)

    def reap(self) -> None:
        """Collects ended ranks, and orphans that they left to this subreaper."""
        for process in self.crew.reap():
            self.unwatch(process)
            process.channel.close()
            if process.rank < 0 and not process.by_us:
                self.lost_standby(process)
            self.end_orphans()

    def lost_standby(self, process: RankProcess) -> None:
        """A process that died before it had a place: at the start, that is the run's end."""
        ended = process.ended or {}
        self.crew.standbys_lost += 1
        if self.crew.standbys_lost == STANDBYS_LOST_MAX and self.crew.generation:
            self.terminal.say("%d standbys died by themselves: recovery goes on without one"
                              % STANDBYS_LOST_MAX, "warn")
        if self.crew.generation == 0 and self.exit_code is None:
            self.terminal.follow([process.home], last=True)
            self.exit_code = int(ended.get("code", 1)) or 1

    def end_orphans(self) -> None:
        """A rank's orphan becomes this process's child: it must not outlive its rank."""
        known = self.inherited | set(self.link.pids()) | set(self.logs.pids())
        known |= {p.child.pid for p in self.crew.processes}
        known |= {e.child.pid for e in self.errands.running} | set(self.errands.left)
        known |= {store.child.pid for store in (self.crew.store, self.crew.next_store) if store}
        for pid in forking.children() - known:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            except (ProcessLookupError, ChildProcessError):
                continue

    # ------------------------------------------------------------------ the agent

    def greet(self) -> None:
        """Says who this is, and repeats everything the agent needs to know."""
        channel = self.link.channel
        assert channel is not None
        self.selector.register(channel.fileno(), selectors.EVENT_READ, "agent")
        self.orders.tell(levels.hello_of(self))
        for process in self.crew.living():
            if process.rank >= 0:
                self.send_page(process)
        for outcome in self.outcomes:
            self.orders.tell(outcome)
        self.sent_levels = {}

    def send_page(self, process: RankProcess) -> None:
        self.terminal.skip_existing(process.folder)
        if self.link.channel is None or process.child.pidfd < 0:
            return
        try:
            page_fd = pages.readonly(process.page_fd)
        except OSError as error:
            self.terminal.say("rank %d is seen without its page: %s" % (process.rank, error),
                              "warn")
            return
        self.link.channel.send(
            {"t": "page", "rank": process.rank, "generation": process.generation,
             "pid": process.child.pid, "local_rank": process.rank},
            [page_fd, process.child.pidfd])
        os.close(page_fd)

    def read_agent(self) -> None:
        channel = self.link.channel
        if channel is None:
            return
        try:
            packet, _ = channel.receive(fds=0)
        except (ValueError, OSError) as error:
            self.terminal.say("the agent sent rubbish: %s" % error, "warn")
            packet = None
        if packet is None:
            self.selector.unregister(channel.fileno())
            self.link.drop()
            return
        self.orders.on_packet(packet)

    def on_address(self, address: str) -> None:
        """The live page's address, said once."""
        if address != self.address:
            self.address = address
            self.terminal.say("run %s, live page %s" % (self.spec.run, address))
            self.terminal.say("logs in %s" % self.log_dir)

    def send_levels(self) -> None:
        """The full state of everything, whenever any of it has changed."""
        if self.link.channel is None:
            return
        now = levels.levels_of(self)
        if now == self.sent_levels:
            return
        self.sent_levels = now
        self.levels_number += 1
        self.orders.tell(levels.fitted(dict(now, n=self.levels_number)))

    def state(self) -> str:
        return levels.state_of(self.crew, self.listed)

    def startup(self) -> float:
        """First start to first finished step, once known."""
        if not self.startup_s and self.first_start_s and self.moving():
            self.startup_s = round(time.monotonic() - self.first_start_s, 3)
        return self.startup_s

    # ------------------------------------------------------------------ ends

    def watch_shutdown(self, now_s: float) -> None:
        """An interrupt or preemption must end the run even when no agent answers."""
        if not self.shutdown or self.exit_code is not None:
            return
        interrupted = self.shutdown == "interrupted"
        grace_s = INTERRUPT_GRACE_S if interrupted else self.spec.grace_s
        self.crew.waiting = None
        for process in self.crew.standbys():
            self.crew.kill(process, 0.0)
        if now_s - self.shutdown_s > grace_s + FORCED_END_S:
            self.exit_code = exits.INTERRUPTED if interrupted else exits.RETRY
            return
        if not self.crew.living() or self.crew.generation == 0:
            self.exit_code = exits.INTERRUPTED if interrupted else exits.RETRY
            return
        if self.spec.program.trainer and not interrupted:
            self.crew.stop_at_step()
        for process in self.crew.living():
            if not process.by_us:
                number = signal.SIGINT if interrupted else signal.SIGTERM
                self.crew.kill(process, grace_s, number)

    def begin(self, order: Order) -> None:
        """Starts a generation; remembers when the first one began."""
        self.first_start_s = self.first_start_s or time.monotonic()
        self.guarded(lambda: self.crew.start(order))

    def guarded(self, start: Callable[[], object]) -> None:
        """A machine that refuses processes or files cannot run this generation: elsewhere may."""
        try:
            start()
        except OSError as error:
            self.terminal.say("generation %d did not start: %s" % (
                self.crew.generation, error), "error")
            self.exit_code = exits.RETRY

    def show(self) -> None:
        self.terminal.follow(self.folders())
        lead = self.crew.by_rank().get(0)
        if lead is not None and lead.ended is None and lead.assigned:
            view = pages.read_page(lead.fields)
            if view.total_steps:
                self.terminal.progress(view.step, view.total_steps, view.loss, view.rate)

    def folders(self) -> List[str]:
        """Where processes write whose lines are shown; a standby's are before the first generation,
        when it prepares what all wait for, and once it has ended."""
        preparing = self.crew.generation == 0
        shown = [p for p in self.crew.processes
                 if preparing or p.rank >= 0 or p.ended is not None]
        return list(dict.fromkeys(folder for p in shown for folder in (p.home, p.folder)))

    def end(self) -> None:
        """Leaves nothing: no process, no socket, no line unread."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self.crew.end_all()
        self.errands.end_all()
        self.logs.end()
        self.end_orphans()
        while self.terminal.follow(self.folders(), last=True):
            pass
        self.terminal.end_bar()
        self.send_levels()
        self.link.end(self.exit_code if self.exit_code is not None else 1)


def main(command: str, argv: List[str]) -> None:
    """Entry of `holdfast run` and `holdfast train`; does not return."""
    environ = dict(os.environ)
    single = forking.single_threaded_environ(environ, quiet=command == "train")
    if single is not None:
        # OpenBLAS reads its thread count while numpy is imported, so the whole process starts over.
        os.execve(sys.executable, [sys.executable, forking.BOOTSTRAP, command, *argv], single)
    options = spec.parse(command, argv, forking.user_environ(environ))
    try:
        where = places(options.run, environ)
        code = Launcher(options, environ, where).run()
    except OSError as error:
        print("holdfast: %s" % error, file=sys.stderr)
        code = exits.CONFIGURATION
    sys.stdout.flush()
    os._exit(code)
