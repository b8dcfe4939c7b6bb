"""How ranks and store children come to be: forked warm, or spawned when a fork is not safe.

Owns the fork server's rules.  The launcher's process has one thread and never runs an operation,
a collective or a store: a child forked after one multi-threaded operation hangs for ever in its
first one.  Before every fork that is checked, not believed; when it does not hold, ranks are
spawned and import for themselves, and one line says so.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Callable, Dict, List, NamedTuple, Optional, Tuple

from .. import exits
from ..addresses import LOOPBACK
from ..rank import rank as ranks
from ..rank.rank import Program, Seat

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
KEPT = "HOLDFAST_USER_"  # the user's own thread settings, across the launcher's re-exec
BACKLOG = 1024

HERE = os.path.dirname(os.path.abspath(__file__))
BOOTSTRAP = os.path.join(os.path.dirname(HERE), "bootstrap.py")


def single_threaded_environ(
    environ: Dict[str, str], quiet: bool = False
) -> Optional[Dict[str, str]]:
    """The environment to re-exec under before torch is imported; None when already under it.

    OpenBLAS starts its threads while numpy is imported, unless told not to before.  `quiet` hides
    torch's C++ warnings (the trainer's DDP options are chosen, not a mistake).
    """
    if environ.get(KEPT + "SET"):
        return None
    changed = dict(environ)
    for name in THREAD_VARIABLES:
        if name in environ:
            changed[KEPT + name] = environ[name]
        changed[name] = "1"
    changed[KEPT + "SET"] = "1"
    if quiet:
        changed.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return changed


def user_environ(environ: Dict[str, str]) -> Dict[str, str]:
    """The environment as the caller gave it, before the re-exec."""
    users = {k: v for k, v in environ.items() if not k.startswith(KEPT)}
    if environ.get(KEPT + "SET"):
        for name in THREAD_VARIABLES:
            users.pop(name, None)
            if KEPT + name in environ:
                users[name] = environ[KEPT + name]
    return users


def preload(names: List[str]) -> List[str]:
    """Imports what every rank would import; returns one line for each that failed."""
    problems = []
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # any module of the user's may raise anything on import
            problems.append("preload %s: %s: %s" % (name, type(error).__name__, error))
    # What is imported lives to the end: a collection in a child would copy all of its pages.
    gc.collect()
    gc.freeze()
    return problems


def has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def why_not_fork() -> str:
    """Why a fork of this process would not be safe now; "" when it is."""
    tasks = len(os.listdir("/proc/self/task"))
    if tasks != 1:
        return "%d threads run in the launcher after the preload" % tasks
    torch = sys.modules.get("torch")
    if torch is not None:
        cuda = getattr(torch, "cuda", None)
        if cuda is not None and cuda.is_initialized():
            return "the preload has opened the accelerator"
    if "torch_xla" in sys.modules:
        return "torch_xla does not survive a fork"
    return ""


class Child(NamedTuple):
    """A process of ours: its pid and, where the kernel offers one, its pidfd (else -1)."""

    pid: int
    pidfd: int


def open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def flush() -> None:
    """What Python holds back of this process's own output: a preloaded module may have printed."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # nobody reads it any more


def fork(body: Callable[[], None]) -> Child:
    """Forks; the child runs `body` and never returns into the launcher's stack."""
    flush()
    pid = os.fork()
    if pid == 0:
        try:
            body()
        except BaseException:  # the border of a process: nothing may reach the launcher's loop
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return Child(pid, open_pidfd(pid))


def close_others(keep: List[int]) -> None:
    """Closes every inherited descriptor but the standard streams and `keep`."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number not in keep:
            try:
                os.close(number)
            except OSError:
                continue  # the directory listing's own descriptor


def become_child(launcher: int, keep: int, on_signal: signal.Handlers) -> None:
    """A forked child of the launcher that is no rank: alone with one descriptor, in a session of
    its own, dying with the launcher, which answers the caller's signals."""
    close_others([keep])
    os.setsid()
    ranks.prctl(ranks.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(1)
    for number in (*ranks.END_SIGNALS, signal.SIGCHLD):
        signal.signal(number, on_signal)


def fork_rank(program: Program, seat: Seat) -> Child:
    """A warm rank: everything preloaded is there, nothing has run."""

    def body() -> None:
        close_others([seat.page_fd, seat.control_fd])
        ranks.settle(seat)
        ranks.run(program, seat)

    return fork(body)


def spawn_rank(program: Program, seat: Seat) -> Child:
    """A cold rank: a new interpreter that imports for itself."""
    launch = json.dumps({"program": program._asdict(), "seat": seat._asdict()})
    reader = os.memfd_create("holdfast-launch", os.MFD_CLOEXEC)  # a pipe holds 64 KiB, environ more
    try:
        os.write(reader, launch.encode())
        os.lseek(reader, 0, os.SEEK_SET)
        fds = (seat.page_fd, seat.control_fd, reader)
        process = subprocess.Popen(
            [sys.executable, BOOTSTRAP, "rank", str(reader)], pass_fds=fds, env=seat.environ,
            stdin=subprocess.DEVNULL,
        )
    finally:
        os.close(reader)
    process.returncode = 0  # reaped by the launcher's own loop, not by subprocess
    return Child(process.pid, open_pidfd(process.pid))


def spawn_command(program: Program, seat: Seat) -> Child:
    """`--no-python`: an opaque command with its own files and the death signal."""

    def body() -> None:
        close_others([])
        ranks.settle(seat)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            os.execvpe(program.target, [program.target, *program.argv], os.environ)
        except OSError as error:
            os.write(2, ("holdfast: %s: %s\n" % (program.target, error.strerror)).encode())
            os._exit(exits.NOT_EXECUTABLE)

    return fork(body)


class StoreChild(NamedTuple):
    """One generation's TCPStore server in a process of its own (pid 0: an endpoint, and the store
    is another node's, or there is none)."""

    child: Child
    port: int
    host: str = LOOPBACK


def start_store(port: int = 0, host: str = LOOPBACK) -> StoreChild:
    """Forks a store that listens at `host` alone; torch by itself would listen everywhere.

    The socket is bound here, so the port is known and may be connected to before the child, which
    may have to import torch first, has begun to serve.  Raises OSError when the port is taken.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        what = "--master-port %d" % port if port else "no store at %s" % host
        raise OSError(error.errno, "%s: %s" % (what, error.strerror)) from None
    number = sock.getsockname()[1]
    launcher = os.getpid()

    def body() -> None:
        become_child(launcher, sock.fileno(), signal.SIG_IGN)
        serve_store(sock.detach(), host, number)

    try:
        return StoreChild(fork(body), number, host)
    finally:
        sock.close()


def serve_store(listener: int, host: str, port: int) -> None:
    """Hosts the store until killed.  Its threads are this child's own."""
    from torch.distributed import TCPStore

    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener)
    while store:
        signal.pause()


def children() -> "set[int]":
    """This process's children by the kernel's list; empty where the kernel keeps none."""
    try:
        with open("/proc/self/task/%d/children" % os.getpid()) as file:
            return {int(word) for word in file.read().split()}
    except OSError:
        return set()


def free_port() -> int:
    """A port nobody listens on now, for jobs without torch's store."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def reap(pid: int) -> Optional[Tuple[int, int]]:
    """(exit status, signal) of a child that has ended, None while it runs."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0, 0
    if done == 0:
        return None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return exits.SIGNAL_BASE + number, number
    return os.WEXITSTATUS(status), 0
