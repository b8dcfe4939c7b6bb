"""Logs of runs that are dead, and what `holdfast diagnose` says of them, word for word.

`HOLDFAST_GOLDEN=write` writes the expected texts anew; read the difference before you keep it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pages import same_as_golden

from holdfast.agent.cli import main
from holdfast.agent.cli.text import WIDTH

HERE = Path(__file__).resolve().parent / "logs"
CASES = {"chain": 0, "waiting": 1}


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
@pytest.mark.parametrize("name", CASES)
def test_text(
    name: str, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(HERE)
    code = main(["diagnose", *(["--json"] if as_json else []), name])
    text = capsys.readouterr().out
    expected = HERE / f"{name}.{'json' if as_json else 'txt'}"
    same_as_golden(expected, text)
    assert code == CASES[name]
    if as_json:
        root = json.loads(text)["root"]
        keys = {"signature", "category", "culprit", "retryable", "rank", "line"}
        assert root is None or keys <= set(root)
    else:
        assert max(len(row) for row in text.splitlines()) <= WIDTH
