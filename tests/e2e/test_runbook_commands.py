"""What the runbooks tell people to type at night: each harmless command, against a live run that
has lost a rank, says something and ends well."""

from __future__ import annotations

import shlex

import pytest
from running import Runs, wait_for
from test_runbooks import commands_of

from holdfast.agent.cli import main
from holdfast.runbooks import prose

# Commands that only look, and how each may end here; the others change something, or need a node
# agent's configuration, a store of many nodes, or logs of a dead run.
HARMLESS = {"status": (0,), "why": (0,), "incidents": (0,), "ledger": (0,), "jobs": (0,),
            "drift": (0,), "check --list": (0,), "doctor": (0, 1)}


def test_the_harmless_commands_of_all_runbooks_answer(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs.script("plain.py", "100000")
    run.at_step(3)
    for name, value in runs.environ.items():
        monkeypatch.setenv(name, value)
    assert main(["inject", "kill", "--rank", "1"]) == 0
    wait_for(lambda: [one for one in run.incidents() if one["fault"] == "rank_killed"], 60,
             "an incident")
    (incident,) = [one for one in run.incidents() if one["fault"] == "rank_killed"]
    node = run.api("/api/v1/status")["node"]
    names = {"ID": incident["id"], "NODE": node, "RUN": "t"}
    asked = set()
    for text in prose.pages().values():
        for command in commands_of(text):
            words = shlex.split(command.partition("|")[0])[1:]
            start = " ".join(words[:2]) if words[0] == "check" else words[0]
            if start in HARMLESS and "--ack" not in words and "--label" not in words:
                asked.add((start, *(names.get(word, word) for word in words)))
    assert {one[0] for one in asked} == set(HARMLESS), "each is in some runbook"
    capsys.readouterr()
    for start, *words in sorted(asked):
        code = main(words)
        said = capsys.readouterr()
        assert code in HARMLESS[start] and said.out.strip(), (words, code, said.err[-500:])
        assert "Traceback" not in said.err
