"""A rank's own word about its end: written before teardown, true, and what Python owes is done."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.worker import exits
from holdfast.worker import page as pages
from holdfast.worker.rank import outcome

TYPES = str(Path(__file__).resolve().parents[3] / ".types")
LIMIT_S = 60.0
LEAVES = """
import atexit, os, sys, threading, time
from holdfast.worker import page as pages
from holdfast.worker.rank import outcome
fields, told = pages.map_fields(int(sys.argv[1])), sys.argv[3]
code = int(sys.argv[2])

def word():
    view = pages.read_page(fields)
    return "%s %d" % (view.outcome, view.code)

def work():
    while not hasattr(threading, "let_go"):
        time.sleep(0.001)
    with open(told, "a") as file:
        file.write("thread, " + word() + chr(10))

def at_exit():
    with open(told, "a") as file:
        file.write("exit, " + word() + chr(10))

atexit.register(at_exit)
thread = threading.Thread(target=work)
thread.start()
shutdown = threading._shutdown
def joined():
    threading.let_go = True
    shutdown()
threading._shutdown = joined
sys.stdout.write("not flushed yet")
if len(sys.argv) > 4:
    sys.stderr.close()
    sys.stdout, kept = None, sys.stdout
outcome.leave(fields, "done" if code == 0 else "exit", code)
"""


@pytest.mark.parametrize(("error", "said"), [
    (SystemExit(), ("done", 0)), (SystemExit(0), ("done", 0)), (SystemExit(False), ("done", 0)),
    (SystemExit(3), ("exit", 3)), (SystemExit(256 + 5), ("exit", 5)),
    (SystemExit(-1), ("exit", 255)), (SystemExit("a message"), ("exit", 1)),
    (KeyboardInterrupt(), ("exit", exits.INTERRUPTED)),
    (ValueError("x"), ("exception", 1)), (MemoryError(), ("exception", 1))], ids=repr)
def test_what_leaves_a_script_is_its_outcome(error, said):
    assert outcome.of_exception(error) == said


@pytest.fixture()
def page():
    fd = pages.create()
    fields = pages.map_fields(fd)
    yield fd, fields
    fields.release()
    os.close(fd)


@pytest.mark.parametrize(("word", "code", "kept"), [
    ("done", 0, 0), ("exit", 3, 3), ("exit", 255, 255), ("exit", 256 + 7, 7), ("exit", -1, 255)])
def test_the_page_has_the_outcome_and_a_code_of_one_byte(word, code, kept, page):
    outcome.write_page(page[1], word, code)
    view = pages.read_page(page[1])
    assert (view.outcome, view.code) == (word, kept)


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("streams", [(), ("closed",)])
def test_the_word_is_there_before_anything_that_can_hang(code, streams, page, tmp_path):
    """Threads are joined after a good end alone: a rank that failed keeps nobody waiting."""
    told = tmp_path / "told"
    done = subprocess.run(
        [sys.executable, "-c", LEAVES, str(page[0]), str(code), str(told), *streams],
        pass_fds=(page[0],), env={**os.environ, "PYTHONPATH": TYPES}, capture_output=True,
        timeout=LIMIT_S)
    assert done.returncode == code, done.stderr
    word = "done 0" if code == 0 else "exit 3"
    lines = told.read_text().splitlines()
    assert lines == ([f"thread, {word}"] if code == 0 else []) + [f"exit, {word}"]
    if not streams:
        assert done.stdout == b"not flushed yet"


class Full:
    """A stderr on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    flush = write


def by_hook(*error):
    raise ValueError("the hook's own mistake")


def through_stderr(*error):
    sys.stderr.write("rank0: KeyError")  # as torch's does


@pytest.mark.parametrize(("hook", "stream"), [
    (by_hook, None), (by_hook, Full()), (through_stderr, None), (through_stderr, Full())])
def test_a_hook_that_fails_ends_nobody(hook, stream, monkeypatch):
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(sys, "stderr", stream)
    outcome.show(KeyError("x"))


def test_behind_a_hook_that_fails_both_errors_are_shown(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", by_hook)
    outcome.show(KeyError("the script's"))
    shown = capsys.readouterr().err
    assert shown.index("ValueError: the hook's own") < shown.index("KeyError: \"the script's\"")


def test_the_error_file_is_torchs_and_the_first_one_stands(tmp_path, capsys):
    path = tmp_path / "error.json"
    outcome.write_error_file(str(path), 1, SystemExit(3))
    outcome.write_error_file("", 1, ValueError("x"))
    assert not path.exists()
    outcome.write_error_file(str(path), 1, ValueError("bad row"))
    outcome.write_error_file(str(path), 1, KeyError("later"))
    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: bad row" and message["extraInfo"]["rank"] == 1
    outcome.write_error_file(str(tmp_path / "no/such/folder"), 1, ValueError("x"))
    assert "no/such/folder: [Errno 2]" in capsys.readouterr().err
