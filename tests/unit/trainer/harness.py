"""A launcher of a hundred lines for tests: real processes, real gloo, real kills.

Owns processes, stores and a plan that is a stand-in for the agent's.  `FakeElastic` is the other
end, in the rank: the calls of holdfast.worker.elastic over a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist
from waiting import wait_for

from holdfast.agent.core.model import Parked
from holdfast.agent.core.run.plan import is_whole
from holdfast.trainer.checkpoint import format as files
from holdfast.trainer.standalone import Assignment

LIMIT_S = 180.0  # only ends a run that hangs
PRELOAD = ["torch._dynamo", "torch.distributed", "holdfast.trainer.loop",
           "holdfast.trainer.example.data", "holdfast.trainer.example.model"]


# Where a rank is while it joins: what it is about to do -> (whose, which function).
JOINING = {
    "store": ("torch.distributed", "TCPStore"),
    "mesh": ("torch.distributed", "init_process_group"),
    "members": ("holdfast.trainer.group", "Group._members"),
}


class Broken(RuntimeError):
    pass


class Shard:
    def __init__(self, rank, world, generation, step, digest, data):
        self.rank, self.world, self.generation = rank, world, generation
        self.step, self.digest, self.data = step, digest, data


class FakeElastic:
    """In the rank.  `faults`: {(generation, rank, step, where): what}."""

    Broken = Broken

    def __init__(self, pipe, faults, snapshot_dir):
        self.pipe, self.faults, self.snapshot_dir = pipe, faults, snapshot_dir
        self.assignments, self.left, self.cut = queue.Queue(), 0, None
        self.lock, self.step, self.now, self.stop = threading.Lock(), 0, None, 0
        self.parting = (0, False)  # behind this step, and whether with a checkpoint
        self.told = threading.Event()  # to stop, or to park
        self.half = 0
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        while True:
            try:
                if not self.pipe.poll(0.1):
                    self._wake()
                    continue
                kind, value = self.pipe.recv()
            except (EOFError, OSError):
                os._exit(3)
            if kind == "assign":
                self.assignments.put(value)
            elif kind == "leave":
                self.left = value  # may come before the main thread has seen its assignment
                self._wake()
            elif kind == "stop":
                self.stop = value
                self.told.set()
            elif kind == "park":
                self.parting = value
                self.told.set()

    def _wake(self):
        """Again and again until the rank has left: it may be just about to connect."""
        with self.lock:
            if self.cut and self.broken():
                self.cut()

    def send(self, *message):
        with self.lock:
            self.pipe.send((*message, time.monotonic()))

    def active(self):
        return True

    def _next(self):
        self.now = self.assignments.get()
        self.step = self.now.resume_step
        self.send("assigned")
        return self.now

    def ready(self, checkpoint_dir="", keep=3, commits=()):
        self.send("ready")
        return self._next()

    def raised(self, error):
        self.send("raised", type(error).__name__, str(error))
        return f"{type(error).__name__}: {error}"

    def park(self, step, torn, reason, meanwhile=None, shard=0, shards=1, ready=False, error=""):
        self.send("parked", step, torn, reason, shard, shards, ready, error)
        if meanwhile:
            meanwhile()
            self.send("left")
        return self._next()

    def _fault(self, where):
        key = (self.now.generation, self.now.rank, self.step, where)
        fault = self.faults.get(key)
        if fault == "kill":
            self.send("killing")
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "gloo":
            raise RuntimeError("[enforce fail at gloo/transport] made by the test")
        elif fault == "value":
            raise ValueError("the user's own")
        elif fault == "connection":  # of the user's own, in words that a lost peer has too
            raise RuntimeError("failed to connect to 10.0.0.3")
        elif fault == "memory":
            raise MemoryError("of this process")
        elif fault == "stop":
            self.send("stopping")
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "late":
            time.sleep(0.5)
        elif fault == "untold":  # goes on once the order is there, which travels through a pipe
            assert self.told.wait(LIMIT_S)
        elif fault:  # a file that the test makes
            wait_for(Path(fault).exists, LIMIT_S)

    def phase(self, name):
        if os.environ.get("HARNESS_PHASES"):
            self.send("phase", name)
        self._fault(name)
        if self.broken():
            raise Broken("generation over")

    def step_begin(self):
        self._fault("step_begin")

    def step_end(self, step, loss):
        self.step = step
        self.send("step", step, loss)

    def broken(self):
        return self.now is not None and self.left >= self.now.generation

    def register_group(self, group, cut, alike=()):
        with self.lock:
            self.cut = cut
        if group is not None:
            self.send("joined")

    def progress(self, step, loss, tokens_per_s, total_steps):
        pass

    def placed(self, words):
        self.send("placed", words)

    def report(self, fault, text):
        self.send("report", fault, text)

    def committed(self, generation, step, path, world):
        self.send("committed", generation, step, path, world)

    def verified(self, path):
        self.send("verified", path)

    def bad_checkpoint(self, path, why):
        self.send("bad_checkpoint", path, why)

    def skip_collective(self):
        return False

    def stop_after(self):
        return self.stop

    def park_after(self):
        return self.parting if self.now.generation == 1 else (0, False)

    def snapshot_buffer(self, nbytes):
        if not self.snapshot_dir:
            return None
        self.half = 1 - self.half
        path = Path(self.snapshot_dir) / f"{self.now.rank}.{self.half}"
        path.with_suffix(path.suffix + ".head").unlink(missing_ok=True)
        with open(path, "w+b") as file:
            file.truncate(max(nbytes, 1))
            self.mapped = mmap.mmap(file.fileno(), max(nbytes, 1))
        return memoryview(self.mapped)[:nbytes]

    def snapshot_commit(self, step, digest):
        head = Path(self.snapshot_dir) / f"{self.now.rank}.{self.half}.head"
        head.write_text(f"{self.now.rank} {self.now.world} {self.now.generation} {step} {digest}")

    def snapshot_shards(self):
        return read_shards(self.snapshot_dir)


def read_shards(folder):
    shards = []
    for head in sorted(Path(folder).glob("*.head")):
        rank, world, generation, step, digest = head.read_text().split()
        data = memoryview(head.with_suffix("").read_bytes())
        shards.append(Shard(int(rank), int(world), int(generation), int(step), digest, data))
    return shards


def _before(place, fault):
    """Has a fault come right before this seam of the joining."""
    module, path = JOINING[place]
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    goes_on = getattr(owner, name)

    def seam(*args, **kwargs):
        fault(place)
        return goes_on(*args, **kwargs)

    setattr(owner, name, seam)


def _rank(pipe, config, faults, snapshot_dir, log):
    import torch

    # As in a rank of a real launcher: a library's lock (tqdm's, in a pipeline's graph) then has no
    # name in /dev/shm, where a killed rank would leave it.
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    from holdfast.trainer.loop import train

    elastic = FakeElastic(pipe, faults, snapshot_dir)
    for place in JOINING:
        _before(place, elastic._fault)
    if config.model.startswith("faulty:"):
        import faulty
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        faulty.IN_RANK = elastic
        register_optimizer_step_pre_hook(faulty._in_the_middle)
    try:
        result = train(config, elastic)
    except BaseException as error:
        import traceback

        traceback.print_exc()
        elastic.send("error", type(error).__name__, str(error))
        os._exit(1)
    elastic.send("result", result)
    sys.stdout.flush()
    os._exit(0)


class Lost(Exception):
    """The run did not come to its end."""


class Launcher:
    """Runs `config` on `world` ranks through its faults; `events` keeps all that was said."""

    def __init__(self, config, world, tmp, faults=None, snapshots=False, standby=0):
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.config, self.world, self.tmp, self.faults = config, world, Path(tmp), faults or {}
        self.snapshot_dir = str(self.tmp / "snapshots") if snapshots else ""
        if snapshots:
            (self.tmp / "snapshots").mkdir(parents=True, exist_ok=True)
        self.generation, self.events, self.results = 0, [], {}
        self.ranks, self.pool = {}, []  # rank -> [process, pipe, state]
        self.plans = []
        self.standby, self.together = standby, False
        self.nodes = [""]  # by generation: a letter for each rank's; the last one stays
        self.labels = {}  # a node's letter -> its labels; without them it is told none

    def spawn(self):
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=_rank,
            args=(theirs, self.config, self.faults, self.snapshot_dir, str(self.tmp / "log")),
            daemon=True,
        )
        process.start()
        theirs.close()
        return [process, ours, "starting"]

    def plan(self, kind="fresh", step=0, generation=0, path=""):
        self.generation += 1
        self.plans.append((kind, step))
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        for rank in range(self.world):
            if rank not in self.ranks:
                self.ranks[rank] = self.pool.pop() if self.pool else self.spawn()
            self.ranks[rank][2] = "running"
            node = self.nodes[min(self.generation, len(self.nodes)) - 1][rank : rank + 1]
            self.ranks[rank][1].send(("assign", Assignment(
                self.generation, rank, rank, self.world, "127.0.0.1", self.store.port, kind, step,
                generation, path, run="test", node=node, labels=self.labels.get(node))))

    def run(self, resume=("fresh", 0, 0, ""), timeout_s=LIMIT_S):
        deadline = time.monotonic() + timeout_s
        try:
            self.plan(*resume)
            while len(self.results) < self.world:
                if time.monotonic() > deadline:
                    raise Lost(f"timeout: {self.events[-20:]}\n{self.log()}")
                self.turn(deadline)
            return self.results
        finally:
            self.close()

    def turn(self, deadline):
        pipes = {e[1]: rank for rank, e in self.ranks.items() if e[2] != "done"}
        pipes.update({entry[1]: None for entry in self.pool})
        for pipe in wait(list(pipes), max(0.0, deadline - time.monotonic())):
            rank = pipes[pipe]
            # Its rank was ended for the plan that another's word led to; or it was heard already,
            # while that was caught up with.
            if pipe.closed or not pipe.poll():
                continue
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                self.died(rank)
                return
            if message[0] == "parked":
                self.catch_up(pipes, pipe)
            self.events.append((self.generation, rank, *message))
            self.heard(rank, message)

    def catch_up(self, pipes, of):
        """Hear first what the others had said before: nothing orders one pipe against another."""
        for pipe, rank in pipes.items():
            while pipe is not of and rank is not None and not pipe.closed and pipe.poll():
                try:
                    message = pipe.recv()
                except (EOFError, OSError):
                    break  # of one that died: heard in the next turn
                self.events.append((self.generation, rank, *message))
                self.heard(rank, message)

    def heard(self, rank, message):
        if message[0] == "result":
            self.results[rank], self.ranks[rank][2] = message[1], "done"
        elif message[0] == "error":
            raise Lost(f"rank {rank}: {message[1]}: {message[2]}")
        elif message[0] == "step" and len(self.pool) < self.standby:
            self.pool.append(self.spawn())  # not before: it would take the recovery's cores
        elif message[0] == "parked":
            self.ranks[rank][2] = message[1:7]  # as Parked has them
            self.leave()
            self.replan()

    def died(self, rank):
        self.events.append((self.generation, rank, "died", time.monotonic()))
        process = self.ranks.pop(rank)[0]
        process.join(5)
        if self.together:  # power loss, OOM of the whole cgroup: nobody has time to park
            self.together = False
            for other in list(self.ranks):
                entry = self.ranks.pop(other)
                entry[0].kill()
                entry[0].join(5)
                entry[1].close()
        self.leave()
        self.replan()

    def leave(self):
        for _, pipe, state in self.ranks.values():
            if state == "running":
                with contextlib.suppress(OSError):  # it died, and is heard of next
                    pipe.send(("leave", self.generation))

    def replan(self):
        states = [state for _, _, state in self.ranks.values()]
        if any(state == "running" for state in states):
            return  # its park, or its end, comes
        held = [Parked(*state) for state in states if isinstance(state, tuple)]
        steps = sorted({one.step for one in held if not one.torn}, reverse=True)
        whole = [step for step in steps if is_whole(held, step)]  # the agent's own rule
        if whole:
            self.plan("survivor", whole[0])
            return
        shards = read_shards(self.snapshot_dir) if self.snapshot_dir else []
        steps = {(s.step, s.generation, s.world) for s in shards}
        full = [k for k in steps if sum((s.step, s.generation) == k[:2] for s in shards) == k[2]]
        failed = any(state[2].startswith("restore_failed") for state in states)
        if full and not failed:
            step, generation, _ = max(full)
            self.plan("snapshot", step, generation)
            return
        commits = [f for f in files.listing(self.config.checkpoint_dir) if not f.bad]
        if commits:
            found = commits[0]
            self.plan("disk", found.step, found.generation, found.path)
        else:
            self.plan("fresh")

    def addresses(self, *ranks):
        """Whether these ranks' addresses are in the store of the newest generation."""
        return self.store.check([f"holdfast/{self.generation}/0//cpu//0/{r}" for r in ranks])

    def said(self, kind):
        return [event for event in self.events if event[2] == kind]

    def log(self):
        path = self.tmp / "log"
        return path.read_text()[-4000:] if path.exists() else ""

    def close(self):
        for process, pipe, _ in [*self.ranks.values(), *self.pool]:
            if process.is_alive() and process.pid:
                process.kill()
            process.join(5)
            pipe.close()
