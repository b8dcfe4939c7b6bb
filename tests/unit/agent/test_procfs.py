"""Processes that /proc hides are not dead: read for real where proc is mounted with hidepid."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from holdfast.agent.launchers import protocol
from holdfast.agent.launchers import rank_monitor as ranks
from holdfast.agent.launchers.run_session import RunSession
from holdfast.agent.system import procfs

LOOK = """
import importlib.util, os, sys
spec = importlib.util.spec_from_file_location("procfs", sys.argv[1])
procfs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(procfs)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
other, gone = int(sys.argv[2]), int(sys.argv[3])
print(procfs.hides_others(), procfs.process_alive(other), procfs.process_alive(gone),
      procfs.process_alive(os.getpid()), procfs.real_uid(other), procfs.real_uid(os.getpid()))
"""


def gone() -> int:
    """A process id that nobody has any more."""
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    return child.pid


def looked(mount: str) -> str:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to mount a /proc of its own")
    command = ["unshare", "--mount", "sh", "-c", f'{mount} exec "$0" -I -c "$@"', sys.executable,
               LOOK, procfs.__file__, str(os.getpid()), str(gone())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if "mount" in done.stderr:
        pytest.skip(f"no /proc of its own here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_process_of_another_user_that_proc_hides_lives() -> None:
    assert looked("mount -t proc -o hidepid=2 proc /proc &&") == "True True False True -1 65534"
    assert looked("") == "False True False True 0 65534"


def test_a_recorded_tree_is_not_asked_of_the_kernel(tmp_path) -> None:
    assert not procfs.process_alive(os.getpid(), str(tmp_path))
    assert procfs.process_alive(os.getpid()) and not procfs.process_alive(gone())
    assert not procfs.process_alive(0) and not procfs.process_alive(10**30)


def test_a_claim_about_another_users_process_is_not_believed(tmp_path) -> None:
    for pid, uid in ((11, 7), (12, 8), (13, 0)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Name:\tx\nUid:\t{uid}\t{uid}\t7\t7\n")

    def pids(uid: int, *claimed: int) -> list[int]:
        session = RunSession(protocol.Hello("r", nproc=8), 1, uid, 1.0, str(tmp_path))
        ranks = [protocol.RankLevel(n, pid, 1, "running") for n, pid in enumerate(claimed)]
        session.levels, session.have_levels = protocol.Levels(ranks=tuple(ranks)), True
        return [rank.pid for rank in session.view("n", 1.0, {}).ranks]

    assert pids(7, 11, 12, 13, 14) == [11, 0, 0, 14]  # who is gone or hidden may be anybody's
    assert pids(0, 11, 12, 13, 14) == [11, 12, 13, 14]
    session = RunSession(protocol.Hello("r", nproc=8), 1, 7, 1.0, str(tmp_path))
    assert session.owns(14)
    (tmp_path / "14").mkdir()
    (tmp_path / "14/status").write_text("Uid:\t8\t8\t8\t8\n")
    assert not session.owns(14)  # a claim that was made before the process was there


def test_a_rank_whose_processor_time_is_hidden_counts_as_one_that_computes(tmp_path) -> None:
    track = ranks.RankMonitor(0, 4711, 1, str(tmp_path))
    track.look_at_page(1.0)
    for now_s in (100.0, 101.0, 102.0):
        track.look_at_activity(now_s)
    assert track._active
    track.close()
