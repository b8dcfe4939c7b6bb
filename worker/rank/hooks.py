"""What Holdfast observes in a script that knows nothing of it.

Owns the two optimizer hooks and the reading of the default process group.  Nothing of torch is
replaced here: the optimizer hooks are torch's own global ones, the group's sequence number is read
by the ticker.  What a rank stands in is told from that number and never from wrappers, which would
see none of the collectives that C++ enters (collectives.py has those that Python does, for their
times alone).  Fails open: a torch without one of these is watched with what remains, said in one
line.
"""

from __future__ import annotations

import sys
from typing import Any, Dict, Optional

from .. import page as pages
from ..elastic import Worker
from . import faults


def being_imported(module: Any) -> bool:
    """Whether another thread is still running the module's body (importlib's own mark)."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class ScriptHooks:
    """Installs itself from the ticker once the script has imported torch."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.counts: Dict[int, int] = {}
        self.settled = False  # the hooks are in, or this torch has none
        self.group: Any = None
        worker.switch_phase(pages.PHASES.index("startup"))

    def each_beat(self) -> None:
        """Runs on the ticker: a dictionary look-up until torch is there, then one attribute."""
        if not self.settled:
            self.settled = self.install()
        self.follow_group()

    def install(self) -> bool:
        """Puts both hooks in, or says once that there are none; False while it is too early.

        A module is in sys.modules from the first line of its import on, and lacks what its later
        lines define: what is half there is looked at again at the next beat.
        """
        optimizer = sys.modules.get("torch.optim.optimizer")
        if optimizer is None or being_imported(optimizer):
            return False
        before = getattr(optimizer, "register_optimizer_step_pre_hook", None)
        after = getattr(optimizer, "register_optimizer_step_post_hook", None)
        if before is None or after is None:
            line = "holdfast: this torch has no optimizer hooks, so steps are unseen"
            print(line, file=sys.stderr)
            return True
        before(self.before_step)
        after(self.after_step)
        return True

    def follow_group(self) -> None:
        """Hands the default process group to the ticker when it appears or is replaced."""
        module = sys.modules.get("torch.distributed.distributed_c10d")
        world = getattr(module, "_world", None)
        group = getattr(world, "default_pg", None)
        if group is self.group:
            return
        self.group = group
        ticker = self.worker.ticker
        ticker.forget_groups()
        if group is not None:
            ticker.watch_group(group)

    def before_step(self, *_: Any) -> None:
        worker = self.worker
        self.follow_group()  # the first steps may be over before the ticker's next beat
        worker.switch_phase(pages.PHASES.index("optimizer"))
        worker.fields[pages.F_STEP_BEGIN] += 1

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """A step of the run is one step of its busiest optimizer (a GAN has two)."""
        worker, key = self.worker, id(optimizer)
        self.counts[key] = self.counts.get(key, 0) + 1
        worker.fields[pages.F_STEP_END] = worker.fields[pages.F_STEP_BEGIN]
        if self.counts[key] > worker.fields[pages.F_STEP]:
            worker.finish_step(self.counts[key])
        worker.switch_phase(pages.UNKNOWN)
        if worker.injected:
            faults.inject(worker.injected)


def install(worker: Worker) -> Optional[ScriptHooks]:
    """Starts watching the script that is about to run in this process."""
    hooks = ScriptHooks(worker)
    worker.ticker.each_beat.append(hooks.each_beat)
    # A preloaded torch is there already: hook before the script's first line.
    hooks.each_beat()
    return hooks
