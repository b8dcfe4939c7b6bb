"""How long the sums of a step's gradients take, as torch's DDP measures that by itself.

Owns the look for the script's DDP and the copy of its newest measurement to the page.  DDP takes
the times of its first ten iterations and of each hundredth after (its own default, which a script
may change), by events on the device where that is one: nothing is measured here, and nobody is
made to wait.  Other ways of training in parallel keep no such times: what their ranks waited in the
collectives stands there instead (collectives.py).  Fails open: a torch without one of these names
is left alone.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable, Optional

from .. import page as pages


class Watch:
    """One rank's DDP: found by the ticker, read by the main thread between two steps."""

    def __init__(self, fields: memoryview) -> None:
        self.fields = fields
        self.module: Optional[Callable[[], Any]] = None  # a weak reference

    def each_beat(self) -> None:
        """Runs on the ticker.  DDP names the module whose forward pass is under way: one of a few
        beats meets it.  Of several (a GAN has two) the first that was met is followed."""
        if self.module is not None and self.module() is not None:
            return
        parallel = sys.modules.get("torch.nn.parallel.distributed")
        kind = getattr(parallel, "DistributedDataParallel", None)
        module = getattr(kind, "_active_ddp_module", None)
        self.module = weakref.ref(module) if module is not None else None

    def copy(self) -> None:
        """The newest measurement to the page: tens of microseconds, too many for each step."""
        module = self.module() if self.module is not None else None
        if module is None:
            return
        try:
            measured = read(module._get_ddp_logging_data())
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
            return  # not measured yet, or another torch than any that was read
        if measured.iteration != self.fields[pages.F_GRADIENTS]:
            self.write(measured)

    def write_waited(self, waited: Optional[pages.Gradients]) -> None:
        """What a rank waited in all collectives to the page, where no DDP is followed."""
        if waited is not None and (self.module is None or self.module() is None):
            self.write(waited)

    def write(self, measured: pages.Gradients) -> None:
        fields, first = self.fields, pages.F_GRADIENTS
        fields[first] = 0
        for number, value in enumerate(measured[1:], first + 1):
            fields[number] = value
        fields[first] = measured.iteration


def read(data: Any) -> pages.Gradients:
    """Of DDP's logging data, in nanoseconds.  Raises KeyError before the first measurement, and
    ValueError for what is no measurement."""
    sum_ns, overlap_ns = (int(data[name]) for name in (
        "backward_comm_time", "backward_compute_comm_overlap_time"))
    compute_ns = int(data["forward_compute_time"]) + int(data["backward_compute_time"])
    size = 0 if data.get("comm_hook") else int(data["total_parameter_size_bytes"])
    found = pages.Gradients(
        int(data["iteration"]), sum_ns, max(0, sum_ns - max(0, overlap_ns)), compute_ns, size,
        int(data["world_size"]))
    if not (0 < sum_ns < pages.TIME_MAX_NS and 0 < compute_ns < pages.TIME_MAX_NS):
        raise ValueError("DDP measured nothing")
    if max(found.iteration, found.size_bytes, found.world) > pages.COUNT_MAX or min(found) < 0:
        raise ValueError("no numbers of DDP's")
    return found
