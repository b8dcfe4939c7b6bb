"""Orders that `holdfast accept` took, on disk: what a launcher is started by again after a reboot.

Owns the files, one an order, in the user's own state folder: whole or not at all, his alone, few
and small.  Whether one is carried out again is accept.py's to find out, within the bounds here: a
node that dies of its job is not to do so for ever, and no job is to begin long after it ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ..daemon.attempts import RUNS_MAX
from ..daemon.starts import Order
from ..system import procfs
from ..system.regular import read_regular
from .client import states
from .text import harmless

FILE_MAX = 1 << 20  # arguments and environment have 64 KiB each, and JSON may write six for one
LISTED_MAX = 4 * RUNS_MAX  # names in the folder that are looked at
RESTARTS = ((3, 3600.0), (6, 86400.0))  # so many within so long: then a person must look
GIVEN_UP_S = 86400.0  # after the launcher was known to run last
BACK_S = 300.0  # by which a clock may have been put back and still be believed
BEGINS_S = 60.0  # an order that was about to begin when its `holdfast accept` died
NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
Wall = Annotated[float, Meta(ge=0.0, le=1e11)]


class Kept(msgspec.Struct, forbid_unknown_fields=True):
    """An order, and what is known of its launcher.  Times are of the wall clock."""

    order: Order
    seen_wall_s: Wall  # when its launcher was known to run last, or was about to begin
    boot_id: Annotated[str, Meta(max_length=64)] = ""  # in which that was
    pid: Annotated[int, Meta(ge=0, le=1 << 22)] = 0  # 0: not known yet
    begun_ticks: Annotated[int, Meta(ge=0)] = 0  # of that process, since boot
    node: Annotated[str, Meta(max_length=253)] = ""  # a home, and a host's name, may be of several
    attempt: Annotated[int, Meta(ge=0)] = 0  # of the run's name; 0: it was not known to have begun
    restarts: Annotated[list[Wall], Meta(max_length=16)] = []

    def is_alive(self, boot_id: str, wall_s: float) -> bool:
        """Whether the launcher of another life of ours may still be there, on its way out."""
        if self.boot_id != boot_id:
            return False
        if not self.pid:
            return 0.0 <= wall_s - self.seen_wall_s < BEGINS_S
        return begun_ticks(self.pid) == self.begun_ticks

    def given_up(self, wall_s: float) -> str:
        """Why it is not carried out any more; "" while it may be."""
        if not self.attempt:
            return "it was not known to have begun when its launcher was lost"
        if self.is_early(wall_s):
            return "its launcher ran here last at a time that is still to come"
        if wall_s - self.seen_wall_s > GIVEN_UP_S:
            return f"its launcher ran here last more than {GIVEN_UP_S / 3600:g} hours ago"
        for most, within_s in RESTARTS:
            # One of a time to come counts: that clock was put back since.
            recent = [at_s for at_s in self.restarts if wall_s - at_s < within_s]
            if len(recent) >= most:
                return (f"it was started again {len(recent)} times within {within_s / 3600:g} h: "
                        "look at what ends it here, then start it by hand")
        return ""

    def is_early(self, wall_s: float) -> bool:
        """Whether this machine's clock is not set yet, as behind a boot: no age can be told."""
        return wall_s < self.seen_wall_s - BACK_S

    def begins(self, boot_id: str, wall_s: float, again: bool) -> None:
        """To be written down before the process is there: who dies meanwhile is not to forget."""
        self.boot_id, self.seen_wall_s, self.pid, self.begun_ticks = boot_id, wall_s, 0, 0
        if again:
            self.restarts = [*self.restarts, wall_s][-RESTARTS[-1][0]:]

    def runs(self, pid: int) -> None:
        self.pid, self.begun_ticks = pid, max(0, begun_ticks(pid))


def begun_ticks(pid: int) -> int:
    """When a process began, since boot; -1 where there is none such.  Pids are used again."""
    found = procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat"))
    return -1 if found is None or found.state in "ZX" else int(found.start_ticks)


class KeptOrders:
    """The folder of this user's orders on this node.  What is wrong with it is said, and stops
    nothing: a launcher starts without, and is then not started again."""

    def __init__(self, environ: Mapping[str, str], say: Callable[[str], None]) -> None:
        self.folder = states(environ).parent / f"accepted@{socket.gethostname()}"
        self._say, self._told = say, set[str]()  # ids of those that are not kept, once said

    def load(self) -> list[Kept]:
        """The orders whose launcher did not end under the `holdfast accept` that took them."""
        try:
            self._check_folder()
            with os.scandir(self.folder) as listing:
                names = sorted(one.name for one in islice(listing, LISTED_MAX))
        except FileNotFoundError:
            return []
        except OSError as error:
            self._say(f"orders of before are not read: {error.strerror or error}")
            return []
        for name in [one for one in names if one.endswith(".new")]:  # of a write that was cut off
            self._unlink(self.folder / name)
        found = [self._read(self.folder / name) for name in names if name.endswith(".json")]
        kept = sorted((one for one in found if one is not None), key=lambda one: one.seen_wall_s)
        for one in kept[:-RUNS_MAX]:
            self._say(f"run {one.order.run}: its order is dropped: there are more than {RUNS_MAX}")
            self.drop(one)
        return kept[-RUNS_MAX:]

    def write(self, kept: Kept) -> bool:
        """Whole or not at all, and on the disk when this returns; False where that failed."""
        if not NAME.fullmatch(kept.order.id):
            return self._not_kept(kept, f"{kept.order.id[:80]!r} is no name for it")
        path = self.folder / f"{kept.order.id}.json"
        draft = path.with_suffix(".new")
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            self._check_folder()
            with contextlib.suppress(FileNotFoundError):
                draft.unlink()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(draft, flags, 0o600), "wb") as file:
                file.write(msgspec.json.encode(kept))
                file.flush()
                os.fsync(file.fileno())
            draft.rename(path)
            self._sync()
        except (OSError, ValueError) as error:  # ValueError: words that no UTF-8 is made of
            return self._not_kept(kept, str(getattr(error, "strerror", "") or error))
        return True

    def drop(self, kept: Kept) -> None:
        """It is not carried out again."""
        self._told.discard(kept.order.id)
        if NAME.fullmatch(kept.order.id):
            self._unlink(self.folder / f"{kept.order.id}.json")
            with contextlib.suppress(OSError):
                self._sync()

    def _not_kept(self, kept: Kept, why: str) -> bool:
        if kept.order.id not in self._told:
            self._told.add(kept.order.id)
            self._say(f"run {kept.order.run}: its order is not kept in {self.folder}: {why}; "
                      "behind a reboot it has to be started here by hand")
        return False

    def _check_folder(self) -> None:
        found = os.lstat(self.folder)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(0, f"{self.folder} is no folder")
        _check_mine(self.folder, found)

    def _read(self, path: Path) -> Kept | None:
        """Another user's, or what others may read or write, is passed by, and named: who put it
        there is not known.  What is no order is removed, and that is said."""
        try:
            _check_mine(path, os.lstat(path))
            kept = msgspec.json.decode(read_regular(path, FILE_MAX, follow=False), type=Kept)
            if f"{kept.order.id}.json" != path.name or not NAME.fullmatch(kept.order.id):
                raise ValueError("it is of another name")
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"{path} is passed by: {error.strerror or error}")
        except (ValueError, RecursionError) as error:
            self._say(f"{path} is removed, for it is no order: {harmless(str(error))[:200]}")
            self._unlink(path)
        else:
            return kept
        return None

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"{path} cannot be removed: {error.strerror}")

    def _sync(self) -> None:
        descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _check_mine(path: Path, found: os.stat_result) -> None:
    """Raises PermissionError for what is not this user's alone: a job's words may be in it, and it
    says what is to be started."""
    if found.st_uid != os.getuid():
        raise PermissionError(0, f"{path} belongs to uid {found.st_uid}")
    if found.st_mode & 0o077:
        raise PermissionError(0, f"{path} may be used by others: chmod go= {path}")
