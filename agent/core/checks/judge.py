"""What pair tests prove: which node, or which link alone, is broken or slow.

Owns the judgement.  Its one assumption: a bad node is bad with every partner.  So a test that
passed proves both its nodes and its link.  A test that failed between two proven nodes proves the
link bad.  A node that failed with two proven nodes, and passed with nobody, is bad: that two links
of a good node break at once is the less likely story, and with one witness alone it would be a
guess.  Where nothing is proven the verdict is `unknown`, which excludes nobody.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..model import Value
from . import pairing
from .pairing import Pair, Round
from .verdict import amount

GOOD, SLOW, BROKEN, UNKNOWN = "good", "slow", "broken", "unknown"
SLOW_SHARE = 0.85  # of the usual rate: pairs of a healthy fleet differ by a few per cent
# The usual rate is the upper quartile of all pairs: of four nodes with a slow one among them half
# of the pairs are slow, and their median would be.
USUAL_QUANTILE = 0.75
USUAL_OF = 3  # pairs that it must come from; of two, which one is the slow one?
COMMON_SHARE = 0.5  # of all nodes: when more fail, the cause is theirs in common


class Result(Value, frozen=True):
    """One pair's test.  `rate` is bytes a second, 0 where it did not finish."""

    pair: Pair
    ok: bool
    rate: float = 0.0
    error: str = ""
    ran: bool = True  # False: a side never came, so nothing is known


class Finding(Value, frozen=True):
    """The verdict on one node or one link."""

    state: str  # good | slow | broken | unknown
    reason: str
    evidence: tuple[tuple[str, str], ...] = ()  # (pair, what its test gave)


class Judgement(Value, frozen=True):
    """Verdicts by node and by link; only links that are not good are listed."""

    nodes: tuple[tuple[str, Finding], ...]
    links: tuple[tuple[Pair, Finding], ...] = ()
    common: str = ""  # why nobody is named although many fail

    def of(self, node: str) -> Finding:
        return dict(self.nodes)[node]

    def bad(self) -> tuple[str, ...]:
        """Nodes to be left out."""
        return tuple(node for node, found in self.nodes if found.state in (SLOW, BROKEN))


def usual(rates: Iterable[float]) -> float:
    """0 where there are too few to tell."""
    found = sorted(rates)
    return found[int(USUAL_QUANTILE * (len(found) - 1))] if len(found) >= USUAL_OF else 0.0


def least(results: Sequence[Result], expected_rate: float = 0.0) -> float:
    """The rate below which a pair is slow."""
    best: dict[Pair, float] = {}
    for each in results:
        if each.ran and each.ok and each.rate > 0:
            best[each.pair] = max(best.get(each.pair, 0.0), each.rate)
    return SLOW_SHARE * max(usual(best.values()), expected_rate)


def graded(results: Sequence[Result], expected_rate: float = 0.0) -> dict[Pair, str]:
    """good, slow, broken or unknown for each pair; the worst where a pair was tested twice.

    What is slow is measured against the usual rate of these results, and against `expected_rate`
    (a baseline; 0 = none) where that is higher: when all are slow they know nothing of it.
    """
    limit = least(results, expected_rate)
    order = (UNKNOWN, GOOD, SLOW, BROKEN)
    found: dict[Pair, str] = {}
    for each in results:
        state = _grade(each, limit)
        found[each.pair] = max(found.get(each.pair, UNKNOWN), state, key=order.index)
    return found


def _grade(result: Result, limit: float) -> str:
    if not result.ran:
        return UNKNOWN
    if not result.ok:
        return BROKEN
    return SLOW if 0 < result.rate < limit else GOOD


def proven(grades: dict[Pair, str]) -> set[str]:
    """Nodes that a passed test proves."""
    return {node for each, state in grades.items() if state == GOOD for node in each}


def next_round(results: Sequence[Result], expected_rate: float = 0.0) -> Round:
    """The second round after the first one's results; () when nothing is suspect."""
    grades = graded(results, expected_rate)
    good = proven(grades)
    failed = [each for each, state in grades.items() if state in (SLOW, BROKEN)]
    suspects = {node for each in failed for node in each if node not in good}
    return pairing.second_round(suspects, good, set(grades))


def judge(nodes: Iterable[str], results: Sequence[Result], expected_rate: float = 0.0) -> Judgement:
    """Verdicts after both rounds."""
    names = sorted(set(nodes))
    grades = graded(results, expected_rate)
    said = {each.pair: _words(each) for each in results}
    good = proven(grades)
    found = {node: _node(node, grades, good, said) for node in names}
    bad = [node for node in names if found[node].state in (SLOW, BROKEN)]
    failing = [node for node in names if found[node].state != GOOD and _fails(node, grades)]
    common = ""
    if len(names) > 2 and len(failing) > COMMON_SHARE * len(names):
        common = (f"{len(failing)} of {len(names)} nodes fail: a cause in common (driver, fabric, "
                  "settings) is likelier than so many faults, so no node is named")
        found.update({node: Finding(UNKNOWN, common, found[node].evidence) for node in bad})
    links = [(each, _link(each, state, said)) for each, state in sorted(grades.items())
             if state in (SLOW, BROKEN) and set(each) <= good]
    return Judgement(tuple(found.items()), tuple(links), common)


def _fails(node: str, grades: dict[Pair, str]) -> bool:
    return any(node in each and state in (SLOW, BROKEN) for each, state in grades.items())


def _node(node: str, grades: dict[Pair, str], good: set[str], said: dict[Pair, str]) -> Finding:
    mine = {each: state for each, state in grades.items() if node in each}
    evidence = tuple((" - ".join(each), said[each]) for each in sorted(mine) if mine[each] != GOOD)
    if node in good:
        passed = sum(state == GOOD for state in mine.values())
        return Finding(GOOD, f"passed with {passed} of {len(mine)} nodes", evidence)
    against = {other: state for each, state in mine.items() for other in each
               if other in good and state in (SLOW, BROKEN)}
    if len(against) >= pairing.WITNESSES:
        state = SLOW if SLOW in against.values() else BROKEN
        witnesses = ", ".join(sorted(against))
        return Finding(state, f"{state} with {witnesses}, who are well with others", evidence)
    if not any(state != UNKNOWN for state in mine.values()):
        return Finding(UNKNOWN, "no test of it came to an end", evidence)
    others = sorted({other for each in mine for other in each} - {node})
    return Finding(UNKNOWN, f"it, or its links to {', '.join(others)}: too few nodes are proven "
                            "well to tell", evidence)


def _link(link: Pair, state: str, said: dict[Pair, str]) -> Finding:
    a, b = link
    return Finding(state, f"{a} and {b} are well with others, and {state} with each other",
                   ((" - ".join(link), said[link]),))


def _words(result: Result) -> str:
    if not result.ran:
        return result.error or "did not run"
    if not result.ok:
        return result.error or "failed"
    return amount(result.rate, "B/s")
