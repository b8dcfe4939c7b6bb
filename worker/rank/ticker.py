"""The ticker: a second thread in every rank that beats, listens and watches the permit.

Owns the rank's control channel (launcher -> rank) and the page's [T] fields.  It runs no torch
operation and touches no tensor; it reads a process group's sequence number, which the group
allows from any thread (0.2-0.6 us).  A stale beat in a live process therefore means one thing:
somebody holds the GIL.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import Any, Callable, List, Tuple

from .. import page as pages
from ..wire import FDS_MAX, Channel, Packet

BEAT_S = 0.1

Handler = Callable[[Packet, List[int]], None]


class Ticker(threading.Thread):
    """Beats ten times a second; hands control packets to `handler` the moment they arrive."""

    def __init__(self, fields: memoryview, channel: Channel, handler: Handler) -> None:
        super().__init__(name="holdfast-ticker", daemon=True)
        self.fields, self.channel, self.handler = fields, channel, handler
        self.groups: List[Tuple[int, Callable[[], int], int]] = []  # id, number now, counted from
        self.each_beat: List[Callable[[], None]] = []

    def watch_group(self, group: Any) -> None:
        """Copies this process group's sequence number to the page from now on."""
        if len(self.groups) < pages.GROUPS:
            self.groups.append((len(self.groups), group._get_sequence_number_for_group, 0))
            self.fields[pages.F_GROUPS] = len(self.groups)

    def rebase(self) -> None:
        """Counts every group from now: what a restore sent differs between ranks by design."""
        self.groups = [(number, sequence, sequence()) for number, sequence, _ in self.groups]

    def default_sequence(self) -> int:
        """The default group's number now; 0 without one."""
        if not self.groups:
            return 0
        _, sequence, base = self.groups[0]
        try:
            return sequence() - base
        except RuntimeError:
            return 0  # the group is being torn down: the next step tells

    def forget_groups(self) -> None:
        self.groups = []
        self.fields[pages.F_GROUPS] = 0

    def run(self) -> None:
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        while True:
            self.beat()
            if poller.poll(BEAT_S * 1000) and not self.listen():
                # The launcher is gone, and with it everybody who could end this rank later.
                os.kill(os.getpid(), signal.SIGKILL)

    def beat(self) -> None:
        fields = self.fields
        for number, (group_id, sequence, base) in enumerate(list(self.groups)):
            try:
                fields[pages.F_SEQ + 2 * number + 1] = max(0, sequence() - base)
            except RuntimeError:  # a group that was aborted or never had a store
                continue
            fields[pages.F_SEQ + 2 * number] = group_id
        fields[pages.F_BEAT] = time.monotonic_ns()
        permit = fields[pages.F_PERMIT]
        if permit and time.clock_gettime_ns(time.CLOCK_BOOTTIME) > permit:
            # A newer generation may start elsewhere: this one must not compute past its permit,
            # and the launcher, which would have said so, may be stopped.
            os.kill(os.getpid(), signal.SIGKILL)
        for call in self.each_beat:
            call()

    def listen(self) -> bool:
        """Handles what has arrived; False when the other end is closed."""
        packet, fds = self.channel.receive(fds=FDS_MAX)
        if packet is None:
            return False
        self.handler(packet, fds)
        return True
