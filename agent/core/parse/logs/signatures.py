"""The words of log signatures: what a row of the catalogue says, and what one line came to.

Owns the names of roles, culprits and retries, and the records that reading and weighing share.
Pure data: how lines are found is agent/core/parse/logs/scan.py's, what follows is root.py's.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..neuron_codes import NONE, Codes
from .lines import NO_RANK

ROOT, CASCADE, CARRIER, TEARDOWN, SIGNAL = "root", "cascade", "carrier", "teardown", "signal"
ROLES = (ROOT, CASCADE, CARRIER, TEARDOWN, SIGNAL)
UNPLACED = "unplaced"  # an error that no rule knows: told, never blamed; no signature has it
ABOUT = "about_"  # begins the name of what is placed by the things that it names
CULPRITS = ("infra", "network", "user", "data", "storage", "policy", "unknown", "none")
RETRYABLE = ("yes", "no", "once", "elsewhere", "after_repair", "back_off", "requeue", "depends")


class Signature(NamedTuple):
    """One row of agent/catalog/log_signatures.toml."""

    id: str
    role: str
    weak: bool
    category: str
    culprit: str
    retryable: str
    pattern: re.Pattern[str]
    literals: tuple[str, ...]
    note: str = ""
    below: re.Pattern[str] | None = None  # searched in the lines below
    fatal: bool = False  # a line of it ends the process, whatever is printed later


class Catalogue(NamedTuple):
    signatures: tuple[Signature, ...]
    gates: tuple[bytes, ...]
    signal_gates: tuple[bytes, ...]
    exceptions: dict[str, str]  # last part of a class's name -> role
    cascade_text: tuple[str, ...]
    exit_codes: dict[str, str]
    nrt: Codes = NONE


class Match(NamedTuple):
    """One line that a signature knows, or the end of a traceback."""

    signature: str
    role: str
    category: str
    culprit: str
    retryable: str
    rank: int  # NO_RANK: nothing says
    text: str
    weak: bool = False
    generic: bool = False  # an error of Python's that could as well follow from another
    fields: tuple[tuple[str, str], ...] = ()
    stream: int = NO_RANK
    file: int = 0
    offset: int = 0  # bytes, of the line's begin
    number: int = 0  # of the line, from 1
    time_s: float | None = None  # its own, or that of the line with one before it
    mention: bool = False  # a line outside of tracebacks that a process outlives
    family: bool = False  # known by its family alone: by vocabulary or class, by no signature
    faint: bool = False  # by no rule: placed by the things that it names


GENERIC = ("key_or_type", "import_error", "python_exception", "file_missing")
PYTHON = Signature("python_exception", ROOT, False, "user_code", "user", "no", re.compile(""), (),
                   "An exception of the job's Python that no signature knows.")
FOLLOWS = PYTHON._replace(
    id="python_consequence", role=CASCADE, category="consequence", culprit="unknown",
    retryable="depends", note="An exception that says no more than that a peer went away.",
)
