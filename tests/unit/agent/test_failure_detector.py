"""Who is lost: by two observers' word, by each one's own ticks, and never against a kernel's."""

from __future__ import annotations

from holdfast.agent.peers.failure_detector import (
    ASK_TICKS,
    FRESH_TICKS,
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
