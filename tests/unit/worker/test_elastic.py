"""What a rank says and is told: a real page, a real channel, and the launcher's end of it."""

from __future__ import annotations

import errno
import os
import sys
import threading
import time

import pytest
from waiting import wait_for

from holdfast.worker import elastic
from holdfast.worker import page as pages
from holdfast.worker.rank import snapshot
from holdfast.worker.wire import pair


class Ticker:
    """The page's other thread, as far as a rank calls it."""

    def __init__(self):
        self.sequence, self.calls = 0, []

    def default_sequence(self):
        return self.sequence

    def rebase(self):
        self.calls.append("rebase")

    def forget_groups(self):
        self.calls.append("forget")

    def watch_group(self, group):
        self.calls.append(group)


class Seat:
    """One rank attached to a launcher that is this test."""

    def __init__(self):
        self.page = pages.create()
        self.fields = pages.map_fields(self.page)
        self.launcher, ours = pair()
        self.launcher.sock.settimeout(30.0)
        self.worker = elastic.Worker(self.fields, ours)
        self.worker.ticker = self.ticker = Ticker()
        elastic.attach(self.worker)

    def heard(self):
        packet, _ = self.launcher.receive()
        return packet

    def assign(self, into, rank=1, kind="fresh", fds=(), more=(), **resume):
        self.worker.on_packet({
            "t": "assign", "run": "r", "generation": into, "rank": rank, "local_rank": rank,
            "world": 2, "store_host": "127.0.0.1", "store_port": 4711, "node": "n",
            "resume": {"kind": kind, **resume}, "history": [[1, 0], [2, 8]],
            **dict(more)}, list(fds))


@pytest.fixture()
def seat(monkeypatch):
    monkeypatch.setattr(elastic, "_worker", None)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "before")
    made = Seat()
    yield made
    made.launcher.sock.close()
    made.worker.channel.sock.close()
    made.fields.release()
    os.close(made.page)


@pytest.fixture()
def placed(seat):
    """The same in generation 2."""
    seat.assign(2)
    seat.worker.wait_assignment()
    return seat


def test_a_rank_waits_for_a_generation_it_has_not_had(placed, monkeypatch):
    placed.assign(2, rank=0)  # told again: it has been there
    found, waiting, lock = [], threading.Event(), placed.worker.lock
    monkeypatch.setattr(lock, "wait", lambda limit_s: waiting.set() or type(lock).wait(lock, 0.01))
    waiter = threading.Thread(target=lambda: found.append(elastic.park(7, False, "x" * 999)))
    waiter.start()
    packet = placed.heard()
    assert (packet["t"], packet["generation"], packet["step"], packet["torn"]) == (
        "parked", 2, 7, False) and len(packet["reason"]) <= 300
    wait_for(lambda: waiting.is_set() or found)
    placed.assign(3, rank=0, kind="survivor", step=7, generation=2)
    waiter.join(30)
    (assignment,) = found
    assert (assignment.generation, assignment.rank, assignment.resume_kind,
            assignment.resume_step, assignment.resume_generation) == (3, 0, "survivor", 7, 2)
    assert assignment.history == ((1, 0), (2, 8))
    assert [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == [
        "0", "2", "127.0.0.1", "4711"]


def test_what_a_rank_raises_is_said_as_at_its_end(placed, monkeypatch, capsys):
    monkeypatch.setattr(elastic.faults, "flight_record", lambda since_ns: [[3, "x", ""]])
    ends = []  # a hook of the user's is for the end of the process, and this one lives on
    monkeypatch.setattr(sys, "excepthook", lambda *error: ends.append(error))
    try:
        raise ValueError("of the user's\ncode")
    except ValueError as error:
        line = elastic.raised(error)
        said = capsys.readouterr().err
        assert not ends
        elastic.outcome.show(error)
        assert [one[1] for one in ends] == [error]
    assert line == "ValueError: of the user's\ncode"
    assert said.startswith("Traceback") and said.endswith("ValueError: of the user's\ncode\n")
    assert placed.heard() == {"t": "flight", "generation": 2, "entries": [[3, "x", ""]]}
    view = pages.read_page(placed.fields)
    assert (view.outcome, view.code) == ("exception", 1)
    monkeypatch.setattr(placed.worker, "wait_assignment", lambda: None)
    elastic.park(7, False, "raised: x", error=line)
    assert placed.heard()["error"] == line
    elastic.park(7, False, "peer_lost: x")
    assert "error" not in placed.heard()


def test_a_log_that_takes_nothing_more_hides_nothing_of_what_a_rank_raises(placed, monkeypatch):
    class Full:
        def write(self, text):
            pass

        def flush(self):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(elastic.faults, "flight_record", lambda since_ns: [])
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", None)
    assert elastic.raised(KeyError("x")) == "KeyError: 'x'"
    assert placed.heard()["t"] == "flight"


def test_an_order_of_a_generation_before_is_no_place(placed, monkeypatch):
    """It came late: whoever took it would look for peers that are gone."""
    class Waits(Exception):
        pass

    def wait(limit_s):
        raise Waits

    monkeypatch.setattr(placed.worker.lock, "wait", wait)
    placed.assign(1, rank=0)
    with pytest.raises(Waits):
        placed.worker.wait_assignment()
    assert placed.worker.generation == 2 and placed.fields[pages.F_RANK] == 1


@pytest.mark.parametrize("generation", [1, 2, 7])
def test_a_generation_is_broken_once_its_launcher_says_so(seat, generation):
    assert not elastic.broken(), "it is in none yet"
    seat.assign(generation)
    seat.worker.wait_assignment()
    assert not elastic.broken()
    seat.worker.on_packet({"t": "leave", "generation": generation}, [])
    assert elastic.broken()


def test_a_place_has_the_labels_of_its_own_generation(seat):
    seat.assign(2, more={"labels": [["rack", "r7"]]})
    assert seat.worker.wait_assignment().labels == (("rack", "r7"),)
    for generation, said, labels in ((3, {"labels": []}, ()), (4, {"labels": None}, None),
                                     (5, {}, None)):  # a launcher of the release before
        seat.assign(generation, more=said)
        assert seat.worker.wait_assignment().labels == labels


def test_a_new_generation_begins_with_a_whole_page(placed):
    elastic.step_begin()
    elastic.step_end(8, 1.5)
    elastic.step_begin()  # torn: the generation broke inside the optimizer
    view = pages.read_page(placed.fields)
    assert (view.step, view.loss) == (8, 1.5) and view.step_begin == view.step_end + 1
    hooked = []
    placed.worker.assigned_hooks.append(hooked.append)
    placed.assign(5, rank=0)
    placed.worker.wait_assignment()
    view = pages.read_page(placed.fields)
    assert (view.generation, view.rank, view.step) == (5, 0, 8) and len(hooked) == 1
    assert view.step_begin == view.step_end  # what is in memory is restored, and proven
    assert not any(step for step, _ in view.step_seq)  # others' numbers of collectives


def test_whoever_is_told_to_leave_leaves_before_it_changes_a_weight(placed):
    cuts = []
    elastic.register_group("group", lambda: cuts.append(1))
    assert placed.ticker.calls == ["forget", "group"] and not cuts
    placed.worker.on_packet({"t": "leave", "generation": 1}, [])  # of an older one
    elastic.step_begin()
    assert not cuts and not elastic.broken()
    placed.worker.on_packet({"t": "leave", "generation": 2}, [])
    assert cuts == [1] and elastic.broken()
    begun = placed.fields[pages.F_STEP_BEGIN]
    for call in (elastic.step_begin, lambda: elastic.phase("data")):
        with pytest.raises(elastic.Broken, match="^generation is over$"):
            call()
    assert placed.fields[pages.F_STEP_BEGIN] == begun
    placed.worker.each_beat()  # a collective entered behind the first cut
    assert cuts == [1, 1]
    placed.assign(3)
    placed.worker.wait_assignment()
    assert not elastic.broken()
    placed.worker.each_beat()
    elastic.phase("data")
    assert cuts == [1, 1]


class Late:
    """A lock that its next holder gets only when `first` is done: the kernel let another run."""

    def __init__(self, lock, first):
        self.lock, self.first = lock, first

    def __enter__(self):
        first, self.first = self.first, None
        if first is not None:
            first()
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self.lock, name)


def test_a_beat_never_cuts_the_group_of_the_next_generation(placed):
    cuts = []
    elastic.register_group("group", lambda: cuts.append("old"))
    placed.worker.on_packet({"t": "leave", "generation": 2}, [])
    placed.assign(3)

    def main_thread_goes_on():
        placed.worker.wait_assignment()
        elastic.register_group(None, lambda: cuts.append("new"))

    placed.worker.lock = Late(placed.worker.lock, main_thread_goes_on)
    placed.worker.each_beat()  # begun while generation 2 was the rank's last
    assert cuts == ["old"]


def test_an_order_to_leave_that_came_while_joining_cuts_the_new_group(placed):
    placed.worker.on_packet({"t": "leave", "generation": 2}, [])
    cuts = []
    elastic.register_group("group", lambda: cuts.append(1))
    assert cuts == [1]
    elastic.register_group(None, None)
    placed.worker.each_beat()
    assert cuts == [1]


def test_phases_are_accounted_and_an_exception_ends_one(placed, monkeypatch):
    now = [1000]
    monkeypatch.setattr(elastic.time, "monotonic_ns", lambda: now[0])
    elastic.phase("startup")
    now[0] += 50
    elastic.phase("data")
    assert placed.ticker.calls == ["rebase"]  # joined: its numbers count from here
    now[0] += 7
    with pytest.raises(ValueError), elastic.during("eval"):
        now[0] += 300
        raise ValueError("in the evaluation")
    view = pages.read_page(placed.fields)
    spent = dict(zip(pages.PHASES, view.phase_ns, strict=True))
    assert (spent["startup"], spent["data"], spent["eval"], view.phase) == (50, 7, 300, "unknown")
    assert placed.ticker.calls == ["rebase"] and view.progress_ns == now[0]


def test_steps_are_kept_with_their_time_and_their_number_of_collectives(placed, monkeypatch):
    now = [1000]
    monkeypatch.setattr(elastic.time, "monotonic_ns", lambda: now[0])
    for step in range(1, pages.RING + 3):
        now[0] += 10 * step
        placed.ticker.sequence = 3 * step
        elastic.step_begin()
        elastic.step_end(step, 0.5)
    view = pages.read_page(placed.fields)
    assert sorted(view.step_seq) == [(n, 3 * n) for n in range(3, pages.RING + 3)]
    assert sorted(view.last_step_ns) == [10 * n for n in range(3, pages.RING + 3)]
    assert view.step_begin == view.step_end == pages.RING + 2
    placed.fields[pages.F_STOP_AFTER] = 12
    assert elastic.stop_after() == 12


def test_ranks_are_told_behind_which_step_of_their_generation_they_park(placed):
    assert elastic.park_after() == (0, False)
    order = {"t": "park", "generation": 2, "after": 7, "save": True}
    placed.worker.on_packet(order, [])
    assert elastic.park_after() == (7, True)
    placed.worker.on_packet(dict(order, generation=3), [])  # of one that it is not in
    assert elastic.park_after() == (0, False)


def test_the_last_collectives_are_told_with_their_generation(placed, monkeypatch):
    since = []
    monkeypatch.setattr(elastic.faults, "flight_record", lambda ns: since.append(ns) or [])
    placed.worker.on_packet({"t": "flight"}, [])
    packet = placed.heard()
    assert (packet["t"], packet["generation"], packet["entries"]) == ("flight", 2, [])
    assert 0 < since[0] <= time.time_ns()


def test_the_first_word_lists_checkpoints_within_a_packet(seat):
    seat.assign(1)
    commits = [{"generation": 1, "step": n, "path": "p%d" % n, "world": 2, "bad": ""}
               for n in range(elastic.COMMITS_SENT + 5)]
    assert elastic.ready("folder", 2, commits).generation == 1
    packet = seat.heard()
    assert (packet["t"], packet["checkpoint_dir"], packet["keep"]) == ("ready", "folder", 2)
    assert packet["commits"] == commits[:elastic.COMMITS_SENT]  # the newest


def test_memory_for_snapshots_is_asked_for_once_a_size_and_refused_once(placed, monkeypatch):
    monkeypatch.setattr(elastic, "SNAPSHOT_WAIT_S", 30.0)
    answers = [snapshot.create(1000), 0]

    def answer(packet):
        assert packet["t"] == "snapshot"
        asked.append(packet["nbytes"])
        fd = answers.pop(0)
        threading.Thread(target=placed.worker.on_packet,
                         args=({"t": "snapshot"}, [os.dup(fd)] if fd else [])).start()
        return True

    asked = []
    monkeypatch.setattr(placed.worker, "send", answer)
    held = answers[0]
    for step in (4, 8):
        room = elastic.snapshot_buffer(1000)
        room[:] = bytes([step]) * 1000
        elastic.snapshot_commit(step, "d%d" % step)
    assert asked == [1000]
    # Both halves are whole: the launcher has step 8, and step 4 until the next one is begun.
    placed.worker.snapshot_fds = [held]
    newest = max(elastic.snapshot_shards(), key=lambda shard: shard.step)
    assert (newest.step, newest.rank, newest.generation, newest.digest) == (8, 1, 2, "d8")
    assert bytes(newest.data) == bytes([8]) * 1000
    assert elastic.snapshot_buffer(2000) is None and elastic.snapshot_buffer(2000) is None
    elastic.snapshot_commit(9, "d9")  # without room nothing is said
    assert asked == [1000, 2000]
    os.close(held)


def test_a_launcher_that_gives_no_answer_costs_a_bounded_wait(placed, monkeypatch):
    monkeypatch.setattr(elastic, "SNAPSHOT_WAIT_S", 0.0)
    assert elastic.snapshot_buffer(1000) is None and placed.heard()["nbytes"] == 1000
    assert elastic.snapshot_buffer(1000) is None and not placed.launcher.readable()


def test_what_is_reported_is_bounded(placed):
    elastic.report("checkpoint_bad", "x" * 10**6)
    elastic.bad_checkpoint("/p", "y" * 10**6)
    elastic.committed(2, 8, "/p", 2)
    elastic.verified("/p")
    kinds = [placed.heard() for _ in range(4)]
    assert [one["t"] for one in kinds] == ["report", "bad_checkpoint", "committed", "verified"]
    assert len(kinds[0]["text"]) < 10_000 and len(kinds[1]["why"]) <= 500


def test_a_collective_is_left_out_once(placed):
    placed.worker.on_packet({"t": "inject", "fault": "skip-collective"}, [])
    assert [elastic.skip_collective() for _ in range(3)] == [True, False, False]


def test_descriptors_of_an_unknown_packet_are_closed(placed):
    reader, writer = os.pipe()
    placed.worker.on_packet({"t": "of a later release"}, [writer])
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_outside_a_launcher_every_call_is_harmless(monkeypatch):
    monkeypatch.setattr(elastic, "_worker", None)
    elastic.phase("data")
    elastic.step_begin()
    elastic.step_end(1, 0.5)
    elastic.progress(1, 0.5, 1.0, 10)
    with elastic.during("eval"):
        pass
    assert not elastic.active() and not elastic.skip_collective()
    with pytest.raises(RuntimeError, match="ask elastic.active"):
        elastic.ready()


def test_the_collectives_of_the_same_steps_are_timed_on_every_rank(seat, monkeypatch):
    asked = []
    tap = seat.worker.collectives
    monkeypatch.setattr(tap, "open", lambda step: asked.append(("open", step)))
    monkeypatch.setattr(tap, "close", lambda step: asked.append(("close", step)))
    for step in range(1, 41):
        seat.worker.finish_step(step)
    assert asked == [("open", 10), ("close", 12), ("open", 30), ("close", 32)]
    seat.fields[pages.F_COLLECTIVES] = 34
    seat.assign(2)
    seat.worker.wait_assignment()
    assert seat.fields[pages.F_COLLECTIVES] == 0  # another generation's mean nothing now
