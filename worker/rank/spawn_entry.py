"""The entry of a spawned rank: reads what it is from a descriptor and goes on as a forked one."""

from __future__ import annotations

import json
import os

from . import rank
from .rank import Program, Seat


def main(launch_fd: int) -> None:
    """Runs one rank in this fresh interpreter; does not return."""
    with os.fdopen(launch_fd, "rb") as file:
        launch = json.load(file)
    seat = Seat(**launch["seat"])
    os.set_inheritable(seat.page_fd, False)
    os.set_inheritable(seat.control_fd, False)
    rank.settle(seat)
    rank.run(Program(**launch["program"]), seat)
