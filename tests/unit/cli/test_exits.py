"""Exit codes come from one table, which the help and the page show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from holdfast.agent.__main__ import main as agent_main
from holdfast.agent.cli import main
from holdfast.agent.cli.parser import COMMANDS
from holdfast.worker import exits
from holdfast.worker.launcher import spec

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("agent", "collectors", "dashboards", "runbooks", "trainer", "worker")
OWN = {exits.RETRY, exits.BUDGET_SPENT, exits.CONFIGURATION, exits.INTERRUPTED}
# Codes that stand elsewhere for another reason: where the core says how an interrupted run ends.
ELSEWHERE = {"agent/core/run/ending.py"}


def literals(path: Path) -> set[int]:
    """Whole numbers of a file that are codes of ours."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.value for node in nodes if isinstance(node, ast.Constant)
            and type(node.value) is int} & OWN


def test_no_other_module_holds_a_code() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if literals(path)
    }
    assert found - ELSEWHERE == {"worker/exits.py"}


def test_every_command_has_its_rows_and_no_code_twice() -> None:
    assert {one.name for one in COMMANDS} == set(exits.EXITS)
    for name, rows in exits.EXITS.items():
        codes = [one.code for one in rows]
        assert codes[0] == "0" and len(set(codes)) == len(codes), name


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["status"], exits.FAILED),
        (["verify", "/nowhere"], exits.FAILED),
        (["explain", "no_such_fault"], exits.FAILED),
        (["diagnose", "/nowhere.log"], exits.USAGE),
        (["pause", "--run", "a", "--node", "b", "--reason", "c"], exits.USAGE),
        (["config", "check", "--config", "/nowhere.toml"], exits.CONFIGURATION),
        (["run", "--python", "/nowhere/python", "x.py"], exits.CONFIGURATION),
    ],
)
def test_commands_end_as_the_table_says(
    argv: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    assert main(argv) == code
    rows = (*exits.EXITS[argv[0]], *exits.EVERYWHERE)
    assert str(code) in [one.code for one in rows]


def test_the_launchers_and_the_agents_own_mistakes() -> None:
    with pytest.raises(SystemExit) as raised:
        spec.parse("run", ["--nproc-per-node", "many", "x.py"], {})
    assert raised.value.code == exits.CONFIGURATION
    assert agent_main(["--config", "/nowhere.toml"]) == exits.CONFIGURATION


def test_an_agent_tells_errors_of_settings_and_runbooks_in_one_go(tmp_path, capsys) -> None:
    """Whoever mends the one would only then learn of the other."""
    books, file = tmp_path / "books", tmp_path / "agent.toml"
    books.mkdir()
    (books / "rank_hung.md").write_text("+++\nseverity = 3\n+++\n")
    file.write_text(f'[agent]\ntick_s = -1\n[runbooks]\ndirectory = "{books}"\n')
    assert agent_main(["--config", str(file)]) == exits.CONFIGURATION
    said = capsys.readouterr().err
    assert "agent.tick_s" in said and "rank_hung.md" in said


@pytest.mark.parametrize("command", ["run", "train"])
def test_the_launchers_help_tells_every_row(command: str) -> None:
    help_text = " ".join(spec.build(command).format_help().split())
    assert all(f"{one.code}: {one.meaning}" in help_text for one in exits.EXITS[command])
    assert not re.search("exit codes.*exit codes", help_text)
