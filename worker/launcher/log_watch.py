"""The ranks' logs while the run goes on: where each generation's lines begin, and who reads them.

Owns the begin of each generation's lines in each rank's two files, and one standing child that
reads them: at once when the agent wants a diagnosis, and a bounded sample every SAMPLE_S.  The
launcher's loop never waits for the child: one that does not answer is killed, and its question
fails.  Nothing is read or judged here.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple

from ..wire import Packet, cut
from . import forking
from .agent_link import own_module
from .process import StartCommand
from .rank_processes import RankProcesses

STREAMS = ("stdout.log", "stderr.log")
GENERATIONS_KEPT = 8
SAMPLE_S = 15.0
FIRST_S = 5.0  # a child's begin costs processor time: not while ranks begin, nor come back
ANSWER_S = 30.0  # on a machine that is short of processors; the agent waits 32
PAUSE_S = 30.0  # after a child that died or did not answer
END_S = 1.0
NICENESS = 10
ANSWER_LIMIT = 1 << 16
KINDS_MAX = 64
SEEN_MAX = 8
QUEUE_MAX = 8
FULL_BYTES_S = 65536

Done = Callable[[bool, str], None]


class Question(NamedTuple):
    """What is asked of the child."""

    number: int
    body: Dict[str, Any]
    done: Done


def lower_priority(pid: int) -> None:
    """Below everybody else: its first answer is wanted while ranks come back.  In a session of its
    own a process is weighed by its group's niceness, where the kernel groups by session."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
        with open("/proc/%d/autogroup" % pid, "w") as file:
            file.write("%d" % NICENESS)
    except OSError:
        return  # no such grouping here, or the child is gone already


def drop_answer(ok: bool, text: str) -> None:
    """What becomes of a sample: it is in the level."""


class LogWatch:
    """The log child of one launcher and what it said."""

    def __init__(self, ranks: RankProcesses, log_dir: str, environ: Dict[str, str],
                 selector: selectors.BaseSelector) -> None:
        self.ranks, self.log_dir, self.environ, self.selector = ranks, log_dir, environ, selector
        self.enabled = True
        self.sample_bytes_s = FULL_BYTES_S
        self.own: List[Any] = []  # the operator's signatures; checked by the agent
        self.own_sent = True  # the child that runs has them
        self.begins: Dict[int, Dict[int, Tuple[int, int]]] = {}  # generation -> rank -> offsets
        self.ended_s: Dict[Tuple[int, int], float] = {}  # (generation, rank) -> when
        self.process: Optional[subprocess.Popen[bytes]] = None
        self.dying: List[int] = []  # killed, and not reaped yet
        self.output = b""
        self.queue: List[Question] = []
        self.asked: Optional[Question] = None
        self.asked_s = 0.0
        self.numbers = 0
        self.pause_until_s = 0.0
        self.sampled_s = 0.0
        self.cpu_before_s = 0.0  # of children that are gone
        self.summary: Dict[str, Any] = {"read_bytes": 0, "skipped_bytes": 0, "cpu_s": 0.0,
                                        "rss_bytes": 0, "failures": 0, "problem": ""}
        self.lines: Dict[Tuple[str, str, str], int] = {}
        self.seen: List[Dict[str, Any]] = []

    # ------------------------------------------------------------------ where lines are

    def begin_generation(self, command: StartCommand) -> None:
        """Called before its ranks write anything: what stands in the files now is older."""
        self.note_ends()
        self.begins[command.generation] = {rank: self.sizes(rank) for rank in command.ranks}
        for old in sorted(self.begins)[:-GENERATIONS_KEPT]:
            del self.begins[old]
        self.ended_s = {key: at for key, at in self.ended_s.items() if key[0] in self.begins}
        self.sampled_s = self.sampled_s or time.monotonic()

    def sizes(self, rank: int) -> Tuple[int, int]:
        return self.size(rank, STREAMS[0]), self.size(rank, STREAMS[1])

    def size(self, rank: int, name: str) -> int:
        try:
            return os.path.getsize(os.path.join(self.log_dir, "rank-%d" % rank, name))
        except OSError:
            return 0  # not there yet

    def note_ends(self) -> None:
        """Who ended first: where lines carry no time, that is their order."""
        for process in self.ranks.processes:
            if process.over is not None and process.rank >= 0:
                key = (process.generation, process.rank)
                self.ended_s.setdefault(key, process.over["boot_s"])

    def places(self, generation: int) -> List[List[int]]:
        """[rank, begin and end in stdout.log, the same in stderr.log]; -1: as far as it goes."""
        rows = []
        for rank, begin in self.begins.get(generation, {}).items():
            later = [g for g in sorted(self.begins) if g > generation and rank in self.begins[g]]
            end = self.begins[later[0]][rank] if later else (-1, -1)
            rows.append([rank, begin[0], end[0], begin[1], end[1]])
        never = float("inf")
        return sorted(rows, key=lambda row: (self.ended_s.get((generation, row[0]), never), row))

    # ------------------------------------------------------------------ asking

    def configure(self, packet: Packet) -> None:
        """The agent's word: whether to read, how much, and the operator's own signatures."""
        own = packet.get("own")
        self.enabled = bool(packet.get("read", True))
        rate = packet.get("sample_bytes_s", FULL_BYTES_S)
        rate = rate if isinstance(rate, int) else FULL_BYTES_S
        self.sample_bytes_s = min(max(0, rate), FULL_BYTES_S)
        if isinstance(own, list) and own != self.own:
            self.own, self.own_sent = own, False

    def diagnose(self, generation: int, done: Done) -> None:
        """Asks what this generation's lines say; `done(ok, JSON or problem)` comes later."""
        self.note_ends()
        places = self.places(generation)
        if not self.enabled or not places:
            done(False, "logs are not read" if places else "no lines of generation %d are known"
                 % generation)
        elif len(self.queue) >= QUEUE_MAX or time.monotonic() < self.pause_until_s:
            done(False, self.summary["problem"] or "the log child is busy")
        else:
            self.queue.append(self.question("diagnose", places, done))
            self.tend(time.monotonic())

    def question(self, what: str, places: List[List[int]], done: Done, **more: Any) -> Question:
        self.numbers += 1
        body = {"n": self.numbers, "do": what, "folder": self.log_dir, "ranks": places}
        return Question(self.numbers, dict(body, **more), done)

    def tend(self, now_s: float) -> None:
        """One turn: ends what is overdue, then asks what waits."""
        self.dying = [pid for pid in self.dying if forking.reap(pid) is None]
        if self.asked is not None:
            if now_s - self.asked_s > ANSWER_S:
                self.fail("the log child did not answer within %g s" % ANSWER_S)
            return
        if not self.queue:
            self.sample(now_s)
        if self.queue:
            self.ask(self.queue.pop(0), now_s)

    def sample(self, now_s: float) -> None:
        """Every SAMPLE_S, while ranks of the newest generation run; sooner where no child has begun
        yet, so that one stands ready for the first question."""
        elapsed_s = now_s - self.sampled_s
        due_s = SAMPLE_S if self.process is not None else FIRST_S
        if not self.begins or not self.sampled_s or elapsed_s < due_s:
            return
        self.sampled_s = now_s
        running = any(p.assigned and p.ended is None for p in self.ranks.processes)
        if running and self.enabled and self.sample_bytes_s and now_s >= self.pause_until_s:
            nbytes = int(self.sample_bytes_s * min(elapsed_s, SAMPLE_S))
            places = self.places(max(self.begins))
            self.queue.append(self.question("sample", places, drop_answer, bytes=nbytes))

    def ask(self, question: Question, now_s: float) -> None:
        if self.process is None and not self.start(now_s):
            question.done(False, self.summary["problem"])
            return
        assert self.process is not None and self.process.stdin is not None
        body = dict(question.body) if self.own_sent else dict(question.body, own=self.own)
        data = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        self.asked, self.asked_s = question, now_s
        try:
            # One question is under way at a time, so the pipe is empty and holds 64 KiB.
            whole = os.write(self.process.stdin.fileno(), data) == len(data)
        except OSError:
            whole = False
        self.own_sent = True
        if not whole:
            self.fail("the log child takes no question")

    # ------------------------------------------------------------------ the child

    def start(self, now_s: float) -> bool:
        if now_s < self.pause_until_s or self.dying:
            self.summary["problem"] = self.summary["problem"] or "the last log child does not end"
            return False
        command, environ = own_module("holdfast.agent.logs.child", self.environ)
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
                stderr=subprocess.DEVNULL, env=environ, start_new_session=True)
        except OSError as error:
            self.failed("the log child did not start: %s" % error, now_s)
            return False
        self.process.returncode = 0  # reaped here, not by subprocess
        lower_priority(self.process.pid)
        assert self.process.stdin is not None and self.process.stdout is not None
        for pipe in (self.process.stdin, self.process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self.selector.register(self.process.stdout.fileno(), selectors.EVENT_READ, self)
        self.output, self.own_sent = b"", not self.own
        return True

    def read(self) -> None:
        """Takes what the child wrote; its end of file is its end."""
        if self.process is None or self.process.stdout is None:
            return  # given up since the poll
        try:
            piece = os.read(self.process.stdout.fileno(), ANSWER_LIMIT)
        except BlockingIOError:
            return
        self.output += piece
        if not piece or len(self.output) > ANSWER_LIMIT:
            self.fail("the log child ended" if not piece else "the log child says too much")
            return
        while b"\n" in self.output:
            line, _, self.output = self.output.partition(b"\n")
            self.answered(line)

    def answered(self, line: bytes) -> None:
        question, self.asked = self.asked, None
        try:
            answer = json.loads(line)
            if "error" in answer:
                raise ValueError(answer["error"])
            if question is None or answer["n"] != question.number:
                raise ValueError("an answer that nobody asked for")
            self.take(answer)
            detail = json.dumps(answer["detail"]) if "detail" in answer else ""
        except (ValueError, KeyError, TypeError) as error:
            if question is not None:
                question.done(False, "the log child: %s" % cut(str(error), 200))
            return
        question.done(True, detail)

    def take(self, answer: Packet) -> None:
        """Adds one answer to the level."""
        level = self.summary
        level["read_bytes"] += int(answer["read"])
        level["skipped_bytes"] += int(answer.get("skipped", 0))
        level["cpu_s"] = round(self.cpu_before_s + float(answer["cpu_s"]), 3)
        level["rss_bytes"] = int(answer["rss_bytes"])
        level["problem"] = cut(str(answer.get("problem") or ""), 200)
        for signature, role, culprit, count in answer.get("lines", ()):
            key = (str(signature), str(role), str(culprit))
            if key in self.lines or len(self.lines) < KINDS_MAX:
                self.lines[key] = self.lines.get(key, 0) + int(count)
        self.seen = [*self.seen, *answer.get("seen", ())][-SEEN_MAX:]

    def level(self) -> Optional[Dict[str, Any]]:
        """What the agent is told; None while nothing is to be read."""
        if not self.enabled:
            return None
        lines = [[*key, count] for key, count in sorted(self.lines.items())]
        return dict(self.summary, lines=lines, seen=self.seen)

    def fail(self, why: str) -> None:
        """The child is given up; the next question starts another, after a pause."""
        self.drop()
        self.failed(why, time.monotonic())
        question, self.asked = self.asked, None
        if question is not None:
            question.done(False, why)

    def failed(self, why: str, now_s: float) -> None:
        self.summary["failures"] += 1
        self.summary["problem"] = why
        self.pause_until_s = now_s + PAUSE_S

    def drop(self) -> None:
        """Kills the child; one that does not die is not waited for."""
        process, self.process = self.process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        self.selector.unregister(process.stdout.fileno())
        process.stdin.close()
        process.stdout.close()
        self.cpu_before_s, self.summary["rss_bytes"] = self.summary["cpu_s"], 0
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.dying.append(process.pid)

    def pids(self) -> List[int]:
        """Processes of ours, so that nobody takes them for orphans."""
        return [*self.dying, *([self.process.pid] if self.process is not None else [])]

    def end(self) -> None:
        """Leaves no child; bounded, because one in state D does not end."""
        self.drop()
        deadline_s = time.monotonic() + END_S
        while self.dying and time.monotonic() < deadline_s:
            self.dying = [pid for pid in self.dying if forking.reap(pid) is None]
            time.sleep(0.005)  # bounded to 1 s; a killed child is gone within microseconds
