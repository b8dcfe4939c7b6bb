"""A gloo process group whose waits end when the generation does, whatever gloo does.

gloo tells a failed connection to the operations that are queued on it, and not to the one that is
half sent: whoever waits for that one sleeps for the whole of his timeout, though the connection is
closed (docs/decisions/014).  So nobody waits inside gloo: the rank's own thread waits where
`release` reaches it, and leaves a thread that waits in gloo behind at worst.  gloo's destructor
waits for such a thread too, so nobody frees a group in which one still sleeps.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "holdfast_gloo"
LOOK_S = 0.1  # how soon a wait that nobody ends finds the generation over
GRACE_S = 0.1  # gloo ends most waits by itself, and says better why
LEFT = "Connection closed by peer: the generation is over, and gloo did not say so"
NEVER = float("inf")
# Told to each, since gloo's default is the limit for connecting, for as long as the group lives.
TRANSFER_TIMEOUT = timedelta(hours=1)
# Those that threads of gloo carry out, by each name that torch asks for them, and gloo's own name;
# send and recv are carried out by whoever waits.  What is not here waits inside gloo.
COLLECTIVES = {
    name: name for name in (
        "_allgather_base", "_reduce_scatter_base", "allgather", "allgather_coalesced", "allreduce",
        "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast", "gather",
        "reduce", "reduce_scatter", "scatter")
} | {
    "all_gather_single": "_allgather_base",  # from torch 2.13 on; FSDP asks for these three
    "all_to_all_single": "alltoall_base",
    "reduce_scatter_single": "_reduce_scatter_base",
}


class Breakable(dist.ProcessGroup):
    """A process group over one gloo backend; whoever waits for its work can be released."""

    def __init__(self, options: Any, _more: Any) -> None:
        """`options`: torch's, of a new backend."""
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self.gloo: Any = dist.ProcessGroupGloo(
            options.store, options.group_rank, options.group_size, timeout=options.timeout)
        self.gloo.options.global_ranks_in_group = options.global_ranks_in_group
        self.gloo.options.group_name = options.group_id
        self.gloo._set_sequence_number_for_group()
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, self.gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self.over_s = NEVER  # monotonic: from when on nobody waits
        self._idle, self._lock = list[Waiter](), threading.Lock()
        self._futures = set[torch.futures.Future[Any]]()
        self._under_way = collections.deque[Any]()  # what threads of gloo carry out

    def release(self) -> None:
        """Ends every wait, soon and from then on.  From any thread, any number of times."""
        with self._lock:
            if self.over_s != NEVER:
                return
            self.over_s = time.monotonic() + GRACE_S
            for waiter in self._idle:
                waiter.work.put(None)
            self._idle.clear()
        timer = threading.Timer(GRACE_S, self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        """Fails what is waited for, and keeps the group for as long as gloo is asleep in it: who
        drops the last reference, perhaps with an error's traceback, would wait in its destructor.
        """
        self._fail_futures()
        for work in list(self._under_way):
            with contextlib.suppress(RuntimeError):
                work.wait(TRANSFER_TIMEOUT)

    def begun(self, work: Any) -> Any:
        """Remembers what threads of gloo carry out, until it is done."""
        with self._lock:
            self._forget_done()
            self._under_way.append(work)
        return work

    def ended(self) -> None:
        """Something was waited for: its tensors are kept no longer."""
        with self._lock:
            self._forget_done()

    def _forget_done(self) -> None:
        while self._under_way and self._under_way[0].is_completed():
            self._under_way.popleft()

    def check(self) -> None:
        """Raises RuntimeError once it is released."""
        if time.monotonic() >= self.over_s:
            raise RuntimeError(LEFT)

    def send(self, tensors: Any, rank: int, tag: int) -> Work:
        return Transfer(self, self.gloo.send(tensors, rank, tag))

    def recv(self, tensors: Any, rank: int, tag: int) -> Work:
        return Transfer(self, self.gloo.recv(tensors, rank, tag))

    def recv_anysource(self, tensors: Any, tag: int) -> Work:
        return Transfer(self, self.gloo.recv_anysource(tensors, tag))

    def waiter(self) -> Waiter:
        with self._lock:
            return self._idle.pop() if self._idle else Waiter()

    def give_back(self, waiter: Waiter) -> None:
        """It waits for more, or ends with the group."""
        with self._lock:
            if self.over_s == NEVER:
                self._idle.append(waiter)
            else:
                waiter.work.put(None)

    def summed(self, flat: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The mean over all ranks, in place: what DDP asks of a hook."""
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        with self._lock:
            self._futures.add(future)

        def done(theirs: torch.futures.Future[Any]) -> None:
            with self._lock:
                if future not in self._futures:
                    return  # released meanwhile
                self._futures.discard(future)
            try:
                theirs.wait()
                future.set_result(flat.div_(self.size()))
            except RuntimeError as error:
                # Its traceback knows this frame, and the frame this future, which keeps the error:
                # a ring through torch that Python's collector does not see.
                future.set_exception(error.with_traceback(None))  # type: ignore[arg-type]  # "T"

        self.begun(self.gloo.allreduce([flat])).get_future().add_done_callback(done)
        if time.monotonic() >= self.over_s:
            self._fail_futures()
        return future

    def _fail_futures(self) -> None:
        with self._lock:
            left, self._futures = self._futures, set()
        for future in left:
            future.set_exception(RuntimeError(LEFT))


class Work(dist.Work):
    """What a collective returns."""

    def __init__(self, group: Breakable, work: Any) -> None:
        super().__init__()
        self.group, self.work = group, work

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def get_future(self) -> Any:
        """gloo's own, which `release` does not reach: for DDP in a strategy of somebody else's."""
        return self.work.get_future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """True when it is done.  Raises RuntimeError for a peer that is gone."""
        end_s = time.monotonic() + timeout.total_seconds() if timeout else NEVER
        while True:
            try:
                done = bool(self.work.wait(timedelta(seconds=LOOK_S)))
                self.group.ended()
                return done
            except RuntimeError:
                if self.work.is_completed():  # failed, or done just behind the look's end
                    return bool(self.work.wait())
                if time.monotonic() >= end_s:
                    raise
                self.group.check()


class Transfer(Work):
    """gloo carries a transfer out in the thread that waits for it: one that may be left behind."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        waiter = self.group.waiter()
        waiter.work.put(self.work)
        try:
            error = self._error(waiter)
        finally:
            self.group.give_back(waiter)
        if error is not None:
            raise error
        return True

    def _error(self, waiter: Waiter) -> RuntimeError | None:
        while True:
            with contextlib.suppress(queue.Empty):
                return waiter.errors.get(timeout=LOOK_S)
            self.group.check()


class Waiter:
    """One thread that waits for one transfer after the other."""

    def __init__(self) -> None:
        self.work = queue.SimpleQueue[Any]()  # None ends it
        self.errors = queue.SimpleQueue[RuntimeError | None]()
        threading.Thread(target=self._run, name="transfers", daemon=True).start()

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            try:
                work.wait(TRANSFER_TIMEOUT)
                self.errors.put(None)
            except RuntimeError as error:
                self.errors.put(error)
            del work


def _made_breakable(name: str) -> Callable[..., Work]:
    def collective(self: Breakable, *given: Any, **named: Any) -> Work:
        return Work(self, self.begun(getattr(self.gloo, name)(*given, **named)))
    return collective


for _name, _of_gloo in COLLECTIVES.items():
    setattr(Breakable, _name, _made_breakable(_of_gloo))
dist.Backend.register_backend(NAME, Breakable, extended_api=True, devices=["cpu"])
