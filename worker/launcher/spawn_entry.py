"""A rank started cold: reads its order from a descriptor and goes on as a forked one would."""

from __future__ import annotations

import json
import os

from ..rank import rank
from ..rank.rank import Program, Seat


def main(order_fd: int) -> None:
    """Runs one rank in this fresh interpreter; does not return."""
    with os.fdopen(order_fd, "rb") as file:
        order = json.load(file)
    seat = Seat(**order["seat"])
    os.set_inheritable(seat.page_fd, False)
    os.set_inheritable(seat.control_fd, False)
    rank.settle(seat)
    rank.run(Program(**order["program"]), seat)
