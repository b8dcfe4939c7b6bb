"""A pipeline of a user's own; apart from own.py, whose users need not wait for torch.export."""

from __future__ import annotations

import contextlib
import math
import os
import signal

from holdfast.trainer import move
from holdfast.trainer.config import ConfigError
from holdfast.trainer.engines.pipeline import Pipeline


class SmallBuckets(Pipeline):
    """One tensor at a time, as a stage of many buckets."""

    bucket_bytes = 1

    def hold(self, layout, rank):
        state = super().hold(layout, rank)
        if [len(one.names) for one in self.shards.buckets] != [1] * len(self.parameters):
            raise RuntimeError(f"other buckets: {self.shards.buckets}")
        return state


class Told(Pipeline):
    """Whose second rank says from its 13th step on that it computes five times as long as it would
    by the cost table: what is made of such numbers does not hang on how busy the machine is."""

    steps, until = 0, math.inf

    def norm(self):
        self.steps += 1
        edges = [0, *self.layout.cuts, len(self.pieces)]
        table_s = sum(one.forward_s + one.backward_s
                      for one in self.pieces[edges[self.stage] : edges[self.stage + 1]])
        slow = self.group.rank == 1 and 12 < self.steps <= self.until
        self.computed_s = 1e6 * table_s * len(self.step) * (5.0 if slow else 1.0)
        return super().norm()


class ToldForAWhile(Told):
    """Who is as fast as before from its 31st step on."""

    until = 30


class Killed(Told):
    """One rank dies around the first going over to other cuts: `strategy_options` say which, and
    before it calls what."""

    def _die(self, at):
        options = self.setup.config.strategy_options
        if (options["at"], options["rank"]) == (at, self.group.rank):
            with contextlib.suppress(FileExistsError):  # once, and not whoever takes its place
                os.close(os.open(options["once"], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    def hold(self, layout, rank):
        if self.balance is not None and layout.version == self.layout.version + 1:
            self._die("hold")
        return super().hold(layout, rank)

    def moves(self, before, after):
        self._die("moves")
        return super().moves(before, after)

    def moved(self, layout, seconds):
        super().moved(layout, seconds)
        self._die("moved")

    def norm(self):
        if self.layout.version:
            self._die("norm")
        return super().norm()

    def update(self, rate, norm):
        if self.layout.version:
            self._die("update")
        super().update(rate, norm)


class Counted(Told):
    """Says how often each rank had entered the group of all at the end of each step."""

    def update(self, rate, norm):
        super().update(rate, norm)
        group = self.group.process_group
        with open(f"{self.setup.config.work_dir}/counted", "a") as file:
            file.write(f"{self.steps} {group._get_sequence_number_for_group()}\n")


class LostAsItComes(Pipeline):
    """A newcomer dies as the others are about to send it its part."""

    def kept(self):
        options = self.setup.config.strategy_options
        if self.source is not None and self.group_rank == options["rank"]:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(options["once"], os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)
        return super().kept()

    def hold(self, layout, rank):
        self.group_rank = rank
        return super().hold(layout, rank)


class Damaged(Told):
    """What the first rank sends first is other than it says."""

    def moves(self, before, after):
        if self.group.rank == 0:
            right = move._digest

            def wrong(flat):
                move._digest = right
                return "xxh3_128:0"

            move._digest = wrong
        return super().moves(before, after)


class TracedOnce(Told):
    """One rank's model can be traced no second time."""

    error: Exception = ConfigError(["not a second time"])

    def _trace(self, cuts):
        if cuts is not None and self.group.rank == 1:
            raise self.error
        super()._trace(cuts)


class NoMemory(TracedOnce):
    """... since there is no memory for it."""

    error = MemoryError("none is left")
