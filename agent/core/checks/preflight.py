"""Which tests peers make with each other, in which order, and what all of them come to.

Owns the pre-flight of several nodes: each computes, pairs exchange, suspects are tried again with
nodes that proved good, and then groups and the whole.  It is one generator: it yields tests that
run at once, is sent their outcomes, and returns a report.  Whoever carries tests to nodes and
outcomes back drives it (agent/peers/coordinator.py); a simulation does it in a test.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from ..model import Value
from . import judge, pairing
from .judge import BROKEN, GOOD, SLOW, UNKNOWN, Finding, Result
from .pairing import Pair, pair
from .verdict import BASELINE, amount

RAIL = "rail"
COMPUTE, PAIR, GROUP, REACH = "compute", "pair", "group", "reach"
COMPUTE_SHARE = 0.75  # of the usual rate: clocks of equal processors differ by some per cent
COMPUTE_S, AGAIN_S = 0.12, 0.4  # of computing; longer where a verdict hangs on it
# Pairs on one machine mostly wait for their network, and may be more than its processors.
NODES_A_PROCESSOR = {COMPUTE: 1, PAIR: 4}
BROKEN_MOST = 2  # failures that are enough to suspect a node; round two tells whose they are
PEERS = "peers"  # whose limit it is: of this test alone, or of tests that passed before
WORST_FIRST = BROKEN, SLOW, UNKNOWN, GOOD


class Member(Value, frozen=True):
    """A node that came.  `machine`: what shares processors has the same (namespaces, one boot);
    `model`: only equal ones are compared; `error`: why it can make no test."""

    name: str
    machine: str = ""
    processors: int = 1
    model: str = ""
    error: str = ""
    versions: tuple[tuple[str, str], ...] = ()  # (of what, which): drivers, kernel, torch
    devices: int = 1  # accelerators, a rank each


class Trial(Value, frozen=True):
    """One test.  REACH asks the first node whether the second answers at all."""

    kind: str
    nodes: tuple[str, ...]
    label: str = ""  # of a group: "group 0", "across 1", "whole", "rail 3"
    ranks: int = 1  # of each node
    rail: int = 0  # with one rank a node: which of its accelerators that has
    threads: int = 0  # to compute with; 0 = all
    seconds: float = 0.0


class Outcome(Value, frozen=True):
    """What became of one.  `rate`: bytes or operations a second; `ran`: False where a side was not
    there, so that nothing is known; `table`: a group's lines."""

    test: Trial
    ok: bool
    rate: float = 0.0
    error: str = ""
    ran: bool = True
    gone: str = ""  # the node that was not there
    still: bool = False  # it says nothing, and keeps its connection
    table: tuple[str, ...] = ()
    bytes: int = 0  # of one operation
    rates: tuple[tuple[str, float], ...] = ()  # of a group: (operation, busbw)


class Row(Value, frozen=True):
    """One node's verdict.  `rate`: the median of its links; `limit`: what these must reach."""

    node: str
    state: str
    reason: str
    rate: float = 0.0
    limit: float = 0.0
    compute: float = 0.0
    compute_limit: float = 0.0
    partners: tuple[str, ...] = ()
    evidence: tuple[tuple[str, str], ...] = ()
    todo: str = ""


class Link(Value, frozen=True):
    nodes: Pair
    state: str
    reason: str
    evidence: str
    todo: str


class Group(Value, frozen=True):
    label: str
    nodes: tuple[str, ...]
    state: str
    rate: float  # all-reduce's busbw
    reason: str
    table: tuple[str, ...] = ()
    bytes: int = 0
    rates: tuple[tuple[str, float], ...] = ()


class Unlike(Value, frozen=True):
    """What some nodes have in another version than most; `most` is "" without a majority."""

    what: str
    most: str
    nodes: tuple[tuple[str, str], ...]  # (node, its version)


class Report(Value, frozen=True, omit_defaults=False):
    rows: tuple[Row, ...]
    links: tuple[Link, ...]
    groups: tuple[Group, ...]
    common: str
    rounds: int
    tests: int
    limit_from: str = PEERS
    pair_bytes: int = 0
    drift: tuple[Unlike, ...] = ()


Outcomes = Sequence[Outcome]
Steps = Generator[tuple[Trial, ...], Outcomes, Report]


def preflight(names: Sequence[str], members: Iterable[Member], absent: Mapping[str, str],
              group_size: int = 0, coordinator: str = "",
              still: Iterable[str] = (), expected_rate: float = 0.0,
              rails: bool = False, groups: bool = True) -> Steps:
    """`names`: all of them, in the job's order; `absent`: who did not come, and why; `still`: those
    among them that came and then said nothing to `coordinator`; `expected_rate`: of a pair, by
    tests that passed before, 0 where nothing is known; `rails`: of all nodes the first
    accelerators among each other, then the second, ...; `groups`: whether all that are well make
    every operation together at last."""
    here = {one.name: one for one in members}
    able = [name for name in names if name in here and not here[name].error]
    state = _State(names, here, dict(absent), coordinator, still, expected_rate)
    yield from state.computed([(name,) for name in able], COMPUTE_S)
    yield from state.paired(pairing.first_round(able), skip=True)
    rounds = 1
    suspects, again = state.slow_computers(), _again(state)
    if suspects or again:
        rounds = 2
        yield from state.computed(state.beside(suspects), AGAIN_S)
        yield from state.paired(again, skip=False)
        yield from state.paired(pairing.slots_of(_slow_links(state)), skip=False)
    found = judge.judge(able, state.results(), expected_rate)
    good = [node for node, finding in found.nodes if finding.state == GOOD]
    yield from state.reached(sorted(good, key=lambda name: name != coordinator))
    rows = {one.node: one for one in state.rows(found)}
    usable = [name for name in names if rows[name].state == GOOD]
    if groups:
        yield from state.grouped(usable, group_size, [
            each for each, finding in found.links if finding.state == BROKEN], rails)
    links = tuple(Link(each, finding.state, finding.reason, dict(finding.evidence).get(
        " - ".join(each), ""), LINK_TODO) for each, finding in found.links)
    links += tuple(state.cut_ways())
    limit_from = BASELINE if judge.least(state.results(), expected_rate) > judge.least(
        state.results()) else PEERS
    return Report(tuple(rows[name] for name in names), links, tuple(state.groups), found.common,
                  rounds, state.tests, limit_from, state.pair_bytes, tuple(unlike(here)))


def unlike(here: Mapping[str, Member]) -> Iterator[Unlike]:
    """Where the nodes that came differ; a node that does not say a version differs in nothing."""
    said = {name: dict(one.versions) for name, one in here.items()}
    for what in sorted({what for one in said.values() for what in one}):
        of = {name: one[what] for name, one in said.items() if what in one}
        most, count = Counter(of.values()).most_common(1)[0]
        if count < len(of):
            clear = 2 * count > len(of)
            yield Unlike(what, most if clear else "", tuple(
                (name, which) for name, which in of.items() if not clear or which != most))


def _again(state: _State) -> pairing.Round:
    """Round two: suspects with witnesses, and once more the links that were slow between others: a
    moment's load is no fault of a link.  What is slow then is tried a third time."""
    slots = judge.next_round(state.results(), state.expected_rate)
    planned = {each for slot in slots for each in slot}
    return (*slots, *pairing.slots_of(each for each in _slow_links(state) if each not in planned))


def _slow_links(state: _State) -> list[Pair]:
    grades = judge.graded(state.results(), state.expected_rate)
    good = judge.proven(grades)
    return [each for each, grade in sorted(grades.items()) if grade == SLOW and set(each) <= good]


class _State:
    """What is known so far."""

    def __init__(self, names: Sequence[str], here: dict[str, Member],
                 absent: dict[str, str], coordinator: str, still: Iterable[str],
                 expected_rate: float) -> None:
        self.names, self.here, self.absent = names, here, absent
        self.tests = self.pair_bytes = 0
        self.expected_rate = expected_rate
        self.groups: list[Group] = []
        self._pairs: dict[Pair, Result] = {}
        self._compute: dict[str, float] = {}
        self._wrong: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._still, self._coordinator = set(still), coordinator
        # suspect -> witness -> (its rate, the witness's), at the same moment
        self._beside: dict[str, dict[str, tuple[float, float]]] = {}
        self._sharing = Counter(one.machine for one in here.values())
        self._processors = {one.machine: one.processors for one in here.values()}
        self._unreached: dict[str, list[str]] = {}
        self._answers: dict[str, str] = {}

    def results(self) -> list[Result]:
        return list(self._pairs.values())

    def _run(self, tests: Iterable[Trial]) -> Generator[tuple[Trial, ...], Outcomes, list[Outcome]]:
        """All of them, as many at once as their machines have room for."""
        found: list[Outcome] = []
        waiting = list(tests)
        while waiting:
            used: Counter[str] = Counter()
            now: list[Trial] = []
            later: list[Trial] = []
            for test in waiting:
                places = Counter(self.here[node].machine for node in test.nodes)
                if all(not used[machine] or used[machine] + count <= self._room(machine, test)
                       for machine, count in places.items()):
                    now.append(test)
                    used.update(places)
                else:
                    later.append(test)
            found += yield tuple(now)
            self.tests += len(now)
            waiting = later
        return found

    def _room(self, machine: str, test: Trial) -> int:
        """How many nodes of a machine may be at it at once."""
        return NODES_A_PROCESSOR[test.kind] * self._processors[machine]

    # ------------------------------------------------------------------------------ computing

    def computed(self, together: Iterable[tuple[str, ...]],
                 seconds: float) -> Generator[tuple[Trial, ...], Outcomes, None]:
        """Each row of nodes at the same moment; single ones as their machines have room."""
        rows = list(together)
        if all(len(row) == 1 for row in rows):
            self._compute_take((yield from self._run(self._compute_test(name, seconds)
                                                     for row in rows for name in row)))
            return
        for row in rows:
            outcomes = yield tuple(self._compute_test(name, seconds) for name in row)
            self.tests += len(row)
            self._compute_take(outcomes)
            rate = {one.test.nodes[0]: one.rate for one in outcomes if one.ok}
            if len(rate) == len(row):
                suspect, witness = row
                self._beside.setdefault(suspect, {})[witness] = rate[suspect], rate[witness]

    def _compute_test(self, name: str, seconds: float) -> Trial:
        mine = self.here[name]
        sharing = self._sharing[mine.machine]
        return Trial(COMPUTE, (name,), seconds=seconds,
                    threads=max(1, mine.processors // sharing) if sharing > 1 else 0)

    def _compute_take(self, outcomes: Outcomes) -> None:
        for one in outcomes:
            (name,) = one.test.nodes
            if not one.ran:
                self._lost(name, one)
            elif not one.ok:
                self._wrong[name] = one.error
            self._compute[name] = max(self._compute.get(name, 0.0), one.rate)

    def _lost(self, name: str, one: Outcome) -> None:
        self._gone.setdefault(name, one.error)
        if one.still:
            self._still.add(name)

    def _compute_limits(self) -> dict[str, float]:
        """By model."""
        return {model: COMPUTE_SHARE * judge.usual(
                    rate for name, rate in self._compute.items()
                    if rate and self.here[name].model == model)
                for model in {one.model for one in self.here.values()}}

    def slow_computers(self) -> list[str]:
        limits = self._compute_limits()
        return [name for name, rate in sorted(self._compute.items())
                if 0 < rate < limits[self.here[name].model]]

    def beside(self, suspects: Sequence[str]) -> list[tuple[str, str]]:
        """Each suspect with two of its kind that were fast."""
        rows = []
        for name in suspects:
            fast = [other for other, _ in sorted(self._compute.items(), key=lambda one: -one[1])
                    if other not in suspects and self.here[other].model == self.here[name].model]
            rows += [(name, other) for other in fast[:pairing.WITNESSES]]
        return rows

    def _computes(self, name: str) -> Finding | None:
        """What is wrong with how a node computes; None when nothing is."""
        if name in self._wrong:
            return Finding(BROKEN, self._wrong[name], (("computing", self._wrong[name]),))
        beside = self._beside.get(name, {})
        slower = [other for other, (own, its) in beside.items() if own < COMPUTE_SHARE * its]
        if len(slower) < pairing.WITNESSES:
            return None
        evidence = tuple((f"{name} beside {other}", f"{own / 1e9:.3g} of {its / 1e9:.3g} GFLOP/s")
                         for other, (own, its) in beside.items())
        own, its = min(beside.values(), key=lambda both: both[0] / both[1])
        return Finding(SLOW, f"it computes at {own / its:.0%} of the rate that "
                             f"{' and '.join(slower)} have at the same moment", evidence)

    # ------------------------------------------------------------------------------ pairs

    def paired(self, slots: pairing.Round,
               skip: bool) -> Generator[tuple[Trial, ...], Outcomes, None]:
        """`skip`: who failed often enough is asked no more in this round."""
        for slot in slots:
            failed = Counter(node for result in self._pairs.values() if result.ran
                             and not result.ok for node in result.pair)
            passed = {node for result in self._pairs.values() if result.ok for node in result.pair}
            tired = {node for node, count in failed.items()
                     if skip and count >= BROKEN_MOST and node not in passed}
            tests = [Trial(PAIR, each, ranks=self._ranks(each)) for each in slot
                     if not (tired | self._gone.keys()) & set(each)]
            for one in (yield from self._run(tests)):
                self._take_pair(one)

    def _ranks(self, nodes: Iterable[str]) -> int:
        """One an accelerator; nodes that have unlike many are tested with as many as each has."""
        return min(self.here[node].devices for node in nodes)

    def _take_pair(self, one: Outcome) -> None:
        if one.gone:
            self._lost(one.gone, one)
        a, b = one.test.nodes
        self.pair_bytes = max(self.pair_bytes, one.bytes)
        result = Result(pair(a, b), one.ok, one.rate, one.error, one.ran)
        old = self._pairs.get(result.pair)
        # Load makes a test slow and never fast; what failed once has failed.
        if old is None or not old.ran or old.ok and (not result.ok or result.rate > old.rate):
            self._pairs[result.pair] = result

    def reached(self, good: Sequence[str]) -> Generator[tuple[Trial, ...], Outcomes, None]:
        """Whether who did not come, or went, answers anybody who is well."""
        for witness in good[:pairing.WITNESSES]:
            lost = [name for name in (*self.absent, *self._gone) if name != witness]
            if not lost:
                return
            outcomes = yield tuple(Trial(REACH, (witness, name)) for name in lost)
            self.tests += len(outcomes)
            for one in outcomes:
                name = one.test.nodes[1]
                if one.ok:
                    self._answers.setdefault(name, witness)
                elif one.ran:
                    self._unreached.setdefault(name, []).append(witness)

    def cut_ways(self) -> Iterator[Link]:
        """Whoever answers one good node and not another, as when its link to the coordinator is
        cut: it could not come, and the link is bad."""
        for name, witness in self._answers.items():
            for other in self._unreached.get(name, ()):
                yield Link(pair(name, other), BROKEN, f"{name} answers {witness}, who is well, and "
                           f"not {other}, who is well too", "no answer", LINK_TODO)

    # ------------------------------------------------------------------------------ groups

    def grouped(self, usable: Sequence[str], size: int,
                broken: Sequence[Pair],
                rails: bool) -> Generator[tuple[Trial, ...], Outcomes, None]:
        """Within groups, across them, all together, and rail by rail; each of them apart from the
        others.  What has a broken link in it would only wait for its deadline."""
        batches: list[list[Trial]] = []
        if size > 1:
            groups = [self.names[at : at + size] for at in range(0, len(self.names), size)]
            whole = [(number, group) for number, group in enumerate(groups)
                     if set(group) <= set(usable)]
            batches.append([self._group(group, f"group {number}") for number, group in whole])
            if len(whole) > 1:
                batches.append([self._group([group[place] for _, group in whole],
                                            f"across {place}") for place in range(size)])
        if len(usable) > 1:
            batches.append([self._group(usable, "whole")])
            batches += [[Trial(GROUP, tuple(usable), f"{RAIL} {rail}", rail=rail)]
                        for rail in range(self._ranks(usable) if rails else 0)]
        for batch in batches:
            tests = []
            for test in batch:
                cut = [each for each in broken if set(each) <= set(test.nodes)]
                if cut:
                    why = f"not made: the link {' - '.join(cut[0])} is broken"
                    self.groups.append(Group(test.label, test.nodes, UNKNOWN, 0.0, why))
                else:
                    tests.append(test)
            if not tests:
                continue
            outcomes = yield tuple(tests)
            self.tests += len(tests)
            for one in outcomes:
                state = GOOD if one.ok else BROKEN if one.ran else UNKNOWN
                self.groups.append(Group(one.test.label, one.test.nodes, state, one.rate, one.error,
                                         one.table, one.bytes, one.rates))

        self._grade_rails()

    def _group(self, nodes: Sequence[str], label: str) -> Trial:
        return Trial(GROUP, tuple(nodes), label, ranks=self._ranks(nodes))

    def _grade_rails(self) -> None:
        """Against each other: a switch or a plane of the fabric that is slow for all nodes alike
        makes no pair of them slower than the others."""
        limit = judge.SLOW_SHARE * judge.usual(
            one.rate for one in self.groups if one.label.startswith(RAIL) and one.state == GOOD)
        self.groups = [replace(
            one, state=SLOW, reason=f"{amount(one.rate, 'B/s')} busbw, and the other rails' limit "
                                    f"is {amount(limit, 'B/s')}")
            if one.label.startswith(RAIL) and one.state == GOOD and one.rate < limit else one
            for one in self.groups]

    # ------------------------------------------------------------------------------ verdicts

    def rows(self, found: judge.Judgement) -> Iterator[Row]:
        limit = judge.least(self.results(), self.expected_rate)
        compute_limits = self._compute_limits()
        findings = dict(found.nodes)
        links: dict[str, list[Result]] = {name: [] for name in self.names}
        for result in self._pairs.values():
            for node in result.pair:
                links[node].append(result)
        for name in self.names:
            finding = self._finding(name, findings)
            rates = sorted(one.rate for one in links[name] if one.ok)
            model = self.here[name].model if name in self.here else ""
            partners = {node for one in links[name] for node in one.pair} - {name}
            yield Row(
                name, finding.state, finding.reason, rates[len(rates) // 2] if rates else 0.0,
                limit, self._compute.get(name, 0.0), compute_limits.get(model, 0.0),
                tuple(sorted(partners)), finding.evidence, self._todo(name, finding))

    def _finding(self, name: str, found: Mapping[str, Finding]) -> Finding:
        if name in self.absent or name in self._gone:
            why = self.absent.get(name) or self._gone[name]
            witnesses = self._unreached.get(name, [])
            if len(witnesses) >= pairing.WITNESSES:
                return Finding(BROKEN, f"{why}, and nothing answers {' or '.join(witnesses)} there",
                               tuple((f"{one} - {name}", "no answer") for one in witnesses))
            by = f"; the machine answers {self._answers[name]}" if name in self._answers else ""
            # That its network is well says the one that it stopped talking to.
            frozen = (name in self._still and not witnesses
                      and self._answers.get(name) == self._coordinator)
            return Finding(BROKEN if frozen else UNKNOWN, why + by)
        if self.here[name].error:
            return Finding(UNKNOWN, self.here[name].error)
        computes, links = self._computes(name), found[name]
        if computes is not None and WORST_FIRST.index(computes.state) <= WORST_FIRST.index(
                links.state):
            return computes
        return links

    def _todo(self, name: str, finding: Finding) -> str:
        if finding.state == GOOD:
            return ""
        if name in self._still and finding.state == BROKEN:
            return f"is {name} out of memory or processor time? If it does not come back, reboot it"
        if name in self.absent:
            return ("is it up, and in the network?" if finding.state == BROKEN else
                    "start the same command there, with the same list and token")
        if name in self._wrong:
            return f"`holdfast check tensor` on {name}; a device that differs twice is replaced"
        if name in self._beside and finding.state == SLOW and "computes" in finding.reason:
            return f"another job on {name}? then `holdfast check gemm accelerators` there"
        if finding.state == UNKNOWN:
            return "make the test again, with more nodes that are well"
        return f"leave {name} out, then `holdfast check network accelerators` there"


LINK_TODO = "cables and switch ports between them; the nodes may be used, not as neighbours"
