"""A kill, the survivors, the next generation: the spine, told as stories."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.agent.core.model import (
    Delete,
    Doc,
    EffectOutcome,
    Ended,
    Parked,
    Plan,
    Request,
    Resume,
    Runbook,
    Settings,
    SnapshotView,
    Stop,
)
from holdfast.agent.core.node import Node

from .driver import Lab, replace
from .test_kernel import CATALOGUE, parse


def test_an_idle_launcher_gets_a_plan_and_then_a_start() -> None:
    lab = Lab()
    first, second, third = lab.step(), lab.step(), lab.step()
    assert [e.id for e in first] == ["1/store/run/r/put/1"]
    assert [e.id for e in second] == ["1/run/r/start/1"]
    assert third == []
    assert lab.plan().resume == Resume(kind="fresh")
    assert lab.starts()[0].ranks == (0, 1) and lab.starts()[0].world == 2


def test_generations_grow_past_store_launcher_and_commits() -> None:
    lab = Lab()
    old = Plan("r", 4, ("a",), ((0, "a"),), Resume("fresh"), "old", finished=0)
    lab.docs["run/r"] = Doc("run/r", 9, msgspec.json.encode(old))
    lab.commit(30, generation=6)
    lab.begin()
    assert lab.plan().generation == 7 and lab.plan().finished == -1
    assert lab.plan().resume == Resume("disk", 30, 6, "step-30.gen-6")
    assert lab.docs["run/r"].version == 10


def test_a_killed_rank_is_replaced_and_the_survivor_lives_on() -> None:
    lab = Lab()
    lab.begin()
    lab.train(17)
    lab.kill(1)
    assert lab.step() == []
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject, verdict.act) == ("rank_killed", "run/r/rank/1", True)
    lab.park(0, 17)
    assert lab.kinds(lab.step()) == ["put"]
    assert lab.kinds(lab.step()) == ["start"]
    start = lab.starts()[-1]
    assert (start.generation, start.keep) == (2, (0,))
    assert start.resume == Resume("survivor", 17, 1)
    assert start.history == ((1, 0), (2, 17))


def test_a_rank_that_raised_is_named_and_lives_on_with_the_others() -> None:
    lab = Lab()
    lab.begin()
    lab.train(17)
    lab.park(0, 17)
    lab.park(1, 17)
    lab.change(1, ended=Ended(1, 0, "exception", "ValueError: x", boot_s=lab.boot_s))
    assert lab.kinds(lab.step()) == ["put"]
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject, verdict.act) == ("rank_exited", "run/r/rank/1", True)
    assert "raised ValueError: x" in verdict.reason
    assert lab.kinds(lab.step()) == ["start"]
    start = lab.starts()[-1]
    assert (start.generation, start.keep) == (2, (0, 1))
    assert start.resume == Resume("survivor", 17, 1)


def test_the_incident_tells_culprit_actions_and_cost_and_closes_on_the_first_new_step() -> None:
    lab = Lab()
    lab.begin()
    lab.train(17)
    lab.kill(1)
    lab.step()
    lab.park(0, 17)
    lab.settle()
    assert lab.decision.incidents[0].state == "acted"
    lab.all(step=18, phase="data")
    lab.step(0.3)
    incident = lab.decision.incidents[0]
    assert incident.id == "r-g1-rank_killed-r1-1" and incident.state == "closed"
    assert incident.culprit == "rank 1 (pid 1002) on a" and incident.lost_steps == 0
    assert abs(incident.lost_s - 0.3) < 1e-6
    assert incident.actions == ("2/store/run/r/put/1", "2/run/r/start/1")
    assert [t.split(":")[0].split(" at ")[0] for _, t in incident.timeline] == [
        "seen", "planned generation 2 from the survivors' memory", "generation 2 starts",
        "training goes on",
    ]
    lab.step(0.1)
    assert lab.decision.incidents == ()


def test_stepping_twice_over_the_same_observation_yields_nothing_new() -> None:
    lab = Lab()
    lab.begin()
    lab.train(5)
    lab.hold = {"put", "start", "stop", "evidence"}
    lab.kill(1)
    lab.park(0, 5)
    assert lab.kinds(lab.step()) == ["put"]
    first = lab.decision
    assert lab.step() == []
    assert lab.decision.incidents == first.incidents


def test_a_torn_survivor_is_kept_but_never_resumed_from() -> None:
    lab = Lab(nproc=3)
    lab.begin()
    lab.train(9)
    lab.kill(2)
    lab.park(0, 10, torn=True)
    lab.park(1, 9)
    lab.settle()
    assert lab.starts()[-1].keep == (0, 1)
    assert lab.starts()[-1].resume == Resume("survivor", 9, 1)


SHARDED = (  # what is parked, and the step that is resumed from, if survivors have one
    ([Parked(9, shard=0, shards=2), Parked(9, shard=1, shards=2)], 9),
    ([Parked(9, shard=0, shards=2), Parked(9, shard=0, shards=2)], None),
    ([Parked(10, shard=0, shards=2), Parked(9, shard=1, shards=2)], None),
    ([Parked(10, shard=0, shards=2), Parked(9, shard=1, shards=2, ready=True)], 10),
    ([Parked(10, shard=0, shards=2), Parked(9, True, shard=1, shards=2, ready=True)], None),
    ([Parked(9, shard=0, shards=2, ready=True), Parked(9, shard=1, shards=2, ready=True)], 9),
    ([Parked(9, shard=0, shards=2), Parked(9, shard=0, shards=1)], None),
    ([Parked(9, shard=7, shards=2), Parked(9, shard=1, shards=2)], None),
)


@pytest.mark.parametrize(("parked", "step"), SHARDED)
def test_survivors_of_a_sharded_run_must_have_all_of_it_between_them(
    parked: list[Parked], step: int | None
) -> None:
    lab = Lab(nproc=3)
    lab.begin()
    lab.train(9)
    lab.kill(2)
    for number, one in enumerate(parked):
        lab.change(number, state="parked", parked=one)
    lab.settle()
    resume = lab.starts()[-1].resume
    assert resume == (Resume("survivor", step, 1) if step else Resume("fresh"))
    assert lab.starts()[-1].keep == ((0, 1) if step else ())


def test_without_an_untorn_survivor_the_newest_of_snapshot_and_disk_is_taken() -> None:
    for snapshot_step, want in ((8, "snapshot"), (5, "disk")):
        lab = Lab()
        lab.begin()
        lab.train(9)
        lab.commit(5)
        lab.view = replace(lab.view, snapshot=SnapshotView(1, snapshot_step, 2))
        lab.kill(1)
        lab.park(0, 10, torn=True)
        lab.settle()
        assert lab.starts()[-1].resume.kind == want
        assert lab.starts()[-1].keep == ()


def test_who_does_not_park_in_time_is_stopped_and_replaced() -> None:
    lab = Lab(nproc=3)
    lab.begin()
    lab.train(9)
    lab.kill(2)
    lab.park(1, 9)
    assert lab.step() == []
    assert lab.decision.next_step_s <= 1.0
    stopped = lab.step(1.01)
    assert [e.kind for e in stopped] == ["stop"]
    assert isinstance(stopped[0].body, Stop) and stopped[0].body.ranks == (0,)
    lab.settle()
    assert lab.starts()[-1].keep == (1,)


def test_the_first_root_is_to_blame_and_a_cascade_never() -> None:
    lab = Lab(grade="script", nproc=3)
    lab.begin()
    lab.train(3)
    lab.raises(0, "RuntimeError: Connection closed by peer [127.0.0.1]:4")
    lab.raises(1, "ValueError: bad row", code=3, after_s=0.4)
    lab.step()
    verdict = lab.decision.verdicts[0]
    assert (verdict.fault, verdict.subject) == ("rank_exited", "run/r/rank/1")
    assert ("error", "ValueError: bad row") in verdict.evidence


def test_only_consequences_wait_a_moment_for_their_root() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.raises(0, "RuntimeError: Connection reset by peer")
    assert lab.step() == [] and lab.decision.verdicts == ()
    lab.kill(1)
    lab.step(0.2)
    assert lab.decision.verdicts[0].subject == "run/r/rank/1"


def test_a_scripts_other_ranks_are_stopped_before_it_starts_again() -> None:
    lab = Lab(grade="script")
    lab.begin()
    lab.train(3)
    lab.kill(1)
    assert lab.kinds(lab.step()) == ["stop"]
    assert lab.kinds(lab.settle()) == ["put", "start"]
    assert lab.starts()[-1].resume.kind == "own"


def test_ranks_that_end_one_by_one_are_told_to_stop_once() -> None:
    lab = Lab(grade="script", nproc=3)
    lab.begin()
    lab.train(3)
    lab._stop = lambda body: None  # the signals are sent; nobody has ended yet
    lab.kill(1)
    assert lab.kinds(lab.step()) == ["stop"]
    lab.end(0, Ended(143, 15))
    assert lab.kinds(lab.step(0.1)) == []
    lab.end(2, Ended(143, 15))
    assert lab.kinds(lab.settle()) == ["put", "start"]


def test_an_outcome_written_before_teardown_counts_more_than_the_exit_code() -> None:
    lab = Lab()
    lab.begin()
    lab.train(3)
    for rank in (0, 1):
        lab.end(rank, Ended(134, 6, "done"))
    lab.settle()
    assert lab.finishes() == [0] and lab.plan().finished == 0


def test_exhausted_restarts_give_the_scripts_own_code_or_76() -> None:
    for code, want in ((5, 5), (0, 76)):
        lab = Lab(grade="script", max_restarts=0)
        lab.begin()
        lab.raises(1, "ValueError: no", code=code) if code else lab.kill(1)
        lab.settle()
        assert lab.finishes() == [want] and lab.plan().finished == want


def test_a_wrong_setting_of_the_trainers_ends_the_run_at_once_with_78() -> None:
    for grade, starts, code in (("trainer", 1, 78), ("script", 3, 1)):
        lab = Lab(grade=grade, max_restarts=99)
        lab.begin()
        for _ in range(starts):
            lab.raises(1, "exit code 78", code=78)
            if grade == "trainer":
                lab.park(0, 0)
            lab.settle()
        assert (len(lab.starts()), lab.finishes()) == (starts, [code])


def test_a_crash_loop_stops_even_with_restarts_left() -> None:
    lab = Lab(grade="script", max_restarts=99)
    lab.begin()
    for _ in range(3):
        lab.raises(1, "ValueError: same", code=7)
        lab.settle()
    assert len(lab.starts()) == 3 and lab.finishes() == [7]
    assert "r-g3-crash_loop-r1-1" in {i.id for i in lab.decision.incidents} | {
        i.id for i in lab.node.step(*_again(lab)).incidents
    } or lab.node.kept.runs["r"].incidents.book.numbers["crash_loop"] == 1


def _again(lab: Lab):  # type: ignore[no-untyped-def]
    from holdfast.agent.core.model import Now

    return Now(lab.boot_s, 1e9 + lab.boot_s, "b"), lab.observed()


def test_a_generation_that_makes_progress_gives_its_restart_back() -> None:
    lab = Lab(max_restarts=1)
    lab.begin()
    for to in (12, 24, 36):
        lab.train(to)
        lab.kill(1)
        lab.step()
        lab.park(0, to)
        lab.settle()
    assert lab.view.generation == 4 and lab.finishes() == []
    lab.kill(1)
    lab.step()
    lab.park(0, 36)
    lab.settle()
    assert lab.finishes() == [76]


def test_a_reboot_forgets_no_restart() -> None:
    lab = Lab(max_restarts=99)
    lab.runbooks["rank_killed"] = Runbook(
        "rank_killed", "degraded", "rank", ("restart_ranks",), budget_count=2
    )
    lab.begin()
    for boot_s, boot_id in ((100.0, "b"), (101.0, "b"), (5.0, "c")):
        lab.boot_s, lab.boot_id = boot_s, boot_id
        lab.kill(1)
        lab.step()
        lab.park(0, 3)
        lab.settle()
    assert lab.view.generation == 3 and lab.finishes() == [76]


def test_steps_of_an_older_generation_give_no_restart_back() -> None:
    """It trained on here, cut off, while another leader had planned the next one."""
    lab = Lab()
    lab.begin()
    lab.train(20)
    spent = (("node_lost/restart_ranks/node/a", 1), ("restarts", 1))
    charged = tuple(f"charged:{key}" for key, _ in spent)
    plan = replace(lab.plan(), generation=2, peak=5, spent=spent, granted=charged)
    lab.docs["run/r"] = Doc("run/r", lab.docs["run/r"].version + 1, msgspec.json.encode(plan))
    ranks = tuple(replace(rank, generation=2, step=0) for rank in lab.view.ranks)
    lab.view = replace(lab.view, generation=2, ranks=ranks)
    lab.train(2)
    lab.kill(1)
    lab.step()
    lab.park(0, 2)
    lab.settle()
    assert lab.plan().generation == 3 and dict(lab.plan().spent)["restarts"] == 2


def test_what_was_planned_and_never_begun_counts_for_an_agent_that_forgot_it() -> None:
    """Its memory did not reach the disk: how far training came, and what is bad, says the plan."""
    lab = Lab()
    lab.begin()
    lab.train(5)
    plan = replace(lab.plan(), generation=2, peak=30, quarantined=("step-30.gen-1",))
    lab.docs["run/r"] = Doc("run/r", lab.docs["run/r"].version + 1, msgspec.json.encode(plan))
    lab.node = Node("a", lab.settings, lab.runbooks)
    lab.kill(1)
    lab.step()
    lab.park(0, 5)
    lab.settle()
    made = lab.plan()
    assert (made.generation, made.peak, made.quarantined) == (3, 30, ("step-30.gen-1",))


def test_a_runbooks_own_budget_stops_before_max_restarts() -> None:
    lab = Lab(grade="script", max_restarts=99)
    lab.runbooks["rank_killed"] = Runbook(
        "rank_killed", "degraded", "rank", ("restart_ranks",), budget_count=1
    )
    lab.begin()
    for step in (1, 2):
        lab.change(1, step=step)
        lab.kill(1)
        lab.settle()
    assert lab.finishes() == [76]


def test_a_bad_checkpoint_is_left_out_and_the_next_older_one_used() -> None:
    lab = Lab(max_restarts=0)
    lab.commit(5, generation=1)
    lab.commit(10, generation=1)
    lab.begin()
    assert lab.plan().resume.step == 10
    for rank in (0, 1):
        lab.end(rank, Ended(1, 0, "bad_checkpoint", "step-10.gen-1: digest", boot_s=100.0))
    lab.settle()
    assert lab.plan().resume.step == 5 and lab.plan().quarantined == ("step-10.gen-1",)
    assert lab.finishes() == []


def test_an_oom_line_that_names_the_pid_names_the_fault() -> None:
    lab = Lab()
    lab.begin()
    pid = lab.rank(1).pid
    line = f"Out of memory: Killed process {pid} (python) total-vm:1kB"
    lab.events = (parse(CATALOGUE, line, 1, lab.boot_s),)
    lab.kill(1)
    lab.step()
    assert "rank_oom_killed" in [one.fault for one in lab.decision.verdicts]


def test_a_write_that_lost_is_not_repeated_but_read_again() -> None:
    lab = Lab()
    lab.refuse_puts = 1
    assert lab.kinds(lab.step()) == ["put"]
    assert lab.step() == [] and lab.step(2.0) == []
    other = Plan("r", 3, ("a",), ((0, "a"), (1, "a")), Resume("fresh"), "other", history=((3, 0),))
    lab.docs["run/r"] = Doc("run/r", 1, msgspec.json.encode(other))
    assert lab.kinds(lab.step(0.1)) == ["put"]
    assert lab.plan().generation == 4


def test_a_lost_acknowledgement_is_read_from_the_store() -> None:
    lab = Lab()
    lab.begin()
    lab.train(3)
    lab.hold = {"put"}
    lab.kill(1)
    lab.park(0, 3)
    effect = lab.step()[0]
    lab._put(effect.body)  # type: ignore[arg-type]
    assert lab.kinds(lab.step(0.1)) == ["start"]


def test_preempted_and_interrupted_runs_leave_with_their_codes() -> None:
    for why, code in (("preempted", 75), ("interrupted", 130)):
        lab = Lab()
        lab.begin()
        lab.train(3)
        lab.view = replace(lab.view, shutdown=why)
        stop = lab.step()[0].body
        assert isinstance(stop, Stop) and stop.ranks == () and stop.grace_s == 5.0
        lab.settle()
        assert lab.finishes() == [code]


def test_paused_runs_are_left_alone_until_resumed() -> None:
    lab = Lab()
    lab.begin()
    lab.requests = (Request("q1", "pause", "run/r", "look"),)
    assert lab.kinds(lab.step(0.1)) == ["put"] and lab.plan().paused
    lab.kill(1)
    lab.park(0, 0)
    assert lab.settle() == []
    lab.requests = (Request("q2", "resume", "run/r", "done"),)
    lab.settle()
    assert lab.view.generation == 2 and not lab.plan().paused


def test_an_operators_restart_costs_no_budget() -> None:
    lab = Lab(max_restarts=0)
    lab.begin()
    lab.train(4)
    lab.requests = (Request("q1", "restart_ranks", "run/r/rank/1", "try"),)
    assert lab.kinds(lab.step(0.1)) == ["stop"]
    lab.park(0, 4)
    lab.settle()
    assert lab.starts()[-1].keep == (0,) and lab.finishes() == []
    assert lab.plan().reason == "an operator asked for a restart: try"


def test_a_restart_of_the_agent_asks_for_nothing_twice() -> None:
    lab = Lab()
    lab.begin()
    lab.train(6)
    lab.restart_agent()
    assert lab.settle() == []
    lab.kill(1)
    lab.step()
    lab.restart_agent()
    lab.park(0, 6)
    lab.settle()
    assert lab.view.generation == 2 and dict(lab.plan().spent)["restarts"] == 1
    assert [i.id for i in lab.decision.incidents] == ["r-g1-rank_killed-r1-1"]


def test_an_agent_without_memory_still_leads_a_running_run() -> None:
    lab = Lab()
    lab.begin()
    lab.train(6)
    lab.kill(1)
    lab.park(0, 6)
    lab.hold = {"start"}
    lab.step()
    lab.step()
    assert lab.plan().generation == 2 and lab.view.generation == 1
    lab.node = type(lab.node)("a", lab.settings, lab.runbooks)
    lab.hold = set()
    lab.settle()
    assert lab.view.generation == 3 and lab.starts()[-1].resume.kind == "survivor"


def test_a_launcher_that_is_not_connected_is_unknown_and_nothing_is_done() -> None:
    lab = Lab()
    lab.begin()
    lab.kill(1)
    lab.view = replace(lab.view, connected=False)
    assert lab.settle() == []
    assert lab.decision.verdicts[0].severity == "unknown"


def test_another_launcher_under_the_same_name_starts_from_disk() -> None:
    lab = Lab()
    lab.begin()
    lab.train(7)
    lab.commit(5)
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=150.0)
    lab.settle()
    assert lab.plan().generation == 2 and lab.plan().resume.step == 5


@pytest.mark.parametrize("same_step", [True, False])
def test_a_late_yes_of_an_earlier_launcher_ends_no_later_one(same_step: bool) -> None:
    lab = Lab(max_restarts=0)
    lab.begin()
    lab.hold = {"finish"}
    lab.kill(1)
    lab.settle()
    late = next(e for e in lab.log if e.kind == "finish")
    if same_step:
        lab.outcomes.append(EffectOutcome(late.id, True))
    lab.view = replace(lab.view, generation=0, state="idle", ranks=(), registered_boot_s=150.0)
    lab.settle()
    lab.outcomes.append(EffectOutcome(late.id, True))
    lab.hold = set()
    lab.settle()
    lab.train(3)
    lab.all(state="ended", ended=Ended(0, outcome="done"))
    lab.settle()
    assert lab.finishes() == [76, 0]


def test_keep_n_deletes_once_and_never_while_the_journal_stalls() -> None:
    lab = Lab(settings=Settings(keep_checkpoints=2))
    lab.begin()
    for step in (5, 10, 15, 20):
        lab.commit(step)
    lab.journal_stalled = True
    assert lab.step(0.1) == []
    assert lab.decision.verdicts[0].fault == "journal_stalled"
    lab.journal_stalled = False
    effects = lab.step(0.1)
    paths = [e.body.paths for e in effects if isinstance(e.body, Delete)]
    assert paths == [("step-10.gen-1", "step-5.gen-1")]
    assert lab.settle() == []


def test_what_was_not_deleted_is_asked_for_again_with_the_next_and_not_before() -> None:
    """A store that is away for a minute leaves nothing on the disk for good."""
    lab = Lab(settings=Settings(keep_checkpoints=2))
    lab.begin()

    def asked(step: int) -> list[tuple[str, ...]]:
        lab.commit(step)
        return [e.body.paths for e in lab.settle() if isinstance(e.body, Delete)]

    lab.hold = {"delete"}
    assert (asked(5), asked(10), asked(15)) == ([], [], [("step-5.gen-1",)])
    lab.outcomes.append(EffectOutcome(lab.log[-1].id, False, "store: no answer"))
    assert lab.settle() == [] == lab.step(5.0)
    lab.hold = set()
    assert asked(20) == [("step-10.gen-1", "step-5.gen-1")]
    assert asked(25) == [("step-15.gen-1",)]


def test_the_journal_stalled_does_not_hold_a_restart_up() -> None:
    lab = Lab()
    lab.begin()
    lab.train(4)
    lab.journal_stalled = True
    lab.kill(1)
    lab.park(0, 4)
    assert lab.kinds(lab.settle()) == ["put", "start"]


def test_a_death_that_is_only_observed_ends_the_ranks_that_would_wait_for_it() -> None:
    """As torchrun does: they may never notice, and would hold their devices for hours."""
    lab = Lab(grade="script", settings=Settings(act=()))
    lab.begin()
    lab.train(5)
    lab.kill(1)
    for _ in range(10):
        lab.step(1.0)
    assert [one.body.ranks for one in lab.log if one.kind == "stop"] == [(0,)]
    assert lab.finishes() == [76] and len(lab.starts()) == 1


def test_a_death_that_is_only_observed_says_what_acting_would_have_done() -> None:
    for max_restarts, would in (
        (3, "restart_ranks: what is left of the generation would have ended, and another one st"),
        (0, "stop_run: the run would have ended with 76: "),
    ):
        lab = Lab(settings=Settings(act=()), max_restarts=max_restarts)
        lab.begin()
        lab.train(5)
        lab.kill(0)
        lab.kill(1)
        for _ in range(10):
            lab.step(1.0)
        assert lab.finishes() == [76] and len(lab.starts()) == 1
        (one,) = [one for one in lab.incidents.values() if one.fault == "rank_killed"]
        assert one.would_have.startswith(would), one.would_have
