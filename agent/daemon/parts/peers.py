"""This node among the others: where they are, what they are told, and what follows from their word.

Owns the address document, the cluster's token, and what is done at once because it is a fact and no
decision: a launcher hears where its generation's store is, and that its generation is broken
elsewhere.  Who plans what is the core's.
"""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from holdfast.worker import addresses

from ...config import store as store_address
from ...config.settings import PEERS_PORT
from ...config.store import read_password
from ...core.checks import node_tests
from ...core.model import (
    TRAINER,
    UNREADABLE,
    Beat,
    Decision,
    Doc,
    Documents,
    StoreView,
    StoreWrite,
    run_subject,
)
from ...core.model.subject import ADDRESS
from ...core.nodes import check_reports, fleet_baseline
from ...core.nodes import identity as identities
from ...core.run import fences
from ...core.run.members import read_plan
from ...launchers.server import LauncherServer
from ...peers import remembered
from ...peers.beats import Address, Peers
from ...peers.choice import LINES_MAX
from ...peers.conversation import PING_S, Endpoint, Told
from ...store import identity
from ...store.base import Conflict, Store, StoreError
from ...system import procfs
from ...system.errors import say
from ...system.side_thread import SideThread
from ..state import AgentState

TOKEN_FILE = "cluster.token_file"
TOKEN = "cluster-token"
PUBLISH_S = 1.0  # between two tries
LOOK_S = 10.0  # between two looks at who is gone
AWAY_S = 0.5  # behind a start; a store that answers later has the same token but for accidents
FORGOTTEN_AT_ONCE = 16
AWAY_LONG_S = 7 * 86400.0
OF_A_NODE = (identities.PREFIX.rstrip("/"), check_reports.KIND, fleet_baseline.KIND,
             node_tests.KIND)
KNOW_S, KNOW_MOST_S = 1 / 160, 2.0  # for each connection, and between two looks at them all
RUNS_MAX = 32  # private agents of one node, the newest
ENDED_WELL = 0


class Place(msgspec.Struct, frozen=True, omit_defaults=True):
    """Body of address/NODE.  A node has an agent of its own, or a private one for each run: those
    stand in `runs`, the newest of them above as well, where an older release looks for it."""

    host: str
    port: int
    instance: str  # of the agent: another one under the same name is another node
    runs: dict[str, Place] = {}  # run -> its private agent, the newest last


def read_place(body: bytes) -> Place | None:
    try:
        return msgspec.json.decode(body, type=Place)
    except UNREADABLE:
        return None


def published(known: Place | None, mine: Place, run: str) -> Place:
    """The node's document once it says where this agent listens.

    `run`: the one that a private agent serves, "" for the node's own.  Only what says otherwise of
    this very agent is changed, so that several agents of a node come to rest.
    """
    before = known.runs if known is not None else {}
    if run and known is not None and before.get(run) == mine:
        return known
    # Whoever listened here before, under another run's name, has ended.
    runs = {name: one for name, one in before.items()
            if name != run and (one.host, one.port) != (mine.host, mine.port)}
    runs |= {run: mine} if run else {}
    return msgspec.structs.replace(mine, runs=dict(list(runs.items())[-RUNS_MAX:]))


class PeerPart:
    """The part that talks with the other agents."""

    name = "peers"

    def __init__(
        self, state: AgentState, store: Store, launchers: LauncherServer,
        wake: Callable[[str], None], on_error: Callable[[str, BaseException | str], None],
        run: str = "",
    ) -> None:
        """`run`: the only one that this agent serves."""
        self._run = run
        self._state, self._store, self._launchers = state, store, launchers
        self._wake, self._on_error = wake, on_error
        self.instance = secrets.token_hex(8)
        self.peers = Peers(state.name, self.instance, self,
                           lambda: self._state.config.detect.lease_s, on_error)
        cluster = state.config.cluster
        self.host, self._port = own_address(state.config.store.url, cluster.listen)
        try:
            self._token_of_file = (
                read_password(cluster.token_file, TOKEN_FILE) if cluster.token_file else "")
        except ValueError as error:
            raise StoreError(str(error)) from error
        self._endpoints: dict[str, Endpoint] = {}  # run -> what its launcher here was told last
        self._left: dict[str, int] = {}  # run -> generation that its launcher was told to leave
        self._docs: object = None
        self._away_s: dict[str, float] = {}  # nodes without an address -> since when
        self._away_of: object = None  # the documents in which they were looked for
        self._places: dict[str, Address] = {}
        folder = Path(state.config.agent.state_dir)
        self._file, self._side_thread = folder / remembered.FILE, SideThread("peers")
        known = identity.read_known(folder / identity.FILE, writes=False)
        self._by = f"{os.getppid()} {procfs.boot_id()}" if state.is_private else ""
        self._remembered = remembered.read(
            self._file, known.cluster_id if known.cluster == state.config.store.cluster else "",
            self._by)
        self._unkept = False  # the file is not as it should be
        self._recalled = False  # the places are the remembered ones
        self._token_of = ""  # id of the cluster whose token it holds
        self._of: object = None  # what else the choice of nodes followed from
        self._said: set[tuple[str, str]] = set()  # run, which node is refused and why
        self.answer: Callable[[str, Any], Awaitable[dict[str, Any]]] = _no_answer

    # ------------------------------------------------------------- life

    async def run(self) -> None:
        self.peers.token = await self._token()
        bound = await self.peers.listen(self.host, self._port)
        say(f"node {self._state.name} listens for the other nodes at {self.host}:{bound}")
        if bound != self._port and self._port and not self._state.is_private:
            self._on_error("peers", f"{self.host}:{self._port} is taken: the others reach this "
                           f"node at port {bound}, which a firewall may cut, and which is another "
                           "one after each start: set cluster.listen to a free port")
        try:
            await self._stay(Place(self.host, bound, self.instance))
        finally:
            await self.peers.close()

    async def _stay(self, place: Place) -> None:
        published_s = looked_s = knew_s = 0.0
        self._docs = self._of = None  # behind a crash of this part there is no connection any more
        while True:
            view, now_s = self._store.view(), time.monotonic()
            is_due = now_s - published_s > PUBLISH_S
            # Where thousands begin at once each of them changes the documents.
            rest_s = min(KNOW_MOST_S, len(self.peers.lines) * KNOW_S)
            if (is_due or view.docs is not self._docs) and now_s - knew_s > rest_s:
                knew_s = now_s
                self._know(view)
            if is_due:
                published_s = now_s
                await self._publish(place)
                await self._keep_token()
                self._remember(view)
                self._say_refused()
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                await self._forget_gone()
                self.peers.forget(self.peers.addresses)
            await asyncio.sleep(PING_S)
            self.peers.tick()

    def _know(self, view: StoreView) -> None:
        """Where the others are, and which of them this node keeps in touch with."""
        runs = frozenset(self._launchers.runs())
        heard = frozenset((beat.node, beat.run) for beat in self.peers.heard() if beat.run in runs)
        leaders = frozenset(lease.holder for lease in view.leases if lease.run in runs)
        of = runs, heard, leaders
        if view.docs is self._docs and of == self._of:
            return
        if view.docs is not self._docs:
            self._places = places(view.docs, self._run)
            self._recalled = not view.up and not self._places  # begun while the store is away
            if self._recalled:
                self._places = self._remembered.places
        before = self.peers.choice
        sharing = frozenset(self._places) if self._recalled else mates(runs, view, heard)
        self.peers.know(self._places, sharing)
        self._docs, self._of, self._unkept = view.docs, of, True
        now = self.peers.choice
        if bool(now.left_out) != bool(before.left_out):
            say(f"node {self._state.name} is in touch with {len(now.wanted)} of "
                f"{len(self.peers.addresses)} other nodes"
                + (": none of its runs is on the others" if now.left_out else ""))
        if now.missing and not before.missing:
            self._on_error("peers", f"{now.missing} nodes that share a run with this one are one "
                           f"too many: {LINES_MAX} are the most, and of the others no word comes. "
                           "Run over fewer nodes")

    def _remember(self, view: StoreView) -> None:
        """For the next start, which may be while the store is away."""
        if not (self._unkept and view.up and view.cluster):
            return
        token = "" if self._token_of_file or not self.peers.token.isascii() \
            else self.peers.token.decode()
        near = {name: self._places[name] for name in sorted(self.peers.choice.wanted)
                if name in self._places}
        found = remembered.Remembered(view.cluster, self._by, token, near)

        def kept(done: asyncio.Future[None]) -> None:
            if done.cancelled() or done.exception() is not None:
                self._unkept = True  # it is tried again; others tell of the disk
            else:
                self._remembered = found

        self._unkept = False
        if found != self._remembered:
            self._side_thread.do("peers", functools.partial(
                remembered.write, self._file, found)).add_done_callback(kept)

    async def _forget_gone(self) -> None:
        """Takes away the addresses of nodes that are long gone, or a cluster whose nodes come and
        go would dial the dead for ever.  One that holds its name in the store is cut off from this
        node alone; and one that comes back says anew where it is."""
        if not self._store.view().up:
            return
        present = self._store.present()
        gone = [name for name in self.peers.long_silent() if name not in present]
        for name in gone[:FORGOTTEN_AT_ONCE]:
            doc = self._doc(f"{ADDRESS}/{name}")
            if doc.body:
                await self._do(self._store.delete(doc.key, doc.version))
        await self._forget_documents(present)

    async def _forget_documents(self, present: Collection[str]) -> None:
        """Takes away what nodes without an address wrote of themselves, once they were away for as
        long as this agent has watched: in a cluster of which nodes come and go by ever new names
        every agent would keep all of it.  What excludes a node stays."""
        docs, now_s = self._store.view().docs, time.monotonic()
        if docs is not self._away_of:
            self._away_of, here = docs, {name for name, _ in docs.of(ADDRESS)}.union(present)
            away = {name for kind in OF_A_NODE for name, _ in docs.of(kind)} - here
            self._away_s = {name: self._away_s.get(name, now_s) for name in away}
        long_ago_s = now_s - AWAY_LONG_S
        gone = sorted(name for name, since_s in self._away_s.items() if since_s < long_ago_s)
        for name in gone[:FORGOTTEN_AT_ONCE]:
            for doc in [docs.get(f"{kind}/{name}") for kind in OF_A_NODE]:
                if doc.version:
                    await self._do(self._store.delete(doc.key, doc.version))

    def _say_refused(self) -> None:
        """To the terminals here: a launcher would wait for such a node, or for its own, in silence.
        """
        refused = self.peers.refused()
        runs = self._launchers.runs()
        for run, why in {(run, why) for run in runs for why in refused.values()} - self._said:
            if not self._launchers.order(run, {"t": "say", "text": why, "level": "warn"}):
                self._said.add((run, why))
        self._said = {(run, why) for run, why in self._said
                      if run in runs and why in refused.values()}

    async def _token(self) -> bytes:
        """The file's, else one that the store keeps: whoever may read the store is of the cluster.
        """
        if self._token_of_file:
            return self._token_of_file.encode()
        begun_s = time.monotonic()
        while True:
            found = self._doc(TOKEN)
            if found.body:
                self._token_of = self._store.view().cluster
                return found.body
            if self._store.view().up:
                await self._put(StoreWrite(TOKEN, 0, secrets.token_hex(32).encode()))
            elif self._remembered.token and time.monotonic() - begun_s > AWAY_S:
                self._token_of = self._remembered.cluster
                return self._remembered.token.encode()
            await asyncio.sleep(PUBLISH_S / 4)

    async def _keep_token(self) -> None:
        """A store that came back empty and was seeded gets this agent's token again; where another
        was quicker, its one holds.  Else who starts anew would be a stranger to the others."""
        view = self._store.view()
        if self._token_of_file or not view.up:
            return
        found = self._doc(TOKEN).body
        if not found and view.cluster == self._token_of:
            await self._put(StoreWrite(TOKEN, 0, self.peers.token))
        elif found:
            self._token_of = view.cluster
            if found != self.peers.token:
                self.peers.change_token(found)
                self._docs = None

    async def _publish(self, place: Place) -> None:
        """Says in the store where this agent listens, as often as it says otherwise."""
        key = f"{ADDRESS}/{self._state.name}"
        known = self._doc(key)
        before = read_place(known.body)
        wanted = published(before, place, self._run)
        if self._store.view().up and before != wanted:
            await self._put(StoreWrite(key, known.version, msgspec.json.encode(wanted)))

    def _doc(self, key: str) -> Doc:
        return self._store.view().docs.get(key)

    async def _put(self, write: StoreWrite) -> None:
        await self._do(self._store.put(write))

    async def _do(self, change: Awaitable[object]) -> None:
        try:
            await change
        except Conflict:
            return  # somebody was first: the watch brings what is there
        except (StoreError, TimeoutError) as error:
            self._on_error("peers", error)

    # ------------------------------------------------------------- telling

    def tell(self, decision: Decision) -> None:
        """This step's beats, with where the stores of this node are."""
        endpoints = []
        for session in self._launchers.sessions():
            found = session.levels.endpoint
            if found is not None:
                endpoints.append(Endpoint(
                    session.hello.run, found.generation, found.host, found.port))
        known = tuple(map(fences.known, decision.plans))
        self.peers.tell(Told(decision.beats, tuple(endpoints), known))

    def answered_s(self, node: str, run: str, generation: int) -> float:
        """See Peers.answered_s."""
        return self.peers.answered_s(node, run, generation)

    def placed(self, run: str, fields: dict[str, object]) -> dict[str, object]:
        """An order to start, with this node's place among those of its plan."""
        body = fields["body"]
        assert isinstance(body, dict)
        for plan in self._state.snapshot.decision.plans:
            if (plan.run, plan.generation) != (run, body["generation"]):
                continue
            nodes = list(dict.fromkeys(node for _, node in sorted(plan.ranks)))
            if self._state.name in nodes:
                place = {"group": nodes.index(self._state.name), "groups": len(nodes)}
                return {**fields, "body": {**body, **place}}
        return fields

    def launcher_came(self, run: str) -> None:
        """Another connection has heard nothing yet."""
        self._left.pop(run, None)
        served = self._launchers.runs()
        self._endpoints = {one: told for one, told in self._endpoints.items()
                           if one in served and one != run}
        self._order_endpoint(run)

    # ------------------------------------------------------------- hearing

    def heard(self) -> tuple[Beat, ...]:
        return self.peers.heard()

    def beats_came(self, told: Told, is_news: bool) -> None:
        for endpoint in told.endpoints:
            self._order_endpoint(endpoint.run)
        for beat in told.beats:
            if is_broken(beat):
                self._leave(beat.run, beat.generation)
        if is_news:
            self._wake("beat")

    def nodes_lost(self, nodes: frozenset[str]) -> None:
        for node in sorted(nodes):
            say(f"{node} is lost: this node and another hear nothing of it, nor does its kernel "
                "answer")
        self._store.avoid(frozenset(self.peers.hosts_lost()))
        for plan in self._state.snapshot.decision.plans:
            if any(node in nodes for _, node in plan.ranks):
                self._leave(plan.run, plan.generation)
        self._wake("nodes lost or back")

    async def asked(self, node: str, question: Any) -> dict[str, Any]:
        return await self.answer(node, question)

    def _order_endpoint(self, run: str) -> None:
        endpoint = self.peers.endpoint(run) if self._launchers.session(run) is not None else None
        if endpoint is not None and endpoint != self._endpoints.get(run):
            self._endpoints[run] = endpoint
            self._launchers.order(run, {"t": "endpoint", **msgspec.to_builtins(endpoint)})

    def _leave(self, run: str, generation: int) -> None:
        """The generation cannot go on: ranks here that wait for the others need not wait."""
        session = self._launchers.session(run)
        if session is None or session.hello.grade != TRAINER or not generation:
            return
        if session.levels.generation != generation or self._left.get(run) == generation:
            return
        if not self._launchers.order(run, {"t": "leave", "generation": generation}):
            self._left[run] = generation


async def _no_answer(node: str, question: Any) -> dict[str, Any]:
    return {"refused": "this agent is only just beginning"}


def is_broken(beat: Beat) -> bool:
    """Whether a rank there has left the generation, or ended otherwise than well."""
    return any(rank.generation == beat.generation and (
        rank.parked is not None or (rank.ended is not None and rank.ended.code != ENDED_WELL))
        for rank in beat.ranks)


def places(docs: Documents, run: str = "") -> dict[str, Address]:
    """Where each node's agent listens, by the store's documents: for a private agent of `run` its
    peers of that run, and agents of nodes.  One of another run is none: each would speak for its
    node in the other's place."""
    found = {}
    for node, doc in docs.of(ADDRESS):
        place = docs.decoded(doc.key, _place_of)
        if place is None:
            continue
        newest = (place.host, place.port)
        private = any((one.host, one.port) == newest for one in place.runs.values())
        if run in place.runs:
            place = place.runs[run]
        elif run and private:
            continue
        found[node] = Address(place.host, place.port)
    return found


def mates(
    runs: Collection[str], view: StoreView, heard: Collection[tuple[str, str]]
) -> frozenset[str]:
    """The nodes that share one of these runs: those of its plan, those with an agent of their own
    for it, those whose beats of it came (node, run), and who leads it.  A launcher that comes is
    heard of by that one first, who answers it from then on and writes the plan that names all."""
    if not runs:
        return frozenset()
    found = {node for node, run in heard if run in runs}
    found.update(lease.holder for lease in view.leases if lease.run in runs)
    for run in runs:
        plan = view.docs.decoded(run_subject(run), read_plan)
        found.update((*plan.members, *plan.spares) if plan is not None else ())
    for node, doc in view.docs.of(ADDRESS):
        place = view.docs.decoded(doc.key, _place_of)
        if place is not None and not place.runs.keys().isdisjoint(runs):
            found.add(node)
    return frozenset(found)


def _place_of(doc: Doc) -> Place | None:
    return read_place(doc.body)


def own_address(url: str, listen: str) -> Address:
    """This node's for the others: the setting's, else the one that routes to the store."""
    if listen:
        return Address(addresses.host_of(listen), int(listen.rpartition(":")[2]))
    routes = [addresses.route_to(addresses.host_of(one.partition("://")[2]))
              for one in store_address.parse(url).endpoints]
    routes = [one for one in routes if one]
    far = [one for one in routes if not one.startswith("127.")]
    return Address((far or routes or [addresses.LOOPBACK])[0], PEERS_PORT)

