"""What each command reads, mode by mode: whatever else is given beside it is refused.

Owns the table; nothing is accepted that is not done.  The fields of the API's bodies have the same
in agent/web/body.py.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

from holdfast.worker.exits import USAGE

from . import parser
from .text import Failure


class Mode(NamedTuple):
    chosen_by: str  # an argument, or one with its value as what=push; "": none of those above
    reads: str  # beside that
    why: str = "leave one out"  # of what excludes it


ANSWERS = {"check"}  # asks for itself: it has exit statuses of its own for a mistake
NODES = ("own token_file port join_wait deadline group_size rail force sizes ranks python config "
         "table")
ROUND = "name max_age force warm path python profile sizes ranks config"
# The first mode whose argument is given is the command's; --json is read by all that have it.
MODES: dict[str, tuple[Mode, ...]] = {
    "status": (Mode("", "run"),),
    "why": (Mode("", "node"),),
    "accept": (Mode("", ""),),
    "end": (Mode("", "run"),),
    "incidents": (
        Mode("ack", "id reason run"), Mode("label", "id reason run"),
        Mode("refused", "run", "it lists all"), Mode("asked", "run", "it lists all"),
        Mode("alerts", "run", "it lists all"), Mode("id", "all run"),
        Mode("", "all would_have run")),
    "bundle": (Mode("", "run id to reason"),),
    "ledger": (Mode("", "run"),),
    "jobs": (Mode("", "run team limit"),),
    "drift": (Mode("file", "", "each file says itself which run it is about"), Mode("", "run")),
    "verify": (Mode("", "directory"),),
    "parity": (Mode("", "first second metric within task step seed"),),
    "checkpoint": (Mode("", "what source target"),),
    "promote": (Mode("", "checkpoint target"),),
    "check": (
        Mode("list", ""), Mode("history", "name"),
        Mode("peers", NODES, "tests between nodes are made alone"),
        Mode("hostfile", NODES, "tests between nodes are made alone"),
        Mode("agent", "name reason", "the agent makes them as it is configured"),
        Mode("convention=slurm-health", "config", "it is answered from what is known"),
        Mode("convention", ROUND), Mode("", f"{ROUND} table")),
    "diagnose": (Mode("", "log config"),),
    "inject": (Mode("", "run fault rank seconds reason"),),
    "explain": (Mode("", "fault"),),
    "doctor": (Mode("", "config"),),
    "store": (Mode("", "what config"),),
    "config": (Mode("", "what config"),),
    "pause": (Mode("fleet", "for_s reason no_wait"), Mode("node", "for_s reason no_wait"),
              Mode("", "run for_s reason no_wait")),
    "resume": (Mode("fleet", "reason no_wait"), Mode("node", "reason no_wait"),
               Mode("", "run reason no_wait")),
    "restart": (Mode("", "run rank reason no_wait"),),
    "exclude": (Mode("", "node reason no_wait"),),
    "drain": (
        Mode("run", "reason no_wait", "a run is asked to save and end, and --grace of its launcher "
             "says within what time; `holdfast status` shows it"),
        Mode("no_wait", "node reason"), Mode("", "node reason within")),
    "release": (Mode("", "node reason no_wait"),),
    "close": (Mode("", "id reason no_wait"),),
    "dashboards": (
        Mode("what=render", "to runbook_base"),
        Mode("what=push", "runbook_base url token_file folder datasource dry_run diff")),
    "demo": (Mode("", "ranks steps keep"),),
}


def arguments(command: str) -> dict[str, argparse.Action]:
    """The command's own, by the name of their value."""
    configure = next(one.configure for one in parser.COMMANDS if one.name == command)
    bare = argparse.ArgumentParser(add_help=False)
    if configure is not None:
        configure(bare)
    return {one.dest: one for one in bare._actions}


def refuse(options: argparse.Namespace, code: int = USAGE) -> None:
    """Failure for the first argument that the command would pass over in silence.  One that is
    given as it is by default cannot be told from one that is not, and changes nothing either."""
    modes = MODES.get(options.command, ())
    if not modes:
        return
    known = arguments(options.command)
    given = {name for name, one in known.items()
             if getattr(options, name) not in (one.default, None, "", [])}

    def chosen(mode: Mode) -> bool:
        name, _, value = mode.chosen_by.partition("=")
        return not name or (name in given and (not value or getattr(options, name) == value))

    mode = next(filter(chosen, modes))
    read = {mode.chosen_by.partition("=")[0], *mode.reads.split()}
    wrong = next((name for name in known if name in given and name not in read), "")
    if not wrong:
        return
    flag = _label(options.command, known, wrong)
    choosers = [one for one in modes if wrong in (one.chosen_by, *one.reads.split())]
    if mode.chosen_by and not mode.chosen_by.startswith("what=") and any(
            one.chosen_by in ("", wrong) for one in choosers):
        beside = _label(options.command, known, mode.chosen_by)
        raise Failure(f"{flag} and {beside} exclude each other: {mode.why}", code)
    places = [_label(options.command, known, one.chosen_by) for one in choosers if one.chosen_by]
    raise Failure(f"{flag} belongs to {' or '.join(places)}", code)


def _label(command: str, known: dict[str, argparse.Action], chosen_by: str) -> str:
    """As a person types it."""
    name, _, value = chosen_by.partition("=")
    action = known[name]
    if value:
        return (f"{action.option_strings[-1]} {value}" if action.option_strings
                else f"`holdfast {command} {value}`")
    return (action.option_strings or [str(action.metavar or name.upper())])[-1]
