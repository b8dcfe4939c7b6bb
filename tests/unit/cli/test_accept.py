"""`holdfast accept`: orders outlive it and its node, and begin again only where the run goes on."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import wait_for

from holdfast.agent.cli import accept, kept_orders
from holdfast.agent.cli.accept import Launchers
from holdfast.agent.cli.kept_orders import KeptOrders
from holdfast.agent.daemon.attempts import GOES_ON, HERE, OVER, UNKNOWN
from holdfast.agent.system import procfs

LIVES = "import time; time.sleep(600)"
HOUR_S = 3600.0


class Lives:
    """One life of `holdfast accept` after the other, on one disk; launchers that only live."""

    def __init__(self, home: Path) -> None:
        self.home, self.environ = home, {"HOLDFAST_STATE_DIR": str(home / "state")}
        self.said: list[str] = []
        self.all: list[Launchers] = []
        self.folder = KeptOrders(self.environ, self.said.append).folder

    def begin(self) -> Launchers:
        found = Launchers(KeptOrders(self.environ, self.said.append))
        self.all.append(found)
        return found

    def files(self) -> list[str]:
        return sorted(one.name for one in self.folder.iterdir())

    def row(self, id: str = "start-1") -> dict[str, Any]:
        return dict(json.loads((self.folder / f"{id}.json").read_text()))

    def change(self, **changes: Any) -> None:
        path = self.folder / "start-1.json"
        path.write_text(json.dumps(self.row() | changes))

    def killed(self) -> Launchers:
        """Of a life in which a launcher ran, and was not seen to end: the next one."""
        old = self.begin()
        old.start(order(self.home))
        old.learn(word(HERE, 7))
        old.running["start-1"].kill()
        old.running["start-1"].wait(10)
        return self.begin()

    def close(self) -> None:
        for one in (process for life in self.all for process in life.running.values()):
            one.kill()
            one.wait(10)


@pytest.fixture
def lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lives]:
    monkeypatch.setattr(accept, "OURS", (sys.executable, "-S", "-c", LIVES))
    found = Lives(tmp_path)
    monkeypatch.setattr(accept, "say", found.said.append)
    yield found
    found.close()


def order(folder: Path, id: str = "start-1", run: str = "m5") -> dict[str, Any]:
    return {"do": "start", "id": id, "run": run, "command": "run", "arguments": ["x.py"],
            "folder": str(folder), "environment": {"A": "b"}, "by": "alice (uid 7) at n0"}


def word(state: str, attempt: int = 7, node: str = "n3", run: str = "m5") -> dict[str, Any]:
    return {"node": node, "runs": {run: {"state": state, "attempt": attempt, "text": "so it is"}}}


def test_an_order_is_on_disk_before_it_begins_and_until_its_launcher_was_seen_to_end(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, on_disk = accept.subprocess.Popen, []

    def begins(*given: Any, **named: Any) -> Any:
        on_disk.append((lives.files(), lives.row()["pid"]))
        return made(*given, **named)

    monkeypatch.setattr(accept.subprocess, "Popen", begins)
    life = lives.begin()
    life.start(order(lives.home))
    assert on_disk == [(["start-1.json"], 0)]
    life.start(order(lives.home))
    assert len(life.running) == 1, "once for each order"
    path = lives.folder / "start-1.json"
    assert path.stat().st_mode & 0o777 == 0o600 and lives.folder.stat().st_mode & 0o777 == 0o700
    assert lives.row()["pid"] == life.running["start-1"].pid
    life.end("start-1")
    wait_for(life.reap)
    assert lives.files() == [] and life.told["start-1"]["state"] == "ended"
    assert not lives.begin().kept


@pytest.mark.parametrize("boot", ["", "another-boot"])
def test_a_launcher_that_was_lost_begins_again_once_its_run_is_known_to_go_on(
    boot: str, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procfs, "boot_id", lambda: "first-boot")
    life = lives.killed()
    if boot:
        monkeypatch.setattr(procfs, "boot_id", lambda: boot)
        life = lives.begin()
    assert life.told["start-1"]["state"] == "queued" and not life.running
    assert life.question() == {"runs": [{"run": "m5", "attempt": 7}]}
    for _ in range(2):  # the store is away, or nobody leads the run for a moment
        assert not life.learn(word(UNKNOWN)) and not life.running
    assert sum("waits" in one for one in lives.said) == 1, lives.said
    assert lives.files() == ["start-1.json"]
    assert life.learn(word(GOES_ON)) and life.told["start-1"]["state"] == "running"
    assert len(lives.row()["restarts"]) == 1 and lives.row()["boot_id"] == (boot or "first-boot")
    assert any("started again, for alice" in one for one in lives.said)
    environ = Path(f"/proc/{life.running['start-1'].pid}/environ")
    wait_for(lambda: b"A=b" in environ.read_bytes().split(b"\0"))
    assert not life.learn(word(GOES_ON)) and len(life.running) == 1
    life.running["start-1"].kill()
    wait_for(life.reap)
    assert lives.files() == []


@pytest.mark.parametrize("state", [OVER, GOES_ON, UNKNOWN])
def test_a_run_that_ends_while_its_launcher_comes_is_not_begun_anew(
    state: str, lives: Lives
) -> None:
    """With `--nnodes 1:4` it would train on alone, under a name that has ended."""
    life = lives.killed()
    life.learn(word(GOES_ON))
    assert life.question() == {"runs": [{"run": "m5", "attempt": 7}]}
    assert life.look_s() == accept.LOOK_S
    life.learn(word(HERE, 0))  # not named yet
    life.learn(word(state))
    if state == OVER:
        wait_for(life.reap)
        assert lives.files() == [] and life.told["start-1"]["code"] == 128 + signal.SIGTERM
        return
    life.learn(word(HERE, 7))
    assert life.question() == {"runs": [{"run": "m5", "attempt": 0}]}
    life.learn(word(OVER))  # it is one of the attempt's own, and hears of its end by itself
    assert not life.reap() and life.running["start-1"].poll() is None
    assert life.look_s() == accept.LEARN_S


def test_no_second_launcher_begins_beside_one_that_is_on_its_way_out(lives: Lives) -> None:
    old = lives.begin()
    old.start(order(lives.home))
    old.learn(word(HERE))
    new = lives.begin()
    for state in (GOES_ON, OVER, HERE):
        assert not new.learn(word(state)) and not new.running and new.kept
    old.running["start-1"].kill()
    wait_for(lambda: Path(f"/proc/{old.running['start-1'].pid}/stat").read_text().split()[2] == "Z")
    assert new.learn(word(GOES_ON)) and new.running


@pytest.mark.parametrize("pid", [True, False])
def test_a_process_of_another_boot_is_not_the_launcher(
    pid: bool, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One boot is as the other: the same pid may begin in the same moment of it."""
    old = lives.begin()
    old.start(order(lives.home))
    old.learn(word(HERE))
    lives.change(boot_id="another-boot", **({} if pid else {"pid": 0}))
    new = lives.begin()
    assert new.learn(word(GOES_ON)) and new.running


def test_an_order_that_was_about_to_begin_may_have_begun(lives: Lives) -> None:
    lives.killed()
    lives.change(pid=0, seen_wall_s=time.time() - 1)
    life = lives.begin()
    assert not life.learn(word(GOES_ON)) and not life.running
    lives.change(pid=0, seen_wall_s=time.time() - kept_orders.BEGINS_S)
    assert lives.begin().learn(word(GOES_ON))


@pytest.mark.parametrize(("changes", "state", "why"), [
    ({}, OVER, "so it is"),
    ({}, HERE, "another launcher serves it here"),
    ({"attempt": 0}, GOES_ON, "not known to have begun"),
    ({"seen_wall_s": time.time() - 25 * HOUR_S}, GOES_ON, "more than 24 hours ago"),
    ({"seen_wall_s": time.time() - 25 * HOUR_S}, UNKNOWN, "more than 24 hours ago"),
    ({"restarts": [time.time() - 60] * 3}, GOES_ON, "3 times within 1 h"),
    ({"restarts": [time.time() + 60] * 3}, GOES_ON, "3 times within 1 h"),
    ({"restarts": [time.time() - 20 * HOUR_S] * 6}, GOES_ON, "6 times within 24 h"),
])
def test_what_may_not_begin_again_is_dropped_and_said_in_one_line(
    changes: dict[str, Any], state: str, why: str, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept, "SERVED_S", 0.0)
    lives.killed()
    lives.change(**changes)
    lives.said.clear()
    life = lives.begin()
    assert life.learn(word(state)) and not life.running and not life.kept
    assert lives.files() == []
    (told,) = [one for one in lives.said if "not started again" in one]
    assert why in told and life.told["start-1"]["state"] == "refused"
    assert not lives.begin().kept


def test_a_word_of_the_launcher_that_was_lost_gives_no_order_up(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent was asked before it knew that the launcher is gone."""
    lives.killed()
    life = lives.begin()
    assert not life.learn(word(HERE)) and life.kept and not life.running
    assert not life.learn(word(UNKNOWN))
    monkeypatch.setattr(accept, "SERVED_S", 0.05)
    time.sleep(0.05)
    assert not life.learn(word(HERE)) and life.kept, "the two words do not follow one another"
    assert life.learn(word(GOES_ON)) and life.running


def test_restarts_that_are_long_past_do_not_count(lives: Lives) -> None:
    lives.killed()
    lives.change(restarts=[time.time() - 2 * HOUR_S] * 5)
    life = lives.begin()
    assert life.learn(word(GOES_ON)) and len(lives.row()["restarts"]) == 6


def test_a_clock_that_is_not_set_yet_is_waited_for_and_not_for_ever(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives.killed()
    lives.change(seen_wall_s=time.time() + HOUR_S)
    life = lives.begin()
    assert not life.learn(word(GOES_ON)) and life.kept
    assert "clock is not set" in life.told["start-1"]["text"]
    monkeypatch.setattr(accept, "CLOCK_S", 0.0)
    assert life.learn(word(GOES_ON)) and not life.kept and lives.files() == []


def test_the_order_of_a_node_that_shares_home_and_host_name_is_left_to_it(lives: Lives) -> None:
    life = lives.killed()
    assert not life.learn(word(GOES_ON, node="n4")) and not life.running and not life.kept
    assert lives.files() == ["start-1.json"]


def test_a_newer_order_of_the_run_takes_the_place_of_one_that_waits(lives: Lives) -> None:
    life = lives.killed()
    life.start(order(lives.home, "start-2"))
    assert lives.files() == ["start-2.json"] and list(life.kept) == ["start-2"]
    assert life.told["start-1"]["state"] == "refused"


def test_of_two_nodes_that_share_home_and_host_name_neither_drops_the_others_order(
    lives: Lives
) -> None:
    lives.killed()
    second = lives.row() | {"seen_wall_s": time.time() + 1, "node": "n4"}
    second["order"]["id"] = "start-2"
    path = lives.folder / "start-2.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(second))
    life = lives.begin()
    assert life.learn(word(GOES_ON)) and list(life.running) == ["start-1"]
    assert lives.files() == ["start-1.json", "start-2.json"]


def test_what_cannot_be_counted_is_not_started_again(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = lives.killed()
    monkeypatch.setattr(kept_orders.os, "fsync", no_space)
    assert life.learn(word(GOES_ON)) and not life.running and not life.kept
    assert "cannot be written down" in life.told["start-1"]["text"]


def no_space(_fd: int) -> None:
    raise OSError(28, "No space left on device")


def test_who_is_asked_to_end_leaves_it_open_whether_a_launcher_ended_by_itself(
    lives: Lives
) -> None:
    """A scope that ends asks all of them at once, and a node that is rebooted ends no order."""
    life = lives.begin()
    life.start(order(lives.home))
    life.running["start-1"].kill()
    life.running["start-1"].wait(10)
    line: Any = SimpleNamespace(orders=queue.SimpleQueue(), tell=lambda: None)
    assert accept._once(line, life, 0.01, [15]) is None and lives.files() == ["start-1.json"]
    assert accept._once(line, life, 0.01) is None and lives.files() == []


def test_of_two_orders_of_a_run_the_newer_one_is_kept(lives: Lives) -> None:
    lives.killed()
    second = lives.row() | {"seen_wall_s": time.time() + 1}
    second["order"]["id"] = "start-2"
    path = lives.folder / "start-2.json"
    path.touch(mode=0o600)
    path.write_text(json.dumps(second))
    assert list(lives.begin().kept) == ["start-2"] and lives.files() == ["start-2.json"]


def test_an_order_that_waits_can_be_ended(lives: Lives) -> None:
    life = lives.killed()
    life.end("start-1")
    assert lives.files() == [] and not life.learn(word(GOES_ON)) and not life.running


def test_they_are_few(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_orders, "RUNS_MAX", 2)
    life = lives.begin()
    for number in range(4):
        life.start(order(lives.home, f"start-{number}", f"m{number}"))
    kept = lives.begin().kept
    assert list(kept) == ["start-2", "start-3"] and len(lives.files()) == 2
    assert sum("dropped" in one for one in lives.said) == 2


BAD = {
    "no JSON": b"{", "no order": b"{}", "deep": b"[" * 100_000, "huge": b" " * ((1 << 20) + 1),
    "no UTF-8": b'{"order": "\xff"}', "empty": b"",
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_is_no_order_is_removed_with_a_sentence(what: str, lives: Lives) -> None:
    lives.killed()
    (lives.folder / "start-1.json").write_bytes(BAD[what])
    lives.said.clear()
    assert not lives.begin().kept and lives.files() == []
    (told,) = lives.said
    assert "is no order" in told and len(told) < 500


@pytest.mark.parametrize("change", [
    {"seen_wall_s": "now"}, {"pid": -1}, {"attempt": -1}, {"more": 1}, {"restarts": [0.0] * 17},
    {"order": {"run": "m5"}}, {"seen_wall_s": 1e300},
])
def test_an_order_with_a_value_that_none_has_is_removed(change: dict[str, Any], lives: Lives
                                                        ) -> None:
    lives.killed()
    lives.change(**change)
    assert not lives.begin().kept and lives.files() == []


def test_an_order_under_another_ones_name_is_removed(lives: Lives) -> None:
    lives.killed()
    (lives.folder / "start-1.json").rename(lives.folder / "start-2.json")
    assert not lives.begin().kept and lives.files() == []


@pytest.mark.parametrize("what", ["mode", "owner", "link", "folder"])
def test_what_others_could_have_put_there_is_passed_by_and_named(what: str, lives: Lives) -> None:
    lives.killed()
    path = lives.folder / "start-1.json"
    if what == "mode":
        path.chmod(0o640)
    elif what == "owner":
        if os.getuid() != 0:
            pytest.skip("only root can give a file to another user")
        os.chown(path, 12345, -1)
    elif what == "link":
        path.rename(lives.home / "elsewhere")
        path.symlink_to(lives.home / "elsewhere")
    else:
        lives.folder.chmod(0o755)
    lives.said.clear()
    life = lives.begin()
    assert not life.kept and lives.files() == ["start-1.json"]
    assert len(lives.said) == 1 and str(path if what != "folder" else lives.folder) in lives.said[0]
    if what == "folder":  # a launcher begins all the same
        life.start(order(lives.home, "start-2", "m6"))
        assert life.running and "start-2.json" not in lives.files()
        life.learn(word(HERE, run="m6"))
        assert sum("behind a reboot it has to be started here by hand" in one
                   for one in lives.said) == 1


def test_what_a_write_that_was_cut_off_left_is_removed(lives: Lives) -> None:
    lives.killed()
    (lives.folder / "start-1.new").write_text("{")
    assert list(lives.begin().kept) == ["start-1"] and lives.files() == ["start-1.json"]


def test_an_order_is_on_the_disk_before_it_has_its_name_and_its_name_is_too(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power may go in any moment between."""
    synced: list[tuple[bool, bool]] = []  # the folder, whether the order has its name

    def fsync(descriptor: int) -> None:
        synced.append((Path(f"/proc/self/fd/{descriptor}").resolve() == lives.folder,
                       (lives.folder / "start-1.json").exists()))

    life = lives.begin()
    monkeypatch.setattr(os, "fsync", fsync)
    life.start(order(lives.home))
    assert synced[:2] == [(False, False), (True, True)]


def test_a_launcher_that_cannot_begin_ends_its_order(lives: Lives) -> None:
    life = lives.begin()
    life.start(order(lives.home / "not-there"))
    assert life.told["start-1"]["state"] == "refused" and lives.files() == []


class Silent:
    """A line to an agent that says nothing."""

    def tell(self) -> None:
        return


@pytest.mark.parametrize("state", ["stopping", "running"])
def test_an_order_outlives_the_end_of_its_node_and_not_that_of_accept_alone(
    state: str, lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = lives.home / "systemctl"
    tool.write_text(f"#!/bin/sh\necho {state}\nexit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{lives.home}:{os.environ['PATH']}")
    life = lives.begin()
    life.start(order(lives.home))
    assert accept._left(Silent(), life, None) == 0  # type: ignore[arg-type]
    assert not life.running and life.told["start-1"]["code"] == 128 + signal.SIGTERM
    assert lives.files() == (["start-1.json"] if state == "stopping" else [])


class Forged:
    """An agent that answers what no agent does."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def ask_still(self) -> Any:
        return self.answer

    tell = Silent.tell


@pytest.mark.parametrize("answer", [
    None, {}, {"node": "n3"}, {"node": "n3", "runs": []}, {"node": "n3", "runs": {"m5": 5}},
    {"node": "n3", "runs": {"m5": {"state": GOES_ON, "attempt": "x", "text": ""}}},
    {"node": "n3", "runs": {"m5": {"state": GOES_ON}}},
    {"node": "n3", "runs": {"m6": word(GOES_ON)["runs"]["m5"]}},
    {"node": "n3", "runs": {"m5": {"state": "maybe", "attempt": 7, "text": ""}}},
])
def test_an_answer_that_is_none_starts_and_drops_nothing(answer: Any, lives: Lives) -> None:
    life = lives.killed()
    accept._look(Forged(answer), life)  # type: ignore[arg-type]
    assert not life.running and life.kept and lives.files() == ["start-1.json"]


def test_nothing_is_asked_before_the_agent_hears_this_accept(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one of the same user may run here, and its orders be on this disk."""
    asked: list[Any] = []

    def post(self: accept.Agent, route: str, body: Any) -> Any:
        asked.append(body)
        if len(asked) == 2:
            raise ConnectionRefusedError
        return word(GOES_ON)

    monkeypatch.setattr(accept.Agent, "post", post)
    line = accept.Line(accept.Agent(lives.home / "api.sock"), lives.killed())
    assert line.ask_still() is None and not asked
    line.answered = True
    assert line.ask_still() == word(GOES_ON)
    assert asked == [{"runs": [{"run": "m5", "attempt": 7}]}]
    assert line.ask_still() is None, "nobody listens"


def test_an_attempt_is_learnt_while_its_launcher_runs(lives: Lives) -> None:
    life = lives.begin()
    life.start(order(lives.home))
    assert life.look_s() == accept.LOOK_S
    for state in (UNKNOWN, GOES_ON, OVER):  # its launcher has not come to its agent yet
        life.learn(word(state, 6))
        assert "attempt" not in lives.row() or lives.row()["attempt"] == 0
    life.learn(word(HERE, 0))
    assert life.kept["start-1"].attempt == 0
    life.learn(word(HERE, 7))
    assert (lives.row()["attempt"], lives.row()["node"]) == (7, "n3")
    assert life.look_s() == accept.LEARN_S
    assert life.question() == {"runs": [{"run": "m5", "attempt": 0}]}


def test_no_agent_is_a_sentence_as_before(
    lives: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(lives.home))
    with pytest.raises(accept.Failure, match="no agent answers"):
        accept.accept(argparse.Namespace())
