"""What the size of the fleet costs an agent that only belongs to it: 256 to 16,384 nodes.

    python -m bench.agent_scale [--rows FILE]

The real parts with what a store of so many nodes holds: a name, an address and, of one in 64, a
document of its exclusion.  No run is here, and no network takes part.  `step` and `idle_know` come
each second, `names` every ten; `change` and what `changed` begins come with what somebody else
writes.  Times are the process's own seconds on the processor (the machine may be busy), the least
of several goes.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec

from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import Now, Observed, Settings
from holdfast.agent.core.node import Node
from holdfast.agent.daemon.parts.peers import PeerPart, Place, places
from holdfast.agent.peers import beats
from holdfast.agent.store.etcd import EtcdStore
from holdfast.agent.store.etcd_leases import NAME, Holder

from .plan_scale import GOES, main, name

SIZES = (256, 1024, 4096, 16384)
EXCLUDED_ONE_IN = 64


def filled(nodes: int, folder: Path) -> EtcdStore:
    """A store that has heard of so many agents."""
    store = EtcdStore(cast(Any, _NoGateway()), "main", name(0), folder, lambda: 8.0, writes=False)
    for number in range(nodes):
        take(store, number, 1)
    store._set_up()
    return store


def take(store: EtcdStore, number: int, revision: int) -> None:
    """What the watch brings of one agent that has come."""
    node = name(number)
    holder = Holder(node, f"{number:032x}.{number:032x}", str(number), f"host-{node}")
    store._take(f"lease/{NAME}{node}", 1, revision, msgspec.json.encode(holder))
    place = Place(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 29401, f"{number:016x}")
    store._take(f"address/{node}", 1, revision, msgspec.json.encode(place))
    if number % EXCLUDED_ONE_IN == 1:
        store._take(f"node/{node}", 1, revision, b'{"excluded":true,"reason":"bench"}')


class _NoGateway:
    traffic = None
    name = "nowhere"


class Resting(beats.Line):
    """A connection that connects to nothing."""

    async def _run(self) -> None:
        await asyncio.Event().wait()


def peer_part(store: EtcdStore) -> PeerPart:
    config: Any = SimpleNamespace(
        agent=SimpleNamespace(state_dir="/nowhere"),
        detect=SimpleNamespace(lease_s=8.0),
        store=SimpleNamespace(url="etcd://127.0.0.1:2379", cluster="main"),
        cluster=SimpleNamespace(listen="127.0.0.1:0", token_file=""))
    launchers: Any = SimpleNamespace(runs=tuple)
    state: Any = SimpleNamespace(name=name(0), config=config, is_private=False)
    return PeerPart(state, store, launchers, lambda _: None, lambda *_: None)


async def costs(store: EtcdStore, nodes: int) -> dict[str, float]:
    """Milliseconds of each thing that an agent does."""
    revision, at_s = [1], [1000.0]
    node, peers = Node(name(0), Settings(single_node=False), load_runbooks()), peer_part(store)

    def change() -> None:
        revision[0] += 1
        take(store, nodes - 1, revision[0])
        store.view()

    def step() -> None:
        at_s[0] += 1.0
        node.step(Now(at_s[0], 1e9 + at_s[0], "b"), Observed(store=store.view()))

    def know() -> None:
        peers._know(store.view())

    step()
    know()
    found = {"step_ms": ms(step), "idle_know_ms": ms(know), "names_ms": ms(store.present),
             "change_ms": ms(change), "changed_step_ms": ms(step, change),
             "changed_know_ms": ms(know, change)}
    await peers.peers.close()
    return found


def row(nodes: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as made:
        tracemalloc.start()
        store = filled(nodes, Path(made))
        places(store.view().docs)
        memory, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return {"nodes": nodes, **asyncio.run(costs(store, nodes)),
                "memory_mb": round(memory / 1e6, 1)}


def ms(go: Callable[[], object], before: Callable[[], object] = tuple) -> float:
    """Of the quickest of some goes, each behind `before`, which is not counted."""
    found = []
    for _ in range(GOES):
        before()
        begin_s = time.process_time()
        go()
        found.append(time.process_time() - begin_s)
    return round(min(found) * 1e3, 3)


if __name__ == "__main__":
    beats.Line = Resting  # type: ignore[misc]
    main(lambda: [row(nodes) for nodes in SIZES])
