"""What comes in from outside: bounded, checked, and never more than its own connection's end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from fakes import FakeLauncher, rank_level, serve, until
from waiting import wait_for

from holdfast.agent.launchers import connection, protocol, rank_monitor
from holdfast.agent.launchers.protocol import RankLevel
from holdfast.agent.launchers.run_session import RunSession
from holdfast.agent.system import procfs
from holdfast.worker import page as layout


@pytest.mark.parametrize(
    "packet, says",
    [
        (b"\xff\xfe", "JSON"),
        (b"{}", "required field `t`"),
        (b'{"t":"dance"}', "dance"),
        (b'{"t":"levels"}', "hello first"),
        (b'{"t":"hello","run":"a/b","protocol":1}', "without '/'"),
        (b'{"t":"hello","run":"","protocol":1}', "1 to 128 characters"),
        (b'{"t":"hello","run":"x","protocol":1,"nproc":100000}', "nproc is 100000"),
        (b'{"t":"hello","run":"x","protocol":9}', "the launcher speaks 9"),
        (b'{"t":"hello","run":"x","protocol":0}', "the launcher speaks 0"),
        (b'{"t":"hello","run":7,"protocol":1}', "Expected `str`"),
    ],
)
def test_bad_packets_are_answered(agent, tmp_path, packet, says):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.sock.send(packet)
        assert says in (await launcher.receive("error"))["error"]
        launcher.hello()
        await launcher.receive("welcome")
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_a_neighbouring_protocol_and_unknown_keys_are_fine(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch(protocol=protocol.PROTOCOL + 1, mood="good")
        launcher.hello()
        assert (await launcher.receive("welcome"))["protocol"] == protocol.PROTOCOL
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_descriptors_are_checked_and_never_leak(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        state = daemon.state
        await until(lambda: daemon.launchers.address and state.runner and state.runner.samples())
        open_before = len(os.listdir("/proc/self/fd"))
        unsealed = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, layout.SIZE)
        page_fd, pidfd = layout.create(), os.pidfd_open(os.getpid())
        good = layout.readonly(page_fd)
        null = os.open("/dev/null", os.O_RDONLY)
        page = dict(t="page", rank=0, generation=1, pid=os.getpid())
        for fds, fields, says in (
            ([], page, "carries descriptors"),
            ([unsealed, pidfd], page, "F_SEAL_SHRINK"),
            ([null, pidfd], page, "memfd"),
            ([page_fd, pidfd], page, "descriptor is writable"),
            ([good, null], page, "no pidfd"),
            ([good, pidfd], page | {"pid": 1}, "no pidfd of 1"),
            ([good, pidfd], page | {"rank": -1}, "out of bounds"),
            ([good, pidfd], page | {"rank": 10**9}, "out of bounds"),
        ):
            launcher.send(fds, **fields)
            assert says in (await launcher.receive("error"))["error"]
        for fd in (unsealed, good, page_fd, pidfd, null):
            os.close(fd)
        # A collector may have a file open for a moment; what leaked stays.
        await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before)
        for _ in range(20):
            launcher.page(0, os.getpid())  # the same rank again and again
        launcher.levels(generation=1, state="running", ranks=[])
        await until(lambda: node.seen and node.seen[-1].runs)
        await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before + 2)
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_who_claims_another_users_process_is_written_down(agent, tmp_path, monkeypatch):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        monkeypatch.setattr(RunSession, "owns", lambda session, pid: False)  # a test may be root
        launcher.page(0, os.getpid())
        said = (await launcher.receive("error"))["error"]
        assert f"page of rank 0: pid {os.getpid()} is another user's" in said
        (refusal,) = daemon.state.audit.listed()
        assert refusal[:4] == (os.getuid(), "page", "another user's process",
                               f"pid {os.getpid()} as a rank of demo")
        launcher.close()

    serve(scenario, agent, tmp_path)


def test_a_page_of_rubbish_is_no_rank_that_moves(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        fields = launcher.page(0, os.getpid())
        for number in range(layout.FIELDS):
            fields[number] = (1 << 64) - 1
        launcher.levels(generation=1, state="running", ranks=[rank_level(0, os.getpid())])
        await until(lambda: node.seen and node.seen[-1].runs)
        assert node.seen[-1].runs[0].ranks[0].phase == "unknown"
        fields[layout.F_MAGIC], fields[layout.F_VERSION] = layout.MAGIC, layout.VERSION
        fields[layout.F_GENERATION] = 1
        before = daemon.state.steps
        daemon.wake("test")
        await until(lambda: daemon.state.steps > before)
        rank = node.seen[-1].runs[0].ranks[0]
        assert (rank.step, rank.still_s) == (0, 0.0) and daemon.state.errors.counts["pages"] == 1
        said = await launcher.receive("say")
        assert "rank 0 of demo goes on unwatched: no page" in said["text"]
        assert "core" not in daemon.state.errors.counts
        launcher.close()

    serve(scenario, agent, tmp_path)


@pytest.mark.parametrize("said", ["before", "after"])
def test_a_bye_is_heard_whatever_the_launcher_left_unread(agent, tmp_path, said):
    """It leaves as the agent speaks to it: the kernel tells that first, and has the bye still."""

    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        (session,) = daemon.launchers.sessions()
        agents_end = session.connection

        def say() -> None:
            agents_end.send({"t": "say", "text": "nobody reads this"})

        if said == "before":
            say()
        launcher.send(t="bye", code=0)
        launcher.sock.close()
        if said == "after":
            say()
        await until(lambda: session.connection is None)
        assert daemon.private_life.is_over
        await until(lambda: not agents_end.open)

    serve(scenario, agent, tmp_path)


def test_a_second_launcher_of_a_run_is_refused_while_the_first_lives(agent, tmp_path):
    code = (
        "import socket,sys;s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]);s.send(b'{\"t\":\"hello\",\"run\":\"demo\",\"protocol\":1}');"
        "print(s.recv(65536).decode())"
    )

    async def scenario(daemon, node, launch):
        first = launch()
        first.hello()
        await first.receive("welcome")
        path = str(tmp_path / "run" / "agent.sock")
        other = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, path, stdout=asyncio.subprocess.PIPE
        )
        answer = json.loads((await other.communicate())[0])
        assert answer["t"] == "error" and str(os.getpid()) in answer["error"]
        again = launch()  # the same process once more: its old connection is given up
        again.hello()
        await again.receive("welcome")
        with pytest.raises(ConnectionError):
            await first.receive("levels")
        again.close()
        first.close()

    serve(scenario, agent, tmp_path)


@contextlib.contextmanager
def ended_with_us(command):
    with subprocess.Popen(command) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_killed_launchers_run_is_gone_once_its_ranks_are_too(agent, tmp_path):
    code = (
        "import socket,sys;s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1])\n"
        "for one in sys.argv[2:]: s.send(one.encode())\n"
        "while s.recv(65536): pass"
    )

    async def scenario(daemon, node, launch):
        def shown():
            return node.seen[-1].runs[0] if node.seen and node.seen[-1].runs else None

        with ended_with_us(["sleep", "600"]) as rank:
            hello = {"t": "hello", "run": "demo", "protocol": 1, "nproc": 2}
            levels = {"t": "levels", "n": 1, "generation": 1, "state": "running",
                      "ranks": [rank_level(0, rank.pid), rank_level(1, 0, state="ended")]}
            with ended_with_us([
                    sys.executable, "-c", code, str(tmp_path / "run" / "agent.sock"),
                    json.dumps(hello), json.dumps(levels)]) as launcher:
                await until(lambda: shown() and shown().connected)
                assert not shown().gone
                launcher.kill()
            await until(lambda: not shown().connected)
            assert not shown().gone and shown().ranks[0].state == "running"
            rank.kill()
        await until(lambda: shown().gone)

    serve(scenario, agent, tmp_path)


def test_a_private_agent_serves_its_run_alone_and_ends_with_it(agent, tmp_path):
    async def scenario(daemon, node, launch):
        other = launch(run="other")
        other.hello()
        assert "demo alone" in (await other.receive("error"))["error"]
        launcher = launch()
        launcher.hello()
        await launcher.receive("welcome")
        launcher.send(t="bye", code=0)
        await asyncio.wait_for(daemon.stop.wait(), 30.0)
        other.close()
        launcher.close()

    serve(scenario, agent, tmp_path, private=True, run="demo")


def test_a_launcher_that_does_not_read_is_cut_off(agent, tmp_path):
    async def scenario(daemon, node, launch):
        launcher = launch()
        launcher.hello()
        launcher.levels(generation=0, state="idle", ranks=[])
        await until(lambda: node.seen and node.seen[-1].runs)
        for _ in range(3000):
            if daemon.launchers.order("demo", {"t": "say", "text": "x" * 1000}):
                break
        await until(lambda: not node.seen[-1].runs[0].connected)
        launcher.close()

    serve(scenario, agent, tmp_path)


def both_ends(fd):
    """A page's fields as its rank writes them, and its mapping where it was handed to."""
    handed_over = layout.readonly(fd)
    try:
        return layout.map_fields(fd), layout.map_readonly(handed_over)
    finally:
        os.close(handed_over)


def test_a_rank_says_when_its_process_began():
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            level = rank_monitor.RankMonitor(0, child.pid, 1).level(
                RankLevel(0, child.pid, 1, "running"), "n", 1.0)
        finally:
            child.kill()
    assert before_s - 0.02 <= level.start_boot_s <= time.clock_gettime(time.CLOCK_BOOTTIME)


def test_still_is_dated_by_the_page_but_bounded_by_the_looks():
    fd = layout.create()
    fields, mapping = both_ends(fd)
    track = rank_monitor.RankMonitor(0, os.getpid(), 1)
    track.attach(mapping, -1)
    fields[layout.F_GENERATION] = 1
    said = RankLevel(0, os.getpid(), 1, "running")
    track.look_at_page(100.0)
    fields[layout.F_STEP], fields[layout.F_PROGRESS] = 1, int(100.4e9)
    track.look_at_page(101.0)
    assert track.level(said, "n", 101.0).still_s == pytest.approx(0.6)
    fields[layout.F_STEP], fields[layout.F_PROGRESS] = 2, int(5e9)  # a lie: long ago
    track.look_at_page(102.0)
    assert track.level(said, "n", 102.0).still_s == pytest.approx(1.0)
    fields[layout.F_STEP], fields[layout.F_PROGRESS] = 3, int(900e9)  # a lie: in the future
    track.look_at_page(103.0)
    assert track.level(said, "n", 103.0).still_s == 0.0
    assert track.level(said, "n", 105.5).still_s == pytest.approx(2.5)
    track.close()
    os.close(fd)


@pytest.mark.parametrize(("outcome", "code", "phase"), [
    ("done", 0, "exit"), ("exception", 1, "unknown"), ("", 0, "unknown"),
])
def test_exit_handlers_of_a_good_end_are_a_phase_of_their_own(outcome, code, phase):
    fd = layout.create()
    fields, mapping = both_ends(fd)
    track = rank_monitor.RankMonitor(0, os.getpid(), 1)
    track.attach(mapping, -1)
    fields[layout.F_GENERATION], fields[layout.F_CODE] = 1, code
    fields[layout.F_OUTCOME] = layout.OUTCOMES.index(outcome)
    track.look_at_page(100.0)
    assert track.level(RankLevel(0, os.getpid(), 1, "running"), "n", 100.0).phase == phase
    track.close()
    os.close(fd)


@pytest.mark.parametrize("code, active", [("while True: pass", True),
                                          ("import time; time.sleep(60)", False)])
def test_activity_is_processor_time_of_the_rank_and_its_children(code, active):
    shell = subprocess.Popen([sys.executable, "-c", f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", "print(flush=True)\\n" + {code!r}])
"""], start_new_session=True, stdout=subprocess.PIPE)
    track = rank_monitor.RankMonitor(0, shell.pid, 1)
    said, look_s = RankLevel(0, shell.pid, 1, "running"), itertools.count(100)

    def seen() -> bool:
        """As a look a second later finds it."""
        now_s = float(next(look_s))
        track.look_at_activity(now_s)
        return track.level(said, "n", now_s).active

    try:
        shell.stdout.readline()  # the child is in its code from now on
        assert seen(), "one reading says nothing"
        if active:
            ticks = procfs.activity(shell.pid).ticks
            wait_for(lambda: procfs.activity(shell.pid).ticks > ticks + rank_monitor.ACTIVE_TICKS)
            assert seen()
        else:
            wait_for(lambda: not seen())
    finally:
        track.close()
        os.killpg(shell.pid, 9)
        shell.communicate()


READS = """
with open("/dev/zero", "rb", buffering=0) as file:
    file.read(5_000_000)
print(flush=True)
import time
time.sleep(600)
"""


def test_bytes_that_a_rank_and_its_children_read_are_counted_apart():
    shell = subprocess.Popen(
        [sys.executable, "-c", "import subprocess, sys\n"
         f"subprocess.run([sys.executable, '-c', {READS!r}])"],
        start_new_session=True, stdout=subprocess.PIPE)
    try:
        shell.stdout.readline()
        found = procfs.activity(shell.pid)
        read = [count for _, count in found.read_bytes]
        assert len(read) == 2 and 5_000_000 <= sum(read) <= found.moved_bytes < 50_000_000
    finally:
        os.killpg(shell.pid, 9)
        shell.communicate()


def test_who_reads_steadily_is_told_from_who_read_and_stopped(monkeypatch):
    """A step's end begins the count anew, and a thread that reads a little of /proc is none."""
    track = rank_monitor.RankMonitor(0, os.getpid(), 1)
    said, read = RankLevel(0, os.getpid(), 1, "running"), {7: 0}
    monkeypatch.setattr(
        procfs, "activity", lambda *_: procfs.Activity(1, sum(read.values()), (*read.items(),)))

    def looks(begin_s, end_s, bytes_a_second):
        """Whether it reads, as each second's look finds it."""
        found = []
        for now_s in range(begin_s, end_s):
            read[max(read)] += bytes_a_second
            track.look_at_activity(float(now_s))
            found.append(track.level(said, "n", float(now_s)).reading)
        return found

    assert looks(100, 130, 3_000_000) == [False] + 29 * [True], "one look says nothing"
    after = looks(130, 150, 0)
    assert after[:3] == 3 * [True] and not any(after[8:]), after
    assert not any(looks(150, 170, 100_000))
    assert looks(170, 181, 3_000_000)[-1]
    track._progress_s = 181.0
    assert looks(181, 182, 3_000_000) == [False], "it moved"
    assert looks(182, 184, 3_000_000) == [False, True]
    for pid in (8, 9):  # one child a shard: what ended has taken its count along
        del read[pid - 1]
        read[pid] = 0
        assert looks(184 + 9 * (pid - 8), 193 + 9 * (pid - 8), 3_000_000) == 9 * [True]
    track.close()


def test_a_step_costs_in_proportion_to_its_ranks(agent, tmp_path):
    async def cost_s(daemon, node, launch, ranks):
        """Processor time of the cheapest step of ten: what else runs is not in it."""
        launcher = launch(run=f"run-{ranks}", nproc=ranks)
        launcher.hello()
        for rank in range(ranks):
            launcher.page(rank, os.getpid())
        levels = [rank_level(rank, os.getpid()) for rank in range(ranks)]
        launcher.levels(generation=1, state="running", ranks=levels)
        await until(lambda: node.seen and any(len(run.ranks) == ranks
                                              for run in node.seen[-1].runs))
        found = []
        for _ in range(10):
            begin_s = time.thread_time()
            daemon._decide(False)
            found.append(time.thread_time() - begin_s)
        launcher.send(t="bye", code=0)
        await until(lambda: daemon.launchers.session(f"run-{ranks}") is None)
        launcher.close()
        return min(found)

    async def scenario(daemon, node, launch):
        few_s = await cost_s(daemon, node, launch, 16)
        many_s = await cost_s(daemon, node, launch, 64)
        assert many_s < 10 * few_s  # each rank with each other would be 16

    serve(scenario, agent, tmp_path)


def test_one_user_cannot_take_every_connection(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.launchers.admission.PER_UID_MAX", 3)

    async def scenario(daemon, node, launch):
        kept = [launch(run=f"run-{number}") for number in range(3)]
        for launcher in kept:
            launcher.hello()
            await launcher.receive("welcome")
        for _ in range(5):  # each is told, whether or not the agent was first
            refused = launch(run="one-more")
            await asyncio.sleep(0)
            with contextlib.suppress(OSError):
                refused.hello()
            assert "has 3 connections" in (await refused.receive("error"))["error"]
            with pytest.raises(ConnectionError):
                await refused.receive("welcome")
            refused.close()
        assert daemon.state.errors.counts["connections"] == 5
        kept.pop().close()
        await until(lambda: len(daemon.launchers._connections) == 2)
        fits = launch(run="run-2")
        fits.hello()
        await fits.receive("welcome")
        for launcher in [*kept, fits]:
            launcher.close()

    serve(scenario, agent, tmp_path)


def test_a_refusal_is_read_even_by_a_launcher_that_spoke_first():
    """Closing over unread packets would reset the connection before the reason is read."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fd = layout.create()
    theirs.send(b'{"t":"hello"}')
    socket.send_fds(theirs, [b'{"t":"page"}'], [fd])
    before = len(os.listdir("/proc/self/fd"))
    connection.turn_away(ours, "no room")
    assert json.loads(theirs.recv(4096))["error"] == "no room"
    assert theirs.recv(4096) == b""
    assert len(os.listdir("/proc/self/fd")) <= before - 1  # its own end, and no page kept
    theirs.close()
    os.close(fd)


def test_runs_left_behind_count_as_well(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.launchers.admission.PER_UID_MAX", 3)

    async def scenario(daemon, node, launch):
        for number in range(3):
            launcher = launch(run=f"run-{number}")
            launcher.hello()
            await launcher.receive("welcome")
            launcher.close()
            await until(lambda: not daemon.launchers._connections)
        more = launch(run="one-more")
        more.hello()
        assert "already serves 3 runs of" in (await more.receive("error"))["error"]
        known = launch(run="run-1")  # a run that is known comes back at any time
        known.hello()
        await known.receive("welcome")
        more.close()
        known.close()

    serve(scenario, agent, tmp_path)


def test_who_does_not_say_hello_is_ended(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.launchers.server.HELLO_S", 0.2)

    async def scenario(daemon, node, launch):
        silent, refused, served = launch(), launch(run="a/b"), launch()
        served.hello()
        refused.hello()  # both before the loop has its turn: their time is short
        await served.receive("welcome")
        await refused.receive("error")
        for launcher in (silent, refused):
            with pytest.raises(ConnectionError):
                await launcher.receive("welcome")
            launcher.close()
        assert daemon.state.errors.counts["hello"] == 2
        served.levels(generation=0, state="idle", ranks=[])
        await until(lambda: node.seen and node.seen[-1].runs)
        served.close()

    serve(scenario, agent, tmp_path, agent__tick_s=0.1)


def test_a_launcher_that_still_imports_is_seen_as_coming(agent, tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.agent.launchers.server.HELLO_S", 0.5)
    monkeypatch.setattr("holdfast.agent.launchers.server.COMING_S", 2.0)

    async def scenario(daemon, node, launch):
        late = launch(run="late")
        late.send(t="coming")
        await until(lambda: node.seen and node.seen[-1].coming)
        with pytest.raises(ConnectionError):  # its time is longer than a silent one's, and ends
            await late.receive("welcome")
        await until(lambda: not node.seen[-1].coming)
        late.close()
        first = launch(run="r")
        first.send(t="coming")
        await until(lambda: node.seen[-1].coming)
        again = launch(run="r")
        first.close()
        again.hello()
        await again.receive("welcome")
        await until(lambda: not node.seen[-1].coming)
        again.send(t="coming")
        assert "come already" in (await again.receive("error"))["error"]
        again.close()

    serve(scenario, agent, tmp_path, agent__tick_s=0.1)


def test_a_private_agent_awaits_its_launcher_until_the_first_hello(agent, tmp_path):
    async def scenario():
        async with agent(private=True, run="r") as (daemon, node):
            await until(lambda: node.seen and node.seen[-1].coming)
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock", run="r")
            launcher.hello()
            await launcher.receive("welcome")
            launcher.close()
            await until(lambda: not node.seen[-1].coming)

    asyncio.run(scenario())


def test_the_socket_is_seqpacket(agent, tmp_path):
    async def scenario(daemon, node, launch):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            with pytest.raises(OSError):
                stream.connect(str(tmp_path / "run" / "agent.sock"))

    serve(scenario, agent, tmp_path)
