"""How a run ends here: the caller's signals, the ranks' grace, and the last lines on the terminal.

Owns the launcher's handlers of signals.  A first interrupt, a preemption (SIGTERM, SIGQUIT, and
the warnings of schedulers, SIGUSR1 and SIGUSR2) and a terminal that is gone all mean the same: save
what is done within the grace, then leave.  A second interrupt ends everything at once.  What ends a
run for another reason is decided elsewhere and only told here.
"""

from __future__ import annotations

import signal
from typing import Any, Callable, List, Optional

from .. import exits
from .. import page as pages
from ..rank.rank import END_SIGNALS
from .process import RankProcess
from .rank_processes import RankProcesses
from .run_state import RunState
from .terminal import Terminal

ASKED = {signal.SIGINT: "interrupted", signal.SIGHUP: "the terminal is gone (SIGHUP)"}
AGREE_S = 5.0  # for a step that all nodes of the run leave behind
FORCED_END_S = 5.0  # beyond the grace: a rank in state D keeps nobody here


class Ending:
    """The end of one run on this node."""

    def __init__(self, state: RunState, ranks: RankProcesses, terminal: Terminal) -> None:
        self.state, self.ranks, self.terminal = state, ranks, terminal
        # While this process imports: ends everything and never returns.  An exception would do, had
        # importlib no callbacks that swallow one.
        self.leave: Optional[Callable[[], None]] = None
        self.twice = False
        self.told = False

    # ------------------------------------------------------------------ signals

    def take_signals(self, wake: int) -> None:
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in END_SIGNALS:
            # `nohup` ignores SIGHUP for its command: who types it wants the run to go on.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self.on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Held back since `holdfast` itself began (agent/cli/launch.py): one of that time comes now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)

    def drop_signals(self) -> None:
        signal.set_wakeup_fd(-1)
        for number in END_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def on_signal(self, number: int, _frame: Any) -> None:
        """The caller wants the run to end; a second interrupt ends it at once."""
        state = self.state
        interrupt = number == signal.SIGINT
        if state.shutdown and interrupt:
            self.twice = True
            state.end(exits.INTERRUPTED, "interrupted again")
        asked = signal.Signals(number)
        state.shutdown_reason = state.shutdown_reason or ASKED.get(
            asked, "asked to end (%s)" % asked.name)
        state.shut_down("interrupted" if interrupt else "preempted")
        if self.leave is not None:
            state.end(self.code(), "")
            self.leave()

    def code(self) -> int:
        return exits.INTERRUPTED if self.state.shutdown == "interrupted" else exits.RETRY

    # ------------------------------------------------------------------ the way out

    def watch(self, now_s: float) -> None:
        """An interrupt or preemption must end the run even when no agent answers."""
        state, ranks, trainer = self.state, self.ranks, self.state.spec.program.trainer
        if not state.shutdown or state.exit_code is not None:
            return
        ranks.waiting = None
        for process in ranks.standbys():
            ranks.kill(process, 0.0)
        overdue = now_s - state.shutdown_s > state.spec.grace_s + FORCED_END_S
        if overdue or ranks.generation == 0 or not ranks.living():
            return state.end(self.code(), "")
        useful = [p for p in ranks.living() if p.assigned and p.parked is None]
        # A trainer's rank that waits for a place, or for a lost peer, has nothing new to save.
        grace_s = state.spec.grace_s if useful or not trainer else 0.0
        self.tell(grace_s)
        if trainer and not self.awaits_step(now_s):
            ranks.stop_at_step()
        number = signal.SIGINT if state.shutdown == "interrupted" else signal.SIGTERM
        for process in ranks.living():
            if not process.by_us or not grace_s:
                ranks.kill(process, grace_s, number)

    def awaits_step(self, now_s: float) -> bool:
        """Over several nodes the run's leader says behind which step all leave; where nobody does
        in time, each node chooses its own, and keeps what it can."""
        ranks = self.ranks
        waited_s = now_s - self.state.shutdown_s
        told = ranks.park_told == ranks.generation
        soon = waited_s < min(AGREE_S, self.state.spec.grace_s / 3)
        return ranks.place().groups > 1 and (told or soon)

    def tell(self, grace_s: float) -> None:
        if not self.told and grace_s > 0:
            self.told = True
            key = "Ctrl-C again" if self.state.shutdown == "interrupted" else "Ctrl-C"
            self.terminal.say("%s: the ranks have %g s to save and leave; %s ends at once" % (
                self.state.shutdown_reason, grace_s, key), "warn")

    # ------------------------------------------------------------------ the last lines

    def say(self) -> None:
        """What happened, with which code, and where the same command goes on."""
        state = self.state
        code = 1 if state.exit_code is None else state.exit_code
        if state.shutdown:
            why = state.shutdown_reason
            if self.twice:
                why += ", then Ctrl-C: ended at once"
            self.terminal.say(exits.ending(code, "%s %s; %s" % (
                why, self.stopped_at(), self.goes_on())), "warn")
            return
        why = state.end_reason or "every rank is done" if not code else state.end_reason
        self.terminal.say(exits.ending(code, why), "error" if code else "good")
        if code:
            self.show_failures()

    def last_step(self) -> Optional[int]:
        """That any rank finished; None where no page says it: a stray pointer can have written
        what no rank did."""
        found = [p.fields[pages.F_STEP] for p in self.ranks.by_rank().values()]
        return max((step for step in found if step <= pages.COUNT_MAX),
                   default=None if found else 0)

    def stopped_at(self) -> str:
        if not self.ranks.generation:
            return "before any rank ran"
        step = self.last_step()
        if step is None:
            return "at a step that is not known"
        if not step:
            return "in a command, whose steps are not known" if (
                self.state.spec.program.kind == "command") else "before a step was finished"
        if self.state.spec.program.trainer:
            return "at step %d" % step
        return "%d step%s after the script's last start" % (step, "" if step == 1 else "s")

    def goes_on(self) -> str:
        state = self.state
        if not state.spec.program.trainer:
            return "the same command goes on from the program's own checkpoint, if it keeps any"
        if not state.listed or self.ranks.place().group:  # the first node's rank 0 commits
            return "the same command goes on from its newest checkpoint, if there is one"
        good = [commit for commit in state.newest_commits() if not commit["bad"]]
        if not good:
            return "no checkpoint is committed: the same command begins anew"
        saved = int(good[-1]["step"])
        lost = (self.last_step() or 0) - saved
        text = "the same command goes on from the checkpoint of step %d" % saved
        return text if lost <= 0 else text + ", and redoes %d step%s" % (lost, "s"[lost == 1:])

    def show_failures(self) -> None:
        """The first failing rank, as torchrun's summary would name it."""
        failed: List[RankProcess] = [
            p for p in self.ranks.by_rank().values()
            if p.over and p.over["code"] and not p.over["by_us"]]
        for process in sorted(failed, key=lambda p: p.over["boot_s"] if p.over else 0.0)[:1]:
            ended = process.over or {}
            how = "signal %s" % signal_name(ended["signal"]) if ended["signal"] else (
                "exit code %d" % ended["code"])
            self.terminal.say(
                "first to fail: rank %d (pid %d), %s%s" % (
                    process.rank, process.child.pid, how,
                    ", " + ended["error"] if ended["error"] else ""), "error")
            self.terminal.say("its log: %s" % process.home, "error")


def signal_name(number: int) -> str:
    """As SIGKILL; of one that has none, a real-time signal's, the number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)
