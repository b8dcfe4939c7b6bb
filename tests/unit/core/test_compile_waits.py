"""What a launcher's word of a compiler means: a ticket in mid-training, a lock that was left, or
nothing."""

from __future__ import annotations

import pytest

from holdfast.agent.core.detect.ranks.compiling import NAMED_MAX, compiling, lock_left
from holdfast.agent.core.model import Condition, RankView
from holdfast.worker.launcher import compiling as launcher

from .driver import replace

PATH = "/cache/MODULE_1/model.pb.lock"
LEFT = Condition("a", "compile_lock_stale", f"{PATH} is 3 min old", path=PATH)
RANKS = tuple(RankView(rank, "a", 100 + rank, 2, "running", step=20, still_s=30.0)
              for rank in (0, 1, 12))
SAID = "rank 1: neuronx-cc"


def test_a_compile_in_mid_training_is_a_ticket_of_its_rank() -> None:
    told = compiling((SAID,), RANKS, 10, ())
    assert told is not None
    cause, done = told
    assert (cause.fault, cause.rank, cause.node, cause.pid, cause.step, cause.generation) == (
        "graph_recompiled", 1, "a", 101, 20, 2)
    assert cause.severity == "warn" and not done
    assert cause.reason == ("rank 1 (pid 101) on a compiles in mid-training (neuronx-cc) at step "
                            "20, for 30 s: the other ranks wait for it")
    assert cause.evidence == (("step", "20"), ("compiles", SAID))


@pytest.mark.parametrize(("step", "resumed", "ticket"), [
    (21, 20, True), (20, 20, False), (0, 20, False),  # it restores still: no step is done
    (1, 0, True), (0, 0, False)])
def test_the_first_compile_of_a_start_is_expected(step: int, resumed: int, ticket: bool) -> None:
    ranks = tuple(replace(one, step=step) for one in RANKS)
    assert (compiling((SAID,), ranks, resumed, ()) is not None) is ticket


@pytest.mark.parametrize(("said", "rank"), [
    (("rank 1",), 1), (("rank 12: cc1plus",), 12), (("rank 0 holds or awaits x",), 0),
    (("rank 7: cc1plus",), None), (("rank 7: cc1plus", "rank 0: cc1plus"), 0),
    (("a standby: cc1plus",), None), (("ranks 1",), None), ((), None)])
def test_whose_word_it_is(said: tuple[str, ...], rank: int | None) -> None:
    told = compiling(said, RANKS, 10, ())
    assert (told[0].rank if told else None) == rank


def test_a_lock_that_a_killed_compile_left_is_named_with_what_to_do() -> None:
    said = f"rank 1 holds or awaits {PATH}"
    for resumed in (10, 20):  # at a start as in mid-training: nothing will give it free
        told = compiling((said,), RANKS, resumed, (LEFT,))
        assert told is not None and told[0].fault == "rank_hung"
        assert told[0].reason.startswith("rank 1 (pid 101) on a stands still for 30 s before a lo")
        assert told[1] == (
            f"waits, and no restart is spent: rm {PATH}, and the run goes on by itself")


def test_only_a_lock_that_it_waits_for_is_the_reason() -> None:
    said = (f"rank 1 holds or awaits {PATH}",)
    other, mount = replace(LEFT, path="/cache/x.lock"), replace(LEFT, fault="mount_hung")
    assert lock_left((other, mount, replace(LEFT, path="")), said) is None
    assert lock_left((other, LEFT), said) == LEFT
    assert lock_left((LEFT,), ("rank 1: neuronx-cc",)) is None
    assert lock_left((LEFT,), ("rank 0: cc1plus", *said)) == LEFT


def test_a_path_that_the_launcher_cuts_short_is_known_again() -> None:
    long = replace(LEFT, path="/" + "x" * 500)
    said = f"rank 1 holds or awaits {long.path[:NAMED_MAX]}"
    assert lock_left((long,), (said,)) == long
    assert lock_left((long,), (said[:-1],)) is None
    assert NAMED_MAX == launcher.NAMED_MAX
