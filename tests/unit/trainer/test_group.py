"""The process group: how long it waits for slow peers, and how a wait for a lost one ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import PRELOAD
from torch.nn.parallel import DistributedDataParallel
from waiting import wait_for

import holdfast.trainer.devices
import holdfast.trainer.group
from holdfast.trainer.breakable import Breakable, Work
from holdfast.trainer.engines.strategy import Layout, Place
from holdfast.trainer.group import Group

NUMBERS = 16_000_000  # 64 MB: more than two sockets' buffers hold
LIMIT_S = 60.0
CONNECT_S = 2.0
SOON_S = 30.0  # of a wait that is released; gloo's own would last an hour


def send(group):
    dist.send(torch.zeros(NUMBERS), 1 - group.rank)


def receive(group):
    dist.recv(torch.zeros(NUMBERS), 1 - group.rank)


def broadcast(group):
    dist.broadcast(torch.zeros(NUMBERS), 0)


def hook(group):
    """As DDP waits for a bucket."""
    group.process_group.summed(torch.zeros(NUMBERS)).wait()


def receive_later(_group):
    return dist.irecv(torch.zeros(NUMBERS), 0)


def send_later(_group):
    return dist.isend(torch.zeros(NUMBERS), 0)


def broadcast_later(_group):
    return dist.broadcast(torch.zeros(NUMBERS), 0, async_op=True)


def sum_later(_group):
    return dist.all_reduce(torch.zeros(NUMBERS), async_op=True)


BOTH = Layout((Place(), Place()), data=2)
# On a device whose messages are another library's: one part for what lies in host memory.
FAR = BOTH._replace(
    groups={"near": [(0, 1)], "far": [(0, 1)]}, alike=("near", "far"), host=("far",))


def joined(rank, port, layout=BOTH):
    torch.set_num_threads(1)
    elastic = types.SimpleNamespace(phase=lambda _: None, register_group=lambda *_: None)
    assignment = types.SimpleNamespace(
        rank=rank, world=2, store_host="127.0.0.1", store_port=port, generation=1, node="n",
        labels=None)
    group = Group(assignment, torch.device("cpu"), elastic)
    group.join(assignment, elastic, lambda _: layout)
    return group


def survive(port, pipe, what):
    group = joined(0, port)

    def cut():
        pipe.recv()
        group.cut()

    pipe.send("joined")
    pipe.recv()  # nothing is read here until then: the other's message cannot get through whole
    threading.Thread(target=cut, daemon=True).start()
    pipe.send("begins")
    said = ""
    try:
        what(group)
    except RuntimeError as error:
        said = str(error)
        group.leave()
        wait_for(lambda: not named("old group"), LIMIT_S)
    # Here the last frame goes that knew the group, and gloo may still be asleep in what was asked.
    pipe.send(said)


def die(port, pipe, begin):
    group = joined(1, port)
    pipe.send("joined")
    pipe.recv()
    kept = begin(group)
    pipe.send("began")
    os.kill(os.getpid(), signal.SIGSTOP)  # nothing more is read or written
    del kept


def speak(port, pipe, _):
    """Sends when it is told to."""
    briefly_connecting()
    group = joined(1, port)
    pipe.send("joined")
    pipe.recv()
    send(group)
    pipe.send("sent")


def listen(port, pipe, _):
    briefly_connecting()
    group = joined(0, port)
    pipe.send("joined")
    try:
        receive(group)
        pipe.send("received")
    except RuntimeError as error:
        pipe.send(str(error))


def count_threads(port, pipe, _):
    """Beside `speak`; tells how many threads wait for transfers, before and behind leaving."""
    group = joined(0, port)
    pipe.send("joined")
    receive(group)
    pipe.send(named("transfers"))
    group.leave()
    wait_for(lambda: not named("transfers"), LIMIT_S)
    pipe.send(named("transfers"))


def outlive(port, pipe, what):
    """In `what` when the other is killed; tells how many of gloo's threads are left then."""
    group = joined(0, port)
    pipe.send("joined")
    pipe.recv()
    threading.Timer(0.2, group.cut).start()
    with contextlib.suppress(RuntimeError):
        what(group)
    group.leave()
    del group
    with contextlib.suppress(AssertionError):
        wait_for(lambda: not gloos(), SOON_S)
    pipe.send(gloos())


def stay(port, pipe, _):
    group = joined(1, port)
    pipe.send("joined")
    pipe.recv()
    del group


def meet_far(port, pipe, rank):
    """Sums in the part for the host's memory, in the usual group, and when all is cut."""
    holdfast.trainer.devices.backend = lambda _: "gloo"  # torch's own: another library to us
    group = joined(rank, port, FAR)
    pipe.send("joined")
    far, near = group.parts["far"], group.parts["near"]
    pipe.send([near is group.process_group, isinstance(near, Breakable), isinstance(far, Breakable),
               len(group._backends())])
    for part in (far, near):
        ones = torch.ones(3)
        dist.all_reduce(ones, group=part)
        pipe.send(ones.tolist())
    group.cut()
    try:
        dist.all_reduce(torch.zeros(NUMBERS), group=far)
    except RuntimeError:
        wait_for(lambda: far.over_s < float("inf"), LIMIT_S)
        pipe.send("over")


def named(name):
    """How many threads of ours have this name."""
    return sum(thread.name == name for thread in threading.enumerate())


def gloos():
    """The threads of gloo's groups in this process."""
    names = list[str]()
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            names.append(path.read_text().strip())
    return sorted(name for name in names if "gloo" in name)


def briefly_connecting():
    holdfast.trainer.group.CONNECT_TIMEOUT_S = CONNECT_S


def state_of(process):
    """Of its first thread: R, S, T, ..."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def said(pipe):
    assert pipe.poll(LIMIT_S)
    return pipe.recv()


def join(rank, port, pipe):
    """Says so when it has."""
    briefly_connecting()
    try:
        joined(rank, port)
        pipe.send("joined")
    except RuntimeError as error:
        pipe.send(str(error))


def join_first(port, pipe, _):
    join(0, port, pipe)


def join_late(port, pipe, _):
    pipe.recv()
    join(1, port, pipe)


def prefetch_beside(port, pipe, _):
    """A thread of the user's connects while this rank waits for one that prepares; tells whether
    the connection lives when the group is cut: before that one came, and behind the joining."""
    briefly_connecting()
    server = socket.create_server(("127.0.0.1", 0))
    waits = threading.Event()
    groups, errors = [], []

    def beside():
        try:
            joined(0, port)
        except RuntimeError as error:
            errors.append(error)

    held = Group.__init__
    Group.__init__ = lambda self, *given: (held(self, *given), groups.append(self))[0]
    inside = dist.PrefixStore.wait
    dist.PrefixStore.wait = lambda *given: (waits.set(), inside(*given))[1]
    thread = threading.Thread(target=beside)
    thread.start()
    assert waits.wait(LIMIT_S)
    theirs = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    pipe.send("connected")
    if pipe.recv() == "cut":
        groups[0].cut()
        thread.join(LIMIT_S)
        pipe.send([type(error).__name__ for error in errors])
    else:
        thread.join(LIMIT_S)
        groups[0].cut()
        try:
            dist.all_reduce(torch.zeros(NUMBERS))
        except RuntimeError:
            pipe.send("over")
    accepted.settimeout(LIMIT_S)
    try:
        theirs.sendall(b"x")
        pipe.send(accepted.recv(1))
    except OSError as error:
        pipe.send(str(error))


@contextlib.contextmanager
def started(*actions):
    """Two ranks in processes of their own."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for action, given in actions:
            ours, theirs = context.Pipe()
            pipes.append(ours)
            processes.append(context.Process(target=action, args=(store.port, theirs, given)))
            processes[-1].start()
            theirs.close()
        yield processes, pipes
    finally:
        for process, pipe in zip(processes, pipes):
            process.kill()
            process.join()
            pipe.close()


@contextlib.contextmanager
def pair(*actions):
    """Both joined."""
    with started(*actions) as (processes, pipes):
        assert [said(pipe) for pipe in pipes] == ["joined", "joined"]
        yield processes, pipes


def test_a_peer_that_prepares_for_longer_than_connecting_may_take_is_waited_for():
    with started((join_first, None), (join_late, None)) as (_, pipes):
        assert not pipes[0].poll(3 * CONNECT_S), pipes[0].recv()
        pipes[1].send("go")
        assert [said(pipe) for pipe in pipes] == ["joined", "joined"]


@pytest.mark.parametrize(("what", "begun"), [
    (send, receive_later), (receive, send_later), (broadcast, broadcast_later), (hook, sum_later)])
def test_whoever_waits_for_half_a_message_is_released(what, begun):
    """The survivor, rank 0, is in `what` when the other dies, which had begun its part."""
    with pair((survive, what), (die, begun)) as (processes, pipes):
        pipes[1].send("go")
        assert said(pipes[1]) == "began"
        wait_for(lambda: state_of(processes[1]) == "T", LIMIT_S)
        pipes[0].send("go")
        assert said(pipes[0]) == "begins"
        wait_for(lambda: state_of(processes[0]) == "S", LIMIT_S)
        processes[1].kill()
        pipes[0].send("cut")
        assert pipes[0].poll(SOON_S), "it still waits"
        assert "onnection" in pipes[0].recv()


def test_every_wait_that_torch_knows_can_be_released():
    """A new release of torch may ask under a new name, and would wait inside gloo."""
    returns_work = {name for name, what in vars(dist.ProcessGroup).items()
                    if "-> c10d::Work" in (what.__doc__ or "")}
    # Several collectives in one: nothing here asks for them, and gloo has most in C++ alone.
    inside = {name for name in returns_work
              if name.endswith(("tensor_coalesced", "single_coalesced", "_end_coalescing"))}
    assert returns_work >= {"allreduce", "_allgather_base", "send", "recv"}
    assert returns_work - inside <= set(vars(Breakable))


def test_a_message_may_take_longer_than_connecting_may():
    with pair((listen, None), (speak, None)) as (_, pipes):
        assert not pipes[0].poll(2 * CONNECT_S), pipes[0].recv()
        pipes[1].send("go")
        assert said(pipes[0]) == "received"


def test_threads_that_wait_for_transfers_end_with_the_group():
    with pair((count_threads, None), (speak, None)) as (_, pipes):
        pipes[1].send("go")
        assert said(pipes[0]) == 1 and said(pipes[0]) == 0


def test_a_connection_of_the_users_own_is_cut_neither_while_we_wait_nor_behind_the_joining():
    """The store's is, or who waits for a peer that prepares would wait on."""
    with started((prefetch_beside, None)) as (_, pipes):
        assert said(pipes[0]) == "connected"
        pipes[0].send("cut")
        assert [said(pipes[0]), said(pipes[0])] == [["DistNetworkError"], b"x"]
    with started((prefetch_beside, None), (join_late, None)) as (_, pipes):
        assert said(pipes[0]) == "connected"
        pipes[0].send("join")
        pipes[1].send("go")
        assert [said(pipes[0]), said(pipes[0])] == ["over", b"x"]


@pytest.mark.parametrize("what", [send, receive, broadcast, hook])
def test_a_group_that_lost_a_peer_leaves_no_thread_behind(what):
    """One that is never freed looks at its dead connections for ever, as fast as it can."""
    with pair((outlive, what), (stay, None)) as (processes, pipes):
        processes[1].kill()
        processes[1].join()
        pipes[0].send("go")
        assert said(pipes[0]) == []


def test_a_part_for_host_memory_is_our_gloo_whatever_carries_the_devices_messages():
    with pair((meet_far, 0), (meet_far, 1)) as (_, pipes):
        for pipe in pipes:
            assert said(pipe) == [True, False, True, 2]
            assert [said(pipe), said(pipe), said(pipe)] == [[2.0] * 3, [2.0] * 3, "over"]


class DoneBehindTheLook:
    """gloo's work that is done between the end of a look and the question whether it is."""

    def __init__(self):
        self.looks = 0

    def wait(self, timeout=None):
        self.looks += 1
        if timeout is not None:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self):
        return True


def test_a_wait_that_ends_behind_a_look_is_no_failure():
    work = DoneBehindTheLook()
    assert Work(types.SimpleNamespace(check=lambda: None), work).wait() and work.looks == 2


@contextlib.contextmanager
def alone(generation):
    """The group of this process and nobody else."""
    elastic = types.SimpleNamespace(phase=lambda _: None, register_group=lambda *_: None)
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    assignment = types.SimpleNamespace(
        rank=0, world=1, store_host="127.0.0.1", store_port=store.port, generation=generation,
        node="n", labels=None)
    group = Group(assignment, torch.device("cpu"), elastic)
    try:
        group.join(assignment, elastic, lambda _: Layout((Place(),)))
        yield
    finally:
        group.leave()


def test_ddp_of_a_users_own_strategy_runs_over_it():
    with alone(1):
        model = torch.nn.Linear(2, 1)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
        wrapped(torch.ones(3, 2)).sum().backward()
        assert model.weight.grad.tolist() == [[3.0, 3.0]]


def test_a_traceback_names_its_rank_once_in_each_generation(capsys):
    before = sys.excepthook
    for generation in (1, 2, 3):
        with alone(generation):
            sys.excepthook(KeyError, KeyError("input_ids"), None)
        assert capsys.readouterr().err == "[rank0]: KeyError: 'input_ids'\n"
        assert sys.excepthook is before


def test_a_hook_of_the_users_own_stays_when_the_group_is_left(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with alone(1):
        sys.excepthook = own = lambda *_: None
    assert sys.excepthook is own


def test_what_is_told_has_arrived_when_the_ranks_have_met():
    """The store answers no set: a word under way is missed by who asks behind a collective."""
    class Late:
        """A store that takes a word once its client asks something, as a busy one does."""

        def __init__(self):
            self.under_way, self.kept = {}, {}

        def set(self, key, value):
            self.under_way[key] = value.encode()

        def get(self, key):
            self.kept |= self.under_way
            return self.kept[key]

        def check(self, keys):
            return set(keys) <= self.kept.keys()

        def multi_get(self, keys):
            return [self.kept[key] for key in keys]

    store, ranks = Late(), []
    for rank in range(2):
        group = holdfast.trainer.group.Group.__new__(holdfast.trainer.group.Group)
        group.rank, group.world, group.store = rank, 2, store
        ranks.append(group)
    for group in ranks:
        group.say("loss", group.rank)
    assert ranks[0].all_say("loss") == []
    for group in ranks:
        group.tell("loss", group.rank)
    assert [group.all_say("loss") for group in ranks] == [[0, 1], [0, 1]]
