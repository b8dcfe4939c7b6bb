"""One rank's process from the fork to os._exit.

Owns what happens between `fork` and the user's first line, and between the user's last line and
the end: threads, random generators, signal handlers, standard streams, `__main__`, outcome.  It
never decides anything about the run.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.machinery
import io
import os
import random
import runpy
import signal
import socket
import sys
import types
from typing import Any, Dict, List, NamedTuple, Optional

from .. import elastic
from .. import page as pages
from ..wire import Channel
from . import hooks, outcome
from .ticker import Ticker

PR_SET_PDEATHSIG = 1
PR_SET_PTRACER = 0x59616D61
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk, quota, limit on a file's size
# By these a launcher is asked to end (launcher/ending.py).  Its children must answer none of them
# as it does.
END_SIGNALS = (signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT,
               signal.SIGHUP)


class Program(NamedTuple):
    """What the ranks run."""

    kind: str  # script | module | command
    target: str
    argv: List[str]
    trainer: bool = False
    hooks: bool = True
    tap: bool = False  # of a script's collectives; the trainer's are always timed


class Seat(NamedTuple):
    """What one process is given to run the program with."""

    page_fd: int
    control_fd: int
    stdout: str  # path, opened O_APPEND
    stderr: str
    environ: Dict[str, str]
    launcher_pid: int
    threads: int  # torch threads; 0 = leave alone
    rank: int  # -1 for a standby
    generation: int


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)


def settle(seat: Seat) -> None:
    """Makes the fresh process its own: session, death signal, streams, signals, environment."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_PTRACER, seat.launcher_pid)
    if os.getppid() != seat.launcher_pid:
        os._exit(1)  # the launcher died before the death signal was set
    for number in (*END_SIGNALS, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.set_wakeup_fd(-1)
    os.environ.clear()
    os.environ.update(seat.environ)
    os.environ.pop("NOTIFY_SOCKET", None)
    redirect(seat.stdout, seat.stderr)


def make_home(home: str) -> None:
    """The folder of a rank's logs, as open to others as the run's is."""
    try:
        mode = os.stat(os.path.dirname(home)).st_mode & 0o777
    except OSError:
        mode = 0o700  # somebody took it away
    os.makedirs(home, mode=mode, exist_ok=True)


def point(number: int, path: str) -> None:
    """Makes the descriptor append to a rank's file, which is as open to others as its folder."""
    is_closed = not os.stat(os.path.dirname(path)).st_mode & 0o077
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600 if is_closed else 0o644)
    os.dup2(fd, number)
    os.close(fd)


class RankLog(io.FileIO):
    """A rank's own file.  Nobody asked for it to be kept where it is, so that what it has no room
    for is lost, and the training that printed it goes on."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return len(memoryview(data).cast("B"))


def redirect(stdout: str, stderr: str) -> None:
    """Points the streams at the rank's own files, appended to, line by line."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for path, number in ((stdout, 1), (stderr, 2)):
        if path:
            point(number, path)
    sys.stdin = open(0, closefd=False)
    for name, number in (("stdout", 1), ("stderr", 2)):
        raw = RankLog(number, "wb", closefd=False)
        stream = io.TextIOWrapper(
            io.BufferedWriter(raw), errors="backslashreplace", line_buffering=True)
        setattr(sys, name, stream)
        setattr(sys, "__%s__" % name, stream)


def reseed() -> None:
    """A fork copies the generators: without this all ranks would draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.seed()


def attach_worker(seat: Seat) -> elastic.Worker:
    fields = pages.map_fields(seat.page_fd)
    fields[pages.F_PID] = os.getpid()
    if seat.rank >= 0:
        fields[pages.F_RANK] = seat.rank
        fields[pages.F_GENERATION] = seat.generation
    channel = Channel(socket.socket(fileno=seat.control_fd))
    worker = elastic.Worker(fields, channel)
    ticker = Ticker(fields, channel, worker.on_packet)
    worker.ticker = ticker
    elastic.attach(worker)
    return worker


def run(program: Program, seat: Seat) -> None:
    """Runs the program in this process; does not return."""
    worker = attach_worker(seat)
    if seat.threads and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(seat.threads)
    reseed()
    if program.trainer or program.hooks:
        worker.ticker.each_beat.append(worker.gradients.each_beat)
    if program.trainer or program.tap:
        worker.ticker.each_beat.append(worker.collectives.each_beat)
    if program.trainer:
        worker.ticker.each_beat.append(worker.each_beat)
        worker.switch_phase(pages.PHASES.index("startup"))
        files = (seat.stdout, seat.stderr)
        worker.assigned_hooks.append(lambda a: own_files(a, files))
    elif program.hooks:
        hooks.install(worker)
    worker.ticker.start()
    error = call(program)
    word, code = ("done", 0) if error is None else outcome.of_exception(error)
    if error is not None:
        outcome.show(error)
        outcome.write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), seat.rank, error)
        worker.send_flight()
    outcome.leave(worker.fields, word, code)


def own_files(assignment: elastic.Assignment, files: "tuple[str, str]") -> None:
    """A standby that becomes a rank, or a rank that becomes another, goes on in that one's files.
    """
    folder = os.path.dirname(os.path.dirname(files[0]))
    home = os.path.join(folder, "rank-%d" % assignment.rank)
    make_home(home)
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        point(number, os.path.join(home, name))


def call(program: Program) -> Optional[BaseException]:
    """Runs the user's code as `__main__`; the exception that left it, if any."""
    sys.argv = [program.target, *program.argv]
    try:
        if program.kind == "module":
            if not program.trainer:  # ours has nothing to find in the folder it was started in
                sys.path.insert(0, os.getcwd())
            run_module(program.target)
        else:
            run_script(program.target)
    except BaseException as error:  # the border of the process: everything becomes an outcome
        return error
    return None


def run_module(name: str) -> None:
    """`python -m NAME` in this process.  Raises ImportError where no such module can be run.

    runpy itself says that by sys.exit with a text, as a script may say anything: but no later start
    finds the module either, while one of a script may end otherwise.
    """
    try:
        runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]
    except SystemExit as end:
        missing = end.__context__
        if isinstance(missing, runpy._Error):  # type: ignore[attr-defined]
            raise ImportError(str(missing)) from None
        raise


def run_script(path: str) -> None:
    """`python PATH` in this process, with a real `__main__` so that pickling finds it.

    Its names are those that the interpreter gives: the file's by its absolute path (since 3.9, as
    it was typed behind the current folder), its folder by its true one.
    """
    if os.path.isdir(path) or path.endswith(".zip"):
        runpy.run_path(path, run_name="__main__")
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    path = os.path.join(os.getcwd(), path)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    main = types.ModuleType("__main__")
    main.__file__ = path
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__["__builtins__"] = __builtins__
    main.__dict__["__cached__"] = None
    sys.modules["__main__"] = main
    exec(code, main.__dict__)
