"""Recorded answers of the agent, and what the command line says of them, word for word.

`HOLDFAST_GOLDEN=write` writes the expected texts anew; read the difference before you keep it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli import drift, report
from holdfast.agent.cli.text import WIDTH, Line, plain

HERE = Path(__file__).resolve().parent / "cli"
ALONE = {
    "run": "", "nodes": ["node-a"], "unknown": [], "unread": [], "compared": 3, "differences": [],
    "changes": [], "values": {"host.kernel": "6.8.0-1016-aws", "nvidia.count": "8",
                              "software.nccl": "2.21.5"},
}  # fmt: skip
CASES: dict[str, tuple[str, Callable[[Any], list[Line]]]] = {
    "status": ("status.json", lambda found: report.status([found])),
    "status-of-nothing": ("status.json", lambda found: report.status([{**found, "runs": []}])),
    "why": ("status.json", report.why),
    "incidents": ("incident.json", lambda found: report.incidents([found])),
    "incident": ("incident.json", report.incident),
    "ledger": ("ledger.json", report.ledger),
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


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    source, render = CASES[name]
    text = plain(render(json.loads((HERE / source).read_text())))
    expected = HERE / f"{name}.txt"
    if os.environ.get("HOLDFAST_GOLDEN") == "write":
        expected.write_text(text)
    assert text == expected.read_text()
    assert max(len(row) for row in text.splitlines()) <= WIDTH


def test_a_reason_that_names_the_culprit_is_not_given_its_name_twice() -> None:
    said = {"fault": "rank_hung", "severity": "fatal", "subject": "run/m5/rank/1",
            "culprit": "rank 1 (pid 4890) on vm",
            "reason": "rank 1 (pid 4890) on vm holds the interpreter lock"}  # fmt: skip
    text = " ".join(plain(report.incident_line(said)).split())
    assert text == "open: rank_hung rank 1 (pid 4890) on vm holds the interpreter lock"
    text = " ".join(plain(report.incident_line({**said, "reason": "it holds it"})).split())
    assert text == "open: rank_hung rank 1 (pid 4890) on vm: it holds it"
