"""What an alert from outside has done with the node that it names: once, and within its budget."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import (
    Alert,
    CheckVerdict,
    GateSettings,
    Request,
    Runbook,
    RunCheck,
    Settings,
)
from holdfast.agent.core.nodes.alert_actions import WAITS_S
from holdfast.agent.core.run.alerts import STORM_S
from holdfast.agent.core.run.members import NodeDoc, read_node

from .driver import Cluster, Lab, replace

ACTING = Settings(act=(*Settings().act, "alerts"))
MANY = replace(ACTING, single_node=False)
T0 = 1e9


def book(*ladder: str, **more: object) -> Runbook:
    values = {"budget_count": 1, "checks": ("disk",)} | more
    return Runbook("hot_rack", "degraded", "node", ladder, **values)  # type: ignore[arg-type]


def alert(number: int = 1, **fields: object) -> Alert:
    values = {"id": f"{number}/t", "name": "HotRack", "runbook": "hot_rack", "run": "",
              "node": "b", "summary": "41 degrees", "taken_wall_s": T0 + 100.0}
    return Alert(**(values | fields))  # type: ignore[arg-type]


class Room:
    """Nodes with one store of alerts: what is answered by any of them is settled for all, and what
    fires fires until the test ends it."""

    def __init__(self, labs: dict[str, Lab], cluster: Cluster | None, one: Runbook | None) -> None:
        self.labs, self.cluster = labs, cluster
        self.outcomes: dict[str, list[tuple[str, bool, str]]] = {}
        self.alerts: tuple[Alert, ...] = ()
        self.firing: tuple[str, ...] = ()
        for lab in labs.values():
            lab.runbooks |= {one.fault: one} if one is not None else {}

    def send(self, *alerts: Alert) -> None:
        self.alerts += alerts
        self.firing += tuple(one.id for one in alerts)

    def resolve(self, *numbers: int) -> None:
        over = {f"{number}/t" for number in numbers}
        self.firing = tuple(id for id in self.firing if id not in over)
        self.alerts = tuple(one for one in self.alerts if one.id not in over)

    def run(self, seconds: float, step_s: float = 1.0) -> None:
        for _ in range(int(seconds / step_s)):
            for lab in self.labs.values():
                lab.alerts, lab.firing = self.alerts, self.firing
            if self.cluster is not None:
                self.cluster.step(step_s)
            else:
                (lab,) = self.labs.values()
                lab.step(step_s)
            for name, lab in self.labs.items():
                for answer in lab.decision.answers:
                    if any(one.id == answer.id for one in self.alerts):
                        self.outcomes.setdefault(answer.id, []).append(
                            (name, answer.ok, answer.text))
            self.alerts = tuple(one for one in self.alerts if one.id not in self.outcomes)

    def told(self, number: int = 1) -> tuple[bool, str]:
        """What the first who answered said."""
        return self.outcomes[f"{number}/t"][0][1:]

    def incidents(self, node: str) -> list:
        return [one for one in self.labs[node].incidents.values() if "-alert-" in one.id]

    def doc(self, node: str = "b") -> NodeDoc:
        lab = self.labs[node]
        return read_node(lab.docs[f"node/{node}"]) if f"node/{node}" in lab.docs else NodeDoc()


def fleet(one: Runbook, names: str = "abc", settings: Settings = MANY) -> Room:
    """A run on a and b, and c to spare."""
    cluster = Cluster(names, 2, settings=settings)
    room = Room(cluster.labs, cluster, one)
    room.run(8)
    for lab in cluster.labs.values():
        if lab.view.ranks:
            lab.all(step=5, phase="forward_backward", step_time_s=0.5)
    room.run(1)
    return room


def alone(one: Runbook, settings: Settings = ACTING, begun: bool = True) -> Room:
    lab = Lab(settings=settings, name="b")
    room = Room({"b": lab}, None, one)
    if begun:
        lab.begin()
        lab.train(to=20)
    return room


def rounds(lab: Lab) -> int:
    return sum(isinstance(one.body, RunCheck) and not one.body.run for one in lab.log)


# ---------------------------------------------------------------- exclusion and drain


def test_the_node_that_an_alert_names_is_excluded_once_and_its_ranks_go_elsewhere() -> None:
    room = fleet(book("exclude_node"))
    room.send(alert())
    room.run(10)
    assert room.told() == (True, "b is excluded from runs")
    assert [name for name, _, _ in room.outcomes["1/t"]] == ["b"], "nobody else answers for it"
    doc = room.doc()
    assert (doc.excluded, doc.fault, doc.by, doc.reason) == (
        True, "hot_rack", "alert HotRack", "alert HotRack: 41 degrees")
    assert len(doc.strikes) == 1
    assert room.cluster.plan().members == ("a", "c")
    writes = [one for lab in room.labs.values() for one in lab.log
              if one.subject == "store/node/b"]
    assert [one.request for one in writes] == ["1/t"]
    (incident,) = room.incidents("b")
    assert incident.state == "acted" and incident.reason == "alert HotRack: 41 degrees"
    assert any("exclude_node: b is excluded" in text for _, text in incident.timeline)


def test_what_an_alert_became_is_told_once_for_the_journal() -> None:
    room = fleet(book("exclude_node"))
    asked: list[Request] = []
    room.send(alert())
    for _ in range(6):
        room.run(1)
        asked += room.labs["b"].decision.asked
    (one,) = asked
    assert (one.id, one.action, one.subject, one.by) == (
        "1/t", "exclude_node", "node/b", "alert HotRack")
    assert not any(lab.decision.asked for lab in room.labs.values())


def test_a_drain_needs_leave_and_is_a_persons_drain() -> None:
    room = fleet(book("drain_node"))
    room.send(alert())
    room.run(5)
    assert room.told() == (False, "nothing is done: drain_node: not done, because actions.allow "
                                  "does not name it")
    room = fleet(book("drain_node"), settings=replace(MANY, allow=("drain_node",)))
    room.send(alert())
    room.run(14)
    assert room.told() == (True, "b is drained: nothing of any run is left there")
    assert room.doc().excluded and room.doc().fault == "hot_rack"
    stops = [one.body for one in room.labs["b"].log if one.kind == "stop"]
    assert stops[0].park and stops[0].save, "with a checkpoint, at the end of a step"


def test_a_storm_about_one_node_is_one_action_and_its_rest_comes_minutes_later() -> None:
    room = fleet(book("exclude_node", budget_count=9))
    room.send(*(alert(number) for number in range(1000)))
    room.run(10)
    assert len(room.outcomes) == 1000
    assert [room.told(number)[0] for number in range(1000)].count(True) == 1
    assert "is under way for hot_rack: one action answers a storm" in room.told(999)[1]
    room.run(60)
    room.send(alert(1000))
    room.run(5)
    assert room.told(1000)[1].endswith(" s ago: one action answers a storm")
    assert len(room.doc().strikes) == 1 and len(room.incidents("b")) == 1


def test_a_node_that_is_out_already_costs_no_budget() -> None:
    room = fleet(book("exclude_node"))
    room.labs["a"].requests = (Request("q1", "exclude_node", "node/b", "noisy", by="ann"),)
    room.run(5)
    room.send(alert())
    room.run(5)
    assert room.told() == (False, "nothing is done: b is out of runs already: noisy")
    assert room.doc().by == "ann" and room.doc().strikes == ()


def test_the_breaker_holds_back_what_many_alerts_ask_for() -> None:
    room = fleet(book("exclude_node"), names="abcdefgh")
    for number, node in enumerate("bcdefgh"):
        room.send(alert(number, node=node))
        room.run(4)
    out = [node for node in "bcdefgh" if room.doc(node).excluded]
    assert len(out) == 2
    assert room.told(6)[1].startswith("nothing is done: the breaker is open: hot_rack on 3 of 8")


def test_a_pause_of_node_fleet_or_run_lets_it_wait() -> None:
    for subject in ("node/b", "fleet", "run/r"):
        room = fleet(book("exclude_node"))
        by = room.cluster.leader() if subject == "run/r" else "b"
        pause = Request("p", "pause", subject, "hands off", by="ann")
        room.labs[by].requests = (pause,)
        room.run(4)
        room.send(alert())
        room.run(20)
        assert room.outcomes == {} and not room.doc().excluded, subject
        (incident,) = room.incidents("b")
        assert incident.would_have.startswith("exclude_node: held: "), incident.would_have
        room.labs[by].requests = (replace(pause, id="r", action="resume"),)
        room.run(8)
        assert room.told() == (True, "b is excluded from runs"), subject


# ---------------------------------------------------------------- release, and what resolved does


def test_it_is_out_while_the_alert_fires_and_then_until_its_checks_pass() -> None:
    room = fleet(book("exclude_node"))
    room.send(alert())
    room.run(60)
    assert room.doc().excluded and rounds(room.labs["b"]) == 0
    room.labs["b"].health["disk"] = CheckVerdict("disk", "critical", "dying", confirmed=True)
    room.resolve(1)
    room.run(20)
    assert room.doc().excluded and rounds(room.labs["b"]) == 1
    (incident,) = room.incidents("b")
    assert incident.state == "acted"
    assert incident.would_have == ("resolved; it is open until checks of the node pass or a person "
                                   "releases it")
    room.labs["b"].health.clear()
    room.run(600)
    assert not room.doc().excluded
    assert room.doc().reason == "checks passed after the exclusion: disk"
    (incident,) = room.incidents("b")
    assert incident.state == "closed"
    assert incident.timeline[-1][1] == "resolved, and nothing else holds it open"


def test_a_person_releases_it_while_it_fires_and_the_incident_stays_until_the_end() -> None:
    room = fleet(book("exclude_node"))
    room.send(alert())
    room.run(5)
    room.labs["a"].requests = (Request("q", "release_node", "node/b", "known", by="ann"),)
    room.run(20)
    assert not room.doc().excluded, "and it is not excluded again"
    assert room.incidents("b")[0].state == "acted"
    room.resolve(1)
    room.run(2)
    assert room.incidents("b")[0].state == "closed"


def test_what_is_resolved_before_anything_was_done_does_nothing() -> None:
    room = fleet(book("exclude_node"))
    room.labs["b"].requests = (Request("p", "pause", "node/b", "hands off"),)
    room.run(2)
    room.send(alert())
    room.run(3)
    room.resolve(1)
    room.labs["b"].requests = (Request("r", "resume", "node/b", "go"),)
    room.run(10)
    assert not room.doc().excluded and room.incidents("b")[0].state == "closed"


def test_two_alerts_of_one_runbook_hold_one_incident_until_both_are_over() -> None:
    room = alone(book("run_check"))
    room.send(alert(1), alert(2))
    room.run(5)
    room.resolve(1)
    room.run(5)
    assert room.incidents("b")[0].state == "acted"
    room.resolve(2)
    room.run(2)
    assert room.incidents("b")[0].state == "closed"


# ---------------------------------------------------------------- checks and evidence


def test_checks_are_made_and_said_and_then_the_ladder_climbs() -> None:
    room = fleet(book("run_check", "exclude_node"))
    room.labs["b"].health["disk"] = CheckVerdict("disk", "warning", "slow", confirmed=True)
    room.send(alert())
    room.run(5)
    assert room.told() == (True, "disk warning: slow") and rounds(room.labs["b"]) == 1
    room.run(STORM_S, 2.0)
    room.send(alert(2))
    room.run(5)
    assert room.told(2) == (True, "b is excluded from runs")
    room.labs["a"].requests = (Request("q", "release_node", "node/b", "known", by="ann"),)
    room.run(STORM_S, 2.0)
    room.send(alert(3))
    room.run(5)
    ok, text = room.told(3)
    assert not ok and text == ("nothing is done: hot_rack of b used up what its runbook allows: 1 "
                               "within 24 h each")


def test_checks_that_take_the_devices_wait_for_the_run() -> None:
    gate = GateSettings(disturbing=("disk",))
    room = alone(book("run_check"), replace(ACTING, gate=gate))
    room.send(alert())
    room.run(10)
    assert room.outcomes == {} and rounds(room.labs["b"]) == 0
    assert room.incidents("b")[0].would_have == "run_check: waits while r goes on"
    lab = room.labs["b"]
    lab.view = replace(lab.view, state="done")
    room.run(5)
    assert room.told()[0] and rounds(lab) == 1


def test_a_check_that_an_ended_agent_forgot_is_not_made_again() -> None:
    room = alone(book("run_check"))
    room.labs["b"].hold.add("run_check")
    room.send(alert())
    room.run(3)
    room.labs["b"].restart_agent()
    room.run(3)
    assert room.told() == (False, "the agent ended before it learned the outcome")
    assert rounds(room.labs["b"]) == 1


def test_the_ranks_of_the_node_are_looked_at() -> None:
    room = alone(book("take_evidence"))
    room.send(alert())
    room.run(4)
    (incident,) = room.incidents("b")
    assert room.told() == (True, f"what was seen of the ranks here stands in {incident.id}")
    assert {what for what, _ in incident.evidence} >= {
        "rank 0 of run r where", "rank 1 of run r where"}
    looks = [one for one in room.labs["b"].log if one.kind == "evidence"]
    assert len(looks) == 2 and {one.request for one in looks} == {"1/t"}
    assert room.labs["b"].view.generation == 1


def test_a_look_that_an_ended_agent_forgot_is_not_made_again() -> None:
    room = alone(book("take_evidence"))
    room.labs["b"].hold.add("evidence")
    room.send(alert())
    room.run(2)
    room.labs["b"].restart_agent()
    room.run(3)
    assert room.told() == (False, "the agent ended before it learned the outcome")
    looks = [one for one in room.labs["b"].log if one.kind == "evidence"]
    assert len(looks) == 2 and not room.labs["b"].node.kept.alerts.looks


def test_evidence_is_taken_beside_an_exclusion() -> None:
    room = fleet(book("take_evidence", "exclude_node"))
    room.send(alert())
    room.run(8)
    kinds = [one.kind for one in room.labs["b"].log if one.request == "1/t"]
    assert kinds == ["evidence", "put"] and room.doc().excluded


def test_nobody_is_looked_at_where_nothing_runs() -> None:
    room = alone(book("take_evidence"), begun=False)
    lab = room.labs["b"]
    lab.view = replace(lab.view, state="done", generation=1)
    room.send(alert())
    room.run(3)
    assert room.told() == (False, "nothing is done: no rank runs on b")


# ---------------------------------------------------------------- a run's ranks


def test_a_runs_ranks_are_looked_at_on_every_node_by_its_leader() -> None:
    room = fleet(book("take_evidence"))
    room.send(alert(run="r", node="", generation=1))
    room.run(6)
    leader = room.cluster.leader()
    assert room.told() == (True, "ranks of generation 1 are looked at for it")
    looks = [one for lab in room.labs.values() for one in lab.log if one.kind == "evidence"]
    assert sorted(one.body.rank for one in looks) == [0, 1]
    (note,) = (one for one in room.labs[leader].incidents.values() if one.fault == "hot_rack")
    assert {"rank 0 where", "rank 1 where"} <= {what for what, _ in note.evidence}
    assert room.cluster.plan().generation == 1
    assert dict(room.cluster.plan().spent) == {"hot_rack/take_evidence/run/r": 1}
    room.resolve(1)
    room.run(2)
    assert room.labs[leader].incidents[note.id].state == "closed"


def test_the_next_leader_inherits_that_budget_and_looks_at_nobody_twice() -> None:
    room = fleet(book("take_evidence"))
    room.send(alert(run="r", node="", generation=1))
    room.run(6)
    first = room.cluster.leader()
    room.cluster.dead.add(first)
    room.run(40)
    assert room.cluster.leader() != first
    now = room.cluster.plan().generation
    room.send(alert(2, run="r", node="", generation=now))
    room.run(6)
    ok, text = room.told(2)
    assert not ok and text.startswith("nothing is done: hot_rack/take_evidence/run/r used up")


def test_a_charge_that_the_store_refused_is_written_again() -> None:
    room = fleet(book("take_evidence"))
    leader = room.labs[room.cluster.leader()]
    leader.refuse_puts = 1
    room.send(alert(run="r", node="", generation=1))
    room.run(20)
    assert leader.refuse_puts == 0 and room.told()[0]
    assert dict(room.cluster.plan().spent) == {"hot_rack/take_evidence/run/r": 1}
    looks = [one for one in leader.log if one.kind == "evidence"]
    assert len(looks) == 2


def test_a_storm_about_a_run_looks_once() -> None:
    room = fleet(book("take_evidence", budget_count=9))
    room.send(*(alert(number, run="r", node="", generation=1) for number in range(50)))
    room.run(8)
    assert [room.told(number)[0] for number in range(50)].count(True) == 1
    looks = [one for lab in room.labs.values() for one in lab.log if one.kind == "evidence"]
    assert len(looks) == 2


def test_an_alert_about_a_run_may_name_the_node_that_is_to_blame() -> None:
    room = fleet(book("restart_ranks", "exclude_node"))
    room.send(alert(run="r", generation=1))
    room.run(10)
    assert room.told()[0] and room.cluster.plan().generation == 2
    assert not room.doc().excluded
    room.run(STORM_S, 2.0)
    room.send(alert(2, run="r", generation=2))
    room.run(12)
    assert room.told(2)[0] and room.cluster.plan().generation == 3
    assert room.doc().excluded and room.doc().request == "2/t"
    assert room.cluster.plan().members == ("a", "c")


# ---------------------------------------------------------------- what is not acted on


@pytest.mark.parametrize(("ladder", "fields", "text"), [
    (("exclude_node",), {"node": "", "run": "r"}, "exclude_node: the alert has no label `node`"),
    (("restart_ranks",), {}, "restart_ranks: the alert has no label `run`"),
    (("restart_ranks", "exclude_node"), {}, "restart_ranks: the alert has no label `run`"),
    (("take_evidence",), {"node": ""},
     "nothing is done: the alert has neither label `run` nor `node`"),
    (("exclude_node",), {"runbook": "pray"}, "no runbook is named 'pray': shown alone"),
    (("reboot_node", "exclude_node"), {}, "nothing is done: reboot_node: no alert has it done"),
    (("ask_person",), {}, "nothing is done: ask_person: a person's part"),
    (("stop_run",), {}, "nothing is done: stop_run: no alert has it done"),
    (("exclude_node",), {"node": "z"}, "no node 'z' is known here: the label `node` has an agent's "
                                       "own name of its node"),
])
def test_what_is_not_acted_on_is_said(
    ladder: tuple[str, ...], fields: dict[str, object], text: str
) -> None:
    room = fleet(book(*ladder))
    room.send(alert(**fields))
    room.run(WAITS_S + 5)
    ok, said = room.told()
    assert not ok and said.removeprefix("nothing is done: ") == text.removeprefix(
        "nothing is done: ")
    assert not any(key.startswith("node/") for key in room.cluster.docs)
    assert room.cluster.plan().generation == 1


def test_without_leave_it_is_shown_alone_with_what_would_have_been_done() -> None:
    room = fleet(book("exclude_node"), settings=Settings(single_node=False))
    room.send(alert())
    room.run(3)
    assert room.told() == (False, "shown alone: detect.act does not name 'alerts'; it would have: "
                                  "exclude_node")
    assert not room.doc().excluded and room.incidents("b") == []


def test_a_node_whose_agent_is_gone_is_said_and_not_acted_on_by_others() -> None:
    room = fleet(book("exclude_node"))
    room.cluster.dead.add("c")
    room.run(1)
    room.send(alert(node="c"))
    room.run(WAITS_S / 2)
    assert room.outcomes == {}
    room.run(WAITS_S)
    assert room.told() == (False, "nothing is done: the agent of node 'c' does not answer, and it "
                                  "alone acts on alerts about that node")
    assert not room.doc("c").excluded


def test_nobodys_clock_decides_how_long_another_node_is_waited_for() -> None:
    room = fleet(book("exclude_node"))
    room.labs["a"].wall_ahead_s = 7200.0
    room.labs["b"].hold.add("put")
    room.send(alert())
    room.run(30)
    assert room.outcomes == {}


def test_nor_how_long_the_launcher_of_a_run_is_waited_for() -> None:
    room = fleet(book("restart_ranks"))
    room.labs["a"].wall_ahead_s = 7200.0
    room.send(alert(run="later", node=""))
    room.run(30)
    assert room.outcomes == {}
    room.run(WAITS_S)
    assert room.told() == (False, "no launcher of run 'later' came")


# ---------------------------------------------------------------- the agent's own end


def test_an_agent_that_ends_in_between_excludes_once_and_counts_once() -> None:
    for memory in (True, False):
        room = fleet(book("exclude_node"))
        lab = room.labs["b"]
        lab.alerts, lab.firing = (alert(),), ("1/t",)
        lab.step(0.1)  # written, and not seen yet
        assert "node/b" in room.cluster.docs
        if memory:
            lab.restart_agent()
        else:
            lab.node = type(lab.node)("b", lab.settings, lab.runbooks)
        room.send(alert())
        room.run(6)
        assert room.told() == (True, "b is excluded from runs")
        assert len(room.doc().strikes) == 1
        assert room.cluster.docs["node/b"].version == 1


def test_a_spent_budget_is_known_to_the_next_life_of_the_agent() -> None:
    room = alone(book("run_check"))
    room.send(alert())
    room.run(4)
    room.labs["b"].restart_agent()
    room.run(STORM_S, 2.0)
    room.send(alert(2))
    room.run(4)
    assert not room.told(2)[0] and "used up what its runbook allows" in room.told(2)[1]
    assert rounds(room.labs["b"]) == 1


def test_an_answer_is_given_as_often_as_it_is_asked_for() -> None:
    """The store may refuse the outcome: the alert comes again, and nothing is done again."""
    room = alone(book("run_check", budget_count=5))
    room.send(alert())
    room.run(4)
    first = room.told()
    room.outcomes.clear()
    room.labs["b"].restart_agent()
    room.send(alert())
    room.run(2)
    assert room.told() == first and rounds(room.labs["b"]) == 1
