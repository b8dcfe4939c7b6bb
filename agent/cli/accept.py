"""`holdfast accept`: starts launchers here for the same user's `holdfast run --on` on other nodes.

Owns those launchers: each is a child of this process, so with this user's rights and no others, and
is asked to end when it dies.  What is to be started comes from this node's agent, to which other
nodes' agents brought it.
"""

from __future__ import annotations

import argparse
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from holdfast.worker.exits import FAILED
from holdfast.worker.peers import user_name

from .child import die_with_parent
from .client import Agent, Stranger, node_socket, owned
from .start_on import is_carried
from .text import Failure, harmless

OURS = (sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "holdfast.agent.cli")
ROUTE = "/api/v1/starts/next"
WAIT_S = 5.0  # of one question
AGAIN_S = 1.0  # after an agent that did not answer
LATE_S = 10.0  # of an agent that is busy, beside the wait
OTHER_S = 8.0  # in which another `holdfast accept` that was ended is known to have gone
KEPT_MAX = 32  # launchers that have ended
END_S = 3600.0  # for launchers at the end; each ends its ranks within its own grace


class Launchers:
    """What was started here, the newest last."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.told: dict[str, dict[str, Any]] = {}

    def start(self, order: dict[str, Any]) -> None:
        """Once for each order, however often it comes."""
        id, run = str(order["id"]), str(order["run"])
        if id in self.told:
            return
        row = self.told[id] = {"id": id, "run": run, "state": "running", "code": 0, "text": ""}
        # What this shell was started with is not the job's: another virtual environment, say.
        environ = {name: text for name, text in os.environ.items() if not is_carried(name)}
        try:
            process = subprocess.Popen(
                [*OURS, order["command"], *order["arguments"]], cwd=order["folder"],
                env=environ | order["environment"], stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._refuse(row, f"{where}{error.strerror}")
        except (ValueError, TypeError, subprocess.SubprocessError) as error:
            self._refuse(row, f"not to be started: {error}")
        else:
            row["text"] = f"pid {process.pid}"
            self.running[id] = process
            say(f"run {run}: started, for {order['by']}, pid {process.pid}")

    def _refuse(self, row: dict[str, Any], why: str) -> None:
        row |= {"state": "refused", "text": harmless(why)[:500]}
        say(f"run {row['run']}: not started: {row['text']}")

    def end(self, id: str) -> None:
        if id in self.running:
            self.running[id].send_signal(signal.SIGTERM)

    def reap(self) -> bool:
        """Whether one has ended since."""
        over = {id: one.returncode for id, one in self.running.items() if one.poll() is not None}
        for id, code in over.items():
            del self.running[id]
            status = code if code >= 0 else 128 - code
            self.told[id] |= {"state": "ended", "code": status}
            say(f"run {self.told[id]['run']}: its launcher here ended with {status}")
        for old in [one for one in self.told if one not in self.running][:-KEPT_MAX]:
            del self.told[old]
        return bool(over)


class Line(threading.Thread):
    """Asks the agent for orders, again and again, and tells it what is here."""

    def __init__(self, agent: Agent, launchers: Launchers) -> None:
        super().__init__(daemon=True)
        self._agent, self._launchers = agent, launchers
        self._life, self._count = secrets.token_hex(8), 0
        self._lock = threading.Lock()
        self.orders: queue.SimpleQueue[dict[str, Any] | Failure] = queue.SimpleQueue()
        self._silent = self._answered = False
        self._until_s = time.monotonic() + OTHER_S

    def body(self, wait_s: float) -> dict[str, Any]:
        with self._lock:
            self._count += 1
            return {"life": self._life, "count": self._count, "wait_s": wait_s,
                    "runs": [dict(one) for one in list(self._launchers.told.values())]}

    def tell(self) -> None:
        """At once; where the agent is away, the next question tells it."""
        try:
            self._agent.post(ROUTE, self.body(0.0))
        except (OSError, Failure):
            return

    def run(self) -> None:
        while True:
            try:
                said = self._agent.post(ROUTE, self.body(WAIT_S))
                if self._silent:
                    say("the agent answers again")
                self._silent, self._answered = False, True
                for order in said["orders"]:
                    self.orders.put(order)
            except Stranger as stranger:
                return self.orders.put(stranger)
            except (OSError, LookupError, TypeError, Failure) as error:
                # Later it may be an agent in trouble, and here are launchers.
                if isinstance(error, Failure) and not (
                        self._answered or time.monotonic() < self._until_s):
                    return self.orders.put(error)
                if not self._silent and self._answered:
                    say(f"the agent does not answer: {error}; asked again every second")
                    self._silent = True
                time.sleep(AGAIN_S)


def say(text: str) -> None:
    print(f"holdfast: {harmless(text)}", file=sys.stderr, flush=True)


def accept(options: argparse.Namespace) -> int:
    """Until SIGTERM or Ctrl-C, which end what was started here as well."""
    path = node_socket(os.environ)
    owned(path, os.environ)
    if not path.exists():
        raise Failure(f"no agent answers at {path}: runs come by the node's agent, "
                      "`systemctl start holdfast`", FAILED)
    ends: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as `nohup` has it
            signal.signal(number, lambda got, _: ends.append(got))
    launchers = Launchers()
    line = Line(Agent(path, WAIT_S + LATE_S), launchers)
    line.start()
    say(f"accepts runs of {user_name(os.getuid())} from other nodes; Ctrl-C ends that, and them")
    problem: Failure | None = None
    while not ends and problem is None:
        problem = _once(line, launchers, 0.1)
    return _left(line, launchers, problem)


def _once(line: Line, launchers: Launchers, wait_s: float) -> Failure | None:
    try:
        order = line.orders.get(timeout=wait_s)
    except queue.Empty:
        order = {}
    if isinstance(order, Failure):
        return order
    try:
        if order.get("do") == "start":
            launchers.start(order)
        elif order.get("do") == "end":
            launchers.end(str(order["id"]))
    except (LookupError, TypeError) as error:
        say(f"not understood, from an agent of another release perhaps: {error}")
    if launchers.reap() or order:
        line.tell()
    return None


def _left(line: Line, launchers: Launchers, problem: Failure | None) -> int:
    for id in list(launchers.running):
        launchers.end(id)
    until_s = time.monotonic() + END_S
    while launchers.running and time.monotonic() < until_s:
        launchers.reap()
        time.sleep(0.1)
    line.tell()
    if problem is not None:
        raise problem
    return 0
