"""What a launcher does while no agent answers: the job runs once, unwatched, and still ends.

Owns the few decisions that must not depend on an agent.  It restarts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from .process import Order

if TYPE_CHECKING:
    from .launcher import Launcher

ALONE_S = 10.0  # without an agent for this long, the run starts, ends or gives up by itself
DONE_WAIT_S = 30.0  # a run that is done waits no longer, whether its agent is gone or frozen


class Alone:
    """Watches for the time without an agent."""

    def __init__(self, launcher: "Launcher") -> None:
        self.launcher = launcher
        self.done_s = 0.0

    def watch(self, now_s: float) -> None:
        launcher = self.launcher
        link, crew = launcher.link, launcher.crew
        alone_s = now_s - link.lost_s if link.channel is None else 0.0
        if launcher.state() != "done":
            self.done_s = 0.0
        else:
            self.done_s = self.done_s or now_s
            if alone_s > 1.0 or now_s - self.done_s > DONE_WAIT_S:
                launcher.exit_code = 0
        if alone_s < ALONE_S:
            return
        if crew.generation == 0 and launcher.listed and not crew.waiting:
            launcher.terminal.say(
                "no agent (%s): the run goes on unwatched and is not restarted"
                % (link.problem or "none answers"), "error")
            numbers = tuple(range(launcher.spec.nproc))
            newest = max((c["generation"] for c in launcher.commits.values()), default=0)
            launcher.begin(Order(newest + 1, numbers, (), len(numbers), self.resume(), [], 0))
        failed = [p for p in crew.by_rank().values() if p.ended is not None and p.ended["code"]]
        if failed and crew.generation:
            first = min(failed, key=lambda p: p.ended["boot_s"] if p.ended else 0.0)
            launcher.exit_code = first.ended["code"] if first.ended else 1

    def resume(self) -> Dict[str, Any]:
        """Where a run that nobody plans goes on: the newest checkpoint that proves, if any."""
        if not self.launcher.spec.program.trainer:
            return {"kind": "own"}
        if not self.launcher.checkpoint_dir:
            return {"kind": "fresh"}
        return {"kind": "newest", "path": self.launcher.checkpoint_dir}
