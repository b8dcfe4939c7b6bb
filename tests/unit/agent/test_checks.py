"""The table of checks and their runner: cache, limits, what is left out, and what is remembered."""

from __future__ import annotations

import ast
import asyncio
import fcntl
import os
import re
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import wait_for

from holdfast.agent.checks import gate, profiles, results, table
from holdfast.agent.checks.facts import Facts
from holdfast.agent.checks.readings import read
from holdfast.agent.checks.runner import Runner, Wanted, confirmed
from holdfast.agent.checks.table import BY_NAME, CHECKS, PATHS, TORCH, chosen
from holdfast.agent.config.load import load
from holdfast.agent.core.checks.verdict import (
    CRITICAL,
    OK,
    OPERATOR,
    PROFILE,
    UNKNOWN,
    WARNING,
    Answer,
    CheckVerdict,
    Measure,
)
from holdfast.agent.core.model import Decision, Now, Observed, RunView
from holdfast.agent.core.series.gradient_pace import GradientPace, Sample
from holdfast.agent.daemon.parts.checks import Checks
from holdfast.agent.daemon.state import AgentState, Snapshot
from holdfast.agent.metrics.families import _Page
from holdfast.collectors.contract import Roots
from holdfast.collectors.nvme_smart import NvmeSmartCollector

ROOT = Path(__file__).resolve().parents[3]
FACTS = Facts("node-a")
Set = Callable[[str, object], None]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Set:
    """Lets a gate check answer what a test wants."""

    def give(name: str, answer: object) -> None:
        function = answer if callable(answer) else lambda _: answer
        monkeypatch.setattr(gate, BY_NAME[name].place.split(":")[1], function)

    for one in ("clock", "disk", "memory"):
        give(one, Answer(f"{one} is well"))
    return give


def wanted(tmp_path: Path, *names: str, **more: Any) -> Wanted:
    return Wanted(chosen(names), FACTS, tmp_path / "checks", "boot-1", True, **more)


def made(asked: Wanted) -> dict[str, CheckVerdict]:
    return {one.check: one for one in Runner(asked).run()}


# --------------------------------------------------------------------------------- the table


def test_every_row_names_a_function_and_says_what_it_proves() -> None:
    assert len(BY_NAME) == len(CHECKS)
    for one in CHECKS:
        module, function = one.place.split(":")
        tree = ast.parse((ROOT / "agent/checks" / f"{module}.py").read_text())
        assert function in {node.name for node in tree.body
                            if isinstance(node, ast.FunctionDef)}, one.name
        assert one.proves and one.evidence and one.todo and one.deadline_s > 0
        assert set(one.when) <= {table.BEFORE, table.DURING, table.AFTER, table.ON_DEMAND}
        assert one.disturbs == (TORCH in one.needs or one.when == (table.ON_DEMAND,)), one.name
        assert not one.disturbs or table.DURING not in one.when


def test_a_name_that_is_none_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean collectives"):
        chosen(("clock", "colectives"))
    with pytest.raises(ValueError, match="there are incidents, drift, devices"):
        chosen(("xyzzy",))
    assert [one.name for one in chosen(("disk", "clock", "disk"))] == ["disk", "clock"]


def test_a_check_is_added_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example of docs/checks.md, word by word: its function in gate.py and its row."""
    page = (ROOT / "docs/checks.md").read_text().partition("## How to add a check")[2]
    blocks = [textwrap.dedent(one) for one in re.findall(r"(?:^    .*\n|^\n)+", page, re.M)
              if one.strip()]
    function, row = (one.strip() for one in blocks[:2])
    assert len(function.split("\n")) + len(row.split("\n")) <= 15
    monkeypatch.setattr(gate, "hugepages", None, raising=False)
    exec(function, vars(gate))  # it knows what that module imports, and nothing else
    (check,) = eval(f"({row})", vars(table))
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    facts = FACTS._replace(roots=Roots(sys=str(tmp_path / "sys")))
    asked = Wanted((check,), facts, tmp_path / "checks", "boot-1", True)
    for text, status in (("[always] madvise never", OK), ("always madvise [never]", WARNING)):
        (folder / "enabled").write_text(text)
        assert made(asked)["hugepages"].status == status
    (folder / "enabled").unlink()
    missing = made(asked)["hugepages"]
    assert missing.status == UNKNOWN and "No such file" in missing.reason and missing.todo


# -------------------------------------------------------------------------------- the runner


def test_a_check_that_breaks_is_unknown_and_the_others_go_on(
    tmp_path: Path, answers: Set
) -> None:
    def broken(_: Facts) -> Answer:
        raise RuntimeError("no such thing")

    answers("disk", broken)
    answers("memory", "neither an answer nor anything else")
    found = made(wanted(tmp_path, "clock", "disk", "memory"))
    assert {name: one.status for name, one in found.items()} == {
        "clock": OK, "disk": UNKNOWN, "memory": UNKNOWN}
    assert found["disk"].reason == "RuntimeError: no such thing"
    assert "its answer is none" in found["memory"].reason
    assert found["disk"].todo and not found["clock"].todo


def test_a_verdict_is_kept_with_its_age_until_another_boot(tmp_path: Path, answers: Set) -> None:
    first = made(wanted(tmp_path, "clock"))["clock"]
    answers("clock", Answer(critical=("it stands still",)))
    assert made(wanted(tmp_path, "clock", max_age_s=60.0))["clock"] == first
    assert made(wanted(tmp_path, "clock"))["clock"].status == CRITICAL
    other = wanted(tmp_path, "clock", max_age_s=60.0)._replace(boot_id="boot-2")
    assert made(other)["clock"].wall_s > first.wall_s
    kept = results.load(tmp_path / "checks")
    assert [one.status for one in kept.history["clock"]] == [OK, CRITICAL, CRITICAL]
    assert kept.fresh("clock", "boot-2", time.time(), 60.0)
    assert not kept.fresh("clock", "boot-2", time.time() + 100, 60.0)
    assert not kept.fresh("clock", "boot-2", time.time() - 100, 60.0)  # the clock was set back


def test_nothing_is_lost_but_the_memory_where_nothing_can_be_kept(
    tmp_path: Path, answers: Set
) -> None:
    (tmp_path / "checks").write_text("a file stands where the folder should be")
    runner = Runner(wanted(tmp_path, "clock"))
    assert [one.status for one in runner.run()] == [OK]
    assert str(tmp_path / "checks") in runner.not_kept


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"verdicts": 3}', "\xff", "[" * 100_000])
def test_a_damaged_memory_counts_as_none(tmp_path: Path, answers: Set, text: str) -> None:
    made(wanted(tmp_path, "clock"))
    (tmp_path / "checks/results.json").write_text(text)
    assert made(wanted(tmp_path, "clock", max_age_s=60.0))["clock"].status == OK
    assert results.load(tmp_path / "checks").verdicts.keys() == {"clock"}


def test_what_disturbs_is_not_made_while_a_run_trains(tmp_path: Path, answers: Set) -> None:
    found = made(wanted(tmp_path, "clock", "gemm", busy=["m5"]))
    assert found["clock"].status == OK
    assert found["gemm"].status == UNKNOWN and "m5 trains here" in found["gemm"].reason
    assert "--force" in found["gemm"].todo


def test_what_a_check_lacks_leaves_it_out_unless_it_is_named(
    tmp_path: Path, answers: Set
) -> None:
    asked = wanted(tmp_path, "clock", "paths", "incidents")
    found = made(asked._replace(facts=FACTS._replace(no_agent="nothing runs here")))
    assert found["paths"].status == found["incidents"].status == UNKNOWN
    assert "--path" in found["paths"].todo and found["incidents"].reason == "nothing runs here"
    assert made(asked._replace(named=False)).keys() == {"clock"}
    assert PATHS in BY_NAME["paths"].needs


def test_a_critical_counts_for_a_scheduler_when_it_comes_twice(
    tmp_path: Path, answers: Set
) -> None:
    mark = tmp_path / "once"

    def once(_: Facts) -> Answer:
        if mark.exists():
            return Answer("well")
        mark.touch()
        return Answer(critical=("a bit flipped",))

    answers("clock", once)
    answers("disk", Answer(critical=("full",)))
    found = made(wanted(tmp_path, "clock", "disk", confirm=True))
    assert found["clock"].status == WARNING and not found["clock"].confirmed
    assert found["clock"].reason == "critical once, and ok again: a bit flipped"
    assert found["disk"].status == CRITICAL and found["disk"].confirmed
    made(wanted(tmp_path, "disk"))  # a person's, critical once, which no scheduler may take
    again = made(wanted(tmp_path, "disk", confirm=True, max_age_s=60.0))["disk"]
    assert again.status == CRITICAL and again.confirmed
    bad = CheckVerdict("clock", CRITICAL, "a")
    assert confirmed(bad, msgspec.structs.replace(bad, status=UNKNOWN)).status == WARNING


BAD = CheckVerdict("clock", CRITICAL, "it stands still", wall_s=100.0, confirmed=True)


def test_a_proof_stands_until_the_check_says_something_else() -> None:
    def after(*verdicts: CheckVerdict) -> CheckVerdict:
        kept = results.Results()
        for one in verdicts:
            stands = kept.take(one)
        assert stands == kept.verdicts["clock"]
        assert len(kept.history["clock"]) == len(verdicts)
        return stands

    mute = CheckVerdict("clock", UNKNOWN, "no answer", wall_s=200.0)
    later = msgspec.structs.replace(mute, reason="it died", wall_s=300.0)
    for found in (after(BAD, mute), after(BAD, later, mute)):
        assert found.proven and found.reason.startswith("it stands still; not proven since: ")
    assert after(BAD, mute, later).reason == "it stands still; not proven since: it died"
    assert after(BAD, mute, later).wall_s == 300.0  # as young as the last attempt
    well = CheckVerdict("clock", OK, "kept", wall_s=300.0)
    assert after(BAD, mute, well) == well
    assert after(well, mute) == well and after(well, BAD) == well  # the newer one
    assert after(well, later) == later
    once = CheckVerdict("clock", CRITICAL, "it stands", wall_s=300.0)
    assert after(BAD, once).proven and not after(well, once).proven
    ahead = CheckVerdict("clock", OK, "kept", wall_s=time.time() + 1000.0)
    assert after(ahead, BAD) == BAD  # the clock was set back


@pytest.fixture
def held(tmp_path: Path) -> Iterator[None]:
    """Somebody's check of the clock that does not end."""
    (tmp_path / "checks").mkdir()
    with open(tmp_path / "checks/clock.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def impatient(asked: Wanted) -> Wanted:
    return asked._replace(checks=[one._replace(deadline_s=0.1) for one in asked.checks])


def test_what_could_not_be_made_is_not_kept_and_hides_nothing(
    tmp_path: Path, answers: Set, held: None
) -> None:
    asked = impatient(wanted(tmp_path, "clock", confirm=True, max_age_s=300.0))
    assert made(asked)["clock"].status == UNKNOWN
    assert "clock" not in results.load(tmp_path / "checks").verdicts
    with results.changing(tmp_path / "checks") as kept:
        kept.boot_id = "boot-1"
        kept.take(BAD)
    found = made(asked)["clock"]
    assert found.proven and "another one of it runs already" in found.reason
    assert results.load(tmp_path / "checks").verdicts["clock"] == BAD
    trains = wanted(tmp_path, "tensor", busy=["m5"])
    with results.changing(tmp_path / "checks") as kept:
        kept.take(msgspec.structs.replace(BAD, check="tensor"))
    assert made(trains)["tensor"].proven


def test_a_check_that_fails_and_then_hangs_keeps_the_proof(tmp_path: Path, answers: Set) -> None:
    answers("clock", Answer(critical=("it stands still",)))
    asked = wanted(tmp_path, "clock", confirm=True)
    assert made(asked)["clock"].proven
    answers("clock", lambda _: signal.pause())
    assert made(impatient(asked))["clock"].proven
    mark = tmp_path / "once"

    def once(_: Facts) -> Answer:
        if mark.exists():
            signal.pause()
        mark.touch()
        return Answer(critical=("it stands still",))

    answers("clock", once)
    assert made(impatient(asked))["clock"].proven
    answers("clock", Answer("kept"))
    assert made(asked)["clock"].status == OK


def test_a_round_beside_another_waits_and_takes_its_verdict(
    tmp_path: Path, answers: Set
) -> None:
    """Also of a critical that the other one makes a second time before it keeps anything."""
    begun, over, calls = tmp_path / "begun", tmp_path / "over", tmp_path / "calls"

    def clock(_: Facts) -> Answer:
        with calls.open("a") as file:
            file.write("x")
        begun.touch()
        wait_for(over.exists)
        return Answer(critical=("it stands still",))

    answers("clock", clock)
    answers("disk", lambda _: over.touch() or Answer("well"))  # while the clock is waited for
    asked = wanted(tmp_path, "clock", confirm=True, max_age_s=300.0)
    first = os.fork()
    if not first:
        made(asked)
        os._exit(0)
    wait_for(begun.exists)
    beside = made(wanted(tmp_path, "clock", "disk", confirm=True, max_age_s=300.0))
    assert os.waitpid(first, 0)[1] == 0
    assert beside["clock"].proven and beside["disk"].status == OK
    assert results.load(tmp_path / "checks").verdicts["clock"].proven
    # An ok is taken as it is, and the check is made once; what is special is made for itself.
    for special, times in ((False, 1), (True, 2)):
        for mark in (begun, over, calls):
            mark.unlink()
        answers("clock", lambda _: clock(_) and Answer("kept"))
        asked = wanted(tmp_path, "clock")
        first = os.fork()
        if not first:
            made(asked)
            os._exit(0)
        wait_for(begun.exists)
        beside = made(wanted(tmp_path, "clock", "disk", special=special))
        assert os.waitpid(first, 0)[1] == 0
        assert beside["clock"].status == OK and len(calls.read_text()) == times
        history = results.load(tmp_path / "checks").history["clock"]
        assert len([one for one in history if one.status == OK]) == (1 if not special else 3)


def test_a_baseline_is_learned_from_what_passed_and_then_speaks(
    tmp_path: Path, answers: Set
) -> None:
    def of(rate: float) -> Answer:
        return Answer("measured", measures=(Measure("gemm_float32", rate, "FLOP/s", "cpu"),))

    for number in range(6):
        answers("clock", of(1e9 + number * 1e6))
        assert made(wanted(tmp_path, "clock"))["clock"].status == OK
    answers("clock", of(0.6e9))
    slow = made(wanted(tmp_path, "clock"))["clock"]
    assert slow.status == WARNING and slow.limit_from == "baseline"
    assert "like those of 6 passes" in slow.limit_source
    (passes,) = results.load(tmp_path / "checks").baseline.values()
    assert len(passes) == 6  # what was slow taught nothing
    profile = profiles.named("hgx-h100")
    profile = msgspec.structs.replace(profile, limit=(
        profiles.ProfileLimit("gemm_float32", 0.9e9, "a test", "2026-11-20"),))
    asked = wanted(tmp_path, "clock")
    both = made(asked._replace(facts=FACTS._replace(profile=profile)))["clock"]
    assert both.status == CRITICAL and both.limit_from == PROFILE
    own = made(wanted(tmp_path, "clock", limits={"gemm_float32": 0.5e9}))["clock"]
    assert own.status == OK and own.limit_from == OPERATOR


# -------------------------------------------------------------------------------- beside torch


def without_torch(tmp_path: Path) -> str:
    """An interpreter that has no site-packages."""
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    file.chmod(0o755)
    return str(file)


def test_each_process_beside_torch_holds_the_lock(tmp_path: Path) -> None:
    """The one that torch is imported in, and the child of each call: whichever of them hangs in
    the kernel, the next round stacks no other call upon it."""
    site, seen = tmp_path / "site/torch", tmp_path / "seen"
    site.mkdir(parents=True)
    (site / "distributed.py").write_text("")
    (site / "__init__.py").write_text(textwrap.dedent(f"""
        import os
        __version__ = "0"
        class Tensor: pass
        class cuda:
            @staticmethod
            def device_count():
                files = []
                for one in os.listdir("/proc/self/fd"):
                    try:
                        files.append(os.readlink("/proc/self/fd/" + one))
                    except OSError:
                        pass
                with open({str(seen)!r}, "a") as file:
                    print(os.getpid(), {str(tmp_path / "checks/torch.lock")!r} in files, file=file)
                return 0
        """))
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path}/site exec {sys.executable} -S "$@"\n')
    file.chmod(0o755)
    made(wanted(tmp_path, "tensor", pythons=[("/nowhere", "a"), (str(file), "named")]))
    held = dict(line.split() for line in seen.read_text().splitlines())
    assert len(held) >= 2 and set(held.values()) == {"True"}, held


def test_without_torch_is_unknown_and_says_what_was_tried(tmp_path: Path) -> None:
    tried = [("/nowhere/python", "named"), (without_torch(tmp_path), "the job's")]
    runner = Runner(wanted(tmp_path, "tensor", "gemm", pythons=tried))
    found = {one.check: one for one in runner.run()}
    assert found.keys() == {"tensor", "gemm"}
    for one in found.values():
        assert one.status == UNKNOWN and "--python" in one.todo
        assert "/nowhere/python (named): No such file or directory" in one.reason
        assert "(the job's): no torch" in one.reason


def test_the_next_python_is_taken_where_one_has_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)  # what lies in the current folder is nobody's torch
    tried = [(without_torch(tmp_path), "the job's"), (sys.executable, "Holdfast's own")]
    runner = Runner(wanted(tmp_path, "tensor", "collectives", pythons=tried))
    found = {one.check: one for one in runner.run()}
    assert {name: one.status for name, one in found.items()} == {"tensor": OK, "collectives": OK}
    assert sys.executable in runner.torch
    shown = found["collectives"].table
    assert shown[0].startswith("# 2 ranks on ") and shown[-1] == "# Out of bounds values : 0 OK"
    assert max(map(len, shown)) <= 80
    names = {one.name for one in found["collectives"].measures}
    assert names == set(BY_NAME["collectives"].measures)


def test_a_torch_that_breaks_costs_its_checks_alone(tmp_path: Path, answers: Set) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "torch.py").write_text(
        "import os; print('illegal instruction', flush=True); os.abort()")
    file = tmp_path / "python"
    file.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    file.chmod(0o755)
    found = made(wanted(tmp_path, "gemm", "clock", pythons=[(str(file), "named")]))
    assert found["clock"].status == OK and found["gemm"].status == UNKNOWN
    assert found["gemm"].reason == "it died of SIGABRT; last it said: illegal instruction"


# ---------------------------------------------------------------------------------- profiles


def test_a_limit_that_no_size_reached_is_named_with_what_to_ask_for(
    tmp_path: Path, answers: Set
) -> None:
    def said(name: str, *sizes: int) -> str:
        answers("clock", Answer("well", measures=tuple(
            Measure("all_reduce", 500e9, "B/s", f"{size} bytes") for size in sizes)))
        facts = FACTS._replace(profile=profiles.named(name))
        return made(wanted(tmp_path, "clock")._replace(facts=facts))["clock"].reason

    assert said("p5", 1 << 20, 1 << 28) == (
        "well; p5 has a limit of all_reduce at 16G: `holdfast check nccl_tests --sizes 16G`")
    assert said("p3dn", 1 << 28).endswith("--sizes 8G`")
    assert said("p5", 16 << 30) == said("g6-8", 1 << 20) == said("p5") == "well"


# -------------------------------------------------------------------------------------- gate


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    good = gate.paths(FACTS._replace(paths=(str(tmp_path),)))
    assert not good.critical and str(tmp_path) in good.said and not os.listdir(tmp_path)
    bad = gate.paths(FACTS._replace(paths=(str(tmp_path), "/proc", "/nowhere")))
    assert [one.split(":")[0] for one in bad.critical] == ["/proc", "/nowhere"]


def test_open_incidents_of_this_node_decide() -> None:
    def one(fault: str, severity: str, subject: str, state: str = "open") -> dict[str, str]:
        return {"fault": fault, "severity": severity, "subject": subject, "state": state,
                "reason": f"{fault} was seen"}

    status = {"node": "node-a", "incidents": [
        one("gpu_fell_off_bus", "fatal", "node/node-a/gpu/nvidia/3"),
        one("clock_unsynchronised", "warn", "node/node-a/clock"),
        one("nic_lost", "fatal", "node/node-b/nic/eth0"),
        one("nic_lost", "fatal", "node/node-a/nic/eth0", "closed"),
        one("rank_exited", "fatal", "run/m5/rank/1"),
    ]}
    found = gate.incidents(FACTS._replace(status=status))
    assert found.critical == ("gpu_fell_off_bus: gpu_fell_off_bus was seen",)
    assert found.warning == ("clock_unsynchronised: clock_unsynchronised was seen",)
    assert "`holdfast explain gpu_fell_off_bus`" in found.todo


def test_what_most_other_nodes_have_otherwise_is_a_warning() -> None:
    def found(most: str, own: str = "550") -> Answer:
        unlike = {"key": "nvidia.driver", "most": most, "agree": 3, "of": 4,
                  "nodes": [["node-a", own]]}
        return gate.drift(FACTS._replace(drift={
            "node": "node-a", "differences": [unlike], "identities": dict.fromkeys("abcd")}))

    assert found("580").warning == (
        "nvidia.driver is 550, and 3 of 4 nodes have 580",)
    assert not found("").warning and "3 others" in found("").said  # nobody knows who is right
    assert gate.drift(FACTS._replace(no_agent="no agent runs here")).unknown


def test_a_collector_is_read_in_the_environment_that_it_asks_for(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvme writes its numbers in the language of LC_ALL."""
    seen: list[str | None] = []
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    monkeypatch.setattr(NvmeSmartCollector, "collect", lambda *_: seen.append(
        os.environ.get("LC_ALL")) or [])
    read(FACTS, ("nvme_smart",))
    assert seen == ["C"]


# ----------------------------------------------------------------------------------- metrics


async def shown(state: AgentState) -> dict[str, float]:
    """What the page of metrics says of checks."""
    await Checks(state, lambda why: None).look()
    page = (family for family in _Page(state, time.monotonic)._checks())
    return {f"{one.name}{sorted(one.labels.values())}": one.value
            for family in page for one in family.samples}


def test_the_agent_shows_what_was_checked_in_this_boot(tmp_path: Path) -> None:
    loaded = load(None, {"agent.state_dir": (str(tmp_path), "a test")})
    state = AgentState(loaded, is_private=False)
    assert asyncio.run(shown(state)) == {}
    rates = tuple(Measure(name, value, "B/s", "1048576 bytes")
                  for name, value in (("all_reduce", 3e9), ("mine", 1.0)))
    with results.changing(tmp_path / "checks") as kept:
        kept.boot_id = state.boot_id
        kept.take(CheckVerdict("clock", WARNING, "late"))
        kept.take(CheckVerdict("collectives", OK, "well", measures=rates))
        kept.take(CheckVerdict("somebody's", CRITICAL, "no check of ours"))
    name = "holdfast_collective_bus_bandwidth_bytes_per_second"
    assert asyncio.run(shown(state)) == {
        "holdfast_check_status['clock']": 1, "holdfast_check_status['collectives']": 0,
        f"{name}['', '1048576', 'all_reduce', 'node']": 3e9}
    with results.changing(tmp_path / "checks") as kept:
        kept.boot_id = "another"
    assert asyncio.run(shown(state)) == {}


def test_the_agent_shows_what_runs_that_are_here_wait_for(tmp_path: Path) -> None:
    loaded = load(None, {"agent.state_dir": (str(tmp_path), "a test")})
    state = AgentState(loaded, is_private=False)
    pace = GradientPace(4, 1000, 1, 40, (Sample(0.3, 0.2, 1.0, 40, 1e9),))
    state.snapshot = Snapshot(
        1, Now(1.0, 1e9), Observed(runs=(RunView("r", "a", "script", 4),)), Decision(),
        paces={"r": pace, "gone": pace, "new": GradientPace()})
    assert asyncio.run(shown(state)) == {
        "holdfast_collective_bus_bandwidth_bytes_per_second['1000', 'all_reduce', 'r', 'training']":
            2 * 3 / 4 * 1000 / 0.3,
        "holdfast_train_collective_wait_seconds['r']": 0.2}
