"""Promise 3 with real processes: whatever is lost, the weights end as in an unbroken run."""

from __future__ import annotations

import functools
import os
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from harness import LIMIT_S, Launcher, Lost, read_shards
from waiting import wait_for

from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.config import load
from holdfast.trainer.group import Group
from holdfast.trainer.loop import TORCHS_OWN, Generation, _in_short, _reason

STEPS = 12
# Two ranks that get no further than step 4 before they are told to stop or to park.
UNTOLD = {(1, rank, 4, "data"): "untold" for rank in (0, 1)}


def config(tmp, world, *more):
    return load(None, [
        "model=tiny:Model", "data=tiny:Data", f"steps={STEPS}", "batch=3",
        f"micro_batches={world + 1}", f"work_dir={tmp}", "checkpoint.every=0", *more,
    ])


@functools.cache
def unbroken(world):
    """The digest of a run that never failed."""
    with tempfile.TemporaryDirectory() as tmp:
        (digest,) = {r.digest for r in Launcher(config(tmp, world), world, tmp).run().values()}
    return digest


def run(tmp, world, faults, *more, snapshots=False, standby=0, together=False):
    launcher = Launcher(config(tmp, world, *more), world, tmp, faults, snapshots, standby)
    launcher.together = together
    results = launcher.run()
    assert {r.digest for r in results.values()} == {unbroken(world)}, launcher.log()
    steps = [(e[1], e[3]) for e in launcher.said("step")]
    launcher.redone = len(steps) - len(set(steps))
    return launcher


@pytest.mark.parametrize("world", [2, 3, 4])
def test_kills_of_any_rank_anywhere(tmp_path, world):
    launcher = run(tmp_path, world, {
        (1, world - 1, 3, "forward_backward"): "kill",
        (2, 0, 3, "data"): "kill",  # at once again: before the new generation did a step
        (3, 1, 7, "optimizer"): "kill",  # gradients are summed: the others may be a step ahead
    }, standby=1)
    assert [kind for kind, _ in launcher.plans] == ["fresh"] + ["survivor"] * 3
    assert launcher.redone == 0


def test_kill_inside_the_optimizer(tmp_path):
    launcher = run(tmp_path, 2, {(1, 1, 5, "step_begin"): "kill"})
    # Rank 0 may have had all gradients in time, or not: nothing is done twice.
    assert launcher.plans[1] in (("survivor", 5), ("survivor", 6)) and launcher.redone == 0


def test_a_peer_lost_while_joining(tmp_path):
    launcher = run(tmp_path, 3, {
        (1, 1, 4, "forward_backward"): "kill", (2, 1, 4, "startup"): "kill",
        (3, 2, 4, "startup"): "kill",
    }, standby=1)
    assert launcher.plans == [("fresh", 0)] + [("survivor", 4)] * 3


@pytest.mark.parametrize("place", ["store", "mesh", "members"])
def test_a_peer_lost_at_any_seam_of_the_joining(tmp_path, place):
    """What the others have of the group by then is left as well: they could join no other."""
    launcher = run(tmp_path, 3, {
        (1, 1, 4, "forward_backward"): "kill", (2, 1, 4, place): "kill", (3, 0, 4, place): "kill",
    }, standby=1)
    assert launcher.plans == [("fresh", 0)] + [("survivor", 4)] * 3 and launcher.redone == 0


def test_a_peer_lost_that_others_wait_for_to_connect(tmp_path):
    """Its address is in the store, and whom of two it is to call waits for that: which of them
    calls, gloo decides by chance, so that there are several, twice."""
    stopped = {generation: tmp_path / f"stopped-{generation}" for generation in (2, 3)}
    late = {(generation, rank, 4, "mesh"): str(file)
            for generation, file in stopped.items() for rank in (1, 2, 3)}
    launcher = Launcher(config(tmp_path, 4), 4, tmp_path,
                        {(1, 1, 4, "forward_backward"): "kill", **late}, standby=1)

    def lose_the_first():
        for generation, file in stopped.items():
            wait_for(lambda generation=generation: launcher.generation == generation
                     and launcher.addresses(0), LIMIT_S)
            victim = launcher.ranks[0][0].pid
            os.kill(victim, signal.SIGSTOP)
            file.touch()  # the others have waited for that
            wait_for(lambda: launcher.addresses(1, 2, 3), LIMIT_S)
            time.sleep(0.2)  # what is tested is when the kill comes
            os.kill(victim, signal.SIGKILL)

    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(lose_the_first)
        results = launcher.run()
        done.result()
    assert {r.digest for r in results.values()} == {unbroken(4)}
    assert launcher.plans == [("fresh", 0)] + [("survivor", 4)] * 3


def test_a_connection_that_got_the_number_of_a_closed_one_is_cut_as_well():
    with socket.create_server(("127.0.0.1", 0)) as server:
        old = socket.create_connection(server.getsockname())
        number = old.fileno()
        group = Group(SimpleNamespace(rank=0, world=1), torch.device("cpu"),
                      SimpleNamespace(phase=print))
        old.close()
        with socket.create_connection(server.getsockname()) as young:
            assert young.fileno() == number
            young.settimeout(10.0)
            group.cut()
            assert young.recv(1) == b""


def test_an_old_group_that_does_not_go_holds_nobody_up():
    """gloo's destructor waits for threads that now and then sleep for the whole timeout."""
    let_go, gone = threading.Event(), threading.Event()

    class Sleeper:
        def __del__(self):
            let_go.wait(30.0)
            gone.set()

    group = Group(SimpleNamespace(rank=0, world=1), torch.device("cpu"),
                  SimpleNamespace(phase=print))
    group.process_group, group.parts = Sleeper(), {"replicas": Sleeper()}
    group.leave()
    assert not gone.is_set()
    let_go.set()
    assert gone.wait(30.0)


def test_all_but_one_lost_at_once(tmp_path):
    faults = {(1, rank, 6, "forward_backward"): "kill" for rank in (0, 1, 2)}
    run(tmp_path, 4, faults)


def test_torn_state_is_not_used(tmp_path):
    """A fault of the group inside optimizer.step: the survivor's own state is refused."""
    launcher = run(tmp_path, 1, {(1, 0, 5, "torn"): "gloo"}, "model=faulty:Model")
    assert [e[3:5] for e in launcher.said("parked")] == [(5, True)]
    assert launcher.plans == [("fresh", 0), ("fresh", 0)]


def test_one_torn_state_is_replaced_by_the_whole_one(tmp_path):
    launcher = run(tmp_path, 2, {(1, 0, 5, "torn"): "gloo"}, "model=faulty:Model")
    assert (5, True) in [e[3:5] for e in launcher.said("parked")]
    assert launcher.plans[1] in (("survivor", 5), ("survivor", 6))


def test_snapshot_when_none_lives(tmp_path):
    faults = {(1, 0, 9, "data"): "kill"}
    launcher = run(tmp_path, 3, faults, "snapshot.every=4", snapshots=True, together=True)
    assert launcher.plans == [("fresh", 0), ("snapshot", 8)]


def test_damaged_snapshot_falls_back_to_disk(tmp_path):
    class Damaging(Launcher):
        def replan(self):
            if not self.ranks and self.generation == 1:
                path = tmp_path / "snapshots" / "1.1"
                for head in (tmp_path / "snapshots").glob("1.?.head"):
                    path = head.with_suffix("")
                data = bytearray(path.read_bytes())
                data[10] ^= 1
                path.write_bytes(data)
            super().replan()

    faults = {(1, 0, 9, "data"): "kill"}
    launcher = Damaging(
        config(tmp_path, 2, "snapshot.every=8", "checkpoint.every=4"), 2, tmp_path, faults, True)
    launcher.together = True
    results = launcher.run()
    assert {r.digest for r in results.values()} == {unbroken(2)}
    assert launcher.plans[1] == ("snapshot", 8) and launcher.plans[2][0] in ("disk", "fresh")
    assert "differs from what was written" in launcher.said("parked")[0][5] + \
        launcher.said("parked")[1][5]


def test_snapshot_cadence_is_chosen_and_said(tmp_path):
    launcher = run(tmp_path, 2, {}, snapshots=True)
    (said,) = [e[4] for e in launcher.said("report") if "snapshot every" in e[4]]
    assert "% of a step of" in said
    every = int(said.split()[2])
    assert all(s.step == 3 or s.step % every == 0 for s in read_shards(tmp_path / "snapshots"))


def commits(tmp_path, world=2):
    """Checkpoints of steps 4 and 8, as an earlier run left them."""
    first = Launcher(config(tmp_path, world, "steps=8", "checkpoint.every=4",
                            "optimizer.warmup_steps=1000"), world, tmp_path)
    first.run()
    found = files.listing(tmp_path / "checkpoints")
    assert [f.step for f in found] == [8, 4] and not any(files.verify(f.path) for f in found)
    return found


def test_disk_when_nothing_else_is_left_and_the_bad_one_is_put_aside(tmp_path):
    newest, older = commits(tmp_path)
    shard = tmp_path / "checkpoints" / "step-000000008.gen-1" / "shard-00001-of-00002.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    more = ("optimizer.warmup_steps=1000", "checkpoint.every=4")
    whole = Launcher(config(tmp_path / "b", 2, *more), 2, tmp_path)
    digests = {r.digest for r in whole.run().values()}
    launcher = Launcher(config(tmp_path, 2, *more), 2, tmp_path)
    launcher.generation = 1
    results = launcher.run(("disk", 8, 1, newest.path))
    assert {r.digest for r in results.values()} == digests
    assert launcher.plans == [("disk", 8), ("disk", 4)]
    ((path, why),) = [e[3:5] for e in launcher.said("bad_checkpoint")]
    assert path == newest.path and "shard-00001-of-00002.bin: bytes differ" in why
    assert all("bad_checkpoint" in e[5] for e in launcher.said("parked"))
    assert (tmp_path / "checkpoints" / "quarantine").is_dir()
    assert older.path.endswith("step-000000004.gen-1")


def test_a_new_run_does_not_begin_beside_checkpoints_that_were_all_put_aside(tmp_path):
    """As under an agent that does not know of the run that put them aside."""
    for found in commits(tmp_path):
        files.quarantine(Path(found.path), "bytes differ")
    folder = tmp_path / "checkpoints"
    kept = sorted(folder.rglob("*"))
    # Whichever of the two is first to leave: rank 0 alone looks, and speaks for both.
    with pytest.raises(Lost, match="no checkpoint is left to resume from; set checkpoint.dir"):
        Launcher(config(tmp_path, 2, "checkpoint.every=4"), 2, tmp_path).run()
    assert sorted(folder.rglob("*")) == kept
    # Who writes none has nothing to lose in that folder.
    found = Launcher(config(tmp_path, 2), 2, tmp_path).run()
    assert {one.step for one in found.values()} == {STEPS}


@pytest.mark.parametrize("world", [1, 3])
def test_another_world_reads_the_checkpoint(tmp_path, world):
    newest, _ = commits(tmp_path)
    launcher = Launcher(config(tmp_path, 3), world, tmp_path)
    launcher.generation = 1
    results = launcher.run(("disk", 8, 1, newest.path))
    assert {r.step for r in results.values()} == {STEPS}


@pytest.mark.parametrize(
    ("strategy", "worlds"), [("ddp", (1, 3, 4)), ("fsdp", (2, 3)), ("pipeline", (2, 4))])
def test_the_loss_at_the_end_is_the_whole_steps_on_any_number_of_ranks(
    tmp_path, strategy, worlds
):
    """And not the mean over what one rank computed of it."""
    told = []
    for world in worlds:
        job = config(tmp_path / str(world), 5, "model=tiny:Still", f"strategy={strategy}",
                     "checkpoint.every=0")
        told.append({r.loss for r in Launcher(job, world, tmp_path).run().values()})
    assert all(len(losses) == 1 for losses in told), told
    assert [losses.pop() for losses in told[1:]] == pytest.approx(
        [*told[0]] * (len(worlds) - 1), rel=1e-5)


def test_another_model_is_the_users_error_and_keeps_the_checkpoint(tmp_path):
    newest, _ = commits(tmp_path)
    launcher = Launcher(config(tmp_path, 2, "model=tiny:OtherModel"), 2, tmp_path)
    with pytest.raises(Lost, match="ConfigError: checkpoint .* holds another model"):
        launcher.run(("disk", 8, 1, newest.path))
    assert files.verify(newest.path) == []


@pytest.mark.parametrize("where", ["data", "forward_backward", "optimizer", "step_begin"])
def test_a_users_exception_is_left_behind_by_the_same_process(tmp_path, where):
    launcher = run(tmp_path, 2, {(1, 1, 3, where): "value", (2, 0, 5, where): "value",
                                 (3, 1, 6, where): "value"})
    assert [e[1:5] for e in launcher.said("raised")] == [
        (rank, "raised", "ValueError", "the user's own") for rank in (1, 0, 1)]
    parked = [(e[1], e[9]) for e in launcher.said("parked")]
    assert [one for one in parked if one[1]] == [
        (rank, "ValueError: the user's own") for rank in (1, 0, 1)]
    assert len(parked) == 6 and not launcher.said("died") and launcher.redone == 0


def test_a_connection_of_the_users_own_that_fails_is_raised_and_a_lost_peer_is_shown(tmp_path):
    """The traceback of whoever took an error for a lost peer is in its log, once."""
    launcher = run(tmp_path, 2, {(1, 1, 3, "data"): "connection", (2, 0, 5, "data"): "gloo"})
    assert [e[1:5] for e in launcher.said("raised")] == [
        (1, "raised", "RuntimeError", "failed to connect to 10.0.0.3")]
    assert not launcher.said("died")
    log = launcher.log()
    assert log.count("RuntimeError: [enforce fail at gloo/transport] made by the test\n") == 1
    assert ("holdfast: an error that is taken for a lost peer's, continuing in the next generation:"
            "\nTraceback (most recent call last):\n") in log and ", in _fault\n" in log
    assert "failed to connect" not in log  # `raised` shows that, and the harness's does not


def test_a_peer_that_is_gone_is_no_traceback_in_the_log_of_those_that_lost_it(tmp_path):
    """One line each, or none where the launcher said so first."""
    launcher = run(tmp_path, 3, {(1, 1, 3, "forward_backward"): "kill"})
    log = launcher.log()
    assert log.count("holdfast: a peer was lost") <= 2 and "Traceback" not in log


@pytest.mark.parametrize("wrapped", [False, True])
def test_what_torchs_own_call_raised_is_one_line_and_anybodys_words_are_shown_whole(
    capfd, wrapped
):
    one = SimpleNamespace(elastic=SimpleNamespace(
        broken=lambda: False, active=lambda: True, Broken=KeyboardInterrupt))
    try:
        try:
            torch.nn.Linear(2, 2)(torch.ones(3))
        except RuntimeError as error:
            if wrapped:
                raise RuntimeError("my words") from error
            raise
    except RuntimeError as error:
        Generation.show(one, error)
    said = capfd.readouterr().err
    assert ("Traceback" in said and "my words" in said) is wrapped
    if not wrapped:
        assert said.startswith("holdfast: a peer was lost, continuing in the next generation: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize(("torchs", "shown"), [
    ("Unable to cast [/__w/pytorch/gloo/transport/tcp/pair.cc:537] Read error [10.0.0.1]:55496: "
     "Connection reset by peer. This is typically caused by a remote worker hanging. GLHF! to "
     "Tensor", "Read error [10.0.0.1]:55496: Connection reset by peer."),
    ("[/src/gloo/pair.cc:9] Connection closed by peer [10.0.0.2]:3",
     "Connection closed by peer [10.0.0.2]:3"),
    ("Expected a Tensor", "Expected a Tensor"),
])
def test_of_torchs_words_for_a_lost_peer_those_about_the_peer_are_shown(torchs, shown):
    assert TORCHS_OWN.sub("", torchs) == shown


def test_what_is_shown_of_a_lost_peer_is_bounded():
    def deep(left):
        if left:
            deep(left - 1)
        raise RuntimeError("x" * 99_999)

    error = RuntimeError("y" * 99_999)
    for _ in range(9):
        try:
            deep(50)
        except RuntimeError as found:
            found.__context__, error = error, found
    text = _in_short(error)
    assert text.count("Traceback") == 4 and len(text) < 30_000 and "in deep\n" in text


def test_an_exception_in_the_middle_of_the_optimizer_leaves_nothing_torn(tmp_path):
    launcher = run(tmp_path, 2, {(1, 1, 5, "torn"): "value"}, "model=faulty:Model")
    assert (5, True) in [e[3:5] for e in launcher.said("parked")]
    assert len(launcher.said("raised")) == 1 and not launcher.said("died")


def test_a_secret_in_what_a_rank_raises_is_not_cut_before_it_is_known(tmp_path):
    text = "x" * 280 + " https://alice:secret@store/bucket"
    assert _reason(ValueError(text), "raised") == f"raised: {text}"  # park cuts, and redacts first


@pytest.mark.parametrize(("faults", "error"), [
    ({(1, 1, 3, "data"): "value", (2, 1, 3, "data"): "value"}, "ValueError: the user's own"),
    ({(1, 1, 0, "startup"): "value"}, "ValueError: the user's own"),  # it never trained
    ({(1, 1, 3, "data"): "memory"}, "MemoryError: "),
], ids=["again", "joining", "memory"])
def test_an_exception_ends_a_rank_that_it_may_come_from(tmp_path, faults, error):
    launcher = Launcher(config(tmp_path, 2), 2, tmp_path, faults)
    with pytest.raises(Lost, match=f"rank 1: {error}"):
        launcher.run()


def test_loss_that_is_no_number_ends_the_rank(tmp_path):
    launcher = Launcher(config(tmp_path, 2, "model_options.nan_after=5"), 2, tmp_path)
    with pytest.raises(Lost, match="FloatingPointError: loss is nan at step"):
        launcher.run()


def test_ranks_that_are_asked_to_park_do_so_behind_one_step_with_a_proven_checkpoint(tmp_path):
    class Parting(Launcher):
        asked, verified, parted = False, 0, []

        def heard(self, rank, message):
            super().heard(rank, message)
            if message[:2] == ("step", 3) and not self.asked:
                self.asked = True
                for _, pipe, _ in self.ranks.values():
                    pipe.send(("park", (6, True)))
            self.verified += message[0] == "verified"
            if message[0] == "parked":
                self.parted.append((message[1:4], self.verified))

    launcher = Parting(config(tmp_path, 2, "steps=12", "checkpoint.every=5000",
                              "model_options.width=700"), 2, tmp_path, UNTOLD)
    results = launcher.run()
    (step,) = {parked[0] for parked, _ in launcher.parted}
    assert 6 <= step < 12 and len(launcher.parted) == 2
    assert launcher.parted[0] == ((step, False, f"generation_over: asked to leave behind step "
                                   f"{step}"), 1)
    assert {r.step for r in results.values()} == {12}
    assert [f.step for f in files.listing(tmp_path / "checkpoints")] == [12, step]


def test_nobody_parks_before_all_have_ended_the_step(tmp_path):
    """Who parks cuts the others' connections, and theirs may be the one copy of a shard."""
    class Parting(Launcher):
        def heard(self, rank, message):
            super().heard(rank, message)
            if message[:2] == ("step", 3) and rank == 0:
                for _, pipe, _ in self.ranks.values():
                    pipe.send(("park", (8, False)))

    late = {(1, 1, step, "optimizer"): "late" for step in range(3, 9)}
    launcher = Parting(config(tmp_path, 2, "steps=12", "checkpoint.every=0"), 2, tmp_path,
                       {**late, **UNTOLD})
    launcher.run()
    said = [event[1:4] for event in launcher.events if event[2] in ("step", "parked")]
    first = next(at for at, event in enumerate(said) if event[1] == "parked")
    step = said[first][2]
    assert {(0, "step", step), (1, "step", step)} <= set(said[:first]) and 8 <= step < 12


def test_stop_is_at_the_same_step_and_leaves_a_checkpoint(tmp_path):
    class Stopping(Launcher):
        def heard(self, rank, message):
            super().heard(rank, message)
            if message[:2] == ("step", 3) and not self.stopped:
                self.stopped = True
                for _, pipe, _ in self.ranks.values():
                    pipe.send(("stop", 6))

    launcher = Stopping(config(tmp_path, 2, "steps=10000", "checkpoint.every=5000",
                               "model_options.width=700"), 2, tmp_path, UNTOLD)
    launcher.stopped = False
    results = launcher.run()
    (step,) = {r.step for r in results.values()}
    assert 6 <= step < 60
    assert [f.step for f in files.listing(tmp_path / "checkpoints")] == [step]
