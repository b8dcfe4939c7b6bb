"""What a launcher does while no agent answers: the job runs once, unwatched, and still ends.

Owns the few decisions that must not depend on an agent.  It restarts nothing, and leaves nobody
waiting for who does.
"""

from __future__ import annotations

from typing import Any, Dict

from .. import exits
from .agent_link import AgentLink
from .process import StartCommand
from .rank_processes import RankProcesses
from .run_state import RunState
from .terminal import Terminal

WITHOUT_AGENT_S = 10.0  # for this long, and the run starts, ends or gives up by itself
NODES_WAIT_S = 60.0  # one of many nodes waits this long for an agent before its first generation
DONE_WAIT_S = 30.0  # a run that is done waits no longer, whether its agent is gone or frozen


class WithoutAgent:
    """Watches for the time without an agent."""

    def __init__(
        self, state: RunState, ranks: RankProcesses, link: AgentLink, terminal: Terminal
    ) -> None:
        self.state, self.ranks, self.link, self.terminal = state, ranks, link, terminal
        self.done_s = 0.0
        self.told = False
        self.waits = False
        self.began_s = 0.0

    def watch(self, now_s: float) -> None:
        state, ranks, link = self.state, self.ranks, self.link
        if state.shutdown:
            return  # the caller's end has its own grace
        self.began_s = self.began_s or now_s  # a busy machine imports for minutes before that
        lost_s = max(link.lost_s, self.began_s)
        without_s = now_s - lost_s if link.channel is None else 0.0
        if ranks.level() != "done":
            self.done_s = 0.0
        else:
            self.done_s = self.done_s or now_s
            if without_s > 1.0 or now_s - self.done_s > DONE_WAIT_S:
                state.end(0, "every rank is done")
        self.tell(without_s)
        if state.spec.nnodes > 1 and not ranks.generation and link.code == exits.CONFIGURATION:
            # The next one would say the same.
            return state.end(exits.CONFIGURATION, link.problem)
        if without_s < WITHOUT_AGENT_S:
            return
        if state.spec.nnodes > 1 and ranks.generation == 0:
            self.wait_for_one(without_s)
        elif ranks.generation == 0 and state.listed and not ranks.waiting:
            self.terminal.say("no agent (%s): the run goes on unwatched and is not restarted"
                              % (link.problem or "none answers"), "error")
            numbers = tuple(range(state.spec.nproc))
            newest = max((c["generation"] for c in state.commits.values()), default=0)
            ranks.begin(StartCommand(newest + 1, numbers, (), len(numbers), self.resume(), [], 0))
        failed = [p for p in ranks.by_rank().values() if p.over is not None and p.over["code"]]
        if failed and ranks.generation:
            first = min(failed, key=lambda p: p.over["boot_s"] if p.over else 0.0)
            code = first.over["code"] if first.over else 1
            return state.end(code, "rank %d failed, and no agent answers that could restart it"
                             % first.rank)
        if without_s >= (NODES_WAIT_S if state.spec.nnodes > 1 else WITHOUT_AGENT_S):
            self.leave_parked()

    def leave_parked(self) -> None:
        """A rank that has left its generation waits for a plan, and nobody is there to make one: a
        checkpoint did not prove, or its peers are gone."""
        parked = [p for p in self.ranks.by_rank().values() if p.parked is not None]
        if parked:
            first = min(parked, key=lambda p: p.rank)
            why = str(first.parked["reason"]) if first.parked else ""
            bad = why.startswith("bad_checkpoint")  # put aside: a second try would start at step 0
            self.state.end(exits.BUDGET_SPENT if bad else exits.RETRY,
                           "rank %d waits for a plan (%s), and no agent answers that could make one"
                           % (first.rank, why))

    def wait_for_one(self, without_s: float) -> None:
        """A run over many nodes starts on an agent's word alone: without it, each node would train
        as a world of its own, all of them on one checkpoint folder."""
        why = self.link.problem or "none answers"
        if without_s >= NODES_WAIT_S:
            self.state.end(exits.RETRY, "no agent for %.0f s (%s), and a run over nodes starts "
                           "with one alone" % (without_s, why))
        elif not self.waits:
            self.waits = True
            self.terminal.say("no agent (%s): waiting for one, as this run is over %s nodes"
                              % (why, self.state.spec.nnodes_text), "error")

    def tell(self, without_s: float) -> None:
        """That nobody watches a run that trains, and that somebody does again."""
        if self.told and not without_s:
            self.told = False
            self.terminal.say("the agent answers again", "good")
        elif not self.told and without_s >= WITHOUT_AGENT_S and self.ranks.generation:
            self.told = True
            self.terminal.say("no agent for %.0f s (%s): the ranks train on unwatched, and none "
                              "that ends is restarted until one answers" % (
                                  without_s, self.link.problem or "none answers"), "error")

    def resume(self) -> Dict[str, Any]:
        """Where a run that nobody plans goes on: the newest checkpoint that proves, if any."""
        if not self.state.spec.program.trainer:
            return {"kind": "own"}
        if not self.state.checkpoint_dir:
            return {"kind": "fresh"}
        return {"kind": "newest", "path": self.state.checkpoint_dir}
