"""What a reader may not see of other people's runs, by who the reader is.

Owns whose connection it is, and which fields of a run, a fault or an incident hold the job's own
words.  Its logs stand below a directory that only their owner may read, and a line of them does not
become public because an agent repeats it.  Who may ask at all is decided in auth.py.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from ..core.model import subject_of

WITHHELD = ("told to the run's owner, to root and to the agent's own user alone: ask with "
            "`holdfast`, or with a token")
# linux/sock_diag.h and linux/inet_diag.h
SOCK_DIAG_BY_FAMILY, REQUEST = 20, 1
NETLINK_SOCK_DIAG = 4
HEADER = struct.Struct("=IHHII")
ASKED = struct.Struct("=BBBBI")
NO_COOKIE = 0xFFFFFFFF
ESTABLISHED = 1
STATE_AT, UID_AT = HEADER.size + 1, HEADER.size + 4 + 48 + 12  # in inet_diag_msg
WAIT_S = 0.2
Json = dict[str, Any]
Owner = Callable[[str], int | None]


class Reader(NamedTuple):
    """One who asks.

    everything  root, the agent's own user, or who brought a token
    uid         the user, None where that is not known
    of_run      whose a run is that is here
    of_incident whose the run of an incident was, by the incident's id
    """

    everything: bool
    uid: int | None
    of_run: Owner
    of_incident: Owner

    def may(self, run: str) -> bool:
        """Whether to show the words of a run; "" is the node."""
        return self.everything or not run or self._is(self.of_run(run))

    def may_read(self, incident: Json) -> bool:
        """The same, also for a run that is over.  Its name may be another user's by now."""
        public = self.everything or not _run_of(incident)
        return public or self._is(self.of_incident(incident["id"]))

    def _is(self, owner: int | None) -> bool:
        return self.uid is not None and owner == self.uid


def reader(uid: int | None, role: str, of_run: Owner, of_incident: Owner) -> Reader:
    return Reader(bool(role) or uid in (0, os.getuid()), uid, of_run, of_incident)


def status(document: Json, who: Reader) -> Json:
    """The status as this reader may see it."""
    if who.everything:
        return document
    runs = [run if who.may(run["run"]) else _public_run(run) for run in document["runs"]]
    faults = [fault if who.may(_run_of(fault)) else _without_words(fault)
              for fault in document["faults"]]
    return document | {"runs": runs, "faults": faults,
                       "incidents": incidents(document["incidents"], who)}


def incidents(found: Iterable[Json], who: Reader) -> list[Json]:
    return [incident if who.may_read(incident) else _without_words(incident) for incident in found]


def checks(found: Json) -> Json:
    """For anybody: how each check ended.  Its reason and table may name paths and processes."""
    shown = ("check", "status", "wall_s", "took_s", "confirmed")
    rows = [{key: one[key] for key in shown} for one in found["checks"]]
    return found | {"checks": rows}


def jobs(found: Iterable[Json], who: Reader) -> list[Json]:
    """A name may have been another user's before: whose an attempt was stands in its own row."""
    return [one if who.everything or (who.uid is not None and who.uid == one["uid"])
            else one | {"reason": one["reason"] and WITHHELD} for one in found]


def _public_run(one: Json) -> Json:
    """A run of somebody else's: that it is here and how it goes, and nothing that it said."""
    saved = one["checkpoint"]
    return one | {
        # The text behind a colon is the job's words or names.
        "doing": one["doing"].partition(": ")[0], "need": one["need"].partition(": ")[0],
        "suspicion": one["suspicion"] and WITHHELD,
        "reason": "", "root": "", "logs": None, "log_dir": "", "checkpoint_dir": "",
        "checkpoint": saved and saved | {"path": ""},
        "ranks": [rank | {"where": "", "why": rank["why"] and WITHHELD} for rank in one["ranks"]],
    }


def _without_words(one: Json) -> Json:
    """A fault or an incident without its words."""
    return one | {"reason": WITHHELD, "evidence": []} | (
        {"timeline": [], "would_have": ""} if "timeline" in one else {}
    )


def _run_of(one: Json) -> str:
    return str(one["run"]) or subject_of(one["subject"]).run


def peer_uid(sock: socket.socket) -> int | None:
    """The user whose process holds the other end of a TCP connection from this machine, as the
    kernel says; None where it does not.  A connection that is closing is nobody's: the kernel
    answers 0 for it."""
    try:
        theirs, ours = (_end(sock, name) for name in (sock.getpeername(), sock.getsockname()))
        body = ASKED.pack(sock.family, socket.IPPROTO_TCP, 0, 0, 1 << ESTABLISHED)
        body += theirs[0] + ours[0] + theirs[1] + ours[1] + struct.pack("=3I", 0, *[NO_COOKIE] * 2)
        head = HEADER.pack(HEADER.size + len(body), SOCK_DIAG_BY_FAMILY, REQUEST, 1, 0)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(WAIT_S)
            kernel.send(head + body)
            answer = kernel.recv(4096)
    except OSError:
        return None
    if len(answer) < UID_AT + 4 or HEADER.unpack_from(answer)[1] != SOCK_DIAG_BY_FAMILY:
        return None
    uid: int = struct.unpack_from("=I", answer, UID_AT)[0]
    return uid if answer[STATE_AT] == ESTABLISHED else None


def _end(sock: socket.socket, name: Any) -> tuple[bytes, bytes]:
    """(port, address) of one end as the kernel's tables have them."""
    return struct.pack("!H", name[1]), socket.inet_pton(sock.family, name[0]).ljust(16, b"\0")
