"""The flight recorder that is read is the default group's own: NCCL keeps one of its own."""

from __future__ import annotations

import json
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.worker.rank.faults import flight_record


def entry(number: int, name: str, group: str = "0", **more: Any) -> dict[str, Any]:
    return {"process_group": (group, "default_pg"), "collective_seq_id": number,
            "profiling_name": name, "input_sizes": [[4]], **more}


def recorded(monkeypatch: pytest.MonkeyPatch, torch: list[Any], nccl: list[Any] | None) -> None:
    c10d = SimpleNamespace(_dump_fr_trace_json=lambda: json.dumps({"entries": torch}).encode())
    if nccl is not None:
        c10d._dump_nccl_trace = lambda *_: pickle.dumps({"entries": nccl})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(_C=None))
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_distributed_c10d=c10d))


def test_nccls_own_recorder_is_read_where_it_has_the_default_group(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(monkeypatch, [entry(3, "gloo:all_reduce")], [
        entry(7, "nccl:all_reduce"), entry(8, "nccl:send 0->1", is_p2p=True),
        entry(9, "nccl:all_gather"), entry(1, "nccl:all_reduce", group="1")])
    assert flight_record() == [(7, "nccl:all_reduce", "[[4]]"), (9, "nccl:all_gather", "")]


@pytest.mark.parametrize("nccl", [None, [], [entry(1, "nccl:all_reduce", group="1")]])
def test_torchs_recorder_is_read_for_gloo(
    monkeypatch: pytest.MonkeyPatch, nccl: list[Any] | None
) -> None:
    recorded(monkeypatch, [entry(3, "gloo:all_reduce")], nccl)
    assert flight_record() == [(3, "gloo:all_reduce", "[[4]]")]


def test_without_a_recorder_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C", SimpleNamespace(_distributed_c10d=object()))
    assert flight_record() == []


def test_what_a_process_did_in_a_generation_before_is_not_told(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recorder numbers each generation's group from 1 on, and forgets nothing."""
    before = [entry(n, "gloo:broadcast", time_created_ns=100 + n) for n in (1, 2, 3)]
    recorded(monkeypatch, [*before, entry(1, "gloo:all_reduce", time_created_ns=200)], None)
    assert flight_record(150) == [(1, "gloo:all_reduce", "[[4]]")]
    recorded(monkeypatch, [entry(1, "gloo:all_reduce")], None)  # of a torch that notes no time
    assert flight_record(150) == [(1, "gloo:all_reduce", "[[4]]")]
