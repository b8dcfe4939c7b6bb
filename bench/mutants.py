"""Does a test notice?  Seeded mutants of the modules that decide and prove, one at a time.

Owns which modules count, which tests must notice a change of each, the sample, and the goal, which
each module has to reach by itself.  cosmic-ray makes the mutants; each is tried in a copy of the
tree, so that the tree itself is never touched.  What mutants_equivalent.toml names changes nothing
that anybody could see, and does not count.

    python -m bench.mutants                     # the whole campaign: ten mutants a module
    python -m bench.mutants --mutants 12        # a short form
    python -m bench.mutants --only run/policy --mutants 40 --show
    python -m bench.mutants --again bench/results/mutants-DATE.jsonl --show

The digests of tests/sim are left out on purpose: they notice every change, and prove no promise.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from .common import BENCH, ROOT, Results, read_rows

SEED = 20261122
EACH = 10  # mutants of a module, unless told otherwise
# Of one mutant's tests, and so many times what they took without it: an endless loop is noticed.
LIMIT_S, LIMIT_TIMES = 30.0, 2.0
TESTS_S = 60.0  # seconds of the quickest tests, together, that try one mutant of the core
CALLS_LIMIT_S = 600.0  # of a module's tests without any mutant
WANTED = 0.9
# `X | None` in an annotation is never evaluated, and short texts and small numbers that are equal
# are one object: these operators make equal mutants.
WITHOUT = ("ReplaceBinaryOperator_BitOr", "RemoveDecorator", "Eq_Is", "NotEq_Is")
EQUIVALENT = BENCH / "mutants_equivalent.toml"
PURE = "agent/core/"  # runs in the process of its test: who calls what is seen
NO_SUCH_TEST = "ERROR: not found:"
PYTEST = (sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider")
# The core's tests without those of logs, kernel lines, network and host.
CORE = tuple(f"tests/unit/core/test_{name}.py" for name in (
    "borders", "recovery", "stage", "ladder", "rungs", "patience", "victims", "device_ranks",
    "cost", "stopped", "rules", "resets", "repair", "repair_of_nodes", "stale_locks",
    "condition_incidents", "silence", "ledger", "known_causes", "cluster", "small_parts", "edges",
    "loops", "hang", "climb", "layout", "start_gate", "exclusion", "gate_of_nodes", "cut_off",
    "pause", "many_nodes", "named_ranks", "incident_book", "compile_waits", "run_rules",
    "way_back", "waits_of_nodes", "fences", "peer_gate", "node_tests"))
DECIDING = (
    "ladder.py", "ledger.py", "incidents/book.py", "effects/in_flight.py",
    *(f"run/{name}.py" for name in (
        "policy", "plan", "validity", "reconcile", "members", "layout", "case", "stage", "recovery",
        "start_gate", "ending", "progress", "operator", "causes", "fences", "peer_gate")),
    "checks/node_tests.py",
    *(f"nodes/{name}.py" for name in ("repair", "breaker", "exclusions", "stale_locks")),
    *(f"detect/ranks/{name}.py" for name in (
        "ended", "hang", "limits", "collective", "known_causes", "compiling")))
# A mutant in a module of this table must be noticed by the tests behind it.
MODULES: dict[str, tuple[str, ...]] = {
    **{f"agent/core/{name}": CORE for name in DECIDING},
    "agent/actions/performer.py": ("tests/unit/agent/test_performing.py",
                                   "tests/unit/agent/test_performer.py",
                                   "tests/unit/agent/test_root_helper.py"),
    "agent/actions/preconditions.py": ("tests/unit/agent/test_preconditions.py",),
    "agent/actions/root_helper.py": ("tests/unit/agent/test_root_helper.py",),
    "agent/store/sqlite.py": ("tests/unit/agent/test_performer.py",
                              "tests/unit/agent/test_parts.py"),
    "agent/history/journal.py": ("tests/unit/agent/test_journal.py",),
    "agent/web/auth.py": ("tests/unit/agent/test_web.py", "tests/unit/agent/test_door.py"),
    "trainer/checkpoint/format.py": ("tests/unit/trainer/test_checkpoint_format.py",),
    "trainer/checkpoint/restore.py": ("tests/unit/trainer/test_restore_digests.py",
                                      "tests/unit/trainer/test_recovery.py"),
    "trainer/checkpoint/read_back.py": ("tests/unit/trainer/test_read_back.py",),
    "worker/launcher/rank_processes.py": tuple(f"tests/unit/worker/test_{name}.py" for name in (
        "rank_starts", "rank_processes", "launcher")),
    "worker/launcher/commands.py": tuple(f"tests/unit/worker/test_{name}.py" for name in (
        "deletion", "remove_lock", "launcher", "compiling", "logwatch")),
    "worker/launcher/ending.py": ("tests/unit/worker/test_ending.py",),
    "worker/launcher/without_agent.py": ("tests/unit/worker/test_ending.py",),
    "worker/rank/outcome.py": ("tests/unit/worker/test_outcome.py",),
    "worker/elastic.py": ("tests/unit/worker/test_elastic.py",),
}


class Mutant(NamedTuple):
    """One change of one module, as cosmic-ray names it."""

    module: str
    operator: str
    occurrence: int
    line: int
    function: str
    scope: str  # the function of the module or the method in which it is; "" = outside of all


class Calls(NamedTuple):
    """What the tests of a module do without a mutant (`bench.mutants_calls`)."""

    tests: dict[str, tuple[float, frozenset[str]]]  # test -> its seconds, the functions it calls
    imported: frozenset[str]  # functions that run before any test does


class Equivalent(NamedTuple):
    """A change that nobody could see, by its text, so that other lines may move."""

    module: str
    function: str
    was: str
    becomes: tuple[str, ...]
    why: str


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module that cosmic-ray's operators make, in a fixed order."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.ast.ast_query import ASTQuery

    found, tree = [], get_ast_from_path(ROOT / module)
    scopes = scopes_of((ROOT / module).read_text())
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if any(word in name for word in WITHOUT) or operator.arguments():
            continue
        places = ((node, at) for node in ast_nodes(tree)
                  for at, _ in operator().mutation_positions(node))
        found += [Mutant(module, name, number, at[0], ASTQuery(node).get_definition_name() or "",
                         scopes.get(at[0], ""))
                  for number, (node, at) in enumerate(places)]
    return found


def scopes_of(source: str, within: ast.AST | None = None, prefix: str = "") -> dict[int, str]:
    """Line -> the function of the module, or the method, whose body it is in."""
    found: dict[int, str] = {}
    for node in ast.iter_child_nodes(within or ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found |= scopes_of(source, node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = range(node.body[0].lineno, (node.end_lineno or 0) + 1)
            found |= dict.fromkeys(lines, prefix + node.name)
    return found


def sample(modules: list[str], count: int, seed: int) -> list[Mutant]:
    """`count` mutants, spread evenly over the modules as far as each has so many."""
    stacks = []
    for module in modules:
        stack = mutants_of(module)
        random.Random(f"{seed} {module}").shuffle(stack)  # the same whichever others are looked at
        stacks.append(stack)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(stacks):
        for stack in stacks:
            if stack and len(chosen) < count:
                chosen.append(stack.pop())
    return chosen


def survivors(rows: Path, modules: list[str]) -> list[Mutant]:
    """Those that lived in an earlier campaign, to be tried with the tests of today."""
    lived = {(row["module"], row["operator"], row["occurrence"], row["line"])
             for row in read_rows(rows) if not row["ok"]}
    return [one for module in modules for one in mutants_of(module)
            if (module, one.operator, one.occurrence, one.line) in lived]


def equivalents() -> list[Equivalent]:
    """The table of those that do not count."""
    rows = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", ())
    return [Equivalent(**row | {"becomes": tuple(row["becomes"])}) for row in rows]


def copy_of_the_tree(folder: Path) -> Path:
    """What git tracks or would track, with links as links; tests run in it as in a checkout."""
    listing = subprocess.run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT,
                             capture_output=True, check=True, timeout=60).stdout.decode()
    for name in filter(None, listing.split("\0")):
        source, target = ROOT / name, folder / name
        if name.startswith("bench/results") or not (source.exists() or source.is_symlink()):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True, timeout=60)
    return folder


def calls_of(tests: tuple[str, ...], tree: Path, file: Path) -> Calls | None:
    """What these tests call, from `file` where it is there already; None where one fails without
    any mutant, for behind a red one nothing could survive.  The bytecode of all modules is written
    on the way: cosmic-ray lets no mutant write its own, and reads theirs."""
    known = file.exists()
    how = ("--collect-only",) if known else ("-p", "bench.mutants_calls")
    done = subprocess.run([*PYTEST, *how, *tests], cwd=tree, check=False,
                          capture_output=True, text=True, timeout=CALLS_LIMIT_S,
                          env={**os.environ, **({} if known else {"HOLDFAST_CALLS": str(file)})})
    if done.returncode:
        print(f"red without any mutant:\n{done.stdout[-4000:]}{done.stderr}", file=sys.stderr)
        return None
    return read_calls(file)


def read_calls(file: Path) -> Calls:
    said = json.loads(file.read_text())
    return Calls({test: (seconds, frozenset(called))
                  for test, (seconds, called) in said["tests"].items()},
                 frozenset(said["imported"]))


def tests_of(mutant: Mutant, calls: Calls) -> tuple[list[str], float]:
    """(the tests that could notice, the quickest first; the seconds that they take without it)."""
    if not mutant.module.startswith(PURE):
        return list(MODULES[mutant.module]), sum(seconds for seconds, _ in calls.tests.values())
    name = f"{mutant.module}:{mutant.scope}"
    anywhere = not mutant.scope or name in calls.imported
    able = sorted((seconds, test) for test, (seconds, called) in calls.tests.items()
                  if anywhere or name in called)
    found, total_s = [], 0.0
    for seconds, test in able:
        if total_s + seconds <= TESTS_S:
            found.append(test)
            total_s += seconds
    return found, total_s


def tried(mutant: Mutant, calls: Calls, tree: Path) -> dict[str, Any]:
    """{module, line, operator, outcome, diff ...} of one mutant: killed, survived or no change."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec

    spec = MutationSpec(
        module_path=tree / mutant.module, operator_name=mutant.operator,
        operator_args={}, occurrence=mutant.occurrence,
        start_pos=(mutant.line, 0), end_pos=(mutant.line, 1), definition_name=mutant.function,
    )
    begin_s = time.monotonic()
    tests, seconds = tests_of(mutant, calls)
    (tree / "chosen.txt").write_text("\n".join(tests))
    command = " ".join((*PYTEST, "@chosen.txt")) if tests else "true"
    done = mutate_and_test([spec], command, LIMIT_S + LIMIT_TIMES * seconds)
    if NO_SUCH_TEST in (done.output or ""):  # it is named by what the mutant changes
        command = " ".join((*PYTEST, *MODULES[mutant.module]))
        done = mutate_and_test([spec], command, CALLS_LIMIT_S)
    outcome = str(done.test_outcome.value if done.test_outcome else "none").lower()
    return {"case": "mutant", "ok": outcome != "survived", "why": "", "module": mutant.module,
            "line": mutant.line, "function": mutant.function, "operator": mutant.operator,
            "occurrence": mutant.occurrence, "outcome": outcome, "tests": len(tests),
            "took_s": round(time.monotonic() - begin_s, 1), "diff": done.diff or ""}


def change_of(diff: str) -> tuple[str, str]:
    """(the line as it was, what it became), of a unified diff behind its three lines of names."""
    lines = diff.splitlines()[3:]
    return (" ".join(line[1:].strip() for line in lines if line.startswith("-")),
            " ".join(line[1:].strip() for line in lines if line.startswith("+")))


def counted_out(row: dict[str, Any], table: Collection[Equivalent]) -> dict[str, Any]:
    """The row of one that nobody can notice, with the reason; one that somebody noticed is not
    equivalent, and the table is wrong."""
    was, becomes = change_of(row["diff"])
    why = next((one.why for one in table if becomes in one.becomes and
                (one.module, one.function, one.was) == (row["module"], row["function"], was)), "")
    if why and row["ok"]:
        return {**row, "ok": False, "why": "noticed, though listed as equivalent"}
    return {**row, "ok": True, "outcome": "equivalent", "why": why} if why else row


def summary(rows: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """(a line for each module, the modules that miss the goal)."""
    lines, missed = [], []
    tally: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        tally[row["module"]]["equivalent" if row["outcome"] == "equivalent" else
                             "noticed" if row["ok"] else "missed"] += 1
    for module, counts in sorted(tally.items()):
        count = counts["noticed"] + counts["missed"]
        low = counts["noticed"] < WANTED * count
        missed += [module] if low else []
        lines.append(f"{module:44} {counts['noticed']} of {count} noticed"
                     + (f", {counts['equivalent']} equivalent" if counts["equivalent"] else "")
                     + ("  BELOW THE GOAL" if low else ""))
    return lines, missed


def campaign(chosen: list[Mutant], results: Results, options: argparse.Namespace) -> int:
    """Tries each, tells and keeps the rows; the exit code."""
    table, rows = equivalents(), []
    kept: Path | None = options.calls and options.calls.absolute()
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder, \
            contextlib.ExitStack() as stack:
        tree = copy_of_the_tree(Path(folder))
        stack.enter_context(contextlib.chdir(tree))
        # Without the plugins of others, which take three seconds a start to import.
        os.environ.update(PYTHONPATH=str(tree / ".types"), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        calls: dict[tuple[str, ...], Calls] = {}
        for tests in sorted({MODULES[mutant.module] for mutant in chosen}):
            name = f"calls-{hashlib.sha256(' '.join(tests).encode()).hexdigest()[:8]}.json"
            found = calls_of(tests, tree, (kept or tree) / name)
            if found is None:
                return 2
            calls[tests] = found
        for number, mutant in enumerate(chosen, 1):
            row = counted_out(tried(mutant, calls[MODULES[mutant.module]], tree), table)
            rows.append(row)
            results.add({**row, "seed": options.seed})
            print(f"{number:4} of {len(chosen)}  {row['outcome']:10} {mutant.module}:{mutant.line} "
                  f"{mutant.function} {mutant.operator.removeprefix('core/')} {row['why']}",
                  flush=True)
            if options.show and not row["ok"]:
                print(row["diff"], flush=True)
    lines, missed = summary(rows)
    print("\n".join(lines))
    count = sum(row["outcome"] != "equivalent" for row in rows)
    noticed = sum(row["ok"] for row in rows) - (len(rows) - count)
    print(f"noticed {noticed} of {count}; rows: {results.path}")
    if missed:
        print(f"below nine of ten: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def main(arguments: list[str] | None = None) -> int:
    """0 when of each module at least nine of ten mutants were noticed, 2 when a test is red
    before."""
    parser = argparse.ArgumentParser(prog="bench.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, help=f"how many in all ({EACH} a module)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument("--only", default="", help="modules whose path holds this")
    parser.add_argument("--again", type=Path, help="the survivors among these rows, once more")
    parser.add_argument("--show", action="store_true", help="the change of each survivor")
    parser.add_argument("--calls", type=Path, metavar="DIR", help="keeps there what the tests "
                        "call, for the next invocation on the same code")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    modules = [module for module in MODULES if options.only in module]
    if not modules:
        parser.error(f"--only {options.only}: no module of the table has this in its path")
    count = EACH * len(modules) if options.mutants is None else options.mutants
    chosen = (survivors(options.again, modules) if options.again
              else sample(modules, count, options.seed))
    return campaign(chosen, Results("mutants", options.out), options)


if __name__ == "__main__":
    sys.exit(main())
