"""The fleet's baseline: who tells what it measured, what several say, what follows on a node."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.checks import gate, results
from holdfast.agent.checks.facts import Facts
from holdfast.agent.checks.runner import Runner, Wanted
from holdfast.agent.checks.table import chosen
from holdfast.agent.config.load import load
from holdfast.agent.core.checks import baseline
from holdfast.agent.core.checks.verdict import FLEET, OK, WARNING, Answer, CheckVerdict, Measure
from holdfast.agent.core.model import Doc, Documents, Settings, StoreView
from holdfast.agent.core.nodes import fleet_baseline
from holdfast.agent.daemon.parts.checks import Checks, passes
from holdfast.agent.daemon.state import AgentState

from ..core.driver import Lab, replace

KEY = "cpu|gemm_float32|cpu"


def tells(node: str, *rates: float, key: str = KEY) -> Doc:
    return Doc(f"baseline/{node}", 1, msgspec.json.encode({key: rates}))


def test_a_node_tells_quantiles_and_only_of_enough_passes() -> None:
    assert baseline.summary([(1.0,)] * (baseline.PASSES_MIN - 1)) == ()
    told = baseline.summary([(1e9 + number * 1e7 + 0.123,) for number in range(10)])
    assert len(told) == baseline.KEPT and told[0] == 1e9 and told[-1] == 1.09e9
    kept = results.Results(baseline={KEY: [[1.0]] * 5, "peers, usual|x|y": [[1.0]] * 5,
                                     "new|x|y": [[1.0]]})
    assert passes(kept) == ((KEY, (1.0,) * baseline.KEPT),)


def test_the_others_speak_once_three_of_them_measured() -> None:
    slow = Measure("gemm_float32", 0.6e9, "FLOP/s", "cpu")
    rows = [(1e9, 1.01e9)] * 2
    assert baseline.limit_of(slow, rows, FLEET) is None
    found = baseline.limit_of(slow, [*rows, (0.99e9, 1e9)], FLEET)
    assert found is not None and (found.origin, found.met) == (FLEET, False)
    assert "like those of 3 other nodes" in found.source
    fast = baseline.limit_of(replace(slow, value=1.2e9), [(1e9,)] * 3, FLEET)
    assert fast is not None and fast.met


def test_a_node_writes_what_it_measured_where_there_is_a_store() -> None:
    lab = Lab(settings=Settings(single_node=False), nnodes_max=2, nnodes_min=2)
    lab.passes = ((KEY, (1.0, 2.0)),)
    lab.settle()
    (doc,) = [one for one in lab.docs.values() if one.key.startswith("baseline/")]
    assert doc.key == f"baseline/{lab.node.name}" and msgspec.json.decode(doc.body) == {
        KEY: [1.0, 2.0]}
    writes = [one for one in lab.log if one.subject == "store/baseline/a"]
    lab.settle()
    assert [one for one in lab.log if one.subject == "store/baseline/a"] == writes
    lab.passes = ((KEY, (1.0, 3.0)),)
    lab.settle()
    assert b"3.0" in lab.docs["baseline/a"].body


def test_of_a_large_fleet_a_few_tell_and_the_others_do_not() -> None:
    lab = Lab(settings=Settings(single_node=False), nnodes_max=2, nnodes_min=2)
    for number in range(fleet_baseline.NODES_MAX):
        doc = tells(f"n{number}", 1.0)
        lab.docs[doc.key] = doc
    lab.passes = ((KEY, (1.0,)),)
    lab.settle()
    assert "baseline/a" not in lab.docs
    lab.passes = (("another machine|gemm_float32|cpu", (1.0,)),)
    lab.settle()
    assert "baseline/a" in lab.docs


@pytest.mark.parametrize("body", [
    b"", b"[]", b"{", b'{"k": "x"}', b'{"k": []}', b'{"k": [-1.0]}', b"[" * 100_000])
def test_what_is_no_baseline_says_nothing(body: bytes) -> None:
    docs = Documents([Doc("baseline/x", 1, body), tells("own", 1.0)])
    assert fleet_baseline.of_others(docs, "own") == {}


def test_the_agent_writes_it_down_and_a_node_that_never_passed_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(None, {"agent.state_dir": (str(tmp_path), "a test")})
    state = AgentState(loaded, is_private=False)
    docs = Documents([tells(f"n{number}", 1e9, 1.02e9) for number in range(4)])
    observed = replace(state.snapshot.observed, store=StoreView(up=True, docs=docs))
    state.snapshot = state.snapshot._replace(observed=observed)
    asyncio.run(Checks(state, lambda why: None).look())
    assert results.fleet(tmp_path / "checks") == {KEY: [(1e9, 1.02e9)] * 4}

    def made(rate: float) -> CheckVerdict:
        monkeypatch.setattr(gate, "clock", lambda facts: Answer("measured", measures=(
            Measure("gemm_float32", rate, "FLOP/s", "cpu"),)))
        (one,) = Runner(Wanted(chosen(("clock",)), Facts("new"), tmp_path / "checks", "b")).run()
        return one

    slow, well = made(0.6e9), made(1.01e9)
    assert (slow.status, slow.limit_from) == (WARNING, FLEET)
    assert "0.59 like those of 4 other nodes" in slow.reason
    assert (well.status, well.limit_from) == (OK, FLEET)
    (tmp_path / "checks" / results.FLEET_FILE).write_text("[" * 9)
    assert made(0.6e9).limit_from == ""
