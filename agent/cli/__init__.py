"""The command line: `holdfast COMMAND ...`.

Owns the way from argv to one function, and nothing that a function does.  Only the chosen
command's module is imported, so that `--help` and `run` start at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from holdfast.worker import exits

from .failure import Failure


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises for a wrong input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return dispatch(arguments)
    except Failure as failure:
        from .text import harmless

        said = "\n".join(map(harmless, str(failure).split("\n")))
        print(f"holdfast: {said}", file=sys.stderr)
        return failure.code
    except BrokenPipeError:  # `holdfast incidents | head`
        sys.stderr.close()
        return 0
    except KeyboardInterrupt:
        return exits.INTERRUPTED


def dispatch(arguments: list[str]) -> int:
    if arguments and arguments[0] in ("run", "train"):
        # Their arguments belong to the launcher, whose parser runs in the job's own Python.
        from .launch import launch

        return launch(arguments[0], arguments[1:])
    if arguments and arguments[0] in ("agent", "simulate"):
        from .handover import hand_over

        return hand_over(arguments[0], arguments[1:])
    from .parser import build, load

    parser = build()
    chosen = parser.parse_args(arguments)
    if chosen.command is None:
        parser.print_help()
        return 0
    return load(chosen.command)(chosen)
