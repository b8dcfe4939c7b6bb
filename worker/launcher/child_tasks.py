"""Short-lived children of the launcher that answer through a pipe: evidence, listings, deletions.

Owns their deadline and their output's limit.  The launcher's loop never waits for one: a child
that hangs (a dead mount, a stopped process) is killed and its answer is an error; one that cannot
be killed is left behind and said.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, Optional

from . import forking
from .forking import Child

OUTPUT_LIMIT = 200_000
# Of 5 ms each.  A child that has answered has only its memory to give back; one that was killed is
# gone within microseconds, or in state D for as long as its mount is dead.
REAP_TRIES, REAP_TRIES_KILLED = 200, 20
Done = Callable[[bool, str], None]


class ChildTask:
    """One running child and whom to tell."""

    def __init__(self, child: Child, reader: int, deadline_s: float, done: Done, what: str) -> None:
        self.child, self.reader, self.deadline_s = child, reader, deadline_s
        self.done, self.what = done, what
        self.output = b""

    def fileno(self) -> int:
        return self.reader

    def read(self) -> bool:
        """Takes what has arrived; True once the child has closed its end."""
        piece = os.read(self.reader, 65536)
        self.output = (self.output + piece)[:OUTPUT_LIMIT]
        return not piece


class ChildTasks:
    """All running tasks; the owner polls their descriptors."""

    def __init__(self) -> None:
        self.running: List[ChildTask] = []
        self.left: List[int] = []  # pids that did not die when they were killed (state D)
        self.on_open: Callable[[ChildTask], None] = lambda task: None
        self.on_close: Callable[[ChildTask], None] = lambda task: None

    def command(
        self, argv: List[str], environ: Dict[str, str], timeout_s: float, done: Done, what: str
    ) -> Optional[ChildTask]:
        """Runs a command; `done(ok, stdout or problem)` comes later."""
        reader, writer = os.pipe()
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.DEVNULL,
                env=environ, start_new_session=True)
        except OSError as error:
            os.close(reader)
            done(False, "%s: %s" % (what, error))
            return None
        finally:
            os.close(writer)
        process.returncode = 0  # reaped here, not by subprocess
        return self.add(Child(process.pid, -1), reader, timeout_s, done, what)

    def call(
        self, body: Callable[[], Any], timeout_s: float, done: Done, what: str
    ) -> Optional[ChildTask]:
        """Runs a function of this interpreter in a forked child; its result travels as JSON."""
        reader, writer = os.pipe()
        launcher = os.getpid()

        def child() -> None:
            forking.become_child(launcher, writer, signal.SIG_DFL)
            with os.fdopen(writer, "w") as pipe:
                try:
                    json.dump({"ok": body()}, pipe)
                except Exception as error:  # the border of a process: the problem is the answer
                    json.dump({"error": "%s: %s" % (type(error).__name__, error)}, pipe)
            os._exit(0)

        forked = forking.fork(child)
        os.close(writer)

        def answer(ok: bool, text: str) -> None:
            try:
                result = json.loads(text) if ok else {"error": text}
            except ValueError:
                result = {"error": "%s gave no answer" % what}
            done("error" not in result, result.get("error") or json.dumps(result["ok"]))

        return self.add(forked, reader, timeout_s, answer, what)

    def add(self, child: Child, reader: int, timeout_s: float, done: Done, what: str) -> ChildTask:
        task = ChildTask(child, reader, time.monotonic() + timeout_s, done, what)
        self.running.append(task)
        self.on_open(task)
        return task

    def tend(self, now_s: float) -> None:
        """Ends what is overdue, and reaps what could not be ended before."""
        self.left = [pid for pid in self.left if forking.reap(pid) is None]
        for task in list(self.running):
            if now_s >= task.deadline_s:
                self.finish(task, overdue=True)

    def finish(self, task: ChildTask, overdue: bool = False) -> None:
        """Reaps the child and tells its caller."""
        self.running.remove(task)
        self.on_close(task)  # whoever polls it must forget the number before it is another's
        os.close(task.reader)
        if overdue:
            for kill in (os.killpg, os.kill):  # its session, and itself if it has none yet
                try:
                    kill(task.child.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    continue
        status = self.reap(task.child, REAP_TRIES_KILLED if overdue else REAP_TRIES)
        text = task.output.decode("utf-8", "replace")
        if overdue:
            task.done(False, "%s took too long and was ended" % task.what)
        else:
            # One that has said everything and is slow to go, as on a busy machine, has answered.
            answered = status in (0, None)
            task.done(answered, text if answered else "%s failed" % task.what)

    def reap(self, child: Child, tries: int) -> Optional[int]:
        """The child's exit code; None: it is not gone yet, and is reaped when it is."""
        if child.pidfd >= 0:
            os.close(child.pidfd)
        for _ in range(tries):
            status = forking.reap(child.pid)
            if status is not None:
                return status[0]
            time.sleep(0.005)
        self.left.append(child.pid)
        return None

    def end_all(self) -> None:
        for task in list(self.running):
            task.done = lambda ok, text: None
            self.finish(task, overdue=True)
