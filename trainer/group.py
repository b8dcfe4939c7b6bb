"""One generation's process group: joined by a fresh prefix of its store, left without waiting.

Owns torch.distributed.  Must not know what is trained.  A blocked gloo collective cannot be
aborted by any call of torch; shutting its sockets down from another thread wakes it in 0.8 ms, so
the group knows its sockets (`cut`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

CONNECT_TIMEOUT_S = 30.0
COLLECTIVE_TIMEOUT_S = 3600.0
# What gloo, nccl and the store say when a peer or the store is gone; gloo raises plain
# RuntimeError, as a user's own shape error does, so its words must tell them apart.
_BROKEN_WORDS = (
    "gloo/", "Connection closed by peer", "Connection reset by peer", "Broken pipe",
    "connectFullMesh", "NCCL error", "ncclRemoteError", "ncclSystemError",
    "Socket closed", "failed to connect", "TCPStore",
)

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
    return generation_over or any(word in str(error) for word in _BROKEN_WORDS)


class Group:
    """Ranks of one generation.  Collectives raise RuntimeError once a peer is gone.

    `lay_out(labels)` says who does what (engines/strategy.py); `parts` are the process groups that
    it asks for, by name, each with this rank in it.
    """

    def __init__(
        self, assignment: Any, device: torch.device, elastic: Any,
        lay_out: Callable[[Sequence[str]], Any],
    ) -> None:
        self.rank, self.world = assignment.rank, assignment.world
        self.device, self.parts = device, dict[str, Any]()
        self._lock, self._sockets = threading.Lock(), list[socket.socket]()
        self._joining, self._before = True, _open_sockets()
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
        # torch counts every attempt and puts the number into its keys in the store, but starts
        # anew only after a success: a rank whose last join failed would never meet the others.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo", store=self.store, rank=self.rank,
            world_size=self.world, timeout=timeout)
        group: Any = dist.group.WORLD
        self.process_group = group
        self.layout = lay_out(self._labels(assignment.node))
        self.shard = self.layout.places[self.rank].shard
        self.copies = self.layout.holders(self.shard)  # ranks that hold what this one holds
        for name, groups in self.layout.groups.items():
            ranks = next(ranks for ranks in groups if self.rank in ranks)
            whole = len(ranks) == self.world
            self.parts[name] = group if whole else dist.new_group(
                ranks, timeout=timeout, use_local_synchronization=True)
        with self._lock:
            self._joining, self._sockets = False, self._opened()
        # A step may be slow for reasons of the user's own: how long is too long, the agent judges.
        for backend in self._backends():
            backend._set_default_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        elastic.register_group(self.process_group, self.cut)

    def _labels(self, mine: str) -> list[str]:
        """Every rank's node, in rank order."""
        self.store.set(f"node/{self.rank}", mine)
        return [found.decode() for found in
                self.store.multi_get([f"node/{rank}" for rank in range(self.world)])]

    def _backends(self) -> list[Any]:
        groups = {id(one): one for one in (self.process_group, *self.parts.values())}
        return [one._get_backend(self.device) for one in groups.values()]

    def _opened(self) -> list[socket.socket]:
        """The store's and gloo's connections, by descriptors of our own."""
        return [s for fd in _open_sockets() - self._before if (s := _tcp(fd)) is not None]

    def any(self, flag: bool) -> bool:
        """True on all ranks if it is on one."""
        number = torch.tensor([int(flag)], device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return bool(number.item())

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dist.broadcast(tensor, source)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor of the same shape, in rank order."""
        gathered = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(gathered, tensor)
        return gathered

    def digest(self, state: Any) -> str:
        """Of the whole state, equal on all ranks: that of its one shard, or of all digests."""
        mine = state.digest()
        if self.layout.shards == 1:
            return str(mine)
        self.store.set(f"final/{self.rank}", mine)
        ranks = (self.layout.holders(shard)[0] for shard in range(self.layout.shards))
        found = self.store.multi_get([f"final/{rank}" for rank in ranks])
        return str(xxhash.xxh3_128_hexdigest(b" ".join(found)))

    def cut(self) -> None:
        """Wakes whoever waits in a collective.  From any thread, any number of times."""
        with self._lock:
            # While we join, no code of the user's runs: every new connection is ours.
            found = self._opened() if self._joining else self._sockets
            for connection in found:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                if self._joining:
                    connection.close()
        if self.device.type == "cuda" and not self._joining:
            for backend in self._backends():
                backend.abort()

    def leave(self) -> None:
        """Frees the group; its peers see closed connections."""
        with self._lock:
            for connection in self._sockets:
                connection.close()
            self._sockets, self._joining = [], False
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_sockets() -> set[int]:
    """This process's descriptors that are sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found.add(int(name))
    return found


def _tcp(descriptor: int) -> socket.socket | None:
    """A descriptor of our own for a connected TCP socket: its number is never given to another
    file while we hold it.  None for anything else (the launcher's socket is a Unix one)."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return None
    try:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.getpeername()
            return connection
    except OSError:
        pass
    connection.close()
    return None
