"""What the agent says to a launcher, carried out.

Owns the agent's packets: one handler a kind, exactly one outcome an effect, idempotent under the
effect's id.  A command that makes no sense is refused with a reason and changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import stat
import time
from typing import Any, Callable, Dict, List, Optional, Set

from .. import addresses, exits
from ..permit import RanOut, ordered_ns
from ..wire import Packet, cut
from .agent_link import AgentLink, own_module
from .child_tasks import ChildTasks
from .compiling import Watch
from .log_watch import LogWatch
from .process import StartCommand
from .rank_processes import RankProcesses
from .run_state import CHECKPOINT, RunState
from .terminal import Terminal

EVIDENCE_S = 5.0
REMOVE_S = 10.0
PATHS_S, PATHS_MAX = 15.0, 32  # a mount that hangs is unknown, and refuses nothing
HOW = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a lock is opened
LOCK_STALE_S = 120.0  # as the agent's: a compile's stages follow each other within seconds
REFUSALS_MAX = 8  # different reasons that are said
LABELS_MAX, LABEL_MAX = 16, 64  # labels of a node, and characters of one
OUTCOME_LIMIT = 9_000  # characters; one may take six bytes in a packet


class Refused(Exception):
    """A command that cannot be carried out; its text is the outcome's error."""


def remove_checkpoint(path: str) -> None:
    """Removes it, or what is left of it: the trainer tidies up what has no marker any more, and
    another node that led may have removed it.  OSError where any of it stays."""
    # Without its marker it is no checkpoint any more, however far the rest gets.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, "COMMIT"))
    shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


class Commands:
    """The agent's commands to one launcher, and its other words."""

    def __init__(
        self, state: RunState, ranks: RankProcesses, tasks: ChildTasks, link: AgentLink,
        logs: LogWatch, compiling: Watch, terminal: Terminal,
    ) -> None:
        self.state, self.ranks, self.tasks, self.link = state, ranks, tasks, link
        self.log_watch, self.compiling, self.terminal = logs, compiling, terminal
        self.outcomes: List[Packet] = []
        self.done: Dict[str, Packet] = {}
        self.running: Dict[str, float] = {}
        self.welcomed = False
        self.starting: Dict[str, int] = {}  # start command -> the generation that waits
        self.parking: Dict[str, int] = {}  # stop command -> the generation whose ranks are to park
        self.refusals: Set[str] = set()
        self.address = ""

    def tell(self, packet: Packet) -> None:
        if self.link.channel is not None:
            try:
                self.link.channel.send(packet)
            except ValueError as error:
                self.terminal.say("not told to the agent: %s" % error, "warn")

    def outcome(self, command_id: str, ok: bool, text: str = "") -> None:
        """Reports an effect's end, now and again after each reconnect."""
        self.running.pop(command_id, None)
        packet: Packet = {"t": "outcome", "id": command_id, "ok": ok, "error": "", "detail": ""}
        packet["detail" if ok else "error"] = cut(text, OUTCOME_LIMIT)
        self.done[command_id] = packet
        self.outcomes.append(packet)
        for old in self.outcomes[:-64]:
            self.done.pop(old["id"], None)
        del self.outcomes[:-64]
        self.tell(packet)

    def on_packet(self, packet: Packet) -> None:
        kind = packet["t"]
        if kind == "do":
            self.carry_out(str(packet.get("kind")), str(packet["id"]), packet.get("body") or {})
        elif kind == "inject":
            self.carry_out("inject", str(packet["id"]), packet)
        elif kind == "logs":
            self.log_watch.configure(packet)
        elif kind == "say":
            self.terminal.say(str(packet["text"]), str(packet.get("level", "info")))
        elif kind == "error":
            self.refused(str(packet.get("error")))
        elif kind == "endpoint":
            self.ranks.learn_endpoint(
                int(packet["generation"]), str(packet["host"]), int(packet["port"]))
        elif kind == "leave":
            self.ranks.break_generation(None, int(packet["generation"]))
        elif kind == "permit":
            self.ranks.renew_permit(int(packet["generation"]), int(packet["until_ns"]))
        elif kind in ("welcome", "address"):
            self.welcomed = True
            if packet.get("address"):
                self.on_address(str(packet["address"]))
            if kind == "welcome" and self.state.spec.nnodes > 1:
                self.on_nodes(packet)

    def on_nodes(self, packet: Packet) -> None:
        """What a run over many nodes needs of its agent: that it sees the others, and the address
        by which they reach this one."""
        state, options = self.state, self.state.spec
        if not packet.get("many_nodes"):
            state.end(exits.CONFIGURATION, "--nnodes %s, and this node's agent serves one node: "
                      "install the same release of holdfast for both" % options.nnodes_text)
            return
        if state.address:
            return
        try:
            address = addresses.chosen(
                options.local_addr, self.link.environ, addresses.host_of(options.rendezvous),
                str(packet.get("host") or ""))
        except OSError as error:
            state.end(exits.CONFIGURATION, str(error))
            return
        why = addresses.can_bind(address) if address else "no route to the other nodes"
        if why:
            state.end(exits.CONFIGURATION, "the other nodes cannot reach this one at %r: %s; give "
                      "an address of this node with --local-addr or HOLDFAST_ADDR"
                      % (address, why))
            return
        state.address, state.interface = address, addresses.interface_of(address)
        self.terminal.say("%s nodes; this one is %s%s" % (
            options.nnodes_text, address, " on %s, which gloo and nccl use unless told otherwise"
            % state.interface if state.interface else ""))

    def on_address(self, address: str) -> None:
        """The live page's address, said once."""
        if address != self.address:
            self.address = address
            self.terminal.say("live page %s" % address)

    def refused(self, why: str) -> None:
        """The agent did not take a packet.  Each reason is said once: levels are repeated."""
        if not self.welcomed:
            # Nobody will plan for this run: better an end with a reason than a silent wait.
            self.state.end(exits.CONFIGURATION, "the agent refuses: %s" % why)
        elif why not in self.refusals and len(self.refusals) < REFUSALS_MAX:
            self.refusals.add(why)
            self.terminal.say(
                "the agent did not take what it was told, and acts without it: %s" % why, "warn")

    def carry_out(self, kind: str, command_id: str, body: Dict[str, Any]) -> None:
        """One command, once: a repeated one is answered with what became of the first."""
        if command_id in self.done:
            self.tell(self.done[command_id])
            return
        if command_id in self.running:
            return
        self.running[command_id] = time.monotonic()
        handlers: Dict[str, Callable[[str, Dict[str, Any]], None]] = {
            "start": self.start, "stop": self.stop, "finish": self.finish,
            "evidence": self.evidence, "delete": self.delete, "inject": self.inject,
            "logs": self.logs, "remove_lock": self.remove_lock, "run_check": self.run_check}
        try:
            if kind not in handlers:
                raise Refused("this launcher knows no order %r" % kind)
            handlers[kind](command_id, body)
        except Refused as refusal:
            self.outcome(command_id, False, str(refusal))
        except (KeyError, TypeError, ValueError) as error:
            self.outcome(command_id, False, "malformed order: %r" % error)
        except OSError as error:
            self.outcome(command_id, False, str(error))

    def start(self, command_id: str, body: Dict[str, Any]) -> None:
        generation = int(body["generation"])
        waiting = self.ranks.waiting
        known = max(self.ranks.generation, waiting.generation if waiting else 0)
        if generation == known:
            self.starting[command_id] = generation  # one plan a generation: this came before
            return self.started()
        if generation < known:
            raise Refused("generation %d is older than %d" % (generation, known))
        if self.state.shutdown:
            raise Refused("the run is shutting down")
        if int(body["world"]) != len(body["ranks"]) and "group" not in body:
            raise Refused("the agent names no place of this node among the others")
        try:
            permit_ns = ordered_ns(body, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        except RanOut as error:
            raise Refused(str(error)) from error
        self.ranks.begin(StartCommand(
            generation=generation,
            ranks=tuple(int(r) for r in body["ranks"]),
            keep=tuple(int(r) for r in body.get("keep", ())),
            world=int(body["world"]),
            resume=dict(body["resume"]),
            history=list(body.get("history", ())),
            permit_ns=permit_ns,
            group=int(body.get("group") or 0), groups=int(body.get("groups") or 1),
            labels=labels_in(body),
        ))
        self.starting[command_id] = generation
        self.started()

    def started(self) -> None:
        """Answers each start once its generation runs here: those of the other nodes wait for the
        first one's store."""
        for command_id, generation in list(self.starting.items()):
            waiting = self.ranks.waiting
            over = self.state.exit_code is not None
            waits = waiting is not None and waiting.group and waiting.generation == generation
            if waits and not over:
                continue
            del self.starting[command_id]
            self.outcome(command_id, not over,
                         "the machine refused processes or files" if over else "")

    def forgo(self) -> None:
        """Whoever ends all ranks here means those as well that still wait for the first node's
        store: a word of it that comes late begins nothing."""
        waiting, self.ranks.waiting = self.ranks.waiting, None
        if waiting is not None:
            for command_id, generation in list(self.starting.items()):
                if generation == waiting.generation:
                    del self.starting[command_id]
                    self.outcome(command_id, False, "it was ended before it began")

    def parked(self) -> None:
        """Answers each order to park once nobody of its generation is left to obey it."""
        for command_id, generation in list(self.parking.items()):
            if not any(p.assigned and p.parked is None and p.generation == generation
                       for p in self.ranks.living()):
                del self.parking[command_id]
                self.outcome(command_id, True)

    def stop(self, command_id: str, body: Dict[str, Any]) -> None:
        if body.get("leave"):
            self.leave(command_id, body)
            return
        if body.get("park") and self.state.spec.program.trainer:
            generation, after = int(body["generation"]), int(body.get("after") or 0)
            self.ranks.park(generation, after, bool(body.get("save")))
            if after:
                self.parking[command_id] = generation
            else:
                self.outcome(command_id, True)
            return
        wanted = {int(r) for r in body.get("ranks", ())}
        grace_s = float(body.get("grace_s", 0.0))
        if not wanted:
            self.forgo()
        for process in self.ranks.living():
            of_generation = process.rank >= 0 and process.generation == int(body["generation"])
            if of_generation and (not wanted or process.rank in wanted) and not process.by_us:
                self.ranks.kill(process, grace_s)
        self.outcome(command_id, True)

    def leave(self, command_id: str, body: Dict[str, Any]) -> None:
        """Ends the run as the caller's SIGTERM would: with a checkpoint, within its grace."""
        if int(body["generation"]) != self.ranks.generation:
            self.outcome(command_id, False, "generation %d runs" % self.ranks.generation)
            return
        if not self.state.shutdown:
            self.state.shut_down("drained")
            self.state.shutdown_reason = "asked to end: %s" % body.get("reason", "")
        self.outcome(command_id, True)

    def finish(self, command_id: str, body: Dict[str, Any]) -> None:
        code = int(body["code"])
        self.outcome(command_id, True)
        state = self.state
        if state.shutdown and self.ranks.living():
            return  # the ranks have the caller's grace; the launcher leaves when they have
        state.end(code, str(body.get("reason") or ""))

    def evidence(self, command_id: str, body: Dict[str, Any]) -> None:
        """Reads a suspect from outside, in a child; asks all for their last collectives."""
        pid = int(body["pid"])
        known = {p.child.pid: p for p in self.ranks.living()}
        if pid not in known:
            raise Refused("pid %d is no rank of this run" % pid)
        for process in self.ranks.living():
            if process.assigned:
                process.channel.send({"t": "flight"})
        command, environ = own_module("holdfast.agent.evidence", self.link.environ)
        self.tasks.command(
            [*command, "--pid", str(pid), "--json"], environ, EVIDENCE_S,
            lambda ok, text: self.outcome(command_id, ok, text), "evidence")

    def logs(self, command_id: str, body: Dict[str, Any]) -> None:
        """Has the end of a generation's logs read, in the child that stands for it."""
        self.log_watch.diagnose(
            int(body["generation"]), lambda ok, text: self.outcome(command_id, ok, text))

    def delete(self, command_id: str, body: Dict[str, Any]) -> None:
        """Lets checkpoints go; only of this run's folder and only from the newest generation.

        The node that leads has the order carried out by its own launcher, which hears of a commit
        only where rank 0 is, and of no generation where the node is a spare: a checkpoint is known
        by its name.  What asks their file system happens in the child: on a dead mount even a
        look-up waits for ever, and the launcher's loop waits for nobody.
        """
        state = self.state
        if int(body["generation"]) < self.ranks.generation:
            raise Refused("generation %s is not the newest" % body["generation"])
        paths: List[str] = [str(p) for p in body["paths"]]
        for path in paths:
            if not state.checkpoint_dir or not CHECKPOINT.match(os.path.basename(path)):
                raise Refused("%s is no checkpoint of this run" % path)

        def remove() -> int:
            root = os.path.realpath(state.checkpoint_dir)
            for path in paths:
                if os.path.realpath(path) != os.path.join(root, os.path.basename(path)):
                    raise Refused("%s is no checkpoint of this run" % path)
            for path in paths:
                remove_checkpoint(path)
            return len(paths)

        def done(ok: bool, text: str) -> None:
            for path in paths if ok else ():
                state.commits.pop(path, None)
            self.outcome(command_id, ok, text)

        self.tasks.call(remove, 60.0, done, "deleting checkpoints")

    def remove_lock(self, command_id: str, body: Dict[str, Any]) -> None:
        """Takes away a compile's lock; looks again at everything that makes it nobody's."""
        path = str(body["path"])
        if not self.compiling.is_lock(path):
            raise Refused("%s is no lock in a compile cache of this run" % path)
        busy = self.compiling.compiler_of(self.ranks.living())
        if busy:
            raise Refused("%s is left: %s" % (path, busy))

        self.tasks.call(
            lambda: remove_stale(path), REMOVE_S,
            lambda ok, text: self.outcome(command_id, ok, text), "removing a lock")

    def run_check(self, command_id: str, body: Dict[str, Any]) -> None:
        """Has the job's own paths written to and read back, as the user who will write there."""
        paths = [str(path) for path in body["paths"]][:PATHS_MAX]
        # What the job itself has yet to make is asked for where it would be made.
        new = ["--new", self.state.checkpoint_dir] if self.state.checkpoint_dir in paths else []
        command, environ = own_module("holdfast.agent.checks.paths", self.link.environ)
        self.tasks.command(
            [*command, *new, *paths], environ, PATHS_S,
            lambda ok, text: self.outcome(command_id, ok, text), "writing to %s" % " ".join(paths))

    def inject(self, command_id: str, body: Dict[str, Any]) -> None:
        """Injects a fault into a rank of the caller's own run."""
        fault, number = str(body["fault"]), int(body["rank"])
        process = self.ranks.by_rank().get(number)
        if process is None or process.ended is not None:
            raise Refused("rank %d does not run" % number)
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        if fault in signals:
            os.kill(process.child.pid, signals[fault])
        elif fault in ("stall", "exception", "hold-gil", "skip-collective"):
            process.channel.send({"t": "inject", "fault": fault, "args": body.get("args") or {}})
        else:
            raise Refused("no fault %r: kill, stop, stall, exception, hold-gil, skip-collective"
                          % fault)
        self.outcome(command_id, True)


def labels_in(body: Dict[str, Any]) -> Optional[List[List[str]]]:
    """This node's labels of an order to start, bounded; None where it says nothing of any."""
    if body.get("labels") is None:
        return None
    return [[str(name)[:LABEL_MAX], str(text)[:LABEL_MAX]]
            for name, text in body["labels"][:LABELS_MAX]]


def taken(descriptor: int) -> bool:
    """Whether the kernel gives this file's locks, of both kinds, to us: nobody holds one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # EAGAIN and EACCES: held; ENOLCK: this file system does not know
        return False
    return True


def remove_stale(path: str) -> str:
    """Unlinks a plain old file of this user, at this very place.  Whoever may make folders in a
    shared cache can put a link in the place of one: the file behind it is somebody's work."""
    folder, name = os.path.split(path)
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        true = os.readlink("/proc/self/fd/%d" % opened)
        if true != folder:
            raise Refused("%s is left: its folder is %s by its true name" % (path, true))
        found = os.stat(name, dir_fd=opened, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise Refused("%s is no plain file of this user" % path)
        age_s = time.time() - found.st_mtime
        if age_s < LOCK_STALE_S:
            raise Refused("%s is %d s old: somebody may hold it" % (path, age_s))
        with open(os.open(name, HOW, dir_fd=opened), "rb+") as file:
            # Held until it is gone, so that nobody takes it in between.
            if os.fstat(file.fileno()).st_ino != found.st_ino or not taken(file.fileno()):
                raise Refused("%s is left: a living process holds it" % path)
            os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)
    return "removed, %d s old" % age_s
