"""Whose torch gets a clock: the trainer's, and a script's that asked for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.worker.launcher import spec
from holdfast.worker.rank import rank


@pytest.mark.parametrize(("command", "flags", "tapped"), [
    ("run", [], False), ("run", ["--time-collectives"], True), ("run", ["--no-hooks"], False),
    ("run", ["--no-hooks", "--time-collectives"], True), ("train", [], True)])
def test_nothing_of_torch_is_replaced_in_a_script_that_did_not_ask(
    command, flags, tapped, tmp_path, monkeypatch
):
    script = tmp_path / "job.py"
    script.write_text("")
    rest = [str(script)] if command == "run" else []
    options = spec.build(command).parse_args([*flags, *rest])
    program = spec.program_of(command, options, rest)
    worker = SimpleNamespace(
        ticker=SimpleNamespace(each_beat=[], start=lambda: None), fields=None, each_beat="elastic",
        gradients=SimpleNamespace(each_beat="gradients"), switch_phase=lambda number: None,
        collectives=SimpleNamespace(each_beat="collectives"), assigned_hooks=[])
    for name, stand_in in (("attach_worker", lambda seat: worker), ("reseed", lambda: None),
                           ("call", lambda program: None)):
        monkeypatch.setattr(rank, name, stand_in)
    monkeypatch.setattr(rank.hooks, "install", lambda worker: None)
    monkeypatch.setattr(rank.outcome, "leave", lambda *_: None)
    rank.run(program, SimpleNamespace(threads=0, stdout="", stderr=""))
    assert ("collectives" in worker.ticker.each_beat) == tapped
