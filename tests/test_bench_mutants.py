"""The mutation campaign: its table is true, its sample is seeded, and its short form holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

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
    monkeypatch.setattr(mutants, "MODULES", {"worker/exits.py": (str(test),)})
    for name in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        monkeypatch.setenv(name, "")  # the campaign changes them for its process
    code = mutants.main(["--mutants", "2", "--out", str(tmp_path)])
    said = capsys.readouterr()
    if line == "assert True":
        assert code == 1 and "noticed 0 of 2" in said.out
        assert "below nine of ten: worker/exits.py" in said.err
    else:
        assert code == 2 and "red without any mutant" in said.err


def row(module: str, outcome: str) -> dict[str, Any]:
    return {"module": module, "outcome": outcome, "ok": outcome != "survived"}


def test_each_module_has_to_reach_the_goal_by_itself() -> None:
    rows = [*[row("good.py", "killed")] * 90, *[row("bad.py", "killed")] * 8,
            *[row("bad.py", "survived")] * 2, row("bad.py", "equivalent"),
            *[row("nine.py", "killed")] * 9, row("nine.py", "survived")]
    lines, missed = mutants.summary(rows)
    assert missed == ["bad.py"]
    assert [" ".join(line.split()) for line in lines] == [
        "bad.py 8 of 10 noticed, 1 equivalent BELOW THE GOAL", "good.py 90 of 90 noticed",
        "nine.py 9 of 10 noticed"]


DIFF = """--- mutation diff ---
--- a/x.py
+++ b/x.py
@@ -1,3 +1,3 @@
 def f(x):
-    if x < 0:
+    if x <= 0:
         x = -x"""


def test_an_equivalent_one_does_not_count_and_one_that_is_noticed_is_none() -> None:
    assert mutants.change_of(DIFF) == ("if x < 0:", "if x <= 0:")
    table = [mutants.Equivalent("x.py", "f", "if x < 0:", ("if x <= 0:",), "-0 is 0")]
    lived = {**row("x.py", "survived"), "function": "f", "diff": DIFF, "why": ""}
    said = mutants.counted_out(lived, table)
    assert (said["ok"], said["outcome"], said["why"]) == (True, "equivalent", "-0 is 0")
    assert mutants.counted_out({**lived, "function": "g"}, table)["outcome"] == "survived"
    noticed = mutants.counted_out({**lived, **row("x.py", "killed")}, table)
    assert not noticed["ok"] and "though listed" in noticed["why"]
    assert mutants.summary([noticed])[1] == ["x.py"], "the table is wrong"


def test_the_table_of_equivalents_is_of_lines_that_stand_there() -> None:
    for one in mutants.equivalents():
        lines = {" ".join(line.split()) for line in (ROOT / one.module).read_text().splitlines()}
        assert one.module in mutants.MODULES and len(one.why) > 20
        assert " ".join(one.was.split()) in lines, f"{one.module}: {one.was!r} is not there"
        assert one.becomes and one.was not in one.becomes


def test_a_core_mutant_is_tried_by_the_tests_that_call_its_function_the_quickest_first() -> None:
    module = "agent/core/run/validity.py"
    mutant = mutants.Mutant(module, "", 0, 1, "f", "f")
    calls = mutants.Calls(
        {"slow": (2.0, frozenset({f"{module}:f"})), "quick": (0.5, frozenset({f"{module}:f"})),
         "other": (0.1, frozenset({f"{module}:g"}))}, frozenset({f"{module}:early"}))
    assert mutants.tests_of(mutant, calls) == (["quick", "slow"], 2.5)
    assert mutants.tests_of(mutant._replace(scope="h"), calls) == ([], 0)
    for anywhere in (mutant._replace(scope=""), mutant._replace(scope="early")):
        assert mutants.tests_of(anywhere, calls) == (["other", "quick", "slow"], 2.6)
    elastic = mutant._replace(module="worker/elastic.py")  # its tests start processes
    assert mutants.tests_of(elastic, calls) == ([*mutants.MODULES[elastic.module]], 2.6)
    third_s = mutants.TESTS_S / 3
    slow = {f"t{number}": (third_s + number, frozenset({f"{module}:f"})) for number in range(9)}
    assert mutants.tests_of(mutant, calls._replace(tests=slow))[0] == ["t0", "t1"]


def test_the_scope_of_a_line_is_the_function_whose_body_it_is_in() -> None:
    source = "X = 1\nclass A:\n    def f(self, y=2):\n        def g():\n            return 3\n" \
             "        return g\ndef h():\n    return 4\n"
    assert mutants.scopes_of(source) == {4: "A.f", 5: "A.f", 6: "A.f", 8: "h"}


def test_calls_are_seen_in_every_thread_and_told_by_test(tmp_path: Path) -> None:
    test = tmp_path / "test_calls.py"
    test.write_text("""import threading
from holdfast.agent.core.run import layout
def test_here():
    layout.arranged(layout.World(), (), ())
def test_in_a_thread():
    thread = threading.Thread(target=lambda: layout.Member("a", True).is_fit)
    thread.start()
    thread.join()
def test_nothing():
    pass
""")
    file = tmp_path / "calls.json"
    done = subprocess.run(
        [*mutants.PYTEST, "-p", "bench.mutants_calls", str(test)], cwd=ROOT, capture_output=True,
        text=True, timeout=120, check=False, env={
            **os.environ, "PYTHONPATH": str(ROOT / ".types"), "HOLDFAST_CALLS": str(file),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = {name.rpartition(":")[2]: {one.rpartition(":")[2] for one in called}
             for name, (_, called) in json.loads(file.read_text())["tests"].items()}
    assert {"arranged", "without_drained"} <= found["test_here"]
    assert found["test_in_a_thread"] == {"Member.is_fit"} and not found["test_nothing"]
