"""Tells systemd that the agent is ready and alive (sd_notify), without a library.

Owns the datagram to NOTIFY_SOCKET.  Without that variable nothing is sent.
"""

from __future__ import annotations

import os
import socket


def notify(text: str) -> bool:
    """Sends one state line (`READY=1`); True when somebody takes it."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(text.encode(), address)
    except OSError:
        return False
    return True


def watchdog_s() -> float:
    """How often systemd wants to hear WATCHDOG=1, halved for safety; 0.0 = never."""
    wanted = os.environ.get("WATCHDOG_USEC", "")
    meant = os.environ.get("WATCHDOG_PID", str(os.getpid()))
    if not wanted.isdigit() or meant != str(os.getpid()):
        return 0.0
    return int(wanted) / 2e6
