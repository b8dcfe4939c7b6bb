"""Whatever a check does in its child, its caller hears what became of it, and nothing stays."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_for

from holdfast.agent.checks import isolate
from holdfast.agent.checks.isolate import Call, Event, answering, run_all

MARK = "HOLDFAST_TEST_LEFT_BEHIND"
NOBODY = 65534
HANGS_S = 2.0  # what hangs has said its words before, however busy the machine is


def hang() -> Any:
    print("asks the driver", flush=True)
    while True:
        signal.pause()


def hang_unkindly() -> Any:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    return hang()


def crash() -> Any:
    print("touches what is not there", flush=True)
    ctypes.string_at(0)


def chatter() -> Any:
    while True:
        print("x" * 4096)


def eat() -> Any:
    return len([bytearray(1 << 24) for _ in range(1 << 14)])


def leave() -> Any:
    subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: str(os.getpid())},
                     start_new_session=True)
    return {"said": "well"}


def leave_and_crash() -> Any:
    leave()
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_without_a_name() -> Any:
    os.kill(os.getpid(), 40)


def junk(descriptor: int) -> None:
    os.write(descriptor, b"\x00\xffnot json\n")


def flood(descriptor: int) -> None:
    while True:
        os.write(descriptor, b"1" * 4000 + b"\n")


def refuse() -> Any:
    raise PermissionError("you may not")


def vanish() -> Any:
    os._exit(7)


BAD: list[tuple[str, Callable[[int], None], str]] = [
    ("hang", answering(hang), "no answer within 2 s; last it said: asks the driver"),
    ("hang_unkindly", answering(hang_unkindly), "no answer within 2 s"),
    ("crash", answering(crash), "it died of SIGSEGV; last it said: touches what is not there"),
    ("chatter", answering(chatter), "it wrote more than 65536 bytes"),
    ("eat", answering(eat), "it wants more than 256 MB"),
    ("leave", answering(leave), "it left 1 process behind, which was ended"),
    ("leave_and_crash", answering(leave_and_crash), "it died of SIGSEGV"),
    ("crash_without_a_name", answering(crash_without_a_name), "it died of signal 40"),
    ("junk", junk, "its answer is no JSON"),
    ("flood", flood, "it wrote more than 4194304 bytes"),
    ("refuse", answering(refuse), "PermissionError: you may not"),
    ("vanish", answering(vanish), "it ended with status 7"),
]


def call(name: str, function: Callable[[int], None], **more: Any) -> Call:
    given: dict[str, Any] = {"deadline_s": 30.0, "memory_bytes": 256 << 20,
                             "output_bytes": 65536, **more}
    return Call(name, function, **given)


def run(calls: list[Call], at_once: int = 4) -> dict[str, Event]:
    return {one.name: one for one in run_all(calls, at_once) if one.ended}


def well() -> Any:
    return {"said": "well"}


@pytest.fixture(autouse=True)
def nothing_stays() -> Any:
    before = isolate.descendants(os.getpid())
    files = len(os.listdir("/proc/self/fd"))
    yield
    assert isolate.descendants(os.getpid()) <= before
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.parametrize(("name", "function", "problem"), BAD, ids=[one[0] for one in BAD])
def test_a_bad_one_is_named_and_the_others_go_on(
    name: str, function: Callable[[int], None], problem: str
) -> None:
    deadline_s = HANGS_S if name.startswith("hang") else 30.0
    ended = run([call("first", answering(well)),
                 call(name, function, deadline_s=deadline_s), call("last", answering(well))])
    assert problem in ended[name].problem
    assert not ended["first"].problem and not ended["last"].problem


def test_all_bad_ones_at_once_end_one_by_one() -> None:
    calls = [call(name, function, deadline_s=HANGS_S if name.startswith("hang") else 30.0)
             for name, function, _ in BAD]
    ended = run(calls, at_once=1)
    assert {name: problem in ended[name].problem for name, _, problem in BAD} == {
        name: True for name, _, _ in BAD}


def test_answers_come_as_they_are_made() -> None:
    events = list(run_all([call("a", answering(lambda: [1, {"b": None}]))], 1))
    assert [one.value for one in events if not one.ended] == [[1, {"b": None}]]
    assert events[-1].ended and not events[-1].problem and events[-1].took_s > 0


def test_a_call_is_made_while_those_before_it_run(tmp_path: Path) -> None:
    """What the second costs to prepare, torch's import in the first does not wait for."""
    begun = tmp_path / "begun"

    def first() -> Any:
        begun.touch()
        return {"said": "well"}

    def calls() -> Iterator[Call]:
        yield call("first", answering(first))
        wait_for(begun.exists)
        yield call("second", answering(lambda: begun.exists()))

    events = list(run_all(calls(), 2))
    assert [one.value for one in events if one.name == "second" and not one.ended] == [True]


def test_a_call_may_become_another_program() -> None:
    def become(descriptor: int) -> None:
        os.set_inheritable(descriptor, True)
        text = f"import os; os.write({descriptor}, b'1\\n2\\n')"
        os.execv(sys.executable, [sys.executable, "-S", "-c", text])

    events = list(run_all([call("program", become, memory_bytes=0)], 1))
    assert [one.value for one in events if not one.ended] == [1, 2]
    assert events[-1].problem == ""


def test_two_of_one_kind_do_not_run_at_once(tmp_path: Path) -> None:
    """The second waits for the first, no longer than its own deadline."""
    lock, begun, over = str(tmp_path / "gemm.lock"), tmp_path / "begun", tmp_path / "over"

    def slow() -> Any:
        begun.touch()
        wait_for(over.exists)
        return {"said": "well"}

    def calls() -> Iterator[Call]:
        yield call("slow", answering(slow), lock=lock)
        wait_for(begun.exists)
        yield call("impatient", answering(well), lock=lock, deadline_s=0.1)
        yield call("second", answering(lambda: over.exists()), lock=lock)

    events = []
    for event in run_all(calls(), 3):
        events.append(event)
        if event.ended and event.name == "impatient":
            over.touch()
    ended = {one.name: one for one in events if one.ended}
    assert list(ended) == ["impatient", "slow", "second"]
    assert "another one of it runs already" in ended["impatient"].problem
    assert not ended["impatient"].begun
    assert not ended["slow"].problem and not ended["second"].problem and ended["second"].begun
    assert [one.value for one in events if one.name == "second" and not one.ended] == [True]
    assert not run([call("third", answering(well), lock=lock)])["third"].problem


def test_who_waited_is_asked_what_is_left_for_it(tmp_path: Path) -> None:
    """By then the listener has made what it makes of the first one's answer."""
    lock, begun, over = str(tmp_path / "gemm.lock"), tmp_path / "begun", tmp_path / "over"
    heard: list[str] = []

    def slow() -> Any:
        begun.touch()
        wait_for(over.exists)
        return {"said": "well"}

    def calls() -> Iterator[Call]:
        yield call("slow", answering(slow), lock=lock)
        wait_for(begun.exists)
        yield call("none", answering(hang), lock=lock, left=lambda: None)
        yield call("less", answering(hang), lock=lock, left=lambda: (
            call("less", answering(lambda: 1)) if "slow" in heard else None))
        yield call("free", answering(lambda: over.touch()), left=lambda: None)

    for event in run_all(calls(), 4):
        if event.ended:
            heard.append(event.name)
            assert not event.problem, event
        elif event.name == "less":
            heard.append(str(event.value))
    assert sorted(heard) == ["1", "free", "less", "none", "slow"]


def test_what_is_left_of_a_call_holds_its_lock(tmp_path: Path) -> None:
    """Also behind an exec, where the process may hang in the kernel: that cannot be made here, so
    the open files of the program are looked at."""
    lock = str(tmp_path / "gemm.lock")
    text = ("import os, sys; held = [os.readlink('/proc/self/fd/%d' % int(one))"
            " for one in os.listdir('/proc/self/fd') if os.path.exists('/proc/self/fd/' + one)];"
            "os.write(int(sys.argv[1]), b'%d\\n' % (sys.argv[2] in held))")

    def become(descriptor: int) -> None:
        os.set_inheritable(descriptor, True)
        os.execv(sys.executable, [sys.executable, "-S", "-c", text, str(descriptor), lock])

    events = list(run_all([call("a", become, memory_bytes=0, lock=lock)], 1))
    assert [one.value for one in events if not one.ended] == [1]
    assert not events[-1].problem


@pytest.mark.parametrize(("mode", "problem"), [
    (0o600, "cannot be told: "), (0o644, "")], ids=["not to be read", "to be read"])
def test_another_user_s_lock_costs_its_own_check_alone(mode: int, problem: str) -> None:
    if os.getuid() != 0:
        pytest.skip("files of another user need root")
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are nobody else's to enter
        foreign = Path(folder, "gemm.lock")
        foreign.touch()
        foreign.chmod(mode)
        os.chmod(folder, 0o755)
        calls = [call("gemm", answering(well), lock=str(foreign)), call("last", answering(well))]
        os.seteuid(NOBODY)
        try:
            ended = run(calls)
        finally:
            os.seteuid(0)
    assert problem in ended["gemm"].problem and bool(problem) == bool(ended["gemm"].problem)
    assert not problem or f"{foreign}: Permission denied" in ended["gemm"].problem
    assert not ended["last"].problem


def test_a_limit_of_memory_that_stands_already_is_not_raised() -> None:
    """As a container or a scheduler sets it: nobody but root may raise it again."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    own = 64 << 30

    def limits() -> Any:
        return list(resource.getrlimit(resource.RLIMIT_AS))

    def asks() -> Any:
        resource.setrlimit(resource.RLIMIT_AS, (own, own))
        os.setresuid(NOBODY, NOBODY, NOBODY)
        found = [event.value if event.value is not None else event.problem for event in run_all(
            [Call("gemm", answering(limits), 20.0, 1 << 40)], 1)]
        return found

    (answer, _) = run_all([Call("asks", answering(asks), 20.0)], 1)
    assert answer.value == [[own, own], ""], answer
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "gemm.lock").symlink_to(tmp_path / "target")
    ended = run([call("gemm", answering(well), lock=str(tmp_path / "gemm.lock"))])
    assert "gemm.lock" in ended["gemm"].problem and not (tmp_path / "target").exists()


def test_where_no_process_can_be_made_each_check_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    fork = os.fork
    monkeypatch.setattr(isolate.os, "fork", full)
    lock = str(tmp_path / "gemm.lock")
    events = run_all([call("gemm", answering(well), lock=lock), call("b", answering(well))], 2)
    first = next(events)
    assert first.ended and first.problem == (
        "it cannot be started: Resource temporarily unavailable")
    monkeypatch.setattr(isolate.os, "fork", fork)
    assert [one.problem for one in events if one.ended] == [""]
    assert not run([call("gemm", answering(well), lock=lock)])["gemm"].problem  # it was let go


def test_what_is_started_in_the_moment_of_the_end_is_ended_as_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whoever looks below it a moment before sees nothing there."""
    begun = tmp_path / "begun"

    def starts() -> Any:
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        begun.touch()
        return hang()

    events = run_all([call("quick", answering(well)), call("hang", answering(starts))], 2)
    assert next(events).name == "quick"
    while not begun.exists():
        time.sleep(0.01)
    end, calls = isolate._end, isolate._children_of(os.getpid())

    def sees_nothing(found: set[int], keep: int = 0) -> None:
        if keep not in calls:
            end(found, keep)

    monkeypatch.setattr(isolate, "_end", sees_nothing)
    events.close()  # type: ignore[attr-defined]


def test_whoever_stops_listening_ends_them_all() -> None:
    events = run_all([call("quick", answering(well)), call("hang", answering(hang_unkindly))], 2)
    assert next(events).name == "quick"
    events.close()  # type: ignore[attr-defined]
