"""Network cards in the core: flaps in their window, signs of life, what is remembered."""

from __future__ import annotations

import msgspec
from detectors import judged
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.core.detect.network.network import NetworkMemory, Networks
from holdfast.agent.core.model import readings_of
from holdfast.agent.core.node import Node

from .driver import Lab

Rows = dict[tuple[str, str], float]
INFO = "device=mlx5_0,kind=infiniband,pci=0000:1a:00.0,driver=mlx5_core,firmware=1"
DOWNED = ("errors_total", "device=mlx5_0,port=1,error=link_downed")
UP = ("link_up", "device=mlx5_0,port=1")
LISTED = ("unread_files", "collector=network,reason=junk")


def healthy(**changed: float) -> Rows:
    rows: Rows = {("info", INFO): 1.0, UP: 1.0, DOWNED: 0.0, LISTED: 0.0}
    return rows | {(DOWNED if name == "downed" else UP): value for name, value in changed.items()}


def samples(rows: Rows, boot_s: float) -> tuple[tuple[str, str, float, float], ...]:
    return tuple((f"network_{name}", subject, value, boot_s)
                 for (name, subject), value in rows.items())


class Card:
    """One InfiniBand card as a detector sees it."""

    def __init__(self, memory: NetworkMemory | None = None) -> None:
        self.networks, self.memory = Networks("a"), memory or NetworkMemory()
        self.boot_s = 1000.0

    def read(self, rows: Rows, after_s: float = 15.0) -> list[str]:
        self.boot_s += after_s
        found = judged(self.networks, readings_of(samples(rows, self.boot_s)), self.memory)
        return [one.fault for one in found]


def test_a_flap_needs_three_strikes_in_twelve_hours() -> None:
    card = Card()
    assert card.read(healthy()) == []
    hour_s = 3600.0
    assert card.read(healthy(downed=1), hour_s) == []
    assert card.read(healthy(downed=2), 7 * hour_s) == []
    assert card.read(healthy(downed=9), 6 * hour_s) == [], "the first is 13 hours old"
    assert card.read(healthy(downed=10), 1 * hour_s) == ["nic_flapping"]
    assert card.read(healthy(downed=10), 6 * hour_s) == [], "two are left of twelve hours"


def test_what_happens_within_half_a_minute_is_one_strike() -> None:
    card = Card()
    card.read(healthy())
    for downed in range(1, 7):
        card.read(healthy(downed=downed), 5.0)
    assert len(card.memory.strikes["mlx5_0/1"]) == 1
    card.read(healthy(downed=7), 60.0)
    assert len(card.memory.strikes["mlx5_0/1"]) == 2


def test_seen_down_by_its_state_and_by_its_counter_is_one_strike() -> None:
    card = Card()
    card.read(healthy())
    assert card.read(healthy(downed=1)) == []
    assert card.read(healthy(downed=1, up=0)) == ["nic_link_down"]
    assert len(card.memory.strikes["mlx5_0/1"]) == 1


def test_a_link_that_was_never_up_is_no_fault() -> None:
    card = Card()
    assert card.read(healthy(up=0)) == card.read(healthy(up=0)) == []
    assert card.read(healthy(up=1)) == [] and card.read(healthy(up=0)) == ["nic_link_down"]


def test_a_card_counts_as_missing_once_a_listing() -> None:
    card, ours = Card(), ("pci_bound", "pci=0000:1a:00.0", 1.0)
    other = ("pci_bound", "pci=0000:05:00.0", 1.0)

    def read(bus_s: float, *bus: tuple[str, str, float]) -> list[str]:
        card.boot_s += 15.0
        rows = (*samples(healthy(), card.boot_s), *((*one, bus_s) for one in bus))
        return [one.fault for one in judged(card.networks, readings_of(rows), card.memory)]

    assert read(1.0, ours, other) == []
    assert read(2.0, other) == read(3.0, other) == []
    # Cards are read by another collector: its news are no news of the bus, nor is silence.
    assert read(3.0, other) == read(3.0, other) == read(3.0) == []
    assert read(4.0, other) == ["nic_lost"]
    assert read(5.0, other, ours) == []


def test_a_dead_card_is_told_from_a_slow_one_by_its_own_pauses() -> None:
    card, key = Card(), ("keep_alives_total", "device=rdmap0,port=")
    signs = 0.0

    def read(moves: bool, after_s: float = 15.0) -> list[str]:
        nonlocal signs
        signs += moves
        return card.read({LISTED: 0.0, key: signs}, after_s)

    read(False)
    for _ in range(20):
        assert read(False) == [], "a driver that counts none is not judged"
    for _ in range(3):  # one sign of life in 45 s
        assert [read(False), read(False), read(True)] == [[], [], []]
    for _ in range(8):
        assert read(False) == []
    assert read(False) == ["nic_unresponsive"], "three times its longest pause"
    assert read(True) == []


def test_a_card_that_died_before_the_agent_came_is_found_and_stays_found() -> None:
    key = ("keep_alives_total", "device=rdmap0,port=")
    dead = {LISTED: 0.0, key: 1019.0}
    card = Card()
    assert [card.read(dead) for _ in range(20)] == [[]] * 20, "it may be one with long pauses"
    assert card.read(dead) == ["nic_unresponsive"]
    known = Card()
    for signs in (1017.0, 1018.0, 1019.0):
        assert known.read({LISTED: 0.0, key: signs}) == []
    anew = Card(msgspec.json.decode(msgspec.json.encode(known.memory), type=NetworkMemory))
    anew.boot_s = known.boot_s + 300.0
    assert [anew.read(dead) for _ in range(4)] == [[]] * 4
    assert anew.read(dead) == ["nic_unresponsive"]
    alive = Card(known.memory)
    alive.boot_s = known.boot_s + 300.0  # the stop of the agent was no pause of the card
    for signs in (1100.0, 1101.0):
        alive.read({LISTED: 0.0, key: signs})
    assert [alive.read({LISTED: 0.0, key: 1101.0}) for _ in range(4)][-1] == ["nic_unresponsive"]


def test_ports_that_nobody_reads_any_more_are_not_still() -> None:
    card, key = Card(), ("network_keep_alives_total", "device=rdmap0,port=")
    for signs in (1.0, 2.0, 3.0):
        card.read({LISTED: 0.0, ("keep_alives_total", key[1]): signs})
    last = (*key, 3.0, card.boot_s)  # what the child said before it fell silent
    for _ in range(40):
        card.boot_s += 15.0
        rows = (last, (f"network_{LISTED[0]}", LISTED[1], 0.0, card.boot_s))
        assert judged(card.networks, readings_of(rows), card.memory) == []


def test_a_gap_in_the_readings_teaches_nothing_about_pauses() -> None:
    card, key = Card(), ("keep_alives_total", "device=rdmap0,port=")
    for signs in (1.0, 2.0, 3.0):
        card.read({LISTED: 0.0, key: signs})
    card.read({LISTED: 0.0, key: 600.0}, after_s=600.0)  # nobody read for ten minutes
    for _ in range(3):
        assert card.read({LISTED: 0.0, key: 600.0}) == []
    assert card.read({LISTED: 0.0, key: 600.0}) == ["nic_unresponsive"]


def test_queues_that_are_taken_away_are_no_reset_of_the_card() -> None:
    card, key = Card(), ("transmit_timeouts_total", "device=ens1")
    assert card.read({LISTED: 0.0, key: 7.0}) == []
    assert card.read({LISTED: 0.0, key: 3.0}) == [], "the sum lost the queues that had the others"
    assert card.read({LISTED: 0.0, key: 4.0}) == ["nic_reset"]


def test_tables_stay_bounded_whatever_is_named() -> None:
    card = Card()
    for batch in range(0, 20_000, 2000):
        rows: Rows = {LISTED: 0.0}
        for number in range(batch, batch + 2000):
            rows["link_up", f"device=x{number},port="] = 1.0
            rows["errors_total", f"device=x{number},port=1,error=link_downed"] = 1.0
        card.read(rows)
        card.read({key: value + 1.0 for key, value in rows.items()})
    assert len(card.networks._levels) <= 1024 and len(card.networks._places) <= 16 * 1024
    assert len(card.memory.up) <= 1024 and len(card.memory.strikes) == 1024


@given(st.lists(st.tuples(
    st.sampled_from(["errors_total", "link_up", "info", "keep_alives_total", "port_state", "x",
                     "interface_index", "tcp_segments_total", "tcp_retransmits_total",
                     "speed_bytes_per_second", "carrier_changes_total", "unread_files"]),
    st.sampled_from(["", "device=a", "device=a,port=1", "device=,port=,error=link_downed", "=,=",
                     "direction=out", "collector=network,reason=x", "port=2", "kind=efa", ","])
    | st.text(max_size=20), st.floats(), st.floats(0, 1e6),
), max_size=30))
def test_no_sample_is_too_strange(rows: list[tuple[str, str, float, float]]) -> None:
    networks, memory = Networks("a"), NetworkMemory()
    for rest in range(len(rows)):
        found = judged(
            networks, [(f"network_{name}", *more) for name, *more in rows[rest:]],  # type: ignore
            memory,
        )
        assert all(one.reason and one.subject.startswith("node/a") for one in found)


# ------------------------------------------------------------- in the node


def test_faults_of_cards_are_shown_and_survive_the_agent_but_not_the_boot() -> None:
    lab = Lab()
    lab.samples = samples(healthy(), lab.boot_s)
    lab.step()
    lab.boot_s += 15.0
    lab.samples = samples(healthy(up=0), lab.boot_s)
    lab.step()
    (verdict,) = [one for one in lab.decision.verdicts if one.detector == "network"]
    assert (verdict.fault, verdict.subject) == ("nic_link_down", "node/a/nic/mlx5_0")
    assert not verdict.act
    assert not [one for one in lab.log if one.fault == verdict.fault], "shown, nothing is done"
    assert dict(verdict.evidence)["pci"] == "0000:1a:00.0"
    (incident,) = [one for one in lab.decision.incidents if one.subject == verdict.subject]
    assert incident.culprit == "nic mlx5_0 of a" and incident.state == "open"

    again = Node("a", lab.settings, {}, lab.node.memory())
    assert again.kept.detectors["network"].up == {"mlx5_0/1": 0.0}
    lab.node = again
    lab.boot_s += 15.0
    lab.samples = samples(healthy(up=0), lab.boot_s)
    lab.step()
    assert [one.fault for one in lab.decision.verdicts] == ["nic_link_down"]

    kept = msgspec.json.decode(again.memory())
    kept["boot_id"] = "another"
    rebooted = Node("a", lab.settings, {}, msgspec.json.encode(kept))
    lab.node = rebooted
    lab.step()
    assert not rebooted.kept.detectors["network"].up
    assert not [one for one in lab.decision.verdicts if one.detector == "network"]
