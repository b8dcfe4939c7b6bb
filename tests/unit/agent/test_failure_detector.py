"""Who is lost: by two observers' word, by each one's own ticks, and never against a kernel's."""

from __future__ import annotations

import pytest

from holdfast.agent.peers.failure_detector import (
    ASK_TICKS,
    ASKED_AT_ONCE,
    FRESH_TICKS,
    PROBE_AGAIN_TICKS,
    SILENT_TICKS,
    FailureDetector,
)


def observer(*names: str) -> FailureDetector:
    made = FailureDetector()
    made.watch(names)
    return made


def passes(detector: FailureDetector, ticks: int, heard: tuple[str, ...] = (),
           silent: tuple[str, ...] = ()) -> list[str]:
    """So many ticks, in each of which some are heard; whose kernels were to be asked."""
    asked = []
    for _ in range(ticks):
        for name in heard:
            detector.heard(name, silent)
        asked += detector.tick()
    return asked


def test_a_silent_node_is_asked_and_lost_on_two_words() -> None:
    detector = observer("b", "c")
    assert passes(detector, ASK_TICKS - 1, heard=("b",)) == []
    assert passes(detector, 1, heard=("b",)) == ["c"]
    detector.probed("c", answers=False)
    assert not detector.unreachable()  # silent for too short a time, and asked again behind it
    assert passes(detector, SILENT_TICKS - ASK_TICKS, heard=("b",)) == ["c"]
    assert not detector.unreachable() and not detector.lost()
    detector.probed("c", answers=False)
    assert detector.unreachable() == ["c"] and not detector.lost()  # one word alone
    detector.heard("b", ["c"])
    assert detector.lost() == {"c"}
    detector.heard("c")  # it is back
    assert not detector.lost() and not detector.unreachable()


def test_what_answers_is_not_lost_however_silent_its_agent() -> None:
    detector = observer("b", "c")
    for _ in range(10):
        for name in passes(detector, SILENT_TICKS, heard=("b",), silent=("c",)):
            detector.probed(name, answers=True)
    assert not detector.unreachable() and not detector.lost()
    detector.probed("c", answers=False)  # the whole machine went after its agent
    assert detector.lost() == {"c"}


def test_a_second_observer_who_is_not_heard_of_himself_counts_for_nothing() -> None:
    detector = observer("b", "c")
    passes(detector, SILENT_TICKS, heard=("b",), silent=("c",))
    detector.probed("c", answers=False)
    assert detector.lost() == {"c"}
    passes(detector, FRESH_TICKS)
    assert not detector.lost()


def test_an_observer_that_was_cut_off_accuses_nobody() -> None:
    detector = observer("b", "c", "d")
    for name in passes(detector, 3 * SILENT_TICKS):
        detector.probed(name, answers=False)
    assert detector.unreachable() == ["b", "c", "d"] and not detector.lost()


def test_one_that_stood_still_itself_counts_no_tick_meanwhile() -> None:
    detector = observer("b", "c")
    passes(detector, SILENT_TICKS - 1, heard=("b",))
    # Frozen for an hour here, then the others' words are read with the first late tick.
    assert passes(detector, 1, heard=("b", "c")) == []
    detector.probed("c", answers=False)  # of a question asked before
    assert not detector.unreachable()


def test_a_node_that_comes_has_its_time_and_one_that_leaves_is_forgotten() -> None:
    detector = observer("b")
    passes(detector, 50, heard=("b",))
    detector.watch(["b", "c"])
    assert passes(detector, ASK_TICKS - 1, heard=("b",)) == []
    detector.watch(["b"])
    detector.heard("c")
    assert set(detector.peers) == {"b"}


# ----------------------------------------------------------------- many

FAR_TICKS = 20
FAR = ("x", "y", "z")


def of_many() -> FailureDetector:
    """Two near, three that speak seldom."""
    made = FailureDetector()
    made.watch(["b", "c", *FAR])
    for name in FAR:
        made.heard(name, (), FAR_TICKS)
    return made


def speaks(detector: FailureDetector, name: str, silent: tuple[str, ...] | None = None) -> None:
    kept = detector.peers[name].silent if silent is None else silent
    detector.heard(name, kept, FAR_TICKS if name in FAR else 1)


def ticks(detector: FailureDetector, count: int, heard: tuple[str, ...] = ()) -> list[str]:
    asked = []
    for _ in range(count):
        for name in heard:
            speaks(detector, name)
        asked += detector.tick()
    return asked


def test_silence_is_counted_in_the_words_that_were_promised() -> None:
    detector = of_many()
    everybody = ("b", "c", "x", "y")
    assert ticks(detector, FAR_TICKS * ASK_TICKS - 1, everybody) == []
    assert ticks(detector, 1, everybody) == ["z"]
    ticks(detector, FAR_TICKS - 1, everybody)
    detector.probed("z", answers=False)
    assert not detector.unreachable()
    assert ticks(detector, 1, everybody) == ["z"]
    detector.probed("z", answers=False)
    assert detector.unreachable() == ["z"]


def test_one_that_promises_the_next_word_soon_is_held_to_it_and_one_that_has_not_yet_is_not(
) -> None:
    detector = of_many()
    detector.heard("z", (), 1)
    assert ticks(detector, ASK_TICKS, ("b", "c")) == ["z"]
    detector.watch(["b", "c", *FAR, "new"], 4)
    assert "new" not in ticks(detector, 4 * ASK_TICKS - 1, ("b", "c"))
    assert "new" in ticks(detector, 1, ("b", "c"))


def test_a_far_one_is_asked_at_once_on_two_words_and_lost_by_its_own_kernels_silence() -> None:
    detector = of_many()
    assert ticks(detector, 1, ("b", "c")) == []
    speaks(detector, "x", ("z",))
    assert ticks(detector, 1, ("b", "c")) == []  # one word is none
    detector.probed("z", answers=False)
    assert not detector.unreachable()
    speaks(detector, "y", ("z",))
    assert ticks(detector, 1, ("b", "c")) == ["z"] and not detector.lost()
    assert ticks(detector, PROBE_AGAIN_TICKS - 1, ("b", "c")) == []
    assert ticks(detector, 1, ("b", "c")) == ["z"]  # it could not be asked: again
    detector.probed("z", answers=False)
    assert detector.unreachable() == ["z"] and detector.lost() == {"z"}
    assert ticks(detector, 3 * PROBE_AGAIN_TICKS, ("b", "c", "x", "y")) == []
    speaks(detector, "z")
    assert not detector.lost() and not detector.unreachable()


@pytest.mark.parametrize("sign", ["word", "kernel"])
def test_who_gave_a_sign_since_is_not_doubted_however_many_miss_it(sign: str) -> None:
    """Two nodes whose way to a third is cut are no reason to ask it again and again."""
    detector = of_many()
    ticks(detector, 1, ("b", "c"))
    speaks(detector, "x", ("z",))
    speaks(detector, "y", ("z",))
    assert ticks(detector, 1, ("b", "c")) == ["z"]
    if sign == "word":
        speaks(detector, "z")
    else:
        detector.probed("z", answers=True)
    assert ticks(detector, FAR_TICKS, ("b", "c", "x", "y")) == []
    detector.probed("z", answers=False)  # of a question asked before
    assert not detector.unreachable() and not detector.lost()


def test_a_kernel_that_answers_clears_whoever_was_held_lost_on_others_words() -> None:
    detector = of_many()
    ticks(detector, 1, ("b", "c"))
    speaks(detector, "x", ("z",))
    speaks(detector, "y", ("z",))
    assert ticks(detector, 1, ("b", "c")) == ["z"]
    detector.probed("z", answers=False)
    assert detector.lost() == {"z"}
    speaks(detector, "y", ())  # its kernel has answered that one
    assert detector.lost() == {"z"}
    detector.probed("z", answers=True)
    assert not detector.lost() and not detector.unreachable()


def test_who_read_everything_in_one_tick_doubts_as_well() -> None:
    """The last word of a node and the first of two who miss it, behind a standstill of our own."""
    detector = of_many()
    ticks(detector, 3, ("b", "c"))
    speaks(detector, "z")
    speaks(detector, "x", ("z",))
    speaks(detector, "y", ("z",))
    assert ticks(detector, 1, ("b", "c")) == ["z"]
    detector.watch(["b", "c", *FAR])
    detector.probed("z", answers=False)
    assert detector.lost() == {"z"}


def test_words_that_are_old_or_taken_back_ask_nobody() -> None:
    detector = of_many()
    ticks(detector, 1, ("b", "c"))
    speaks(detector, "x", ("z",))
    speaks(detector, "y", ("z",))
    speaks(detector, "y", ())
    assert ticks(detector, PROBE_AGAIN_TICKS, ("b", "c")) == []
    speaks(detector, "y", ("z",))
    detector.peers["x"].missed = FRESH_TICKS + 1
    assert ticks(detector, PROBE_AGAIN_TICKS, ("b", "c")) == []
    detector.probed("z", answers=False)
    assert not detector.unreachable()


def test_a_near_one_has_its_ticks_whatever_others_say() -> None:
    detector = of_many()
    ticks(detector, 1, ("b", "c"))
    speaks(detector, "x", ("b",))
    speaks(detector, "y", ("b",))
    assert ticks(detector, ASK_TICKS - 1, ("c",)) == ["b"]  # by its own ticks, and not before
    detector.probed("b", answers=False)
    assert not detector.unreachable() and not detector.lost()


def test_accusers_and_accused_may_leave_and_come_again() -> None:
    detector = of_many()
    ticks(detector, 1, ("b", "c"))
    for accuser in ("b", "x", "y"):
        speaks(detector, accuser, ("z", "nobody"))
    detector.watch(["b", "c", "x", "y"])
    assert ticks(detector, 1, ("b", "c")) == []
    detector.watch(["b", "c", "z"], FAR_TICKS)  # it came again, and has its time
    assert ticks(detector, 1, ("b", "c")) == []
    detector.probed("z", answers=False)
    assert not detector.unreachable()
    detector.watch(["b", "c", "y", "z"], FAR_TICKS)
    for accuser in ("b", "y"):
        speaks(detector, accuser, ())
        speaks(detector, accuser, ("z",))
    assert ticks(detector, 1, ("b", "c")) == ["z"]
    detector.probed("z", answers=False)
    assert detector.lost() == {"z"}
    detector.watch(["b", "c", "y"])
    assert not detector.unreachable() and not detector.lost()


def test_a_holder_of_the_token_who_doubts_everybody_asks_for_so_many_at_once() -> None:
    detector = FailureDetector()
    names = [f"n{number:04}" for number in range(1000)]
    detector.watch([*names, "b", "c"], FAR_TICKS)
    ticks(detector, 1)
    for accuser in ("b", "c"):
        detector.heard(accuser, names)
    asked = detector.tick()
    assert len(asked) == ASKED_AT_ONCE
    again = [name for name in detector.tick() if name not in ("b", "c")]
    assert len(again) == ASKED_AT_ONCE and not set(asked) & set(again)


def test_many_dead_cost_a_word_no_look_at_them_all() -> None:
    """2,000 peers of which 500 say of 100 others that they do not reach them."""
    detector = FailureDetector()
    names = [f"n{number:04}" for number in range(2000)]
    dead = names[:100]
    detector.watch(names)
    for name in names[100:]:
        detector.heard(name, dead if name > "n1500" else ())
    for _ in range(SILENT_TICKS):
        detector.tick()
    for name in dead:
        detector.probed(name, answers=False)
    found = detector.lost()
    assert found == set(dead)
    for name in names[100:]:
        detector.heard(name, dead if name > "n1500" else ())
        assert detector.lost() is found  # not looked for again
    detector.heard(dead[0])
    assert detector.lost() == set(dead[1:])
