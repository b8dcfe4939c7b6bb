"""Does a test notice?  Seeded mutants of the modules that decide and prove, one at a time.

Owns which modules count, which tests must notice a change of each, and the sample.  cosmic-ray
makes the mutants; each is tried in a copy of the tree, so that the tree itself is never touched.

    python -m bench.mutants                     # the whole campaign: 320 mutants, about 40 minutes
    python -m bench.mutants --mutants 12        # a short form
    python -m bench.mutants --only run/policy --mutants 40 --show
    python -m bench.mutants --again bench/results/mutants-DATE.jsonl --show

The digests of tests/sim are left out on purpose: they notice every change, and prove no promise.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from .common import BENCH, ROOT, Results, read_rows

SEED = 20261122
MUTANTS = 320
LIMIT_S = 120.0  # of one mutant's tests: an endless loop is a mutant that was noticed
WANTED = 0.9
# `X | None` in an annotation is never evaluated, and short texts and small numbers that are equal
# are one object: these operators make equal mutants.
WITHOUT = ("ReplaceBinaryOperator_BitOr", "RemoveDecorator", "Eq_Is", "NotEq_Is")
# The cores' tests without those of logs, kernel lines, network and host, the quick ones first: the
# first that fails ends a mutant.
CORE = tuple(f"tests/unit/core/test_{name}.py" for name in (
    "borders", "recovery", "stage", "ladder", "rungs", "patience", "victims", "device_ranks", "cost",
    "stopped", "rules", "resets", "repair", "stale_locks", "condition_incidents", "silence", "known_causes",
    "cluster", "small_parts", "edges", "loops", "hang", "climb"))
# A mutant in a module of this table must be noticed by the tests behind it.
MODULES: dict[str, tuple[str, ...]] = {
    "agent/core/run/policy.py": CORE,
    "agent/core/run/plan.py": CORE,
    "agent/core/run/validity.py": CORE,
    "agent/core/run/reconcile.py": CORE,
    "agent/core/run/members.py": CORE,
    "agent/core/run/case.py": CORE,
    "agent/core/run/stage.py": CORE,
    "agent/core/run/recovery.py": CORE,
    "agent/core/run/ending.py": CORE,
    "agent/core/run/progress.py": CORE,
    "agent/core/run/operator.py": CORE,
    "agent/core/run/causes.py": CORE,
    "agent/core/nodes/repair.py": CORE,
    "agent/core/nodes/breaker.py": CORE,
    "agent/core/nodes/exclusions.py": CORE,
    "agent/core/nodes/stale_locks.py": CORE,
    "agent/core/detect/ranks/ended.py": CORE,
    "agent/core/detect/ranks/hang.py": CORE,
    "agent/core/detect/ranks/limits.py": CORE,
    "agent/core/detect/ranks/collective.py": CORE,
    "agent/core/effects/in_flight.py": CORE,
    "agent/core/ledger.py": CORE,
    "agent/actions/performer.py": ("tests/unit/agent/test_performing.py",
                                   "tests/unit/agent/test_performer.py",
                                   "tests/unit/agent/test_root_helper.py"),
    "agent/actions/preconditions.py": ("tests/unit/agent/test_preconditions.py",),
    "agent/actions/root_helper.py": ("tests/unit/agent/test_root_helper.py",),
    "agent/store/sqlite.py": ("tests/unit/agent/test_performer.py",
                              "tests/unit/agent/test_parts.py"),
    "agent/history/journal.py": ("tests/unit/agent/test_journal.py",),
    "agent/web/auth.py": ("tests/unit/agent/test_web.py",),
    "trainer/checkpoint/format.py": ("tests/unit/trainer/test_checkpoint_format.py",),
    "trainer/checkpoint/restore.py": ("tests/unit/trainer/test_restore_digests.py",
                                      "tests/unit/trainer/test_recovery.py"),
    "worker/launcher/rank_processes.py": ("tests/unit/worker/test_rank_processes.py",
                                          "tests/unit/worker/test_launcher.py"),
    "worker/launcher/commands.py": tuple(f"tests/unit/worker/test_{name}.py" for name in (
        "deletion", "remove_lock", "launcher", "compiling", "logwatch")),
    "worker/rank/outcome.py": ("tests/unit/worker/test_outcome.py",),
    "worker/elastic.py": ("tests/unit/worker/test_elastic.py",),
}


class Mutant(NamedTuple):
    """One change of one module, as cosmic-ray names it."""

    module: str
    operator: str
    arguments: dict[str, Any]
    occurrence: int
    line: int
    function: str


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module that cosmic-ray's operators make, in a fixed order."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.ast.ast_query import ASTQuery

    found, tree = [], get_ast_from_path(ROOT / module)
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if any(word in name for word in WITHOUT) or operator.arguments():
            continue
        places = ((node, at) for node in ast_nodes(tree)
                  for at, _ in operator().mutation_positions(node))
        found += [Mutant(module, name, {}, number, at[0],
                         ASTQuery(node).get_definition_name() or "")
                  for number, (node, at) in enumerate(places)]
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


def command_of(module: str) -> str:
    """What runs the tests that must notice a change of `module`."""
    return " ".join([sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
                     *MODULES[module]])


def red_before(modules: set[str], tree: Path) -> list[str]:
    """The tests that fail without any mutant: behind them nothing could survive."""
    commands = sorted({command_of(module) for module in modules})
    return [command for command in commands
            if subprocess.run(command.split(), cwd=tree, capture_output=True,
                              timeout=5 * LIMIT_S, check=False).returncode]


def tried(mutant: Mutant, tree: Path) -> dict[str, Any]:
    """{module, line, operator, outcome, diff ...} of one mutant: killed, survived or no change."""
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_item import MutationSpec

    spec = MutationSpec(
        module_path=tree / mutant.module, operator_name=mutant.operator,
        operator_args=mutant.arguments, occurrence=mutant.occurrence,
        start_pos=(mutant.line, 0), end_pos=(mutant.line, 1), definition_name=mutant.function,
    )
    begin_s = time.monotonic()
    done = mutate_and_test([spec], command_of(mutant.module), LIMIT_S)
    outcome = str(done.test_outcome.value if done.test_outcome else "none").lower()
    return {"case": "mutant", "ok": outcome != "survived", "why": "", "module": mutant.module,
            "line": mutant.line, "function": mutant.function, "operator": mutant.operator,
            "occurrence": mutant.occurrence, "outcome": outcome,
            "took_s": round(time.monotonic() - begin_s, 1), "diff": done.diff or ""}


def main(arguments: list[str] | None = None) -> int:
    """0 when at least nine of ten mutants were noticed, 2 when a test is red before."""
    parser = argparse.ArgumentParser(prog="bench.mutants", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=MUTANTS, help="how many (320)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument("--only", default="", help="modules whose path holds this")
    parser.add_argument("--again", type=Path, help="the survivors among these rows, once more")
    parser.add_argument("--show", action="store_true", help="the change of each survivor")
    parser.add_argument("--out", type=Path, default=BENCH / "results")
    options = parser.parse_args(arguments)
    modules = [module for module in MODULES if options.only in module]
    if not modules:
        parser.error(f"--only {options.only}: no module of the table has this in its path")
    chosen = (survivors(options.again, modules) if options.again
              else sample(modules, options.mutants, options.seed))
    results, tally = Results("mutants", options.out), Counter[tuple[str, bool]]()
    with tempfile.TemporaryDirectory(prefix="holdfast-mutants-") as folder, \
            contextlib.ExitStack() as stack:
        tree = copy_of_the_tree(Path(folder))
        stack.enter_context(contextlib.chdir(tree))
        os.environ.update(PYTHONPATH=str(tree / ".types"), PYTHONDONTWRITEBYTECODE="1")
        for command in red_before({mutant.module for mutant in chosen}, tree):
            print(f"red without any mutant: {command}", file=sys.stderr)
            return 2
        for number, mutant in enumerate(chosen, 1):
            row = {**tried(mutant, tree), "seed": options.seed}
            results.add(row)
            tally[mutant.module, row["ok"]] += 1
            print(f"{number:4} of {len(chosen)}  {row['outcome']:9} {mutant.module}:{mutant.line} "
                  f"{mutant.function} {mutant.operator.removeprefix('core/')}", flush=True)
            if options.show and not row["ok"]:
                print(row["diff"], flush=True)
    for module in modules:
        dead, lived = tally[module, True], tally[module, False]
        if dead + lived:
            print(f"{module:44} {dead} of {dead + lived} noticed")
    noticed = sum(count for (_, ok), count in tally.items() if ok)
    print(f"noticed {noticed} of {len(chosen)}; rows: {results.path}")
    return 0 if noticed >= WANTED * len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
