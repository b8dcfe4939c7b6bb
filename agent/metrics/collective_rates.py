"""How fast the collectives of this node's ranks are, by kind, from what their pages show.

Owns the choice of the rank that is believed, and bus bandwidth as nccl-tests defines it.  A rank's
time of a collective has its wait for late ranks in it; of the same calls over the same steps the
one that waited least shows most of the collective itself.  So this is a node's part: over nodes
the shortest time, and the highest bandwidth, is the one to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from holdfast.worker.page import Collective, PageView

# Bus bandwidth is bytes over time, times this of n ranks.  checks/collectives.py has the same.
FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2.0 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reduce": lambda n: 1.0,
    "send": lambda n: 1.0,
    "recv": lambda n: 1.0,
}
# In all but an all-reduce a rank need not wait for what becomes of its own part: what its peers
# sent before it came lies in the sockets' buffers, and what it sends may stay there.  Linux lets
# them grow to 6 and 4 MB; the time of a call that is not well above says nothing of a link.
SURE_BYTES = 16 << 20


class Rate(NamedTuple):
    """The collectives of one kind, in groups of so many ranks."""

    op: str
    ranks: int
    tensors: str  # "cpu" | "device"
    call_bytes: float  # mean
    call_s: float | None  # mean, to the end of the wait; None on devices, where no time is known
    bandwidth: float | None  # at least, bytes a second


def rates(pages: Iterable[PageView]) -> list[Rate]:
    """Of the ranks' latest windows, in the order of the labels."""
    least: dict[tuple[str, int, bool], Collective] = {}
    for page in pages:
        for one in page.collectives:
            key = one.kind, one.ranks, one.on_device
            if one.calls and (key not in least or _call_ns(one) < _call_ns(least[key])):
                least[key] = one
    return [_rate(least[key]) for key in sorted(least)]


def _call_ns(one: Collective) -> float:
    return one.ns / one.calls


def _rate(one: Collective) -> Rate:
    if one.on_device or one.ns <= 0:
        return Rate(one.kind, one.ranks, "device" if one.on_device else "cpu",
                    one.size_bytes / one.calls, None, None)
    bandwidth = None
    factor = FACTORS.get(one.kind)
    is_sure = one.kind == "all_reduce" or one.size_bytes >= SURE_BYTES * one.calls
    if factor is not None and one.ranks > 1 and is_sure:
        bandwidth = factor(one.ranks) * one.size_bytes / (one.ns / 1e9)
    return Rate(one.kind, one.ranks, "cpu", one.size_bytes / one.calls, _call_ns(one) / 1e9,
                bandwidth)
