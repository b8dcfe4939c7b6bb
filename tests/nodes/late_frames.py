"""Carries frames between two network devices, late by the same time: `late SECONDS A B [MORE]`.

Owns the delay of a node's cable where the kernel has no netem; MORE devices' frames are made whole
too.  `whole DEVICE` only has the kernel finish every frame itself (checksum, segments) before it
leaves by that device: what is left to a card, nobody would do here.  Standard library alone: it
starts in 40 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence

SIOCETHTOOL, FRAME_MAX, HELD_MAX = 0x8946, 1 << 16, 1 << 14
ETH_P_ALL = 3
LEFT_TO_A_CARD = (0x1F, 0x24, 0x17, 0x2C)  # ETHTOOL_STSO, SGSO, STXCSUM, SGRO
PR_SET_PDEATHSIG = 1


def whole_frames(device: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in LEFT_TO_A_CARD:
            value = ctypes.create_string_buffer(struct.pack("II", command, 0))
            request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
            with contextlib.suppress(OSError):  # a driver without it has it off
                fcntl.ioctl(asked, SIOCETHTOOL, request)


def forward(late_s: float, devices: Sequence[str]) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for device in devices:
        whole_frames(device)
    sides = []
    for device in devices[:2]:
        side = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        side.bind((device, ETH_P_ALL))
        side.setblocking(False)
        sides.append(side)
    print("ready", flush=True)
    held: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        for side in select.select(sides, (), (), wait_s)[0]:
            frame, origin = side.recvfrom(FRAME_MAX)
            if origin[2] != socket.PACKET_OUTGOING and len(held) < HELD_MAX:
                number += 1
                heapq.heappush(held, (time.monotonic() + late_s, number, 1 - sides.index(side),
                                      frame))
        while held and held[0][0] <= time.monotonic():
            _, _, to, frame = heapq.heappop(held)
            with contextlib.suppress(OSError):  # as a cable would lose it
                sides[to].send(frame)


if __name__ == "__main__":
    if sys.argv[1] == "whole":
        whole_frames(sys.argv[2])
    else:
        forward(float(sys.argv[2]), sys.argv[3:])
