"""What explains that a run stands still is waited for: no restart is spent on it."""

from __future__ import annotations

import pytest

from holdfast.agent.core.model import DEGRADED, Verdict

from .driver import Lab, replace

MOUNT = Verdict("mount_hung", "node/a/mount/data", DEGRADED, 1.0, "/data has not answered",
                (("mount", "/data"), ("fstype", "nfs4")), detector="reach")
FULL = Verdict("disk_space_low", "node/a/mount/ckpt", DEGRADED, 1.0, "/ckpt is full",
               (("mount", "/ckpt"),), detector="storage")
LINK = Verdict("nic_link_down", "node/a/nic/ib0", DEGRADED, 1.0, "ib0 is down", detector="network")


def trained() -> Lab:
    lab = Lab(grade="script", hang_limit_s=3.0)
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


@pytest.mark.parametrize(("verdict", "rank"), [
    (MOUNT, {"proc_state": "D"}), (FULL, {"phase": "checkpoint"}), (LINK, {"phase": "collective"}),
])
def test_a_known_cause_is_not_restarted_against(verdict: Verdict, rank: dict[str, str]) -> None:
    lab = trained()
    watch(lab, verdict)
    wait(lab, 300, **rank)
    assert len(lab.starts()) == 1 and not lab.finishes()
    (said,) = [one for one in lab.decision.incidents if one.run == "r"]
    assert said.state == "open" and verdict.reason in said.would_have
    watch(lab)
    lab.train(12)  # it goes on by itself
    assert len(lab.starts()) == 1 and not dict(lab.plan().spent)


def test_a_cause_that_is_gone_explains_nothing_for_long() -> None:
    lab = trained()
    watch(lab, MOUNT)
    wait(lab, 60, proc_state="D")
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
    lab = Lab(grade="script", hang_limit_s=3.0)
    lab.begin()
    lab.train(steps)
    path = "/cache/MODULE_1/model.pb.lock"
    left = Verdict("compile_lock_stale", f"node/a/lock{path}", DEGRADED, 1.0,
                   f"{path} is 3 min old", (("path", path), ("uid", "0")))
    watch(lab, left)
    lab.view = replace(lab.view, compiling=f"rank 1 holds or awaits {path}")
    wait(lab, 3 * 3600)
    (said,) = [one for one in lab.decision.verdicts if one.run == "r"]
    assert "stands still for" in said.reason and f"before a lock: {path} is 3 min" in said.reason
    (open_one,) = [one for one in lab.incidents.values() if one.run == "r" and one.state == "open"]
    assert f"rm {path}" in open_one.would_have and len(lab.starts()) == 1


@pytest.mark.parametrize("verdict", [MOUNT, FULL])
def test_a_condition_that_the_rank_does_not_wait_for_excuses_nobody(verdict: Verdict) -> None:
    lab = trained()
    watch(lab, verdict)
    wait(lab, 20, proc_state="S", phase="forward_backward")
    assert len(lab.starts()) == 2


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
    wait(lab, 60, proc_state="S", phase="forward_backward")
    assert len(lab.starts()) == before + 1


def test_one_rank_that_is_stopped_is_a_fault_still() -> None:
    lab = Lab()
    lab.begin()
    lab.train(8)
    for tenth in range(1, 30):
        stop(lab, tenth / 10, (1,))
        lab.step(0.1)
    assert "rank_stopped" in {one.fault for one in lab.decision.incidents}
