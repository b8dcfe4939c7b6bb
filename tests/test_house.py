"""What holds for the whole house: an addition is one entry; no test has a time for a property, and
no skip that CI does not see."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from nodes.harness import NO_CGROUPS
from ports import free_ports, share
from unit.core.driver import Lab
from waiting import LIMIT_S, until

from holdfast.agent.actions import root_helper
from holdfast.agent.cli import policy
from holdfast.agent.config import load as configuration
from holdfast.agent.config.runbooks import RunbookError, load_runbooks, parse
from holdfast.agent.core import actions, ladder
from holdfast.agent.core.detect import registry
from holdfast.agent.core.detect.detector import Detector, Look, NodeView, RanksView, RunDetector
from holdfast.agent.core.detect.ranks.ended import Cause
from holdfast.agent.core.model import (
    WARN,
    Decision,
    Doc,
    Effect,
    Event,
    NodeOrder,
    Now,
    Observed,
    Plan,
    RankView,
    Readings,
    Resume,
    RunView,
    Settings,
    StoreView,
    Verdict,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.run import state as run_state
from holdfast.agent.core.run.stage import check_invariants
from holdfast.agent.daemon.daemon import Daemon, Options
from holdfast.agent.metrics.families import Exposition

TESTS = Path(__file__).resolve().parent
SKIPS = """
import pytest

if {whole}:
    pytest.importorskip("no_such_module", reason="{reason}")

def test_it():
    pytest.skip("{reason}")

@pytest.mark.xfail
def test_known():
    assert False
"""


def test_no_property_is_held_to_a_time() -> None:
    assert settings.default is not None and settings.default.deadline is None


@pytest.mark.parametrize(("ci", "reason", "whole", "outcome"), [
    ("true", "x is missing: nothing is checked", False, "1 failed, 1 xfailed"),
    ("true", "no torch", True, "1 error"),
    ("true", "no cgroups here: none mounted", False, "1 skipped, 1 xfailed"),
    ("true", NO_CGROUPS, False, "1 failed, 1 xfailed"),
    ("false", "no torch", False, "1 skipped, 1 xfailed"), ("false", "no torch", True, "1 skipped"),
])
def test_a_skip_fails_in_ci_unless_it_is_the_hardwares(
    ci: str, reason: str, whole: bool, outcome: str, tmp_path: Path
) -> None:
    file = tmp_path / "test_skips.py"
    file.write_text(SKIPS.format(whole=whole, reason=reason))
    environ = {**os.environ, "CI": ci, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", str(file)],
                          cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300,
                          check=False)
    assert outcome in done.stdout.splitlines()[-1], done.stdout + done.stderr
    assert (done.returncode in (0, 5)) == ("skipped" in outcome)


@pytest.mark.parametrize(("ci", "marks", "limit_s", "code", "said"), [
    ("true", "", 0.0, 1, "too long: 0 s are for it"),
    ("true", "", 900.0, 0, "within: 900 s are for it"),
    ("false", "", 0.0, 0, "too long"),
    ("true", "@pytest.mark.campaign", 0.0, 0, ""),
])
def test_what_the_tests_over_nodes_take_is_said_and_too_long_in_ci_fails(
    ci: str, marks: str, limit_s: float, code: int, said: str, tmp_path: Path
) -> None:
    folder = tmp_path / "tests/nodes"
    folder.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = campaign\n")
    (folder / "test_it.py").write_text(
        f"import conftest, pytest\nconftest.NODES_LIMIT_S = {limit_s}\n"
        f"{marks}\ndef test_it():\n    pass\n")
    environ = {**os.environ, "CI": ci, "PYTHONPATH": str(TESTS)}
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "conftest", "tests"],
                          cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300,
                          check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout and ("tests/nodes/ took" in done.stdout) == bool(said), done.stdout


def test_each_package_that_a_skip_names_is_installed_by_make() -> None:
    listed = {line.split()[0] for line in (TESTS / "debian-packages.txt").read_text().splitlines()
              if not line.startswith("#")}
    named = {name for file in TESTS.rglob("*.py")
             for name in re.findall(r"is missing \(Debian package ([\w-]+)\)", file.read_text())}
    assert named - {"libc6-dev"} <= listed  # build-essential brings the headers of C


async def is_on_page(row: str, folder: Path, samples: Readings, *effects: Effect) -> None:
    """Waits until the page of a whole agent has the row; its collectors read these samples, and its
    core orders these effects once."""
    todo, stepped = list(effects), asyncio.Event()

    def make(name: str, *more: Any) -> Node:
        node = Node(name, *more)
        step = node.step
        fed: Any = node

        def fed_step(now: Now, observed: Observed) -> Decision:
            decision = step(now, msgspec.structs.replace(observed, samples=samples))
            ordered, todo[:] = tuple(todo), []
            stepped.set()
            return msgspec.structs.replace(decision, effects=(*decision.effects, *ordered))

        fed.step = fed_step
        return node

    overrides: dict[str, tuple[object, str]] = {
        f"agent.{name}": (value, "test") for name, value in
        (("state_dir", str(folder)), ("runtime_dir", str(folder)), ("listen", ""), ("node", "a"))}
    daemon = Daemon(configuration.load(None, overrides), Options(overrides=overrides), make)
    task = asyncio.create_task(daemon.run())
    try:
        await until(lambda: task.done() or stepped.is_set()
                    and row in Exposition(daemon.state).text().decode().splitlines())
        assert not task.done()
    finally:
        daemon.stop.set()
        await asyncio.wait_for(task, LIMIT_S)


# ------------------------------------------------------------------------------ actions

TOY = actions.Action(
    "wave_flag", actions.NODE, actions.HERE, actions.ROOT_HELPER, "waves the node's flag",
    deadline_s=7.0, off_by_default=True, verb="wave",
)
TOY_BOOK = """+++
severity = "fatal"
scope = "node"
ladder = ["wave_flag", "ask_person"]
+++
"""


def test_an_action_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A row of the table reaches the loader, config, `explain` and the reader of ladders."""
    file = tmp_path / "agent.toml"
    file.write_text(f'[actions]\nallow = ["wave_flag"]\n[evidence]\nstore = "{tmp_path}"\n')
    with pytest.raises(RunbookError, match="'wave_flag' is unknown"):
        parse("toy", TOY_BOOK, "toy.md")
    with pytest.raises(configuration.ConfigError, match="'wave_flag' is no action"):
        configuration.load(file)
    monkeypatch.setitem(actions.ACTIONS, TOY.name, TOY)
    book = parse("toy", TOY_BOOK, "toy.md").runbook
    allow = configuration.load(file).config.actions.allow
    said = "\n".join("".join(map(str, row)) for row in policy.explained(book, {}, []))
    assert "waves the node's flag, where actions.allow names it" in " ".join(said.split())
    assert TOY.name in actions.beyond_run() and actions.root_verbs()[TOY.name] == "wave"

    def leave(action: str) -> ladder.Leave:
        reason = actions.ACTIONS[action].withheld(allow)
        return ladder.Leave(not reason, bool(reason), reason)

    assert ladder.next_rung(book, lambda action: 0, leave) == (TOY.name, "")
    why = "ask_person: a person's part"
    assert ladder.next_rung(book, lambda action: book.budget_count, leave) == (None, why)


def test_what_an_action_does_is_one_entry(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fault whose runbook names it has it ordered, with the row's deadline and verb; what came of
    it is a line of the incident and a row of the page."""
    monkeypatch.setitem(actions.ACTIONS, TOY.name, TOY)
    lab = Lab(settings=Settings(allow=("wave_flag",)))
    lab.runbooks = {"toy": parse("toy", TOY_BOOK, "toy.md").runbook}
    lab.node = Node("a", lab.settings, lab.runbooks)
    lab.view = msgspec.structs.replace(lab.view, state="done")
    lab.events = (Event("host", "toy", "hardware", "watch", "fatal", "it flaps", fault="toy",
                        cursor=1),)
    given = [effect for _ in range(20) for effect in lab.step(1.0) if effect.kind == TOY.name]
    (effect,), (incident,) = given, [one for one in lab.incidents.values() if one.fault == "toy"]
    assert isinstance(effect.body, NodeOrder) and effect.body.verb == "wave"
    assert effect.deadline_s == 7.0 and effect.outlives_node
    said = [text for _, text in incident.timeline]
    assert said[-2:] == ["wave_flag is ordered from the node's unit",
                         "wave_flag: the node's unit took it"]
    assert effect.id in incident.actions
    # No root unit is there, and that is an outcome as well.
    row = 'holdfast_actions_total{action="wave_flag",fault="toy",outcome="failed"} 1.0'
    asyncio.run(is_on_page(row, tmp_path, readings_of([]), effect))


def test_the_root_helper_knows_the_verbs_of_the_table_and_no_other() -> None:
    assert sorted(root_helper.VERBS) == sorted(actions.root_verbs().values())


def test_a_rung_that_nobody_performs_is_refused_or_a_persons() -> None:
    with pytest.raises(RunbookError, match="'replace_rank' is performed by nobody"):
        parse("toy", TOY_BOOK.replace("wave_flag", "replace_rank"), "toy.md")
    for book in load_runbooks().values():
        for rung in book.ladder:
            row = actions.ACTIONS[rung]
            assert row.performed_by != actions.NOBODY or row.granted_by == actions.PERSON
    assert not set(Settings().allow)  # what outlives a run is off until it is named
    assert all(row.off_by_default for row in actions.ACTIONS.values() if row.verb)


# ------------------------------------------------------------------------------ detectors

WET = """+++
severity = "warn"
scope = "node"
clears = "check"
+++
## Meaning
Water stands under the floor.
"""


class Damp(Detector):
    """A node stands in water."""

    name = "damp"
    reads = ("toy_water_",)
    memory = list[float]  # the highest water of this boot

    def __init__(self, node: str) -> None:
        self._node = node

    def look(self, view: NodeView) -> list[Verdict]:
        view.memory[:] = [max([*view.memory, *(row[2] for row in view.rows)], default=0.0)]
        if view.memory == [0.0]:
            return []
        return [Verdict("node_wet", f"node/{self._node}/floor", WARN, 1.0,
                        f"{view.memory[0]:g} m of water", detector=self.name)]


def test_a_detector_is_one_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A class in the tuple gets its readings and its memory; its verdict reaches the decision, an
    incident, the page and, with a runbook beside it, `explain`."""
    monkeypatch.setattr(registry, "DETECTORS", (*registry.DETECTORS, Damp))
    (tmp_path / "node_wet.md").write_text(WET)
    books = load_runbooks(tmp_path)
    node, now = Node("a", Settings(), books), Now(100.0, 1e9, "b1")
    observed = Observed(store=StoreView(up=True), samples=readings_of([("toy_water_metres", "", 0.2,
                                                                        100.0)]))
    decision = node.step(now, observed)
    (verdict,) = [one for one in decision.verdicts if one.detector == "damp"]
    (incident,) = decision.incidents
    assert (incident.fault, incident.culprit) == ("node_wet", "floor of a")
    assert incident.reason == verdict.reason == "0.2 m of water"

    dry = Observed(store=StoreView(up=True), samples=readings_of([]))
    again = Node("a", Settings(), books, node.memory())
    assert again.step(Now(200.0, 1e9, "b1"), dry).verdicts, "it is remembered over a restart"
    assert not again.step(Now(9.0, 1e9, "b2"), dry).verdicts, "and not over a boot"

    row = 'holdfast_fault_active{fault="node_wet",severity="warn",subject="node/a/floor"} 1.0'
    asyncio.run(is_on_page(row, tmp_path, observed.samples))

    sections = parse("node_wet", WET, "node_wet.md").prose
    lines = policy.explained(books["node_wet"], {"Meaning": sections}, [])
    assert "node_wet" in repr(lines[0]) and "Water stands" in repr(lines)


class Sulky(RunDetector):
    """A rank does not want to any more."""

    name = "sulky"

    def look(self, view: RanksView) -> Look:
        rank = view.ranks[0]
        return Look(Cause("rank_sulks", rank.generation, "it does not want to", rank.rank,
                          rank.node, rank.pid, detector=self.name))


def test_a_detector_of_a_run_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cause reaches the decision and an incident, and the run recovers from it."""
    monkeypatch.setattr(registry, "DETECTORS", (Sulky, *registry.DETECTORS))
    plan = Plan("r", 1, ("a",), ((0, "a"),), Resume("fresh"), "")
    view = RunView("r", "a", "trainer", 1, 1, "running",
                   ranks=(RankView(0, "a", 7, 1, "running"),))
    node = Node("a", Settings(), load_runbooks())
    decision = node.step(Now(100.0, 1e9, "b1"), Observed(
        runs=(view,), store=StoreView(up=True, docs=(Doc("run/r", 1, msgspec.json.encode(plan)),))))
    (verdict,) = [one for one in decision.verdicts if one.detector == "sulky"]
    assert (verdict.fault, verdict.subject) == ("rank_sulks", "run/r/rank/0")
    assert [(one.fault, one.reason) for one in decision.incidents] == [
        ("rank_sulks", "it does not want to")]
    assert node.stages() == {"r": "recovering"}


def record_writes(tree: ast.AST) -> set[str]:
    """Records of a run's state that a module assigns, replaces or makes one of."""
    kinds = {field.type for field in msgspec.structs.fields(run_state.RunState)}
    names = {part.__name__: field.name for field in msgspec.structs.fields(run_state.RunState)
             for part in (field.type, *typing.get_args(field.type)) if isinstance(part, type)}
    assert run_state.Held in kinds and names["Recovery"] == "recovery"
    found = set()
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else (
            [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else [])
        for target in targets:
            flat = target.elts if isinstance(target, ast.Tuple) else [target]
            found |= {one.attr for one in flat if isinstance(one, ast.Attribute)
                      and ast.unparse(one.value).rpartition(".")[2] == "state"}
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            found |= {names[called]} if called in names else set()
            found |= {ast.unparse(one).rpartition(".")[2] for one in node.args[:1]
                      if called == "replace" and ".state." in f".{ast.unparse(one)}"}
    return found & run_state.RECORDS.keys()


def test_each_record_has_one_writer() -> None:
    fields = {field.name for field in msgspec.structs.fields(run_state.RunState)}
    assert fields - {"run", "history"} == run_state.RECORDS.keys()
    wrong = record_writes(ast.parse("self.state.held = Ending()\nreplace(self.state.logs, a=1)"))
    assert wrong == {"held", "ending", "logs"}
    core = TESTS.parent / "agent/core"
    writers = {(record, path.stem) for path in core.rglob("*.py") if path.name != "state.py"
               for record in record_writes(ast.parse(path.read_text()))}
    assert writers == set(run_state.RECORDS.items())


def test_a_state_that_cannot_be_is_told() -> None:
    state = run_state.RunState("r")
    assert check_invariants(state) == check_invariants(state, state) == ()
    further = msgspec.structs.replace(state, launcher=run_state.LauncherSeen(generation=2, top=2))
    assert check_invariants(state, further) == ("the top generation fell",)
    state.ending = run_state.Ending(left=True)
    state.document = run_state.DocumentSeen(meant=1)
    assert check_invariants(state) == (
        "a generation is meant that no plan has", "the launcher left before the end")


def test_no_worker_is_given_a_port_that_another_worker_gives_out() -> None:
    shares = [set(share(worker)) for worker in ("", *(f"gw{number}" for number in range(63)))]
    assert sum(map(len, shares)) == len(set().union(*shares))
    given = free_ports(9) + free_ports(9)
    assert len(set(given)) == 18 and set(given) <= set(share(
        os.environ.get("PYTEST_XDIST_WORKER", "")))


def test_what_the_campaign_lists_is_there() -> None:
    """A name that no test has any more would leave its successor nowhere, or in `make test`."""
    tests = Path(__file__).parent
    lines = (tests / "campaign.txt").read_text().splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    assert named and len(named) == len(set(named))
    for line in named:
        name, _, stays = line.partition("  # ")
        file, _, rest = name.partition("::")
        function = rest.partition("[")[0]
        assert f"def {function}(" in (tests / file).read_text(), name
        assert stays, f"{name}: what `make test` keeps of it"
