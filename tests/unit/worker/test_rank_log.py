"""What a rank prints where its log has no room."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.worker.rank import rank

PRINTS = """
import sys
from holdfast.worker.rank import rank
rank.redirect(sys.argv[1], sys.argv[1])
for number in range(1000):
    print("x" * 100, number)
    print("y", file=sys.stderr)
sys.stdout.write("z" * 200_000)
sys.stdout.buffer.write(b"w")
sys.stdout.flush()
sys.exit(7)
"""


def test_a_full_disk_ends_no_script_that_prints():
    done = subprocess.run([sys.executable, "-c", PRINTS, "/dev/full"], check=False, timeout=60)
    assert done.returncode == 7


def test_what_there_is_room_for_is_there(tmp_path):
    log = tmp_path / "stdout.log"
    done = subprocess.run([sys.executable, "-c", PRINTS, str(log)], check=False, timeout=60)
    assert done.returncode == 7
    assert log.stat().st_size == sum(102 + len(str(n)) for n in range(1000)) + 2000 + 200_001


def test_a_stream_that_is_broken_otherwise_is_an_error_as_ever(tmp_path):
    with open(tmp_path / "log", "wb") as file:
        log = rank.RankLog(file.fileno(), "wb", closefd=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        log.write(b"x")
