"""Removes what private runs that ended long ago have left: their state, and their runtime folders.

Owns which of them go: those that nobody touched for an age, and the oldest beyond a size.  A run
whose agent lives is never one of them, nor is a folder that an agent did not make.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

RUNS_MAX = 4096
FILES_MAX = 10_000  # looked at in one run
YOUNG_S = 86400.0  # the size limit takes none that was touched since
EMPTY_S = 3600.0
OURS = ("journal.db", "lock")
RUNTIME_FILES = frozenset({"agent.sock", "api.sock", "address", "address.new"})
PRIVATE_BASE = "holdfast"  # of the runtime folders, unless HOLDFAST_RUNTIME_DIR names another


class Old(NamedTuple):
    """One run's folder."""

    touched_s: float
    nbytes: int
    path: Path


def clean(runs: Path, own: Path, age_s: float, nbytes_max: int, now_s: float) -> list[Path]:
    """Removes folders below `runs`; those that went.  0 stands for no limit.  OSError of a single
    one leaves it for another time."""
    found = sorted(_ended(runs, own))
    total, gone = sum(one.nbytes for one in found), []
    for one in found:
        idle_s = now_s - one.touched_s
        is_too_old = 0 < age_s < idle_s
        if is_too_old or (0 < nbytes_max < total and idle_s > YOUNG_S):
            if _remove(one.path):
                total -= one.nbytes
                gone.append(one.path)
    return gone


def _others(base: Path, own: Path) -> Iterator[tuple[Path, float]]:
    """This user's folders in `base` but `own`, and when each was changed last."""
    try:
        with os.scandir(base) as listing:
            names = [one.name for one in islice(listing, RUNS_MAX)]
    except OSError:
        return
    for path in (base / name for name in names):
        with contextlib.suppress(OSError):
            status = path.lstat()
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_ours and path != own:
                yield path, status.st_mtime


def _ended(runs: Path, own: Path) -> Iterator[Old]:
    for path, _ in _others(runs, own):
        with contextlib.suppress(OSError):
            if all((path / one).is_file() for one in OURS):
                yield Old(*_measured(path), path)


def _measured(path: Path) -> tuple[float, int]:
    """(when anything in it was last written, its bytes); of a huge one, of its first files.  What
    SQLite puts beside a journal that is only read makes no run younger, nor does the folder."""
    touched_s, nbytes = 0.0, 0
    files = (Path(folder, name) for folder, _, names in os.walk(path) for name in names)
    for file in islice(files, FILES_MAX):
        status = file.lstat()
        if not file.name.endswith(("-shm", "-wal")):
            touched_s = max(touched_s, status.st_mtime)
        nbytes += status.st_blocks * 512
    return touched_s, nbytes


def _remove(path: Path) -> bool:
    """Whether it is gone; one whose agent holds its lock stays."""
    try:
        lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def clean_runtime(base: Path, own: Path, now_s: float) -> None:
    """Takes away runtime folders that nobody serves any more: a killed agent's, and empty ones."""
    for path, changed_s in _others(base, own):
        with contextlib.suppress(OSError):
            held = set(os.listdir(path))
            is_idle = base.name == PRIVATE_BASE and now_s - changed_s > EMPTY_S
            if held <= RUNTIME_FILES and (_is_dead(path / "agent.sock") if held else is_idle):
                remove_runtime(path)


def remove_runtime(path: Path) -> None:
    """An agent's own files there, and the folder if it is empty then."""
    for name in RUNTIME_FILES:
        (path / name).unlink(missing_ok=True)
    path.rmdir()


def _is_dead(path: Path) -> bool:
    """Whether a socket is there that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def tidy(state: Path, runtime: Path, age_s: float, nbytes_max: int) -> None:
    """All of it, for a private agent: its own two folders are among the others'."""
    now_s = time.time()
    clean_runtime(runtime.parent, runtime, now_s)
    clean(state.parent, state, age_s, nbytes_max, now_s)
