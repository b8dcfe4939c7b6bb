"""What a launcher says and keeps of its ranks from one start to the next: real processes."""

from __future__ import annotations

import os

import msgspec
import pytest
from waiting import wait_for

from holdfast.agent.core.detect.ranks.ended import cause_of
from holdfast.agent.core.model import Ended, RankView
from holdfast.worker import page as pages
from holdfast.worker.launcher import forking
from holdfast.worker.launcher.process import StartCommand
from holdfast.worker.rank import snapshot


def command(generation, ranks=(0,), kind="fresh"):
    return StartCommand(generation, ranks, (), len(ranks), {"kind": kind, "step": 7}, [], 0)


def sleeping(launchers):
    """A launcher of a script with one rank."""
    return launchers("run", "--no-python", "sleep", "600")


@pytest.fixture()
def trainer(launchers):
    """Two ranks of a trainer in generation 1."""
    one = launchers("train", "--nproc-per-node", "2")
    one.ranks.prepare()
    one.all_ready()
    one.ranks.begin(command(1, (0, 1)))
    for process in one.ranks.living():
        one.heard(process)
    return one


def begin(one, order):
    """Starts that generation once those before it are gone."""
    one.ranks.begin(order)

    def started():
        one.ranks.reap()
        one.ranks.start_waiting()
        return one.ranks.generation == order.generation

    wait_for(started)


@pytest.mark.parametrize(("kinds", "times"), [
    (("disk", "disk"), 1), (("fresh", "disk"), 0), (("own",), 0)])
def test_the_first_start_alone_says_from_which_checkpoint_it_goes_on(launchers, kinds, times):
    one = sleeping(launchers)
    for generation, kind in enumerate(kinds, 1):
        begin(one, command(generation, kind=kind))
    assert one.said == ["goes on from the checkpoint of step 7"] * times


@pytest.mark.parametrize(("outcome", "code"), [("exit", 3), ("exit", 255), ("exception", 1)])
def test_the_code_that_a_rank_left_on_its_page_is_its_end(trainer, outcome, code):
    process = trainer.ranks.by_rank()[1]
    process.fields[pages.F_OUTCOME] = pages.OUTCOMES.index(outcome)
    process.fields[pages.F_CODE] = code
    trainer.lose(process)  # by a signal, behind its word
    assert (process.ended["outcome"], process.ended["code"], process.ended["signal"]) == (
        outcome, code, 0)


@pytest.mark.parametrize(("words", "code", "final", "says"), [
    (("--no-python", "./no-such"), 127, True, "holdfast: ./no-such: No such file"),
    (("-m", "no_such"), 1, True, "ImportError: No module named no_such\n"),
    (("-m", "folder"), 1, True, "'folder' is a package and cannot be directly executed"),
    (("-m", "half"), 1, True, "SyntaxError: "), (("half.py",), 1, True, "SyntaxError: "),
    (("folder",), 1, True, "ImportError: can't find '__main__' module in 'folder'"),
    # Its own word, whatever it says: the next start may end otherwise.
    (("-m", "says"), 1, False, "No module named no_such\n"),
    (("says.py",), 1, False, "No module named no_such\n"),
])
def test_what_cannot_be_found_or_compiled_is_told_from_a_scripts_own_end(
    launchers, tmp_path, monkeypatch, words, code, final, says
):
    """Of real ranks, judged by the core: what is final is not started again before it trained."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "half.py").write_text("def (\n")
    (tmp_path / "says.py").write_text("import sys\nsys.exit('No module named no_such')\n")
    (tmp_path / "torch.py").touch()  # where a rank that failed looks for its collectives: in none
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/__init__.py").touch()
    one = launchers("run", *words)
    monkeypatch.setattr(forking, "fork_rank", forking.spawn_rank)
    one.ranks.begin(command(1))
    (process,) = wait_for(one.ranks.reap)
    ended = msgspec.convert(process.ended, Ended)
    cause = cause_of(RankView(0, "a", 1, 1, "ended", ended=ended), 0, ())
    assert (cause.code, cause.final) == (code, final), cause
    assert says in (tmp_path / "rank-0/stderr.log").read_text()


def test_how_long_a_start_takes_is_known_with_the_first_step_and_stays(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    first.fields[pages.F_STEP] = 1
    assert trainer.ranks.startup() == 0.0, "the other has not finished one"
    second.fields[pages.F_STEP] = 1
    took_s = trainer.ranks.startup()
    assert took_s > 0.0
    trainer.ranks.first_start_s -= 100.0
    assert trainer.ranks.startup() == took_s


def test_a_generation_that_waits_for_its_start_has_its_permit_renewed(launchers):
    one = sleeping(launchers)
    one.ranks.begin(command(1))
    for permit_ns, kept in ((100, (500, 500, 500)), (0, (0, 0, 0))):
        one.ranks.begin(command(2)._replace(permit_ns=permit_ns))
        assert one.ranks.waiting is not None
        for (generation, until_ns), left in zip(((2, 500), (2, 300), (1, 900)), kept, strict=True):
            one.ranks.renew_permit(generation, until_ns)
            assert one.ranks.waiting.permit_ns == left


def memory(trainer, rank, nbytes):
    """Which memory a rank gets for its snapshots."""
    process = trainer.ranks.by_rank()[rank]
    trainer.ranks.on_packet(process, {"t": "snapshot", "nbytes": nbytes})
    assert trainer.heard(process)[-1]["fds"] == 1
    return os.fstat(trainer.ranks.snapshots[rank]).st_ino


def test_a_rank_keeps_its_memory_for_snapshots_while_they_are_of_one_size(trainer):
    """It holds the newest one."""
    first = memory(trainer, 0, 1000)
    assert memory(trainer, 0, 1000) == first != memory(trainer, 1, 1000)
    assert memory(trainer, 0, 9000) != first


def test_of_the_newest_whole_snapshot_the_agent_hears_its_step(trainer):
    assert trainer.ranks.snapshot_view() is None
    for rank in (0, 1):
        memory(trainer, rank, 1000)
        file = snapshot.SnapshotFile(os.dup(trainer.ranks.snapshots[rank]))
        for step in (8, 12 if rank else 8):  # the second shard of step 12 is not whole yet
            file.begin(1000)[:] = bytes(1000)
            file.commit(3, rank, 2, step, 1000, "d")
    assert trainer.ranks.snapshot_view() == {"generation": 3, "step": 8, "shards": 2}
