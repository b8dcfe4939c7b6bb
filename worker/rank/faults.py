"""Injected faults, carried out inside a rank, and the flight recorder's last entries.

Owns what `holdfast inject` does inside a rank.  Only the rank's launcher can ask for it, and the
launcher passes on what its own user asked for.
"""

from __future__ import annotations

import ctypes
import json
import pickle
import time
from typing import Any, Dict, List, Tuple

DEFAULT_GROUP = "0"  # torch's name of the world's group
FLIGHT_MAX = 64  # collectives that are told
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


def _record() -> Any:
    """What torch's own recorder holds: gloo's groups, and no other's."""
    try:
        from torch._C import _distributed_c10d as c10d

        return json.loads(c10d._dump_fr_trace_json())  # type: ignore[attr-defined]
    except (ImportError, ValueError, RuntimeError, AttributeError):
        return {}


def _nccl_record() -> Any:
    """What NCCL's recorder holds: it has one of its own, which torch pickles."""
    try:
        from torch._C import _distributed_c10d as c10d

        # includeCollectives, includeStackTraces, onlyActive: stacks cost far more than they say
        trace = c10d._dump_nccl_trace(True, False, False)  # type: ignore[attr-defined]
        return pickle.loads(trace)
    except (ImportError, ValueError, RuntimeError, AttributeError, TypeError, EOFError,
            pickle.UnpicklingError):
        return {}


def _of_default_group(record: Any) -> List[Dict[str, Any]]:
    """The entries that may be compared.  One recorder's alone: each numbers its own."""
    entries = record.get("entries", []) if isinstance(record, dict) else []
    return [entry for entry in entries if not entry.get("is_p2p")
            and str((entry.get("process_group") or [""])[0]) == DEFAULT_GROUP]


def flight_record(since_ns: int = 0) -> List[Tuple[int, str, str]]:
    """The default group's last collectives by its flight recorder: (sequence, name, sizes).

    Of what was entered since `since_ns` (Unix time): the recorder keeps what a process did in the
    generations before, under the same name and the same numbers.
    [] without a recorder.  Other groups count for themselves, and point-to-point messages differ
    between ranks by design: neither may be compared.  Sizes are told only where all ranks of a
    collective must agree about them.
    """
    told = []
    for entry in _of_default_group(_nccl_record()) or _of_default_group(_record()):
        if int(entry.get("time_created_ns", since_ns)) < since_ns:
            continue
        name = str(entry.get("profiling_name", ""))
        equal = name.rpartition(":")[2] in EQUAL_SIZES
        sizes = json.dumps(entry.get("input_sizes", [])) if equal else ""
        told.append((int(entry.get("collective_seq_id", 0)), name, sizes))
    return told[-FLIGHT_MAX:]
