"""Collectives are counted and timed where the process group is entered, and nothing else changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from holdfast.worker import page as pages
from holdfast.worker.rank import collectives

pytest.importorskip("torch", reason="the trainer's extra is not installed")

SCRIPT = Path(__file__).with_name("collective_ranks.py")
WORLD = 4
LIMIT_S = 120.0
FLOAT = 4


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Rank -> case -> what it found, of ranks that ran once for all tests."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    processes = [subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rank), str(WORLD), str(store)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in range(WORLD)]
    try:
        ends = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, ends):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in ends]


def cases(said, name):
    found = [rank[name] for rank in said]
    assert all(one["alike"] for one in found), found  # to the last bit as without the tap
    return [one["found"] for one in found]


def test_fsdp_of_torch(said):
    """Two layers of their own in each step: gathered forward and backward, reduced once."""
    layer, steps = 64 * 64 * FLOAT, 4
    for found in cases(said, "fsdp"):
        gathered, reduced = found["all_gather"], found["reduce_scatter"]
        assert (reduced[0], reduced[1]) == (2 * steps, 2 * steps * layer)
        assert gathered[1] == gathered[0] * layer and gathered[0] >= 3 * steps
        for one in (gathered, reduced):
            assert one[2] > 0 and one[3] == WORLD


def test_the_pipeline_of_torch(said):
    """Each micro-batch goes forth and its gradient back, between two ranks at a time."""
    of_rank = cases(said, "pipeline")
    for rank, found in enumerate(of_rank):
        neighbours = (rank > 0) + (rank < WORLD - 1)
        for kind in ("send", "recv"):
            calls, size, ns, members = found[kind]
            more = calls - 4 * 4 * neighbours  # torch greets each neighbour
            assert 0 <= more <= neighbours
            assert size == 4 * 8 * 64 * FLOAT * neighbours + more * FLOAT
            assert ns > 0 and members == 2


def test_calls_of_a_script_count_when_they_were_waited_for(said):
    for rank, found in enumerate(cases(said, "own_calls")):
        # one at once, under a name imported before; seven later; one never: of that nothing counts
        assert found["all_reduce"][:2] == [1 + 7, (1 + 7) * 256 * FLOAT]
        assert found["all_gather"][:2] == [1, WORLD * 10 * FLOAT]
        assert found["barrier"][:2] == [1, 0] and found["barrier"][2] > 0
        for kind in ("send", "recv"):
            assert (found[kind][:2] == [1, 100 * FLOAT]) if rank < 2 else kind not in found


def test_who_comes_last_shows_the_collective_and_the_others_their_wait(said):
    took_s = [found["all_reduce"][2] / 1e9 for found in cases(said, "late")]
    assert all(one > 5 * 0.05 * 0.9 for one in took_s[:-1]), took_s
    assert took_s[-1] < 5 * 0.05 / 2, took_s


def test_a_script_that_wraps_torch_distributed_is_counted_once_and_sees_all(said):
    for found in cases(said, "wrapped"):
        assert found["all_reduce"][:2] == [1, FLOAT]
    assert all(one["wrapped"]["said"] == f"(['all_reduce', 'allreduce'], {float(WORLD)})"
               for one in said)


def test_a_group_written_in_python_is_asked_once(said):
    """pybind11 would take the tap for a method of the derived class, and call it for ever."""
    cases(said, "derived")
    assert {rank["derived"]["said"] for rank in said} == {"refused"}


class Tensor:
    nbytes = 100

    def __init__(self, is_cpu=True):
        self.is_cpu = is_cpu


class Work:
    def wait(self):
        return True


class OtherWork(Work):
    def wait(self):
        return super().wait()


class Group:
    """As much of a process group as is touched."""

    answer = Work

    def size(self):
        return 2

    def allreduce(self, tensors, opts=None):
        return self.answer() if self.answer else None


@pytest.fixture()
def tap(monkeypatch):
    """One that has tapped classes of ours, which are as they were at the end; and their group."""
    for owner, name in ((Group, "allreduce"), (Work, "wait"), (OtherWork, "wait")):
        monkeypatch.setattr(owner, name, vars(owner)[name])
    group = Group()
    world = types.SimpleNamespace(default_pg=group)
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d",
                        types.SimpleNamespace(_world=world, Work=Work))
    made = collectives.Tap([0] * pages.FIELDS)
    made.each_beat()
    made.open(20)
    made.open(40)
    return made, group


def counts(tap):
    return {pages.collective_of(key, row)[:5] for key, row in tap.rows.items() if row[0]}


def test_where_no_time_is_known_calls_count_and_no_launch_is_a_transfer(tap):
    tap, group = tap
    group.allreduce([Tensor(is_cpu=False)]).wait()
    assert counts(tap) == {("all_reduce", 2, True, 1, 100)}
    assert [row[2] for row in tap.rows.values()] == [0] and tap.waited == [0]


def test_a_group_of_a_derived_class_is_tapped_once(tap):
    tap, _ = tap
    derived = type("Derived", (Group,), {})()
    sys.modules["torch.distributed.distributed_c10d"]._world.default_pg = derived
    tap.each_beat()
    derived.allreduce([Tensor(is_cpu=False)])
    assert counts(tap) == {("all_reduce", 2, True, 1, 100)}


def test_works_of_other_classes_are_met_as_they_come(tap, monkeypatch):
    tap, group = tap
    for answer in (OtherWork, OtherWork, None):  # None: done when the call returns
        monkeypatch.setattr(Group, "answer", answer)
        work = group.allreduce([Tensor(), Tensor()])
        if work is not None:
            work.wait()
            work.wait()  # a second wait is none for a collective
    assert counts(tap) == {("all_reduce", 2, False, 3, 600)}


def test_a_tensor_of_another_kind_passes_uncounted(tap):
    tap, group = tap
    assert isinstance(group.allreduce([object()]), Work)
    assert isinstance(group.allreduce(tensors=[Tensor()]), Work)
    assert not counts(tap) and not tap.pending


class Unkind:
    """A tensor of somebody's own, which answers no question about itself."""

    @property
    def nbytes(self):
        raise AssertionError("this tensor has not been materialised")


def test_a_tensor_that_raises_what_it_likes_raises_in_no_step(tap):
    tap, group = tap
    assert isinstance(group.allreduce([Unkind()]), Work)
    assert not counts(tap)


def test_a_number_that_is_none_raises_in_no_step_and_ends_no_beat(tap, monkeypatch):
    """Of a process group of somebody's own, or of a tensor's."""
    tap, group = tap
    tap.open(0)
    less = Tensor()
    less.nbytes = -100
    assert isinstance(group.allreduce([less]), Work)
    monkeypatch.setattr(group, "size", lambda: -2)
    assert isinstance(group.allreduce([Tensor()]), Work)
    assert not counts(tap) and not tap.pending
    tap.beats = collectives.EVERY_BEATS
    tap.close(0)


def test_what_cannot_be_tapped_is_said_once_and_never_where_nobody_can_hear(tap, monkeypatch):
    """A rank's beats come from the same thread: they go on."""
    tap, _ = tap

    def refuses(group, module):
        raise AssertionError("another torch")

    said = []
    monkeypatch.setattr(tap, "follow", refuses)
    monkeypatch.setattr(collectives.sys, "stderr", types.SimpleNamespace(
        write=said.append, flush=lambda: None))
    for _ in range(3):
        tap.each_beat()
    assert "".join(said).count("are not timed: another torch") == 1
    tap.refused = False
    monkeypatch.setattr(collectives.sys, "stderr", None)
    tap.each_beat()

    def closed(text):
        raise ValueError("I/O operation on closed file")

    tap.refused = False
    monkeypatch.setattr(collectives.sys, "stderr", types.SimpleNamespace(
        write=closed, flush=lambda: None))
    tap.each_beat()


def test_calls_that_nobody_waits_for_are_forgotten(tap):
    tap, group = tap
    kept = [group.allreduce([Tensor()]) for _ in range(3 * collectives.PENDING_MAX)]
    assert len(kept) > len(tap.pending) <= collectives.PENDING_MAX
    kept[-1].wait()
    assert counts(tap) == {("all_reduce", 2, False, 1, 100)}


def test_a_window_holds_its_own_steps_alone(tap, monkeypatch):
    tap, group = tap
    clock = types.SimpleNamespace(now=1000)
    monkeypatch.setattr(collectives, "time", types.SimpleNamespace(monotonic_ns=lambda: clock.now))
    early = group.allreduce([Tensor()])
    tap.open(60)
    early.wait()  # it began before
    tap.rows[pages.collective_key("all_gather", 2, False)] = row = [20, 400, 400]
    tap.waited[0], clock.now = 300, 5000
    assert tap.close(64) == pages.Gradients(64, 400 // 4, 300 // 4, 3700 // 4, 0, 2, 1)
    at = pages.F_COLLECTIVES + 1
    key, *rest = tap.fields[at : at + pages.KIND_FIELDS]
    assert tap.fields[pages.F_COLLECTIVES] == 64
    assert pages.collective_of(key, rest) == ("all_gather", 2, False, 20, 400, 400)
    group.allreduce([Tensor()]).wait()  # between two windows
    assert tap.close(65) is None and row == [20, 400, 400] and not tap.pending
    # Where a device's are among them, the waits are not all there is.
    tap.open(80)
    assert row == [0, 0, 0]
    tap.rows[pages.collective_key("all_gather", 2, True)] = [1, 100, 0]
    row[:], tap.waited[0], clock.now = [1, 100, 500], 400, 9000
    assert tap.close(84) is None and tap.fields[pages.F_COLLECTIVES] == 84
    tap.forget()
    assert tap.fields[pages.F_COLLECTIVES] == 0
    tap.open(100)  # of a generation the first is left out
    assert tap.close(104) is None and tap.fields[pages.F_COLLECTIVES] == 0


def test_a_program_without_steps_is_read_by_the_clock(tap):
    tap, group = tap
    tap.forget()
    shown = []
    for _ in range(3 * collectives.EVERY_BEATS):
        tap.each_beat()
        group.allreduce([Tensor()]).wait()
        shown.append(tap.fields[pages.F_COLLECTIVES])
    assert set(shown) == {0, *(at * collectives.EVERY_BEATS + collectives.MEASURED_BEATS
                               for at in (2, ))}
    assert tap.fields[pages.F_COLLECTIVES + 2] == collectives.MEASURED_BEATS
    tap.fields[pages.F_STEP] = 1  # it has an optimizer: no window by the clock any more
    before = list(tap.fields)
    for _ in range(2 * collectives.EVERY_BEATS):
        tap.each_beat()
    assert tap.fields == before


def test_only_the_busiest_kinds_have_room_on_the_page(tap):
    tap, _ = tap
    for ranks in range(1, 3 * pages.KINDS_SHOWN):
        tap.rows[pages.collective_key("send", ranks, False)] = [1, 1, ranks]
    tap.close(44)
    at = pages.F_COLLECTIVES + 1
    found = [pages.collective_of(tap.fields[one], tap.fields[one + 1 :]).ranks
             for one in range(at, pages.FIELDS, pages.KIND_FIELDS)]
    assert found == list(range(3 * pages.KINDS_SHOWN - 1, 2 * pages.KINDS_SHOWN - 1, -1))


def test_a_torch_without_these_names_is_left_alone_and_it_is_said_once(monkeypatch, capsys):
    world = types.SimpleNamespace(default_pg=Group())
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d",
                        types.SimpleNamespace(_world=world))
    before = Group.allreduce
    tap = collectives.Tap([0] * pages.FIELDS)
    for _ in range(3):
        tap.each_beat()
    assert Group.allreduce is before
    assert capsys.readouterr().err.count("are not timed") == 1


def test_without_torch_nothing_is_done(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed.distributed_c10d", raising=False)
    tap = collectives.Tap([0] * pages.FIELDS)
    for _ in range(3):
        tap.each_beat()
    assert not tap.classes and not tap.beats and not any(tap.fields)
