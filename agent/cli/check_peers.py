"""`holdfast check --peers`: the same command on each of several nodes, and what they find together.

Owns its flags' meaning and how the report reads.  The first node coordinates and prints the table;
each node ends with its own verdict's status.  The tests are agent/checks/peer_tests.py's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.agent.checks import results
from holdfast.agent.core.checks.judge import BROKEN, GOOD, SLOW
from holdfast.agent.core.checks.preflight import Group, Member, Report, Row
from holdfast.agent.core.checks.verdict import CODES, OK, WARNING, amount
from holdfast.agent.core.checks.verdict import UNKNOWN as NOT_TOLD
from holdfast.agent.peers import hosts, kept
from holdfast.agent.peers.coordinator import Plan
from holdfast.agent.peers.kept import status_of
from holdfast.agent.peers.member import Heard, attend
from holdfast.agent.peers.transport import Refused
from holdfast.agent.system import procfs
from holdfast.agent.system.regular import open_regular
from holdfast.worker.exits import NOT_KNOWN

from .live import print_json
from .text import FAINT, STYLES, Failure, Line, Span, count, field, line, seconds, show

TOKEN_VARIABLE = "HOLDFAST_CHECK_TOKEN"
TOKEN_LEAST, TOKEN_MOST = 16, 4096
INDENT = 9


def check_peers(options: argparse.Namespace, pythons: Sequence[tuple[str, str]],
                size: int, why_not: str = "") -> int:
    """`pythons`: that may have torch; `size`: of a test in bytes, 0 for the usual one; `why_not`:
    this node comes, and says why it makes no test."""
    folder = results.directory(os.environ)
    try:
        peers = hosts.peers(options.peers, options.hostfile, os.environ)
        own = hosts.own(peers, options.own, os.environ, options.peers == hosts.SLURM)
        plan = Plan(peers, token(options.token_file, os.environ), options.port, options.join_wait,
                    options.deadline, size, options.group_size,
                    options.rail, lambda model: kept.usual(folder, model, size))
        if options.group_size and len(peers) % options.group_size:
            raise ValueError(f"--group-size {options.group_size}: {len(peers)} nodes are no whole "
                             "number of such groups")
    except ValueError as error:
        raise Failure(str(error), NOT_KNOWN) from error
    name = peers[own].name
    itself = Member(name, procfs.boot_id(), len(os.sched_getaffinity(0)), error=why_not,
                    devices=options.ranks or 0)
    tell = (lambda words: None) if options.json else _tell
    try:
        heard = asyncio.run(attend(plan, own, itself, pythons, tell))
    except Refused as refused:
        raise Failure(f"{peers[0].name} refuses this node: {refused}: give every node the same "
                      "--token-file", NOT_KNOWN) from refused
    except OSError as error:
        raise Failure(f"cannot listen at {peers[own].address}:{plan.port}: "
                      f"{error.strerror or error}; give another --port to every node, or "
                      f"{name}=ADDRESS", NOT_KNOWN) from error
    not_kept = ""
    if heard.report is not None:
        made = kept.verdict(heard.report, name, status_of(heard.report, name), heard.took_s)
        not_kept = kept.keep(folder, itself.machine, made, heard.model, size)
    status = _said(heard, name, options.json, options.table)
    if not_kept and not options.json:
        _tell(f"not kept: {not_kept}")
    return status


def _tell(words: str) -> None:
    print(f"holdfast: {words}", file=sys.stderr, flush=True)


def token(file: str, environ: Mapping[str, str]) -> bytes:
    """What every node knows.  Raises ValueError that says how to give one."""
    if file:
        try:
            with open(open_regular(file), "rb") as handle:
                if stat.S_IMODE(os.fstat(handle.fileno()).st_mode) & 0o077:
                    raise ValueError(f"others may read it: chmod 600 {file}")
                found = handle.read(TOKEN_MOST + 1).strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"--token-file {file}: {error}") from error
    else:
        found = environ.get(TOKEN_VARIABLE, "").encode("utf-8", "surrogateescape").strip()
    if not TOKEN_LEAST <= len(found) <= TOKEN_MOST:
        what = f"--token-file {file}" if file else TOKEN_VARIABLE
        raise ValueError(f"{what} has {len(found)} characters: nodes prove to each other that they "
                         f"know the same {TOKEN_LEAST} or more. Before srun: "
                         f"export {TOKEN_VARIABLE}=$(openssl rand -hex 16)")
    return found


def _said(heard: Heard, own: str, json: bool, tables: bool) -> int:
    """Prints what this node prints, and returns its status."""
    if heard.report is None:
        if json:
            print_json({"node": own, "status": NOT_TOLD, "reason": heard.problem})
        else:
            show([line(Span(NOT_TOLD, STYLES[NOT_TOLD]), f": {own}: {heard.problem}")])
        return CODES[NOT_TOLD]
    report = heard.report
    status = status_of(report, own)
    if json:
        print_json({"node": own, "status": status, "took_s": heard.took_s, "torch": heard.torch,
                    "coordinator": heard.coordinator, **msgspec.to_builtins(report)})
    elif heard.coordinator == own:
        show(lines(report, heard.took_s, tables))
    else:
        mine = next(one for one in report.rows if one.node == own)
        show([line(Span(status.ljust(INDENT), STYLES[status]),
                   f"{own}: {mine.reason} (the table is {heard.coordinator}'s)")])
    return CODES[status]


def lines(report: Report, took_s: float, tables: bool) -> list[Line]:
    """The table of nodes, then links and groups, then one line about all."""
    found: list[Line] = [line(Span(f"tests between {count(len(report.rows), 'node')}", FAINT))]
    for row in report.rows:
        found += _node(row, status_of(report, row.node), report.limit_from)
    for link in report.links:
        found += [line(Span(WARNING.ljust(INDENT), STYLES[WARNING]),
                       f"link {' - '.join(link.nodes)}: {link.state}, {link.evidence}"),
                  *field("", link.reason, INDENT), *field("", f"do: {link.todo}", INDENT)]
    for group in report.groups:
        found += _group(group, tables)
    for one in report.drift:
        others = f", most have {one.most}" if one.most else ""
        words = ", ".join(f"{node} has {which}" for node, which in one.nodes[:8])
        found += [line(Span(WARNING.ljust(INDENT), STYLES[WARNING]),
                       f"{one.what} is not the same everywhere"),
                  *field("", f"{words}{others}", INDENT)]
    by: dict[str, int] = {}
    for row in report.rows:
        by[row.state] = by.get(row.state, 0) + 1
    parts = ", ".join(f"{number} {state}" for state, number in by.items())
    rounds = count(report.rounds, "round")
    found += [(), line(f"{parts}; {report.tests} tests in {rounds}, {seconds(took_s)}")]
    return found + ([line(report.common)] if report.common else [])


def _node(row: Row, status: str, limit_from: str) -> list[Line]:
    rate = amount(row.rate, "B/s") if row.rate else ""
    limit = f">= {amount(row.limit, 'B/s')} {limit_from}" if row.rate and row.limit else ""
    compute = amount(row.compute, "FLOP/s") if row.compute else ""
    found = [line(Span(status.ljust(INDENT), STYLES[status]), row.node.ljust(14),
                  f"{rate:>11}  ", Span(f"{limit:20}", FAINT), f"{compute:>14}")]
    found += field("", Span(row.reason, FAINT if status == OK else ""), INDENT)
    if row.state != GOOD:
        for what, words in row.evidence[:4]:
            found += field("", Span(f"{what}: {words}", FAINT), INDENT)
        found += field("", f"do: {row.todo}", INDENT)
    return found


def _group(group: Group, tables: bool) -> list[Line]:
    status = {GOOD: OK, SLOW: WARNING, BROKEN: WARNING}.get(group.state, NOT_TOLD)
    words = (f"all-reduce at {amount(group.rate, 'B/s')} busbw, every operation exact"
             if group.state == GOOD else group.reason)
    found = [line(Span(status.ljust(INDENT), STYLES[status]),
                  f"{group.label}: {count(len(group.nodes), 'node')}")]
    found += field("", Span(words, FAINT if status == OK else ""), INDENT)
    return found + ([line(one) for one in group.table] if tables else [])


