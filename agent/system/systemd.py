"""Tells systemd that the agent is ready and alive (sd_notify); asks if the machine goes down.

Owns the datagram to NOTIFY_SOCKET, without a library; without that variable nothing is sent.
"""

from __future__ import annotations

import os
import socket
import subprocess

ASK_S = 2.0


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


def is_going_down() -> bool:
    """Whether systemd says that it ends this machine's units, for a reboot or to power off."""
    try:
        done = subprocess.run(["systemctl", "is-system-running"], stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.strip() == b"stopping"
