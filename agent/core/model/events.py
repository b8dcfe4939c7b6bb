"""Event: one line of the kernel's log, understood, with its continuation lines.

Owns the value that crosses from the edge, where lines are read and counted, into the core, where
they are judged.  A leaf, so that model.py may use it.
"""

from __future__ import annotations

import msgspec


class Escalation(msgspec.Struct, frozen=True, omit_defaults=True):
    """What repeats of an event mean; data, from agent/catalog."""

    name: str
    count: int
    window_h: float
    then: str  # the action that follows
    text: str
    severity: str = "fatal"
    codes: tuple[str, ...] = ()  # () = every fatal one of the source
    burst_s: float = 0.0  # this close together they are one
    place: bool = False  # only repeats at the same place count


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line, understood.  `source`, `code`, `class_` and `bucket` are labels of
    holdfast_events_total (the bucket as `action`) and come from the catalogue alone, so that they
    stay few."""

    source: str  # xid | sxid | nvidia | neuron | efa | ib | pcie | cpu | disk | host
    code: str  # "79", "oom_killed"; "other" for a number that no catalogue knows
    class_: str
    bucket: str  # reset_gpu | reboot_node | restart_app | watch | ignore | ...
    severity: str
    text: str  # the line, at most 400 characters
    meaning: str = ""
    fault: str = ""  # "" = counted and shown nowhere else
    subject: str = ""  # "gpu/0000:4e:00", "disk/sda"; "" = the node
    pid: int = 0
    place: str = ""  # on the device: "GPC 2, TPC 2"
    action: str = ""  # what the driver instructs: XID 154, nothing else
    escalations: tuple[Escalation, ...] = ()
    reboots: Escalation | None = None
    more: tuple[str, ...] = ()  # what its continuation lines said (parse/kernel_continuation.py)
    cursor: int = 0  # the line's sequence number, of this boot
    boot_s: float = 0.0

    @property
    def labels(self) -> tuple[str, str, str, str]:
        return (self.source, self.code, self.class_, self.bucket)
