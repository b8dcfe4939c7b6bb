"""Exit codes: what a command's status tells whoever started it.

Owns the one table.  Every command takes its numbers from here; its help and docs/exit-codes.md are
made from the same rows.  It lies in worker/ since nothing else may be imported both by the
launcher, in the job's Python, and by everybody else.  Decides nothing: not which code applies.
"""

from __future__ import annotations

import textwrap
from typing import Dict, NamedTuple, Tuple

DONE = 0
FAILED = 1  # it could not be done, or what was looked for is not there
USAGE = 2  # the command line was not understood, or a file that it names cannot be read
BAD_CHECKPOINT = 2
NOT_KNOWN = 3  # neither yes nor no can be said
RETRY = 75  # EX_TEMPFAIL of sysexits.h: the same again may work, elsewhere
BUDGET_SPENT = 76
CONFIGURATION = 78  # EX_CONFIG
NOT_EXECUTABLE = 127  # as a shell says it
SIGNAL_BASE = 128  # plus the signal's number
INTERRUPTED = 130  # SIGINT's

OURS = (RETRY, BUDGET_SPENT, CONFIGURATION)  # a scheduler acts on these: no script's own may pass


class Row(NamedTuple):
    """One status, or a range of them, and what it means."""

    code: str
    meaning: str


def row(code: int, meaning: str) -> Row:
    return Row(str(code), meaning)


_RUN = (
    row(DONE, "every rank ended well"),
    Row("the script's", "the script is at fault, by exception or by its own exit status; its own "
        "%d, %d and %d become %d" % (*OURS, FAILED)),
    row(RETRY, "try again, elsewhere: a check refused this node, preempted (SIGTERM, SIGQUIT, "
        "SIGUSR1, SIGUSR2), drained, the terminal was closed (SIGHUP), or the machine refused "
        "processes or files, or does not answer for the configuration"),
    row(BUDGET_SPENT, "the restarts are used up, and not by the script's fault, or every "
        "checkpoint was put aside as bad"),
    row(CONFIGURATION, "flags, settings or files are wrong, or the agent refuses this run"),
    row(NOT_EXECUTABLE, "the command of --no-python cannot be executed"),
    row(INTERRUPTED, "interrupted by Ctrl-C (SIGINT): the ranks had their grace; a second one ends "
        "at once"),
    Row("%d + n" % SIGNAL_BASE, "a rank died of signal n"),
)
_ASK = (
    row(DONE, "answered"), row(FAILED, "no agent answers, or it has no such run, node or incident"),
)
_HAND = (
    row(DONE, "the agent took it and wrote it down"),
    row(FAILED, "no agent answers, the choice is not clear, or the agent refuses"),
)
EVERYWHERE = (
    row(USAGE, "the command line was not understood (run and train: %d)" % CONFIGURATION),
    row(INTERRUPTED, "interrupted"),
)
EXITS: Dict[str, Tuple[Row, ...]] = {
    "run": _RUN,
    "train": _RUN,
    "agent": (
        row(DONE, "ended on a signal, or with the run that it served"),
        row(FAILED, "a crash of ours, a place that cannot be used, or a private agent to which no "
            "launcher came"),
        row(CONFIGURATION, "configuration, runbook, journal or store is not as it must be"),
    ),
    "accept": (
        row(DONE, "ended on a signal, and what it had started has ended"),
        row(FAILED, "no node's agent answers, or another one of the same user is here"),
    ),
    "end": (
        row(DONE, "told to end, wherever it goes on"),
        row(FAILED, "no node has a launcher of yours of it, or no agent answers"),
    ),
    "status": _ASK,
    "why": _ASK,
    "incidents": _ASK,
    "bundle": _ASK,
    "ledger": _ASK,
    "verify": (
        row(DONE, "every byte is proven"), row(FAILED, "there is no checkpoint"),
        row(BAD_CHECKPOINT, "a checkpoint is bad"),
    ),
    "parity": (
        row(DONE, "within the margin"), row(FAILED, "outside of it"),
        row(USAGE, "there is no evaluation, not of the same pairs, or both are the same one"),
        row(NOT_KNOWN, "too few pairs to tell"),
    ),
    "checkpoint": (
        row(DONE, "written, whole"), row(FAILED, "torch is needed, and not installed"),
        row(BAD_CHECKPOINT, "what was named is no checkpoint or no file of weights, or it cannot "
            "be written"),
    ),
    "promote": (
        row(DONE, "it is there, whole"), row(FAILED, "it cannot be read or written"),
        row(BAD_CHECKPOINT, "refused: every reason is named"),
    ),
    "check": (
        row(DONE, "every check passed"),
        row(FAILED, "a warning; with --for: a critical that came twice in a row, while no breaker "
            "is open, and all else is %d" % DONE),
        row(USAGE, "a critical, or the command line was not understood"),
        row(NOT_KNOWN, "nothing worse than unknown; a name, size, profile or setting is "
            "wrong, or an argument is read by nobody"),
    ),
    "diagnose": (
        row(DONE, "a root cause was found"), row(FAILED, "none was found"),
        row(USAGE, "no log can be read"), row(CONFIGURATION, "the catalogue of signatures is bad"),
    ),
    "jobs": (row(DONE, "told"), row(FAILED, "there are none, or no agent answers")),
    "drift": (
        row(DONE, "all nodes are the same, or there is only one"), row(FAILED, "some differ"),
        row(USAGE, "a file is not what `holdfast drift --json` says"),
        row(NOT_KNOWN, "not every node is known and none differs, or no agent answers"),
    ),
    "inject": _HAND,
    "pause": _HAND,
    "close": _HAND,
    "resume": _HAND,
    "restart": _HAND,
    "exclude": _HAND,
    "drain": _HAND,
    "release": _HAND,
    "explain": (
        row(DONE, "explained"), row(FAILED, "there is no such fault"),
        row(CONFIGURATION, "configuration or a runbook is bad"),
    ),
    "doctor": (
        row(DONE, "a job can run here"), row(FAILED, "something is missing that every job needs"),
    ),
    "store": (
        row(DONE, "the agents of this node may use it, or it was done"),
        row(FAILED, "they may not, or it was not: the problem is said"),
        row(CONFIGURATION, "configuration is bad, or names no store for many nodes"),
    ),
    "config": (
        row(DONE, "good"), row(FAILED, "a file system that it reads from does not answer"),
        row(CONFIGURATION, "bad: every error is told"),
    ),
    "dashboards": (
        row(DONE, "written, or nothing differs"),
        row(FAILED, "it cannot be written there, or Grafana does not take it"),
        row(CONFIGURATION, "configuration or a runbook is bad"),
    ),
    "simulate": (row(DONE, "every invariant held over every seed"), row(FAILED, "one did not")),
    "demo": (row(DONE, "everything that had to hold held"), row(FAILED, "something did not")),
}


def ending(code: int, why: str) -> str:
    """What the last line of `run` and `train` says, whoever says it."""
    return "ends with code %d: %s" % (code, why)


def told(command: str, width: int = 79) -> str:
    """The rows of one command as the last paragraph of its help; "" for one without rows, which a
    test finds: it is no reason for every other command to fail."""
    rows = "; ".join("%s: %s" % one for one in EXITS.get(command, ()))
    return textwrap.fill("exit codes: %s." % rows, width) if rows else ""
