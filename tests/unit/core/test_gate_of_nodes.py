"""The gate over several nodes: each judges itself, and who leads leaves out whom that holds."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.checks.unlike import unlike
from holdfast.agent.core.model import CheckVerdict, Doc, GateSettings, Settings
from holdfast.agent.core.nodes.identity import Identity
from holdfast.agent.core.run.members import NodeDoc

from .driver import Cluster, replace

LOST = CheckVerdict("devices", "critical", "7 of 8", todo="reboot", confirmed=True)


def fleet(names: str, nnodes: int, least: int = 0, versions: dict[str, str] | None = None,
          gate: tuple[str, ...] = ("incidents", "drift", "devices"), wait_s: float = 0.0,
          **view) -> Cluster:
    settings = Settings(single_node=False, gather_s=2.0,
                        gate=GateSettings(names=gate, wait_s=wait_s))
    made = Cluster(names, nnodes, least=least, settings=settings, registered_boot_s=99.0, **view)
    for name, version in (dict.fromkeys(names, "2.2") if versions is None else versions).items():
        body = msgspec.json.encode(Identity({"node": {
            "software.nccl": version, "software.dcgm": name, "host.kernel": name}}))
        if version:
            made.labs[name].samples = samples(name, version)
        made.docs[f"identity/{name}"] = Doc(f"identity/{name}", 1, body)
    return made


def samples(name: str, version: str) -> tuple[tuple[str, str, float, float], ...]:
    return (("host_info", f"kernel={name}", 1.0, 0.0),
            ("software_info", f"component=dcgm,version={name}", 1.0, 0.0),
            ("software_info", f"component=nccl,version={version}", 1.0, 0.0))


def left(made: Cluster, name: str) -> list[str]:
    return [one.body.reason for one in made.labs[name].log if one.kind == "finish"]


def notes(made: Cluster) -> list[str]:
    return [one.reason for one in made.labs[made.leader()].decision.incidents
            if one.fault == "check_failed" and one.run == "r" and one.state == "open"]


def test_a_node_whose_check_fails_is_left_out_and_named() -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.labs["c"].health["devices"] = LOST
    made.run(12)
    assert sorted(made.plan().members) == ["a", "b", "d"] and "c" not in made.plan().spares
    (why,) = left(made, "c")
    assert "c starts no run: check devices: 7 of 8" in why
    assert notes(made) == ["c takes no ranks of it: check devices: 7 of 8"]


def test_a_card_of_the_network_keeps_a_node_out_of_a_run_over_several() -> None:
    made = fleet("abcd", nnodes=4, least=3, gate=("network",))
    made.labs["c"].health["network"] = replace(LOST, check="network", devices=())
    made.run(12)
    assert sorted(made.plan().members) == ["a", "b", "d"]


def waits(made: Cluster) -> str:
    return dict(made.labs[made.leader()].decision.reasons)["r"]


def test_who_waits_for_nodes_names_those_with_a_fatal_fault_or_taken_out() -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.fatal["b"] = "gpu_lost"
    made.docs["node/d"] = Doc("node/d", 1, msgspec.json.encode(NodeDoc(excluded=True)))
    made.run(12)
    assert "run/r" not in made.docs
    assert "b: gpu_lost is open there" in waits(made) and "d: excluded" in waits(made)


def test_a_fatal_fault_that_a_person_ignores_keeps_no_node_out_and_is_written_down() -> None:
    made = fleet("abc", nnodes=3, ignored_checks=("incidents",), ignore_reason="a trial", uid=7)
    made.fatal["b"] = "gpu_lost"
    made.run(12)
    assert sorted(made.plan().members) == ["a", "b", "c"]
    (told,) = [one.reason for one in made.labs["b"].decision.incidents
               if one.fault == "check_ignored"]
    assert "gpu_lost" in told and "uid 7 asked for that: a trial" in told


def test_a_leader_that_its_own_gate_refuses_lets_another_lead_and_is_named() -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.labs["a"].health["devices"] = LOST
    made.step()
    assert made.leader() == "a"
    made.run(25)  # a lease lasts 10 s
    assert made.leader() != "a" and sorted(made.plan().members) == ["b", "c", "d"]
    assert "a starts no run: check devices: 7 of 8" in left(made, "a")[0]
    assert notes(made) == ["a takes no ranks of it: check devices: 7 of 8"]


def test_where_every_gate_refuses_one_node_leads_still_and_writes_down_the_end() -> None:
    each = {"a": "devices", "b": "memory", "c": "disk"}  # a common one would open the breaker
    made = fleet("abc", nnodes=3, gate=tuple(each.values()), wait_s=20.0)  # a lease lasts 10 s
    made.run(8)
    assert made.plan().generation == 1
    for name, check in each.items():
        lab = made.labs[name]
        lab.health[check] = lab.checks[check] = replace(
            LOST, check=check, wall_s=1e9 + lab.boot_s)
        returns(made, name)
    made.leases.clear()
    made.run(40)
    assert made.plan().finished == 75
    assert all(left(made, name) for name in "abc")


def hurt(made: Cluster, name: str) -> None:
    lab = made.labs[name]
    lab.health["devices"] = lab.checks["devices"] = replace(LOST, wall_s=1e9 + lab.boot_s)


def requeued(made: Cluster, *names: str) -> None:
    """Launchers of these nodes begin anew, and have heard of nobody yet."""
    made.heard.clear()
    for name in names:
        returns(made, name)


@pytest.mark.parametrize("wait_s", [0.0, 20.0])
def test_a_refused_node_stands_back_for_nobody_whom_the_plan_does_not_name(wait_s: float) -> None:
    """Else nobody leads: who passes may not, and who may waits for him."""
    made = fleet("abc", nnodes=2, wait_s=wait_s)
    made.dead.add("c")
    made.run(8)
    assert sorted(made.plan().members) == ["a", "b"] and not made.plan().spares
    made.dead.add("b")
    made.leases.clear()
    hurt(made, "a")
    requeued(made, "a", "c")
    made.run(8 + wait_s)
    assert made.plan().finished == 75 and left(made, "a") and left(made, "c")


def test_a_refused_node_stands_back_no_longer_than_for_a_lost_one() -> None:
    made = fleet("ab", nnodes=2, wait_s=20.0)
    made.run(8)
    made.leases.clear()
    hurt(made, "a")
    requeued(made, "a", "b")
    made.labs["b"].store_up = False  # it passes, and cannot write
    made.run(60)
    assert left(made, "a") and made.plan().finished == 75


@pytest.mark.parametrize("late_s", [0, 2, 5])
def test_a_refused_leader_does_not_end_the_run_of_those_that_pass(late_s: int) -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.run(8)
    leader = made.leader()
    hurt(made, leader)
    requeued(made, *"abcd")
    made.deaf = set("abcd") - {leader}
    made.run(late_s)
    made.deaf.clear()
    made.run(40)
    assert left(made, leader) and made.plan().finished < 0
    assert sorted(made.plan().members) == sorted(set("abcd") - {leader})


def test_a_refused_node_of_a_plan_leaves_at_once_where_another_leads() -> None:
    made = fleet("abc", nnodes=3)
    made.run(8)
    refused = next(name for name in "abc" if name != made.leader())
    hurt(made, refused)
    requeued(made, *"abc")
    made.run(10)
    assert left(made, refused) and made.plan().finished < 0


def test_each_node_with_other_drivers_has_its_own_time_to_refuse() -> None:
    versions = dict.fromkeys("abefgh", "2.2") | {"c": "2.1", "d": "2.1"}
    made = fleet("abcdefgh", 8, least=7, versions=versions)
    for lab in made.labs.values():
        lab.settings = lab.node.settings = replace(lab.settings, gather_s=20.0, breaker_nodes=3)
    made.dead.update("dh")
    lab = made.labs["c"]
    lab.view = replace(lab.view, ignored_checks=("drift",), ignore_reason="a trial")
    made.run(12)
    assert "run/r" not in made.docs
    made.deaf.add("d")
    for name in "dh":
        returns(made, name)
    made.run(4)
    made.deaf.clear()
    made.run(20)
    assert sorted(made.plan().members) == list("abcefgh")


def test_a_leader_whose_gate_refused_it_once_keeps_its_run() -> None:
    """Nobody takes it over for a word that is old: who hears nothing of it keeps the last one."""
    made = fleet("abc", nnodes=3, least=2, wait_s=600.0)
    hurt(made, "a")
    made.run(2)
    made.deaf.add("b")
    lab = made.labs["a"]
    lab.health.clear()
    lab.checks["devices"] = CheckVerdict("devices", "ok", "well", wall_s=1e9 + lab.boot_s)
    made.leases["r"] = ("a", lab.boot_s + 10.0)
    made.run(5)
    made.deaf.clear()
    led = {made.leader() for _ in range(30) if not made.step()}
    assert led == {"a"} and made.plan().generation == 1


def test_ranks_wait_for_a_node_whose_checks_are_not_through() -> None:
    made = fleet("abc", nnodes=3)
    made.labs["b"].hold = {"run_check"}
    made.run(8)
    assert "run/r" not in made.docs
    reasons = dict(made.labs[made.leader()].decision.reasons)
    assert made.leader() == "a" and "b: its checks are not through yet" in reasons["r"]
    made.labs["b"].hold = set()
    for effect in made.labs["b"].log[:]:
        if effect.kind == "run_check":
            made.labs["b"]._perform(effect)
    made.run(4)
    assert sorted(made.plan().members) == ["a", "b", "c"]


def test_one_node_with_other_drivers_is_left_out_and_named() -> None:
    made = fleet("abcd", 4, least=3, versions={"a": "2.2", "b": "2.2", "c": "2.1", "d": "2.2"})
    made.run(12)
    assert sorted(made.plan().members) == ["a", "b", "d"]
    (why,) = left(made, "c")
    assert "check drift: nccl is 2.1, and 3 of 4 nodes have 2.2" in why
    assert "--ignore-check drift --reason" in why
    assert any("c takes no ranks" in one and "nccl is 2.1" in one for one in notes(made))


def test_ranks_wait_until_nodes_that_begin_with_the_run_have_said_what_they_are_made_of() -> None:
    versions = {"a": "2.2", "b": "2.2", "c": "2.1", "d": "2.2"}
    made = fleet("abcd", 4, least=3, versions=versions)
    late = {key: doc for key, doc in made.docs.items() if key.startswith("identity/")}
    for key in late:
        del made.docs[key]
    for lab in made.labs.values():
        lab.samples = ()
    made.run(4)
    assert "run/r" not in made.docs
    made.docs |= late
    for name, version in versions.items():
        made.labs[name].samples = samples(name, version)
    made.run(8)
    assert sorted(made.plan().members) == ["a", "b", "d"]
    assert "check drift: nccl is 2.1" in left(made, "c")[0]


def test_a_node_that_never_says_what_it_is_made_of_is_not_waited_for_long() -> None:
    made = fleet("abcd", 4, versions=dict.fromkeys("abc", "2.2"))
    made.run(3)
    reasons = dict(made.labs[made.leader()].decision.reasons)
    assert reasons["r"] == "what d is made of is not known yet" and "run/r" not in made.docs
    made.run(6)
    assert sorted(made.plan().members) == list("abcd")
    told = fleet("abcd", 4, versions={}, ignored_checks=("drift",), ignore_reason="x")
    told.run(4)
    assert sorted(told.plan().members) == list("abcd")


@pytest.mark.parametrize("ignores", [False, True])
def test_a_node_with_other_drivers_is_waited_for_until_it_has_heard_of_the_others(
    ignores: bool,
) -> None:
    made = fleet("abc", 3, least=2, versions={"a": "2.2", "b": "2.2", "c": "2.1"})
    made.deaf.add("c")
    lab = made.labs["c"]
    if ignores:
        lab.view = replace(lab.view, ignored_checks=("drift",), ignore_reason="a trial")
    made.run(5)
    reasons = dict(made.labs[made.leader()].decision.reasons)
    assert "run/r" not in made.docs and reasons["r"].startswith("other drivers than most on c: ")
    made.deaf.clear()
    made.run(8)
    assert sorted(made.plan().members) == (["a", "b", "c"] if ignores else ["a", "b"])
    assert len(left(made, "c")) == (0 if ignores else 1)


def test_a_node_that_joins_is_judged_again_once_it_has_heard_of_the_others() -> None:
    made = fleet("abcd", 4, least=3, versions={"a": "2.1", "b": "2.2", "c": "2.2", "d": "2.2"})
    made.dead.add("a")
    made.run(8)
    assert sorted(made.plan().members) == ["b", "c", "d"]
    lab = made.labs["a"]
    returns(made, "a")
    made.deaf.add("a")
    lab.docs = {}  # nor has its agent read what the store holds
    made.run(4)
    lab.docs = made.docs
    made.deaf.clear()
    made.run(12)
    assert "check drift: nccl is 2.1, and 3 of 4 nodes have 2.2" in left(made, "a")[0]
    assert made.plan().finished < 0 and "a" not in made.plan().members


def test_a_roll_out_opens_the_breaker_and_one_message_says_so() -> None:
    versions = dict.fromkeys("abcde", "2.2") | dict.fromkeys("fgh", "2.1")
    made = fleet("abcdefgh", 8, versions=versions)
    made.run(12)
    assert sorted(made.plan().members) == list("abcdefgh")
    (told,) = [one.reason for lab in made.labs.values() for one in lab.decision.incidents
               if one.fault == "check_failed"]
    assert "the breaker is open, no node is refused: drift: software.nccl on 3 of 8 nodes" in told


def test_who_is_told_to_ignore_it_starts_with_other_drivers() -> None:
    made = fleet("abc", 3, versions={"a": "2.2", "b": "2.2", "c": "2.1"},
                 ignored_checks=("drift",), ignore_reason="a trial")
    made.run(10)
    assert sorted(made.plan().members) == ["a", "b", "c"]


@pytest.mark.parametrize(("versions", "why"), [
    ({"a": "2", "b": "1"}, ""), ({"a": "2", "b": "1", "c": "1"}, "nccl is 2, and 2 of 3"),
    ({"a": "", "b": "1", "c": "1"}, ""), ({"a": "1", "b": "1", "c": "2"}, ""),
    ({"a": "2", "b": "1", "c": ""}, ""), ({"b": "1", "c": "1"}, "")])
def test_only_a_version_that_most_do_not_have_counts(versions: dict[str, str], why: str) -> None:
    known = {name: Identity({"node": {"software.nccl": one}}) for name, one in versions.items()}
    assert unlike("a", known, Settings(single_node=False)).why.startswith(why)
    assert bool(unlike("a", known, Settings(single_node=False)).why) == bool(why)


def test_a_node_that_fails_while_it_trains_gets_no_ranks_in_the_next_generation() -> None:
    made = fleet("abc", nnodes=2)
    made.run(8)
    first = made.plan()
    hurt = next(name for name in first.members if name != made.leader())
    lab = made.labs[hurt]
    lab.checks["devices"] = replace(LOST, wall_s=1e9 + lab.boot_s)
    made.run(2)
    assert made.plan().generation == 1  # by itself it ends nothing
    other = next(name for name in first.members if name != hurt)
    made.labs[other].kill(next(rank for rank, node in first.ranks if node == other))
    lab.checks["devices"] = replace(LOST, wall_s=1e9 + lab.boot_s)
    made.run(10)
    assert made.plan().generation == 2 and hurt not in made.plan().members


def returns(made: Cluster, name: str) -> None:
    """The node was away, and has another launcher of the run now."""
    lab = made.labs[name]
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(),
                       registered_boot_s=lab.boot_s)
    made.dead.discard(name)
    made.lost.discard(name)


def test_a_node_that_joins_a_run_and_fails_its_check_leaves_and_the_run_goes_on() -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.dead.add("d")
    made.run(8)
    assert sorted(made.plan().members) == ["a", "b", "c"]
    made.labs["d"].health["devices"] = LOST
    returns(made, "d")
    made.run(8)
    (why,) = left(made, "d")
    assert "d starts no run: check devices: 7 of 8" in why
    assert made.plan().finished < 0 and "d" not in made.plan().spares
    assert not any(left(made, name) for name in "abc")


@pytest.mark.parametrize("leads", [False, True])
def test_a_member_that_returns_hurt_leaves_by_itself_and_ends_no_run(leads: bool) -> None:
    made = fleet("abcd", nnodes=4, least=3)
    made.run(8)
    made.dead.add("d")
    made.lost.add("d")
    made.run(20)
    assert sorted(made.plan().members) == ["a", "b", "c"] and "d" in made.plan().spares
    lab = made.labs["d"]
    lab.health["devices"] = lab.checks["devices"] = replace(LOST, wall_s=1e9 + lab.boot_s)
    returns(made, "d")
    if leads:  # a named node may lead, also one without ranks
        made.leases["r"] = ("d", lab.boot_s + 10.0)
    made.run(20)
    assert len(left(made, "d")) == 1 and made.plan().finished < 0
    assert not any(left(made, name) for name in "abc")


def test_a_spare_that_passed_and_fails_later_waits_for_its_check_to_pass() -> None:
    made = fleet("abcd", nnodes=3)
    made.run(8)
    (spare,) = made.plan().spares
    lab = made.labs[spare]
    lab.health["devices"] = lab.checks["devices"] = replace(LOST, wall_s=1e9 + lab.boot_s)
    made.run(8)
    assert not left(made, spare)
    reasons = dict(lab.decision.reasons)
    assert f"{spare} takes no ranks: check devices: 7 of 8" in reasons["r"]


@pytest.mark.parametrize("mended", [False, True])
def test_a_node_that_joins_is_judged_at_once_by_the_drivers_it_has_now(mended: bool) -> None:
    old = {"a": "2.1", "b": "2.2", "c": "2.2", "d": "2.2"}
    made = fleet("abcd", nnodes=4, least=3, versions=old, gate=("drift",))
    made.dead.add("a")
    made.run(8)
    assert sorted(made.plan().members) == ["b", "c", "d"]
    if mended:  # its document in the store is of before
        made.labs["a"].samples = samples("a", "2.2")
    returns(made, "a")
    made.heard.clear()  # its agent has just begun: it hears of the others after its first step
    made.run(12)
    assert made.plan().finished < 0
    if mended:
        assert not left(made, "a") and sorted(made.plan().members) == ["a", "b", "c", "d"]
        assert not made.labs["a"].incidents
    else:
        (why,) = left(made, "a")
        assert "check drift: nccl is 2.1, and 3 of 4 nodes have 2.2" in why
        assert made.plan().generation == 1


class Parted(Cluster):
    """Nodes hear those of their own side alone."""

    sides: tuple[str, ...] = ()

    def step(self, seconds: float = 1.0) -> None:
        for name, lab in self.labs.items():
            if name in self.dead:
                lab.boot_s += seconds
                continue
            side = next((one for one in self.sides if name in one), "".join(self.labs))
            lab.beats = tuple(replace(beat, boot_s=self.at_s[key])
                              for key, beat in self.heard.items() if key[0] in side)
            lab.step(seconds)
            for beat in lab.decision.beats:
                self.heard[name, beat.run] = beat
                self.at_s[name, beat.run] = lab.boot_s


def queued_elsewhere(names: str, alive: str = "", older_s: int = 0, **view: object) -> Cluster:
    """A run of a and b, which are gone but for `alive`; its launchers are on other nodes now."""
    made = fleet("ab" + names, nnodes=2, **({"gang_limit_s": 60.0} | view))
    made.dead |= set(names)
    made.run(8)
    assert sorted(made.plan().members) == ["a", "b"]
    made.dead = set("ab") - set(alive)
    made.heard.clear()
    for name in names:
        returns(made, name)
        node = made.labs[name].node
        node.since_boot_s = made.labs[name].boot_s - older_s if older_s else node.since_boot_s
    return made


@pytest.mark.parametrize("older_s", [0, 300])  # than the gang limit, for agents that outlive jobs
def test_a_run_that_is_queued_again_on_other_nodes_goes_on_there(older_s: int) -> None:
    made = queued_elsewhere("cd", older_s=older_s, max_restarts=0)
    made.dead.add("d")
    made.run(3)
    made.dead.discard("d")  # the second comes a moment later
    returns(made, "d")
    made.run(45)
    assert made.leader() in "cd" and sorted(made.plan().members) == ["c", "d"]
    assert made.plan().generation == 2 and made.plan().finished < 0
    assert not dict(made.plan().spent).get("restarts")


def test_nobody_of_the_other_nodes_leads_while_one_of_the_plan_is_there() -> None:
    made = queued_elsewhere("cd", alive="b")
    made.leases.clear()  # b takes it, however often the others ask
    for _ in range(40):
        made.step()
        assert made.leases.get("r", ("b", 0.0))[0] == "b"


@pytest.mark.parametrize("least", [1, 2])
@pytest.mark.parametrize("dead", ["", "a"])
def test_a_newcomer_that_hears_nobody_takes_no_run_that_goes_on(least: int, dead: str) -> None:
    """It reaches the store, and asks for the lease before those do who train."""
    made = fleet("cab", nnodes=2, least=least, gang_limit_s=60.0)
    made.__class__ = Parted
    made.sides = ("ab", "c")  # type: ignore[attr-defined]
    made.dead.add("c")
    made.run(8)
    returns(made, "c")
    made.run(30)
    made.dead |= set(dead)
    if not dead:
        made.leases.clear()
    made.run(40)
    assert made.leader() in set("ab") - set(dead) and "c" not in made.plan().members


def test_too_few_other_nodes_end_the_run_and_do_not_wait_for_ever() -> None:
    made = queued_elsewhere("c")
    made.run(120)
    assert made.plan().finished == 75 and left(made, "c")


def test_a_script_is_not_started_beside_what_may_be_left_of_it() -> None:
    """Its old nodes may be cut off, and each lets the others' ranks go on."""
    made = queued_elsewhere("cd", grade="script")
    made.run(50)
    (why,) = [text for run, text in made.labs["c"].decision.reasons if run == "r"]
    assert why.startswith("nothing is heard of a, b, where ranks of this run may go on")
    made.run(30)
    assert made.plan().generation == 1 and made.plan().finished < 0
    assert "start it again with another --run" in left(made, "c")[0] and left(made, "d")
