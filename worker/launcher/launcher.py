"""`holdfast run`: the launcher, root of the job's processes.

Owns the loop that ties the ranks' processes, the line to the agent and the terminal together.  It
runs where the caller put it, as the caller's user, in the caller's cgroup, under the job's
interpreter.  It reports levels and carries out commands; it decides only what must not depend on an
agent: that an interrupt ends everything (ending.py), and that a run without any agent still ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from typing import Any, Dict, List

from .. import exits
from .. import page as pages
from ..rank import rank
from ..stderr import say
from ..wire import Packet
from . import compiling, forking, levels, spec
from .agent_link import AgentLink, Places, places, private_folder, prove_room
from .child_tasks import ChildTask, ChildTasks
from .commands import Commands
from .ending import Ending
from .log_limit import LogLimit
from .log_watch import LogWatch
from .process import RankProcess, StartCommand
from .rank_processes import STANDBYS_LOST_MAX, RankProcesses
from .run_state import RunState
from .terminal import Terminal
from .without_agent import WithoutAgent

BEAT_S = 0.1
LAST_PACKETS_MAX = 1000  # of an ended process: a child that it left may go on sending
PR_SET_CHILD_SUBREAPER = 36


class Launcher:
    """One run on this node."""

    def __init__(self, options: spec.Spec, environ: Dict[str, str], where: Places) -> None:
        self.spec = options
        user_environ = forking.user_environ(environ)
        log_dir = options.log_dir or os.path.join(where.state_dir, "logs")
        self.state = RunState(options, log_dir)
        self.terminal = Terminal(options.tee, options.shown)
        self.ranks = RankProcesses(self.state, user_environ, self.terminal.say)
        self.link = AgentLink(
            options.run, where, user_environ, options.rendezvous if options.nnodes > 1 else "")
        self.tasks = ChildTasks()
        self.selector = selectors.DefaultSelector()
        self.logs = LogWatch(self.ranks, log_dir, self.link.environ, self.selector)
        self.log_limit = LogLimit(options.log_limit_bytes, self.terminal.say)
        self.compiling = compiling.Watch(environ, log_dir)
        self.commands = Commands(self.state, self.ranks, self.tasks, self.link, self.logs,
                                 self.compiling, self.terminal)
        self.without_agent = WithoutAgent(self.state, self.ranks, self.link, self.terminal)
        self.ending = Ending(self.state, self.ranks, self.terminal)
        self.ranks.on_folder = self.terminal.skip_existing
        self.ranks.on_fork = self.watch_rank
        self.ranks.on_page = self.send_page
        self.ranks.on_start = self.begin_generation
        self.tasks.on_open = self.watch_task
        self.tasks.on_close = self.forget_task
        self.inherited = forking.children()  # what `x & exec holdfast run` left: not ours to end
        self.sent_levels: Dict[str, Any] = {}
        self.levels_number = 0
        self.wake_reader, self.wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # ------------------------------------------------------------------ set-up

    def run(self) -> int:
        """Runs to the end; returns the exit code.  Everything started is gone afterwards."""
        if self.spec.log_dir:
            os.makedirs(self.state.log_dir, exist_ok=True)
        else:
            private_folder(self.link.where.state_dir)
            private_folder(self.state.log_dir)
        rank.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self.ending.take_signals(self.wake_writer)
        self.selector.register(self.wake_reader, selectors.EVENT_READ, "wake")
        self.terminal.say(self.spec.first_line(self.state.log_dir))
        if self.link.tend():  # a private agent starts while this process imports
            # One that is there already is greeted after the imports: a hello has a deadline.
            self.commands.tell({"t": "coming"})
        try:
            self.preload()
            if self.link.channel is not None:
                self.link.drop()
            if self.spec.program.trainer:
                self.ranks.prepare()
            while self.state.exit_code is None:
                self.once()
        finally:
            self.end()
        return self.state.exit_code if self.state.exit_code is not None else 1

    def preload(self) -> None:
        """Imports that take seconds, and are left at once when the caller wants the end."""
        names = [] if self.spec.start_method == "spawn" else self.spec.preload
        if not forking.has_torch():
            names = [n for n in names if not n.startswith("torch")]
        self.ending.leave = self.leave
        if self.state.shutdown:  # since before these lines
            self.state.end(self.ending.code(), "")
            self.leave()
        problems = forking.preload(names)
        self.ending.leave = None
        for problem in problems:
            self.terminal.say(problem, "warn")

    def leave(self) -> None:
        self.link.drop()  # it was never greeted
        self.end()
        os._exit(self.ending.code())

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
            elif isinstance(source, ChildTask) and source.read():
                self.tasks.finish(source)
        self.reap()
        self.ranks.start_waiting()
        self.commands.started()
        self.commands.parked()
        now_s = time.monotonic()
        if self.link.tend():
            self.greet()
        self.ranks.tend(now_s)
        self.tasks.tend(now_s)
        self.logs.tend(now_s)
        self.ending.watch(now_s)
        self.without_agent.watch(now_s)
        self.compiling.look(self.ranks.living(), now_s)
        self.send_levels()
        self.show()
        self.log_limit.tend(now_s, self.log_folders())

    def drain_wake(self) -> None:
        try:
            os.read(self.wake_reader, 4096)
        except BlockingIOError:
            pass  # another turn of the loop took it

    def watch_rank(self, process: RankProcess) -> None:
        self.selector.register(process.channel.fileno(), selectors.EVENT_READ, process)

    def unwatch(self, process: RankProcess) -> None:
        """Must come before its channel is closed: the descriptor's number is soon another's."""
        if process.channel.fileno() in self.selector.get_map():
            self.selector.unregister(process.channel.fileno())

    def read_rank(self, process: RankProcess) -> None:
        try:
            packet, _ = process.channel.receive(fds=0)
        except (ValueError, OSError) as error:
            self.rubbish(process, error)
            return
        if packet is None:
            self.unwatch(process)
            return
        try:
            rest = self.ranks.on_packet(process, packet)
            if rest is not None:
                self.on_rank_word(process, rest)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self.rubbish(process, error)

    def rubbish(self, process: RankProcess, error: Exception) -> None:
        """A rank is the user's process and may say anything: it is said once, and passed by."""
        if not process.rubbish:
            self.terminal.say("rank %d sent rubbish: %r" % (process.rank, error), "warn")
        process.rubbish += 1

    def hear_out(self, process: RankProcess) -> None:
        """What an ended process said last: its checkpoint's commit, its result."""
        watched = self.selector.get_map()
        for _ in range(LAST_PACKETS_MAX):
            if process.channel.fileno() not in watched or not process.channel.readable():
                return
            self.read_rank(process)

    def on_rank_word(self, process: RankProcess, packet: Packet) -> None:
        kind = packet["t"]
        if kind == "ready":
            self.state.take_checkpoints(packet)
        elif kind == "committed":
            self.state.take_commit(packet)
        elif kind == "verified":
            self.state.take_verified(packet)
        elif kind == "bad_checkpoint":
            self.state.take_bad_checkpoint(packet)
            self.terminal.say("checkpoint put aside: %s: %s" % (packet["path"], packet["why"]),
                              "warn")
        elif kind == "report":
            self.terminal.say(packet["text"], "warn" if packet.get("fault") else "info")
            self.commands.tell({"t": "report", "rank": process.rank, "fault": packet["fault"],
                                "text": packet["text"]})

    def begin_generation(self, command: StartCommand) -> None:
        self.terminal.local_ranks = {number: command.local(number) for number in command.ranks}
        self.logs.begin_generation(command)

    def watch_task(self, task: ChildTask) -> None:
        self.selector.register(task, selectors.EVENT_READ, task)

    def forget_task(self, task: ChildTask) -> None:
        if task.fileno() in self.selector.get_map():
            self.selector.unregister(task)

    def reap(self) -> None:
        """Collects ended ranks, and orphans that they left to this subreaper."""
        for process in self.ranks.reap():
            self.hear_out(process)
            self.unwatch(process)
            process.channel.close()
            if process.rank < 0 and not process.by_us:
                self.lost_standby(process)
            self.end_orphans()

    def lost_standby(self, process: RankProcess) -> None:
        """A process that died before it had a place: at the start, that is the run's end."""
        ended = process.ended or {}
        self.ranks.standbys_lost += 1
        if self.ranks.standbys_lost == STANDBYS_LOST_MAX and self.ranks.generation:
            self.terminal.say("%d standbys died by themselves: recovery goes on without one"
                              % STANDBYS_LOST_MAX, "warn")
        if self.ranks.generation == 0 and self.state.exit_code is None:
            self.terminal.follow([process.home], last=True)
            self.state.end(int(ended.get("code", 1)) or 1, "a rank ended while it prepared%s" % (
                ": " + ended["error"] if ended.get("error") else ""))

    def end_orphans(self) -> None:
        """A rank's orphan becomes this process's child: it must not outlive its rank."""
        known = self.inherited | set(self.link.pids()) | set(self.logs.pids())
        known |= {p.child.pid for p in self.ranks.processes}
        known |= {e.child.pid for e in self.tasks.running} | set(self.tasks.left)
        known |= {store.child.pid for store in (self.ranks.store, self.ranks.next_store) if store}
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
        self.commands.tell(levels.hello_of(self.state, self.ranks.generation, self.link.environ))
        for process in self.ranks.living():
            if process.rank >= 0:
                self.send_page(process)
        for outcome in self.commands.outcomes:
            self.commands.tell(outcome)
        self.sent_levels = {}

    def send_page(self, process: RankProcess) -> None:
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
             "pid": process.child.pid, "local_rank": process.local_rank},
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
        self.commands.on_packet(packet)

    def send_levels(self) -> None:
        """The full state of everything, whenever any of it has changed."""
        if self.link.channel is None:
            return
        now = levels.levels_of(self.state, self.ranks, self.compiling.found, self.logs.level())
        if now == self.sent_levels:
            return
        self.sent_levels = now
        self.levels_number += 1
        self.commands.tell(levels.fitted(dict(now, n=self.levels_number)))

    # ------------------------------------------------------------------ ends

    def show(self) -> None:
        self.terminal.follow(self.folders())
        ranks = self.ranks.by_rank()
        lead = ranks[min(ranks)] if ranks else None
        if lead is not None and lead.ended is None and lead.assigned:
            try:
                view = pages.read_page(lead.fields)
            except ValueError:
                return  # the agent says so, for each rank
            if view.total_steps:
                self.terminal.progress(view.step, view.total_steps, view.loss, view.rate)

    def folders(self) -> List[str]:
        """Where processes write whose lines are shown; a standby's are before the first generation,
        when it prepares what all wait for, and once it has ended."""
        preparing = self.ranks.generation == 0
        shown = [p for p in self.ranks.processes
                 if preparing or p.rank >= 0 or p.ended is not None]
        return list(dict.fromkeys(folder for p in shown for folder in (p.home, p.folder)))

    def log_folders(self) -> List[str]:
        return list(dict.fromkeys(p.folder for p in self.ranks.processes))

    def end(self) -> None:
        """Leaves nothing: no process, no socket, no line unread."""
        self.ending.drop_signals()
        self.ranks.end_all()
        self.tasks.end_all()
        self.logs.end()
        self.end_orphans()
        self.terminal.finish(self.folders())
        self.terminal.end_bar()
        self.log_limit.end()
        self.ending.say()
        self.send_levels()
        self.link.end(self.state.exit_code if self.state.exit_code is not None else 1)
        self.terminal.err.finish()


def main(command: str, argv: List[str]) -> None:
    """Entry of `holdfast run` and `holdfast train`; does not return."""
    environ = dict(os.environ)
    single = forking.single_threaded_environ(environ, quiet=command == "train")
    if single is not None:
        # OpenBLAS reads its thread count while numpy is imported, so the whole process starts over.
        os.execve(sys.executable, [sys.executable, forking.BOOTSTRAP, command, *argv], single)
    options = spec.parse(command, argv, forking.user_environ(environ))
    try:
        where = places(options.run, environ, options.nnodes)
        if where.private or not options.log_dir:
            prove_room(where)
        code = Launcher(options, environ, where).run()
    except OSError as error:
        code = exits.CONFIGURATION
        say("holdfast: %s" % exits.ending(code, str(error)))
    forking.flush()
    os._exit(code)
