"""Launcher connections: who serves which run, what each says, and how orders reach it.

Owns agent.sock (SOCK_SEQPACKET), its connections and the runs behind them.  Content is input from
outside: bounded, checked, and answered with an error packet rather than believed.  Decides
nothing: levels go to the core through `run_views`, effects come from performer.py through `order`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.worker import page as page_module
from holdfast.worker.peers import user_name

from ..core.model import TRAINER, RunView
from ..system import procfs
from . import protocol
from .admission import Admission, is_dead
from .connection import Connection, close_all, peer, receive, turn_away
from .rank_monitor import RankMonitor, pidfd_pid
from .run_session import RunSession, Where, explained

HELLO_S = 5.0  # a launcher says who it is at once; who does not only holds a place
COMING_S = 60.0  # ... or that it imports: torch from a cold network disk takes so long
ACCEPTS_PER_WAKE = 64
PACKETS_PER_WAKE = 4  # of one launcher: it cannot keep the loop for itself
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # of accept
ACCEPT_AGAIN_S = 1.0
CACHES_MAX = 16  # compile caches of all jobs here that are looked at
LOST_KEPT_S = 60.0  # a run whose launcher is dead stays visible as lost this long


class Listener(Protocol):
    """What the daemon does with what launchers say."""

    def wake(self, why: str) -> None: ...

    def launcher_outcome(self, run: str, packet: protocol.Outcome) -> None: ...

    def rank_reported(self, run: str, packet: protocol.Report) -> None: ...

    def launcher_came(self, session: RunSession) -> None: ...

    def launcher_went(self, session: RunSession, said_bye: bool) -> None: ...

    def refused(self, uid: int, what: str, why: str, example: str) -> None: ...

    def on_error(self, part: str, error: BaseException | str) -> None: ...


class LauncherServer:
    """agent.sock and everything behind it."""

    def __init__(
        self, listener: Listener, node: str, only_run: str = "", proc: str = "/proc",
        where: Where | None = None,
    ) -> None:
        self.listener = listener
        self.node = node
        self.address = ""
        self.many_nodes = False  # the store is one that other nodes reach
        self.host = ""  # this node's address for them
        self.loop = asyncio.get_running_loop()
        self.highest_generation: Callable[[str], int] = lambda run: 0
        self._only_run = only_run
        self._admission = Admission(alone=bool(only_run))
        self._proc = proc
        self._where = where if where is not None else {}  # (run, generation, rank) -> line
        self._socket: socket.socket | None = None
        self._connections: dict[Connection, RunSession | None] = {}
        self._runs: dict[str, RunSession] = {}
        # A private agent is started by its run's launcher, which greets it after its imports.
        self._awaits = bool(only_run)
        self._coming: set[Connection] = set()

    # ------------------------------------------------------------- the socket

    def listen(self, path: Path, mode: int) -> None:
        """Binds and listens; an old socket file is replaced (the state directory's lock says that
        no other agent lives).  OSError when the place cannot be used."""
        path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            sock.setblocking(False)
            sock.bind(str(path))
            os.chmod(path, mode)
            sock.listen(64)
        except OSError:
            sock.close()
            raise
        self._socket = sock
        self.loop.add_reader(sock, self._accept)

    def close(self, path: Path) -> None:
        """Ends every connection; launchers and their ranks go on without an agent."""
        if self._socket is not None:
            self.loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            path.unlink(missing_ok=True)
        for connection in list(self._connections):
            connection.close()
        self._connections.clear()
        for session in self._runs.values():
            self._forget_monitors(session)
        self._runs.clear()

    def _accept(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTS_PER_WAKE):
            try:
                sock, _address = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.listener.on_error("sessions", error)
                if error.errno in OUT_OF_RESOURCES:
                    # Who knocks stays in the queue and the socket readable: the loop would spin.
                    self.loop.remove_reader(self._socket)
                    self.loop.call_later(ACCEPT_AGAIN_S, self._accept_again)
                return
            why_not = self._admission.for_connection(peer(sock)[1], self._connections)
            if why_not:
                turn_away(sock, why_not)
                self.listener.on_error("connections", why_not)
                continue
            self._connections[Connection(sock, self.readable, self.drop)] = None

    def _accept_again(self) -> None:
        if self._socket is not None:
            self.loop.add_reader(self._socket, self._accept)

    def _drop_silent(self, now_s: float) -> None:
        """Ends connections without a run: those that never said hello, or were refused."""
        for connection, session in list(self._connections.items()):
            limit_s = COMING_S if connection in self._coming else HELLO_S
            if session is None and now_s - connection.since_s > limit_s:
                self.listener.on_error("hello", f"{user_name(connection.uid)}: a connection that "
                                       f"served no run for {limit_s:g} s was ended")
                self.drop(connection)

    def readable(self, connection: Connection) -> None:
        """Takes what one launcher sent.  Its own mistakes end at most its own connection."""
        for _ in range(PACKETS_PER_WAKE):
            session = self._connections.get(connection)
            try:
                data, fds, problem = receive(connection.sock)
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionResetError:
                continue  # told once, of what it left unread: what it said before comes next
            except OSError:
                self.drop(connection)
                return
            if not data:
                close_all(fds)
                self.drop(connection)
                return
            try:
                if problem:
                    raise ValueError(problem)
                self._packet(connection, protocol.decode(data), fds)
            except (ValueError, msgspec.DecodeError) as error:
                connection.send({"t": "error", "error": str(error)[:500]})
            except Exception as error:  # border of a request: one launcher never stops another
                self.listener.on_error("sessions", error)
            finally:
                close_all(fds)
            if connection not in self._connections:
                return
            is_new_run = self._connections[connection] is not session
            pause_s = self._admission.pause_s(connection.uid, len(data), is_new_run)
            if pause_s > 0.0:
                return connection.pause(pause_s)

    def drop(self, connection: Connection) -> None:
        """The connection is gone; its run stays, as one whose launcher is lost."""
        if connection not in self._connections:
            return
        session = self._connections.pop(connection)
        self._coming.discard(connection)
        connection.close()
        if session is not None and session.connection is connection:
            session.connection = None
            session.lost_s = time.monotonic()
            self.listener.launcher_went(session, said_bye=False)
            self.listener.wake("launcher gone")

    # ------------------------------------------------------------- what launchers say

    def _packet(self, connection: Connection, packet: protocol.Packet, fds: list[int]) -> None:
        if isinstance(packet, protocol.Hello):
            self._hello(connection, packet)
            return
        if isinstance(packet, protocol.Coming):
            self._comes(connection)
            return
        session = self._connections.get(connection)
        if session is None or session.connection is not connection:
            raise ValueError("say hello first")
        if isinstance(packet, protocol.Levels):
            self._levels(session, packet)
        elif isinstance(packet, protocol.Page):
            self._page(session, packet, fds)
        elif isinstance(packet, protocol.Outcome):
            self.listener.launcher_outcome(session.hello.run, packet)
        elif isinstance(packet, protocol.Report):
            self.listener.rank_reported(session.hello.run, packet)
        else:
            self._bye(connection, session)

    def _comes(self, connection: Connection) -> None:
        if self._connections[connection] is not None:
            raise ValueError("who serves a run has come already")
        if connection not in self._coming:
            self._coming.add(connection)
            self.listener.wake("coming")

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        why_not = protocol.refusal(hello, self.many_nodes, bool(self._only_run))
        if not why_not and self._only_run and hello.run != self._only_run:
            why_not = f"this agent serves run {self._only_run} alone, not {hello.run}"
        old = self._runs.get(hello.run)
        held = self._connections.get(connection)
        if not why_not and held is not None and held.hello.run != hello.run:
            why_not = f"this connection serves run {held.hello.run}: one run a connection"
        if not why_not and old is not None and old.uid != connection.uid:
            why_not = f"run {hello.run} belongs to {user_name(old.uid)}: choose another --run"
            self.listener.refused(connection.uid, "hello", "another user's run", hello.run)
        if not why_not and old is not None and old.connection not in (None, connection) and (
            old.pid != connection.pid and procfs.process_alive(old.pid)
        ):
            why_not = f"run {hello.run} is served by launcher {old.pid}: choose another --run"
        why_not = why_not or self._why_too_many(hello, old, connection.uid)
        if why_not:
            connection.send({"t": "error", "error": why_not, "protocol": protocol.PROTOCOL})
            return
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        session = RunSession(hello, connection.pid, connection.uid, boot_s, self._proc)
        if old is not None:
            if old.connection is not None and old.connection is not connection:
                stale, old.connection = old.connection, None
                self.drop(stale)
            if old.pid == connection.pid:
                session.registered_boot_s = old.registered_boot_s
            self._forget_monitors(old)
        session.connection = connection
        self._awaits = False
        self._coming.discard(connection)
        self._connections[connection] = session
        self._runs[hello.run] = session
        connection.send({
            "t": "welcome", "protocol": protocol.PROTOCOL, "node": self.node,
            "address": self.address, "generation": self.highest_generation(hello.run),
            "many_nodes": self.many_nodes, "host": self.host})
        self.listener.launcher_came(session)

    def _why_too_many(self, hello: protocol.Hello, old: RunSession | None, uid: int) -> str:
        """Why a run does not fit, or "".  One that is known comes back at any time, as it was."""
        if old is not None and hello.nproc <= old.hello.nproc:
            return ""
        why_not = "" if old is not None else self._admission.for_run(uid, self._runs.values())
        dead = [session for session in self._runs.values()
                if session is not old and is_dead(session)]
        dead.sort(key=lambda session: (session.uid != uid, session.lost_s))
        while not why_not:
            others = [session for session in self._runs.values() if session is not old]
            too_many = self._admission.for_ranks(uid, hello.nproc, others)
            if not too_many or not dead:
                return too_many
            self._forget_run(dead.pop(0))  # only kept to be seen: no reason to refuse who lives
        return why_not

    def _levels(self, session: RunSession, levels: protocol.Levels) -> None:
        if len(levels.ranks) > session.hello.nproc:
            raise ValueError(
                f"{len(levels.ranks)} ranks are more than the {session.hello.nproc} of the hello")
        if session.have_levels and levels.n and levels.n < session.levels.n:
            return  # older than what is known already
        session.levels, session.have_levels = explained(levels), True
        present = {rank.rank for rank in levels.ranks if rank.state != "ended"}
        for number in [number for number in session.monitors if number not in present]:
            # An ended rank's page stays until the launcher replaces it; one that the launcher no
            # longer lists at all is let go.
            if all(rank.rank != number for rank in levels.ranks):
                self._forget_monitor(session, number)
        now_s = time.monotonic()
        for number in present:
            if number in session.monitors:
                session.monitors[number].look_at_process(now_s)
        self.listener.wake("levels")

    def _page(self, session: RunSession, packet: protocol.Page, fds: list[int]) -> None:
        if not 0 <= packet.rank < protocol.RANKS_MAX or packet.pid <= 0:
            raise ValueError(f"page of rank {packet.rank}, pid {packet.pid}: out of bounds")
        if not fds:
            raise ValueError("a page packet carries descriptors: [page memfd, pidfd]")
        if packet.rank not in session.monitors and len(session.monitors) >= session.hello.nproc:
            # Of many nodes one may have other ranks in each generation.
            old = [n for n, one in session.monitors.items() if one.generation < packet.generation]
            for number in old[:1]:
                self._forget_monitor(session, number)
        if packet.rank not in session.monitors and len(session.monitors) >= session.hello.nproc:
            raise ValueError(f"page of rank {packet.rank}: the {session.hello.nproc} ranks of the "
                             "hello have theirs")
        if len(fds) > 1 and pidfd_pid(fds[1]) not in (packet.pid, -1):
            raise ValueError(f"the second descriptor is no pidfd of {packet.pid}")
        if not session.owns(packet.pid):
            self.listener.refused(session.uid, "page", "another user's process",
                                  f"pid {packet.pid} as a rank of {session.hello.run}")
            raise ValueError(f"page of rank {packet.rank}: pid {packet.pid} is another user's")
        mapping = page_module.map_readonly(fds[0])
        pidfd = fds.pop(1) if len(fds) > 1 else -1
        self._forget_monitor(session, packet.rank)
        monitor = RankMonitor(packet.rank, packet.pid, packet.generation, self._proc)
        monitor.attach(mapping, pidfd)
        session.monitors[packet.rank] = monitor
        now_s = time.monotonic()
        monitor.look_at_page(now_s)
        monitor.look_at_process(now_s)
        if pidfd >= 0:
            self.loop.add_reader(pidfd, self._rank_died, monitor)

    def _bye(self, connection: Connection, session: RunSession) -> None:
        self._runs.pop(session.hello.run, None)
        self._forget_monitors(session)
        session.connection = None
        self._connections[connection] = None
        self.listener.launcher_went(session, said_bye=True)
        self.drop(connection)
        self.listener.wake("bye")

    def _rank_died(self, monitor: RankMonitor) -> None:
        self.loop.remove_reader(monitor.pidfd)
        monitor.look_at_process(time.monotonic())
        self.listener.wake("rank died")

    def _forget_monitor(self, session: RunSession, rank: int) -> None:
        monitor = session.monitors.pop(rank, None)
        if monitor is not None:
            if monitor.pidfd >= 0:
                self.loop.remove_reader(monitor.pidfd)
            monitor.close()

    def _forget_run(self, session: RunSession) -> None:
        self._forget_monitors(session)
        del self._runs[session.hello.run]

    def _forget_monitors(self, session: RunSession) -> None:
        for rank in list(session.monitors):
            self._forget_monitor(session, rank)

    # ------------------------------------------------------------- what the daemon asks

    def look(self, now_s: float) -> bool:
        """Reads every rank's scheduler state; True when one began or ended to be stopped."""
        changed = False
        for session in self._runs.values():
            for monitor in session.monitors.values():
                changed = monitor.look_at_process(now_s) or changed
        return changed

    def run_views(self, now_s: float, tick: bool) -> tuple[RunView, ...]:
        """Every run as a level.  On a tick children are read too, lost runs forgotten, and
        connections ended that serve none."""
        if tick:
            self._drop_silent(now_s)
        for session in list(self._runs.values()):
            if tick and session.connection is None and now_s - session.lost_s > LOST_KEPT_S:
                if not procfs.process_alive(session.pid):
                    self._forget_run(session)
                    continue
            for monitor in session.monitors.values():
                monitor.look_at_page(now_s)
                if monitor.error and not monitor.said:
                    self._say_unreadable(session, monitor)
                if tick:
                    monitor.look_at_process(now_s)
                    monitor.look_at_activity(now_s)
        views = [session.view(self.node, now_s, self._where) for session in self._runs.values()
                 if session.have_levels]
        return tuple(sorted(views, key=lambda view: view.run))

    def _say_unreadable(self, session: RunSession, monitor: RankMonitor) -> None:
        """Once for each process: its end is still seen, how far it came is not."""
        monitor.said = True
        why = f"rank {monitor.rank} of {session.hello.run} goes on unwatched: {monitor.error}"
        self.listener.on_error("pages", why)
        self.order(session.hello.run, {"t": "say", "text": why, "level": "warn"})

    def session(self, run: str) -> RunSession | None:
        return self._runs.get(run)

    def identity(self, run: str) -> tuple[int, float]:
        """Which launcher serves the run: the same after a reconnect, another for a new process of
        the same name; (0, 0.0) without one."""
        session = self._runs.get(run)
        return (session.pid, session.registered_boot_s) if session is not None else (0, 0.0)

    def sessions(self) -> tuple[RunSession, ...]:
        return tuple(self._runs.values())

    def scripts(self) -> tuple[tuple[str, int], ...]:
        """(run, generation that runs) of those that are no trainer's."""
        return tuple((one.hello.run, one.levels.generation) for one in self.sessions()
                     if one.hello.grade != TRAINER)

    def compile_caches(self) -> tuple[str, ...]:
        """Where the jobs here keep what was compiled, as their environments say."""
        named = (path for session in self.sessions() for path in session.hello.compile_caches)
        caches = sorted({path for path in named if path.startswith("/") and "\0" not in path})
        return tuple(caches[:CACHES_MAX])

    def coming(self) -> bool:
        """Whether a launcher imports before it says hello."""
        return self._awaits or bool(self._coming)

    def runs(self) -> tuple[str, ...]:
        return tuple(self._runs)

    def order(self, run: str, fields: dict[str, object]) -> str:
        """Sends one packet to a run's launcher; why it could not, or ""."""
        session = self._runs.get(run)
        if session is None or session.connection is None:
            return f"the launcher of {run} is not connected"
        return "" if session.connection.send(fields) else f"the launcher of {run} does not answer"

    def announce(self, address: str) -> None:
        """Tells every launcher where the live page is."""
        self.address = address
        for session in self._runs.values():
            if session.connection is not None:
                session.connection.send({"t": "address", "address": address})
