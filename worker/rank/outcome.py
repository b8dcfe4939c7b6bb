"""How a rank ends: its own word on the page and in its error file, then out by os._exit.

Owns the last second of a rank's life.  A gloo script that ended well dies of SIGABRT at
interpreter teardown in up to half of all runs, and a raising interpreter takes 0.8-1 s to leave;
so the outcome is decided and written before any teardown, what Python promises at exit is done
(non-daemon threads, executors, atexit, flush), and the process leaves without the teardown.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
import traceback
from typing import Any, Dict, Tuple

from .. import exits
from .. import page as pages

ERROR_LIMIT = 16_000  # characters of traceback kept in the error file


def of_exception(error: BaseException) -> Tuple[str, int]:
    """(outcome, exit code) that an exception leaving the script stands for."""
    if isinstance(error, SystemExit):
        code = error.code
        if code is None or code == 0:
            return "done", 0
        return "exit", (code & 0xFF) if isinstance(code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return "exit", exits.INTERRUPTED
    return "exception", 1


def show(error: BaseException, ends: bool = True) -> None:
    """What the interpreter would have printed for an exception that reached the top.

    `ends`: the process does too.  A hook of the user's is told of that alone: what one does at an
    end (abort the others, close what it logs to, leave by os._exit) must not befall a rank that
    goes on.
    """
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    trace = error.__traceback__
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # all of worker/
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(here):
        trace = trace.tb_next  # the reader's own lines only; ours are not at fault
    error = error.with_traceback(trace)
    hook = sys.excepthook if ends else sys.__excepthook__
    try:
        hook(type(error), error, trace)
    except Exception as failed:  # torch's own writes to a stderr that may be closed, or full
        for each in (failed, error):  # the interpreter's own hook fails at no stream
            sys.__excepthook__(type(each), each, each.__traceback__)


def write_error_file(path: str, rank: int, error: BaseException) -> None:
    """The error file in the form that torch's elastic launcher reads, unless @record wrote it."""
    if not path or os.path.exists(path) or isinstance(error, SystemExit):
        return
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    message: Dict[str, Any] = {
        "message": "%s: %s" % (type(error).__name__, error),
        "extraInfo": {
            "py_callstack": trace[-ERROR_LIMIT:], "timestamp": str(int(time.time())), "rank": rank}}
    try:
        with open(path, "w") as file:
            json.dump({"message": message}, file)
    except OSError as problem:
        print("holdfast: error file %s: %s" % (path, problem), file=sys.stderr)


def write_page(fields: memoryview, outcome: str, code: int) -> None:
    fields[pages.F_CODE] = code & 0xFF
    fields[pages.F_OUTCOME] = pages.OUTCOMES.index(outcome)


def leave(fields: memoryview, outcome: str, code: int) -> None:
    """Ends the process.  The outcome is on the page before anything that can hang or abort."""
    write_page(fields, outcome, code)
    try:
        if code == 0:
            # Joins non-daemon threads and concurrent.futures' executors, as the interpreter does.
            threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    finally:
        flush()
        os._exit(code)


def flush() -> None:
    """Standard output and error, as far as they can be."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # closed, replaced or full: nothing is left to tell it to
