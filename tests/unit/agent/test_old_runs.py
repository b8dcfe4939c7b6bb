"""Old private runs' state goes by age and size; nothing that lives or is somebody else's does."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from holdfast.agent.history import old_runs
from holdfast.agent.store.sqlite import DirectoryLock

NOW_S = 1_800_000_000.0
DAY_S = 86400.0


def ended(runs: Path, name: str, days: float, nbytes: int = 0) -> Path:
    path = runs / name
    (path / "logs/rank-0").mkdir(parents=True)
    for file in ("journal.db", "lock"):
        (path / file).touch()
    (path / "logs/rank-0/stdout.log").write_bytes(b"x" * nbytes)
    for one in [*path.rglob("*"), path]:
        os.utime(one, (NOW_S - days * DAY_S,) * 2)
    return path


def left(runs: Path) -> set[str]:
    return {one.name for one in runs.iterdir()}


def test_what_is_old_goes(tmp_path: Path) -> None:
    for name, days in (("new", 0.0), ("month", 29.0), ("old", 31.0), ("own", 90.0)):
        ended(tmp_path, name, days)
    read = ended(tmp_path, "read", 90.0)  # by `holdfast jobs`, again and again
    (read / "journal.db-shm").touch()
    written = ended(tmp_path, "written", 90.0) / "logs/rank-0/stdout.log"
    os.utime(written, (NOW_S, NOW_S))  # a run that goes on without its agent
    (tmp_path / "foreign").mkdir()
    os.utime(tmp_path / "foreign", (0, 0))
    (tmp_path / "link").symlink_to(ended(tmp_path.parent / "elsewhere", "x", 90.0))
    lock = DirectoryLock(ended(tmp_path, "living", 90.0))
    os.utime(tmp_path / "living/lock", (NOW_S - 90 * DAY_S,) * 2)
    gone = old_runs.clean(tmp_path, tmp_path / "own", 30 * DAY_S, 0, NOW_S)
    lock.release()
    assert {one.name for one in gone} == {"old", "read"}
    assert left(tmp_path) == {"new", "month", "own", "written", "foreign", "link", "living"}
    assert old_runs.clean(tmp_path, tmp_path / "own", 0.0, 0, NOW_S) == []  # no limit at all


def test_beyond_a_size_the_oldest_go_but_none_of_today(tmp_path: Path) -> None:
    for days in (0.5, 2.0, 3.0, 4.0):
        ended(tmp_path, f"{days:g}", days, 1 << 20)
    old_runs.clean(tmp_path, tmp_path / "own", 0.0, int(2.5 * (1 << 20)), NOW_S)
    assert left(tmp_path) == {"0.5", "2"}
    old_runs.clean(tmp_path, tmp_path / "own", 0.0, 1, NOW_S)
    assert left(tmp_path) == {"0.5"}


@pytest.mark.parametrize("base", ["holdfast", "mine"])
def test_runtime_folders_that_nobody_serves_go(base: str, tmp_path: Path) -> None:
    runtime = tmp_path / base
    for name in ("dead", "living", "foreign", "empty", "fresh", "own"):
        (runtime / name).mkdir(parents=True)
    (runtime / "foreign/notes").touch()
    sockets = []
    for name in ("dead", "living"):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(str(runtime / name / "agent.sock"))
        sock.listen()
        sockets.append(sock)
    sockets[0].close()
    (runtime / "dead/address").touch()
    now_s = (runtime / "fresh").stat().st_mtime
    os.utime(runtime / "empty", (now_s - 7200.0,) * 2)
    old_runs.clean_runtime(runtime, runtime / "own", now_s)
    sockets[1].close()
    kept = {"living", "foreign", "fresh", "own"}
    assert left(runtime) == (kept if base == "holdfast" else kept | {"empty"})
