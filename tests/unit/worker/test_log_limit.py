"""A rank's log over its limit: its middle goes, in place and aloud, and followers go on."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.logs import files
from holdfast.worker.launcher import log_limit
from holdfast.worker.launcher.log_limit import LogLimit, punch
from holdfast.worker.launcher.terminal import Terminal

LIMIT = 4 << 20
LINE = "line %09d of a loop that prints and prints and prints and prints\n"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "rank-0"
    made.mkdir()
    with open(made / "probe", "wb+") as file:
        file.write(bytes(1 << 17))
        file.flush()
        try:
            punch(file.fileno(), 0, 1 << 16)
        except OSError as error:
            pytest.skip(f"this file system frees no part of a file: {error}")
    return str(made)


class Told(list):
    def __call__(self, text, level="info"):
        self.append(text)


def writing(folder, first, count):
    """As a rank does: another process, appending to its own descriptor."""
    code = ("import sys\nwith open(sys.argv[1], 'a') as file:\n"
            f" for n in range({first}, {first + count}): file.write({LINE!r} % n)\n")
    subprocess.run([sys.executable, "-I", "-c", code, os.path.join(folder, "stdout.log")],
                   check=True, timeout=60)


def test_first_and_newest_lines_stay_whole_and_what_went_is_said(folder, capfd):
    told = Told()
    limit, terminal = LogLimit(LIMIT, told), Terminal(False)
    path, per_turn, turns = os.path.join(folder, "stdout.log"), 16_000, 24
    for turn in range(turns):
        writing(folder, turn * per_turn, per_turn)
        limit.tend(turn * 2.0, [folder])
        if turn % 5 == 0:  # a terminal that falls behind, as it does
            terminal.follow([folder])
    limit.end()
    status, hole = os.stat(path), limit.dropped[path]
    assert status.st_size > 5 * LIMIT and status.st_blocks * 512 <= LIMIT + (1 << 18)
    data = Path(path).read_bytes()
    numbers = [int(n) for n in re.findall(rb"line (\d{9}) of a loop that prints.*\n", data)]
    assert numbers[0] == 0 and numbers[-1] == turns * per_turn - 1
    first = next(n for n, number in enumerate(numbers) if n != number)
    newest = numbers[first:]
    assert newest == list(range(newest[0], turns * per_turn))  # no line is missing but in the hole
    assert first * len(LINE % 0) > LIMIT / 5 and len(newest) * len(LINE % 0) > LIMIT / 3
    assert b"holdfast: %d bytes dropped here" % hole.nbytes in data
    assert len(told) <= 8 and f"{hole.nbytes / 1e6:.1f} MB of it dropped so far" in told[-1]
    while terminal.follow([folder], last=True):
        pass
    text = capfd.readouterr().out
    assert "\0" not in text and text.startswith(LINE % 0)
    assert text.endswith(LINE % (turns * per_turn - 1))
    assert len(text) < status.st_size  # what was dropped before it was shown is not waited for


def test_the_log_child_reads_what_is_of_one_piece(folder):
    told = Told()
    limit, path = LogLimit(1 << 20, told), os.path.join(folder, "stdout.log")
    writing(folder, 0, 60_000)
    limit.tend(1.0, [folder])
    with open(path, "a") as file:
        file.write("Traceback (most recent call last):\nValueError: at the very end\n")
    begin, data = files.read_tail(files.Span(path, 0, 0, -1), 1 << 21)
    assert b"\0" not in data and data.endswith(b"at the very end\n")
    assert begin + len(data) == os.path.getsize(path)
    report = files.diagnose([path], files.load_catalogue())
    assert report.diagnosis.root is not None and "at the very end" in report.diagnosis.root.text


def test_without_holes_one_line_says_so_and_without_a_limit_nothing_is_touched(
    folder, monkeypatch
):
    writing(folder, 0, 60_000)
    told = Told()
    LogLimit(0, told).tend(1.0, [folder])
    assert not told

    def refuse(fd, begin, end):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(log_limit, "punch", refuse)
    limit = LogLimit(1 << 20, told)
    for turn in range(1, 9):
        limit.tend(turn * 2.0, [folder])
    assert len(told) == 1 and "cannot free a part of a file" in told[0]
