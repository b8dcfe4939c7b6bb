"""The clock: whether it is kept right, how far it may be off, and which source it counts by.

Owns asking the kernel, which chronyd, ntpd and systemd-timesyncd all report to.  Sets nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import NamedTuple

from .contract import NODE_EXPORTER, SLOW, Metric, NoData, Roots, Sample
from .sources.files import word_of

SOURCE = "devices/system/clocksource/clocksource0/current_clocksource"
STA_UNSYNC, STA_NANO = 0x0040, 0x2000  # linux/timex.h
TIME_ERROR = 5  # what adjtimex returns while the clock is not synchronised


class State(NamedTuple):
    """What adjtimex tells."""

    synchronized: bool
    offset_s: float  # what is left to be corrected; chronyd always leaves 0
    max_error_s: float
    estimated_error_s: float


class Timex(ctypes.Structure):
    """struct timex of linux/timex.h, with its reserve at the end."""

    _fields_ = [
        ("modes", ctypes.c_uint), ("offset", ctypes.c_long), ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long), ("esterror", ctypes.c_long), ("status", ctypes.c_int),
        ("constant", ctypes.c_long), ("precision", ctypes.c_long), ("tolerance", ctypes.c_long),
        ("tv_sec", ctypes.c_long), ("tv_usec", ctypes.c_long), ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long), ("jitter", ctypes.c_long), ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long), ("jitcnt", ctypes.c_long), ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long), ("stbcnt", ctypes.c_long), ("tai", ctypes.c_int),
        ("reserve", ctypes.c_int * 11),
    ]


def ask_kernel() -> State:
    """adjtimex without a mode changes nothing and needs no permission.  NoData where a sandbox
    refuses it all the same."""
    timex = Timex()
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.adjtimex(ctypes.byref(timex))
    if result < 0:
        why = os.strerror(ctypes.get_errno())
        raise NoData(f"adjtimex: {why}: a system call filter (ProtectClock=) keeps it from us")
    return state_of(timex, result)


def state_of(timex: Timex, result: int) -> State:
    """The answer in seconds."""
    unit = 1e-9 if timex.status & STA_NANO else 1e-6
    return State(
        not timex.status & STA_UNSYNC and result != TIME_ERROR,
        timex.offset * unit, timex.maxerror * 1e-6, timex.esterror * 1e-6)


class ClockCollector:
    """Samples `host_clock_*`; `collect` raises NoData where the kernel tells nothing."""

    name = "clock"
    pace = SLOW
    metrics = (
        Metric("host_clock_synchronized", "gauge",
               "1 when a time service keeps the kernel's clock.", (), True, NODE_EXPORTER),
        Metric("host_clock_offset_seconds", "gauge",
               "What the kernel has left to correct; below zero: the clock is to go back.",
               (), True, NODE_EXPORTER, signed=True),
        Metric("host_clock_max_error_seconds", "gauge",
               "How far off the clock may be; grows while nobody keeps it.",
               (), False, NODE_EXPORTER),
        Metric("host_clock_estimated_error_seconds", "gauge",
               "How far off the time service thinks that the clock is.", (), False, NODE_EXPORTER),
        Metric("host_clock_source_info", "gauge", "Always 1; what the clock counts by.",
               ("source",), False, NODE_EXPORTER),
    )

    def __init__(self, ask: Callable[[], State] | None = None) -> None:
        self._ask = ask or ask_kernel

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  Raises NoData when the kernel does not tell: the remaining metrics alone
        would look like a clock in order."""
        state = self._ask()
        found: list[Sample] = []
        source = word_of(f"{roots.sys}/{SOURCE}")
        if source:
            found.append(Sample("host_clock_source_info", f"source={source}", 1.0, boot_s))
        values = (float(state.synchronized), *state[1:])
        found += [
            Sample(metric.name, "", value, boot_s) for metric, value in zip(self.metrics, values)]
        return found
