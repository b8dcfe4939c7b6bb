"""`holdfast run --on NODE,...`: the same command on other nodes too, by the agents.

Owns what goes along (arguments, folder, a few variables), this node's launcher as a child, and how
they all end.  When the command dies, all launchers go on without it.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from holdfast.worker import naming, stderr
from holdfast.worker.exits import CONFIGURATION, DONE, FAILED, RETRY

from .client import Agent, asking, node_socket, owned, reach
from .text import Failure, count, harmless, print_json

OURS = ("--on", "--env")
PER_NODE = ("--local-addr", "--node-rank")
# What a job's libraries read.  Of these names those that look like a secret stay here: what goes to
# other nodes is signed on its way, and not encrypted.  So do those that differ from node to node.
CARRIED = re.compile(
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|VIRTUAL_ENV|CONDA_PREFIX|HOLDFAST_TEAM|HOLDFAST_QUEUED_AT"
    r"|(NCCL|GLOO|TORCH|TORCHINDUCTOR|TORCHDYNAMO|TRITON|OMP|MKL|FI|NEURON|XLA|CUDA|HSA|RCCL|PET)"
    r"_[A-Z0-9_]+")
STAYS = re.compile(
    r"TOKEN|SECRET|PASSW|CREDENTIAL|(^|_)KEY($|_)|_VISIBLE_|^PET_(NODE_RANK|LOCAL_ADDR)$")
LOOK_S, POLL_S = 2.0, 0.1
BEGIN_LOOK_S, BEGINS_S = 0.3, 16.0  # for all to begin; an agent gives its `holdfast accept` 12
ASK_S = 60.0  # thousands of nodes are asked a few at a time
GONE_S = 15.0  # of a `holdfast accept` that is not there; it is back a second after its agent
TELL_S = 5.0  # behind this node's launcher, before a person is told that others go on
END_TRIES = 5
LATE_S = 15.0  # beyond the grace, for the others to end
GRACE_S = 30.0  # the launcher's own
# As worker/rank/rank.py has them; a test holds both equal.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
           signal.SIGHUP)


def is_carried(name: str) -> bool:
    """Whether a variable of this name goes along by itself."""
    return bool(CARRIED.fullmatch(name)) and not STAYS.search(name)


class Wanted(NamedTuple):
    """A command line of `run` or `train`, less what is for this module."""

    nodes: list[str]
    arguments: list[str]
    environment: dict[str, str]
    run: str
    grace_s: float
    least: int  # nodes without which nothing can begin


def split(argv: Sequence[str], values: frozenset[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Flags of the launcher's region by name, and the words less OURS.  `values`: flags that take
    none."""
    found: dict[str, list[str]] = {}
    kept: list[str] = []
    words = list(argv)
    while words and words[0].startswith("-") and words[0] != "--":
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        taken = [word]
        if not equals and flag not in values and words:
            value = words.pop(0)
            taken.append(value)
        found.setdefault(flag, []).append(value)
        kept += [] if flag in OURS else taken
    return found, kept + words


def wanted(command: str, argv: Sequence[str], environ: Mapping[str, str],
           without_value: frozenset[str], own: str = "") -> Wanted:
    """`own`: this node's name, whose launcher is this command's.  Raises Failure (78) for what
    cannot be meant."""
    flags, rest = split(argv, without_value)
    if "--on" not in flags:
        raise Failure("--env is for other nodes: it belongs to --on NODE,...", CONFIGURATION)
    nodes = [one for text in flags["--on"] for one in text.split(",") if one and one != own]
    if not nodes:
        raise Failure("--on: name other nodes, as in --on node-b,node-c, or all", CONFIGURATION)
    for flag in PER_NODE:
        if flag in flags:
            raise Failure(f"{flag} differs from node to node: leave it out, or give each node its "
                          "own command", CONFIGURATION)
    before = []
    nnodes = (flags.get("--nnodes") or [environ.get("PET_NNODES", "")])[-1]
    if not nnodes:
        if "all" in nodes:
            raise Failure("--on all: say with --nnodes MIN:MAX how many of them it needs",
                          CONFIGURATION)
        nnodes = str(len(set(nodes)) + 1)
        before += ["--nnodes", nnodes]
    counted = naming.NNODES.fullmatch(nnodes)
    target = _target(rest, without_value)
    given, rdzv_id = ((flags.get(one) or [""])[-1] for one in ("--run", "--rdzv-id"))
    try:
        name = naming.run_name(given, rdzv_id, "train" if command == "train" else target, environ)
    except ValueError as error:
        raise Failure(str(error), CONFIGURATION) from error
    try:
        grace_s = float((flags.get("--grace") or [str(GRACE_S)])[-1])
    except ValueError:
        grace_s = GRACE_S  # the launcher says what is wrong with it
    return Wanted(nodes, [*before, "--run", name, *rest], _environment(flags, environ), name,
                  grace_s, int(counted.group(1)) if counted else 1)


def _target(words: Sequence[str], without_value: frozenset[str]) -> str:
    rest = list(words)
    while rest and rest[0].startswith("-"):
        flag, equals, _ = rest.pop(0).partition("=")
        if flag != "--" and not equals and flag.replace("_", "-") not in without_value and rest:
            rest.pop(0)
    return rest[0] if rest else "run"


def _environment(flags: Mapping[str, list[str]], environ: Mapping[str, str]) -> dict[str, str]:
    found = {name: text for name, text in environ.items() if is_carried(name)}
    for given in flags.get("--env", []):
        name, equals, text = given.partition("=")
        if not equals and name not in environ:
            raise Failure(f"--env {name}: it is not set here", CONFIGURATION)
        found[name] = text if equals else environ[name]
    return found


class Others:
    """The same run on the other nodes, as this node's agent tells it."""

    def __init__(self, agent: Agent, asked: Wanted, command: str) -> None:
        self._agent, self._asked, self._command = agent, asked, command
        # Where an order of this command was taken.  A node that refused it may have a run of the
        # same name that is hours of work: that one is never ended for it.
        self.taken: list[str] = []
        self.going: list[str] = []
        self.codes: dict[str, int] = {}
        self._looked_s = 0.0
        self._missed_s: dict[str, float] = {}

    def _post(self, verb: str, nodes: Sequence[str], **more: Any) -> dict[str, dict[str, Any]]:
        said = self._agent.post(f"/api/v1/starts/{verb}",
                                {"nodes": list(nodes), "run": self._asked.run, **more})
        return {str(node): dict(row) for node, row in said["nodes"].items()}

    def start(self) -> None:
        """Raises Failure (75) where too few begin, or somebody wants the end; those that did begin
        are ended again, and so is what begins late."""
        asked = self._asked
        order = {"run": asked.run, "command": self._command, "arguments": asked.arguments,
                 "folder": os.getcwd(), "environment": asked.environment}
        rows = self._post("start", asked.nodes, order=order)
        self.taken = sorted(node for node, row in rows.items() if row["state"] == "queued")
        until_s = time.monotonic() + BEGINS_S
        told: set[str] = set()
        while True:
            told |= self._tell_begun(rows, told)
            waited = [node for node in rows if node not in told]
            if not waited or time.monotonic() > until_s:
                break
            if signal.sigtimedwait(signals(), BEGIN_LOOK_S) is not None:
                raise Failure("asked to end before all had begun: they are ended", RETRY)
            rows = {**rows, **self._post("look", waited)}
        for node in waited:
            say(f"{node}: not started: {rows[node]['text'] or 'no word of it'}")
        if len(self.going) + 1 < asked.least:
            raise Failure(f"{count(len(self.going) + 1, 'node')} of {asked.least} that the run "
                          "needs: nothing is started", RETRY)

    def _tell_begun(self, rows: Mapping[str, dict[str, Any]], told: set[str]) -> set[str]:
        """Says how each began, once."""
        found = {node for node, row in rows.items()
                 if node not in told and row["state"] not in ("queued", "")}
        for node in sorted(found):
            state, text = rows[node]["state"], rows[node]["text"]
            if state == "running":
                self.going = sorted([*self.going, node])
                say(f"{node}: started ({text})")
            elif state == "ended":
                self.codes[node] = int(rows[node]["code"])
                say(f"{node}: its launcher ended with {self.codes[node]} at once; its words are "
                    "where `holdfast accept` writes")
            else:
                say(f"{node}: not started: {text}")
        return found

    def end(self, nodes: Sequence[str]) -> None:
        """Asks the launchers of these nodes to end; again where the agent has no time."""
        for left in reversed(range(END_TRIES if nodes else 0)):
            try:
                self._post("end", nodes)
                return
            except (OSError, Failure, LookupError, TypeError) as error:
                if not left:
                    say(f"{', '.join(nodes)}: not told to end: {error}; `holdfast end "
                        f"{self._asked.run}` on any node does")
                else:
                    time.sleep(1.0)

    def look(self, own_lives: bool) -> None:
        """Tells each that has ended since the last look, every two seconds."""
        now_s = time.monotonic()
        if not self.going or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            rows = self._post("look", self.going)
        except (OSError, Failure, LookupError, TypeError) as error:
            rows = {node: {"state": "", "text": str(error)} for node in self.going}
        for node, row in rows.items():
            if row["state"] == "ended":
                self.going.remove(node)
                self.codes[node] = int(row["code"])
                say(f"{node}: its launcher ended with {row['code']}")
            elif row["state"] in ("running", "queued") or not row["state"] and own_lives:
                # An agent that is away: the run is not, and while it is here nobody need be sure.
                self._missed_s.pop(node, None)
            elif now_s - self._missed_s.setdefault(node, now_s) > GONE_S:
                self.going.remove(node)
                say(f"{node}: {row['text']}")


def say(text: str) -> None:
    """Whoever reads it may leave: that ends nothing here, and nothing on the other nodes."""
    stderr.say(f"holdfast  {harmless(text)}")


@asking
def start_on(command: str, argv: Sequence[str], launcher: Sequence[str],
             environ: Mapping[str, str], without_value: frozenset[str]) -> int:
    """Starts all, and waits for all; the exit code is the run's.  `launcher`: this node's own, to
    which the arguments are added."""
    wanted(command, argv, environ, without_value)  # what is wrong with it is said first
    path = node_socket(environ)
    owned(path, environ)
    if not path.exists():
        raise Failure(f"--on goes by the node's agent, and none answers at {path}: start it "
                      "(docs/cluster.md), or give the command to each node by srun or ssh",
                      CONFIGURATION)
    agent = Agent(path, ASK_S)
    asked = wanted(command, argv, environ, without_value, str(agent.get("/api/v1/status")["node"]))
    others = Others(agent, asked, command)
    # Taken one by one below; the launcher unblocks them once it has handlers of its own.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals())
    try:
        others.start()
        # In a group of its own: what is sent to this one is handed on once, whoever sent it.
        own = subprocess.Popen([*launcher, *asked.arguments], env=dict(environ),
                               stdin=subprocess.DEVNULL, process_group=0)
    except (OSError, Failure, LookupError, TypeError) as error:
        others.end(others.taken)
        if isinstance(error, Failure):
            raise
        raise Failure(f"not started: {error}", CONFIGURATION) from error
    return _until_the_end(own, others, asked)


def signals() -> set[signal.Signals]:
    """Those that ask for the end; under `nohup` a terminal that is closed does not."""
    return {one for one in SIGNALS if signal.getsignal(one) != signal.SIG_IGN}


@asking
def end(options: argparse.Namespace) -> int:
    """`holdfast end RUN`: for whoever has no terminal with the command any more.  However it was
    started: its launchers are asked to leave with 75, each with its grace."""
    found = reach()
    here = [agent for agent, answer in found
            if any(run["run"] == options.run for run in answer["runs"])]
    agent = (here or [found[0][0]])[0]._replace(timeout_s=ASK_S)
    said = agent.post("/api/v1/starts/end", {"nodes": ["all"], "run": options.run})
    rows = {str(node): dict(row) for node, row in said["nodes"].items()}
    told = {node: row for node, row in rows.items() if row["state"] in ("running", "ended")}
    other = {node: row for node, row in rows.items()
             if node not in told and not str(row["text"]).startswith("no run ")}
    if options.json:
        print_json({"run": options.run, "nodes": rows})
    else:
        for node, row in sorted(told.items()):
            going = row["state"] == "running"
            print(f"{node}: {'told to end' if going else 'ended with ' + str(row['code'])}")
        for node, row in sorted(other.items()):
            print(f"{node}: {harmless(row['text'])}")
    if told and not any(row["state"] == "" for row in other.values()):
        return DONE
    if not told and not options.json:
        raise Failure(f"no node that answers has a launcher of yours of a run {options.run}")
    return FAILED


def _until_the_end(own: subprocess.Popen[bytes], others: Others, asked: Wanted) -> int:
    times, until_s, over_s, told = 0, math.inf, math.inf, False
    while own.poll() is None or others.going:
        got = signal.sigtimedwait(signals(), POLL_S)
        if got is not None:
            times += 1
            if own.poll() is None:
                own.send_signal(got.si_signo)
            if times == 1:
                until_s = time.monotonic() + asked.grace_s + LATE_S
                others.end(others.going)
        if own.poll() is not None:
            over_s = min(over_s, time.monotonic())
        if others.going and time.monotonic() - over_s > TELL_S and not (times or told):
            told = True
            say(f"this node's launcher ended with {_code(own)}; the run is still on "
                f"{', '.join(others.going)}: Ctrl-C ends it there")
        others.look(own.poll() is None)
        over = time.monotonic() > until_s or times > 1
        if own.poll() is not None and others.going and over:
            say(f"{', '.join(others.going)}: not heard to have ended; `holdfast end "
                f"{asked.run}` asks again")
            break
    mine = _code(own)
    return mine if times or DONE not in others.codes.values() else DONE


def _code(own: subprocess.Popen[bytes]) -> int:
    code = own.wait()
    return code if code >= 0 else 128 - code
