"""A launcher and a core with state, for tests of the agent's shell."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import msgspec
from waiting import until

from holdfast.agent.core.model import Decision, Effect, Incident, Now, Observed
from holdfast.agent.core.run.state import Suspension
from holdfast.agent.core.series.gradient_pace import GradientPace
from holdfast.worker import page as page_module


class FakeNode:
    """A core that does what the test puts into `todo`, and remembers what it saw."""

    def __init__(self, name="node-a", settings=None, runbooks=(), memory=b"") -> None:
        self.name = name
        self.settings = settings
        self.start_memory = memory
        self.steps = 0
        self.todo: list[Effect] = []
        self.incidents: tuple[Incident, ...] = ()
        self.seen: list[Observed] = []
        self.fail = False
        self.next_step_s = 1.0
        self.extra: dict = {}
        self.doing: dict[str, str] = {}  # run -> stage

    def step(self, now: Now, observed: Observed) -> Decision:
        self.steps += 1
        self.seen = [*self.seen[-50:], observed]
        if self.fail:
            raise RuntimeError("a bug of ours")
        effects, self.todo = tuple(self.todo), []
        return Decision(
            effects=effects, incidents=self.incidents, next_step_s=self.next_step_s, **self.extra
        )

    def stages(self) -> dict[str, str]:
        return self.doing

    def paces(self) -> dict[str, GradientPace]:
        return {}

    def endings(self) -> dict[str, tuple[int, str]]:
        return {}

    def paused_until(self) -> dict[str, float]:
        return {}

    def suspended(self) -> dict[str, Suspension]:
        return {}

    def configure(self, settings, runbooks) -> None:
        self.settings = settings

    def outlook(self, fault: str) -> tuple:
        return ()

    def memory(self) -> bytes:
        return b"steps:%d" % (self.steps // 1000)


class FakeLauncher:
    """Speaks the launcher's side of the protocol over a real socket."""

    def __init__(self, path: Path, run: str = "demo", **hello) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(path))
        self.sock.setblocking(False)
        self.run = run
        self.hello_fields = {"run": run, "protocol": 1, "node": "node-a", "pid": os.getpid(),
                             "grade": "trainer", "nproc": 2, "user": "me"} | hello
        self.n = 0
        self.pages: dict[int, memoryview] = {}
        self.mail: list[dict] = []

    def send(self, fds=(), **fields) -> None:
        packet = json.dumps(fields).encode()
        if fds:
            socket.send_fds(self.sock, [packet], list(fds))
        else:
            self.sock.send(packet)

    def hello(self) -> None:
        self.send(t="hello", **self.hello_fields)

    def levels(self, **fields) -> None:
        self.n += 1
        self.send(t="levels", n=self.n, **fields)

    def page(self, rank: int, pid: int, generation: int = 1) -> memoryview:
        fd = page_module.create()
        pidfd = os.pidfd_open(pid)
        fields = page_module.map_fields(fd)
        fields[page_module.F_GENERATION] = generation
        fields[page_module.F_RANK] = rank
        fields[page_module.F_PID] = pid
        handed_over = page_module.readonly(fd)
        self.send([handed_over, pidfd], t="page", rank=rank, generation=generation, pid=pid,
                  local_rank=rank)
        os.close(fd)
        os.close(handed_over)
        os.close(pidfd)
        self.pages[rank] = fields
        return fields

    async def receive(self, kind: str, timeout_s: float = 30.0) -> dict:
        """The next packet of this type; others are kept for later."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            for index, packet in enumerate(self.mail):
                if packet["t"] == kind:
                    return self.mail.pop(index)
            left_s = deadline_s - loop.time()
            data = await asyncio.wait_for(loop.sock_recv(self.sock, 1 << 17), left_s)
            if not data:
                raise ConnectionError("the agent closed the connection")
            self.mail.append(json.loads(data))

    def close(self) -> None:
        self.sock.close()


def rank_level(rank: int, pid: int, generation: int = 1, state: str = "running", **more) -> dict:
    return {"rank": rank, "local_rank": rank, "pid": pid, "generation": generation,
            "state": state, "ended": None, "parked": None} | more


class Hung:
    """A file that takes no byte and lets nobody go, as on a server that does not answer."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self.path = path

    def answer(self) -> None:
        """Lets the writer go on, and nobody hangs there again."""
        reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)
        self.path.unlink(missing_ok=True)  # the writer may be quicker
        os.set_blocking(reader, True)
        while os.read(reader, 4096):  # until the writer has closed it
            pass
        os.close(reader)


@contextlib.asynccontextmanager
async def joined(
    tmp_path: Path, node: FakeNode, *, run: str = "demo", generation: int = 0,
    state: str = "idle", ranks: Iterable[dict] = (), **hello: object,
) -> AsyncIterator[FakeLauncher]:
    """A launcher that said hello and its levels, once the core has seen its run."""
    launcher = FakeLauncher(tmp_path / "run" / "agent.sock", run, **hello)
    try:
        launcher.hello()
        launcher.levels(generation=generation, state=state, ranks=list(ranks))
        await until(lambda: node.seen and any(
            one.run == run and one.connected for one in node.seen[-1].runs))
        yield launcher
    finally:
        launcher.close()


def to_json(value) -> dict:
    return msgspec.to_builtins(value)


def serve(scenario, agent, tmp_path, ready=False, **settings) -> None:
    """Runs scenario(daemon, node, launch) beside an agent; `ready`: once its collectors read and
    its page is there.  launch(...) is a launcher that has connected."""
    async def run():
        async with agent(**settings) as (daemon, node):
            if ready:
                state = daemon.state
                await until(lambda: daemon.launchers.address and state.runner
                            and state.runner.samples())
            await scenario(daemon, node, lambda **more: FakeLauncher(
                tmp_path / "run" / "agent.sock", **more))

    asyncio.run(run())
