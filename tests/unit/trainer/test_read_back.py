"""A checkpoint is called verified when its bytes were read from the disk, and not before."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.checkpoint import read_back
from holdfast.trainer.checkpoint.read_back import WAITING_MAX, ReadBack
from holdfast.trainer.state import Entry

SHARD = bytes(range(256)) * 4096  # 1 MiB
WAIT_S = 20.0


class Elastic:
    """What the launcher is told."""

    def __init__(self) -> None:
        self.verified_paths: list[str] = []
        self.bad: list[tuple[str, str]] = []
        self.reports: list[tuple[str, str]] = []

    def verified(self, path: str) -> None:
        self.verified_paths.append(path)

    def bad_checkpoint(self, path: str, why: str) -> None:
        self.bad.append((path, why))

    def report(self, fault: str, text: str) -> None:
        self.reports.append((fault, text))


def committed(root: Path, step: int) -> Path:
    folder = root / files.directory_name(step, 1)
    entries = [Entry("weights", "uint8", (len(SHARD),), 0, len(SHARD))]
    files.write_shard(folder, 0, 1, entries, memoryview(SHARD), "xxh3_128")
    files.commit(folder, {"run": "r", "generation": 1, "step": step, "world": 1, "model": {}},
                 "xxh3_128")
    return folder


def flip(folder: Path) -> None:
    shard = next(folder.glob("*.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)


def test_a_thread_that_the_machine_refused_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process lives on behind that, and what it commits is to be read all the same."""
    elastic = Elastic()
    reader = ReadBack(elastic, 1e6)
    first, second = (str(committed(tmp_path, step)) for step in (5, 10))
    with monkeypatch.context() as refusing, pytest.raises(RuntimeError, match="new thread"):
        refusing.setattr(threading.Thread, "start", refused)
        reader.ask(first)
    reader.ask(second)
    wait_for(lambda: elastic.verified_paths == [first, second])


def refused(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_what_reads_as_written_is_verified_once(tmp_path: Path) -> None:
    elastic = Elastic()
    reader = ReadBack(elastic, 1e6)
    folders = [committed(tmp_path, step) for step in (5, 10)]
    for folder in (*folders, *folders):
        reader.ask(str(folder))
    reader.finish(WAIT_S)
    assert elastic.verified_paths == [str(folder) for folder in folders] == reader.verified
    assert elastic.bad == [] == elastic.reports


def test_a_byte_that_reads_otherwise_is_put_aside_and_never_verified(tmp_path: Path) -> None:
    elastic = Elastic()
    folder = committed(tmp_path, 5)
    flip(folder)
    reader = ReadBack(elastic, 1e6)
    reader.ask(str(folder))
    reader.finish(WAIT_S)
    assert elastic.verified_paths == [] and not folder.exists()
    ((path, why),) = elastic.bad
    assert path == str(folder) and "bytes differ from what was written" in why
    assert elastic.reports[0][0] == "checkpoint_bad"
    assert len(list((tmp_path / files.QUARANTINE).iterdir())) == 1


def test_one_that_was_deleted_meanwhile_is_nobodys_fault(tmp_path: Path) -> None:
    elastic = Elastic()
    folder = committed(tmp_path, 5)
    files.delete(folder)
    reader = ReadBack(elastic, 1e6)
    reader.ask(str(folder))
    reader.finish(WAIT_S)
    assert elastic.verified_paths == [] and elastic.bad == []


@pytest.mark.parametrize("error", [
    OSError(errno.EIO, os.strerror(errno.EIO)), OSError(errno.ESTALE, os.strerror(errno.ESTALE)),
    PermissionError(errno.EACCES, os.strerror(errno.EACCES)), MemoryError(), ValueError("odd")])
def test_what_cannot_be_read_is_neither_verified_nor_bad_and_the_next_one_is_read(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic, verify = Elastic(), files.verify
    first, second = committed(tmp_path, 5), committed(tmp_path, 10)

    def refused(path: Path, pace: files.Pace) -> list[files.Problem]:
        if path == first:
            raise error
        return verify(path, pace)

    reader = ReadBack(elastic, 1e6)
    with monkeypatch.context() as broken:
        broken.setattr(files, "verify", refused)
        for folder in (first, second):
            reader.ask(str(folder))
        reader.finish(WAIT_S)
    assert elastic.verified_paths == [str(second)] and elastic.bad == []
    ((fault, text),) = elastic.reports
    assert fault == "checkpoint_failed" and str(first) in text and "not read back" in text
    reader.ask(str(first))  # as the next rank 0 does
    reader.finish(WAIT_S)
    assert elastic.verified_paths == [str(second), str(first)]


@pytest.mark.parametrize("file", ["", "COMMIT", "manifest.json", "shard-00000-of-00001.bin"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_disk_that_refuses_to_be_read_has_not_shown_other_bytes(
    number: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elastic, folder = Elastic(), committed(tmp_path, 5)
    refuse_to_read(monkeypatch, folder / file, OSError(number, os.strerror(number)))
    reader = ReadBack(elastic, 1e6)
    reader.ask(str(folder))
    reader.finish(WAIT_S)
    assert elastic.verified_paths == [] and elastic.bad == []
    assert [fault for fault, _ in elastic.reports] == ["checkpoint_failed"]
    assert os.strerror(number) in elastic.reports[0][1]


def refuse_to_read(monkeypatch: pytest.MonkeyPatch, place: Path, error: OSError) -> None:
    """Whoever looks at `place` from now on gets this error, as of a mount whose server is gone."""
    look = os.stat

    def refused(path: int | str | os.PathLike[str], **more: bool) -> os.stat_result:
        if not isinstance(path, int) and Path(path) == place:
            raise error
        return look(path, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", refused)


def test_a_file_that_is_gone_below_its_marker_is_a_fault(tmp_path: Path) -> None:
    elastic, folder = Elastic(), committed(tmp_path, 5)
    next(folder.glob("*.bin")).unlink()
    reader = ReadBack(elastic, 1e6)
    reader.ask(str(folder))
    reader.finish(WAIT_S)
    assert [path for path, _ in elastic.bad] == [str(folder)] and not folder.exists()


def test_the_pace_is_kept_and_the_end_of_the_run_lifts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mebibyte at 100 B/s: the reader waits for hours, and for no longer than the run's end."""
    elastic = Elastic()
    reader = ReadBack(elastic, 1e-4)
    asleep, waited_s = threading.Event(), list[float]()
    wait = reader._hurry.wait

    def watched(timeout: float) -> bool:
        waited_s.append(timeout)
        asleep.set()
        return wait(timeout)

    monkeypatch.setattr(reader._hurry, "wait", watched)
    reader.ask(str(committed(tmp_path, 5)))
    assert asleep.wait(WAIT_S) and 10_000 < waited_s[0] < 10_600
    reader.finish(WAIT_S)
    assert elastic.verified_paths


def test_the_pace_is_of_all_that_was_read_and_no_moment_is_slept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that only a sleep moves: half a mebibyte a second, in pieces of any size."""
    clock_s, slept_s = [0.25], list[float]()
    reader = ReadBack(Elastic(), len(SHARD) / 2e6)

    def sleep(seconds: float) -> bool:
        slept_s.append(seconds)
        clock_s[0] += seconds
        return False

    def in_pieces(path: Path, pace: Callable[[int], None]) -> list[files.Problem]:
        for size in (len(SHARD) // 2, 10, len(SHARD) - 20, len(SHARD) // 2, 10):
            pace(size)
        return []

    monkeypatch.setattr(read_back, "time", SimpleNamespace(monotonic=lambda: clock_s[0]))
    monkeypatch.setattr(files, "verify", in_pieces)
    monkeypatch.setattr(reader._hurry, "wait", sleep)
    folder = committed(tmp_path, 5)
    reader._prove(folder)
    assert slept_s == pytest.approx([1.0, 2.0, 1.0], abs=1e-3), "10 bytes are not worth a sleep"
    assert reader.verified == [str(folder)]
    clock_s[0] += 9.0  # a slow disk is not waited for as well
    slept_s.clear()
    monkeypatch.setattr(files, "verify", lambda path, pace: [
        pace(10), clock_s.__setitem__(0, clock_s[0] + 9.0), pace(len(SHARD))][:0])
    reader._prove(folder)
    assert slept_s == []


def test_what_waits_is_bounded_and_the_newest_stays(tmp_path: Path) -> None:
    assert WAITING_MAX == 16
    reader = ReadBack(Elastic(), 1e6)
    reader._thread = threading.current_thread()  # nobody reads
    for step in range(WAITING_MAX + 3):
        reader.ask(str(tmp_path / files.directory_name(step, 1)))
    assert len(reader._paths) == WAITING_MAX
    assert reader._paths[-1].endswith(files.directory_name(WAITING_MAX + 2, 1))


def test_the_newest_in_a_folder_are_read_and_nobody_waits_for_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared file system may take its time, and the ranks of a new generation may not."""
    elastic, listing = Elastic(), files.listing
    folders = [str(committed(tmp_path, step)) for step in (5, 10, 15)]
    shown, looks = threading.Event(), list[int]()

    def slow(root: Path) -> list[files.Found]:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, "Stale file handle")
        assert shown.wait(WAIT_S)
        return listing(root)

    monkeypatch.setattr(files, "listing", slow)
    reader = ReadBack(elastic, 1e6)
    reader.ask_newest(tmp_path, 2)
    wait_for(lambda: elastic.reports)
    assert "Stale file handle" in elastic.reports[0][1]
    reader.ask_newest(tmp_path, 2)
    wait_for(lambda: len(looks) == 2)
    assert not elastic.verified_paths
    shown.set()
    reader.finish(WAIT_S)
    assert elastic.verified_paths == folders[1:]
