"""One generation's process group: joined by a fresh prefix of its store, left without waiting.

Owns torch.distributed.  Must not know what is trained.  A blocked gloo collective cannot be
aborted by any call of torch; shutting its sockets down from another thread wakes it in 0.8 ms, so
the group knows its sockets (`cut`); what gloo leaves asleep, breakable.py wakes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from . import breakable, devices
from .checkpoint import format as files
from .engines.strategy import IN_ORDER, Layout, Member

CONNECT_TIMEOUT_S = 30.0
COLLECTIVE_TIMEOUT_S = 3600.0  # whoever is slow, the agent judges
APART = "apart"  # among a group's parts
MEMBER_FIELDS = Member._fields.index("held")  # those that are said in one word
STAND_IN_S = 0.1  # to reach a listener of this very process
# What gloo alone says: "[enforce fail at .../gloo/transport/tcp/pair.cc:446] ..."
_OF_GLOO = re.compile(r"\[(?:enforce fail at )?\S*gloo/\S*\]")
# What gloo, nccl and the store say besides when a peer or the store is gone.  They raise plain
# RuntimeError, as a user's own code does that says the same of a connection of its own: the words
# count where a call into the group raised them.
_BROKEN_WORDS = (
    "gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "connectFullMesh", "NCCL error", "ncclRemoteError", "ncclSystemError",
    "Socket closed", "failed to connect", "TCPStore",
)
_HERE, _TORCH = Path(__file__).parent, Path(torch.__file__).parent
# Whose frame is the innermost then: what is not written in Python has none.
_CALLERS = (_TORCH, *(_TORCH.parent / name for name in ("torch_xla", "torch_neuronx")), *(
    _HERE / name for name in (
        "breakable.py", "group.py", "move.py", "state.py", "checkpoint", "engines")))
# Where torch raises again what the user's code has raised in another process or thread.
_AGAIN = (_TORCH / "_utils.py", _TORCH / "utils" / "data")


class RestoreFailed(RuntimeError):
    """This generation cannot get a proven state; the next plan must resume from elsewhere."""


class BadCheckpoint(RestoreFailed):
    """The checkpoint to resume from does not prove; it has been moved out of the way."""


def is_broken_group(error: BaseException, generation_over: bool) -> bool:
    """True if the group is to blame; False for a user's own exception, which ends the rank."""
    if isinstance(error, (RestoreFailed, dist.DistError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    said = str(error)
    return generation_over or _OF_GLOO.search(said) is not None or (
        any(word in said for word in _BROKEN_WORDS) and came_from_a_call(error))


def came_from_a_call(error: BaseException) -> bool:
    """Whether a call into a group or a store raised it, by where it was raised."""
    files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and any(map(files[-1].is_relative_to, _CALLERS)) and not any(
        file.is_relative_to(again) for file in files for again in _AGAIN)


class Group:
    """Ranks of one generation.  Collectives raise RuntimeError once a peer is gone.

    `parts` are the process groups that the layout asks for, by name, each with this rank in it;
    `phase(name)` says what this rank does.  Made first and joined then, so that what a join that
    fails has made by then is left like any other.
    """

    layout: Layout

    def __init__(self, assignment: Any, device: torch.device, elastic: Any) -> None:
        self.rank, self.world = assignment.rank, assignment.world
        self.device, self.parts, self._asked = device, dict[str, Any](), 0
        self.data = list[str]()  # digests of what each rank sees; "" of the release before
        self.phase: Callable[[str], None] = elastic.phase
        self._lock, self._sockets = threading.Lock(), list[socket.socket]()
        self._joining, self._store_sockets = True, set[str]()
        # While we connect: what was open before, all newer ones being ours.  None while we do not.
        self._before: set[str] | None = set(_open_sockets().values())
        self._gloo = device.type == "cpu"  # whether who joins may wait for gloo's connections
        self.process_group: Any = None
        self._aside: Any = None
        self._hooks: tuple[Any, Any] = (None, None)  # sys.excepthook without torch's, and torch's

    def join(
        self, assignment: Any, elastic: Any, lay_out: Callable[[Sequence[Member]], Layout],
        said: str = "", data: str = "", held: Sequence[int] = (),
    ) -> None:
        """Connects with every other rank; `lay_out(members)` says who does what, knowing what each
        of them has `said` and `held` (engines/strategy.py's Member).  `data` is the digest of what
        this one sees."""
        device = self.device
        # From here on: a peer may be lost while we wait for its address in the store.
        elastic.register_group(None, self.cut)
        elastic.phase("startup")  # raises if the generation ended before we could be woken
        timeout = timedelta(seconds=CONNECT_TIMEOUT_S)
        if assignment.store_host:
            client = dist.TCPStore(assignment.store_host, assignment.store_port, None, False,
                                   timeout, wait_for_workers=False)
            if assignment.store_host in ("127.0.0.1", "localhost"):
                # Else gloo looks the host's name up, which may be slow or name another address.
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            self.store: Any = dist.PrefixStore(f"holdfast/{assignment.generation}", client)
        elif "MASTER_ADDR" in os.environ:
            store, _, _ = next(iter(rendezvous("env://")))
            # torchrun's restarts reuse its store: without a prefix a rank may read the address
            # of its dead predecessor.
            count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            self.store = dist.PrefixStore(f"holdfast/restart-{count}", store)
        else:
            self.store = dist.HashStore()
        if self.rank == 0 and self.world > 1:
            self._aside = self.store.clone()
        self._connected_to_store()
        if self.world > 1:
            # A peer may prepare for minutes; from here on all that is waited for is connecting.
            here = [f"here/{rank}" for rank in range(self.world)]
            self.store.set(here[self.rank], data)
            self.store.wait(here, timedelta(seconds=COLLECTIVE_TIMEOUT_S))
            self.data = [one.decode() for one in self.store.multi_get(here)]
        with self._lock:
            self._before = set(_open_sockets().values())
        # torch counts every attempt and puts the number into its keys in the store, but starts
        # anew only after a success: a rank whose last join failed would never meet the others.
        dist.distributed_c10d._world.group_count = 0
        before = sys.excepthook
        dist.init_process_group(
            devices.backend(device), store=self.store, rank=self.rank, world_size=self.world,
            timeout=timeout)
        self._hooks = before, sys.excepthook
        group: Any = dist.group.WORLD
        self.process_group = group
        self.layout = lay_out(self._members(assignment, said, held))
        self.shard = self.layout.places[self.rank].shard
        self.copies = self.layout.holders(self.shard)  # ranks that hold what this one holds
        self._make_parts(timeout)
        with self._lock:
            self._joining, self._sockets = False, self._opened()
        # A step may be slow for reasons of the user's own: how long is too long, the agent judges.
        for backend in self._backends():
            backend._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        alike = [self.parts[name] for name in self.layout.alike
                 if self.parts[name] is not group]
        elastic.register_group(self.process_group, self.cut, alike)

    def _connected_to_store(self) -> None:
        """From here on the store's connections are ours, and no others until we connect to peers:
        threads of the user's (a prefetch, a logger) open theirs while we wait for who prepares."""
        with self._lock:
            if self._before is not None:
                self._store_sockets = {*_open_sockets().values()} - self._before
            self._before = None

    def _make_parts(self, timeout: timedelta) -> None:
        """The layout's groups.  How often a rank has entered the group of all is what tells the one
        that left a collective out, and gloo counts a message between two ranks as well: what not
        all ranks do equally often goes through a second group of all, which nobody watches."""
        layout = self.layout
        self._gloo = self._gloo or bool(layout.host)
        if self.world > 1 and (layout.shards > 1 or {*layout.groups} - {*layout.alike}):
            self.parts[APART] = dist.new_group(
                list(range(self.world)), timeout=timeout, use_local_synchronization=True)
        for name, groups in layout.groups.items():
            ranks = next(ranks for ranks in groups if self.rank in ranks)
            whole = self._whole(name, ranks)
            order: Any = {"sort_ranks": False} if IN_ORDER and list(ranks) != sorted(ranks) else {}
            self.parts[name] = whole if whole is not None else dist.new_group(
                ranks, timeout=timeout, use_local_synchronization=True,
                backend=breakable.NAME if name in layout.host else None,
                **order)

    def _whole(self, name: str, ranks: Sequence[int]) -> Any:
        """The group of all ranks that is this part as well; None where it needs one of its own."""
        if list(ranks) != list(range(self.world)) or name in (*self.layout.own, *self.layout.host):
            return None
        return self.process_group if name in self.layout.alike else self.apart

    @property
    def apart(self) -> Any:
        """The group for messages between two ranks."""
        return self.parts.get(APART, self.process_group)

    def _members(self, assignment: Any, said: str, held: Sequence[int]) -> list[Member]:
        """Every rank, by what it says of itself.  A rank of a neighbouring release may know fewer
        fields than are said, or say fewer: what is new comes last, and only if it is so.  What each
        of them must say, or none counts, has a key of its own, set before the other."""
        self.say("keeps", held)
        labels = assignment.labels
        if labels is not None:
            self.say("labels", labels)
        told = (assignment.node, devices.total_memory(self.device), *([said] if said else []))
        self.store.set(f"member/{self.rank}", json.dumps(told))
        found = self.store.multi_get([f"member/{rank}" for rank in range(self.world)])
        members = [Member(*json.loads(one)[:MEMBER_FIELDS]) for one in found]
        if kept := self.all_say("keeps"):
            members = [member._replace(held=tuple(one)) for member, one in zip(members, kept)]
        if labels is not None and (known := self.all_say("labels")):
            members = [member._replace(labels=dict(one)) for member, one in zip(members, known)]
        if self.device.type != "cpu":
            return members
        return [m._replace(memory_bytes=m.memory_bytes // sum(o.node == m.node for o in members))
                for m in members]

    def say(self, what: str, said: Any) -> None:
        """This rank's word for `all_say`, once in a generation."""
        self.store.set(f"{what}/{self.rank}", json.dumps(said))

    def tell(self, what: str, said: Any) -> None:
        """`say`, for who asks behind a collective: the store's answer to a word is not waited for,
        and a collective goes another way.  Once it is read, it has arrived."""
        self.say(what, said)
        self.store.get(f"{what}/{self.rank}")

    def all_say(self, what: str) -> list[Any]:
        """What each rank says of this, by rank; [] where one of them does not."""
        keys = [f"{what}/{rank}" for rank in range(self.world)]
        return [json.loads(one) for one in self.store.multi_get(keys)] if self.store.check(
            keys) else []

    def _backends(self) -> list[Any]:
        groups = {id(one): one for one in (self.process_group, *self.parts.values())}
        return [one.gloo if isinstance(one, breakable.Breakable)
                else one._get_backend(self.device) for one in groups.values()]

    def _opened(self, listens: bool = False) -> list[socket.socket]:
        """The store's and gloo's connections, or their listeners, by descriptors of our own."""
        return [s for fd, name in _open_sockets().items()
                if self._is_ours(name) and (s := _tcp(fd, listens)) is not None]

    def _is_ours(self, name: str) -> bool:
        """Where peers listen, gloo keeps to itself: what a thread of the user's opens just while we
        connect is taken for ours."""
        return name in self._store_sockets or (
            self._before is not None and name not in self._before)

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is on one."""
        number = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number.item())

    def from_first(self, text: str) -> str:
        """Rank 0's text, on every rank.  All ranks call it."""
        key = f"first/{self.asked()}"
        if self.rank == 0:
            self.store.set(key, text)
        self.store.wait([key], timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        return str(self.store.get(key).decode())

    def meet(self, name: str, wait_s: float) -> bool:
        """Whether every rank comes to this place within the time.  By the store alone: a rank that
        is somewhere else would take a collective's bytes for those of its own."""
        self.store.set(f"{name}/{self.rank}", "")
        with contextlib.suppress(dist.DistStoreError):
            self.store.wait([f"{name}/{rank}" for rank in range(self.world)],
                            timedelta(seconds=wait_s))
            return True
        return False

    def aside(self) -> Any:
        """The generation's store through a connection of its own, for another thread: whoever waits
        in a client holds up all who ask it.  Rank 0's, which is asked while it waits for others, is
        among those that `cut` ends.  Raises RuntimeError, and late where the store is gone."""
        return self._aside if self._aside is not None else self.store.clone()

    def asked(self) -> int:
        """A number for keys in the store: the same on all ranks, which ask equally often."""
        self._asked += 1
        return self._asked

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, source)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of the same shape, in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor)
        return gathered

    def digest(self, state: Any) -> str:
        """Of the whole state, equal on all ranks: that of its one shard, or of the digests of all
        that is held of each tensor, whichever shard it is in."""
        if self.layout.shards == 1:
            return str(state.digest())
        data = state.bytes()
        mine = [(e.name, e.begin, files.digest(data[e.offset : e.offset + e.nbytes]))
                for e in state.entries if e.nbytes]
        self.store.set(f"final/{self.rank}", json.dumps(mine))
        ranks = (self.layout.holders(shard)[0] for shard in range(self.layout.shards))
        found = self.store.multi_get([f"final/{rank}" for rank in ranks])
        parts = sorted({tuple(part) for one in found for part in json.loads(one)})
        return files.digest(json.dumps(parts).encode())

    def weights_digest(self, state: Any) -> str:
        """Of the whole model, as format.weights_digest; all ranks call it, rank 0 is answered.
        Tensor by tensor, so that rank 0 never holds more than the largest one."""
        number = self.asked()
        state.fetch()
        held = [(e.name, e.begin, e.nbytes, e.offset) for e in state.entries
                if e.name.startswith(files.WEIGHTS) and e.nbytes]
        self.store.set(f"weights/{number}/{self.rank}", json.dumps(held))
        sources = [self.layout.holders(shard)[0] for shard in range(self.layout.shards)]
        found = self.store.multi_get([f"weights/{number}/{rank}" for rank in sources])
        pieces = sorted((name, begin, nbytes, offset, rank) for rank, one in zip(sources, found)
                        for name, begin, nbytes, offset in json.loads(one))
        return files.weights_digest(self._tensors(pieces, state)) if self.rank == 0 else self._send(
            pieces, state)

    def _tensors(self, pieces: list[Any], state: Any) -> Iterator[tuple[str, bytes]]:
        for name, parts in itertools.groupby(pieces, key=lambda piece: str(piece[0])):
            tensor = bytearray()
            for _, begin, nbytes, offset, rank in parts:
                if begin < len(tensor):
                    continue  # what every shard has
                place = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
                if rank:
                    dist.recv(place, rank, group=self.apart)
                else:
                    place.copy_(state.data[offset : offset + nbytes])
                tensor += place.cpu().numpy().tobytes()
            yield name, bytes(tensor)

    def _send(self, pieces: list[Any], state: Any) -> str:
        for _name, parts in itertools.groupby(pieces, key=lambda piece: str(piece[0])):
            reached = 0
            for _, begin, nbytes, offset, rank in parts:
                if begin < reached:
                    continue
                reached = begin + nbytes
                if rank == self.rank:
                    dist.send(state.data[offset : offset + nbytes], 0, group=self.apart)
        return ""

    def cut(self) -> None:
        """Wakes whoever waits in a collective.  From any thread, any number of times."""
        with self._lock:
            if self._joining and self._gloo:
                self._stand_in()
            # While we join, connections come one by one: looked for anew each time.
            found = self._opened() if self._joining else self._sockets
            for connection in found:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                if self._joining:
                    connection.close()
        if self._joining:
            return
        if self.device.type != "cpu":
            for backend in self._backends():
                backend.abort()
        self._release()

    def _release(self) -> None:
        for group in (self.process_group, *self.parts.values()):
            if isinstance(group, breakable.Breakable):
                group.release()

    def _stand_in(self) -> None:
        """Wakes whoever waits for a connection that a lost peer was to make: there is nothing to
        shut down yet, and gloo waits for five times its timeout.  It takes for that peer whoever
        comes and says its number first (8 bytes, in order of rank), and fails when he goes."""
        for listener in self._opened(listens=True):
            with listener, contextlib.suppress(OSError):
                for number in range(self.world):
                    with socket.socket(listener.family) as peer:
                        peer.settimeout(STAND_IN_S)
                        peer.connect(listener.getsockname())
                        peer.sendall(struct.pack("=q", number))

    def leave(self) -> None:
        """Frees the group; its peers see closed connections."""
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets, self._joining = [], False
        self._release()
        if dist.is_initialized():
            dist.destroy_process_group()
        # torch puts "[rank0]: " before each line of a traceback, and never takes that back: behind
        # 40 generations of one process the search of its log no longer found the error.
        before, torchs = self._hooks
        if torchs is not None and sys.excepthook is torchs:
            sys.excepthook = before
        # gloo's destructor waits for its threads, and one of them may sleep in a collective for the
        # whole of its timeout: whoever comes to wait as its last connection fails is not woken.
        groups = {id(one): one for one in (self.process_group, *self.parts.values())}
        self.process_group, self.parts = None, {}
        threading.Thread(target=groups.clear, name="old group", daemon=True).start()


def _open_sockets() -> dict[int, str]:
    """This process's descriptors that are sockets -> the kernel's name for each.  The number of one
    that is closed is given to the next that is opened; the name is not."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            kernel_name = os.readlink(f"/proc/self/fd/{name}")
            if kernel_name.startswith("socket:"):
                found[int(name)] = kernel_name
    return found


def _tcp(descriptor: int, listens: bool) -> socket.socket | None:
    """A descriptor of our own for a connected TCP socket, or for one that listens: its number is
    never given to another file while we hold it.  None for anything else (the launcher's socket is
    a Unix one)."""
    try:
        found = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        if found.family in (socket.AF_INET, socket.AF_INET6) and listens == bool(
                found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)):
            if not listens:
                found.getpeername()
            return found
    except OSError:
        pass
    found.close()
    return None
