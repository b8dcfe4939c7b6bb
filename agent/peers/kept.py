"""What a pre-flight leaves on each of its nodes: a verdict, its bandwidths, and what is usual.

Owns how a report becomes the verdict of the check `peers`, in the results that `holdfast check`
keeps, and the rate that pairs of such nodes had when they passed.  A node keeps what it took part
in itself; only what is well teaches what is usual.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ..checks import results
from ..core.checks import baseline
from ..core.checks.judge import BROKEN, GOOD, SLOW, SLOW_SHARE
from ..core.checks.judge import UNKNOWN as NOT_PROVEN
from ..core.checks.node_tests import PEERS
from ..core.checks.preflight import Report
from ..core.checks.verdict import CRITICAL, NO_LIMIT, OK, UNKNOWN, WARNING, CheckVerdict, Measure

PAIR, ALL_REDUCE = "pair", "all_reduce"
STATUS = {GOOD: OK, SLOW: WARNING, BROKEN: CRITICAL, NOT_PROVEN: UNKNOWN}


def status_of(report: Report, node: str) -> str:
    """A node's own verdict; its links and groups warn, since they may be another's fault, and so do
    versions unlike the others'."""
    mine = next(one for one in report.rows if one.node == node)
    touched = any(node in link.nodes for link in report.links) or any(
        node in group.nodes and group.state in (SLOW, BROKEN) for group in report.groups) or any(
        node in dict(one.nodes) for one in report.drift)
    return WARNING if mine.state == GOOD and touched else STATUS[mine.state]


def verdict(report: Report, own: str, status: str, took_s: float) -> CheckVerdict:
    """This node's own.  Broken it is by two others' word, which is proof enough to refuse a start
    until it passes."""
    mine = next(one for one in report.rows if one.node == own)
    measures = tuple(_measures(report, own))
    return CheckVerdict(
        PEERS, status, mine.reason, mine.rate or None, "B/s" if mine.rate else "",
        mine.limit or None, report.limit_from if mine.limit else NO_LIMIT, "",
        "" if status == OK else f"{mine.todo}; then `holdfast check --peers` again", took_s,
        time.time(), confirmed=status == CRITICAL, measures=measures,
        table=tuple(line for group in report.groups if own in group.nodes for line in group.table))


def _measures(report: Report, own: str) -> Iterator[Measure]:
    """As `holdfast_collective_bus_bandwidth_bytes_per_second` names them: size, then scope.  Of two
    ranks an all-reduce's busbw is what a pair is timed by."""
    mine = next(one for one in report.rows if one.node == own)
    if mine.rate:
        yield Measure(ALL_REDUCE, mine.rate, "B/s", f"{report.pair_bytes} bytes, {PAIR}")
    for group in report.groups:
        if group.state == GOOD and own in group.nodes:
            for operation, rate in group.rates:
                yield Measure(operation, rate, "B/s", f"{group.bytes} bytes, {group.label}")


def keep(folder: Path, boot_id: str, found: CheckVerdict, model: str, size: int) -> str:
    """Beside the other checks' results; why not, or "".  `size`: as it was asked for, 0 for the
    usual one."""
    try:
        with results.changing(folder) as kept:
            if kept.boot_id != boot_id:
                kept.verdicts.clear()
            kept.boot_id = boot_id
            kept.take(found)
            kept.learn(_machine(model, size), found)
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def usual(folder: Path, model: str, size: int) -> float:
    """The rate that judge.py is to expect of a pair; 0 while too few have passed."""
    for key, passes in results.load(folder).baseline.items():
        machine, name, subject = key.rsplit("|", 2)
        if (machine, name) == (_machine(model, size), ALL_REDUCE) and subject.endswith(PAIR):
            limit = baseline.limit_of(Measure(name, 0.0, "B/s", subject), passes)
            return limit.value / SLOW_SHARE if limit is not None else 0.0
    return 0.0


def _machine(model: str, size: int) -> str:
    return f"peers, {size or 'usual'} bytes, {model}"
