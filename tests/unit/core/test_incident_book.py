"""The book of open incidents: its numbers, its room, and that each change is told in its step."""

from __future__ import annotations

import pytest

from holdfast.agent.core.incidents import book, values
from holdfast.agent.core.incidents.book import NUMBERS_MAX, Entry, IncidentBook
from holdfast.agent.core.model import SEVERITIES, Incident, Now


class Step:
    """One step of a home that keeps the book."""

    def __init__(self, boot_s: float = 100.0) -> None:
        self.now = Now(boot_s=boot_s, wall_s=1e9 + boot_s, boot_id="b")
        self.changed: dict[str, Incident] = {}


def entry(key: str, severity: str = "warn") -> Entry:
    return Entry(Incident(
        id=key, fault="f", subject="node/a", severity=severity, run="", generation=0,
        opened_wall_s=1e9, opened_boot_s=1.0, reason="x", culprit=""))


def filled(*severities: str) -> IncidentBook[Entry]:
    made: IncidentBook[Entry] = IncidentBook()
    for number, severity in enumerate(severities):
        made.add(Step(), f"k{number}", entry(f"k{number}", severity))
    return made


def test_each_fault_is_numbered_by_itself_and_no_number_comes_twice() -> None:
    made: IncidentBook[Entry] = IncidentBook()
    assert [made.number("x"), made.number("x"), made.number("y"), made.number("x")] == [1, 2, 1, 3]


def test_the_faults_that_were_seen_last_keep_their_numbers() -> None:
    """A fault that comes back again and again is not forgotten for those that came once: its next
    incident would have the id of its first."""
    made: IncidentBook[Entry] = IncidentBook()
    for round_of_others in range(1, 6):
        assert made.number("often") == round_of_others
        for number in range(NUMBERS_MAX - 4):
            made.number(f"f{round_of_others}-{number}")
    last = list(made.numbers)[-NUMBERS_MAX:]
    assert last[-1] == f"f5-{NUMBERS_MAX - 5}" and last[3] == "often", "the oldest use goes first"
    assert len(made.numbers) == NUMBERS_MAX + 1, "the others are bounded"
    assert made.number(last[0]) == 2 and made.number("f1-0") == 1


def test_every_change_is_told_in_the_step_that_made_it() -> None:
    made, step, item = IncidentBook[Entry](), Step(), entry("k")
    assert made.add(step, "k", item) is item and step.changed == {"k": item.incident}
    later = Step(101.0)
    made.note(later, item, "seen again")
    assert later.changed == {"k": item.incident} and made.incidents() == later.changed
    assert "seen again" in [text for _, text in item.incident.timeline]
    last = Step(102.0)
    made.close(last, "k", "gone")
    assert not made.open and last.changed["k"].state == values.CLOSED
    assert made.closed == last.changed["k"], "an answer about it may still be on its way"


def test_entries_come_in_the_order_of_their_keys() -> None:
    made = IncidentBook[Entry]()
    for key in ("b", "c", "a"):
        made.add(Step(), key, entry(key))
    assert [item.incident.id for item in made.entries()] == ["a", "b", "c"]


@pytest.mark.parametrize(("severity", "most", "room", "left"), [
    ("warn", 4, True, "k0 k1 k2"),  # there is some
    ("warn", 3, False, "k0 k1 k2"),  # nothing is worse than what is open
    ("degraded", 3, True, "k0 k2"),  # the first of the mildest goes
    ("fatal", 3, True, "k0 k2"),
    ("ok", 3, False, "k0 k1 k2"),
    ("warn", 2, False, "k0 k1 k2"),
])
def test_only_what_is_worse_is_given_room(
    severity: str, most: int, room: bool, left: str
) -> None:
    made, step = filled("fatal", "warn", "warn"), Step()
    assert made.room(step, severity, list(made.open), most) is room
    assert " ".join(sorted(made.open)) == left
    assert sorted(step.changed) == sorted(set("k0 k1 k2".split()) - set(left.split()))


def test_of_the_keys_that_may_go_alone_one_goes() -> None:
    made = filled("warn", "degraded")
    assert made.room(Step(), "fatal", ["k1"], 2) and list(made.open) == ["k0"]


def test_severities_are_ordered() -> None:
    for at, severity in enumerate(SEVERITIES):
        assert [book.worse(severity, than) for than in SEVERITIES] == [
            at > other for other in range(len(SEVERITIES))]


@pytest.mark.parametrize(("subject", "most", "expected"), [
    ("run/a b/rank/1", 0, "run-a-b-rank-1"), ("node/a", 4, "node"), ("node/a", 99, "node-a"),
    ("", 0, "host"), ("GPU-3.x", 0, "GPU-3-x")])
def test_a_subject_as_a_part_of_an_id(subject: str, most: int, expected: str) -> None:
    assert book.plain(subject, most) == expected
    assert most or book.plain(subject) == expected
