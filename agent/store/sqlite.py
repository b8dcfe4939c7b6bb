"""The store of one node: SQLite in the state directory, held by one agent at a time.

Owns store.db, the lock of the state directory, and the thread that writes.  One writer by flock,
so a version never moves behind this object's back and reads come from memory.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import math
import os
import sqlite3
import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from ..core.model import Doc, Documents, Lease, StoreView, StoreWrite, run_subject, subject_of
from ..core.model.subject import LEASE
from .base import Conflict, InUse, StoreError, Traffic

APPLICATION_ID = 0x484F4C44  # "HOLD" in the header of every database of ours
SCHEMA_VERSION = 1
DOCUMENTS_MAX = 10_000
PRUNED_AT_ONCE = 500  # of those beyond that
KEEP_S = 30 * 86400.0  # documents nobody touched for this long are dropped when the agent starts
WRITE_LIMIT_S = 5.0
RETRY_S = 1.0
UNSAVED_MAX = 64  # documents that wait for room on the disk
# Full, over quota, failing or read-only: what was read stays true, only nothing more is taken.
DISK_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY,
              sqlite3.SQLITE_CANTOPEN)


class DirectoryLock:
    """An exclusive flock on a state directory; the file names the holder's pid for people."""

    def __init__(self, directory: Path) -> None:
        """Takes the lock at once or raises InUse naming who has it."""
        path = directory / "lock"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 64, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise InUse(f"{directory}: in use by another agent, pid {holder}: stop it, or "
                             "set agent.state_dir to another directory") from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(fd)
            raise _unwritable(path, error) from error
        self._fd = fd

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _unwritable(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreError(f"{path}: {error.strerror}: make room there, or set agent.state_dir to a "
                          "directory on another disk")
    return StoreError(f"{path}: {error.strerror}: set agent.state_dir to a directory that this "
                      "user may write")


def open_database(path: Path) -> sqlite3.Connection:
    """Opens or creates one of our databases.  StoreError when the file is not ours or is damaged:
    it is never overwritten, because it may hold what somebody needs."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                os.fchmod(file.fileno(), 0o600)  # one of an earlier release
    except OSError:
        pass  # SQLite says why
    try:
        connection = sqlite3.connect(
            path, timeout=2.0, isolation_level=None, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise StoreError(f"{path}: {error}: set agent.state_dir to a writable directory") from error
    try:
        ours = connection.execute("PRAGMA application_id").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if ours != APPLICATION_ID and (ours or tables):
            raise StoreError(f"{path}: an SQLite file of another program: move it away or set "
                             "agent.state_dir to another directory")
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version > SCHEMA_VERSION:
            raise StoreError(f"{path}: written by a newer holdfast (schema {version}, this one "
                             f"reads {SCHEMA_VERSION}): install that release again")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        healthy = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if healthy != "ok":
            raise StoreError(f"{path}: damaged ({healthy}): move it away, with its -wal file; "
                             "the agent then starts with an empty one")
    except sqlite3.Error as error:
        connection.close()
        full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
        remedy = "make room" if full else (
            "move the file away, with its -wal file; the agent then starts with an empty one")
        raise StoreError(f"{path}: {error}: {remedy}") from error
    except StoreError:
        connection.close()
        raise
    return connection


class SqliteStore:
    """Documents of one node, see base.Store."""

    def __init__(self, directory: Path) -> None:
        """Opens DIR/store.db.  StoreError when it is foreign, damaged or not writable."""
        self._path = directory / "store.db"
        self._database = open_database(self._path)
        try:
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS documents (key TEXT PRIMARY KEY, "
                "version INTEGER NOT NULL, body BLOB NOT NULL, written_wall_s REAL NOT NULL)"
            )
            self._database.execute(
                "DELETE FROM documents WHERE written_wall_s < ? AND key LIKE 'run/%'",
                (time.time() - KEEP_S,),
            )
            self._database.execute(
                "DELETE FROM documents WHERE key LIKE 'run/%' AND key NOT IN "
                "(SELECT key FROM documents ORDER BY written_wall_s DESC LIMIT ?)",
                (DOCUMENTS_MAX,),
            )
            rows = self._read()
        except sqlite3.Error as error:
            self._database.close()
            raise StoreError(f"{self._path}: {error}") from error
        self._documents = {key: Doc(key, version, bytes(body)) for key, version, body in rows}
        self._unsaved: dict[str, StoreWrite] = {}  # taken in memory while the disk takes nothing
        self.traffic: Traffic | None = None
        self.problem = ""  # why the disk takes nothing
        self._leases: dict[str, Lease] = {}
        self._view = self._make_view(up=True)
        self.living: Callable[[], Collection[str]] = tuple  # runs whose documents must stay
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="store")

    def present(self) -> frozenset[str]:
        return frozenset()

    def view(self) -> StoreView:
        return self._view

    async def put(self, write: StoreWrite) -> int:
        kind, run, _ = subject_of(write.key)
        if kind == LEASE:  # nobody else could take it, so it has no end
            self._leases[run] = Lease(run, write.body.decode("utf-8", "replace"), math.inf)
            self._view = self._make_view(up=self._view.up)
            return 0
        if write.lease and write.lease not in self._leases:
            raise Conflict(f"lease: nobody holds that of {write.lease}")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                version = await loop.run_in_executor(self._thread, self._put, write)
        except Conflict:
            await self.refresh()
            raise
        except (sqlite3.Error, TimeoutError) as error:
            if not self._in_memory(write, error):
                self._view = self._make_view(up=False)
                raise StoreError(f"{self._path}: {str(error) or 'no answer'}") from error
            version = write.expect_version + 1
        else:
            self._unsaved.pop(write.key, None)
        self._documents.pop(write.key, None)
        self._documents[write.key] = Doc(write.key, version, write.body)
        if len(self._documents) > DOCUMENTS_MAX + PRUNED_AT_ONCE:
            await self._prune({run_subject(run) for run in self.living()} | {write.key})
        self._view = self._make_view(up=True)
        return version

    async def delete(self, key: str, expect_version: int) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                await loop.run_in_executor(self._thread, self._delete, key, expect_version)
        except (sqlite3.Error, TimeoutError) as error:
            self._view = self._make_view(up=False)
            raise StoreError(f"{self._path}: {str(error) or 'no answer'}") from error
        self._documents.pop(key, None)
        self._unsaved.pop(key, None)
        self._view = self._make_view(up=True)

    def _in_memory(self, write: StoreWrite, error: Exception) -> bool:
        """Takes a run's document without the disk, which has no room for it: ranks that wait for a
        plan would wait until somebody makes room.  Nobody else writes here (DirectoryLock), so its
        version is known; it goes to the disk as soon as that takes it."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        known = self._documents.get(write.key)
        fits = write.key in self._unsaved or len(self._unsaved) < UNSAVED_MAX
        if code not in DISK_CODES or not fits or not subject_of(write.key).run:
            return False
        if (known.version if known is not None else 0) != write.expect_version:
            return False
        self._unsaved[write.key] = write
        self.problem = f"{self._path}: {error}"
        return True

    async def save(self) -> bool:
        """Writes what waits for room; True when nothing waits any more."""
        loop = asyncio.get_running_loop()
        for key, write in list(self._unsaved.items()):
            try:
                async with asyncio.timeout(WRITE_LIMIT_S):
                    await loop.run_in_executor(self._thread, self._save, write)
            except (sqlite3.Error, TimeoutError) as error:
                self.problem = f"{self._path}: {str(error) or 'no answer'}"
                return False
            if self._unsaved.get(key) is write:  # else a newer one came meanwhile
                del self._unsaved[key]
        if not self._unsaved:
            self.problem = ""
        return not self._unsaved

    async def _prune(self, living: set[str]) -> None:
        """Lets those go that were written longest ago and are of no run that is here: short runs
        come by the thousand, and each leaves a document."""
        over = len(self._documents) - DOCUMENTS_MAX
        ended = (key for key in self._documents if subject_of(key).run and key not in living)
        gone = list(islice(ended, over))
        try:
            loop = asyncio.get_running_loop()
            async with asyncio.timeout(WRITE_LIMIT_S):
                await loop.run_in_executor(self._thread, self._forget, gone, sorted(living))
        except (sqlite3.Error, TimeoutError):
            return  # it is tried again after the next write
        for key in gone:
            self._documents.pop(key, None)

    async def read(self, key: str) -> Doc:
        return self._documents.get(key, Doc(key, 0))

    async def refresh(self) -> None:
        """Reads everything again: after a conflict, and to find out whether it answers again."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(WRITE_LIMIT_S):
                rows = await loop.run_in_executor(self._thread, self._read)
        except (sqlite3.Error, TimeoutError):
            self._view = self._make_view(up=False)
            return
        self._documents = {key: Doc(key, version, bytes(body)) for key, version, body in rows}
        for key, write in self._unsaved.items():
            self._documents[key] = Doc(key, write.expect_version + 1, write.body)
        self._view = self._make_view(up=True)

    async def watch(self, changed: Callable[[str], None]) -> None:
        """Nobody else writes here, so only a store that failed is asked again."""
        while True:
            await asyncio.sleep(RETRY_S)
            if self.problem and await self.save():
                changed("the store's disk takes writes again")
            if not self.view().up:
                await self.refresh()
                if self.view().up:
                    changed("store is back")

    def avoid(self, hosts: frozenset[str]) -> None:
        """It is on this node."""

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        self._database.close()

    def _make_view(self, up: bool) -> StoreView:
        documents = sorted(self._documents.values(), key=lambda doc: doc.key)
        problem = "" if up else self.problem or f"{self._path} does not answer: mend its disk"
        return StoreView(up, Documents(documents), tuple(self._leases.values()), problem)

    def _read(self) -> list[tuple[str, int, bytes]]:
        """Oldest first, which is the order in which they are let go."""
        return self._database.execute(
            "SELECT key, version, body FROM documents ORDER BY written_wall_s"
        ).fetchall()

    def _forget(self, gone: list[str], living: list[str]) -> None:
        """In the thread.  Those of living runs count as written now, for the next start."""
        database = self._database
        database.execute("BEGIN IMMEDIATE")
        try:
            database.executemany("DELETE FROM documents WHERE key = ?", [(key,) for key in gone])
            database.executemany("UPDATE documents SET written_wall_s = ? WHERE key = ?",
                                 [(time.time(), key) for key in living])
            database.execute("COMMIT")
        except sqlite3.Error:
            database.execute("ROLLBACK")
            raise

    def _save(self, write: StoreWrite) -> None:
        """In the thread: a document that is in force already, unless a newer one is written."""
        self._database.execute(
            "INSERT INTO documents VALUES (?1, ?2, ?3, ?4) ON CONFLICT (key) DO UPDATE SET "
            "version = ?2, body = ?3, written_wall_s = ?4 WHERE version < ?2",
            (write.key, write.expect_version + 1, write.body, time.time()))

    def _delete(self, key: str, expect_version: int) -> None:
        """In the thread."""
        if key in self._unsaved:
            have = self._unsaved[key].expect_version + 1
        else:
            row = self._database.execute(
                "SELECT version FROM documents WHERE key = ?", (key,)).fetchone()
            have = row[0] if row else 0
        if have != expect_version or not have:
            raise Conflict(f"{key} is at version {have}, not {expect_version}")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("DELETE FROM documents WHERE key = ?", (key,))

    def _put(self, write: StoreWrite) -> int:
        """In the thread: one transaction, synced to disk, because a plan outlives the machine."""
        database = self._database
        database.execute("PRAGMA synchronous=FULL")
        database.execute("BEGIN IMMEDIATE")
        try:
            row = database.execute(
                "SELECT version FROM documents WHERE key = ?", (write.key,)
            ).fetchone()
            have = row[0] if row else 0
            if write.key in self._unsaved:  # the file's own is older than what is in force
                have = self._unsaved[write.key].expect_version + 1
            if have != write.expect_version:
                raise Conflict(f"{write.key} is at version {have}, not {write.expect_version}")
            database.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET "
                "version = excluded.version, body = excluded.body, "
                "written_wall_s = excluded.written_wall_s",
                (write.key, have + 1, write.body, time.time()),
            )
            database.execute("COMMIT")
        except BaseException:
            if database.in_transaction:
                database.execute("ROLLBACK")
            raise
        return have + 1
