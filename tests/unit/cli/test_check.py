"""`holdfast check` as a person and as a scheduler meets it."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from waiting import wait_for

from holdfast.agent.checks import gate, results, table
from holdfast.agent.cli import check, client, main
from holdfast.agent.cli.text import plain
from holdfast.agent.core.checks import baseline
from holdfast.agent.core.checks.verdict import (
    CRITICAL,
    OK,
    UNKNOWN,
    WARNING,
    Answer,
    CheckVerdict,
    Measure,
    judged,
)
from holdfast.agent.system import procfs

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "runtime"))


def answer(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
    monkeypatch.setattr(gate, "clock", lambda _: Answer(**given))


@pytest.mark.parametrize(("given", "code", "word"), [
    ({"said": "the clock is kept"}, 0, "ok"),
    ({"warning": ("it is late",)}, 1, "warning"),
    ({"critical": ("it stands",)}, 2, "critical"),
    ({"unknown": ("nobody answers",)}, 3, "unknown"),
])
def test_the_exit_code_is_that_of_nagios(
    given: dict[str, Any], code: int, word: str, monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    answer(monkeypatch, **given)
    assert main(["check", "clock"]) == code
    text = capsys.readouterr().out
    assert text.splitlines()[-1].startswith(f"{word}: 1 {word}, in ")
    assert ("do: `holdfast explain clock_unsynchronised`" in text) == (code != 0)
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_answer_that_nobody_reads_to_its_end_is_no_failure(unbuffered: str) -> None:
    command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "check", "clock", "--json"]
    reading, writing = os.pipe()
    os.close(reading)  # `holdfast check --json | head -c 0`
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, timeout=60.0, check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered})
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_answer_that_finds_no_room_says_so() -> None:
    command = [sys.executable, "-P", "-m", "holdfast.agent.cli", "check", "clock", "--json"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, timeout=60.0, check=False,
            env={**os.environ, "PYTHONUNBUFFERED": ""})
    assert done.returncode == 1
    assert done.stderr == b"holdfast: what was to be printed is lost: No space left on device\n"


def test_a_scheduler_is_told_one_line_and_only_a_confirmed_critical(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    for given, code in (({"warning": ("late",)}, 0), ({"unknown": ("mute",)}, 0),
                        ({"critical": ("stands",)}, 1)):
        answer(monkeypatch, **given)
        assert main(["check", "clock", "--for", "slurm-prolog", "--max-age", "0"]) == code
        (said,) = capsys.readouterr().out.splitlines()
        assert said.startswith("holdfast: ") and next(iter(given.values()))[0] in said


@pytest.mark.parametrize("wrong", [
    ["nothing"], ["clock", "--profile", "p5d"], ["collectives", "--sizes", "1X"],
    ["collectives", "--sizes", "4"], ["clock", "--config", "/nowhere.toml"],
])
def test_a_mistake_of_ours_is_unknown_and_drains_no_node(
    wrong: list[str], capsys: Captured
) -> None:
    assert main(["check", *wrong]) == 3
    assert "holdfast: " in capsys.readouterr().err
    assert main(["check", *wrong, "--for", "slurm-prolog"]) == 0
    assert "holdfast: unknown: " in capsys.readouterr().err


@pytest.mark.parametrize("beside", [
    ["--reason", "x"], ["--port", "9858"], ["--sizes", "1M"], ["--ranks", "2"], ["--path", "/tmp"]])
def test_a_word_too_many_is_refused_and_opens_no_gate(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, beside: list[str]
) -> None:
    """A person is told instead of the checks, a scheduler beside them."""
    answer(monkeypatch, critical=("stands",))
    assert main(["check", "clock", *beside]) == 3
    shown = capsys.readouterr()
    assert beside[0] in shown.err and not shown.out
    for of in ("batch", "slurm-prolog"):
        assert main(["check", "clock", *beside, "--for", of, "--max-age", "0"]) == 1
        shown = capsys.readouterr()
        assert "stands" in shown.out and f"holdfast: passed over: {beside[0]}" in shown.err


def test_limits_of_the_configuration_are_read_or_named(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "agent.toml"
    file.write_text('[checks]\nlimits = ["gemm >= 1e9"]\n')
    assert main(["check", "clock", "--config", str(file)]) == 3
    assert "write NAME >= NUMBER" in capsys.readouterr().err
    assert table.limits_of(["gemm_float32 >= 1e9", "all_reduce>=4.6e11"]) == {
        "gemm_float32": 1e9, "all_reduce": 4.6e11}


def test_sizes_are_those_that_people_write() -> None:
    assert [check._size(one) for one in ("8", "64K", "1M", "1MiB", " 8g ")] == [
        8, 1 << 16, 1 << 20, 1 << 20, 1 << 33]


def test_json_says_all_of_it(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    answer(monkeypatch, said="kept")
    assert main(["check", "clock", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["status"] == "ok" and said["checks"][0]["check"] == "clock"
    assert {"reason", "value", "limit", "limit_from", "todo", "took_s"} <= said["checks"][0].keys()
    assert main(["check", "--list", "--json"]) == 0
    assert {one["name"] for one in json.loads(capsys.readouterr().out)} >= {"clock", "collectives"}
    assert main(["check", "--list"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def kept(tmp_path: Path, status: str, age_s: float, confirmed: bool = True) -> None:
    with results.changing(tmp_path / "state/checks") as all_of_it:
        all_of_it.boot_id = procfs.boot_id()
        all_of_it.verdicts.clear()
        all_of_it.take(CheckVerdict("clock", status, "why", wall_s=time.time() - age_s,
                                    confirmed=confirmed))


def test_a_health_program_is_answered_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(check.subprocess, "Popen", lambda words, **_: asked.append(words))
    ask = ["check", "--for", "slurm-health"]
    assert main(ask) == 0 and "nothing was checked yet" in capsys.readouterr().out
    assert len(asked) == 1 and "clock" in asked[0] and "gemm" not in asked[0]
    assert 0 <= float(asked[0][3]) <= check.JITTER_S
    for status, age_s, code in ((OK, 10, 0), (WARNING, 10, 0), (CRITICAL, 10, 1),
                                (UNKNOWN, 10, 0)):
        kept(tmp_path, status, age_s)
        assert main(ask) == code
        assert len(asked) == 1  # answered without a check
    kept(tmp_path, CRITICAL, check.FRESH_S + 10)
    assert main(ask) == 1 and len(asked) == 2  # known still, and made anew
    kept(tmp_path, CRITICAL, check.STALE_S + 10)
    assert main(ask) == 0 and len(asked) == 3
    kept(tmp_path, OK, 10)  # what is never made in the background asks for nothing
    with results.changing(tmp_path / "state/checks") as all_of_it:
        all_of_it.take(CheckVerdict("gemm", OK, "why", wall_s=time.time() - check.FRESH_S - 10))
    assert main(ask) == 0 and len(asked) == 3
    with results.changing(tmp_path / "state/checks") as all_of_it:
        del all_of_it.verdicts["clock"]
    assert main(ask) == 0 and len(asked) == 4


def test_a_health_program_waits_for_no_agent_that_hangs_and_for_none_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Each of them takes the connection and never answers."""
    limits: list[float] = []
    hanging = []
    for number in range(5):
        folder = tmp_path / f"agent-{number}"
        folder.mkdir(mode=0o700)
        hanging.append(socket.socket(socket.AF_UNIX))
        hanging[-1].bind(str(folder / "api.sock"))
        hanging[-1].listen()
    asked = client._asked

    def timed(agent: client.Agent, environ: Any) -> Any:
        limits.append(agent.timeout_s)
        together.wait(20.0)  # BrokenBarrierError unless all five are asked at once
        return asked(agent, environ)

    together = threading.Barrier(5)
    monkeypatch.setattr(client, "_asked", timed)
    monkeypatch.setattr(client, "runtime_directories", lambda environ, refused: [
        tmp_path / f"agent-{number}" for number in range(5)])
    kept(tmp_path, OK, 10)
    assert main(["check", "--for", "slurm-health"]) == 0
    assert limits == [check.HEALTH_S] * 5 and check.HEALTH_S < 1.0
    assert "ok: 1 check passed" in capsys.readouterr().out
    for one in hanging:
        one.close()


def test_what_checks_said_before_is_shown_and_none_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(gate, "clock", lambda _: pytest.fail("a check was made"))
    assert main(["check", "--history"]) == 0
    assert capsys.readouterr().out == "no check was made here yet\n"
    kept(tmp_path, OK, 120)
    kept(tmp_path, WARNING, 60)
    with results.changing(tmp_path / "state/checks") as all_of_it:
        for number in range(results.HISTORY_MAX + 3):
            all_of_it.take(CheckVerdict("gemm", OK, "", 1e9 + number * 1e8, "FLOP/s",
                                        wall_s=time.time()))
    assert main(["check", "--history", "clock", "disk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "clock" and lines[-1] == "disk was never made here"
    assert [one.split()[0] for one in lines[1:-1]] == [OK, WARNING]
    assert re.search(r" 2 min \d+ s ago$", lines[1]) and max(map(len, lines)) <= 80
    assert main(["check", "--history"]) == 0
    text = capsys.readouterr().out
    assert text.count(" GFLOP/s ") == results.HISTORY_MAX and "4.4 GFLOP/s" in text
    assert main(["check", "--history", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said.keys() == {"clock", "gemm"}
    assert said["clock"][-1]["status"] == WARNING and said["gemm"][-1]["value"] == 4.4e9
    assert main(["check", "--history", "clok"]) == 3
    assert "did you mean clock?" in capsys.readouterr().err


def test_an_answer_from_the_cache_loads_no_collector(tmp_path: Path) -> None:
    kept(tmp_path, OK, 10)
    words = ("import sys; from holdfast.agent.cli import main; "
             "main(['check', '--for', 'slurm-health']); "
             "print('holdfast.collectors' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True,
                          timeout=60, check=True)
    assert done.stdout == "holdfast: ok: 1 check passed\nFalse\n"


def test_a_row_says_value_limit_and_whose_it_is() -> None:
    verdict = CheckVerdict(
        "host_copy", WARNING, "host_copy of cuda:0 is 12 GB/s, below 48 GB/s", 12e9, "B/s", 48e9,
        "profile", "hgx-h100, Azure, 2026-11-20", "look at the lanes", 0.4, 1000.0)
    assert plain(check.row(verdict, 1000.0, False)).splitlines() == [
        "warning  host_copy              12 GB/s  >= 48 GB/s profile              0.40 s",
        "         host_copy of cuda:0 is 12 GB/s, below 48 GB/s",
        "         limit: hgx-h100, Azure, 2026-11-20",
        "         do: look at the lanes",
    ]
    old = plain(check.row(verdict, 1200.0, False)).splitlines()[0]
    assert old.endswith("3 min 20 s ago") and len(old) <= 80


def test_what_several_checks_lack_is_said_once() -> None:
    first, second = (CheckVerdict(name, UNKNOWN, "no torch", todo="name a Python")
                     for name in ("tensor", "gemm"))
    well, also = (CheckVerdict(name, OK, "room") for name in ("memory", "disk"))
    assert check.said_before(first, []) == "" and check.said_before(second, [first]) == "tensor"
    assert check.said_before(also, [well]) == ""  # what is well has few words as it is
    assert check.said_before(replace(second, todo="another"), [first]) == ""
    assert plain(check.row(second, 0.0, False, "tensor")).splitlines()[1:] == [
        "         as tensor"]


def test_a_row_whose_baseline_warns_above_its_limit_explains_itself() -> None:
    """Distributions are compared: the median may be above, and the low samples count."""
    passes = [[10e9, 10e9, 10e9] for _ in range(6)]
    slow = Measure("host_copy", 8e9, "B/s", "cpu", (1e9, 8e9, 10e9))
    limit = baseline.limit_of(slow, passes)
    assert limit is not None and not limit.met
    verdict = judged("host_copy", Answer(measures=(slow,)), {slow: [limit]}, "look")
    shown = plain(check.row(verdict, 0.0, False)).splitlines()
    assert "8 GB/s" in shown[0] and "like its passes baseline" in shown[0] and ">=" not in shown[0]
    assert max(map(len, shown)) <= 80
    assert " ".join(one.strip() for one in shown[1:-1]) == (
        "host_copy of cpu is 8 GB/s, samples of 1 GB/s to 10 GB/s are 0.64 like those of 6 passes "
        "(10 GB/s to 10 GB/s); 0.95 is enough")


def test_a_terminal_sees_how_far_it_is_and_a_pipe_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    answer(monkeypatch, said="kept")
    assert main(["check", "clock"]) == 0 and "\r" not in capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["check", "clock"]) == 0
    text = capsys.readouterr().out
    assert "0 of 1 checks made" in text and "1 of 1 checks made" in text
    assert text.rindex("\x1b[K") < text.rindex(": 1 ok, in ")


def test_the_whole_command_over_a_flipped_bit(tmp_path: Path) -> None:
    """Through the installed command, as a prolog runs it: a bit that flips each time refuses."""
    pytest.importorskip("torch")
    environ = {**os.environ, "HOLDFAST_CHECK_FLIP_BIT": "7"}
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.agent.cli", "check", "tensor", "--for", "slurm-prolog",
         "--python", sys.executable],
        env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done
    assert "tensor critical: cpu: the same product of integers twice" in done.stdout


def test_two_whole_commands_at_once(tmp_path: Path) -> None:
    """The second one waits for the first where both want the same, and takes what that found."""
    pytest.importorskip("torch")
    environ = {**os.environ, "HOLDFAST_STATE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "holdfast.agent.cli", "check", "tensor", "clock", "--json",
               "--python", sys.executable]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as first:
        wait_for(lambda: _held(tmp_path / "checks/torch.lock") or first.poll() is not None)
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120,
                              check=False)
        output = first.communicate(timeout=120)[0]
    theirs, ours = ({one["check"]: one for one in json.loads(text)["checks"]}
                    for text in (output, done.stdout))
    assert theirs["tensor"] == ours["tensor"] and ours["tensor"]["status"] == "ok"
    assert ours["clock"]["status"] != "critical"
    kept = results.load(tmp_path / "checks")
    assert kept.verdicts.keys() == {"tensor", "clock"} and len(kept.history["tensor"]) == 1


def _held(lock: Path) -> bool:
    """By the kernel's list: who tries it by locking holds it meanwhile."""
    try:
        inode = lock.stat().st_ino
    except FileNotFoundError:
        return False
    return f":{inode} " in Path("/proc/locks").read_text()


def test_who_may_keep_nothing_is_answered_all_the_same(tmp_path: Path) -> None:
    """As root without the right to pass over permissions, in another user's folder: that user
    could not read this interpreter."""
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("another user's folder needs root and setpriv (Debian package util-linux)")
    state = tmp_path / "foreign"
    state.mkdir()
    os.chown(state, 65534, 65534)
    done = subprocess.run(
        ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-m",
         "holdfast.agent.cli", "check", "clock", "memory", "devices"],
        env={**os.environ, "HOLDFAST_STATE_DIR": str(state)}, capture_output=True, text=True,
        timeout=60, check=False)
    text = " ".join((done.stdout + done.stderr).split())
    assert done.returncode in (0, 1) and "Traceback" not in text, text
    # Without blanks: a path is broken where 80 columns end.
    assert f"notkept:{state}/checks:Permissiondenied" in text.replace(" ", "")
    assert all(f" {name} " in text for name in ("clock", "memory", "devices"))
    assert not list(state.iterdir())
