"""What explains that a run stands still is waited for: no restart is spent on it."""

from __future__ import annotations

import pytest
from pytest import MonkeyPatch

from holdfast.agent.core.detect.ranks import known_causes
from holdfast.agent.core.detect.ranks.known_causes import Wait
from holdfast.agent.core.model import (
    DEGRADED,
    WARN,
    Beat,
    Condition,
    Doc,
    Incident,
    RankView,
    Readings,
    Settings,
    Verdict,
    node_subject,
    readings_of,
)
from holdfast.agent.core.run import outgoing
from holdfast.agent.core.run.causes import EVIDENCE_KEPT, EXPLAINED_S

from .driver import Cluster, Lab, replace

MOUNT = Verdict("mount_hung", "node/a/mount/data", DEGRADED, 1.0, "/data has not answered",
                (("mount", "/data"), ("fstype", "nfs4")), detector="reach")
FULL = Verdict("disk_space_low", "node/a/mount/ckpt", DEGRADED, 1.0, "/ckpt is full",
               (("mount", "/ckpt"),), detector="storage")
LINK = Verdict("nic_link_down", "node/a/nic/mlx5_0", DEGRADED, 1.0, "mlx5_0 is down",
               (("kind", "infiniband"),), detector="network")
SWITCH = Verdict("fabric_manager_down", "node/a/fabric", DEGRADED, 1.0, "no fabric manager",
                 detector="fabric")
ON_DATA = {"wchan": "rpc_wait_bit_killable", "path": "/data/shard-1"}


def trained(**view: object) -> Lab:
    lab = Lab(grade="script", settings=Settings(quiet_limit_s=100.0), **view)
    lab.begin()
    lab.train(8)
    return lab


def wait(lab: Lab, seconds: int, **of_rank_1: object) -> None:
    since = lab.rank(1).still_s
    for still in range(1, seconds + 1):
        lab.change(0, phase="collective", still_s=since + still)
        lab.change(1, still_s=since + still + 1.0, **of_rank_1)
        lab.step(1.0)


def watch(lab: Lab, *verdicts: Verdict) -> None:
    lab.node.watch.look = lambda observed: list(verdicts)  # type: ignore[method-assign]


@pytest.mark.parametrize(("verdict", "rank", "seen"), [
    (MOUNT, {"proc_state": "D"}, ON_DATA), (FULL, {"phase": "checkpoint"}, {}),
    (SWITCH, {"phase": "collective"}, {}),
])
def test_a_known_cause_is_not_restarted_against(
    verdict: Verdict, rank: dict[str, str], seen: dict[str, str],
) -> None:
    lab = trained(checkpoint_dir="/ckpt/run")
    lab.evidence = seen
    watch(lab, verdict)
    wait(lab, 150, **rank)
    assert len(lab.starts()) == 1 and not lab.finishes()
    (said,) = [one for one in lab.decision.incidents if one.run == "r"]
    assert said.state == "open" and verdict.reason in said.would_have
    watch(lab)
    lab.train(12)  # it goes on by itself
    assert len(lab.starts()) == 1 and not dict(lab.plan().spent)


NO_SPACE = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(("verdict", "error"), [
    (MOUNT, "DistBackendError: Watchdog caught collective operation timeout"), (FULL, NO_SPACE),
    (FULL, f"{NO_SPACE}: '/ckpt/run/step-9'"),
])
def test_a_death_of_a_known_cause_is_not_restarted_against(verdict: Verdict, error: str) -> None:
    lab = trained(checkpoint_dir="/ckpt/run", max_restarts=1)
    lab.evidence = ON_DATA
    watch(lab, verdict)
    wait(lab, 20, **({"proc_state": "D"} if verdict is MOUNT else {}))
    lab.raises(0, error)
    for _ in range(100):
        lab.step(10.0)
    assert len(lab.starts()) == 1 and not lab.finishes()
    assert verdict.reason in dict(lab.decision.reasons)["r"]
    assert verdict.reason in str([one.timeline for one in lab.incidents.values() if one.run == "r"])
    watch(lab)
    lab.settle()
    for _ in range(400):
        lab.step(0.1)
    assert len(lab.starts()) == 2 and "restarts" not in dict(lab.plan().spent)


@pytest.mark.parametrize("grade", ["trainer", "script", "opaque"])
def test_a_run_that_waits_with_its_next_start_ends_when_it_is_asked_to(grade: str) -> None:
    lab = Lab(grade=grade, max_restarts=1, checkpoint_dir="/ckpt/run")
    lab.begin()
    lab.train(8)
    watch(lab, FULL)
    for number in (0, 1):
        lab.raises(number, NO_SPACE)
    for _ in range(100):
        lab.step(1.0)
    assert len(lab.starts()) == 1 and not lab.finishes()
    lab.view = replace(lab.view, shutdown="preempted")
    for _ in range(100):
        lab.step(1.0)
    assert lab.finishes() == [75]


@pytest.mark.parametrize(("verdict", "error"), [
    (FULL, "ValueError: x"), (FULL, f"{NO_SPACE}: '/dev/shm/torch_1'"), (LINK, "gloo: reset"),
    (MOUNT, "ValueError: x"),
])
def test_a_death_of_its_own_is_restarted_at_once(verdict: Verdict, error: str) -> None:
    lab = trained(checkpoint_dir="/ckpt/run")
    watch(lab, verdict)
    lab.raises(1, error)
    for _ in range(100):
        lab.step(0.1)
    assert len(lab.starts()) == 2 and dict(lab.plan().spent)["restarts"] == 1


def test_a_cause_that_is_gone_explains_nothing_for_long() -> None:
    lab = trained()
    lab.evidence = ON_DATA
    watch(lab, MOUNT)
    wait(lab, 120, proc_state="D")
    watch(lab)
    wait(lab, 20, proc_state="S")
    assert len(lab.starts()) == 1
    wait(lab, 30)
    assert len(lab.starts()) > 1


def test_a_compile_in_mid_training_is_a_ticket_and_never_a_hang() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.train(8)
    lab.view = replace(lab.view, compiling="rank 1: neuronx-cc")
    wait(lab, 90)
    (said,) = [one for one in lab.decision.verdicts if one.run == "r"]
    assert (said.fault, said.severity, said.act) == ("graph_recompiled", "warn", False)
    assert "(neuronx-cc) at step 8, for 91 s: the other ranks wait for it" in said.reason
    lab.view = replace(lab.view, compiling="")
    lab.train(12)
    (ticket,) = [one for one in lab.incidents.values() if one.run == "r"]
    assert (ticket.fault, ticket.subject, ticket.state) == ("graph_recompiled", "run/r/rank/1",
                                                            "closed")
    assert 85 < ticket.lost_s < 95
    assert "compiled: no step was finished for" in ticket.timeline[-1][1]
    assert len(lab.starts()) == 1 and not dict(lab.plan().spent)
    assert ("compile", "true", 1) in lab.decision.detector_counts
    assert not [one for one in lab.decision.detector_counts if one[1] == "false"]


def test_the_first_compile_of_a_start_is_no_ticket() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.view = replace(lab.view, compiling="rank 1: neuronx-cc")
    wait(lab, 30)
    assert not [one for one in lab.decision.verdicts if one.run == "r"]


@pytest.mark.parametrize("steps", [0, 8])
def test_a_lock_that_a_killed_compile_left_is_named_and_not_restarted_against(steps: int) -> None:
    lab = Lab(grade="script", settings=Settings(compile_limit_s=100.0))
    lab.begin()
    lab.train(steps)
    path = "/cache/MODULE_1/model.pb.lock"
    left = Verdict("compile_lock_stale", f"node/a/lock{path}", DEGRADED, 1.0,
                   f"{path} is 3 min old", (("path", path), ("uid", "0")))
    watch(lab, left)
    lab.view = replace(lab.view, compiling=f"rank 1 holds or awaits {path}")
    wait(lab, 300)
    (said,) = [one for one in lab.decision.verdicts if one.run == "r"]
    assert "stands still for" in said.reason and f"before a lock: {path} is 3 min" in said.reason
    (open_one,) = [one for one in lab.incidents.values() if one.run == "r" and one.state == "open"]
    assert f"rm {path}" in open_one.would_have and len(lab.starts()) == 1


BY_HAND = replace(LINK, severity=WARN, reason="mlx5_0 was switched off")
ETHERNET = replace(LINK, evidence=(("kind", "ethernet"),))
ON_VAR = replace(FULL, subject="node/a/mount/var", evidence=(("mount", "/var"),))
ON_ROOT = replace(FULL, subject="node/a/mount", evidence=(("mount", "/"),))
MOUNTS = (("host_filesystem_size_bytes", "mount=/", 1e12, 0.0),
          ("host_filesystem_size_bytes", "mount=/ckpt", 1e12, 0.0))


@pytest.mark.parametrize(("verdict", "rank", "seen"), [
    (MOUNT, {"proc_state": "S", "phase": "forward_backward"}, {}),
    (FULL, {"proc_state": "S", "phase": "forward_backward"}, {}),
    (MOUNT, {"proc_state": "D"}, {"wchan": "folio_wait_bit_common", "path": "/local/x"}),
    (MOUNT, {"proc_state": "D"}, {"wchan": "io_schedule", "open": ["/local"]}),
    (BY_HAND, {"phase": "collective"}, {}), (ETHERNET, {"phase": "collective"}, {}),
    (LINK, {"phase": "collective"}, {}),  # nothing of this run leaves the node
    (ON_VAR, {"phase": "checkpoint"}, {}), (ON_ROOT, {"phase": "checkpoint"}, {}),
])
def test_a_condition_that_the_rank_does_not_wait_for_excuses_nobody(
    verdict: Verdict, rank: dict[str, str], seen: dict[str, object],
) -> None:
    lab = trained(checkpoint_dir="/ckpt/run")
    lab.samples, lab.evidence = MOUNTS, seen
    watch(lab, verdict)
    patient = trained(checkpoint_dir="/ckpt/run")
    patient.evidence = seen
    answered_s: list[int] = []  # without that condition, and with it
    for one in (patient, lab):
        second = 0
        while len(one.starts()) < 2:
            wait(one, 1, **rank)
            second += 1
            assert second < 200, "it was never answered"
        answered_s.append(second)
    # Where a rank was not looked at yet it may wait for the mount: that is over with the look.
    late_s = answered_s[1] - answered_s[0]
    assert late_s == 0 or rank.get("proc_state") == "D" and late_s <= EXPLAINED_S + 5.0, answered_s


@pytest.mark.parametrize(("verdict", "rank", "seen"), [
    (MOUNT, {"proc_state": "D"}, ON_DATA), (SWITCH, {"phase": "collective"}, {})])
def test_a_limit_of_the_users_own_holds_whatever_explains_the_wait(
    verdict: Verdict, rank: dict[str, str], seen: dict[str, str],
) -> None:
    lab = trained(hang_limit_s=90.0)
    lab.evidence = seen
    watch(lab, verdict)
    wait(lab, 85, **rank)
    (said,) = [one for one in lab.decision.incidents if one.run == "r"]
    assert len(lab.starts()) == 1 and "own limit of 90 s holds all the same" in said.would_have
    wait(lab, 10, **rank)
    assert len(lab.starts()) == 2


@pytest.mark.parametrize(("limit_s", "words"), [(1.0, "limit of 1 s holds"), (0.0, "")])
def test_that_a_limit_holds_is_said_where_there_is_one_however_short(
    limit_s: float, words: str
) -> None:
    lab = trained(hang_limit_s=limit_s)
    lab.settings = lab.node.settings = replace(lab.settings, act=())  # it is shown alone
    lab.evidence = ON_DATA
    watch(lab, MOUNT)
    wait(lab, 30, proc_state="D")
    (said,) = [one for one in lab.decision.incidents if one.run == "r"]
    assert "no restart is spent" in said.would_have and words in said.would_have
    assert ("own limit" in said.would_have) is bool(words)


def test_of_many_waits_that_were_looked_at_the_newest_are_kept() -> None:
    lab = trained()
    lab.evidence = ON_DATA
    for step in range(9, 9 + EVIDENCE_KEPT + 8):
        lab.train(step)
        wait(lab, 3)
    kept = lab.node.cases["r"].state.suspects.waits
    assert len(kept) == EVIDENCE_KEPT and list(kept)[-1].endswith(f"/{step}")


HUNG = Condition("a", "mount_hung", "hung", "/data", ("/data/local",), "nfs4")
SPACE = Condition("a", "disk_space_low", "full", "/", ("/ckpt",))
CARD = Condition("a", "nic_link_down", "down", card="roce")


@pytest.mark.parametrize(("found", "rank", "seen", "folder", "nodes", "tied"), [
    (HUNG, {}, Wait("nfs_wait_on_request"), "", 1, True),
    (HUNG, {}, Wait("rpc_wait_bit_killable", "/data/a"), "", 1, True),
    (HUNG, {}, Wait("rpc_wait_bit_killable", "/other/a"), "", 1, False),
    (HUNG, {}, Wait("rpc_wait_bit_killable", "/data/local/a"), "", 1, False),
    (HUNG, {}, Wait("ceph_mdsc_wait_request"), "", 1, False),
    (HUNG, {"node": "b"}, Wait("nfs_wait_on_request"), "", 1, False),
    (HUNG, {"proc_state": "D"}, Wait("folio_wait_bit", open=("/data/set",)), "", 1, True),
    (HUNG, {"proc_state": "S"}, Wait("futex_wait", open=("/data/set",)), "", 1, False),
    (HUNG, {"proc_state": "D"}, Wait(), "", 1, True),
    (HUNG, {"proc_state": "D", "node": "b"}, Wait(), "", 1, False),
    (HUNG, {"proc_state": "D"}, Wait("io_schedule"), "", 1, False),
    (SPACE, {"proc_state": "D"}, Wait(), "", 1, False),
    (HUNG, {"phase": "checkpoint"}, Wait("futex_wait"), "/data/ckpt", 1, True),
    (HUNG, {"phase": "collective"}, Wait("futex_wait"), "/data/ckpt", 1, False),
    (SPACE, {"phase": "checkpoint"}, Wait(), "/home/u/ckpt", 1, True),
    (SPACE, {"phase": "checkpoint"}, Wait(), "/ckpt", 1, False),
    (SPACE, {"phase": "checkpoint"}, Wait(open=("/home/u",)), "", 1, True),
    (SPACE, {"phase": "checkpoint"}, Wait(open=("/ckpt/u",)), "", 1, False),
    (CARD, {"phase": "collective"}, Wait(), "", 2, True),
    (CARD, {"phase": "collective", "node": "b"}, Wait(), "", 2, True),
    (CARD, {"phase": "collective"}, Wait(), "", 1, False),
    (CARD, {"phase": "data"}, Wait(), "", 2, False),
    (replace(CARD, card="ethernet"), {"phase": "collective"}, Wait(), "", 2, False),
])
def test_a_condition_explains_the_wait_of_a_rank_that_is_tied_to_it(
    found: Condition, rank: dict[str, str], seen: Wait, folder: str, nodes: int, tied: bool,
) -> None:
    view = RankView(**{"rank": 0, "node": "a", "pid": 7, "generation": 1, "state": "running"}
                    | rank)  # type: ignore[arg-type]
    said = known_causes.explains((found,), ((view, seen),), folder, nodes)
    assert said == (found if tied else None)


def test_a_warning_is_no_condition_and_a_mount_knows_those_inside_it() -> None:
    found = known_causes.conditions((BY_HAND, LINK, ON_ROOT, MOUNT), readings_of(MOUNTS))
    assert found == (
        Condition("a", "nic_link_down", "mlx5_0 is down", card="infiniband"),
        Condition("a", "disk_space_low", "/ckpt is full", "/", ("/ckpt",)),
        Condition("a", "mount_hung", "/data has not answered", "/data", (), "nfs4"))
    many = tuple(replace(MOUNT, reason="x" * 1000) for _ in range(100))
    bounded = known_causes.conditions(many, Readings())
    assert len(bounded) == 8 and len(bounded[0].reason) == 300


def test_what_other_nodes_are_told_of_a_condition_is_bounded() -> None:
    mount = Verdict("mount_hung", "node/a/mount/m", DEGRADED, 1.0, "x" * 999, (("mount", "/m"),))
    inner = [f"/m/{number:03}" for number in range(40)]
    rows = [("host_filesystem_size_bytes", f"mount={one}", 1.0, 0.0) for one in (*inner, "/n/x")]
    (found,) = known_causes.conditions((mount,), readings_of(rows))
    assert (found.mount, found.within, len(found.reason)) == ("/m", tuple(inner[:32]), 300)


@pytest.mark.parametrize(("states", "stopped_s", "traced", "said"), [
    ("TT", (5.0, 5.9), (), True), ("TT", (5.0, 6.1), (), False),  # not by one hand
    ("TS", (5.0, 5.0), (), False), ("TZ", (5.0, 5.0), (), False), ("tt", (5.0, 5.0), (), False),
    ("TT", (5.0, 5.0), (1,), False),  # somebody debugs it
    ("T", (5.0,), (), False),  # one alone is a fault
    ("", (), (), False),
])
def test_ranks_that_one_hand_stopped_are_suspended(
    states: str, stopped_s: tuple[float, ...], traced: tuple[int, ...], said: bool
) -> None:
    ranks = [RankView(rank, "a", 7, 1, "running", proc_state=state, stopped_s=stopped_s[rank],
                      traced=rank in traced) for rank, state in enumerate(states)]
    words = "all its ranks were stopped from outside" if said else ""
    assert known_causes.suspended(Lab().view, ranks) == words
    gone = RankView(9, "a", 7, 1, "ended", proc_state="Z")  # only who lives counts
    others = (gone, replace(gone, state="parked"))
    assert known_causes.suspended(Lab().view, [*ranks, *others]) == words
    starts = [replace(one, state="starting") for one in ranks]
    assert known_causes.suspended(Lab().view, starts) == words


def test_a_stop_elsewhere_counts_from_when_it_was_told() -> None:
    """A node says every other second how long its ranks are stopped."""
    here = RankView(0, "a", 7, 1, "running", proc_state="T", stopped_s=5.0)
    there = replace(here, rank=1, node="b", stopped_s=3.4, told_s=1.5)
    assert known_causes.suspended(Lab().view, (here, there))
    assert not known_causes.suspended(Lab().view, (here, replace(there, told_s=0.5)))


def stop(lab: Lab, seconds: float, ranks: tuple[int, ...] = (0, 1)) -> None:
    for number in ranks:
        lab.change(number, proc_state="T", stopped_s=seconds, still_s=seconds, beat_age_s=seconds)


@pytest.mark.parametrize("launcher", [True, False])
def test_a_run_that_is_suspended_is_shown_and_left_alone(launcher: bool) -> None:
    lab = Lab()
    lab.begin()
    lab.train(8)
    before = dict(lab.decision.ledger)
    for second in range(1, 16):
        stop(lab, float(second))
        lab.view = replace(lab.view, suspended=launcher)
        lab.step(1.0)
    assert "suspended" in dict(lab.decision.reasons)["r"]
    assert dict(lab.decision.ledger)["idle"] - before["idle"] > 10
    lab.view = replace(lab.view, suspended=False)
    lab.all(proc_state="S", stopped_s=0.0, beat_age_s=0.05)
    lab.step(0.1)
    lab.train(12)
    assert len(lab.starts()) == 1 and not [one for one in lab.decision.incidents if one.run == "r"]


def test_ranks_that_go_on_after_a_suspension_have_a_moment_to_show_it() -> None:
    """What a page says just then was written before.  Who stands still longer is a fault."""
    lab = Lab()
    lab.begin()
    lab.train(8)
    lab.view = replace(lab.view, suspended=True)
    for second in range(1, 21):
        lab.all(still_s=float(second))
        lab.step(1.0)
    lab.view = replace(lab.view, suspended=False)
    said = []
    for quarter in range(1, 9):
        lab.all(still_s=20.0 + quarter / 4)
        lab.step(0.25)
        said.append(any(one.fault == "rank_hung" for one in lab.decision.verdicts))
    assert said.index(True) == 5  # after a second and a half


def test_a_suspension_of_an_earlier_boot_excuses_nothing() -> None:
    """A machine that was up for days and boots anew counts from zero: whoever hangs there is not
    believed suspended, nor waited out for a server of days ago, until the clock is there again."""
    lab = trained()
    lab.boot_s += 1e6
    lab.view = replace(lab.view, suspended=True)
    lab.step(1.0)
    lab.view = replace(lab.view, suspended=False)
    watch(lab, MOUNT)
    wait(lab, 30, proc_state="D")
    lab.boot_s, lab.boot_id = 50.0, "later"
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=50.0)
    lab.restart_agent()
    lab.begin()
    lab.train(20)
    before = len(lab.starts())
    wait(lab, 75, proc_state="S", phase="forward_backward")
    assert len(lab.starts()) == before + 1


def test_one_rank_that_is_stopped_is_a_fault_still() -> None:
    lab = Lab()
    lab.begin()
    lab.train(8)
    for tenth in range(1, 30):
        stop(lab, tenth / 10, (1,))
        lab.step(0.1)
    assert "rank_stopped" in {one.fault for one in lab.decision.incidents}


# ---------------------------------------------------------------- over nodes


class Far:
    """A script over nodes; the rank on the node that does not lead stands still, and the leader's
    waits for it."""

    def __init__(self) -> None:
        settings = Settings(single_node=False, compile_limit_s=400.0)
        self.cluster = Cluster(grade="script", settings=settings, startup_s=2.0)
        self.cluster.run(6)
        self.leader = self.cluster.labs[self.cluster.leader()]
        self.far = next(lab for name, lab in self.cluster.labs.items()
                        if lab is not self.leader and name in self.cluster.plan().members)
        for step in range(1, 9):
            for lab in (self.leader, self.far):
                lab.all(step=step, step_time_s=1.0, still_s=0.0, phase="forward_backward")
            self.cluster.step()

    def wait(self, seconds: int, far: str = "forward_backward", **of_the_far: object) -> None:
        """Until the far rank is ended, or so long."""
        for still in range(1, seconds + 1):
            self.leader.all(phase="collective", still_s=float(still))
            self.far.all(phase=far, still_s=still + 4.0, **of_the_far)
            self.cluster.step()
            if self.cluster.plan().generation > 1:
                return

    def incident(self) -> Incident:
        (said,) = [one for one in self.leader.incidents.values()
                   if one.run == "r" and one.state == "open"]
        return said


def no_longer_said(beat: Beat) -> Beat:
    """As a release sends it that knows neither."""
    return replace(beat, compiling="", conditions=())


def test_a_rank_that_nothing_explains_is_answered_on_whichever_node_it_is() -> None:
    made = Far()
    made.wait(200)
    assert made.cluster.plan().generation == 2


def test_a_compile_on_another_node_is_a_compile() -> None:
    made = Far()
    rank = made.far.view.ranks[0].rank
    made.far.view = replace(made.far.view, compiling=f"rank {rank}: neuronx-cc")
    made.wait(200)
    assert made.cluster.plan().generation == 1
    said = made.incident()
    assert said.fault == "graph_recompiled" and f"on {made.far.name}" in said.reason
    made.wait(600)  # patience has an end there as here
    assert made.cluster.plan().generation == 2


@pytest.mark.parametrize(("verdict", "phase", "rank", "seen"), [
    (MOUNT, "data", {"proc_state": "D"}, ON_DATA), (LINK, "collective", {}, {})])
def test_a_condition_of_another_node_explains_the_wait_there(
    verdict: Verdict, phase: str, rank: dict[str, object], seen: dict[str, object],
) -> None:
    made = Far()
    made.far.evidence = seen
    watch(made.far, replace(verdict, subject=verdict.subject.replace("/a/", f"/{made.far.name}/")))
    made.wait(300, phase, **rank)
    assert made.cluster.plan().generation == 1 and verdict.reason in made.incident().would_have
    made = Far()
    made.far.evidence = seen
    watch(made.leader, replace(MOUNT, subject=f"node/{made.leader.name}/mount/data"))
    made.wait(300, phase, **rank)  # a mount of the leader's is no mount of that node's
    assert made.cluster.plan().generation == 2


def test_a_lock_before_which_a_rank_waits_elsewhere_is_named() -> None:
    made = Far()
    rank, path = made.far.view.ranks[0].rank, "/cache/MODULE_1/model.pb.lock"
    watch(made.far, Verdict("compile_lock_stale", f"node/{made.far.name}/lock{path}", DEGRADED, 1.0,
                            f"{path} is 3 min old", (("path", path),)))
    made.far.view = replace(made.far.view, compiling=f"rank {rank} holds or awaits {path}")
    made.wait(900)
    assert made.cluster.plan().generation == 1 and f"rm {path}" in made.incident().would_have


def test_a_release_that_says_neither_gets_the_usual_limits(monkeypatch: MonkeyPatch) -> None:
    plain = outgoing.beats
    monkeypatch.setattr(outgoing, "beats", lambda *given: tuple(
        no_longer_said(beat) for beat in plain(*given)))
    made = Far()
    made.far.evidence = ON_DATA
    made.far.view = replace(made.far.view, compiling=f"rank {made.far.view.ranks[0].rank}: cc1plus")
    watch(made.far, replace(MOUNT, subject=f"node/{made.far.name}/mount/data"))
    made.wait(300, proc_state="D")
    assert made.cluster.plan().generation == 2


def stop_at(made: Far, seconds: int, *labs: Lab, launcher: bool = False) -> None:
    """These nodes' ranks are stopped for so long, the others wait for them in a collective."""
    for lab in labs:
        lab.view = replace(lab.view, suspended=launcher)
    for quarter in range(1, 4 * seconds + 1):
        for lab in (made.leader, made.far):
            lab.all(phase="collective", still_s=quarter / 4)
        for lab in labs:
            stop(lab, quarter / 4, tuple(rank.rank for rank in lab.view.ranks))
        made.cluster.step(0.25)


def go_on(made: Far, *labs: Lab) -> None:
    for lab in labs:
        lab.view = replace(lab.view, suspended=False)
        lab.all(proc_state="S", stopped_s=0.0, beat_age_s=0.05)
    for step in range(9, 15):
        for lab in (made.leader, made.far):
            lab.all(step=step, still_s=0.0, phase="forward_backward")
        made.cluster.step()


def stages(made: Far) -> set[str]:
    return {lab.node.stages()["r"] for lab in (made.leader, made.far)}


@pytest.mark.parametrize(("launcher", "led"), [(True, False), (True, True), (False, True)])
def test_a_scheduler_that_stops_the_job_on_nodes_that_do_not_lead_restarts_nothing(
    launcher: bool, led: bool
) -> None:
    """`led`: on the one that leads as well; all ranks stopped need no launcher with them."""
    made = Far()
    stopped = (made.far, made.leader) if led else (made.far,)
    stop_at(made, 20, *stopped, launcher=launcher)
    assert stages(made) == {"suspended"}
    assert dict(made.leader.decision.reasons)["r"].startswith("suspended: ")
    go_on(made, *stopped)
    assert stages(made) == {"training"}
    assert made.cluster.plan().generation == 1
    assert not [one for one in made.leader.incidents.values() if one.run == "r"]


def test_a_rank_that_is_stopped_below_a_launcher_that_goes_on_is_a_fault_there_too() -> None:
    made = Far()
    stop_at(made, 4, made.far)
    assert "rank_stopped" in {one.fault for one in made.leader.incidents.values()}


def test_ranks_that_go_on_below_a_stopped_launcher_elsewhere_suspend_nothing() -> None:
    made = Far()
    made.far.view = replace(made.far.view, suspended=True)
    made.wait(3)
    assert made.leader.node.stages()["r"] == "training"


@pytest.mark.parametrize("why", ["a fault of its node", "a person took it out"])
def test_nobody_waits_for_a_stopped_node_that_the_run_is_to_leave(why: str) -> None:
    made = Far()
    stop_at(made, 5, made.far, launcher=True)
    if why == "a person took it out":
        key = node_subject(made.far.name)
        made.cluster.docs[key] = Doc(key, 1, b'{"excluded": true, "by": "ann"}')
    else:
        made.cluster.fatal[made.far.name] = "gpu_lost"
    stop_at(made, 2, made.far, launcher=True)
    assert made.leader.node.stages()["r"] != "suspended"


def test_a_release_that_does_not_say_that_it_is_stopped_is_answered_as_before(
    monkeypatch: MonkeyPatch,
) -> None:
    plain = outgoing.beats
    monkeypatch.setattr(outgoing, "beats", lambda *given: tuple(
        replace(beat, suspended=False) for beat in plain(*given)))
    made = Far()
    stop_at(made, 4, made.far, launcher=True)
    assert "rank_stopped" in {one.fault for one in made.leader.incidents.values()}
