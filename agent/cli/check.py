"""`holdfast check`: proves a node before training, and says what is wrong and what to do.

Owns how a round is asked for and how its verdicts read; agent/checks runs them.  With `--for`, the
exit status is the scheduler's convention: whatever goes wrong here besides a confirmed critical
ends with 0 and a sentence, since a Slurm Prolog that fails drains the node and holds the job.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.agent.actions.schedulers import slurm
from holdfast.agent.checks import results, table
from holdfast.agent.config import load
from holdfast.agent.core.checks.verdict import (
    BASELINE,
    FLEET,
    MEASURED,
    OK,
    PROFILE,
    SLURM_HEALTH,
    SLURM_PROLOG,
    UNKNOWN,
    CheckVerdict,
    amount,
    exit_code,
    worst,
)
from holdfast.agent.system import procfs
from holdfast.worker.exits import NOT_KNOWN

from . import modes
from .client import TIMEOUT_S, reach
from .launch import job_python
from .text import FAINT, STYLES, Failure, Line, Span, count, field, line, seconds, show

if TYPE_CHECKING:
    from holdfast.agent.checks.runner import Wanted

INDENT = 9
FRESH_S = 300.0  # what a scheduler asks for may be this old, and is made anew in the background
HEALTH_S = 0.7  # an agent that says nothing by then is not waited for where it must be quick
STALE_S = 3600.0  # what is older is not known any more
PROLOG_WAIT_S = 3.0  # the Prologs of a job's nodes look at the same moment
JITTER_S = 60.0  # HealthCheckProgram runs on all nodes at once
READ = ("path", "sizes", "ranks")  # by some checks
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
SIZE_MAX = 1 << 38
OTHER_QUESTIONS = ("list", "history", "peers", "hostfile", "agent")  # that no scheduler asks
LIKE = {BASELINE: "its passes baseline", FLEET: "other nodes fleet"}


def check(options: argparse.Namespace) -> int:
    try:
        try:
            modes.refuse(options, NOT_KNOWN)
        except Failure as failure:
            if any(getattr(options, one) for one in OTHER_QUESTIONS):
                raise
            _passed_over(options, failure)
        return _asked(options)
    except Failure as failure:
        if not options.convention:
            raise
        print(f"holdfast: unknown: {failure}", file=sys.stderr)
        return 0


def _passed_over(options: argparse.Namespace, failure: Failure) -> None:
    """What was asked beside the checks and is not read: a person hears of it instead of the checks,
    a scheduler beside them, since a gate must not open for a word too many."""
    if not options.convention:
        raise failure
    print(f"holdfast: passed over: {failure}", file=sys.stderr)


def _asked(options: argparse.Namespace) -> int:
    if options.list:
        return _list(options.json)
    if options.history:
        return _history(options)
    if options.peers or options.hostfile:
        return _peers(options)
    if options.agent:
        from . import control

        return control.check(options)
    try:
        return _health(options) if options.convention == SLURM_HEALTH else _round(options)
    except BrokenPipeError:  # `holdfast check | head`: the checks were made
        raise
    except OSError as error:
        raise Failure(f"not checked: {error}", NOT_KNOWN) from error


def _peers(options: argparse.Namespace) -> int:
    from . import check_peers  # half of the start of a check on this node alone

    try:
        sizes = [_size(word) for word in options.sizes.split(",")] if options.sizes else [0]
    except ValueError as error:
        raise Failure(str(error), NOT_KNOWN) from error
    if len(sizes) > 1:
        raise Failure(f"--sizes {options.sizes}: tests between nodes have one size: give one",
                      NOT_KNOWN)
    named = options.python or _configuration(options.config).checks.python
    busy = [] if options.force else _training(_agents()[0])
    why = f"{', '.join(busy)} trains here, and would be disturbed: --force" if busy else ""
    return check_peers.check_peers(options, pythons(named, os.environ), sizes[0], why)


# ------------------------------------------------------------------------------------ a round


def _print_json(value: Any) -> None:
    from .live import print_json  # with the incidents' history, which a check reads nothing of

    print_json(value)


def _round(options: argparse.Namespace) -> int:
    # Collectors and all: a third of the start of who is answered from the cache.
    from holdfast.agent.checks.runner import Runner

    wanted, breaker_open = wanted_of(options, os.environ)
    runner = Runner(wanted)
    verdicts: list[CheckVerdict] = []
    quiet = options.json or options.convention
    if not quiet:
        show([line(Span(f"checks of {wanted.facts.node}", FAINT))])
    begun_s = time.monotonic()
    progress = not quiet and sys.stdout.isatty()
    _progress(progress, 0, len(wanted.checks))
    for verdict in runner.run():
        verdicts.append(verdict)
        if not quiet:
            _progress(progress)
            tables = bool(options.name or options.table)
            show(row(verdict, time.time(), tables, said_before(verdict, verdicts[:-1])))
            _progress(progress, len(verdicts), len(wanted.checks))
    _progress(progress)
    notes = [runner.torch] if runner.torch else []
    notes += [f"not kept: {runner.not_kept}"] if runner.not_kept else []
    if options.json:
        _print_json({"node": wanted.facts.node, "status": worst(one.status for one in verdicts),
                     "torch": runner.torch, "breaker_open": breaker_open,
                     "checks": [msgspec.to_builtins(one) for one in verdicts]})
    elif options.convention:
        print(in_a_line(verdicts))
    else:
        show(summary(verdicts, time.monotonic() - begun_s, notes))
    if options.convention == SLURM_PROLOG and slurm.NODE in os.environ:
        return _in_slurm(options, verdicts, breaker_open)
    return exit_code(verdicts, options.convention or "", breaker_open)


def _progress(shown: bool, made: int = 0, of: int = 0) -> None:
    """A line for a person that waits, which the next one takes the place of; with nothing to say,
    it is taken away."""
    if shown:
        text = f"{made} of {of} checks made; torch, where they need it, takes a second or two"
        print(f"\r{text if of else ''}\x1b[K\r", end="", flush=True)


def wanted_of(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[Wanted, bool]:
    """What the command line, the configuration and the agents ask for, and whether a breaker is
    open.  Raises Failure with what to give instead."""
    from holdfast.agent.checks import profiles
    from holdfast.agent.checks.facts import Facts, faults_in, profile_of, roots_of
    from holdfast.agent.checks.runner import Wanted

    loaded = _configuration(options.config)
    settings, places = loaded.checks, loaded.collectors
    try:
        named = table.chosen(tuple(options.name))
        checks = table.compiled(named) if options.warm else named
        profile = profiles.chosen(options.profile or settings.profile)
        limits = table.limits_of(settings.limits)
        sizes = [_size(word) for word in options.sizes.split(",")] if options.sizes else []
    except ValueError as error:
        raise Failure(str(error), NOT_KNOWN) from error
    unread = table.unread(named, [one for one in READ if getattr(options, one)])
    if unread:
        _passed_over(options, Failure(unread, NOT_KNOWN))
    statuses, no_agent = _agents()
    node = loaded.agent.node or socket.gethostname()
    roots = roots_of(places)
    facts = Facts(node, roots, statuses[0] if statuses else None, no_agent,
                  profile or profile_of(roots), (*settings.paths, *options.path),
                  _drift() if statuses and table.BY_NAME["drift"] in checks else None,
                  tuple(sizes), faults_in(statuses[0] if statuses else None))
    wanted = Wanted(
        checks, facts, results.directory(environ), procfs.boot_id(), bool(options.name),
        pythons(options.python or settings.python, environ), _training(statuses), options.force,
        options.max_age if options.max_age is not None else FRESH_S if options.convention else 0.0,
        limits, {"sizes": sizes, "ranks": options.ranks, "warm": options.warm},
        bool(options.convention),
        bool(options.profile or options.ranks or sizes or options.warm),
    )
    return wanted, any(one.get("breaker_open") is True for one in statuses)


def _configuration(named: str | None) -> Any:
    file = Path(named) if named else load.DEFAULT_FILE
    if not named and not file.is_file():
        return load.load(None).config
    try:
        return load.load(file).config
    except load.ConfigError as error:
        raise Failure("\n  ".join(error.errors), NOT_KNOWN) from error


def _size(word: str) -> int:
    """4096, 64K, 1M, 8G."""
    text = word.strip().lower().removesuffix("b").removesuffix("i")
    number, unit = text.rstrip("kmg"), text[len(text.rstrip("kmg")):]
    size = int(number) * UNITS[unit] if number.isdecimal() and unit in UNITS else 0
    if not 8 <= size <= SIZE_MAX:
        raise ValueError(f"--sizes: {word!r}: give sizes such as 64K,1M,1G, from 8 bytes on")
    return size


def _agents(timeout_s: float = TIMEOUT_S) -> tuple[list[dict[str, Any]], str]:
    """The status of every agent here, or why there is none."""
    try:
        return [status for _, status in reach(timeout_s=timeout_s)], ""
    except Failure as failure:
        return [], str(failure).split("\n")[0]


def _drift() -> dict[str, Any] | None:
    """What an agent here knows of this node beside the others."""
    try:
        agent, _ = reach()[0]
        found = agent.get("/api/v1/drift")
    except (Failure, OSError):
        return None
    return found if isinstance(found, dict) else None


def _training(statuses: Iterable[Mapping[str, Any]]) -> list[str]:
    return [str(run["run"]) for status in statuses for run in status["runs"]
            if run.get("state") not in ("done", "launcher lost")]


def pythons(named: str, environ: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    from holdfast.agent.checks.round import pythons as candidates

    try:
        return candidates(named, [job_python([], environ)], environ)
    except Failure:  # an environment that is no more
        return candidates(named, [], environ)


# ------------------------------------------------------------------------------- from the cache


def _health(options: argparse.Namespace) -> int:
    """For HealthCheckProgram, which is killed after 60 s: what is known, at once; what is old is
    made anew in the background, each node at its own time."""
    known = results.load(results.directory(os.environ))
    now_s = time.time()
    here = [one for one in known.verdicts.values() if known.boot_id == procfs.boot_id()
            and 0 <= now_s - one.wall_s <= STALE_S]
    quiet = [one.name for one in table.CHECKS if not one.disturbs and not one.needs]
    ages_s = [now_s - one.wall_s for one in here if one.check in quiet]
    if not ages_s or max(ages_s) > FRESH_S:
        _refresh(options, quiet)
    if options.json:
        _print_json({"status": worst(one.status for one in here) if here else UNKNOWN,
                     "checks": [msgspec.to_builtins(one) for one in here]})
    else:
        print(in_a_line(here))
    statuses, _ = _agents(HEALTH_S)
    breaker_open = any(one.get("breaker_open") is True for one in statuses)
    if slurm.NODE in os.environ:  # which takes no notice of the exit status
        return _in_slurm(options, here, breaker_open)
    return exit_code(here, options.convention, breaker_open)


def _in_slurm(options: argparse.Namespace, verdicts: Sequence[CheckVerdict],
              breaker_open: bool) -> int:
    """Drains this node, or gives it back; 1 for a node that must get no job."""
    if breaker_open:
        print("holdfast: the breaker is open: no node is drained", file=sys.stderr)
        return 0
    config, prolog = _configuration(options.config), options.convention == SLURM_PROLOG
    wait_s = config.checks.drain_after_s
    node = slurm.Slurm(results.directory(os.environ), min(PROLOG_WAIT_S, wait_s) if prolog
                       else wait_s, config.checks.drain_share, config.core_settings(), os.environ)
    rows = list(table.BY_NAME)  # so that nodes with the same name the same one of several
    ordered = sorted((one for one in verdicts if one.check in rows),
                     key=lambda one: rows.index(one.check))
    refused, said = node.settle(ordered, prolog)
    if said:
        print(f"holdfast: {said}", file=sys.stderr)
    return int(refused)


def _refresh(options: argparse.Namespace, quiet: Sequence[str]) -> None:
    """The checks that disturb nobody, later, by nobody's child."""
    words = [sys.executable, "-P", "-m", "holdfast.agent.cli", "check", *quiet, "--for", "batch",
             "--max-age", "0"]
    words += ["--config", options.config] if options.config else []
    later = ["/bin/sh", "-c", 'sleep "$0"; exec "$@"', f"{random.uniform(0, JITTER_S):.1f}", *words]
    subprocess.Popen(later, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL, start_new_session=True)


# ------------------------------------------------------------------------------- how it reads


def said_before(verdict: CheckVerdict, before: Sequence[CheckVerdict]) -> str:
    """The check that had the same to say, and to do: five lack one torch."""
    return next((one.check for one in before if verdict.todo
                 and (one.reason, one.todo) == (verdict.reason, verdict.todo)), "")


def row(
    verdict: CheckVerdict, now_s: float, tables: bool, same_as: str = ""
) -> list[Line]:
    """One check: status, name, value and limit, time; below it the reason and what to do, or the
    check that said the same."""
    value = amount(verdict.value, verdict.unit) if verdict.value is not None else ""
    limit = ""
    if verdict.value is not None:
        limit = ("no limit known" if verdict.limit is None
                 else f"like {LIKE[verdict.limit_from]}" if verdict.limit_from in MEASURED
                 else f">= {amount(verdict.limit, verdict.unit)} {verdict.limit_from}")
    age_s = now_s - verdict.wall_s
    took = seconds(verdict.took_s) if age_s < 2.0 else f"{seconds(age_s)} ago"
    head = line(Span(verdict.status.ljust(INDENT), STYLES[verdict.status]),
                verdict.check.ljust(18), f"{value:>12}  ", Span(f"{limit:25}", FAINT),
                Span(f"{took:>13}", FAINT))
    if same_as:
        return [head, *field("", f"as {same_as}", INDENT)]
    found = [head, *field("", Span(verdict.reason, "" if verdict.status != OK else FAINT), INDENT)]
    if verdict.limit_from == PROFILE and verdict.status != OK:
        found += field("", Span(f"limit: {verdict.limit_source}", FAINT), INDENT)
    if verdict.todo:
        found += field("", f"do: {verdict.todo}", INDENT)
    if tables:
        found += [line(one) for one in verdict.table]
    return found


def summary(verdicts: Sequence[CheckVerdict], took_s: float, notes: Sequence[str]) -> list[Line]:
    by = {status: sum(one.status == status for one in verdicts) for status in STYLES}
    parts = [f"{number} {status}" for status, number in by.items() if number] or ["no check made"]
    status = worst(one.status for one in verdicts)
    return [(), line(Span(status, STYLES[status]), f": {', '.join(parts)}, in {seconds(took_s)}"),
            *(one for note in notes for one in field("", Span(note, FAINT), 2))]


def in_a_line(verdicts: Sequence[CheckVerdict]) -> str:
    """For a scheduler's log."""
    if not verdicts:
        return "holdfast: unknown: nothing was checked yet"
    status = worst(one.status for one in verdicts)
    bad = [one for one in verdicts if one.status != OK]
    whys = "; ".join(f"{one.check} {one.status}: {one.reason}" for one in bad)
    return f"holdfast: {status}: {whys or count(len(verdicts), 'check') + ' passed'}"[:2000]


def _list(json: bool) -> int:
    rows = [one._asdict() for one in table.CHECKS]
    if json:
        _print_json(rows)
        return 0
    for one in table.CHECKS:
        when = ", ".join(one.when) + ("; disturbs training" if one.disturbs else "")
        needs = f"; needs {', '.join(one.needs)}" if one.needs else ""
        show([line(Span(one.name)), *field("", one.proves, 4),
              *field("", Span(f"{one.scope}, {when}{needs}, within {one.deadline_s:g} s", FAINT),
                     4)])
    return 0



def _history(options: argparse.Namespace) -> int:
    """What checks said before, oldest first."""
    try:
        names = [one.name for one in table.chosen(tuple(options.name))] if options.name else []
    except ValueError as error:
        raise Failure(str(error), NOT_KNOWN) from error
    known = results.load(results.directory(os.environ)).history
    found = {name: known[name] for name in names or table.BY_NAME if known.get(name)}
    if options.json:
        _print_json({name: [msgspec.to_builtins(one) for one in past]
                     for name, past in found.items()})
        return 0
    for name, past in found.items():
        show([line(Span(name)), *(
            line("    ", Span(one.status.ljust(INDENT), STYLES[one.status]),
                 amount(one.value, one.unit).rjust(12) if one.value is not None else " " * 12,
                 "  ", Span(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one.wall_s))}, "
                            f"{seconds(max(0.0, time.time() - one.wall_s))} ago", FAINT))
            for one in past)])
    for name in names:
        if name not in found:
            print(f"{name} was never made here")
    if not names and not found:
        print("no check was made here yet")
    return 0
