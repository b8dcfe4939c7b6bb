"""Becomes the command that it is given, and dies with the process that started it.

    python -I -S die_with_parent.py PARENT COMMAND ARGUMENT...

Owns one system call that the command cannot make for itself: without it, a tool that only writes
when there is news outlives a killed agent until then.  Run by its path; imports nothing of ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: int, command: list[str]) -> int:
    """Returns only when the parent is gone already; OSError when the command cannot be run."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    os.execv(command[0], command)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
