"""One run and the connection of its launcher: what was said last, and the run as a level.

Owns what is kept about one run between packets.  Reads no socket and checks nothing; sessions.py
does, before anything is put here.
"""

from __future__ import annotations

from . import wire
from .core.model import RunView
from .link import Link
from .ranks import RankTrack, bare_level

Where = dict[tuple[str, int, int], str]  # (run, generation, rank) -> source line, from evidence


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
            logs=said.logs is not None, registered_boot_s=self.registered_boot_s,
            uid=self.uid,
        )  # fmt: skip
