"""Checkpoints while training goes on: a copy now, the disk later.

Owns the background thread.  Training stops only for the copy (the stall, measured); everything
that can be slow or fail happens in the thread, and a failure is reported, never raised: training
goes on, and the next interval tries again.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..config import CheckpointOptions
from ..group import Group
from ..state import State
from . import format as files
from .read_back import ReadBack

POLL_S = 0.02  # how often rank 0 looks for the others' shards
ASKED_MAX = 64  # ranks of which it asks at once
ASK_S = 0.5  # and asks the store whether one could not even leave a mark beside them
AFTER_LOSS_S = 1.0  # how long it looks once a peer is gone


class Job(NamedTuple):
    generation: int
    step: int
    rank: int
    world: int
    run: str
    entries: list[files.Entry]
    data: memoryview
    model: dict[str, Any]
    over: threading.Event  # set when the generation is: shards of lost ranks will not come
    aside: Callable[[], Any]  # the generation's store, for this thread; RuntimeError if it is gone


class Checkpoints:
    """One process's checkpoints, through all its generations."""

    def __init__(
        self, options: CheckpointOptions, root: Path, elastic: Any,
        run_manifest: Callable[[], dict[str, Any]],
    ) -> None:
        self.options, self.root, self.elastic = options, root, elastic
        self.read_back = ReadBack(elastic, options.read_back_mb_s)
        self.stalls_s: list[float] = []
        self.writes_s: list[float] = []  # of those that were committed
        self._run_manifest = run_manifest
        self._copy = bytearray()
        self._jobs: queue.Queue[Job | None] = queue.Queue(maxsize=1)
        self._idle, self._over = threading.Event(), threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self._place: Any = None
        self._said_aside = -1  # the step whose shard the store says is given up

    def join(self, assignment: Any, group: Group, state: State) -> None:
        """A new generation: where this rank's share lies in it."""
        self._place, self._over = assignment, threading.Event()
        self.hold(group, state)
        if group.rank == 0 and self.options.every:
            # A rank 0 before this one may have ended with some of them unread.
            self.read_back.ask_newest(self.root, self.options.keep)

    def hold(self, group: Group, state: State) -> None:
        """What is saved from now on."""
        number, of = group.copies.index(group.rank), len(group.copies)
        self._state, self._aside = state, group.aside
        self._entries, self._begin, self._end = state.share(number, of)

    def generation_over(self) -> None:
        """Shards of lost ranks will not come any more."""
        self._over.set()

    def due(self, step: int) -> bool:
        return self.options.every > 0 and step % self.options.every == 0

    def save(self, step: int) -> None:
        """Copies this rank's shard and hands it to the thread."""
        begin = time.monotonic()
        if not self._idle.is_set():
            self.elastic.report(
                "",
                f"checkpoint of step {step} left out: the one before is still being written",
            )
            return
        nbytes = self._end - self._begin
        if len(self._copy) < nbytes:
            self._copy = bytearray(nbytes)
        copy = memoryview(self._copy)[:nbytes]
        copy[:] = self._state.bytes(self._begin, self._end)
        place = self._place
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="checkpoint", daemon=True)
            thread.start()  # a machine that refuses it may not do so the next time
            self._thread = thread
        self._idle.clear()
        self._jobs.put(
            Job(place.generation, step, place.rank, place.world, place.run, self._entries, copy,
                self._state.describe(), self._over, self._aside)
        )
        self.stalls_s.append(time.monotonic() - begin)

    def wait(self) -> None:
        """Until the last checkpoint is durable, has failed, or its wait is over."""
        self._idle.wait(2 * self.options.wait_s)

    def prove(self, wait_s: float) -> None:
        """Until what was saved is durable and, on rank 0, read back; or until that took too long.
        """
        if self._idle.wait(wait_s):
            self.read_back.wait(wait_s)

    def summary(self) -> str:
        """What they cost, "" if there were none."""
        if not self.stalls_s:
            return ""
        stall_ms = 1e3 * statistics.median(self.stalls_s)
        begun, durable = len(self.stalls_s), len(self.writes_s)
        if durable:
            became = f"durable {statistics.median(self.writes_s):.2f} s later"
            became = became if durable == begun else f"{durable} of them {became}"
        else:
            became = "none of them became durable"
        return (
            f"{begun} checkpoints: training stood still for {stall_ms:.1f} ms each "
            f"(longest {1e3 * max(self.stalls_s):.1f} ms), {became}"
        )

    def close(self) -> None:
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(self.options.wait_s)
        self.read_back.finish(self.options.wait_s)

    # -------------------------------------------------------------------------- in the thread

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            directory = self.root / files.directory_name(job.step, job.generation)
            begin = time.monotonic()
            try:
                if self._write(job, directory):
                    self.writes_s.append(time.monotonic() - begin)
            except Exception as error:  # not the disk alone refuses, and the next one is tried
                self._failed(job, directory, error)
            finally:
                self._idle.set()

    def _write(self, job: Job, directory: Path) -> bool:
        """Whether the checkpoint is durable; on a rank other than 0, which alone commits, whether
        this rank's shard is."""
        if (directory / files.COMMIT).exists():
            return True  # what is committed is never touched again
        if job.rank == 0:
            self._clean_remains(job)  # of one that failed: they may be what fills the disk
        elif job.step == self._said_aside:  # the same step is tried again
            self._said_aside = -1
            with contextlib.suppress(RuntimeError):
                job.aside().delete_key(_key(job.step, job.rank))
        files.write_shard(
            directory, job.rank, job.world, job.entries, job.data, self.options.digest
        )
        if job.rank != 0:
            return True
        missing, failed = self._wait_for_shards(directory, job)
        if missing:
            if failed:  # each has said why
                ranks = ", ".join(str(rank) for rank in failed)
                files.take_back_shards(directory, failed, job.world)  # it may be tried again
                self.elastic.report(
                    "checkpoint_failed",
                    f"checkpoint of step {job.step} in {self.root}: not committed, rank {ranks} "
                    "could not write its part",
                )
            elif not job.over.is_set():
                self.elastic.report(
                    "checkpoint_failed",
                    f"{directory}: {missing[0]} did not come within {self.options.wait_s:.0f} s; "
                    "not committed",
                )
            return False
        manifest = {
            "run": job.run,
            "generation": job.generation,
            "step": job.step,
            "world": job.world,
            "model": job.model,
            "run_manifest": self._run_manifest(),
        }
        files.commit(directory, manifest, self.options.digest)
        self.elastic.committed(job.generation, job.step, str(directory), job.world)
        self.read_back.ask(str(directory))
        self._clean(job)
        return True

    def _wait_for_shards(self, directory: Path, job: Job) -> tuple[list[str], list[int]]:
        """Shards that did not come, and the ranks that said that theirs would not."""
        begin = time.monotonic()
        deadline, shortened, ask_s = begin + self.options.wait_s, False, begin + ASK_S
        while missing := files.missing_shards(directory, job.world):
            now = time.monotonic()
            if job.over.is_set() and not shortened:
                deadline, shortened = min(deadline, now + AFTER_LOSS_S), True
            failed = files.given_up(directory, job.world)
            # The store ends with its generation, and who asks then would wait for it.
            if not failed and now >= ask_s and not job.over.is_set():
                ask_s = now + ASK_S
                with contextlib.suppress(RuntimeError):
                    failed = _given_up_aside(job, directory)
            if failed or now >= deadline:
                return missing, failed
            threading.Event().wait(min(POLL_S, deadline - now))
        return [], []

    def _failed(self, job: Job, directory: Path, error: Exception) -> None:
        # What was written of it is of no use, and may be what fills the disk.  Below a marker it
        # is part of a checkpoint, whatever failed behind that: readers count on it.
        if not files.may_be_committed(directory):
            for end in (".bin", ".json"):
                with contextlib.suppress(OSError):
                    (directory / (files.shard_name(job.rank, job.world) + end)).unlink()
            if job.rank == 0:
                with contextlib.suppress(OSError):
                    directory.rmdir()
            else:
                self._give_up(job, directory)
        self.elastic.report(
            "checkpoint_failed",
            f"checkpoint of step {job.step} in {self.root}: {files.words(error)}; "
            f"training goes on, tried again in {self.options.every} steps",
        )

    def _give_up(self, job: Job, directory: Path) -> None:
        """Says to rank 0 that this shard will not come: beside the shards, and in the store where
        the folder takes no mark (read-only, not reached, no right to it)."""
        try:
            files.give_up_shard(directory, job.rank, job.world)
        except OSError:
            if not job.over.is_set():
                with contextlib.suppress(RuntimeError):
                    job.aside().set(_key(job.step, job.rank), "")
                    self._said_aside = job.step

    def _clean_remains(self, job: Job) -> None:
        """Of older ones that were never committed."""
        for path in self.root.iterdir() if self.root.is_dir() else ():
            parsed = files.parse_name(path.name)
            if parsed is None or (path / files.COMMIT).exists():
                continue
            older = parsed[0] < job.step and parsed[1] <= job.generation
            if older or parsed[0] == job.step and parsed[1] < job.generation:
                shutil.rmtree(path, ignore_errors=True)

    def _clean(self, job: Job) -> None:
        """Remains, and what is beyond keep-N where no agent deletes it."""
        self._clean_remains(job)
        if not self.elastic.active():
            for found in files.surplus(self.root, self.options.keep):
                files.delete(Path(found.path))


def _given_up_aside(job: Job, directory: Path) -> list[int]:
    """Ranks that gave up so, each told once: the same step may be tried again.  Raises
    RuntimeError."""
    board, told = job.aside(), list[int]()
    for rank in files.missing_ranks(directory, job.world)[:ASKED_MAX]:
        if board.check([_key(job.step, rank)]):
            board.delete_key(_key(job.step, rank))
            told.append(rank)
    return told


def _key(step: int, rank: int) -> str:
    return f"shard given up/{step}/{rank}"
