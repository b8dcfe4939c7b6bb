"""Keeps the store of a first run over nodes, on the node that its caller named to all of them.

Owns when that etcd is started and ended, what each node says of it, and that an agent which has it
stays until the others have read how the run ended.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from ...launchers.server import LauncherServer
from ...store import own_etcd
from ...store.base import Store
from ...system import procfs
from ...system.errors import say
from ...system.side_thread import SideThread
from ..state import AgentState
from .peers import PeerPart

LOOK_S = 0.1
LINGER_S = 5.0  # for the other nodes to read how the run ended
ASK_AFTER_S = 1.0  # the store is not there: which etcd is it, if any?
SAID_AFTER_S = 5.0  # ... and the other node's start takes longer than a slow one's
WARNING = ("this node is a single point of failure for the run: it keeps the run's state in an "
           "etcd of its own at {where}, and while it is away nothing is restarted on any node. A "
           'store that outlives a node: url = "etcd://A:2379,B:2379,C:2379" under [store] on all '
           "of them (docs/cluster.md)")
WAITS = ("waiting for the node of --rdzv-endpoint {where}, which keeps the run's state and does "
         "not answer{why}")
OTHERS = ("--rdzv-endpoint {where}: the etcd of run {other} is there, not of {run}: "
          + own_etcd.ANOTHER_PORT)


class Rendezvous:
    """`place` is None for every agent whose store is set up by a person."""

    name = "rendezvous"

    def __init__(self, state: AgentState, place: own_etcd.Place | None) -> None:
        self._state, self._place = state, place
        self._folder = Path(state.config.agent.state_dir)
        self._etcd: own_etcd.OwnEtcd | None = None
        self._peers: PeerPart | None = None
        self._launchers: LauncherServer | None = None
        self._store: Store | None = None
        self._stop = asyncio.Event()
        self._unsaid: list[tuple[str, str]] = []  # (level, text) for the run's terminal
        self.refusal = ""  # why this run cannot be served here

    @property
    def makes_store(self) -> bool:
        """Whether an empty store is this node's to begin."""
        return self._place is None or bool(self._place.address)

    def open(self) -> None:
        """Before the store is.  StoreError says what this node lacks."""
        if self._place is None:
            return
        if self._place.address:
            self._etcd = own_etcd.OwnEtcd(self._place, self._folder, self._state.errors)
        is_new = own_etcd.begin_anew(self._folder, _launcher())
        if self._etcd is not None:
            self._etcd.start()
            if is_new:
                self._tell("warn", WARNING.format(where=self._place.name))

    def joined(
        self, store: Store, launchers: LauncherServer, peers: PeerPart | None, stop: asyncio.Event
    ) -> None:
        self._store, self._launchers, self._peers, self._stop = store, launchers, peers, stop

    async def run(self) -> None:
        if self._place is None:
            return
        if self._etcd is not None:
            watching = self._etcd.watch(
                lambda why: self._tell("warn", f"{why}; it is started again on the same data"))
        else:
            watching = self._wait_for_it(self._place)
        async with asyncio.TaskGroup() as group:
            group.create_task(watching)
            group.create_task(self._speak())

    def _tell(self, level: str, text: str) -> None:
        say(text)
        self._unsaid = [*self._unsaid, (level, text)][-4:]

    async def _speak(self) -> None:
        """To the run's terminal, as soon as a launcher is there."""
        while True:
            if self._unsaid and self._launchers is not None:
                level, text = self._unsaid[0]
                for run in self._launchers.runs():
                    if not self._launchers.order(run, {"t": "say", "text": text, "level": level}):
                        self._unsaid = self._unsaid[1:]
                        break
            await asyncio.sleep(LOOK_S)

    async def _wait_for_it(self, place: own_etcd.Place) -> None:
        """Until the store answers first: says for whom this node waits, and looks whether another
        run's etcd is there."""
        assert self._store is not None
        begun_s = asked_s = time.monotonic()
        asking, is_said = SideThread(self.name), False
        while not self._store.view().up and not self.refusal:
            now_s = time.monotonic()
            if now_s - asked_s > ASK_AFTER_S:
                await asking.do(self.name, lambda: self._look_at(place))
                asked_s = time.monotonic()
            if now_s - begun_s > SAID_AFTER_S and not is_said:
                is_said = True
                self._tell("warn", WAITS.format(where=place.name, why=self._why()))
            await asyncio.sleep(LOOK_S)
        await asking.close(0.0)
        if self.refusal:
            self._stop.set()
        elif is_said:
            self._tell("good", f"the node of --rdzv-endpoint {place.name} answers")

    def _look_at(self, place: own_etcd.Place) -> None:
        other = own_etcd.keeper(place)
        if other and other != place.run:
            self.refusal = OTHERS.format(where=place.name, other=other, run=place.run)

    def _why(self) -> str:
        """The network's own words, in parentheses."""
        problem = self._store.view().problem if self._store is not None else ""
        if "auth" in problem or "user name" in problem:
            return " (all nodes need the same cluster.token_file)"
        why = problem.partition("(")[2].partition(")")[0].rpartition(": ")[2]
        return f" ({why})" if why else ""

    def lingers(self, ended_for_s: float) -> bool:
        """Whether others may still have to read from the store that is here."""
        others = self._peers.peers.lines.values() if self._peers is not None else ()
        return self._etcd is not None and ended_for_s < LINGER_S and any(
            line.is_up for line in others)

    def close(self, is_over: bool) -> None:
        """`is_over`: the run has ended, and nothing of its store is left behind."""
        if self._etcd is not None:
            self._etcd.end()
        if self._place is not None and (is_over or self.refusal):
            own_etcd.forget(self._folder)


def _launcher() -> str:
    """This agent's parent, as one process: a later one of its pid began at another time."""
    pid = os.getppid()
    try:
        stat = procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat"))
    except OSError:
        stat = None
    return f"{pid} {procfs.boot_id()} {stat.start_ticks if stat is not None else 0}"
