"""Recorded answers of the agent, and what the command line says of them, word for word.

`HOLDFAST_GOLDEN=write` writes the expected texts anew; read the difference before you keep it.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pages import same_as_golden

from holdfast.agent import cli
from holdfast.agent.cli import drift, report
from holdfast.agent.cli.text import WIDTH, Failure, Line, harmless, plain, show
from holdfast.agent.core.model import WISHES
from holdfast.agent.web.page import load_page

HERE = Path(__file__).resolve().parent / "cli"
ALONE = {
    "run": "", "nodes": ["node-a"], "unknown": [], "unread": [], "compared": 3, "differences": [],
    "changes": [], "values": {"host.kernel": "6.8.0-1016-aws", "nvidia.count": "8",
                              "software.nccl": "2.21.5"},
}
CASES: dict[str, tuple[str, Callable[[Any], list[Line]]]] = {
    "status": ("status.json", lambda found: report.status([found])),
    "status-of-nothing": ("status.json", lambda found: report.status([{**found, "runs": []}])),
    "why": ("status.json", report.why),
    "incidents": ("incident.json", lambda found: report.incidents([found])),
    "incident": ("incident.json", report.incident),
    "ledger": ("ledger.json", report.ledger),
    "jobs": ("jobs.json", report.jobs),
    "drift": ("drift.json", drift.said),
    "drift-none": ("drift.json", lambda found: drift.said(
        {**found, "differences": [], "unread": [], "unknown": [], "changes": []})),
    "drift-alone": ("drift.json", lambda found: drift.said(ALONE | {"node": found["node"]})),
}


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_what_somebody_wished_leads_to_no_runbook() -> None:
    found = json.loads((HERE / "incident.json").read_text())
    assert plain(report.incident(found)).rstrip().endswith(f"holdfast explain {found['fault']}")
    for fault in WISHES:
        text = plain(report.incident({**found, "fault": fault}))
        assert text.rstrip().endswith("what to do: nothing: this was no fault")
        assert f'"{fault}"' in load_page()[0].decode(), "nor does the page"


def test_a_rank_is_named_once() -> None:
    found = json.loads((HERE / "status.json").read_text())
    found["runs"][0]["ranks"][1]["why"] = "rank 1 (pid 4890) on node-a holds the run up"
    assert "  rank 1     holds the run up\n" in plain(report.status([found]))


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    source, render = CASES[name]
    text = plain(render(json.loads((HERE / source).read_text())))
    expected = HERE / f"{name}.txt"
    same_as_golden(expected, text)
    assert max(len(row) for row in text.splitlines()) <= WIDTH


ESCAPES = "\x1b]0;pwned\x07\x1b[2J\nnothing is wrong \u202e\x9b1A"


def poisoned(value: Any) -> Any:
    """An answer in which every text ends in what a terminal would obey."""
    if isinstance(value, dict):
        return {key: poisoned(one) for key, one in value.items()}
    if isinstance(value, list):
        return [poisoned(one) for one in value]
    return value + ESCAPES if isinstance(value, str) else value


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_blanks_of_any_kind_stay_blanks() -> None:
    assert harmless("\tmain.py:3 名前\u3000x\u200b") == " main.py:3 名前 x?"


@pytest.mark.parametrize("name", CASES)
def test_no_text_of_an_answer_moves_a_cursor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reasons, names, lines of logs and paths are other people's words."""
    source, render = CASES[name]
    lines = render(poisoned(json.loads((HERE / source).read_text())))
    assert all(one.isprintable() for one in plain(lines).split("\n"))
    for colour in ("", "1"):
        monkeypatch.setenv("NO_COLOR", colour)
        monkeypatch.setattr(sys, "stdout", screen := Terminal())
        show(lines)
        own = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())  # colours are ours
        assert all(one.isprintable() for one in own.split("\n"))


def test_a_failure_moves_no_cursor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: list[str]) -> int:
        raise Failure(f"which run? (there are: {ESCAPES})")

    monkeypatch.setattr(cli, "dispatch", fail)
    assert cli.main(["status"]) == 1
    assert all(one.isprintable() for one in capsys.readouterr().err.split("\n"))


def said_of(**more: Any) -> dict[str, Any]:
    return {"fault": "rank_hung", "severity": "fatal", "subject": "run/m5/rank/1", "id": "i-1",
            "culprit": "rank 1 (pid 4890) on vm", "opened_wall_s": 1.75e9,
            "reason": "rank 1 (pid 4890) on vm holds the interpreter lock", **more}


def words(lines: list[Line]) -> str:
    return " ".join(plain(lines).split())


def test_a_reason_that_names_the_culprit_is_not_given_its_name_twice() -> None:
    assert words(report.incident_line(said_of())) == (
        "fatal rank_hung: rank 1 (pid 4890) on vm holds the interpreter lock")
    assert words(report.incident_line(said_of(reason="it holds it"))) == (
        "fatal rank_hung: rank 1 (pid 4890) on vm: it holds it")
    gpu = said_of(fault="gpu_fell_off_bus", culprit="gpu 0000:48:00 of n",
                  subject="node/n/gpu/0000:48:00", reason="XID 79 on gpu/0000:48:00 of n: it: fell")
    assert words(report.incident_line(gpu)) == (
        "fatal gpu_fell_off_bus: gpu 0000:48:00 of n: XID 79: it: fell")
    node = said_of(fault="host_oom", severity="warn", culprit="n", subject="node/n",
                   reason="this node of n: the kernel ended a process")
    assert words(report.incident_line(node)) == "warn host_oom: n: the kernel ended a process"
    lost = said_of(fault="node_lost", culprit="n2", subject="run/m5", reason="n2: not heard of")
    assert words(report.incident_line(lost)) == "fatal node_lost: n2: not heard of"


def test_an_incident_in_which_nothing_is_broken_blames_nobody() -> None:
    grows = said_of(fault="world_grows", severity="warn", culprit="", subject="run/m5",
                    reason="n2 can take ranks", run="m5", generation=3)
    assert words(report.incident_line(grows)) == "warn world_grows: run/m5: n2 can take ranks"
    assert " culprit none run m5, " in words(report.incident(grows))


def test_open_incidents_stand_by_how_bad_they_are_with_what_is_asked_for() -> None:
    asks = "reboot_node: not done, because actions.allow does not name it"
    found = [said_of(severity="warn", fault="cpu_machine_check", reason="one corrected error"),
             said_of(severity="ok", fault="log_root_cause"),
             said_of(fault="gpu_fell_off_bus", reason="XID 79", would_have=asks),
             said_of(severity="degraded", fault="nic_link_down")]
    text = plain(report._opened(found))
    assert re.findall(r"^  (\w+) +(\w+):", text, re.M) == [
        ("fatal", "gpu_fell_off_bus"), ("degraded", "nic_link_down"),
        ("warn", "cpu_machine_check"), ("ok", "log_root_cause")]
    assert f"XID 79 asks for {asks} degraded" in " ".join(text.split())
    assert max(len(row) for row in text.splitlines()) <= WIDTH
    waits = "waits, and no restart is spent: a mount is gone"
    text = plain(report._opened([said_of(severity="warn", would_have=waits)]))
    assert waits in " ".join(text.split()) and "asks for" not in text
    assert not report._opened([])
    node = {"node": "n", "store_up": True, "faults": [one | {"evidence": ()} for one in found]}
    assert re.findall(r"\((\w+), shown only\)", plain(report.why(node))) == [
        "fatal", "degraded", "warn", "ok"]


def test_a_store_that_answers_slowly_is_told_with_how_slowly() -> None:
    node = json.loads((HERE / "status.json").read_text())
    for took_s, words in ((0.49, "; store up;"), (1.84, "; store slow: up to 1.8 s for an answer")):
        text = " ".join(plain(report.status([node | {"store_answer_s": took_s}])).split())
        assert words in text, text
    down = plain(report.status([node | {"store_up": False, "store_answer_s": 9.0}]))
    assert "store down" in down and "slow" not in down


@pytest.mark.parametrize(("problem", "words"), [
    ("store: etcd at 10.0.0.1:2379, cluster 'main', came back empty: this node knows it as 1f.\n"
     "Where there is no backup: holdfast store seed",
     "store down (etcd at 10.0.0.1:2379, cluster 'main', came back empty: this node knows it as "
     "1f. Where there is no backup: holdfast store seed)"),
    ("store: " + 300 * "x", f"store down ({199 * 'x'}…)"),
])
def test_a_store_that_is_refused_is_told_with_the_reason(problem: str, words: str) -> None:
    node = json.loads((HERE / "status.json").read_text())
    text = plain(report.status([node | {"store_up": False, "store_problem": problem}]))
    assert words.replace(" ", "") in "".join(text.split()), text


def test_an_id_is_never_cut() -> None:
    """It is what one asks for next, and those of a node all begin alike."""
    ids = [f"node-node-17-neuron_memory_uncorrected-neuron-{number}-1" for number in (3, 11)]
    found = [said_of(id=one, state="open", culprit="neuron 3 of node-17") for one in ids]
    rows = plain(report.incidents(found)).splitlines()
    assert [row.split()[-1] for row in rows[2::2]] == ids
    assert [row.split()[0] for row in rows[2::2]] == ["fatal", "fatal"]


def test_what_acting_would_have_done_is_told_where_that_was_asked() -> None:
    would = "restart_ranks: the generation would have ended, and another one have started there"
    found = [said_of(would_have=would), said_of(id="i-2", would_have=would)]
    assert would not in " ".join(plain(report.incidents(found)).split())
    text = plain(report.incidents(found, would_have=True))
    assert " ".join(text.split()).count(would) == 2
    assert max(len(row) for row in text.splitlines()) <= WIDTH
