"""Calls functions in children that may hang, crash, print, eat memory or leave processes behind.

Owns the borders of such a child: a session of its own, a deadline, a limit of memory and of output,
and the end of everything that it started.  It says what became of each call and raises nothing for
what a call does.  Standard library of Python 3.9 alone: it also runs beside torch, in the Python
that has it (torch_entry.py), where nothing else of Holdfast is.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

ANSWER_MAX_BYTES = 4 << 20
KILL_WAIT_S = 0.5  # what is still there after this hangs in the kernel
POLL_S = 0.02
ROUNDS_MAX = 20  # of killing what is started while others are killed
HELD: list[int] = []  # descriptors of locks that this process holds for whoever called it
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


class Call(NamedTuple):
    """One function in a child.  It writes its lines of JSON to the descriptor that it is given,
    and may become another program, which writes them there."""

    name: str
    function: Callable[[int], None]
    deadline_s: float
    memory_bytes: int = 0  # beyond what this process has now; 0: no limit
    output_bytes: int = 1 << 20
    lock: str = ""  # a file that is held while it runs, by whatever is left of it as well
    # Asked when another one's run of it was waited for: what is left to be called.
    left: Callable[[], Call | None] | None = None


class Event(NamedTuple):
    """A line that a call wrote, or, with `ended`, what became of it: `problem` is "" when it ended
    by itself, in time and in order, or when nothing of it was left to be called.  With a problem
    and without `begun` it was never called."""

    name: str
    value: Any = None
    ended: bool = False
    problem: str = ""
    took_s: float = 0.0
    begun: bool = True


def answering(function: Callable[[], Any]) -> Callable[[int], None]:
    """A call of a function that returns its one answer."""

    def call(descriptor: int) -> None:
        write_line(descriptor, function())

    return call


def write_line(descriptor: int, value: Any) -> None:
    text = json.dumps(value).encode() + b"\n"
    while text:
        text = text[os.write(descriptor, text):]


def run_all(calls: Iterable[Call], at_once: int) -> Iterator[Event]:
    """Runs the calls, `at_once` of them at a time, each taken when there is a place for it; whoever
    stops listening ends them all.  This process must have one thread, since it forks."""
    # What a dead call started becomes a child of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = set(_children_of(os.getpid()))
    waiting: Iterator[Call] | None = iter(calls)
    running: list[_Child] = []
    try:
        while waiting is not None or running:
            while waiting is not None and len(running) < at_once:
                call = next(waiting, None)
                if call is None:
                    waiting = None
                    break
                running.append(_Child(call))
                yield from _started(running[-1], running)
            for child in list(running):
                yield from _started(child, running)
            watched = [one for child in running for one in child.open]
            if watched:
                select.select(watched, (), (), POLL_S)
            elif running:
                time.sleep(POLL_S / 4)
            for child in list(running):
                for value in child.read():
                    yield Event(child.call.name, value)
                ended = child.ended(before | {one.pid for one in running})
                if ended is not None:
                    yield from _over(child, ended, running)
    finally:
        for child in running:
            if child.pid:
                end_tree(child.pid)
            child.close()
        if running:
            _end_strays(before)  # one may have started something in the moment of its end


def _started(child: _Child, running: list[_Child]) -> Iterator[Event]:
    """Starts it, unless it runs or has to wait."""
    ended = child.start()
    if ended is not None:
        yield from _over(child, ended, running)


def _over(child: _Child, ended: Event, running: list[_Child]) -> Iterator[Event]:
    """Its last events; then whoever waits for its lock may find what the listener made of them."""
    running.remove(child)
    try:
        for value in child.lines:
            yield Event(child.call.name, value)
        yield ended
    finally:
        child.close()


class _Child:
    """One call while it runs."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.pid = 0
        self.open: list[int] = []
        self.lines: list[Any] = []
        self._answer = self._output = self._lock = -1
        self._rest = b""
        self._read_bytes = {"answer": 0, "output": 0}
        self._tail = b""
        self._problem = ""
        self._left = 0
        self._begin_s = time.monotonic()
        self._waited_s = 0.0

    def start(self) -> Event | None:
        """What became of it already, for instance that it cannot be started; None while it waits
        or runs."""
        if self.pid:
            return None
        if self.call.lock:
            try:
                self._lock = _locked(self.call.lock)
            except BlockingIOError:
                self._waited_s = time.monotonic() - self._begin_s
                return None if self._waited_s <= self.call.deadline_s else self._not_begun(
                    "another one of it runs already, or hangs (%s)" % self.call.lock)
            except OSError as error:
                return self._not_begun("whether another one of it runs cannot be told: %s: %s" % (
                    self.call.lock, error.strerror))
        if self._waited_s and self.call.left is not None:
            left = self.call.left()
            if left is None:
                return Event(self.call.name, None, True, "", self._waited_s)
            self.call = left
        problem = self._fork()
        return self._not_begun(problem) if problem else None

    def _not_begun(self, problem: str) -> Event:
        return Event(self.call.name, None, True, problem, time.monotonic() - self._begin_s, False)

    def _fork(self) -> str:
        """Why it cannot be started; "" when it was."""
        answer = output = -1
        parent = os.getpid()
        try:
            self._answer, answer = os.pipe()
            self._output, output = os.pipe()
            self.pid = os.fork()
        except OSError as error:
            for descriptor in (answer, output):
                if descriptor >= 0:
                    os.close(descriptor)
            return "it cannot be started: %s" % error.strerror
        if self.pid == 0:
            try:
                _become(self.call, answer, output, self._lock, parent)
            finally:
                os._exit(70)
        os.close(answer)
        os.close(output)
        self.open = [self._answer, self._output]
        for descriptor in self.open:
            os.set_blocking(descriptor, False)
        return ""

    def read(self) -> list[Any]:
        """Lines that are whole; what is no JSON is a problem of the call's."""
        for which, descriptor in (("answer", self._answer), ("output", self._output)):
            most = ANSWER_MAX_BYTES if which == "answer" else self.call.output_bytes
            while descriptor in self.open and self._read_bytes[which] <= most:
                try:
                    part = os.read(descriptor, 65536)
                except BlockingIOError:
                    break
                if not part:
                    self.open.remove(descriptor)
                    break
                self._read_bytes[which] += len(part)
                if which == "answer":
                    self._rest += part
                else:
                    self._tail = (self._tail + part)[-400:]
            if self._read_bytes[which] > most and not self._problem:
                self._problem = "it wrote more than %d bytes" % most
        *whole, self._rest = self._rest.split(b"\n")
        found = []
        for line in whole:
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                self._problem = self._problem or "its answer is no JSON: %r" % line[:60]
                continue
            if isinstance(value, dict) and value.keys() == {"left"}:
                self._left = value["left"]
            elif isinstance(value, dict) and value.keys() == {"raised"}:
                self._problem = self._problem or str(value["raised"])
            else:
                found.append(value)
        return found

    def ended(self, known: set[int]) -> Event | None:
        """What became of it; None while it runs, within its limits.  `known`: children of this
        process that are no other call's leavings."""
        if not self.pid:
            return None
        late = time.monotonic() - self._begin_s > self.call.deadline_s
        status = _waited(self.pid)
        if status is None and not (late or self._read_bytes["output"] > self.call.output_bytes
                                   or self._read_bytes["answer"] > ANSWER_MAX_BYTES):
            return None
        took_s = time.monotonic() - self._begin_s
        if status is None:
            problem = self._problem or "no answer within %g s" % self.call.deadline_s
            if self._waited_s and not self._problem:
                problem += ", %.1f of which another one of it ran" % self._waited_s
            problem += self._last_words()
            if not end_tree(self.pid):
                problem += "; its process %d cannot be killed (it hangs in %s)" % (
                    self.pid, _small("/proc/%d/wchan" % self.pid) or "the kernel")
        else:
            self.lines = self.read()
            problem = self._problem
            if os.WIFSIGNALED(status):
                name = signal_name(os.WTERMSIG(status))
                problem = "it died of %s%s" % (name, self._last_words())
            elif not problem and os.WEXITSTATUS(status):
                problem = "it ended with status %d%s" % (os.WEXITSTATUS(status), self._last_words())
        _end_strays(known)
        if self._left and not problem:
            problem = "it left %d process%s behind, which %s ended" % (
                self._left, "es" if self._left > 1 else "", "were" if self._left > 1 else "was")
        return Event(self.call.name, None, True, problem, took_s)

    def _last_words(self) -> str:
        lines = self._tail.decode("utf-8", "replace").split("\n")
        said = next((one.strip() for one in reversed(lines) if one.strip()), "")
        return "; last it said: %s" % said[:160] if said else ""

    def close(self) -> None:
        for descriptor in (self._answer, self._output, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._answer = self._output = self._lock = -1


def _locked(path: str) -> int:
    """The file, held.  Raises BlockingIOError where somebody holds it, OSError where nobody can
    tell.  Another user's file is held as well as one's own, where it may be read."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except PermissionError:
        descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _become(call: Call, answer: int, output: int, lock: int, parent: int) -> None:
    """The child, until it ends."""
    os.setsid()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(70)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The parent's own may hold what it has not printed yet.
    sys.stdout, sys.stderr = (open(one, "w", buffering=1, errors="replace", closefd=False)
                              for one in (1, 2))
    if lock >= 0:
        HELD.append(lock)
        os.set_inheritable(lock, True)  # by the program that it may become
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor not in (answer, *HELD):
            try:
                os.close(descriptor)
            except OSError:
                pass  # the one that listed them
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if call.memory_bytes:
        most = int(_small("/proc/self/statm").split()[0]) * resource.getpagesize()
        most += call.memory_bytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]  # nobody but root may raise it
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    status = 0
    try:
        call.function(answer)
    except MemoryError:
        write_line(answer, {"raised": "it wants more than %d MB" % (call.memory_bytes >> 20)})
    except BaseException as error:  # border of a process: its exception is its answer
        said = "%s: %s" % (type(error).__name__, error)
        write_line(answer, {"raised": said[:500]})
    left = len(descendants(os.getpid()))
    if left:
        end_below()
        write_line(answer, {"left": left})
    os._exit(status)


def signal_name(number: int) -> str:
    """As SIGKILL; most of the real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return "signal %d" % number


def descendants(pid: int) -> set[int]:
    """Processes below this one, those apart that have ended and wait to be reaped."""
    found: set[int] = set()
    todo = [pid]
    while todo:
        for one in _children_of(todo.pop()):
            if one not in found:
                found.add(one)
                todo.append(one)
    return {one for one in found if _state_and_parent(one)[0] not in "ZX"}


def _children_of(pid: int) -> list[int]:
    """As the kernel lists them; where it was built without that, by a look at every process."""
    found: list[int] = []
    for task in _listed("/proc/%d/task" % pid):
        found += map(int, _small("/proc/%d/task/%s/children" % (pid, task), 1 << 16).split())
    if not found and not os.path.exists("/proc/self/task/%d/children" % os.getpid()):
        found = [int(one) for one in _listed("/proc")
                 if one.isdecimal() and _state_and_parent(int(one))[1] == pid]
    return found


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []  # it has ended


def _state_and_parent(pid: int) -> tuple[str, int]:
    # The name in brackets may hold anything: state and parent are the first behind it.
    fields = _small("/proc/%d/stat" % pid).rpartition(")")[2].split()
    return (fields[0], int(fields[1])) if len(fields) > 1 else ("X", 0)


def end_tree(pid: int) -> bool:
    """Kills a child and all below it; False where the child is still there."""
    _end(descendants(pid), keep=pid)
    _kill(pid)
    limit_s = time.monotonic() + KILL_WAIT_S
    while _waited(pid) is None:
        if time.monotonic() > limit_s:
            return False
        time.sleep(0.002)
    return True


def end_below() -> None:
    """Ends what this process started, and is back when it is gone."""
    _end(descendants(os.getpid()), keep=os.getpid())


def _end(found: set[int], keep: int = 0) -> None:
    """Kills them, and what they start meanwhile where `keep` names who is above them."""
    for _ in range(ROUNDS_MAX):
        for one in found:
            _kill(one)
        found = descendants(keep) if keep else set()
        if not found:
            return
        time.sleep(0.002)


def _end_strays(known: set[int]) -> None:
    """Ends what became this process's child because its starter died.  Whose it was is not told
    any more, so that it is held against nobody: its starter crashed, which is said."""
    for one in set(_children_of(os.getpid())) - known:
        if _waited(one) is None:
            end_tree(one)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _waited(pid: int) -> int | None:
    """The wait status; None while it runs."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if done else None


def _small(path: str, most: int = 4096) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
