"""The launcher's line to the agent: find one or start a private one, and never lose it for long.

Owns the agent socket and the private agent's process.  The agent may die, freeze, be upgraded or
be missing altogether: no rank notices, this module connects again and the launcher repeats its
levels.  It decides nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple, Optional, Tuple

from ..peers import Stranger, check_peer
from ..stderr import say
from ..wire import Channel

NODE_SOCKET = "/run/holdfast/agent.sock"
RETRY_S = 0.2
RESTART_S = 1.0  # least time between two starts of a private agent
PAUSE_MAX_S = 60.0
END_WAIT_S = 3.0
LINGER_S = 8.0  # of an agent whose store the other nodes may still have to read
WORDS = 600  # characters of its last line
SUN_PATH = 107
ROOM_BYTES = 1 << 20  # of a private agent's journal and store; they grow slowly


class Places(NamedTuple):
    """Where this run's agent listens and what it writes to."""

    socket: str
    runtime_dir: str
    state_dir: str
    private: bool


def places(run: str, environ: Dict[str, str], nnodes: int = 1) -> Places:
    """The node agent's places when one listens, else those of a private agent of this run.

    Of a run over nodes each has a state folder of its own, RUN@HOST: they may share a home.

    HOLDFAST_RUNTIME_DIR is a wish for a private one: a test of a new release, a demonstration or a
    debugged run is to touch nothing that the node's agent keeps.  It passes one by aloud."""
    state = environ.get("HOLDFAST_STATE_DIR") or os.path.join(
        environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), "holdfast"
    )
    state = os.path.join(
        state, "runs", run if nnodes == 1 else "%s@%s" % (run, os.uname().nodename))
    override = environ.get("HOLDFAST_RUNTIME_DIR")
    if not override and node_agent_answers(environ):
        return Places(NODE_SOCKET, os.path.dirname(NODE_SOCKET), state, private=False)
    if override and os.path.exists(NODE_SOCKET):
        say("holdfast: HOLDFAST_RUNTIME_DIR is set: this run has an agent of its own, and the "
            "node's, at %s, sees nothing of it" % NODE_SOCKET)
    base = override or environ.get("XDG_RUNTIME_DIR") or "/tmp/holdfast-%d" % os.getuid()
    if not override and not environ.get("XDG_RUNTIME_DIR"):
        own_directory(base)
    runtime = os.path.join(base, run) if override else os.path.join(base, "holdfast", run)
    path = os.path.join(runtime, "agent.sock")
    if len(path) > SUN_PATH:
        raise OSError(
            errno.ENAMETOOLONG, "the agent's socket path is longer than %d characters; set "
            "HOLDFAST_RUNTIME_DIR to a shorter folder" % SUN_PATH, path)
    return Places(path, runtime, state, private=True)


def prove_room(where: Places) -> None:
    """Raises OSError, with the path, where this run's state would find no room: it is better not
    started than started without agent, journal and logs."""
    private_folder(where.state_dir)
    path = os.path.join(where.state_dir, "room-%d" % os.getpid())
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, ROOM_BYTES if where.private else ROOM_BYTES >> 4)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "%s: make room, or set HOLDFAST_STATE_DIR" % os.strerror(error.errno)
            raise OSError(error.errno, why, where.state_dir) from None
    finally:
        os.close(fd)
        os.unlink(path)


def own_directory(path: str) -> None:
    """Makes `path` for this user alone.  Raises PermissionError when another user could write
    there: whoever owns the folder of the agent's socket could answer in the agent's place."""
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(errno.EACCES, "not a folder of yours alone; remove it, or set "
                              "XDG_RUNTIME_DIR", path)


def private_folder(path: str) -> None:
    """Makes `path` for this user alone, with what is missing above it; one of this user's that is
    there already is closed to others.  What jobs print and what became of them is kept below."""
    above = os.path.dirname(path)
    if above and not os.path.isdir(above):
        private_folder(above)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        status = os.stat(path)
        if status.st_uid == os.getuid() and status.st_mode & 0o077:
            os.chmod(path, 0o700)


def connect(path: str, environ: Dict[str, str]) -> Optional[Channel]:
    """The line to the agent behind `path`; None when nobody answers, Stranger for a foreign one."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(path)
        check_peer(sock, path, environ)
    except OSError:
        sock.close()
        return None
    except Stranger:
        sock.close()
        raise
    return Channel(sock, well_formed=True)


def node_agent_answers(environ: Dict[str, str]) -> bool:
    """Whether this node has an agent that may be trusted; a foreign one is said and passed by."""
    try:
        channel = connect(NODE_SOCKET, environ)
    except Stranger as stranger:
        say("holdfast: %s: this run starts an agent of its own" % stranger)
        return False
    if channel is not None:
        channel.close()
    return channel is not None


def own_module(name: str, environ: Dict[str, str]) -> Tuple[List[str], Dict[str, str]]:
    """The command that runs a module of Holdfast's in its own interpreter, and its environment.

    Neither the current folder (-P) nor the job's PYTHONPATH enter it: another user's file named
    asyncio in a shared folder would run as whoever starts a run there, and a project's own module
    named socket would leave the run without an agent.  Of PYTHONPATH only folders stay through
    which Holdfast itself is found, where nothing is installed; of another interpreter's not even
    these.
    """
    python = environ.get("HOLDFAST_PYTHON") or sys.executable
    hidden = ["PYTHONPATH"]
    kept = []
    if os.path.realpath(python) == os.path.realpath(sys.executable):
        entries = environ.get("PYTHONPATH", "").split(os.pathsep)
        kept = [os.path.abspath(entry) for entry in entries
                if entry and os.path.isdir(os.path.join(entry, *name.split(".")[:2]))]
    else:
        hidden.append("PYTHONHOME")
    own = {key: value for key, value in environ.items() if key not in hidden}
    if kept:
        own["PYTHONPATH"] = os.pathsep.join(kept)
    return [python, "-P", "-m", name], own


class AgentLink:
    """Connects, reconnects and, for a private agent, starts it again."""

    def __init__(
        self, run: str, where: Places, environ: Dict[str, str], rendezvous: str = ""
    ) -> None:
        """`rendezvous`: of a run over nodes, where its store is when nobody has set one up."""
        self.run, self.rendezvous = run, rendezvous
        self.where = where
        self.environ = environ
        self.channel: Optional[Channel] = None
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.tried_s = 0.0
        self.started_s = 0.0
        self.lost_s = time.monotonic()
        self.problem = ""
        self.code: Optional[int] = None  # that the private agent ended with last
        self.pause_s = RESTART_S

    def start_private(self) -> None:
        """Starts this run's own agent, in a session of its own, under Holdfast's interpreter."""
        private_folder(self.where.state_dir)
        self.started_s = time.monotonic()
        os.makedirs(self.where.runtime_dir, mode=0o700, exist_ok=True)
        command, environ = own_module("holdfast.agent", self.environ)
        command += ["--private", "--run", self.run, "--state", self.where.state_dir,
                    "--runtime", self.where.runtime_dir]
        if self.rendezvous:
            command += ["--rendezvous", self.rendezvous]
        config = self.environ.get("HOLDFAST_CONFIG")
        if config:
            command += ["--config", config]
        name = os.path.join(self.where.state_dir, "agent.log")
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        with open(descriptor, "ab") as log:
            os.fchmod(descriptor, 0o600)  # one of an earlier release
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, env=environ, close_fds=True,
            )

    def tend(self) -> bool:
        """Brings the line back when it is down; True when it has just come up."""
        if self.channel is not None:
            return False
        now = time.monotonic()
        if now - self.tried_s < RETRY_S:
            return False
        self.tried_s = now
        try:
            self.channel = connect(self.where.socket, self.environ)
        except Stranger as stranger:
            self.problem = str(stranger)
            return False
        if self.channel is not None:
            self.pause_s = RESTART_S
            return True
        gone = self.process is None or self.process.poll() is not None
        if self.where.private and gone and now - self.started_s >= self.pause_s:
            if self.process is not None:
                self.code = self.process.returncode
                self.problem = "the private agent ended with %s: %s" % (
                    self.process.returncode, self.last_words())
                self.pause_s = min(PAUSE_MAX_S, 2 * self.pause_s)
            try:
                self.start_private()
            except OSError as error:
                # No agent is no reason to lose a rank: it is tried again, less and less often.
                self.problem, self.pause_s = str(error), min(PAUSE_MAX_S, 2 * self.pause_s)
        return False

    def last_words(self) -> str:
        try:
            with open(os.path.join(self.where.state_dir, "agent.log"), "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
                lines = log.read().decode("utf-8", "replace").strip().splitlines()
        except OSError:
            return "it left no log"
        return lines[-1][:WORDS] if lines else "it left no log"

    def drop(self) -> None:
        if self.channel is not None:
            self.channel.close()
        self.channel = None
        self.lost_s = time.monotonic()

    def pids(self) -> List[int]:
        return [self.process.pid] if self.process is not None else []

    def end(self, code: int) -> None:
        """Says goodbye, and sees a private agent out."""
        heard = self.channel is not None
        if self.channel is not None:
            self.channel.send({"t": "bye", "code": code})
            self.channel.close()
            self.channel = None
        if self.process is None:
            return
        # One that was never greeted, or is gone, knows of no end to wait for.
        for number in (0, signal.SIGTERM, signal.SIGKILL)[0 if heard else 1:]:
            if number:
                self.process.send_signal(number)
            try:
                self.process.wait(END_WAIT_S if number or not self.rendezvous else LINGER_S)
                return
            except subprocess.TimeoutExpired:
                continue
