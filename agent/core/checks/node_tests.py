"""What tests between the nodes of a run found, as every node of the run reads it in the store.

Owns the document tested/NODE, written by who led such tests, and what follows from it for a start:
whom it leaves out and in which words, and which end of a broken link.  How nodes are paired and
judged is preflight.py's.  What is unknown leaves out nobody.  Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from ..model import UNREADABLE, Doc, Documents, Settings, Value, node_subject
from ..nodes import breaker
from .judge import BROKEN, SLOW, UNKNOWN
from .pairing import Pair
from .preflight import Report, Row
from .verdict import amount

KIND = "tested"
PREFIX = f"{KIND}/"
PEERS = "peers"  # the check that all of this is, as people and --ignore-check name it
KEPT_MAX = 4  # reports of one leader: it may lead several runs
NAMED_MAX = 64  # nodes, links and sentences that are kept of one report
TEXT_MAX = 300
EVIDENCE_SHOWN = 3


class Hurt(Value, frozen=True):
    """A node that is slow or broken by others' word."""

    node: str
    state: str
    reason: str  # with what its tests gave
    todo: str
    evidence: tuple[tuple[str, str], ...] = ()
    version: int = -1  # of the node's document then: who takes an exclusion back writes a later one


class BadLink(Value, frozen=True):
    nodes: Pair
    state: str
    reason: str


class Found(Value, frozen=True):
    """What one round of tests found.  A node of `nodes` that is named nowhere is well."""

    nodes: tuple[str, ...] = ()  # who was asked
    wall_s: float = 0.0  # when it ended
    hurt: tuple[Hurt, ...] = ()
    links: tuple[BadLink, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()  # (node, why)
    notes: tuple[str, ...] = ()  # of groups and versions, and of a cause in common
    problem: str = ""  # why nothing was found
    took_s: float = 0.0
    suspects: tuple[str, ...] = ()  # made for their sake between two generations; () = for a start


def found_of(report: Report, took_s: float = 0.0) -> Found:
    """What of a report concerns a start."""
    bad = [row for row in report.rows if row.state in (SLOW, BROKEN)]
    silent = [(row.node, row.reason[:TEXT_MAX]) for row in report.rows if row.state == UNKNOWN]
    # Who is named nowhere is well: beyond what is told of each, the name alone stays.
    rest = [(row.node, "") for row in bad[NAMED_MAX:]] + [
        (node, "") for node, _ in silent[NAMED_MAX:]]
    return Found(
        hurt=tuple(Hurt(row.node, row.state, _reason(row), row.todo[:TEXT_MAX], tuple(
            (what, gave[:TEXT_MAX]) for what, gave in row.evidence[:EVIDENCE_SHOWN]))
            for row in bad[:NAMED_MAX]),
        links=tuple(BadLink(one.nodes, one.state, f"{one.reason} ({one.evidence})"[:TEXT_MAX])
                    for one in report.links[:NAMED_MAX]),
        unknown=(*silent[:NAMED_MAX], *rest), notes=tuple(_notes(report))[:NAMED_MAX],
        took_s=took_s)


def with_versions(found: Found, docs: Documents) -> Found:
    """With the versions that the documents of who is hurt have now."""
    return replace(found, hurt=tuple(
        replace(one, version=docs.get(node_subject(one.node)).version) for one in found.hurt))


def with_away(found: Found, away: Mapping[str, str]) -> Found:
    """With who took no part, and why: unknown.  Who is named nowhere is well, so that of many the
    name alone stays."""
    told = list(away.items())
    rest = ((name, "") for name, _ in told[NAMED_MAX:])
    return replace(found, unknown=(*found.unknown, *told[:NAMED_MAX], *rest))


def _reason(row: Row) -> str:
    shown = [f"{what}: {words}" for what, words in row.evidence[:EVIDENCE_SHOWN]]
    if row.state == SLOW and row.rate and row.rate < row.limit:
        shown.append(f"well is {amount(row.limit, 'B/s')} or more")
    return f"{row.reason} ({'; '.join(shown)})"[:TEXT_MAX] if shown else row.reason[:TEXT_MAX]


def _notes(report: Report) -> Iterator[str]:
    if report.common:
        yield report.common[:TEXT_MAX]
    for group in report.groups:
        if group.state != "good":
            yield f"{group.label} of {len(group.nodes)} nodes: {group.state}, {group.reason}"[
                :TEXT_MAX]


def read(doc: Doc) -> tuple[Found, ...]:
    """Nothing for an absent or unreadable body: content of the store is input from outside."""
    try:
        return msgspec.json.decode(doc.body, type=tuple[Found, ...]) if doc.body else ()
    except UNREADABLE:
        return ()


def read_found(text: str) -> Found | None:
    """What the agent said of the tests that it arranged."""
    try:
        return msgspec.json.decode(text, type=Found) if text else None
    except UNREADABLE:
        return None


def written(known: Sequence[Found], found: Found) -> bytes:
    """The document once it holds this as well."""
    return msgspec.json.encode((*known, found)[-KEPT_MAX:])


def reports(docs: Documents) -> list[Found]:
    """All that the store has, the oldest first."""
    rows = (one for _, doc in docs.of(KIND) for one in docs.decoded(doc.key, read))
    return sorted(rows, key=lambda one: one.wall_s)


def is_fresh(found: Found, wall_s: float, max_age_s: float) -> bool:
    # One of the future is of a clock that was set back.
    return 0.0 <= wall_s - found.wall_s <= max_age_s


def left_out(known: Iterable[Found], settings: Settings) -> tuple[dict[str, Hurt], str]:
    """(node -> why it takes no ranks, by the newest tests that it took part in; or why none of
    those who are hurt is left out).  `known`: the oldest first."""
    out: dict[str, Hurt] = {}
    common = ""
    for one in known:
        for node in out.keys() & proven(one):
            del out[node]
        names = tuple(hurt.node for hurt in one.hurt)
        is_open, why = breaker.is_open({PEERS: names}, PEERS, len(one.nodes), settings)
        common = why if is_open else ""
        if not is_open:
            out |= {hurt.node: hurt for hurt in one.hurt}
    return out, common


def proven(found: Found) -> set[str]:
    """Of whom these tests say what they are: what was known of the others stands."""
    return set(found.nodes) - {node for node, _ in found.unknown}


def words(hurt: Hurt) -> str:
    """As a node's gate, and who leads, say it."""
    return f"check {PEERS}: {hurt.reason}"


def ends(known: Iterable[Found], nodes: Sequence[str]) -> dict[str, str]:
    """Node -> why, of so few of these that no broken link is left among the others.  Both ends of
    such a link are well: it goes who has more of them, and of two alike the later one."""
    newest: dict[Pair, str] = {}
    for one in known:
        tested = proven(one)
        newest = {pair: why for pair, why in newest.items() if not tested.issuperset(pair)}
        newest |= {link.nodes: link.reason for link in one.links if link.state == BROKEN}
    cut = {pair: why for pair, why in newest.items() if set(pair) <= set(nodes)}
    found: dict[str, str] = {}
    while cut:
        load = Counter(node for pair in cut for node in pair)
        node = max(load, key=lambda name: (load[name], nodes.index(name)))
        (other, why) = next(((a if b == node else b), text) for (a, b), text in cut.items()
                            if node in (a, b))
        found[node] = f"check {PEERS}: its link to {other}, which takes part, is broken: {why}"
        cut = {pair: text for pair, text in cut.items() if node not in pair}
    return found


def answers(found: Found, nodes: Iterable[str]) -> bool:
    """Whether nothing about these is hurt or unknown, nor a link between two of them broken, so
    that a start needs no test of them."""
    asked = set(nodes)
    named = {hurt.node for hurt in found.hurt} | {node for node, _ in found.unknown}
    cut = any(link.state == BROKEN and asked.issuperset(link.nodes) for link in found.links)
    return asked <= set(found.nodes) and not asked & named and not cut


def sentence(found: Found, out: Mapping[str, str]) -> str:
    """What a person is told of these tests beside the nodes that are left out; "" for nothing.
    `out`: who of the ends of a broken link takes no ranks."""
    if found.problem:
        return f"tests between its nodes came to no result, and it starts: {found.problem}"
    told = []
    for link in found.links:
        one = next((node for node in link.nodes if node in out), "")
        spared = "both take part, since none is to spare" if link.state == BROKEN else (
            "both take part")
        then = f"{one} takes no ranks" if one else spared
        told.append(f"link {' - '.join(link.nodes)} is {link.state}, {then}: {link.reason}")
    told += [f"{node} is unknown, and takes part: {why}" for node, why in found.unknown
             if why and why not in found.notes]
    told += found.notes
    return f"tests between its nodes: {'; '.join(told)}" if told else ""
