"""`holdfast parity RUN_A RUN_B`: whether two runs are equally good on their held-out pairs.

Owns what is compared with what, and what is shown and kept; the statistics are in
trainer/quality/parity.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.trainer.quality import kept
from holdfast.worker import exits

from .text import BAD, CARE, GOOD, Failure, Line, Span, field, line, print_json, show, table

if TYPE_CHECKING:
    from holdfast.trainer.quality.parity import Parity

CODES = {"within": exits.DONE, "outside": exits.FAILED}
STYLES = {"within": GOOD, "outside": BAD}


def parity(options: argparse.Namespace) -> int:
    """0 within, 1 outside, 3 too few pairs to tell; 2 when there is nothing to compare."""
    try:
        from holdfast.trainer.quality import parity as statistics
    except ImportError as error:
        raise Failure(f"no {error.name}: install holdfast[trainer]", exits.USAGE) from None
    try:
        measures = [statistics.metric(text) for text in options.metric or ["mrr@10"]]
        allowed = statistics.margin(options.within)
    except ValueError as error:
        raise Failure(str(error), exits.USAGE) from None
    try:
        first, second = (kept.load(kept.find(Path(run), options.step))
                         for run in (options.first, options.second))
        for judged in (first, second):  # a file is taken as it is
            if options.step not in (None, judged.step):
                raise kept.EvaluationError(
                    f"{judged.path} is of step {judged.step}, not {options.step}: name the run's "
                    "folder, or leave out --step")
        _two(first, second)
        task, pairs = _same_pairs(first, second, options.task)
    except kept.EvaluationError as error:
        raise Failure(str(error), exits.USAGE) from None
    same = bool(first.weights) and first.weights == second.weights
    found = [statistics.compare(*pairs, measure, allowed, options.seed, same)
             for measure in measures]
    code = exits.DONE
    for one in found:  # outside weighs more than not known
        told = CODES.get(one.verdict, exits.NOT_KNOWN)
        code = told if code == exits.DONE or told == exits.FAILED else code
    verdict = next((one.verdict for one in found if CODES.get(one.verdict, 3) == code), "")
    said: dict[str, Any] = {
        "first": _named(first), "second": _named(second), "task": task, "verdict": verdict,
        "seed": options.seed, "metrics": [one._asdict() for one in found]}
    try:
        kept.keep_verdict(second, said)
    except OSError as error:  # what was found holds all the same
        print(f"holdfast: the verdict is not kept beside {second.path}: {error.strerror}; "
              "`holdfast promote` will not find it", file=sys.stderr)
    if options.json:
        print_json(said)
    else:
        show(report(said, found))
    return code


def _two(first: kept.Evaluation, second: kept.Evaluation) -> None:
    """Raises EvaluationError where they are one, under whatever names, or the same step of one run
    that was evaluated again after a restart."""
    if first._replace(path="", digest="", generation=0) == second._replace(
            path="", digest="", generation=0):
        where = first.path if first.path == second.path else f"{first.path} and {second.path}"
        raise kept.EvaluationError(
            f"{where}: one and the same evaluation, of {first.run}, step {first.step}, which says "
            "nothing of two runs: name two, or two files of different steps")


def _same_pairs(
    first: kept.Evaluation, second: kept.Evaluation, wanted: str
) -> tuple[str, tuple[list[int], list[int]]]:
    """The task that both have, and its places in both.  Raises EvaluationError."""
    name = wanted or next(iter(first.tasks))
    for one in (first, second):
        if name not in one.tasks:
            raise kept.EvaluationError(
                f"{one.path}: no task {name!r}; give --task {' or '.join(one.tasks)}")
    a, b = first.tasks[name], second.tasks[name]
    if (a.pairs, a.pairs_digest, len(a.places)) != (b.pairs, b.pairs_digest, len(b.places)):
        raise kept.EvaluationError(
            f"{first.path} and {second.path} were measured on other pairs ({a.pairs} and "
            f"{b.pairs}): set the same data, data_options and tokens for both")
    return name, (list(a.places), list(b.places))


def _named(one: kept.Evaluation) -> dict[str, Any]:
    return {"run": one.run, "step": one.step, "generation": one.generation, "path": one.path,
            "digest": one.digest, "weights": one.weights}


def report(said: dict[str, Any], found: list[Parity]) -> list[Line]:
    lines: list[Line] = []
    for name in ("first", "second"):
        one = said[name]
        lines += field(name, f"{one['run']}, step {one['step']}: {one['path']}")
    heads = ("metric", "first", "second", "difference", "95 % interval", "margin")
    rows = []
    for row in found:
        unit, scale = (" %", 100.0) if row.relative else ("", 1.0)
        ends = " to ".join("?" if end is None else f"{scale * end:+.3g}"
                           for end in (row.low, row.high))
        rows.append((
            row.metric, f"{row.first:.4f}", f"{row.second:.4f}",
            f"{scale * row.difference:+.3g}{unit}", ends + unit, f"{scale * row.margin:g}{unit}"))
    lines += [(), *table(heads, rows), ()]
    for row in found:
        style = STYLES.get(row.verdict, CARE)
        lines.append(line(f"{row.metric}  ", Span(row.verdict, style),
                          f" ({row.pairs} pairs, {row.differing} differ)"))
        lines += field("", row.why, indent=4)
    return lines
