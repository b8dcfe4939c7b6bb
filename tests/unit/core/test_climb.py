"""A run's ladder climbs: each rung within its budget, the next behind it, and `explain` says so."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.agent.config.runbooks import RunbookError, load_runbooks
from holdfast.agent.config.runbooks import parse as runbook
from holdfast.agent.core import actions
from holdfast.agent.core.model import FATAL, Ended, Incident, Request, Runbook, Settings
from holdfast.agent.core.node import Node
from holdfast.agent.core.nodes.condition_incidents import Stood
from holdfast.agent.core.run import policy
from holdfast.agent.core.run.policy import PROGRESS_STEPS

from .driver import Lab, replace
from .test_kernel import CATALOGUE, parse
from .test_ledger import submitted_again
from .test_repair import FALLEN

SUBJECT = "run/r/rank/1"
LADDER = ("restart_ranks", "exclude_node", "reboot_node", "replace_node", "stop_run")


def lab(ladder: tuple[str, ...], count: int = 1, max_restarts: int = 9, **wanted) -> Lab:
    made = Lab(settings=Settings(**wanted), max_restarts=max_restarts)
    made.runbooks = {**load_runbooks(), "rank_killed": Runbook(
        "rank_killed", FATAL, "rank", ladder, budget_count=count)}
    made.node = Node("a", made.settings, made.runbooks)
    made.begin()
    made.train(1)
    return made


def die(made: Lab, seconds: float = 1.0) -> None:
    made.kill(1)
    made.settle()
    for _ in range(40):
        if made.view.generation > 1 and made.rank(1).ended is None or made.finishes():
            break
        made.step(seconds / 10)


def ended(made: Lab) -> str:
    ending = made.node.cases["r"].state.ending
    return ending.reason if ending is not None else ""


def orders(made: Lab) -> list[str]:
    return [one.kind for one in made.log if one.kind in actions.root_verbs()]


def test_the_rung_behind_a_spent_restart_is_taken() -> None:
    made = lab(LADDER, allow=("reboot_node", "replace_node"), alone=True)
    die(made)
    assert made.view.generation == 2 and not made.finishes()
    made.train(3)
    die(made)
    assert made.finishes() == [75]
    assert "reboot_node is the next rung" in ended(made)
    made.view = replace(made.view, state="done")
    for _ in range(30):
        made.step(1.0)
    assert orders(made) == ["reboot_node"]


def test_what_is_not_allowed_is_asked_of_a_person_and_the_run_ends_with_76() -> None:
    made = lab(LADDER)
    die(made)
    made.train(3)
    die(made)
    assert made.finishes() == [76] and not orders(made)
    assert "reboot_node: not done, because actions.allow does not name it" in ended(made)


def test_alone_a_reboot_needs_leave_of_its_own() -> None:
    made = lab(LADDER, allow=("reboot_node", "replace_node"))
    die(made)
    made.train(3)
    die(made)
    assert made.finishes() == [76] and not orders(made)
    assert "actions.alone = true" in ended(made)


def test_stop_run_before_a_restart_ends_the_run_at_the_first_fault() -> None:
    made = lab(("stop_run", "restart_ranks"))
    die(made)
    assert made.finishes() == [76] and made.view.generation == 1


@pytest.mark.parametrize("rung", ["stop_own_ranks", "replace_rank"])
def test_what_nobody_performs_is_refused(rung: str) -> None:
    text = f'+++\nseverity = "fatal"\nscope = "rank"\nladder = ["{rung}"]\n+++\n'
    with pytest.raises(RunbookError, match="performed by nobody"):
        runbook("rank_killed", text, "x.md")


@pytest.mark.parametrize("ladder", [("restart_ranks",), ("take_evidence", "restart_ranks")])
def test_evidence_is_taken_where_the_ladder_names_it(ladder: tuple[str, ...]) -> None:
    made = Lab(grade="script", hang_limit_s=3.0)
    made.runbooks = {"rank_hung": Runbook("rank_hung", FATAL, "rank", ladder)}
    made.node = Node("a", made.settings, made.runbooks)
    made.begin()
    made.train(5)
    for still in range(12):
        made.change(0, phase="collective", still_s=float(still))
        made.change(1, still_s=float(still) + 0.5)
        made.step(1.0)
    assert ("evidence" in [one.kind for one in made.log]) == ("take_evidence" in ladder)


@pytest.mark.parametrize(("error", "starts"), [
    ("ModuleNotFoundError: No module named 'x'", 1), ("SyntaxError: bad", 1),
    ("FileNotFoundError: [Errno 2] data", 1), ("NameError: name 'x' is not defined", 1),
    ("UnboundLocalError: cannot access local variable 'x'", 1),
    ("TypeError: main() got an unexpected keyword argument 'lr'", 1),
    ("TypeError: Net.__init__() missing 1 required positional argument: 'width'", 1),
    ("TypeError: f() takes from 1 to 2 positional arguments but 3 were given", 1),
    ("KeyError: 'DATA_DIR'", 1), ("ConfigAttributeError: Key 'lr' is not in struct", 1),
    # What a rendezvous, a store, a mount or a server may be the reason of.
    ("RuntimeError: x", 3), ("OSError: [Errno 5] Input/output error", 3),
    ("ConnectionError: HTTPConnectionPool", 3), ("TimeoutError: x", 3),
    ("ConnectionRefusedError: [Errno 111] Connection refused", 3),
    ("DistBackendError: NCCL error in: x", 3), ("DistNetworkError: The client socket", 3),
    ("KeyError: 'shards'", 3), ("KeyError: 'a NAME'", 3), ("ValueError: x", 3),
    ("TypeError: 'NoneType' object is not iterable", 3), ("AttributeError: x", 3),
    ("AcceleratorError: CUDA error: NameError: x", 3),
])
def test_a_users_error_known_as_such_is_not_tried_again(error: str, starts: int) -> None:
    made = Lab(grade="script", max_restarts=2)
    made.begin()
    for _ in range(200):
        if made.finishes():
            break
        if made.rank(0).ended is None:
            made.raises(0, error, code=1)
        made.step(0.1)
    assert (made.finishes(), len(made.starts())) == ([1], starts)


@pytest.mark.parametrize(("grade", "ended", "starts"), [
    ("script", Ended(2, 0, "exit"), 1), ("script", Ended(1, 0, "exit"), 3),
    ("script", Ended(3, 0, "exit"), 3),
    ("opaque", Ended(126), 1), ("opaque", Ended(127), 1),
    ("opaque", Ended(2), 3), ("opaque", Ended(1), 3), ("opaque", Ended(135, 7), 3),
])
def test_a_code_that_says_what_the_user_must_mend_is_not_tried_again(
    grade: str, ended: Ended, starts: int,
) -> None:
    made = Lab(grade=grade, max_restarts=2)
    made.begin()
    for _ in range(200):
        if made.finishes():
            break
        if made.rank(0).ended is None:
            made.end(0, replace(ended, boot_s=made.boot_s))
        made.step(0.1)
    assert (made.finishes(), len(made.starts())) == ([ended.code], starts)


def test_an_opaque_job_that_lasted_may_have_trained() -> None:
    made = Lab(grade="opaque", max_restarts=2)
    made.begin()
    for _ in range(60):
        made.step(1.0)
    made.end(0, Ended(127, boot_s=made.boot_s))
    made.settle()
    assert not made.finishes() and len(made.starts()) == 2


@pytest.mark.parametrize("error", ["NameError: name 'x' is not defined", "KeyError: 'LR'"])
def test_an_error_of_the_program_behind_its_first_step_is_tried_again(error: str) -> None:
    made = Lab(grade="script", max_restarts=2)
    made.begin()
    made.train(PROGRESS_STEPS)
    made.raises(0, error)
    made.settle()
    assert not made.finishes() and len(made.starts()) == 2


def test_the_same_error_after_training_is_another_matter() -> None:
    made = Lab(grade="script", max_restarts=2)
    made.begin()
    made.train(PROGRESS_STEPS)
    made.raises(0, "FileNotFoundError: [Errno 2] data")
    made.settle()
    assert not made.finishes()


@pytest.mark.parametrize("grade", ["trainer", "script"])
@pytest.mark.parametrize(("steps", "ends"), [(0, [1]), (1, [])])
def test_a_run_of_a_name_that_trained_before_is_known_by_its_own_steps(
    grade: str, steps: int, ends: list[int]
) -> None:
    """--run, or a job's id, names it again, and its script may be another one."""
    made = Lab(grade=grade, max_restarts=2)
    made.begin()
    made.train(50)
    if grade == "trainer":  # it goes on from there; a script's own steps count from 0
        made.commit(20)
    submitted_again(made)
    made.train(made.plan().resume.step + steps)
    made.restart_agent()
    for number in (0, 1):
        made.raises(number, "ModuleNotFoundError: No module named 'x'")
    made.settle()
    assert (made.finishes(), len(made.starts())) == (ends, 2 if ends else 3)


@settings(max_examples=60, deadline=None)
@given(
    st.permutations(("take_evidence", *LADDER, "ask_person")), st.integers(0, 3),
    st.integers(0, 3), st.sets(st.sampled_from(("reboot_node", "replace_node", "drain_node"))),
    st.booleans(), st.integers(0, 2), st.integers(0, 4), st.integers(1, 7),
)
def test_explain_says_what_happens(ladder, count, spent, allow, alone, used, most, rungs) -> None:
    made = lab(ladder[:rungs], count, most, allow=tuple(sorted(allow)), alone=alone)
    plan = made.node.cases["r"].state.document.plan
    state = made.node.cases["r"].state
    charged = (f"rank_killed/restart_ranks/{SUBJECT}", spent), (policy.RESTARTS, used)
    state.document = replace(state.document, plan=replace(plan, spent=charged))
    before = made.node.memory()
    said = {one.subject: one for one in made.node.outlook("rank_killed")}
    assert made.node.memory() == before
    die(made)
    outlook = said[SUBJECT]
    if outlook.code < 0:
        assert outlook.action == "restart_ranks" and made.view.generation == 2
    else:
        assert made.finishes() == [outlook.code] and made.view.generation == 1
        assert ended(made).split(": ")[0] == outlook.reason.split(": ")[0]
    made.view = replace(made.view, state="done", ranks=())
    for _ in range(30):
        made.step(1.0)
    beyond = outlook.action if outlook.action in actions.root_verbs() else ""
    assert orders(made)[:1] == ([beyond] if beyond else [])


@pytest.mark.parametrize(("grade", "before", "now", "goes_on"), [
    ("trainer", 1, 60, True), ("trainer", 60, 61, False), ("trainer", 60, 75, True),
    ("script", 60, 1, False), ("script", 1, 60, True)])
def test_explain_counts_what_the_generation_earned_that_would_end(
    grade: str, before: int, now: int, goes_on: bool,
) -> None:
    """And not what the one before it did."""
    made = Lab(grade=grade, max_restarts=9)
    made.runbooks = {**load_runbooks(), "rank_killed": Runbook(
        "rank_killed", FATAL, "rank", LADDER, budget_count=1)}
    made.node = Node("a", made.settings, made.runbooks)
    made.begin()
    made.train(before)
    die(made)
    assert made.view.generation == 2
    made.all(step=0 if grade == "script" else before)
    made.train(now)
    outlook = {one.subject: one for one in made.node.outlook("rank_killed")}[SUBJECT]
    made.kill(1)
    for _ in range(40):
        made.step(0.1)
    assert made.finishes() == ([] if goes_on else [76])
    assert (made.view.generation, outlook.code) == ((3, -1) if goes_on else (2, 76))


def test_explain_gives_a_failed_script_the_scripts_own_code() -> None:
    made = lab(("stop_run",))
    made.runbooks["rank_exited"] = made.runbooks["rank_killed"]
    outlook = {one.subject: one for one in made.node.outlook("rank_exited")}[SUBJECT]
    assert outlook.code == 1 and "the script's own code" in outlook.reason
    made.raises(1, "ValueError: x", code=7)
    made.settle()
    assert made.finishes() == [7]


def test_new_settings_take_nothing_from_what_is_remembered_or_in_flight() -> None:
    made = lab(LADDER)
    made.hold = {"put", "stop", "logs", "evidence"}
    made.kill(1)
    for _ in range(5):
        made.step(0.5)
    pending, cases = dict(made.node.kept.in_flight.pending), made.node.cases
    assert pending
    allowed = Settings(allow=("reboot_node",), alone=True)
    made.node.configure(allowed, made.runbooks)
    assert made.node.kept.in_flight.pending == pending and made.node.cases is cases
    last = made.node.outlook("gpu_fell_off_bus")[-1]
    assert last.action == "reboot_node"
    assert msgspec.to_builtins(last)["rung"] == "reboot_node", "the API's key"


@pytest.mark.parametrize("line", [FALLEN, "EXT4-fs error (device sda1): __ext4_find_entry:1: x"])
def test_no_run_starts_on_a_node_with_a_fatal_incident(line: str) -> None:
    made = Lab()
    made.runbooks = load_runbooks()
    made.node = Node("a", made.settings, made.runbooks)
    made.events = (parse(CATALOGUE, line, 1, made.boot_s),)
    for _ in range(5):
        made.step(0.5)
    fatal = [one for one in made.decision.incidents if one.severity == FATAL]
    if not fatal:
        assert made.view.generation == 1
        return
    assert (made.finishes(), made.starts()) == ([75], [])
    assert fatal[0].id in ended(made) and "holdfast close" in ended(made)


def test_a_run_that_is_here_already_is_not_held_by_it() -> None:
    made = lab(LADDER)
    made.events = (parse(CATALOGUE, FALLEN, 1, made.boot_s),)
    for _ in range(5):
        made.step(0.5)
    assert not made.finishes() and made.view.generation == 1


def test_what_is_over_by_itself_is_waited_for() -> None:
    made = Lab(settings=Settings())
    made.runbooks = {"accelerator_lost": Runbook("accelerator_lost", FATAL, "gpu", clears="check")}
    made.node = Node("a", made.settings, made.runbooks)
    book = made.node.conditions.book
    number = Incident(id="i", fault="accelerator_lost", subject="node/a/gpu/0", severity=FATAL,
                      run="", generation=0, opened_wall_s=1.0, opened_boot_s=1.0, reason="lost",
                      culprit="a")
    book.open["x"] = Stood(number, "b", made.boot_s, "absence")
    made.step(1.0)
    assert not made.starts() and "waits until it is over" in dict(made.decision.reasons)["r"]
    made.settle()
    for _ in range(70):
        made.step(1.0)
    assert made.view.generation == 1 and not made.finishes()


def answered(made: Lab) -> dict[str, tuple[bool, str]]:
    return {one.id: (one.ok, one.text) for one in made.decision.answers}


def test_a_restart_that_a_person_asks_for_is_settled_by_the_plan_that_names_it() -> None:
    made = lab(LADDER)
    made.requests = (Request("q1", "restart_ranks", "run/r/rank/1", "try", run="r"),
                     Request("q2", "pause", "run/none", "x", run="none"))
    made.step()
    assert answered(made) == {"q2": (False, "no launcher of none is connected here")}
    die(made)
    assert "q1" in made.plan().granted and made.view.generation == 2
    assert answered(made)["q1"] == (True, "generation 2")


def test_a_restart_of_a_run_that_has_ended_is_refused() -> None:
    made = lab(("stop_run",))
    die(made)
    made.requests = (Request("q1", "restart_ranks", "run/r", "try", run="r"),)
    made.step(1.0)
    assert made.finishes() and not answered(made)["q1"][0]
