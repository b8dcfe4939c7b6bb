"""`holdfast accept`: starts launchers here for the same user's `holdfast run --on` on other nodes.

Owns those launchers: each is a child of this process, so with this user's rights and no others, and
is asked to end when it dies.  What is to be started comes from this node's agent, to which other
nodes' agents brought it.  An order is kept on disk (kept_orders.py) until its launcher has ended
under the eyes of this process: whose launcher the node's end or this process's own took away is
started again once the agent says that its run goes on elsewhere, and not before.
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
from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.worker.exits import FAILED
from holdfast.worker.peers import user_name

from ..daemon.attempts import GOES_ON, HERE, OVER, RUNS_MAX
from ..daemon.starts import Order
from ..system import procfs
from ..system.systemd import is_going_down
from .child import die_with_parent
from .client import Agent, Stranger, node_socket, owned
from .kept_orders import Kept, KeptOrders
from .start_on import is_carried
from .text import Failure, harmless

OURS = (sys.executable, "-I" if sys.flags.isolated else "-P", "-m", "holdfast.agent.cli")
ROUTE, STILL = "/api/v1/starts/next", "/api/v1/starts/still"
WAIT_S = 5.0  # of one question
AGAIN_S = 1.0  # after an agent that did not answer
LATE_S = 10.0  # of an agent that is busy, beside the wait
OTHER_S = 8.0  # in which another `holdfast accept` that was ended is known to have gone
KEPT_MAX = 32  # launchers that have ended
SEEN_S = 600.0  # a launcher that runs is written down as seen this often
LOOK_S, LEARN_S = 1.0, 10.0  # between questions where something waits, and where all is known
STILL_S = 5.0  # of such a question, for which the agent asks others
SERVED_S = 10.0  # in which an agent knows that a launcher is gone, and asks others
CLOCK_S = 3600.0  # for this machine's clock to be set
END_S = 3600.0  # for launchers at the end; each ends its ranks within its own grace


class Launchers:
    """What was started here, the newest last, and what waits to be started again."""

    def __init__(self, orders: KeptOrders | None = None) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.told: dict[str, dict[str, Any]] = {}
        self.kept: dict[str, Kept] = {}  # of what runs or waits
        # Started again, and not yet seen to be of the attempt that it was started for: where that
        # one ends meanwhile, a launcher would begin another one.
        self.unsure: set[str] = set()
        self.served_s: dict[str, float] = {}  # since when another launcher is told to serve it
        self._orders = orders
        self._boot_id, self._since_s = procfs.boot_id(), time.monotonic()
        found = orders.load() if orders is not None else []
        newest = {(one.order.run, one.node): one for one in found}  # a home may be two nodes'
        for one in found:
            id, run = one.order.id, one.order.run
            self.kept[id] = one
            if newest[run, one.node] is not one:
                self._drop(id)
                continue
            self.told[id] = {"id": id, "run": run, "state": "queued", "code": 0,
                             "text": "kept from before: waits for word that the run goes on"}
            say(f"run {run}: its launcher here was lost; starts again once it is known that the "
                "run goes on")

    def waiting(self) -> list[str]:
        return [id for id in self.kept if id not in self.running]

    def start(self, order: dict[str, Any]) -> None:
        """Once for each order, however often it comes."""
        id, run = str(order["id"]), str(order["run"])
        if id in self.told:
            return
        for old in self.waiting():
            if self.kept[old].order.run == run or len(self.kept) >= RUNS_MAX:
                self.give_up(old, f"{order['by']} starts another one")
        self.told[id] = {"id": id, "run": run, "state": "running", "code": 0, "text": ""}
        try:
            kept = Kept(msgspec.convert({key: value for key, value in order.items()
                                         if key != "do"}, Order), 0.0)
        except msgspec.ValidationError as error:
            say(f"run {run}: its order is not kept, and not carried out again: {error}")
        else:
            self.kept[id] = kept
        self._begin(id, order, again=False)

    def start_again(self, id: str) -> None:
        """A kept order, of which it is known that its run goes on."""
        self.unsure.add(id)
        self._begin(id, msgspec.to_builtins(self.kept[id].order), again=True)

    def _begin(self, id: str, order: dict[str, Any], again: bool) -> None:
        kept, row = self.kept.get(id), self.told[id]
        if kept is not None:
            kept.begins(self._boot_id, time.time(), again)
            if not self._write(kept) and again:
                # Else a job that fills the disk and ends the node would be started for ever.
                return self._refuse(id, "that it was started again cannot be written down")
        # What this shell was started with is not the job's: another virtual environment, say.
        environ = {name: text for name, text in os.environ.items() if not is_carried(name)}
        try:
            process = subprocess.Popen(
                [*OURS, order["command"], *order["arguments"]], cwd=order["folder"],
                env=environ | order["environment"], stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=die_with_parent)
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            self._refuse(id, f"{where}{error.strerror}")
        except (ValueError, TypeError, subprocess.SubprocessError) as error:
            self._refuse(id, f"not to be started: {error}")
        else:
            row |= {"state": "running", "text": f"pid {process.pid}"}
            self.running[id] = process
            say(f"run {row['run']}: started{' again' * again}, for {order['by']}, pid "
                f"{process.pid}")
            if kept is not None:
                kept.runs(process.pid)
                self._write(kept)

    def _write(self, kept: Kept) -> bool:
        return self._orders is None or self._orders.write(kept)

    def _drop(self, id: str) -> None:
        self.unsure.discard(id)
        self.served_s.pop(id, None)
        kept = self.kept.pop(id, None)
        if kept is not None and self._orders is not None:
            self._orders.drop(kept)

    def _refuse(self, id: str, why: str) -> None:
        row = self.told[id]
        row |= {"state": "refused", "text": harmless(why)[:500]}
        say(f"run {row['run']}: not started: {row['text']}")
        self._drop(id)

    def give_up(self, id: str, why: str) -> None:
        """An order that waited is not carried out any more."""
        row = self.told[id]
        row |= {"state": "refused", "text": harmless(f"not started again: {why}")[:500]}
        say(f"run {row['run']}: {row['text']}")
        self._drop(id)

    def end(self, id: str) -> None:
        if id in self.running:
            self.running[id].send_signal(signal.SIGTERM)
        elif id in self.kept:
            self.give_up(id, "somebody has ended it")

    def reap(self, keeps: bool = False) -> bool:
        """Whether one has ended since.  `keeps`: this node goes down, which ends no order."""
        over = {id: one.returncode for id, one in self.running.items() if one.poll() is not None}
        for id, code in over.items():
            del self.running[id]
            status = code if code >= 0 else 128 - code
            self.told[id] |= {"state": "ended", "code": status}
            say(f"run {self.told[id]['run']}: its launcher here ended with {status}")
            if not keeps:
                self._drop(id)
        for old in [one for one in self.told if one not in self.running
                    and one not in self.kept][:-KEPT_MAX]:
            del self.told[old]
        return bool(over)

    # ------------------------------------------------------------- what becomes of kept orders

    def learn(self, word: dict[str, Any]) -> bool:
        """Takes the agent's word of the runs: which attempt each is that runs here, and what is to
        become of those that wait.  Whether anything began or was given up."""
        node, changed = str(word["node"]), False
        for id, kept in list(self.kept.items()):
            said = word["runs"].get(kept.order.run)
            if said is None:
                continue
            state, attempt, text = str(said["state"]), int(said["attempt"]), str(said["text"])
            if id in self.unsure:
                self._see(id, kept, state, attempt, text)
            elif id in self.running:
                self._note(kept, node, attempt if state == HERE else 0)
            elif kept.node in (node, ""):
                changed = self._settle(id, kept, state, text) or changed
            else:  # a home may be several nodes', and the name of their hosts as well
                say(f"run {kept.order.run}: its order is {kept.node}'s, and is left to it")
                del self.kept[id], self.told[id]
        return changed

    def _note(self, kept: Kept, node: str, attempt: int) -> None:
        now_s = time.time()
        known = (kept.node, kept.attempt) == (node, attempt) or not attempt
        if not known or now_s - kept.seen_wall_s > SEEN_S:
            kept.node, kept.attempt = node, attempt or kept.attempt
            kept.seen_wall_s = now_s
            self._write(kept)

    def _see(self, id: str, kept: Kept, state: str, attempt: int, text: str) -> None:
        """What became of a run while its launcher here was on its way."""
        if state == OVER:
            say(f"run {kept.order.run}: its launcher here is ended again: {text}")
            self.end(id)
        elif state == HERE and attempt == kept.attempt:
            self.unsure.discard(id)

    def _settle(self, id: str, kept: Kept, state: str, text: str) -> bool:
        now_s = time.time()
        if kept.is_alive(self._boot_id, now_s):
            return self._wait(id, "its launcher of before is still on its way out")
        if kept.is_early(now_s) and time.monotonic() - self._since_s < CLOCK_S:
            return self._wait(id, "this machine's clock is not set yet")
        if state != HERE:
            self.served_s.pop(id, None)
        why = kept.given_up(now_s)
        if not why and state == OVER:
            why = text
        if not why and state == HERE:
            served = "another launcher serves it here"
            since_s = self.served_s.setdefault(id, time.monotonic())
            if time.monotonic() - since_s < SERVED_S:
                return self._wait(id, served)
            why = served
        if why:
            self.give_up(id, why)
        elif state == GOES_ON:
            say(f"run {kept.order.run}: {text}")
            self.start_again(id)
        else:
            return self._wait(id, text)
        return True

    def _wait(self, id: str, why: str) -> bool:
        row, text = self.told[id], harmless(f"waits to be started again: {why}")[:500]
        if row["text"] != text:
            row["text"] = text
            say(f"run {row['run']}: {text}")
        return False

    def question(self) -> dict[str, Any]:
        """What the agent is to be asked: of runs here, which attempt they are."""
        asked = {kept.order.run: 0 if id in self.running and id not in self.unsure
                 else kept.attempt for id, kept in self.kept.items()}
        return {"runs": [{"run": run, "attempt": number} for run, number in asked.items()]}

    def look_s(self) -> float:
        """How long until the agent is to be asked again; a learnt attempt seldom changes."""
        is_known = not self.unsure and all(
            id in self.running and kept.attempt for id, kept in self.kept.items())
        return LEARN_S if is_known else LOOK_S


class Line(threading.Thread):
    """Asks the agent for orders, again and again, and tells it what is here."""

    def __init__(self, agent: Agent, launchers: Launchers) -> None:
        super().__init__(daemon=True)
        self._agent, self._launchers = agent, launchers
        self._life, self._count = secrets.token_hex(8), 0
        self._lock = threading.Lock()
        self.orders: queue.SimpleQueue[dict[str, Any] | Failure] = queue.SimpleQueue()
        self.answered = self._silent = False
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

    def ask_still(self) -> dict[str, Any] | None:
        """What the agent knows of the runs here; None where it does not tell now.  Only who is
        heard by it as this user's one `holdfast accept` asks."""
        if not self.answered:
            return None
        try:
            found = self._agent._replace(timeout_s=STILL_S).post(
                STILL, self._launchers.question())
            return dict(found)
        except (OSError, Failure, TypeError, ValueError):
            return None  # the other thread says why, where it lasts

    def run(self) -> None:
        while True:
            try:
                said = self._agent.post(ROUTE, self.body(WAIT_S))
                if self._silent:
                    say("the agent answers again")
                self._silent, self.answered = False, True
                for order in said["orders"]:
                    self.orders.put(order)
            except Stranger as stranger:
                return self.orders.put(stranger)
            except (OSError, LookupError, TypeError, Failure) as error:
                # Later it may be an agent in trouble, and here are launchers.
                if isinstance(error, Failure) and not (
                        self.answered or time.monotonic() < self._until_s):
                    return self.orders.put(error)
                if not self._silent and self.answered:
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
    launchers = Launchers(KeptOrders(os.environ, say))
    line = Line(Agent(path, WAIT_S + LATE_S), launchers)
    line.start()
    say(f"accepts runs of {user_name(os.getuid())} from other nodes; Ctrl-C ends that, and them")
    problem: Failure | None = None
    looked_s = -LEARN_S
    while not ends and problem is None:
        problem = _once(line, launchers, 0.1, ends)
        if not ends and launchers.kept and time.monotonic() - looked_s > launchers.look_s():
            _look(line, launchers)
            looked_s = time.monotonic()
    return _left(line, launchers, problem)


def _once(
    line: Line, launchers: Launchers, wait_s: float, ends: Sequence[int] = ()
) -> Failure | None:
    try:
        order = line.orders.get(timeout=wait_s)
    except queue.Empty:
        order = {}
    if ends:  # by what the launchers may have been asked to end too: `_left` knows whether they did
        return None
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


def _look(line: Line, launchers: Launchers) -> None:
    """What becomes of the orders that are kept."""
    word = line.ask_still()
    try:
        if word is not None and launchers.learn(word):
            line.tell()
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        say(f"not understood, from an agent of another release perhaps: {error}")


def _left(line: Line, launchers: Launchers, problem: Failure | None) -> int:
    for id in list(launchers.running):
        launchers.end(id)
    keeps = bool(launchers.running) and is_going_down()  # by which a node is rebooted, say
    until_s = time.monotonic() + END_S
    while launchers.running and time.monotonic() < until_s:
        launchers.reap(keeps)
        time.sleep(0.1)
    line.tell()
    if problem is not None:
        raise problem
    return 0
