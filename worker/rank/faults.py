"""Injected faults, carried out inside a rank, and the flight recorder's last entries.

Owns what `holdfast inject` does from within, by the front door: only what a launcher has passed
on from its own user arrives here.
"""

from __future__ import annotations

import ctypes
import json
import time
from typing import Any, Dict, List, Tuple

DEFAULT_GROUP = "0"  # torch's name of the world's group
EQUAL_SIZES = ("all_reduce", "allreduce", "broadcast", "reduce", "reduce_scatter")


def inject(pending: Dict[str, Any]) -> None:
    """Carries out, in the main thread and inside a step, what `holdfast inject` asked for."""
    if pending.pop("exception", None) is not None:
        raise RuntimeError("injected by holdfast inject exception")
    stall = pending.pop("stall", None)
    if stall is not None:
        _stall(float(stall.get("seconds", 3600.0)))
    hold = pending.pop("hold-gil", None)
    if hold is not None:
        # PyDLL keeps the GIL for the length of the call: a real hold, as by a bad extension.
        ctypes.PyDLL(None).sleep(int(hold.get("seconds", 3600)))


def _stall(seconds: float) -> None:
    """The injected stall: a wait inside the step that nothing ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, deadline - time.monotonic()))


def flight_record(limit: int = 64) -> List[Tuple[int, str, str]]:
    """The default group's last collectives by torch's flight recorder: (sequence, name, sizes).

    [] without a recorder.  Other groups count for themselves, and point-to-point messages differ
    between ranks by design: neither may be compared.  Sizes are told only where all ranks of a
    collective must agree about them.
    """
    try:
        from torch._C import _distributed_c10d as c10d

        record = json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
        entries = record.get("entries", [])
    except (ImportError, ValueError, RuntimeError, AttributeError):
        return []
    told = []
    for entry in entries:
        group = entry.get("process_group") or [""]
        if entry.get("is_p2p") or str(group[0]) != DEFAULT_GROUP:
            continue
        name = str(entry.get("profiling_name", ""))
        equal = name.rpartition(":")[2] in EQUAL_SIZES
        sizes = json.dumps(entry.get("input_sizes", [])) if equal else ""
        told.append((int(entry.get("collective_seq_id", 0)), name, sizes))
    return told[-limit:]
