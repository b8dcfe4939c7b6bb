"""A compiler below a rank, a lock that it awaits, and what must not be taken for either."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from holdfast.worker import page as pages
from holdfast.worker.launcher import compiling
from holdfast.worker.launcher.compiling import Watch


def rank_of(pid, still_s=5.0, rank=1):
    """A rank as the launcher keeps it; its page moved `still_s` ago."""
    fields = [0] * pages.FIELDS
    fields[pages.F_PROGRESS] = time.monotonic_ns() - int(still_s * 1e9)
    return SimpleNamespace(rank=rank, assigned=True, ended=None, fields=fields,
                           child=SimpleNamespace(pid=pid))


@pytest.fixture
def child(tmp_path):
    """Starts sleep under any name; ends what it started."""
    started = []

    def start(name):
        path = str(tmp_path / name)
        shutil.copy("/bin/sleep", path)
        started.append(subprocess.Popen([path, "60"]))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


def test_a_compiler_below_a_rank_that_stands_still_is_named(child):
    child("cc1plus")
    assert Watch({}).look([rank_of(os.getpid())], 10.0) == "rank 1: cc1plus"


def test_a_rank_that_moves_and_any_other_child_say_nothing(child):
    compiler = child("cc1plus")
    assert Watch({}).look([rank_of(os.getpid(), still_s=0.1)], 10.0) == ""
    compiler.kill()
    compiler.wait()
    child("preprocess")
    assert Watch({}).look([rank_of(os.getpid())], 10.0) == ""


def state(process, wanted):
    """Waits until the kernel says that it is so."""
    deadline_s = time.monotonic() + 10.0
    while compiling.name_and_state(process.pid)[1] != wanted:
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_an_idle_helper_of_torch_compile_is_no_reason_to_wait(tmp_path):
    """It stays for ever, asleep; only one that runs compiles."""
    go = tmp_path / "go"
    os.mkfifo(go)
    busy = f"import sys; open({str(go)!r}).read()\nwhile True: pass"
    helper = subprocess.Popen([sys.executable, "-c", busy, "torch/_inductor/compile_worker"])
    try:
        with open(go, "w"):  # it is in its own open or read now
            state(helper, "S")
            assert Watch({}).look([rank_of(os.getpid())], 10.0) == ""
        state(helper, "R")
        assert Watch({}).look([rank_of(os.getpid())], 10.0) == "rank 1: torch.compile"
    finally:
        helper.kill()
        helper.wait()


def test_a_compiler_that_was_stopped_or_ended_compiles_nothing(child):
    compiler = child("ptxas")
    compiler.send_signal(signal.SIGSTOP)
    state(compiler, "T")
    assert Watch({}).look([rank_of(os.getpid())], 10.0) == ""
    compiler.kill()
    os.waitid(os.P_PID, compiler.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
    assert Watch({}).look([rank_of(os.getpid())], 10.0) == ""


def test_it_holds_for_a_moment_between_two_compilers_and_no_longer(child):
    compiler, watch, rank = child("nvcc"), Watch({}), rank_of(os.getpid())
    assert watch.look([rank], 10.0) == "rank 1: nvcc"
    compiler.kill()
    compiler.wait()
    assert watch.look([rank], 12.0) == "rank 1: nvcc"
    assert watch.look([rank], 10.0 + compiling.HOLD_S + 0.1) == ""


def test_it_ends_at_once_when_the_rank_moves(child):
    child("nvcc")
    watch = Watch({})
    assert watch.look([rank_of(os.getpid())], 10.0)
    assert watch.look([rank_of(os.getpid(), still_s=0.0)], 10.1) == ""


def test_it_looks_once_a_second_and_again_after_the_rank_moved(child):
    watch, rank = Watch({}), rank_of(os.getpid())
    assert watch.look([rank], 10.0) == ""
    child("ptxas")
    assert watch.look([rank], 10.5) == ""
    assert watch.look([rank], 11.1) == "rank 1: ptxas"


@pytest.mark.parametrize(("folder", "environ", "seen"), [
    ("torchinductor_me/locks", {}, True),
    ("mine", {"TRITON_CACHE_DIR": "mine"}, True),
    ("data", {}, False),
])
def test_a_lock_counts_in_a_compile_cache_alone(tmp_path, folder, environ, seen):
    place = tmp_path / folder
    place.mkdir(parents=True)
    environ = {name: str(tmp_path / path) for name, path in environ.items()}
    with open(place / "abc.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = Watch(environ).look([rank_of(os.getpid())], 10.0)
    assert found == (f"rank 1 holds or awaits {place / 'abc.lock'}" if seen else "")


@pytest.mark.parametrize(("environ", "folders"), [
    ({"NEURON_CC_FLAGS": "--cache_dir=./compiled -O1"}, ["compiled"]),
    ({"NEURON_CC_FLAGS": "-O1 --cache_dir a/b/"}, ["a/b"]),
    ({"NEURON_CC_FLAGS": "--cache_dir -O1"}, []), ({"NEURON_CC_FLAGS": "--cache_dir="}, []),
    ({"NEURON_CC_FLAGS": "--cache_dir=c", "NEURON_COMPILE_CACHE_URL": "c"}, ["c"]),
    ({"NEURON_CC_FLAGS": "--cache_dir=/x/y/", "NEURON_COMPILE_CACHE_URL": "file:///z"},
     ["/x/y", "/z"]),
    ({"NEURON_COMPILE_CACHE_URL": "s3://bucket/x"}, []),
    ({"NEURON_COMPILE_CACHE_URL": "/"}, []), ({}, []),
])
def test_a_cache_of_neurons_is_found_below_the_jobs_folder(
    tmp_path, monkeypatch, environ, folders
):
    monkeypatch.chdir(tmp_path)
    assert compiling.neuron_caches(environ) == [str(tmp_path / one) for one in folders]


def test_a_process_that_is_gone_or_another_users_says_nothing():
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    assert Watch({}).look([rank_of(gone.pid)], 10.0) == ""
    assert Watch({}, proc="/nonexistent").look([rank_of(1)], 10.0) == ""


def test_a_rank_whose_page_says_so_compiles_by_itself():
    rank = rank_of(os.getpid())
    assert Watch({}).look([rank], 10.0) == ""
    rank.fields[pages.F_PHASE] = compiling.COMPILE
    assert Watch({}).look([rank], 10.0) == "rank 1: its graphs"
    moving = rank_of(os.getpid(), still_s=0.2)
    moving.fields[pages.F_PHASE] = compiling.COMPILE
    assert Watch({}).look([moving], 10.0) == ""


def test_ranks_that_compile_before_they_have_a_place_keep_nobody_waiting():
    waiting, trains = rank_of(os.getpid(), still_s=0.1, rank=-1), rank_of(os.getpid(), still_s=0.1)
    waiting.assigned = False
    waiting.fields[pages.F_PHASE] = compiling.COMPILE
    watch = Watch({})
    assert watch.look([waiting], 10.0) == compiling.STARTING
    assert watch.look([waiting, trains], 10.1) == ""  # a standby
    waiting.fields[pages.F_PHASE] = pages.PHASES.index("startup")
    assert watch.look([waiting], 10.2) == ""


def test_a_rank_that_says_for_which_program_it_waits_awaits_the_lock_beside_it(tmp_path):
    """As Neuron's runtime does, which does not hold that lock open; once a minute, in a log that
    may say much else."""
    program = tmp_path / "cache/neuronxcc-2.21/MODULE_1/model.hlo_module.pb"
    program.parent.mkdir(parents=True)
    log = tmp_path / "logs/rank-1/stdout.log"
    log.parent.mkdir(parents=True)
    watch = Watch({"NEURON_COMPILE_CACHE_URL": str(tmp_path / "cache")}, str(tmp_path / "logs"))
    rank = rank_of(os.getpid())
    assert watch.look([rank], 10.0) == ""
    log.write_text("x" * 100_000 + f"\n[INFO]: Another process must be compiling {program}, been "
                   "waiting for: 3.0 minutes\nepoch 1\n")
    assert watch.look([rank], 20.0) == ""  # that compile is over: its lock is gone
    lock = program.with_name(f"{program.name}.lock")
    lock.touch()
    assert watch.look([rank], 30.0) == f"rank 1 awaits {lock}"
    moving = rank_of(os.getpid(), still_s=0.1)
    assert watch.look([moving], 40.0) == ""
    os.utime(log, (time.time() - 600.0,) * 2)  # it would have said so again
    assert watch.look([rank], 45.0) == ""
    log.write_text("Another process must be compiling /etc/passwd, been waiting for: 1 minutes\n")
    assert watch.look([rank], 50.0) == ""
