"""A GPU of a node is carried by one run at a time: who has it, what the other one sees."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.agent.core.model import (
    Doc,
    Effect,
    Ended,
    Observed,
    Plan,
    RankView,
    Resume,
    RunView,
    Settings,
)
from holdfast.agent.core.nodes.device_holders import BACK_S, TURN_S
from holdfast.agent.core.run.members import is_refused

from .driver import Cluster, Lab

GPUS = ("0000:1b:00.0", "0000:4e:00.0")
LIMIT_S = Settings().gang_limit_s


class Shared(Lab):
    """A node on which launchers of other runs are as well."""

    others: tuple[RunView, ...] = ()

    def observed(self) -> Observed:
        seen = super().observed()
        return replace(seen, runs=(*self.others, *seen.runs))

    def _perform(self, effect: Effect) -> None:
        """What is ordered for the others is not looked at."""
        named = getattr(effect.body, "run", "") or getattr(effect.body, "key", "")
        if named.removeprefix("run/") not in {one.run for one in self.others}:
            super()._perform(effect)


def computing(run: str = "q", devices: tuple[str, ...] = GPUS, node: str = "a") -> RunView:
    ranks = (RankView(0, node, 77, 1, "running"),)
    return RunView(run, node, "script", 1, generation=1, state="running", ranks=ranks, uid=1001,
                   devices=devices)


def waiting(run: str, came_s: float) -> RunView:
    return RunView(run, "a", "script", 1, registered_boot_s=came_s, devices=GPUS)


def lab(*others: RunView, settings: Settings | None = None, **view: object) -> Shared:
    view = {"devices": GPUS[1:], "registered_boot_s": 100.0, **view}
    made = Shared("script", 1, settings, **view)  # type: ignore[arg-type]
    made.others = others
    return made


def said(one: Lab) -> str:
    return dict(one.decision.reasons)["r"]


def test_the_second_run_waits_as_a_gang_does_and_starts_when_the_first_has_ended() -> None:
    one = lab(computing())
    for _ in range(60):
        one.step(1.0)
    assert one.view.state == "idle"
    assert "GPU 0000:4e:00.0: run q (uid 1001) has it" in said(one)
    one.others = (replace(computing(), state="done", ranks=()),)
    one.settle()
    assert one.view.state == "running" and one.finishes() == []


def test_it_leaves_for_elsewhere_when_its_limit_is_over() -> None:
    one = lab(computing(), gang_limit_s=30.0)
    for _ in range(40):
        one.step(1.0)
    assert one.finishes() == [75] and one.view.state == "idle"
    why = next(effect.body.reason for effect in one.log if effect.kind == "finish")
    assert "CUDA_VISIBLE_DEVICES" in why and "--ignore-check exclusive" in why


@pytest.mark.parametrize(("theirs", "own"), [
    (GPUS[:1], GPUS[1:]), (GPUS, ()), ((), GPUS), ((), ())])
def test_runs_with_other_devices_or_none_do_not_see_one_another(
    theirs: tuple[str, ...], own: tuple[str, ...]
) -> None:
    one = lab(computing(devices=theirs), devices=own)
    one.settle()
    assert one.view.state == "running"


def test_who_says_so_shares_them() -> None:
    one = lab(computing(), ignored_checks=("exclusive",), ignore_reason="both are small")
    one.settle()
    assert one.view.state == "running"
    assert "check_ignored" in {incident.fault for incident in one.decision.incidents}


def test_what_runs_already_is_restarted_in_place_whoever_else_computes_there() -> None:
    one = lab()
    one.begin()
    one.train(3)
    one.others = (computing(),)
    one.kill(0)
    one.settle()
    assert one.view.generation == 2 and one.rank(0).state == "running"


@pytest.mark.parametrize(("run", "came_s", "starts"), [("q", 99.0, False), ("q", 101.0, True),
                                                       ("z", 99.0, False), ("z", 101.0, True)])
def test_of_two_that_wait_the_first_is_first(run: str, came_s: float, starts: bool) -> None:
    one = lab(waiting(run, came_s))
    one.step(2.0)
    one.settle()
    assert (one.view.state == "running") is starts


@pytest.mark.parametrize(("run", "starts"), [("q", False), ("z", True)])
def test_of_two_that_have_waited_long_the_one_of_the_lower_name_is(run: str, starts: bool) -> None:
    """Each may have come first on one of the nodes that both need: all nodes decide alike."""
    one = lab(waiting(run, 99.0), settings=Settings(single_node=False))
    for _ in range(int(TURN_S) + 6):
        one.step(1.0)
    assert (one.view.state == "running") is starts


def test_on_one_node_alone_who_came_first_stays_first_however_long_both_wait() -> None:
    one = lab(waiting("q", 101.0), computing("z"))
    for _ in range(int(TURN_S) + 6):
        one.step(1.0)
    one.others = one.others[:1]
    one.settle()
    assert one.view.state == "running"


def test_a_run_whose_ranks_ended_a_moment_ago_keeps_its_devices() -> None:
    """Its next generation is on its way, while the other one just waits."""
    ended = RankView(0, "a", 77, 1, "ended", ended=Ended(1))
    one = lab(replace(computing(), ranks=(ended,), registered_boot_s=100.5))
    plan = Plan("q", 1, ("a",), ((0, "a"),), Resume("own"), "test")
    one.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    one.step(1.0)
    one.settle()
    assert one.view.state == "idle"
    one.docs["run/q"] = Doc("run/q", 2, msgspec.json.encode(replace(plan, finished=0)))
    one.settle()
    assert one.view.state == "running"


def test_a_run_that_was_killed_and_is_back_overtakes_none_between_two_generations() -> None:
    """Its old plan still has ranks here, and its name comes first."""
    ended = RankView(0, "a", 77, 1, "ended", ended=Ended(1))
    one = lab(replace(computing("z"), ranks=(ended,), registered_boot_s=100.5))
    for run, generation in (("z", 1), ("r", 3)):
        plan = Plan(run, generation, ("a",), ((0, "a"),), Resume("own"), "test")
        one.docs[f"run/{run}"] = Doc(f"run/{run}", 1, msgspec.json.encode(plan))
    for _ in range(10):
        one.step(1.0)
    assert one.view.state == "idle" and "run z (uid 1001) has it" in said(one)


def test_behind_an_agents_restart_the_launchers_that_are_on_their_way_back_are_waited_for() -> None:
    one = lab()
    plan = Plan("q", 1, ("a",), ((0, "a"),), Resume("own"), "test")
    one.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    one.step(0.1)
    assert one.view.state == "idle" and "is not known until its launcher is back" in said(one)
    one.step(BACK_S + 0.1)
    one.settle()
    assert one.view.state == "running"


def test_a_run_of_which_nothing_lives_any_more_keeps_nobody_waiting() -> None:
    """Its launcher was killed, and its last levels say that it computes."""
    dead = replace(computing(), connected=False, gone=True)
    one = lab(dead)
    plan = Plan("q", 1, ("a",), ((0, "a"),), Resume("own"), "test")
    one.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    one.settle()
    assert one.view.state == "running" and one.incidents == {}


def test_ranks_that_outlive_their_launcher_keep_their_devices() -> None:
    one = lab(replace(computing(), connected=False))
    one.step(1.0)
    one.settle()
    assert one.view.state == "idle" and "run q (uid 1001) has it" in said(one)


def test_a_node_that_is_spare_for_another_run_is_free() -> None:
    one = lab(replace(waiting("q", 99.0)))
    plan = Plan("q", 1, ("z",), ((0, "z"),), Resume("own"), "test", spares=("a",))
    one.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    one.step(1.0)
    one.settle()
    assert one.view.state == "running"


# ---------------------------------------------------------------- over nodes


def shared(cluster: Cluster, node: str, *others: RunView) -> None:
    """Other runs' launchers on a node of the cluster."""
    one = cluster.labs[node]
    one.__class__ = Shared
    one.others = others  # type: ignore[attr-defined]


def test_who_leads_places_no_rank_where_another_run_has_the_devices() -> None:
    cluster = Cluster("abc", 2, "script", devices=GPUS)
    shared(cluster, "b", computing(node="b"))
    cluster.run(8)
    assert cluster.plan().ranks == ((0, "a"), (1, "c"))
    shared(cluster, "b")
    cluster.run(3)
    assert cluster.plan().spares == ("b",)


def test_who_leads_and_has_no_devices_itself_plans_for_the_others() -> None:
    cluster = Cluster("abc", 2, "script", devices=GPUS)
    shared(cluster, "a", computing())
    cluster.dead |= {"b", "c"}  # nobody else is there to lead ...
    cluster.run(20)
    assert cluster.leader() == "a" and "run/r" not in cluster.docs
    cluster.dead.clear()  # ... until long after
    cluster.run(12)
    assert {node for _, node in cluster.plan().ranks} == {"b", "c"}
    cluster.run(60)
    assert cluster.plan().generation == 1 and cluster.plan().finished == -1


def test_a_run_that_needs_the_node_waits_for_it_and_starts_when_it_is_free() -> None:
    cluster = Cluster("ab", 2, "script", devices=GPUS)
    shared(cluster, "b", computing(node="b"))
    cluster.run(60)
    assert "run/r" not in cluster.docs
    assert "b: GPUs 0000:1b:00.0, 0000:4e:00.0: run q (uid 1001) has them" in dict(
        cluster.labs["a"].decision.reasons)["r"]
    shared(cluster, "b")
    cluster.run(4)
    assert cluster.plan().ranks == ((0, "a"), (1, "b"))


def test_a_spare_whose_devices_another_run_took_gets_no_ranks() -> None:
    cluster = Cluster("abc", 2, "script", devices=GPUS)
    cluster.run(8)
    assert cluster.plan().ranks == ((0, "a"), (1, "b"))
    shared(cluster, "c", computing(node="c"))
    cluster.run(2)
    assert is_refused(cluster.heard["c", "r"].held)
    cluster.labs["b"].kill(1)
    cluster.dead.add("b")
    cluster.run(40)
    assert cluster.plan().generation == 1


def test_two_plans_of_one_moment_do_not_both_begin() -> None:
    """Each leader wrote before it had heard of the other: the node keeps to one of them."""
    cluster = Cluster("ab", 2, "script", devices=GPUS)
    cluster.labs["b"].hold.add("start")
    plan = Plan("q", 1, ("b",), ((0, "b"),), Resume("fresh"), "test")
    while "run/r" not in cluster.docs:
        cluster.step()
    cluster.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    lab_b = cluster.labs["b"]
    assert lab_b.view.generation == 0
    shared(cluster, "b", replace(computing(node="b"), ranks=(), generation=0, state="idle"))
    lab_b.hold.clear()
    lab_b.node.kept.in_flight.pending.clear()
    cluster.run(5)
    assert not lab_b.view.ranks and lab_b.finishes() == [] and lab_b.name != cluster.leader()
    assert is_refused(cluster.heard["b", "r"].held)
    shared(cluster, "b", computing(node="b"))
    cluster.run(60)
    assert not lab_b.view.ranks and cluster.plan().finished == -1
    assert not any(rank.state == "running" for rank in cluster.labs["a"].view.ranks)
    shared(cluster, "b")
    cluster.run(10)
    assert lab_b.view.ranks and lab_b.view.generation == cluster.plan().generation


def test_who_leads_leaves_a_node_that_another_run_was_given_as_well() -> None:
    """Nobody else would plan without it."""
    cluster = Cluster("ab", 2, "script", devices=GPUS)
    lead = cluster.labs["a"]
    lead.hold.add("start")
    while "run/r" not in cluster.docs:
        cluster.step()
    assert cluster.leader() == "a"
    plan = Plan("q", 1, ("a",), ((0, "a"),), Resume("fresh"), "test")
    cluster.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    shared(cluster, "a", replace(computing(), ranks=(), generation=0, state="idle"))
    lead.hold.clear()
    lead.node.kept.in_flight.pending.clear()
    cluster.run(5)
    assert not lead.view.ranks and lead.finishes() == [75]
    assert cluster.plan().finished == -1, "the others go on without it"


def test_a_shared_spare_that_has_served_before_serves_one_of_two_that_need_it() -> None:
    cluster = Cluster("abc", 2, "script", devices=GPUS)
    cluster.run(8)
    for dies, serves in (("b", "c"), ("c", "b")):
        cluster.dead = {dies}
        while serves not in {node for _, node in cluster.plan().ranks}:
            cluster.step()
        cluster.dead = set()
        cluster.run(10)
    spare = cluster.labs["c"]
    assert 0 < spare.view.generation < cluster.plan().generation
    spare.hold.add("start")
    cluster.dead = {"b"}
    while "c" not in {node for _, node in cluster.plan().ranks}:
        cluster.step()
    plan = Plan("q", 1, ("c",), ((0, "c"),), Resume("fresh"), "test")
    cluster.docs["run/q"] = Doc("run/q", 1, msgspec.json.encode(plan))
    shared(cluster, "c", replace(computing(node="c"), ranks=(), generation=0, state="idle"))
    spare.hold.clear()
    spare.node.kept.in_flight.pending.clear()
    cluster.run(8)
    assert spare.view.generation == 2 and spare.finishes() == []
    assert cluster.plan().finished == -1
