"""The launcher's own processes: real ones, real packets, real pages; only torch stays outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import wait_for

from holdfast.worker import exits
from holdfast.worker import page as pages
from holdfast.worker.launcher import commands, forking, rank_processes, without_agent
from holdfast.worker.launcher.process import StartCommand


def command(generation, ranks=(0, 1), keep=(), **resume):
    return StartCommand(generation, tuple(ranks), tuple(keep), len(ranks),
                        {"kind": "fresh", **resume}, [], 0)


def orders(one):
    return commands.Commands(one.state, one.ranks, None, SimpleNamespace(channel=None), None, None,
                             None)


def gone(pid):
    """No process of that number, or one that is dead and that init has not looked at yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def park(trainer, *processes, step=4):
    for process in processes:
        trainer.ranks.on_packet(process, {"t": "parked", "generation": 1, "step": step,
                                          "torn": False, "reason": "peer lost"})


def exists(pid):
    return Path(f"/proc/{pid}").exists()


def shell(launchers, text, ranks="1"):
    return launchers("run", "--nproc-per-node", ranks, "--no-python", "sh", "-c", text)


# ---------------------------------------------------------------- one at a time


def test_a_new_rank_never_starts_before_the_old_one_is_gone(launchers):
    one = shell(launchers, "exec sleep 600", ranks="2")
    together = []

    def look(process):
        together.extend(p.child.pid for p in one.ranks.processes
                        if p is not process and p.generation != process.generation
                        and exists(p.child.pid))

    one.ranks.on_fork = look
    one.ranks.begin(command(1))
    old = [p.child.pid for p in one.ranks.living()]
    one.ranks.begin(command(2))
    one.ranks.start_waiting()
    assert (one.ranks.generation, one.ranks.launched) == (1, 2)
    one.ranks.tend(one.ranks.waiting_s + rank_processes.GONE_WITHIN_S)
    assert "killed, and still there" in one.said[-1] and str(old[0]) in one.said[-1]

    def started():
        one.ranks.reap()
        one.ranks.start_waiting()
        return one.ranks.generation == 2

    wait_for(started)
    assert not together and one.ranks.launched == 4 and not any(map(exists, old))
    assert {p.generation for p in one.ranks.living()} == {2}


def test_a_dead_ranks_children_do_not_live_on(launchers, tmp_path):
    # The shell ends by itself; what it left in its session would hold its port and its device.
    one = shell(launchers, f"sleep 600 & echo $! > {tmp_path}/child; exit 3")
    one.ranks.begin(command(1, ranks=(0,)))
    (process,) = wait_for(one.ranks.reap)
    assert process.ended["code"] == 3 and not process.ended["by_us"]
    wait_for(lambda: gone((tmp_path / "child").read_text().strip()))


def test_a_grace_is_kept_and_then_ended(launchers, tmp_path):
    one = shell(launchers, f"trap 'echo > {tmp_path}/asked' TERM; echo > {tmp_path}/up; "
                           "while :; do sleep 0.01; done")
    one.ranks.begin(command(1, ranks=(0,)))
    wait_for((tmp_path / "up").exists)
    (process,) = one.ranks.living()
    one.ranks.kill(process, 5.0)
    wait_for((tmp_path / "asked").exists)
    one.ranks.tend(process.kill_at_s - 0.001)
    assert not one.ranks.reap()
    one.ranks.tend(process.kill_at_s)
    wait_for(one.ranks.reap)
    assert (process.ended["signal"], process.ended["by_us"]) == (signal.SIGKILL, True)


def test_a_stopped_rank_is_woken_to_hear_its_end(launchers):
    one = shell(launchers, "exec sleep 600")
    one.ranks.begin(command(1, ranks=(0,)))
    (process,) = one.ranks.living()
    wait_for(lambda: "sleep" in Path(f"/proc/{process.child.pid}/comm").read_text())
    os.kill(process.child.pid, signal.SIGSTOP)
    one.ranks.kill(process, 600.0)
    wait_for(one.ranks.reap)
    assert process.ended["signal"] == signal.SIGTERM


def test_the_end_of_all_leaves_none(trainer):
    pids = [p.child.pid for p in trainer.ranks.living()]
    trainer.ranks.end_all()
    assert len(pids) == 3 and not any(map(exists, pids)) and not trainer.ranks.living()


def test_each_process_of_a_trainer_opens_a_device_of_its_own(trainer):
    """None has been told its place when it does, and a place that is lost leaves its device."""
    def devices():
        return {p.number: trainer.ranks.rank_environ(p)["LOCAL_RANK"]
                for p in trainer.ranks.living()}

    assert devices() == {1: "0", 2: "1", 3: "2"}
    trainer.lose(trainer.ranks.by_rank()[1])
    trainer.ranks.launch(-1, 0)
    assert devices() == {1: "0", 3: "2", 4: "1"}
    park(trainer, trainer.ranks.by_rank()[0])
    trainer.ranks.begin(command(2, keep=(0,)))
    taken = trainer.ranks.by_rank()[1]
    assert taken.number == 3 and devices()[3] == "2"  # under whichever rank
    assert trainer.heard(taken)[-1]["environ"]["LOCAL_RANK"] == "1"


# ---------------------------------------------------------------- a trainer's generations


def test_what_dies_ends_its_generation_for_the_others_alone(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    (standby,) = trainer.ranks.standbys()
    assert trainer.lose(second) == [second]
    assert trainer.heard(first) == [{"t": "leave", "generation": 1, "fds": 0}]
    assert trainer.heard(standby) == [] and second.ended["signal"] == signal.SIGKILL
    assert trainer.ranks.level() == "running"


def test_what_ends_well_ends_nobody_elses(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    second.fields[pages.F_OUTCOME] = pages.OUTCOMES.index("done")
    trainer.lose(second)
    assert (second.ended["code"], second.ended["outcome"]) == (0, "done")  # its own word counts
    assert trainer.heard(first) == []
    first.fields[pages.F_OUTCOME] = pages.OUTCOMES.index("done")
    trainer.lose(first)
    assert trainer.ranks.level() == "done"


def test_a_survivor_keeps_its_process_and_a_standby_takes_the_lost_ones_place(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    (standby,) = trainer.ranks.standbys()
    trainer.lose(second)
    trainer.ranks.on_packet(first, {"t": "parked", "generation": 0, "step": 3, "torn": False,
                                    "reason": "of another generation"})
    assert first.parked is None
    park(trainer, first)
    assert first.parked["step"] == 4 and first.state == "parked"
    trainer.heard(first)
    trainer.ranks.begin(command(2, keep=(0,), kind="survivor", step=4))
    assert trainer.ranks.by_rank() == {0: first, 1: standby} and trainer.ranks.launched == 3
    for rank, process in ((0, first), (1, standby)):
        (packet,) = trainer.heard(process)
        assert packet["t"] == "assign" and packet["resume"] == {"kind": "survivor", "step": 4}
        assert (packet["rank"], packet["generation"], packet["world"]) == (rank, 2, 2)
    assert first.parked is None and second not in trainer.ranks.processes


def test_a_node_whose_ranks_have_other_numbers_keeps_its_processes(trainer):
    """The one at a place lives on as the rank of that place, with its files and its snapshot."""
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    trainer.ranks.on_packet(second, {"t": "snapshot", "nbytes": 64})
    park(trainer, second)
    trainer.lose(first)
    trainer.heard(second)
    held = trainer.ranks.snapshots[1]
    trainer.ranks.begin(command(2, ranks=(6, 7), keep=(7,), kind="survivor", step=4))
    assert trainer.ranks.by_rank()[7] is second and trainer.ranks.snapshots == {7: held}
    assert [(p["rank"], p["local_rank"]) for p in trainer.heard(second)] == [(7, 1)]
    assert second.folder.endswith("/rank-7")


def test_a_node_whose_ranks_are_all_new_ones_lets_the_old_ones_memory_go(trainer):
    for one in (trainer.ranks.by_rank()[rank] for rank in (0, 1)):
        trainer.ranks.on_packet(one, {"t": "snapshot", "nbytes": 64})
        trainer.lose(one)
    held = list(trainer.ranks.snapshots.values())
    trainer.ranks.begin(command(2, ranks=(6, 7)))
    assert trainer.ranks.snapshots == {} and len(held) == 2
    places = [f"/proc/self/fd/{file}" for file in held]
    assert not any(os.path.lexists(place) and "holdfast-snapshot" in os.readlink(place)
                   for place in places)


def test_an_order_to_park_ends_nobody_and_is_answered_once_all_have(trainer):
    told = orders(trainer)
    ranks = [trainer.ranks.by_rank()[rank] for rank in (0, 1)]
    for one in ranks:
        trainer.heard(one)
    order = {"generation": 1, "ranks": [], "grace_s": 0.0, "park": True, "save": True, "after": 9}
    told.stop("id", order)
    for one in ranks:
        first = trainer.heard(one)[0]  # who comes later hears that the first one has left, too
        assert first == {"t": "park", "generation": 1, "after": 9, "save": True, "fds": 0}
        told.parked()
        assert told.outcomes == [] and not one.by_us
        park(trainer, one, step=9)
    told.parked()
    assert [(packet["id"], packet["ok"]) for packet in told.outcomes] == [("id", True)]


def test_collectives_of_a_generation_before_are_no_evidence(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    told = {"t": "flight", "entries": [[2, "gloo:broadcast", "[[4]]"]]}
    trainer.ranks.on_packet(first, dict(told, generation=1))
    assert first.flight == told["entries"]
    park(trainer, first, second)
    trainer.ranks.begin(command(2, keep=(0, 1)))
    assert first.generation == 2 and first.flight == []
    trainer.ranks.on_packet(first, dict(told, generation=1))  # on its way when it was assigned
    assert first.flight == []


@pytest.mark.parametrize("parked", [True, False])
def test_only_who_parked_and_is_kept_stays(trainer, parked):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    park(trainer, *((first, second) if parked else ()))
    trainer.ranks.begin(command(2, keep=(0,)))
    assert (first.by_us, second.by_us) == (not parked, True)
    assert trainer.ranks.generation == 1  # until they are gone


def test_a_rank_that_was_killed_for_one_plan_is_not_kept_by_the_next(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    orders(trainer).stop("id", {"generation": 1, "ranks": [], "grace_s": 5.0})
    park(trainer, first, second)
    trainer.ranks.begin(command(2))
    trainer.ranks.begin(command(3, keep=(0, 1)))
    assert first.by_us and second.by_us and trainer.ranks.generation == 1


@pytest.mark.parametrize("over", [False, True])
def test_who_parks_within_its_grace_lives_on_where_the_next_plan_keeps_it(trainer, over):
    # Its state is what the plan resumes from: ended all the same, nobody would hold that step.
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    orders(trainer).stop("id", {"generation": 1, "ranks": [], "grace_s": 5.0})
    if over:
        trainer.ranks.tend(max(first.kill_at_s, second.kill_at_s))
    park(trainer, first, second)
    trainer.ranks.begin(command(2, keep=(0, 1)))
    assert [one.by_us for one in (first, second)] == [over, over]
    assert trainer.ranks.generation == (1 if over else 2)  # until they are gone
    trainer.ranks.tend(time.monotonic() + 60.0)
    assert over or not trainer.ranks.reap()


def test_a_standby_that_is_not_ready_is_assigned_when_it_is(launchers):
    one = launchers("train", "--nproc-per-node", "1", "--standby", "1")
    one.ranks.prepare()
    slow, ready = one.ranks.living()
    one.ranks.on_packet(ready, {"t": "ready"})
    one.ranks.begin(command(1, ranks=(0,)))
    assert one.ranks.by_rank() == {0: ready}  # the ready one first
    one.lose(ready)
    one.ranks.begin(command(2, ranks=(0,)))
    assert one.ranks.by_rank() == {0: slow} and one.heard(slow) == [] and slow.state == "starting"
    one.ranks.on_packet(slow, {"t": "ready"})
    assert [p["generation"] for p in one.heard(slow)] == [2] and slow.state == "running"


def test_snapshots_are_handed_to_whom_resumes_from_them(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    for process in (first, second, first):  # the same memory, asked for again
        trainer.ranks.on_packet(process, {"t": "snapshot", "nbytes": 1000})
    assert [p["fds"] for p in trainer.heard(first)] == [1, 1] and len(trainer.ranks.snapshots) == 2
    trainer.ranks.on_packet(first, {"t": "snapshot", "nbytes": 1 << 50})
    assert [p["fds"] for p in trainer.heard(first)] == [0]
    assert "snapshots are off" in trainer.said[-1]
    for kind, fds in (("disk", 0), ("snapshot", 2)):
        trainer.ranks.started = command(2, kind=kind)
        trainer.ranks.assign(second)
        assert trainer.heard(second)[-1]["fds"] == fds


def test_all_stop_behind_the_same_step(trainer):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    first.fields[pages.F_STEP], second.fields[pages.F_STEP] = 7, 8
    trainer.ranks.stop_at_step()
    second.fields[pages.F_STEP] = 9
    trainer.ranks.stop_at_step()  # asked again, it is still that one
    assert [p.fields[pages.F_STOP_AFTER] for p in (first, second)] == [10, 10]
    (standby,) = trainer.ranks.standbys()
    assert standby.fields[pages.F_STOP_AFTER] == 0


def test_a_machine_that_refuses_processes_is_left_with_a_reason(launchers, monkeypatch):
    one = shell(launchers, "true")
    monkeypatch.setattr(forking, "spawn_command", refuse)
    one.ranks.begin(command(1, ranks=(0,)))
    assert one.state.exit_code == exits.RETRY and "temporarily unavailable" in one.state.end_reason


def descriptors():
    """What this process has open, as the kernel names it."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + name))
        except FileNotFoundError:
            continue  # the listing's own
    return Counter(found)


def more_than(before):
    """What is open and was not; of earlier tests something may have been closed meanwhile."""
    return descriptors() - before


def refuse(*_, **__):
    raise BlockingIOError(11, "Resource temporarily unavailable")


@pytest.mark.parametrize("how", ["fork", "spawn", "no page"])
def test_a_process_that_the_machine_refuses_leaves_no_descriptor(launchers, monkeypatch, how):
    one = launchers("train", "--start-method", "fork" if how == "fork" else "spawn")
    if how == "fork":
        monkeypatch.setattr(forking, "fork_rank", refuse)
    elif how == "spawn":
        monkeypatch.setattr(subprocess, "Popen", refuse)
    else:
        monkeypatch.setattr(pages, "create", refuse)
    before, problems = descriptors(), []
    for _ in range(3):
        try:
            one.ranks.launch(-1, 0)
        except OSError as error:
            problems.append(error)  # held on to, with all that it knows
    assert len(problems) == 3 and not more_than(before) and not one.ranks.processes


def test_a_store_that_the_machine_refuses_leaves_no_descriptor(monkeypatch):
    monkeypatch.setattr(os, "fork", refuse)
    before, problems = descriptors(), []
    for _ in range(3):
        try:
            forking.start_store()
        except OSError as error:
            problems.append(error)
    assert len(problems) == 3 and not more_than(before)


def test_a_process_that_is_forgotten_leaves_no_descriptor(launchers):
    one = shell(launchers, "exec sleep 600")
    before = descriptors()
    for generation in (1, 2, 3):
        one.ranks.begin(command(generation, ranks=(0,)))
        wait_for(lambda: one.ranks.reap() or one.ranks.waiting is None)
        one.ranks.start_waiting()
    (process,) = one.ranks.processes
    assert process.generation == 3 and one.ranks.launched == 3
    one.ranks.end_all()
    one.ranks.processes.clear()
    process.close()
    assert not more_than(before)


def test_memory_that_is_refused_costs_the_snapshots_alone(trainer, monkeypatch):
    first, second = (trainer.ranks.by_rank()[rank] for rank in (0, 1))
    trainer.ranks.on_packet(first, {"t": "snapshot", "nbytes": 1000})
    monkeypatch.setattr(rank_processes.snapshots, "create", refuse)
    trainer.ranks.on_packet(first, {"t": "snapshot", "nbytes": 9000})  # the smaller one is gone
    trainer.ranks.on_packet(second, {"t": "snapshot", "nbytes": 9000})
    assert [p["fds"] for p in (*trainer.heard(first), *trainer.heard(second))] == [1, 0, 0]
    assert trainer.ranks.snapshots == {} and trainer.ranks.snapshot_view() is None
    assert "snapshots are off: " in trainer.said[-1]


def test_a_trainer_that_cannot_even_prepare_is_tried_elsewhere(launchers, monkeypatch):
    one = launchers("train", "--nproc-per-node", "2")
    monkeypatch.setattr(forking, "fork_rank", refuse)
    one.ranks.prepare()
    assert one.state.exit_code == exits.RETRY and "temporarily unavailable" in one.state.end_reason


def test_nothing_is_planned_before_a_trainer_has_listed_its_checkpoints(launchers):
    one = launchers("train", "--nproc-per-node", "1")
    assert one.ranks.level() == "preparing"
    one.state.take_checkpoints({"checkpoint_dir": "c", "keep": 2, "commits": []})
    assert one.ranks.level() == "idle"
    assert shell(launchers, "true").ranks.level() == "idle"


def test_a_permit_reaches_each_page(launchers):
    one = shell(launchers, "exec sleep 600", ranks="2")
    one.ranks.begin(command(1)._replace(permit_ns=77))
    assert [p.fields[pages.F_PERMIT] for p in one.ranks.living()] == [77, 77]


def test_a_permit_ends_when_its_order_says_and_none_starts_what_is_over(launchers):
    one = shell(launchers, "exec sleep 600", ranks="2")
    told = orders(one)
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    order = {"ranks": [0, 1], "world": 2, "resume": {"kind": "own"}, "permit_s": 10.0}
    told.carry_out("start", "late", {**order, "generation": 1, "permit_until_boot_s": now_s - 1.0})
    assert "permit of generation 1 ran out" in told.outcomes[-1]["error"]
    assert not one.ranks.living()
    told.carry_out("start", "soon", {**order, "generation": 2, "permit_until_boot_s": now_s + 7.0})
    assert told.outcomes[-1]["ok"] and one.ranks.permit.until_ns == int((now_s + 7.0) * 1e9)
    told.carry_out("start", "older", {**order, "generation": 3})  # an agent of the release before
    assert one.ranks.waiting.permit_ns >= int((now_s + 10.0) * 1e9)


def test_an_order_to_stop_ends_whom_it_names_of_its_generation(launchers):
    one = shell(launchers, "exec sleep 600", ranks="3")
    one.ranks.begin(command(2, ranks=(0, 1, 2)))
    told = orders(one)
    told.stop("old", {"generation": 1, "ranks": []})
    assert not any(p.by_us for p in one.ranks.living())
    told.stop("one", {"generation": 2, "ranks": [1]})
    assert [p.rank for p in one.ranks.living() if p.by_us] == [1]
    told.stop("all", {"generation": 2, "ranks": []})
    wait_for(lambda: one.ranks.reap() and not one.ranks.living() or not one.ranks.living())
    assert all(p.ended["signal"] == signal.SIGKILL for p in one.ranks.processes)


# ---------------------------------------------------------------- one of many nodes


def nodes(launchers, *argv, word="run"):
    one = launchers(word, "--nnodes", "2", "--run", "r", "--nproc-per-node", "2", *argv)
    one.state.address = "127.0.0.3"
    return one


def environ_of(process):
    text = Path(f"/proc/{process.child.pid}/environ").read_bytes().decode()
    return dict(pair.partition("=")[::2] for pair in text.split("\0") if pair)


def second(generation, **more):
    return command(generation, ranks=(2, 3))._replace(world=4, group=1, groups=2, **more)


def test_a_node_behind_the_first_waits_for_its_store_and_knows_its_place(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    one.ranks.begin(second(1))
    one.ranks.start_waiting()
    assert one.ranks.generation == 0 and not one.ranks.launched
    one.ranks.learn_endpoint(1, "10.0.0.1", 4711)
    one.ranks.start_waiting()
    wait_for(lambda: all("RANK" in environ_of(p) for p in one.ranks.living()))
    seen = [environ_of(p) for p in one.ranks.living()]
    assert [e["RANK"] for e in seen] == ["2", "3"] == [e["ROLE_RANK"] for e in seen]
    assert [e["LOCAL_RANK"] for e in seen] == ["0", "1"]
    for environ in seen:
        assert environ["WORLD_SIZE"] == "4" == environ["ROLE_WORLD_SIZE"]
        assert environ["LOCAL_WORLD_SIZE"] == "2" == environ["GROUP_WORLD_SIZE"]
        assert environ["GROUP_RANK"] == "1"
        assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "4711")
    assert one.ranks.endpoint() is None


def test_the_first_node_says_where_its_store_is(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    one.ranks.begin(command(1)._replace(world=4, groups=2))
    (first, *_) = one.ranks.living()
    wait_for(lambda: "RANK" in environ_of(first))
    said = one.ranks.endpoint()
    assert (said["generation"], said["host"]) == (1, "127.0.0.3")
    environ = environ_of(first)
    assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("127.0.0.3", str(said["port"]))
    assert (environ["GROUP_RANK"], environ["GROUP_WORLD_SIZE"]) == ("0", "2")


def test_the_second_generation_of_a_port_ends_nobody_without_a_store(launchers):
    one = nodes(launchers, "--master-port", "29400", "--no-python", "sleep", "600")
    one.ranks.begin(command(1)._replace(groups=2))
    for number in (2, 3):
        one.ranks.begin(command(number)._replace(groups=2))

        def started(number=number):
            one.ranks.reap()
            one.ranks.start_waiting()
            return one.ranks.generation == number

        wait_for(started)  # to the kernel, the missing store's pid 0 is this whole process group


def test_a_rank_that_moved_to_another_node_is_not_this_ones_any_more(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    one.ranks.begin(command(1)._replace(world=4, groups=2))
    old = one.ranks.by_rank()
    for process in old.values():
        one.lose(process)
    one.ranks.learn_endpoint(2, "10.0.0.1", 4711)
    one.ranks.begin(second(2))
    assert sorted(one.ranks.by_rank()) == [2, 3]  # an agent takes no more than the nproc of a hello
    assert not set(old.values()) & set(one.ranks.processes)


def test_ranks_leave_a_generation_that_another_node_broke(launchers):
    one = nodes(launchers, word="train")
    one.ranks.prepare()
    one.all_ready()
    one.ranks.begin(command(1)._replace(world=4, groups=2))
    ranks = [p for p in one.ranks.living() if p.rank >= 0]
    (assign,) = one.heard(ranks[0])
    assert assign["store_host"] == "127.0.0.3" and assign["environ"]["GROUP_WORLD_SIZE"] == "2"
    one.heard(ranks[1])
    one.ranks.break_generation(None, 2)  # of one that is not here yet
    assert not one.heard(ranks[0])
    one.ranks.break_generation(None, 1)
    assert [one.heard(p) for p in ranks] == [[{"t": "leave", "generation": 1, "fds": 0}]] * 2


def test_ranks_end_with_a_permit_that_nobody_renews(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    now_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    far_ns = now_ns + 600 * 10**9
    one.ranks.begin(command(1)._replace(groups=2, permit_ns=far_ns))
    one.ranks.renew_permit(2, far_ns + 1)  # another generation's
    one.ranks.renew_permit(1, far_ns - 1)  # an older word
    assert one.ranks.permit.until_ns == far_ns
    one.ranks.renew_permit(1, far_ns + 5)
    ranks = one.ranks.living()
    assert {p.fields[pages.F_PERMIT] for p in ranks} == {far_ns + 5}
    one.ranks.tend(0.0)
    assert not one.ranks.reap()
    one.ranks.permit.until_ns = now_ns
    one.ranks.tend(0.0)
    assert "permit of generation 1 ran out" in one.said[-1]

    def over():
        one.ranks.reap()
        return not one.ranks.living()

    wait_for(over)
    assert all(p.ended["by_us"] for p in ranks)


def test_one_of_many_nodes_starts_no_world_of_its_own_without_an_agent(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    link = SimpleNamespace(channel=None, lost_s=0.0, problem="", code=None)
    terminal = SimpleNamespace(say=lambda text, *_: one.said.append(text))
    alone = without_agent.WithoutAgent(one.state, one.ranks, link, terminal)
    begun_s = 500.0  # the imports took long; from then on an agent has its time
    for now_s in (0.0, without_agent.WITHOUT_AGENT_S, without_agent.NODES_WAIT_S - 0.1):
        alone.watch(begun_s + now_s)
    assert not one.ranks.launched and one.state.exit_code is None
    assert [text for text in one.said if "waiting for one" in text] == one.said
    alone.watch(begun_s + without_agent.NODES_WAIT_S)
    assert one.state.exit_code == exits.RETRY and not one.ranks.launched


def test_an_agent_whose_configuration_is_wrong_is_not_waited_for(launchers):
    one = nodes(launchers, "--no-python", "sleep", "600")
    link = SimpleNamespace(channel=None, lost_s=0.0, problem="ended with 78: no etcd", code=1)
    terminal = SimpleNamespace(say=lambda text, *_: one.said.append(text))
    alone = without_agent.WithoutAgent(one.state, one.ranks, link, terminal)
    alone.watch(500.0)
    assert one.state.exit_code is None
    link.code = exits.CONFIGURATION
    alone.watch(500.1)
    assert one.state.exit_code == exits.CONFIGURATION and one.state.end_reason == link.problem
