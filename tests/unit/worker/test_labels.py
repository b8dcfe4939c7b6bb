"""The labels of a node, from the agent's order to start to each rank's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.worker.launcher.commands import Commands

OWN = [["rack", "r7"], ["nvlink_domain", "r7-2"]]
ODD = [[f"{number}" * 99, "x" * 99] for number in range(99)]


@pytest.fixture()
def trainer(launchers):
    """Two ranks of a trainer that wait for their first place, and how it is ordered."""
    one = launchers("train", "--nproc-per-node", "2", "--standby", "0")
    one.ranks.prepare()
    one.all_ready()
    link = SimpleNamespace(channel=None)
    one.told = Commands(one.state, one.ranks, None, link, None, None, None)
    return one


def start(trainer, generation, **more):
    """What becomes of an order that keeps whoever has parked."""
    trainer.told.carry_out("start", f"s{generation}", {
        "generation": generation, "ranks": [0, 1], "keep": [0, 1], "world": 2,
        "resume": {"kind": "survivor"}, **more})
    return trainer.told.outcomes[-1]


def test_survivors_are_told_the_labels_of_each_generation(trainer):
    for generation, said, wanted in (
            (1, {"labels": OWN}, OWN), (2, {"labels": []}, []),
            (3, {}, None),  # an agent of the release before, or a plan that has none
            (4, {"labels": ODD}, [[name[:64], text[:64]] for name, text in ODD[:16]])):
        assert start(trainer, generation, **said)["ok"], trainer.told.outcomes
        for process in trainer.ranks.by_rank().values():
            packet = trainer.heard(process)[-1]
            assert (packet["t"], packet["generation"]) == ("assign", generation)
            assert packet["labels"] == wanted
        for process in trainer.ranks.by_rank().values():
            trainer.ranks.on_packet(process, {
                "t": "parked", "generation": generation, "step": 4, "torn": False, "reason": "x"})
    assert trainer.ranks.launched == 2  # all the while


@pytest.mark.parametrize("labels", [7, "rack", [["rack"]], [7]])
def test_labels_that_are_none_start_nothing(trainer, labels):
    outcome = start(trainer, 1, labels=labels)
    assert not outcome["ok"] and "malformed order" in outcome["error"]
    assert trainer.ranks.generation == 0
