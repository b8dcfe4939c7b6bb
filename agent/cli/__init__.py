"""The command line: `holdfast COMMAND ...`.

Owns the way from argv to one function, and nothing that a function does.  Only the chosen
command's module is imported, so that `--help` and `run` start at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TextIO

RUNS = (["run"], ["train"])  # whose every end says with which code
# Commands that read their own arguments, and where they live.
OWN_PARSERS = {"agent": "holdfast.agent.__main__", "simulate": "holdfast.agent.simulate.__main__"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises for a wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = 0
    try:
        code = answered(arguments)
        return _written(code)
    except BrokenPipeError:  # `holdfast incidents | head`
        _to_nowhere(sys.stdout)
        return code
    except KeyboardInterrupt:  # also while modules are imported, so that only now this one is
        from holdfast.worker.exits import INTERRUPTED, ending

        if arguments[:1] in RUNS:
            line = ending(INTERRUPTED, "interrupted before anything was started")
            print(f"holdfast  {line}", file=sys.stderr)
        return INTERRUPTED


def _written(code: int) -> int:
    """The code, once what was printed is out: what is short leaves its buffer only now."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"holdfast: what was to be printed is lost: {error.strerror}", file=sys.stderr)
        _to_nowhere(sys.stdout)
        return code or 1
    return code


def _to_nowhere(stream: TextIO) -> None:
    """What a stream holds back that nobody takes: at the interpreter's end it would fail again."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def answered(arguments: list[str]) -> int:
    from .text import Failure, failed

    try:
        return dispatch(arguments)
    except Failure as failure:
        text = str(failure)
        if arguments[:1] in RUNS:
            from holdfast.worker.exits import ending

            text = ending(failure.code, text)
        is_tty = sys.stderr is not None and sys.stderr.isatty()
        try:
            print("\n".join(failed(text, is_tty)), file=sys.stderr)
        except OSError:  # nobody reads it: the code says it
            _to_nowhere(sys.stderr)
        return failure.code


def dispatch(arguments: list[str]) -> int:
    if arguments[:1] in RUNS:
        # Their arguments belong to the launcher, whose parser runs in the job's own Python.
        from .launch import launch

        return launch(arguments[0], arguments[1:])
    if arguments and arguments[0] in OWN_PARSERS:
        return int(import_module(OWN_PARSERS[arguments[0]]).main(arguments[1:]) or 0)
    from .parser import build, load

    parser = build()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    from . import modes

    if chosen.command not in modes.ANSWERS:
        modes.refuse(chosen)
    return load(chosen.command)(chosen)
