"""The mutation campaign: its table is true, its sample is seeded, and its short form holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench import mutants

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_names_what_is_there() -> None:
    for module, tests in mutants.MODULES.items():
        assert (ROOT / module).is_file(), f"{module} moved: name its new place"
        assert all((ROOT / test).exists() for test in tests), f"{module}: {tests}"


def test_a_sample_is_the_same_each_time_and_spreads_over_the_modules() -> None:
    modules = ["agent/core/run/policy.py", "agent/core/run/validity.py", "agent/core/run/plan.py"]
    chosen = mutants.sample(modules, 30, 1)
    assert chosen == mutants.sample(modules, 30, 1) != mutants.sample(modules, 30, 2)
    assert Counter(one.module for one in chosen) == dict.fromkeys(modules, 10)
    assert not any(word in one.operator for one in chosen for word in ("_BitOr_", "Eq_Is"))


def test_most_of_a_small_sample_is_noticed_and_the_tree_stays_as_it_is(tmp_path: Path) -> None:
    before = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True,
                            check=True, timeout=60).stdout
    command = [sys.executable, "-m", "bench.mutants", "--only", "rank/outcome", "--mutants", "4",
               "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600,
                          check=False, env={**os.environ, "PYTHONPATH": str(ROOT / ".types")})
    (file,) = tmp_path.iterdir()
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 4 and done.returncode in (0, 1), done.stderr
    assert sum(row["ok"] for row in rows) >= 3, done.stdout
    assert all(row["diff"] for row in rows), "a row without a change proves nothing"
    after = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True,
                           check=True, timeout=60).stdout
    assert after == before


@pytest.mark.parametrize("line", ["assert True", "assert False"])
def test_tests_that_notice_nothing_or_are_red_before_are_told(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test = tmp_path / "test_nothing.py"
    test.write_text(f"def test_nothing():\n    {line}\n")
    monkeypatch.setattr(mutants, "MODULES", {"agent/core/run/validity.py": (str(test),)})
    monkeypatch.setenv("PYTHONPATH", str(ROOT / ".types"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = mutants.main(["--mutants", "2", "--out", str(tmp_path)])
    said = capsys.readouterr()
    if line == "assert True":
        assert code == 1 and "noticed 0 of 2" in said.out
    else:
        assert code == 2 and "red without any mutant" in said.err
