"""A pause of a run, of a node and of the fleet: what it holds back, and how it ends."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import Doc, Request

from .driver import Cluster, Lab


def paused(lab: Lab, until_s: float, run: str = "r") -> None:
    subject = f"run/{run}" if run else f"node/{lab.name}"
    lab.requests = (Request("op-1", "pause", subject, "why", run=run, until_wall_s=until_s),)
    lab.step(1.0)
    lab.requests = ()


def wall_s(lab: Lab) -> float:
    return 1e9 + lab.boot_s


def test_a_run_is_resumed_when_its_time_is_over_and_a_fault_is_answered_then() -> None:
    lab = Lab()
    lab.begin()
    lab.train(5)
    until_s = wall_s(lab) + 60.0
    paused(lab, until_s)
    assert lab.node.paused_until() == {"run/r": until_s}
    lab.kill(0)
    for _ in range(30):
        lab.step(1.0)
    assert len(lab.starts()) == 1, "nothing is done while it is paused"
    for _ in range(40):
        lab.step(1.0)
    assert len(lab.starts()) == 2 and not lab.node.paused_until()


def test_a_restart_of_the_agent_forgets_no_end_of_a_pause() -> None:
    lab = Lab()
    lab.begin()
    paused(lab, wall_s(lab) + 5.0, run="")
    lab.restart_agent()
    assert lab.node.kept.paused == "why"
    for _ in range(10):
        lab.step(1.0)
    assert lab.node.kept.paused == "" and not lab.node.cases["r"].state.held.paused
    assert msgspec.json.decode(lab.node.memory())["paused_until_wall_s"] == 0.0


def test_a_pause_without_an_end_stays() -> None:
    lab = Lab()
    lab.begin()
    paused(lab, 0.0)
    for _ in range(100):
        lab.step(1.0)
    assert lab.node.cases["r"].state.held.paused and lab.node.paused_until() == {}


# ---------------------------------------------------------------- a run over nodes


def led_by_another(*until_s: float) -> tuple[Cluster, Lab, Lab]:
    """A run that its first leader was asked to pause, once or more; another leads it since."""
    cluster = trained("abc")
    first = cluster.labs[cluster.leader()]
    for number, one in enumerate(until_s):
        first.requests = (Request(f"op-{number}", "pause", "run/r", "why", run="r",
                                  until_wall_s=one and wall_s(first) + one),)
        cluster.run(2)
        first.requests = ()
    assert cluster.plan().paused
    cluster.dead.add(first.name)
    cluster.run(20)
    cluster.dead.clear()
    assert cluster.leader() != first.name
    return cluster, first, cluster.labs[cluster.leader()]


def test_who_leads_next_ends_a_pause_in_time() -> None:
    cluster, _, leader = led_by_another(60.0)
    shown = leader.node.paused_until()["run/r"]
    assert wall_s(leader) < shown < wall_s(leader) + 60.0
    while wall_s(leader) < shown - 1.0:
        cluster.run(1)
        assert cluster.plan().paused, "not before"
    cluster.run(5)
    assert not cluster.plan().paused
    assert all(lab.node.paused_until() == {} for lab in cluster.labs.values())


@pytest.mark.parametrize("then_s", [0.0, 300.0])
def test_who_leads_next_keeps_to_what_was_asked_last(then_s: float) -> None:
    """The first end would be 60 s after it was asked: a person said "longer" since."""
    cluster, _, leader = led_by_another(60.0, then_s)
    assert bool(leader.node.paused_until()) == bool(then_s)
    cluster.run(100)
    assert cluster.plan().paused
    # And to a word that comes when it leads already.
    leader.requests = (Request("op-9", "pause", "run/r", "why", run="r",
                               until_wall_s=wall_s(leader) + 20.0),)
    cluster.run(1)
    leader.requests = ()
    cluster.run(25)
    assert not cluster.plan().paused


def test_whoever_led_when_it_was_paused_does_not_pause_it_anew() -> None:
    cluster, first, leader = led_by_another(0.0)
    cluster.run(3)
    leader.requests = (Request("op-2", "resume", "run/r", "done", run="r"),)
    cluster.run(1)
    leader.requests = ()
    cluster.run(3)
    assert not cluster.plan().paused
    cluster.dead.update(name for name in cluster.labs if name != first.name)
    cluster.run(20)
    cluster.dead.clear()
    cluster.run(5)
    assert cluster.leader() == first.name and not cluster.plan().paused


# ---------------------------------------------------------------- the fleet


def ask_fleet(lab: Lab, action: str, until_s: float = 0.0, id: str = "op-f") -> None:
    lab.requests = (Request(id, action, "fleet", "switch upgrade", by="ann",
                            until_wall_s=until_s),)


def trained(names: str = "ab") -> Cluster:
    cluster = Cluster(names, len(names))
    cluster.run(6)
    for lab in cluster.labs.values():
        lab.all(step=5, phase="forward_backward", step_time_s=0.5)
    cluster.run(1)
    return cluster


def test_whoever_is_asked_pauses_every_node_and_a_run_s_own_pause_outlives_it() -> None:
    cluster = trained()
    leader, other = sorted(cluster.labs, key=lambda one: one != cluster.leader())
    ask_fleet(cluster.labs[other], "pause")
    cluster.run(3)
    assert [one.text for one in cluster.labs[other].decision.answers] == [
        "pause: the fleet's document says so"]
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {"switch upgrade"}
    assert not cluster.plan().paused, "no mark of the run's own"
    puts = [e for e in cluster.labs[other].log if e.subject == "store/fleet/pause"]
    assert [one.reason for one in puts] == ["switch upgrade"], "written once, with its reason"

    rank = 0 if cluster.labs[leader].view.ranks[0].rank == 0 else 1
    cluster.labs[leader].kill(rank)
    cluster.run(20)
    assert cluster.plan().generation == 1, "nothing is done while it stands"
    paused(cluster.labs[leader], 0.0)
    ask_fleet(cluster.labs[leader], "resume", id="op-g")
    cluster.run(10)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}
    assert cluster.plan().generation == 1 and cluster.plan().paused, "its own pause stays"
    cluster.labs[leader].requests = (Request("op-h", "resume", "run/r", "done", run="r"),)
    cluster.run(10)
    assert cluster.plan().generation == 2


def test_a_fleet_s_pause_ends_by_itself_on_every_node() -> None:
    cluster = trained()
    first = cluster.labs["a"]
    ask_fleet(first, "pause", wall_s(first) + 30.0)
    cluster.run(3)
    for lab in cluster.labs.values():
        assert lab.node.paused_until()["fleet"] == pytest.approx(wall_s(first) + 27.0, abs=2.0)
    cluster.run(35)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}
    assert all(lab.node.paused_until() == {} for lab in cluster.labs.values())


@pytest.mark.parametrize("off_s", [3600.0, -3600.0])
def test_a_clock_that_is_off_an_hour_ends_a_fleet_s_pause_neither_early_nor_late(
    off_s: float
) -> None:
    cluster = trained("abc")
    first, other = cluster.labs["a"], cluster.labs["b"]
    other.wall_ahead_s = off_s
    ask_fleet(first, "pause", wall_s(first) + 30.0)
    cluster.run(1)
    first.requests = ()
    cluster.dead.add("a")  # whoever asked for it is not needed for its end
    cluster.run(25)
    assert other.decision.fleet_paused and cluster.labs["c"].decision.fleet_paused
    shown = other.node.paused_until()["fleet"] - wall_s(other) - off_s
    assert 3.0 < shown < 6.0, "what a person reads there is by that node's clock"
    cluster.run(7)
    assert not other.decision.fleet_paused and not cluster.labs["c"].decision.fleet_paused


def test_a_node_that_hears_late_of_a_fleet_s_pause_ends_it_with_the_others() -> None:
    """It cannot tell how much of it is over; they can, and write it down."""
    cluster = trained("abc")
    late = cluster.labs["c"]
    late.store_up = False
    ask_fleet(cluster.labs["a"], "pause", wall_s(late) + 30.0)
    cluster.run(1)
    cluster.labs["a"].requests = ()
    cluster.run(24)
    late.store_up = True
    late.boot_id = "another"  # nor does a reboot end it early
    cluster.run(2)
    assert late.decision.fleet_paused
    cluster.run(7)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}
    puts = [one for lab in cluster.labs.values() for one in lab.log
            if one.subject == "store/fleet/pause"]
    assert len(puts) <= 1 + len(cluster.labs), "each tried at most once to write its end"


def test_the_end_of_a_fleet_s_pause_is_never_written_over_a_newer_one() -> None:
    cluster = trained()
    first, other = cluster.labs["a"], cluster.labs["b"]
    ask_fleet(first, "pause", wall_s(first) + 10.0)
    cluster.run(9)
    ask_fleet(other, "pause", wall_s(other) + 60.0, id="op-g")
    cluster.run(1)
    first.requests = other.requests = ()
    cluster.run(20)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {"switch upgrade"}
    cluster.run(42)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_a_fleet_s_pause_that_is_over_before_the_store_is_back_is_never_written() -> None:
    cluster = trained()
    for lab in cluster.labs.values():
        lab.store_up = False
    first = cluster.labs["a"]
    ask_fleet(first, "pause", wall_s(first) + 10.0)
    cluster.run(8)
    assert first.decision.fleet_paused
    cluster.run(4)
    for lab in cluster.labs.values():
        lab.store_up = True
    cluster.run(4)
    assert "fleet/pause" not in cluster.docs
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_a_restart_of_the_agent_does_not_begin_a_fleet_s_pause_anew() -> None:
    cluster = trained()
    for name, lab in cluster.labs.items():
        ask_fleet(lab, "pause", wall_s(lab) + 30.0, id=f"op-{name}")
    cluster.run(20)
    for lab in cluster.labs.values():
        lab.restart_agent()
    cluster.run(12)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_without_the_store_it_holds_here_at_once_and_is_written_when_it_is_back() -> None:
    cluster = trained()
    for lab in cluster.labs.values():
        lab.store_up = False
    ask_fleet(cluster.labs["a"], "pause")
    cluster.run(3)
    assert cluster.labs["a"].decision.fleet_paused and not cluster.labs["b"].decision.fleet_paused
    assert not cluster.labs["a"].decision.answers, "nothing is done that is not everywhere"
    cluster.labs["a"].restart_agent()
    cluster.run(2)
    assert cluster.labs["a"].decision.fleet_paused
    for lab in cluster.labs.values():
        lab.store_up = True
    cluster.run(4)
    assert cluster.labs["b"].decision.fleet_paused
    for lab in cluster.labs.values():
        lab.store_up = False
    cluster.labs["b"].restart_agent()
    cluster.run(2)
    assert cluster.labs["b"].decision.fleet_paused, "what was known of it stands"


@pytest.mark.parametrize("restarted", [False, True])
def test_a_fleet_s_pause_that_a_seeded_store_has_lost_stands_and_is_written_again(
    restarted: bool
) -> None:
    cluster = trained()
    ask_fleet(cluster.labs["a"], "pause", wall_s(cluster.labs["a"]) + 60.0)
    cluster.run(3)
    cluster.labs["a"].requests = ()
    before = cluster.docs["fleet/pause"].body
    if restarted:
        for lab in cluster.labs.values():
            lab.restart_agent()
    cluster.docs.clear()
    for _ in range(3):
        cluster.run(1)
        assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {"switch upgrade"}
    # Who has just begun leaves it to the others for a while: they may know of a resume.
    assert ("fleet/pause" in cluster.docs) is not restarted
    cluster.run(25 if restarted else 0)
    assert cluster.docs["fleet/pause"].body == before
    cluster.run(60)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_a_fleet_that_was_resumed_is_not_paused_by_a_store_that_lost_everything() -> None:
    cluster = trained()
    ask_fleet(cluster.labs["a"], "pause")
    cluster.run(3)
    ask_fleet(cluster.labs["b"], "resume", id="op-g")
    cluster.labs["a"].requests = ()
    cluster.run(3)
    cluster.labs["b"].requests = ()
    cluster.docs.clear()
    cluster.run(5)
    assert not msgspec.json.decode(cluster.docs["fleet/pause"].body).get("paused")
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_a_node_that_was_away_while_the_fleet_was_resumed_does_not_pause_it_again() -> None:
    cluster = trained("abc")
    ask_fleet(cluster.labs["a"], "pause")
    cluster.run(3)
    cluster.labs["a"].requests = ()
    cluster.labs["c"].store_up = False
    ask_fleet(cluster.labs["b"], "resume", id="op-g")
    cluster.run(3)
    cluster.labs["b"].requests = ()
    cluster.docs.clear()
    cluster.labs["c"].restart_agent()
    cluster.labs["c"].store_up = True
    cluster.run(30)
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_a_fleet_s_pause_is_not_carried_into_another_clusters_store() -> None:
    cluster = trained()
    for lab in cluster.labs.values():
        lab.cluster = "first"
    ask_fleet(cluster.labs["a"], "pause")
    cluster.run(3)
    cluster.labs["a"].requests = ()
    cluster.docs.clear()
    for lab in cluster.labs.values():
        lab.cluster = ""
    cluster.run(3)
    assert "fleet/pause" not in cluster.docs
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {"switch upgrade"}
    for lab in cluster.labs.values():
        lab.cluster = "second"
    cluster.run(3)
    assert "fleet/pause" not in cluster.docs
    assert {lab.decision.fleet_paused for lab in cluster.labs.values()} == {""}


def test_on_one_node_the_fleet_is_the_node() -> None:
    lab = Lab()
    lab.begin()
    lab.train(5)
    ask_fleet(lab, "pause")
    lab.step(1.0)
    lab.requests = ()
    lab.kill(0)
    for _ in range(30):
        lab.step(1.0)
    assert len(lab.starts()) == 1
    rows = {category: s for _, category, s in lab.decision.run_ledger}
    assert rows.get("paused", 0.0) > 20.0
    ask_fleet(lab, "resume", id="op-g")
    for _ in range(10):
        lab.step(1.0)
    assert len(lab.starts()) == 2


def test_a_body_that_nobody_can_read_pauses_nothing() -> None:
    lab = Lab()
    lab.begin()
    for body in (b"{", b"[]", b'{"paused": "yes"}', b"[" * 5000):
        lab.docs["fleet/pause"] = Doc("fleet/pause", 3, body)
        lab.step(1.0)
        assert lab.decision.fleet_paused == ""
