"""The store of many nodes: documents and leases in an etcd, below one prefix for each cluster.

Owns the keys, what is known of them, the watch, leases, and which cluster this node belongs to.
How a member is asked is etcd_gateway.py's.  What cannot be known (an answer that was lost) is said
as TimeoutError, and the watch finds out.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path

import aiohttp
import msgspec

from ..config import settings
from ..core.model import Doc, Documents, Lease, StoreView, StoreWrite, subject_of
from ..core.model.subject import LEASE, RUN
from ..system import procfs
from .base import Conflict, StoreError, Traffic
from .etcd_answers import KeyValue, Result, after, b64, packed, unpacked
from .etcd_gateway import Gateway, Json, Refused, Written, open_gateway
from .etcd_leases import NAME, NAME_S, Held, Holder, boot_s, holder_of, names_in
from .etcd_listing import PAGE, everything
from .identity import CLUSTER, FILE, Known, id_of, new_mark, read_known, refusal, write_known

BODY_MAX = 1 << 20  # etcd takes 1.5 MB, and base64 adds a third
CALL_S, CLOSE_S = 4.0, 1.0  # of one question to whichever members; to let go of the node's name
LOOK_S, LOOKERS = 2.0, 2048  # a quiet store is asked this often, and by more agents less often
BEHIND_MAX = 3  # looks in a row that knew more than the watch
RETRY_LEAST_S, RETRY_MOST_S = 0.2, 3.0
RUNS_MAX, PRUNED_AT_ONCE = 2000, 50  # documents of runs; beyond it those that nobody leads may go
LEASE_LEAST_S = 2  # etcd's own least, with its usual election timeout


def look_s(agents: int) -> float:
    """Between two looks of one of so many.  A name's lease is renewed behind one, and waits."""
    return min(NAME_S / 3, LOOK_S * max(1.0, agents / LOOKERS))


class EtcdStore:
    """Documents of one cluster, see base.Store."""

    def __init__(
        self, gateway: Gateway, cluster: str, node: str, directory: Path,
        lease_s: Callable[[], float], writes: bool = True, run: str = "", makes: bool = True,
    ) -> None:
        """`writes`: may remember which cluster it found.  `makes`: and make one of an empty store.
        `run`: the only one that is served; a node may have an agent for each."""
        self._name = f"{NAME}{node} {run}".rstrip().replace("/", "_")
        self.gateway, self.cluster, self.node = gateway, cluster, node
        self.prefix = f"/holdfast/{cluster}/"
        self.traffic: Traffic | None = gateway.traffic
        self.problem = ""  # it keeps nothing on this node's disk
        self._why_down = "store: etcd was not asked yet"
        self.living: Callable[[], Collection[str]] = tuple
        self._identity_file = directory / FILE
        self._writes, self._makes = writes, writes and makes
        self.known = read_known(self._identity_file, writes)
        self.agent_id = f"{self.known.node_id}.{procfs.boot_id()}"
        self._lease_s, self._docs = lease_s, Documents()
        self._changes: dict[str, Doc | None] = {}  # since then
        self._revisions: dict[str, int] = {}  # key -> of its last change
        self._gone: dict[str, int] = {}  # key -> of its deletion, until the watch is past it
        self._holders: dict[str, bytes] = {}  # run -> value of its lease
        self._held: dict[str, Held] = {}
        self._granted: dict[str, Held] = {}  # of runs that are not known to be led by it yet
        self._revision = 0  # everything up to it is known
        self._mark = b""  # body of the document `cluster`, once it was found to be the right one
        self._up = self._is_full = False
        self._named_s = -math.inf  # when the node's name was claimed last
        self._view: StoreView | None = None
        self._listing = asyncio.Lock()

    # ------------------------------------------------------------- what is known

    def view(self) -> StoreView:
        if self._view is None:
            if self._changes:
                self._docs, self._changes = self._docs.changed(self._changes), {}
            self._view = StoreView(
                self._up, self._docs, tuple(self._leases()), self._why_down, id_of(self._mark))
        return self._view

    def _doc(self, key: str) -> Doc:
        """As it is known now; of version 0 where there is none."""
        if key in self._changes:
            return self._changes[key] or Doc(key, 0)
        return self._docs.get(key)

    def _leases(self) -> list[Lease]:
        found = []
        runs = [run for run in self._holders if not run.startswith(NAME)]
        for run in sorted(runs):
            value = self._holders[run]
            held = self._held.get(run)
            until_boot_s = held.until_boot_s if held and held.value == value else 0.0
            found.append(Lease(run, holder_of(value).node, until_boot_s))
        return found

    def present(self) -> frozenset[str]:
        return names_in(self._holders)

    def _set_up(self, problem: str = "") -> None:
        if (not problem) != self._up or problem != self._why_down:
            self._up, self._why_down, self._view = not problem, problem, None

    def _take(
        self, key: str, version: int, revision: int, body: bytes, seen_at: int = 0
    ) -> bool:
        """One key as the store has it; version 0: it is gone.  What is older than what is known
        changes nothing, unless it was still so at the later revision `seen_at`: then the store was
        put back to an older state."""
        known = self._revisions.get(key) or self._gone.get(key, 0)
        if revision == known or max(revision, seen_at) < known:
            return False
        if not version and key not in self._revisions:
            return False
        self._revisions.pop(key, None)
        self._gone.pop(key, None)
        (self._revisions if version else self._gone)[key] = revision
        kind, run, _ = subject_of(key)
        if kind == LEASE:
            if version:
                self._holders[run] = body
            else:
                self._holders.pop(run, None)
            held = self._held.get(run)
            if held is not None and (not version or body != held.value):
                del self._held[run]
        elif key == CLUSTER:
            self._mark = body if id_of(body) == id_of(self._mark) else b""
        else:
            self._changes[key] = Doc(key, version, body) if version else None
        self._view = None
        return True

    # ------------------------------------------------------------- writing

    async def put(self, write: StoreWrite) -> int:
        kind, run, _ = subject_of(write.key)
        if kind == LEASE:
            await self._lead(run, write.body, over=write.over)
            return 0
        if len(write.body) > BODY_MAX:
            raise StoreError(f"store: {write.key} is {len(write.body)} bytes long, and a document "
                             f"may have {BODY_MAX}")
        self._refuse_unknown()
        compare = self._compare(write.key, write.expect_version, write.lease)
        put = {"request_put": {"key": self._key(write.key), "value": b64(packed(write.body))}}
        revision = await self._transact(compare, [put], [write.key], write.lease)
        version = write.expect_version + 1
        self._take(write.key, version, revision, write.body)
        return version

    async def delete(self, key: str, expect_version: int) -> None:
        self._refuse_unknown()
        gone = {"request_delete_range": {"key": self._key(key)}}
        revision = await self._transact(self._compare(key, expect_version, ""), [gone], [key], "")
        self._take(key, 0, revision, b"")

    def _compare(self, key: str, version: int, lease: str) -> list[Json]:
        found: list[Json] = [{"target": "VERSION", "key": self._key(key), "version": str(version)}]
        if version and self._doc(key).version == version:
            # Deleted and written anew it has the same version, and is another document.
            found.append({"target": "MOD", "key": self._key(key),
                          "mod_revision": str(self._revisions[key])})
        if lease:
            held = self._held.get(lease)
            if held is None:
                raise self._lease_conflict(lease)
            found.append({"target": "VALUE", "key": self._key(f"{LEASE}/{lease}"),
                          "value": b64(held.value)})
        return found

    async def _transact(
        self, compare: list[Json], then: list[Json], keys: list[str], lease: str,
    ) -> int:
        """The revision of the change; Conflict when a comparison failed, with `keys` read anew.
        Nothing is written to a store that is not this cluster's."""
        keys = [*keys, *([f"{LEASE}/{lease}"] if lease else []), CLUSTER]
        if self._mark:
            compare = [*compare, {"target": "VALUE", "key": self._key(CLUSTER),
                                  "value": b64(self._mark)}]
        reads = [{"request_range": {"key": self._key(key)}} for key in keys]
        body = {"compare": compare, "success": then, "failure": reads}
        answer, is_repeated = await self._write("/v3/kv/txn", body)
        revision = answer.header.revision
        if answer.succeeded:
            return revision
        for key, response in zip(keys, answer.responses, strict=False):
            if response.response_range.kvs:
                self._take_kv(response.response_range.kvs[0], revision)
            else:
                self._take(key, 0, revision, b"")
        if not self._mark and keys[0] != CLUSTER:
            self._set_up(f"store: etcd at {self.gateway.name} changed under this node")
            raise StoreError(self._why_down)
        if is_repeated and self._is_done(compare[0], then[0], keys[0], lease):
            return self._revisions[keys[0]]
        if is_repeated:
            raise TimeoutError(f"store: {keys[0]} was written, and not known by whom")
        doc = self._doc(keys[0])
        if lease and lease not in self._held:
            raise self._lease_conflict(lease)
        raise Conflict(f"{keys[0]} is at version {doc.version}, or was written anew")

    def _lease_conflict(self, run: str) -> Conflict:
        holder = holder_of(self._holders.get(run, b"")).node or "nobody"
        return Conflict(f"lease: {holder} holds that of {run}")

    def _is_done(self, compared: Json, then: Json, key: str, lease: str) -> bool:
        """Whether an earlier try, whose answer was lost, came true.  Known only of a lease, whose
        value nobody else writes, and below one that is this node's still: nobody else could."""
        wanted = str(then.get("request_put", {}).get("value", ""))
        kind, run, _ = subject_of(key)
        if kind == LEASE:
            return b64(self._holders.get(run, b"")) == wanted
        doc = self._doc(key)
        if lease not in self._held:
            return False
        version = int(compared["version"]) + 1
        return doc.version == version and b64(packed(doc.body)) == wanted

    async def _write(self, path: str, body: Json) -> Written:
        try:
            return await self.gateway.write(path, body, CALL_S)
        except Refused as error:
            if error.is_full:
                self._is_full = True
                self._set_up(str(error))
            raise

    # ------------------------------------------------------------- leases

    async def _claim_name(self) -> None:
        """Two agents of one name would take each other's place in every plan."""
        now_s = time.monotonic()
        if not self._writes or now_s - self._named_s < NAME_S / 3:
            return
        try:
            await self._lead(self._name, self.node.encode(), NAME_S)
        except Conflict:
            value, self._mark = self._holders.get(self._name, b""), b""
            if not value:  # it ended in between
                raise
            raise StoreError(
                f"store: another agent, on host {holder_of(value).host!r}, has the node name "
                f"{self.node!r}: set agent.node; one that is gone lets go of it within "
                f"{NAME_S:.0f} s") from None
        self._named_s = now_s

    async def _lead(self, run: str, body: bytes, lease_s: float = 0.0, over: str = "") -> None:
        """Takes the run's lease, from `over` where he holds it, or renews it."""
        lease_s = lease_s or self._lease_s()
        if body.decode("utf-8", "replace") != self.node:
            raise Conflict(f"lease: {self.node} asked in the name of {body[:100]!r}")
        self._refuse_unknown()
        held = self._held.get(run)
        if held is not None and await self._renew(held, lease_s):
            self._view = None
            return
        self._held.pop(run, None)
        value = self._holders.get(run, b"")
        if value and not self._is_own(value) and holder_of(value).node != over:
            raise self._lease_conflict(run)
        try:
            await self._acquire(run, value, lease_s)
        except Conflict:
            if run in self._holders:
                raise
            await self._acquire(run, b"", lease_s)  # what was known of it ended in between

    async def _renew(self, held: Held, lease_s: float) -> bool:
        sent_boot_s = boot_s()
        answer = await self.gateway.ask("/v3/lease/keepalive", {"ID": held.id}, CALL_S)
        left_s = answer.result.TTL
        if left_s > 0:
            held.until_boot_s = sent_boot_s + min(lease_s, left_s)
        return left_s > 0

    async def _acquire(self, run: str, value: bytes, lease_s: float) -> None:
        """By one transaction: nobody has it, or this agent had it before it started anew.  Two
        calls to a slow etcd may be more than is waited for: the next try begins with the second."""
        granted = self._granted.get(run)
        if granted is None or granted.until_boot_s - boot_s() < lease_s / 2:
            granted = self._granted[run] = await self._grant(lease_s)
        key, mine = f"{LEASE}/{run}", granted.value
        compare = {"target": "VERSION", "key": self._key(key), "version": "0"}
        if value:
            compare = {"target": "VALUE", "key": self._key(key), "value": b64(value)}
        put = {"request_put": {"key": self._key(key), "value": b64(mine), "lease": granted.id}}
        try:
            revision = await self._transact([compare], [put], [key], "")
        except Conflict:
            if self._holders.get(run) != mine:
                self._granted.pop(run, None)
                with contextlib.suppress(StoreError, TimeoutError):  # it would end by itself
                    await self.gateway.ask("/v3/lease/revoke", {"ID": granted.id}, CALL_S)
                raise self._lease_conflict(run) from None
            revision = self._revisions[key]  # taken before, in a try that had no answer in time
        except Refused:  # the granted one too, perhaps: restored from a backup, etcd has it not
            self._granted.pop(run, None)
            raise
        self._held[run] = granted
        self._granted.pop(run, None)
        self._take(key, 1, revision, mine)
        self._view = None

    async def _grant(self, lease_s: float) -> Held:
        id, sent_boot_s = str(secrets.randbits(62) + 1), boot_s()
        asked = {"TTL": str(max(LEASE_LEAST_S, math.ceil(lease_s))), "ID": id}
        try:
            left_s = (await self._write("/v3/lease/grant", asked)).answer.TTL
        except Refused as error:
            if not error.is_repeated or "already exists" not in error.message:
                raise
            left_s = 0  # by the first try, whose answer was lost
        mine = msgspec.json.encode(Holder(self.node, self.agent_id, id, socket.gethostname()))
        return Held(id, mine, sent_boot_s + min(lease_s, left_s or lease_s))

    def _is_own(self, value: bytes) -> bool:
        return (holder_of(value).node, holder_of(value).agent) == (self.node, self.agent_id)

    # ------------------------------------------------------------- reading

    async def read(self, key: str) -> Doc:
        self._refuse_unknown()
        answer = await self.gateway.ask("/v3/kv/range", {"key": self._key(key)}, CALL_S)
        for row in answer.kvs:
            self._take_kv(row)
            return Doc(key, row.version, unpacked(row.value))
        return Doc(key, 0)

    async def refresh(self) -> None:
        try:
            try:
                await self._list()
            except Conflict:  # another node made the cluster's document first
                await self._list()
        except (Conflict, StoreError, TimeoutError) as error:
            self._set_up(str(error) or "store: etcd does not answer")

    async def _list(self) -> None:
        """Everything below the prefix, of one revision, and whether it is the right cluster."""
        async with self._listing:
            before = self._revision
            await self.gateway.version(CALL_S)
            rows, revision = await everything(self.gateway, self.prefix, CALL_S)
            found = next((row for row in rows if self._key_of(row) == CLUSTER), None)
            await self._recognise(found.value if found is not None else b"")
            if revision < before:  # restored from a backup: what was known is not true any more
                self._forget()
            keys = {self._key_of(row) for row in rows}
            for row in rows:
                self._take_kv(row, revision)
            for key in [one for one, at in self._revisions.items()
                        if one not in keys and at < revision]:
                self._take(key, 0, revision, b"")
            self._revision = max(self._revision, revision)
            if self._is_full:
                await self._try_to_write()
            await self._claim_name()
            self._set_up()

    def _forget(self) -> None:
        """All that the store said; the leases stay, and hold where their values are found."""
        for known in (self._revisions, self._gone, self._holders, self._changes):
            known.clear()
        self._docs, self._revision, self._view = Documents(), 0, None

    async def _try_to_write(self) -> None:
        """Whether it has space again, by what leaves nothing behind and wakes nobody."""
        await self._write("/v3/lease/grant", {"TTL": str(LEASE_LEAST_S)})
        self._is_full = False

    # ------------------------------------------------------------- which cluster

    async def _recognise(self, body: bytes) -> None:
        """Refuses a store that is not the one this node knows; the first node makes it one."""
        known, self._mark = read_known(self._identity_file, self._writes), b""
        self.known = known  # read again, for a person may have had this node forget it
        wanted = known.cluster_id if known.cluster == self.cluster else ""
        found = id_of(body)
        where = f"store: etcd at {self.gateway.name}, cluster {self.cluster!r}"
        why = refusal(wanted, found, self._makes, where)
        if why:
            raise StoreError(why)
        if not found:
            found = secrets.token_hex(8)
            body = await self._make_cluster(found)
        if not wanted:
            self.known = Known(known.node_id, self.cluster, found)
            if self._writes:
                write_known(self._identity_file, self.known)
        self._mark, self._view = body, None

    async def _make_cluster(self, id: str) -> bytes:
        """The document `cluster`, where there is none; of several nodes, one may."""
        body = new_mark(id, self.node)
        compare = {"target": "VERSION", "key": self._key(CLUSTER), "version": "0"}
        put = {"request_put": {"key": self._key(CLUSTER), "value": b64(body)}}
        await self._transact([compare], [put], [CLUSTER], "")
        return body

    async def seed(self) -> str:
        """Makes the cluster of an empty store by hand, with the id that this node knows."""
        await self.gateway.version(CALL_S)
        rows, _ = await everything(self.gateway, self.prefix, CALL_S)
        found = next((row for row in rows if self._key_of(row) == CLUSTER), None)
        id = self.known.cluster_id if self.known.cluster == self.cluster else ""
        there = id_of(found.value) if found is not None else ""
        if there and there != id:
            raise StoreError(
                f"store: etcd at {self.gateway.name} holds cluster {there} already, and nothing "
                "was changed: where this node is to join it: holdfast store forget")
        if there:
            return there
        id = id or secrets.token_hex(8)
        write_known(self._identity_file, self.known)  # whether it can be, before the store is made
        await self._make_cluster(id)
        if id != self.known.cluster_id:
            write_known(self._identity_file, Known(self.known.node_id, self.cluster, id))
        return id

    def _refuse_unknown(self) -> None:
        """Before a write.  A store that did not answer is asked all the same: it may now."""
        if not self._mark:
            raise StoreError(self._why_down)

    # ------------------------------------------------------------- watching

    async def watch(self, changed: Callable[[str], None]) -> None:
        wait_s = RETRY_LEAST_S
        while True:
            was_up, begun_s = self._up, time.monotonic()
            try:
                if not was_up or not self._revision:
                    await self._list()
                    changed("the store answers")
                wait_s = RETRY_LEAST_S
                await self._follow_and_look(changed)
            except Conflict:
                continue  # another node made the cluster's document first
            except (StoreError, TimeoutError, aiohttp.ClientError) as error:
                await self._lost(error, changed)
            if self._up and time.monotonic() - begun_s > RETRY_MOST_S:
                continue  # a member went, and another answers: its plan is not to be waited for
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(RETRY_MOST_S, 2.0 * wait_s) if not self._up else RETRY_LEAST_S

    async def _lost(self, error: BaseException, changed: Callable[[str], None]) -> None:
        """The watch ended: asks another member at once, and says so when none answers."""
        if isinstance(error, Refused) and error.is_compacted:
            self._revision = 0  # what was missed is compacted: everything is read again
            return
        was_up = self._up
        await self.refresh()
        if self._up != was_up:
            changed("the store answers again" if self._up else "the store does not answer")

    async def _follow_and_look(self, changed: Callable[[str], None]) -> None:
        """Ends, with the error, when the watch ends or when the store is not as it says."""
        tasks = [asyncio.create_task(self._follow(changed)),
                 asyncio.create_task(self._look_on(changed))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _look_on(self, changed: Callable[[str], None]) -> None:
        """A watch may be dead: one key tells the revision; etcd reads all to tell what is newer."""
        behind = 0
        while True:
            await asyncio.sleep(look_s(len(self._holders)) * random.uniform(0.9, 1.1))
            since = self._revision
            answer = await self.gateway.ask("/v3/kv/range", {"key": self._key(CLUSTER)}, CALL_S)
            if answer.header.revision < since:
                raise StoreError(f"store: etcd at {self.gateway.name} is older than it was")
            knew_less = answer.header.revision > self._revision and await self._look(changed)
            behind = behind + 1 if knew_less else 0
            if behind >= BEHIND_MAX:
                self._revision = 0  # everything is read again
                raise StoreError("store: the watch says less than the store holds")
            if self._is_full or not self._mark:
                await self._list()
                changed("the store takes writes again")
            await self._claim_name()
            await self._prune()

    async def _look(self, changed: Callable[[str], None]) -> bool:
        """Takes what is newer than all that is known; whether the store held more than that.  Its
        revision grows with what is written below other prefixes, too."""
        prefix, known = self.prefix.encode(), len(self._revisions)
        answer = await self.gateway.ask("/v3/kv/range", {
            "key": b64(prefix), "range_end": b64(after(prefix)), "limit": str(PAGE),
            "min_mod_revision": str(self._revision + 1)}, CALL_S)
        revision = answer.header.revision
        news = [row for row in answer.kvs if self._take_kv(row, revision)]
        if news:
            changed("the store changed")
        elif known == answer.count == len(self._revisions) and not answer.more:
            self._revision = max(self._revision, revision)
        return bool(news) or answer.count != len(self._revisions)

    async def _prune(self) -> None:
        """Short runs come by the thousand, and each leaves a document.  Of all agents about one
        does it at a time."""
        runs = self.view().docs.of(RUN)
        agents = sum(name.startswith(NAME) for name in self._holders)
        if len(runs) <= RUNS_MAX + PRUNED_AT_ONCE or random.random() * agents > 1.0:
            return
        living = {*self.living(), *self._holders}
        ended = [doc for run, doc in runs if run not in living]
        ended.sort(key=lambda doc: self._revisions.get(doc.key, 0))
        for doc in ended[:min(len(runs) - RUNS_MAX, PRUNED_AT_ONCE)]:
            with contextlib.suppress(Conflict):  # somebody wrote it anew
                await self.delete(doc.key, doc.version)

    async def _follow(self, changed: Callable[[str], None]) -> None:
        """Changes from the first that is not known yet."""
        create = {"create_request": {
            "key": b64(self.prefix.encode()), "range_end": b64(after(self.prefix.encode())),
            "start_revision": str(self._revision + 1), "fragment": True}}
        async with contextlib.aclosing(self.gateway.stream("/v3/watch", [create])) as results:
            async for result in results:
                if result.compact_revision:
                    raise Refused("store: the watch fell behind", 11, "compacted")
                if result.canceled:
                    raise StoreError(f"store: the watch ended: {result.cancel_reason}")
                if self._apply(result):
                    changed("the store changed")

    def _apply(self, result: Result) -> bool:
        """A result of the watch.  A resumed watch begins behind the last whole one."""
        news, newest = False, 0
        for event in result.events:
            newest = max(newest, event.kv.mod_revision)
            news |= self._take_kv(event.kv)
        if not result.fragment:
            self._revision = max(self._revision, newest)
            if self._gone and not self._listing.locked():
                self._gone = {key: at for key, at in self._gone.items() if at > self._revision}
        return news

    def avoid(self, hosts: frozenset[str]) -> None:
        self.gateway.avoid(hosts)

    async def close(self) -> None:
        held = self._held.get(self._name)
        if held is not None and self._up:
            with contextlib.suppress(StoreError):
                await self.gateway.ask("/v3/lease/revoke", {"ID": held.id}, CLOSE_S)
        await self.gateway.close()

    # ------------------------------------------------------------- keys

    def _key(self, key: str) -> str:
        return b64((self.prefix + key).encode())

    def _key_of(self, row: KeyValue) -> str:
        return row.key.decode("utf-8", "replace").removeprefix(self.prefix)

    def _take_kv(self, row: KeyValue, seen_at: int = 0) -> bool:
        body = unpacked(row.value)
        return self._take(self._key_of(row), row.version, row.mod_revision, body, seen_at)


def open_etcd(
    settings: settings.Store, node: str, directory: Path, lease_s: Callable[[], float],
    writes: bool = True, run: str = "", makes: bool = True,
) -> EtcdStore:
    """StoreError names the setting or the file that is not as it must be."""
    return EtcdStore(
        open_gateway(settings), settings.cluster, node, directory, lease_s, writes, run, makes)
