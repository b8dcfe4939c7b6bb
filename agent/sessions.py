"""Launcher connections: who serves which run, what each says, and how orders reach it.

Owns agent.sock (SOCK_SEQPACKET), its connections and the runs behind them.  Content is input from
outside: bounded, checked, and answered with an error packet rather than believed.  Decides
nothing: levels go to the core through `run_views`, effects come from perform.py through `order`.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from holdfast.worker import page as page_module

from . import procfs, wire
from .core.model import RunView
from .link import Link, close_all, receive
from .ranks import RankTrack, bare_level, pidfd_pid

CONNECTIONS_MAX = 256
PACKETS_PER_WAKE = 64  # so that one launcher cannot keep the loop for itself
LOST_KEPT_S = 60.0  # a run whose launcher is dead stays visible as lost this long


Where = dict[tuple[str, int, int], str]  # (run, generation, rank) -> source line, from evidence


class Listener(Protocol):
    """What the daemon does with what launchers say."""

    def wake(self, why: str) -> None: ...

    def launcher_outcome(self, run: str, packet: wire.Outcome) -> None: ...

    def rank_reported(self, run: str, packet: wire.Report) -> None: ...

    def launcher_came(self, session: Session) -> None: ...

    def launcher_went(self, session: Session, said_bye: bool) -> None: ...

    def trouble(self, part: str, error: BaseException | str) -> None: ...


class Session:
    """One run and the connection of its launcher, if it has one at the moment."""

    def __init__(self, hello: wire.Hello, pid: int, uid: int, boot_s: float) -> None:
        self.hello = hello
        self.pid = pid
        self.uid = uid
        self.registered_boot_s = boot_s
        self.levels = wire.Levels()
        self.have_levels = False
        self.tracks: dict[int, RankTrack] = {}
        self.link: Link | None = None
        self.lost_s = 0.0  # CLOCK_MONOTONIC when the connection went, 0 while it is up

    def view(self, node: str, now_s: float, where: Where) -> RunView:
        """The run as a level."""
        said, hello = self.levels, self.hello
        ranks = []
        for rank in said.ranks:
            track = self.tracks.get(rank.rank)
            # An ended rank's page still says at which step, and after which collective, it ended.
            if track is None or track.pid != rank.pid:
                ranks.append(bare_level(rank, node))
            else:
                ranks.append(track.level(
                    rank, node, now_s, where.get((hello.run, rank.generation, rank.rank), "")
                ))
        return RunView(
            run=hello.run, node=node, grade=hello.grade, nproc=hello.nproc,
            generation=max(said.generation, 0 if self.have_levels else hello.generation),
            state=said.state, max_restarts=hello.max_restarts, hang_limit_s=hello.hang_limit_s,
            ranks=tuple(ranks), commits=said.commits, snapshot=said.snapshot,
            shutdown=said.shutdown, connected=self.link is not None, startup_s=said.startup_s,
            compiling=said.compiling, keep=max(0, said.keep),
            checkpoint_dir=said.checkpoint_dir or hello.checkpoint_dir,
            registered_boot_s=self.registered_boot_s,
        )  # fmt: skip


class Sessions:
    """agent.sock and everything behind it."""

    def __init__(
        self,
        listener: Listener,
        node: str,
        only_run: str = "",
        proc: str = "/proc",
        where: Where | None = None,
    ) -> None:
        self.listener = listener
        self.node = node
        self.address = ""
        self.loop = asyncio.get_running_loop()
        self.highest_generation: Callable[[str], int] = lambda run: 0
        self._only_run = only_run
        self._proc = proc
        self._where = where if where is not None else {}  # (run, generation, rank) -> line
        self._socket: socket.socket | None = None
        self._links: dict[Link, Session | None] = {}
        self._runs: dict[str, Session] = {}

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
        for link in list(self._links):
            link.close()
        self._links.clear()
        for session in self._runs.values():
            self._forget_tracks(session)
        self._runs.clear()

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self.listener.trouble("sessions", error)
                return
            if len(self._links) >= CONNECTIONS_MAX:
                sock.close()
                self.listener.trouble("sessions", f"more than {CONNECTIONS_MAX} connections")
                continue
            self._links[Link(sock, self.readable, self.drop)] = None

    def readable(self, link: Link) -> None:
        """Takes what one launcher sent.  Its own mistakes end at most its own connection."""
        for _ in range(PACKETS_PER_WAKE):
            try:
                data, fds, cut = receive(link.sock)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.drop(link)
                return
            if not data:
                close_all(fds)
                self.drop(link)
                return
            try:
                if cut:
                    raise ValueError(f"packet is longer than {wire.PACKET_MAX_BYTES} bytes")
                self._packet(link, wire.decode(data), fds)
            except (ValueError, msgspec.DecodeError) as error:
                link.send({"t": "error", "error": str(error)[:500]})
            except Exception as error:  # border of a request: one launcher never stops another
                self.listener.trouble("sessions", error)
            finally:
                close_all(fds)
            if link not in self._links:
                return

    def drop(self, link: Link) -> None:
        """The connection is gone; its run stays, as one whose launcher is lost."""
        if link not in self._links:
            return
        session = self._links.pop(link)
        link.close()
        if session is not None and session.link is link:
            session.link = None
            session.lost_s = time.monotonic()
            self.listener.launcher_went(session, said_bye=False)
            self.listener.wake("launcher gone")

    # ------------------------------------------------------------- what launchers say

    def _packet(self, link: Link, packet: wire.Packet, fds: list[int]) -> None:
        if isinstance(packet, wire.Hello):
            self._hello(link, packet)
            return
        session = self._links.get(link)
        if session is None or session.link is not link:
            raise ValueError("say hello first")
        if isinstance(packet, wire.Levels):
            self._levels(session, packet)
        elif isinstance(packet, wire.Page):
            self._page(session, packet, fds)
        elif isinstance(packet, wire.Outcome):
            self.listener.launcher_outcome(session.hello.run, packet)
        elif isinstance(packet, wire.Report):
            self.listener.rank_reported(session.hello.run, packet)
        else:
            self._bye(link, session)

    def _hello(self, link: Link, hello: wire.Hello) -> None:
        why_not = wire.refusal(hello)
        if not why_not and self._only_run and hello.run != self._only_run:
            why_not = f"this agent serves run {self._only_run} alone, not {hello.run}"
        old = self._runs.get(hello.run)
        held = self._links.get(link)
        if not why_not and held is not None and held.hello.run != hello.run:
            why_not = f"this connection serves run {held.hello.run}: one run a connection"
        if not why_not and old is not None and old.uid != link.uid:
            why_not = f"run {hello.run} belongs to {_user_name(old.uid)}: choose another --run"
        if not why_not and old is not None and old.link not in (None, link) and (
            old.pid != link.pid and procfs.process_alive(old.pid)
        ):
            why_not = f"run {hello.run} is served by launcher {old.pid}: choose another --run"
        if why_not:
            link.send({"t": "error", "error": why_not, "protocol": wire.PROTOCOL})
            return
        boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        session = Session(hello, link.pid, link.uid, boot_s)
        if old is not None:
            if old.link is not None and old.link is not link:
                stale, old.link = old.link, None
                self.drop(stale)
            session.registered_boot_s = old.registered_boot_s if old.pid == link.pid else boot_s
            self._forget_tracks(old)
        elif len(self._runs) >= CONNECTIONS_MAX:
            raise ValueError(f"this node already serves {CONNECTIONS_MAX} runs")
        session.link = link
        self._links[link] = session
        self._runs[hello.run] = session
        link.send({
            "t": "welcome", "protocol": wire.PROTOCOL, "node": self.node,
            "address": self.address, "generation": self.highest_generation(hello.run),
        })  # fmt: skip
        self.listener.launcher_came(session)

    def _levels(self, session: Session, levels: wire.Levels) -> None:
        if len(levels.ranks) > wire.RANKS_MAX:
            raise ValueError(f"{len(levels.ranks)} ranks are more than {wire.RANKS_MAX}")
        if session.have_levels and levels.n and levels.n < session.levels.n:
            return  # older than what is known already
        session.levels, session.have_levels = levels, True
        present = {rank.rank for rank in levels.ranks if rank.state != "ended"}
        for number in [number for number in session.tracks if number not in present]:
            # An ended rank's page stays until the launcher replaces it; one that the launcher no
            # longer lists at all is let go.
            if all(rank.rank != number for rank in levels.ranks):
                self._forget_track(session, number)
        now_s = time.monotonic()
        for number in present:
            if number in session.tracks:
                session.tracks[number].look_at_process(now_s)
        self.listener.wake("levels")

    def _page(self, session: Session, packet: wire.Page, fds: list[int]) -> None:
        if not 0 <= packet.rank < wire.RANKS_MAX or packet.pid <= 0:
            raise ValueError(f"page of rank {packet.rank}, pid {packet.pid}: out of bounds")
        if not fds:
            raise ValueError("a page packet carries descriptors: [page memfd, pidfd]")
        mapping = page_module.map_readonly(fds[0])
        pidfd = -1
        if len(fds) > 1:
            if pidfd_pid(fds[1]) not in (packet.pid, -1):
                mapping.close()
                raise ValueError(f"the second descriptor is no pidfd of {packet.pid}")
            pidfd = fds.pop(1)
        self._forget_track(session, packet.rank)
        track = RankTrack(packet.rank, packet.pid, packet.generation, self._proc)
        track.attach(mapping, pidfd)
        session.tracks[packet.rank] = track
        now_s = time.monotonic()
        track.look_at_page(now_s)
        track.look_at_process(now_s)
        if pidfd >= 0:
            self.loop.add_reader(pidfd, self._rank_died, track)

    def _bye(self, link: Link, session: Session) -> None:
        self._runs.pop(session.hello.run, None)
        self._forget_tracks(session)
        session.link = None
        self._links[link] = None
        self.listener.launcher_went(session, said_bye=True)
        self.drop(link)
        self.listener.wake("bye")

    def _rank_died(self, track: RankTrack) -> None:
        self.loop.remove_reader(track.pidfd)
        track.look_at_process(time.monotonic())
        self.listener.wake("rank died")

    def _forget_track(self, session: Session, rank: int) -> None:
        track = session.tracks.pop(rank, None)
        if track is not None:
            if track.pidfd >= 0:
                self.loop.remove_reader(track.pidfd)
            track.close()

    def _forget_tracks(self, session: Session) -> None:
        for rank in list(session.tracks):
            self._forget_track(session, rank)

    # ------------------------------------------------------------- what the daemon asks

    def look(self, now_s: float) -> bool:
        """Reads every rank's scheduler state; True when one began or ended to be stopped."""
        changed = False
        for session in self._runs.values():
            for track in session.tracks.values():
                changed = track.look_at_process(now_s) or changed
        return changed

    def run_views(self, now_s: float, tick: bool) -> tuple[RunView, ...]:
        """Every run as a level.  On a tick children are read too, and lost runs forgotten."""
        for name, session in list(self._runs.items()):
            if tick and session.link is None and now_s - session.lost_s > LOST_KEPT_S:
                if not procfs.process_alive(session.pid):
                    self._forget_tracks(session)
                    del self._runs[name]
                    continue
            for track in session.tracks.values():
                track.look_at_page(now_s)
                if tick:
                    track.look_at_process(now_s)
                    track.look_at_activity(now_s)
        views = [session.view(self.node, now_s, self._where) for session in self._runs.values()
                 if session.have_levels]  # fmt: skip
        return tuple(sorted(views, key=lambda view: view.run))

    def session(self, run: str) -> Session | None:
        return self._runs.get(run)

    def sessions(self) -> tuple[Session, ...]:
        return tuple(self._runs.values())

    def order(self, run: str, fields: dict[str, object]) -> str:
        """Sends one packet to a run's launcher; why it could not, or ""."""
        session = self._runs.get(run)
        if session is None or session.link is None:
            return f"the launcher of {run} is not connected"
        return "" if session.link.send(fields) else f"the launcher of {run} does not answer"

    def announce(self, address: str) -> None:
        """Tells every launcher where the live page is."""
        self.address = address
        for session in self._runs.values():
            if session.link is not None:
                session.link.send({"t": "address", "address": address})


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
