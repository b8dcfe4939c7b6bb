"""How a run ends: by its caller's signals, and while no agent answers; its ranks are values."""

from __future__ import annotations

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.worker import exits
from holdfast.worker import page as pages
from holdfast.worker.launcher import run_state, spec
from holdfast.worker.launcher.ending import AGREE_S, FORCED_END_S, Ending
from holdfast.worker.launcher.without_agent import (
    DONE_WAIT_S,
    NODES_WAIT_S,
    WITHOUT_AGENT_S,
    WithoutAgent,
)
from holdfast.worker.rank.rank import END_SIGNALS

TRAIN, SCRIPT = ("train", "--nproc-per-node", "2"), ("run", "--nproc-per-node", "2", __file__)
COMMAND = ("run", "--no-python", "sh")
MANY = ("run", "--run", "x", "--nnodes", "2", "--node-rank", "0", "--no-python", "sh")


class Rank:
    """One process as its launcher keeps it."""

    def __init__(self, rank: int, step: int = 0, **known: Any) -> None:
        self.rank, self.fields = rank, {pages.F_STEP: step}
        self.assigned, self.by_us = rank >= 0, False
        self.parked: Any = None
        self.ended: dict[str, Any] | None = None
        self.home, self.child = f"/logs/rank-{rank}", SimpleNamespace(pid=1000 + rank)
        self.__dict__.update(known)

    @property
    def over(self) -> dict[str, Any] | None:
        return self.ended

    def ends(self, code: int, boot_s: float = 1.0, number: int = 0, error: str = "",
             by_us: bool = False) -> Rank:
        self.ended = {"code": code, "boot_s": boot_s, "signal": number, "error": error,
                      "by_us": by_us}
        return self


class Ranks:
    """A launcher's processes; who was ended, with which grace and signal, and what was begun."""

    def __init__(self, *processes: Rank, generation: int = 1, groups: int = 1, group: int = 0):
        self.processes, self.generation = list(processes), generation
        self.waiting: Any = None
        self.park_told = 0
        self.asked_to_stop = 0
        self.killed: list[tuple[int, float, int]] = []
        self.begun: list[Any] = []
        self.where = SimpleNamespace(groups=groups, group=group)

    def living(self) -> list[Rank]:
        return [one for one in self.processes if one.ended is None]

    def standbys(self) -> list[Rank]:
        return [one for one in self.living() if one.rank < 0 and not one.by_us]

    def by_rank(self) -> dict[int, Rank]:
        return {one.rank: one for one in self.processes if one.rank >= 0}

    def place(self) -> Any:
        return self.where

    def stop_at_step(self) -> None:
        self.asked_to_stop += 1

    def kill(self, process: Rank, grace_s: float, number: int = signal.SIGTERM) -> None:
        process.by_us = True
        self.killed.append((process.rank, grace_s, number))

    def level(self) -> str:
        ranks = self.by_rank().values()
        done = bool(ranks) and all(one.ended and one.ended["code"] == 0 for one in ranks)
        return "done" if done and self.generation else "running" if self.generation else "idle"

    def begin(self, command: Any) -> None:
        self.begun.append(command)
        self.waiting = command


class Told:
    """What stands on the terminal."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.levels: list[str] = []

    def say(self, text: str, level: str = "info") -> None:
        self.lines.append(text)
        self.levels.append(level)


class Run:
    """The end of one run, whose ranks are `ranks`."""

    def __init__(self, argv: tuple[str, ...], ranks: Ranks, grace: float = 30.0) -> None:
        asked = spec.parse(argv[0], ["--grace", str(grace), *argv[1:]], {})
        self.state, self.ranks, self.terminal = run_state.RunState(asked, "/logs"), ranks, Told()
        self.link = SimpleNamespace(channel=None, lost_s=0.0, problem="", code=None)
        self.ending = Ending(self.state, ranks, self.terminal)  # type: ignore[arg-type]
        self.alone = WithoutAgent(
            self.state, ranks, self.link, self.terminal)  # type: ignore[arg-type]

    def asked(self, number: int = signal.SIGTERM, after_s: float = 0.0) -> Run:
        """The caller's signal, and what the launcher does so many seconds behind it."""
        self.ending.on_signal(number, None)
        return self.later(after_s)

    def later(self, after_s: float) -> Run:
        self.ending.watch(self.state.shutdown_s + after_s)
        return self

    def last_words(self) -> str:
        self.terminal.lines.clear()
        self.ending.say()
        return "\n".join(self.terminal.lines)

    def commits(self, **bad_by_step: str) -> Run:
        self.state.listed = True
        self.state.commits = {
            step: {"generation": 1, "step": int(step[1:]), "path": step, "bad": bad}
            for step, bad in bad_by_step.items()}
        return self


# ---------------------------------------------------------------- the caller's signals


@pytest.mark.parametrize(("number", "code", "reason", "to_ranks", "key"), [
    (signal.SIGINT, exits.INTERRUPTED, "interrupted", signal.SIGINT, "Ctrl-C again"),
    (signal.SIGTERM, exits.RETRY, "asked to end (SIGTERM)", signal.SIGTERM, "Ctrl-C"),
    (signal.SIGUSR1, exits.RETRY, "asked to end (SIGUSR1)", signal.SIGTERM, "Ctrl-C"),
    (signal.SIGUSR2, exits.RETRY, "asked to end (SIGUSR2)", signal.SIGTERM, "Ctrl-C"),
    (signal.SIGQUIT, exits.RETRY, "asked to end (SIGQUIT)", signal.SIGTERM, "Ctrl-C"),
    (signal.SIGHUP, exits.RETRY, "the terminal is gone (SIGHUP)", signal.SIGTERM, "Ctrl-C"),
])
def test_a_first_signal_gives_the_ranks_their_grace_and_says_so_once(
    number: int, code: int, reason: str, to_ranks: int, key: str
) -> None:
    run = Run(SCRIPT, Ranks(Rank(0, 7), Rank(1, 7))).asked(number)
    assert run.ranks.killed == [(0, 30.0, to_ranks), (1, 30.0, to_ranks)]
    run.later(1.0)
    assert len(run.ranks.killed) == 2, "whoever was asked once is not asked again"
    assert run.terminal.lines == [
        f"{reason}: the ranks have 30 s to save and leave; {key} ends at once"]
    assert run.state.exit_code is None and run.ranks.asked_to_stop == 0
    for one in run.ranks.processes:
        one.ends(0, by_us=True)
    assert run.later(2.0).state.exit_code == code
    assert run.last_words() == (
        f"ends with code {code}: {reason} 7 steps after the script's last start; the same command "
        "goes on from the program's own checkpoint, if it keeps any")


def test_a_second_interrupt_ends_at_once_and_no_other_signal_does() -> None:
    run = Run(SCRIPT, Ranks(Rank(0, 1))).asked(signal.SIGTERM).asked(signal.SIGTERM)
    assert run.state.exit_code is None and not run.ending.twice
    run.asked(signal.SIGINT)
    assert run.state.exit_code == exits.INTERRUPTED
    assert "asked to end (SIGTERM), then Ctrl-C: ended at once 1 step after" in run.last_words()
    assert "then Ctrl-C" not in Run(SCRIPT, Ranks(Rank(0))).asked(signal.SIGINT).last_words()


@pytest.mark.parametrize(("number", "code"), [
    (signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.RETRY)])
def test_during_the_imports_a_first_signal_leaves_with_its_code(number: int, code: int) -> None:
    run, left = Run(SCRIPT, Ranks(generation=0)), []
    run.ending.leave = lambda: left.append(run.state.exit_code)
    run.ending.on_signal(number, None)
    assert left == [code]


def test_a_rank_that_does_not_leave_keeps_nobody_longer_than_the_grace() -> None:
    run = Run(SCRIPT, Ranks(Rank(0, 7)), grace=8.0).asked(after_s=8.0 + FORCED_END_S - 0.1)
    assert run.state.exit_code is None
    assert run.later(8.0 + FORCED_END_S + 0.1).state.exit_code == exits.RETRY
    before = len(run.ranks.killed)
    run.later(60.0)
    assert len(run.ranks.killed) == before, "it has ended"


def test_nothing_is_done_before_anybody_asked() -> None:
    run = Run(TRAIN, Ranks(Rank(0, 7), Rank(-1)))
    run.ranks.waiting = "a start"
    run.ending.watch(1e9)
    assert run.ranks.waiting == "a start" and not run.ranks.killed and run.state.exit_code is None


def test_what_was_to_start_does_not_and_standbys_go_at_once() -> None:
    run = Run(TRAIN, Ranks(Rank(0, 7), Rank(-1)))
    run.ranks.waiting = "a start"
    run.asked()
    assert run.ranks.waiting is None and run.ranks.killed[0] == (-1, 0.0, signal.SIGTERM)


@pytest.mark.parametrize("generation", [0, 1])
def test_without_a_rank_to_wait_for_it_ends_at_once(generation: int) -> None:
    ranks = Ranks(Rank(0).ends(0), generation=1) if generation else Ranks(Rank(0), generation=0)
    assert Run(SCRIPT, ranks).asked().state.exit_code == exits.RETRY


def test_a_trainers_rank_that_waits_for_others_has_nothing_to_save() -> None:
    parked = Ranks(Rank(0, 7, parked={"step": 7}), Rank(1, 7, assigned=False))
    run = Run(TRAIN, parked).asked()
    assert [grace for _, grace, _ in run.ranks.killed] == [0.0, 0.0] and not run.terminal.lines
    run.later(0.1)
    assert len(run.ranks.killed) == 4, "without a grace they are ended again until they are gone"
    script = Run(SCRIPT, Ranks(Rank(0, 7, assigned=False))).asked()
    assert script.ranks.killed == [(0, 30.0, signal.SIGTERM)], "who knows what a script saves"
    one = Run(TRAIN, Ranks(Rank(0, 7), Rank(1, 7, parked={"step": 7}))).asked()
    assert [grace for _, grace, _ in one.ranks.killed] == [30.0, 30.0]


def test_one_nodes_trainer_is_asked_to_leave_behind_a_step_and_a_script_never() -> None:
    assert Run(TRAIN, Ranks(Rank(0, 7))).asked().ranks.asked_to_stop == 1
    assert Run(SCRIPT, Ranks(Rank(0, 7))).asked().ranks.asked_to_stop == 0


@pytest.mark.parametrize(("grace", "waited_s", "told", "alone"), [
    (30.0, AGREE_S - 0.1, 0, 0),  # the leader may still say behind which step
    (30.0, AGREE_S + 0.1, 0, 1),  # nobody did
    (30.0, AGREE_S + 0.1, 2, 0),  # somebody did
    (30.0, AGREE_S + 0.1, 1, 1),  # of an older generation
    (6.0, 1.9, 0, 0), (6.0, 2.1, 0, 1),  # a third of a short grace
])
def test_over_nodes_all_leave_behind_the_leaders_step_where_he_names_one(
    grace: float, waited_s: float, told: int, alone: int
) -> None:
    ranks = Ranks(Rank(0, 7), generation=2, groups=2)
    ranks.park_told = told
    assert Run(TRAIN, ranks, grace).asked(after_s=waited_s).ranks.asked_to_stop == alone


@pytest.mark.parametrize("nohup", [True, False])
def test_a_command_under_nohup_goes_on_when_its_terminal_goes(nohup: bool) -> None:
    kept = {number: signal.getsignal(number) for number in (*END_SIGNALS, signal.SIGCHLD)}
    run = Run(SCRIPT, Ranks(Rank(0)))
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
        run.ending.take_signals(writer)
        taken = {number for number in END_SIGNALS
                 if signal.getsignal(number) == run.ending.on_signal}
        assert taken == set(END_SIGNALS) - ({signal.SIGHUP} if nohup else set())
        assert not set(END_SIGNALS) & signal.pthread_sigmask(signal.SIG_BLOCK, ())
        signal.raise_signal(signal.SIGTERM)
        assert run.state.shutdown == "preempted" and os.read(reader, 9) == bytes([signal.SIGTERM])
        run.ending.drop_signals()  # from now on the launcher puts away what it has
        assert {signal.getsignal(number) for number in END_SIGNALS} == {signal.SIG_IGN}
        signal.raise_signal(signal.SIGINT)
        assert signal.set_wakeup_fd(-1) == -1 and not run.ending.twice
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in kept.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


# ---------------------------------------------------------------- the last words


@pytest.mark.parametrize(("argv", "step", "expected"), [
    (TRAIN, 0, "before a step was finished"), (TRAIN, 12, "at step 12"),
    (SCRIPT, 1, "1 step after the script's last start"),
    (SCRIPT, 2, "2 steps after the script's last start"),
    (COMMAND, 0, "in a command, whose steps are not known"),
])
def test_where_it_stopped_is_the_furthest_ranks_step(
    argv: tuple[str, ...], step: int, expected: str
) -> None:
    run = Run(argv, Ranks(Rank(0, step), Rank(1, 0)))
    assert run.ending.stopped_at() == expected
    run.ranks.generation = 0
    assert run.ending.stopped_at() == "before any rank ran"


@pytest.mark.parametrize(("commits", "step", "expected"), [
    ({"s10": "", "s5": ""}, 12, "the checkpoint of step 10, and redoes 2 steps"),
    ({"s10": ""}, 11, "the checkpoint of step 10, and redoes 1 step"),
    ({"s10": ""}, 10, "the checkpoint of step 10"),
    ({"s10": "digest", "s5": ""}, 10, "the checkpoint of step 5, and redoes 5 steps"),
])
def test_it_is_said_from_where_a_trainer_goes_on(
    commits: dict[str, str], step: int, expected: str
) -> None:
    run = Run(TRAIN, Ranks(Rank(0, step))).commits(**commits)
    assert run.ending.goes_on() == f"the same command goes on from {expected}"


def test_no_checkpoint_is_promised_that_is_not_known() -> None:
    none = "no checkpoint is committed: the same command begins anew"
    perhaps = "the same command goes on from its newest checkpoint, if there is one"
    run = Run(TRAIN, Ranks(Rank(0, 12)))
    assert run.ending.goes_on() == perhaps, "it has not listed any yet"
    assert run.commits().ending.goes_on() == none
    assert run.commits(s10="digest").ending.goes_on() == none
    behind = Run(TRAIN, Ranks(Rank(0, 12), groups=2, group=1)).commits()
    assert behind.ending.goes_on() == perhaps, "another node's rank 0 commits"


def test_a_step_that_no_rank_can_have_written_is_not_told() -> None:
    run = Run(TRAIN, Ranks(Rank(0, 2**64 - 1), Rank(1, 12))).asked().commits(s10="")
    assert "at step 12; the same" in run.last_words() and "redoes 2 steps" in run.last_words()
    run = Run(TRAIN, Ranks(Rank(0, pages.COUNT_MAX + 1))).asked().commits(s10="")
    assert run.last_words().endswith(
        "at a step that is not known; the same command goes on from the checkpoint of step 10")


def test_a_run_that_is_done_says_so_and_a_failure_names_who_failed_first() -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(0)))
    run.state.end(0, "")
    assert run.last_words() == "ends with code 0: every rank is done"
    assert run.terminal.levels == ["good"]
    run = Run(SCRIPT, Ranks(
        Rank(0).ends(1, 9.0, error="late"), Rank(1).ends(137, 1.0, 9, by_us=True),
        Rank(2).ends(0, 0.5), Rank(3).ends(3, 7.0, error="KeyError: 'x'"), Rank(4)))
    run.state.end(3, "the script is at fault")
    assert run.last_words().splitlines() == [
        "ends with code 3: the script is at fault",
        "first to fail: rank 3 (pid 1003), exit code 3, KeyError: 'x'", "its log: /logs/rank-3"]
    assert run.terminal.levels[-3:] == ["error"] * 3
    run = Run(SCRIPT, Ranks(Rank(0).ends(139, number=11)))
    assert run.last_words().splitlines()[0] == "ends with code 1: ", "an end that nobody decided"
    assert "rank 0 (pid 1000), signal SIGSEGV" in run.last_words()


@pytest.mark.parametrize(("number", "name"), [
    (9, "SIGKILL"), (34, "SIGRTMIN"), (40, "40"), (64, "SIGRTMAX")])
def test_a_rank_that_died_of_a_signal_without_a_name_is_told_too(number: int, name: str) -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(128 + number, number=number)))
    assert f"first to fail: rank 0 (pid 1000), signal {name}\n" in run.last_words()


def test_a_run_that_was_asked_to_end_names_no_failure() -> None:
    run = Run(SCRIPT, Ranks(Rank(0, 3).ends(1, error="KeyboardInterrupt"))).asked(signal.SIGINT)
    assert "first to fail" not in run.last_words() and run.terminal.levels == ["warn"]


# ---------------------------------------------------------------- no agent


def test_the_run_starts_by_itself_once_no_agent_had_its_time() -> None:
    run = Run(SCRIPT, Ranks(generation=0))
    run.alone.watch(500.0)  # the imports took long: from then on an agent has its time
    run.alone.watch(500.0 + WITHOUT_AGENT_S - 0.1)
    assert not run.ranks.begun and not run.terminal.lines
    run.alone.watch(500.0 + WITHOUT_AGENT_S)
    run.alone.watch(501.0 + WITHOUT_AGENT_S)
    (begun,) = run.ranks.begun
    assert (begun.generation, begun.ranks, begun.keep, begun.world) == (1, (0, 1), (), 2)
    assert (begun.resume, begun.history, begun.permit_ns) == ({"kind": "own"}, [], 0)
    assert run.terminal.lines == [
        "no agent (none answers): the run goes on unwatched and is not restarted"]


def test_a_trainer_without_an_agent_goes_on_from_its_newest_checkpoint_in_a_newer_generation(
) -> None:
    run = Run(TRAIN, Ranks(generation=0))
    assert not run.state.listed
    run.alone.watch(500.0)
    run.alone.watch(600.0)
    assert not run.ranks.begun, "it has not said where its checkpoints are"
    run.commits(s10="").state.commits["s10"]["generation"] = 4
    run.alone.watch(600.0)
    assert run.ranks.begun[0].generation == 5 and run.ranks.begun[0].resume == {"kind": "fresh"}
    run.state.checkpoint_dir = "/ckpt"
    assert run.alone.resume() == {"kind": "newest", "path": "/ckpt"}


def test_an_agents_time_is_counted_from_when_it_was_lost() -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(3, error="x"), Rank(1)))
    run.link.channel = object()
    run.alone.watch(500.0)
    run.alone.watch(900.0)
    run.link.channel, run.link.lost_s = None, 900.0
    run.alone.watch(900.0 + WITHOUT_AGENT_S - 0.1)
    assert run.state.exit_code is None and not run.terminal.lines
    run.alone.watch(900.0 + WITHOUT_AGENT_S)
    assert run.state.exit_code == 3
    assert run.state.end_reason == (
        "rank 0 failed, and no agent answers that could restart it")


def test_whoever_failed_first_gives_the_code() -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(5, 9.0), Rank(1).ends(7, 3.0), Rank(2).ends(0, 1.0)))
    run.alone.watch(500.0)
    run.alone.watch(500.0 + WITHOUT_AGENT_S)
    assert run.state.exit_code == 7 and run.state.end_reason.startswith("rank 1 failed")


@pytest.mark.parametrize(("argv", "limit_s"), [(TRAIN, WITHOUT_AGENT_S), (MANY, NODES_WAIT_S)])
@pytest.mark.parametrize(("reason", "code"), [
    ("bad_checkpoint: /ckpt/s10: shard 0 does not match", exits.BUDGET_SPENT),
    ("peer_lost: Connection closed by peer", exits.RETRY)])
def test_a_rank_that_waits_for_a_plan_is_not_left_waiting_for_an_agent_that_never_comes(
    argv: tuple[str, ...], limit_s: float, reason: str, code: int
) -> None:
    run = Run(argv, Ranks(Rank(1, parked={"reason": reason}), Rank(0, parked=None)))
    for after_s in (0.0, limit_s - 0.1):
        run.alone.watch(500.0 + after_s)
        assert run.state.exit_code is None
    run.alone.watch(500.0 + limit_s)
    assert run.state.exit_code == code
    assert run.state.end_reason == (
        f"rank 1 waits for a plan ({reason}), and no agent answers that could make one")


def test_a_run_that_trains_unwatched_is_told_once_and_so_is_the_agents_return() -> None:
    run = Run(SCRIPT, Ranks(Rank(0, 7), Rank(1, 7)))
    run.link.problem = "it crashed"
    for now_s in (500.0, 500.0 + WITHOUT_AGENT_S, 600.0):
        run.alone.watch(now_s)
    assert run.terminal.lines == [
        "no agent for 10 s (it crashed): the ranks train on unwatched, and none that ends is "
        "restarted until one answers"]
    run.link.channel = object()
    run.alone.watch(601.0)
    run.alone.watch(602.0)
    assert run.terminal.lines[1:] == ["the agent answers again"]
    assert run.state.exit_code is None and not run.ranks.begun


@pytest.mark.parametrize(("channel", "after_s", "over"), [
    (None, 0.9, False), (None, 1.1, True),
    ("an agent", DONE_WAIT_S - 0.1, False), ("an agent", DONE_WAIT_S + 0.1, True)])
def test_a_run_that_is_done_waits_a_little_for_its_agents_last_word(
    channel: str | None, after_s: float, over: bool
) -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(0), Rank(1)))
    run.link.channel = channel
    run.alone.watch(500.0)
    run.link.lost_s = 550.0
    assert run.state.exit_code is None, "a rank still works"
    run.ranks.processes[1].ends(0)
    run.alone.watch(550.0)
    run.alone.watch(550.0 + after_s)
    assert (run.state.exit_code == 0) is over
    assert run.state.end_reason == ("every rank is done" if over else "")


def test_a_run_that_its_caller_ends_is_not_started_or_ended_for_want_of_an_agent() -> None:
    run = Run(SCRIPT, Ranks(Rank(0).ends(3)))
    run.alone.watch(500.0)
    run.ending.on_signal(signal.SIGTERM, None)
    run.alone.watch(900.0)
    assert run.state.exit_code is None and not run.terminal.lines


def test_a_run_over_nodes_whose_generation_runs_is_not_ended_for_want_of_an_agent() -> None:
    run = Run(MANY, Ranks(Rank(0, 7)))
    run.link.code = exits.CONFIGURATION
    run.alone.watch(500.0)
    run.alone.watch(900.0)
    assert run.state.exit_code is None and "train on unwatched" in run.terminal.lines[0]


def test_over_nodes_it_waits_for_an_agent_a_minute_and_then_says_why_it_leaves() -> None:
    run = Run(MANY, Ranks(generation=0))
    for after_s in (0.0, WITHOUT_AGENT_S - 0.1, WITHOUT_AGENT_S, NODES_WAIT_S - 0.1):
        run.alone.watch(500.0 + after_s)
        assert len(run.terminal.lines) == (after_s >= WITHOUT_AGENT_S)
    assert run.terminal.lines == [
        "no agent (none answers): waiting for one, as this run is over 2 nodes"]
    assert run.state.exit_code is None and not run.ranks.begun
    run.link.problem = "it crashed"
    run.alone.watch(500.0 + NODES_WAIT_S)
    assert run.state.exit_code == exits.RETRY and not run.ranks.begun
    assert run.state.end_reason == (
        "no agent for 60 s (it crashed), and a run over nodes starts with one alone")


def test_one_nodes_run_starts_by_itself_though_its_agents_configuration_is_wrong() -> None:
    run = Run(SCRIPT, Ranks(generation=0))
    run.link.code, run.link.problem = exits.CONFIGURATION, "bad config"
    run.alone.watch(500.0)
    run.alone.watch(500.0 + WITHOUT_AGENT_S)
    assert run.state.exit_code is None and len(run.ranks.begun) == 1
    over = Run(MANY, Ranks(generation=0))
    over.link.code, over.link.problem = exits.CONFIGURATION, "bad config"
    over.alone.watch(500.0)
    assert (over.state.exit_code, over.state.end_reason) == (exits.CONFIGURATION, "bad config")


def test_a_run_that_waits_to_start_is_not_begun_a_second_time() -> None:
    run = Run(SCRIPT, Ranks(generation=0))
    run.ranks.waiting = "its agent's start, until older ranks are gone"
    run.alone.watch(500.0)
    run.alone.watch(600.0)
    assert not run.ranks.begun and run.state.exit_code is None


# ---------------------------------------------------------------- checkpoints


def test_what_the_rank_0_here_read_back_is_known_whoever_committed_it() -> None:
    state = Run(TRAIN, Ranks()).state
    state.take_commit({"path": "/c/step-000000005.gen-1", "generation": 1, "step": 5, "world": 2})
    for path in ("/c/step-000000005.gen-1", "/c/step-000000010.gen-2", "/c/other"):
        state.take_verified({"path": path})
    assert state.newest_commits() == [
        {"path": "/c/step-000000005.gen-1", "generation": 1, "step": 5, "world": 2, "bad": "",
         "verified": True},
        {"path": "/c/step-000000010.gen-2", "generation": 2, "step": 10, "world": 0, "bad": "",
         "verified": True}]


def test_a_launcher_does_not_remember_every_checkpoint_of_a_year() -> None:
    state = Run(TRAIN, Ranks()).state
    for step in range(1000):
        state.take_commit({"path": f"p{step}", "generation": 1, "step": step, "world": 2})
        assert len(state.commits) <= run_state.COMMITS_KEPT
    assert [one["step"] for one in state.newest_commits()] == [*range(900, 1000)]
