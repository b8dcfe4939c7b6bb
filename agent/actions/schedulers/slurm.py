"""Slurm: drains this node for a failed check, and gives it back when the check passes again.

Owns the calls of scontrol, each with a deadline, and the file that says whether marks of ours stand
there, so that a node that is well asks slurmctld nothing.  What may be drained says
agent/core/checks/fleet.py.  It changes this node alone, and no comment and no drain that is not
ours.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import syslog
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ...core.checks import fleet
from ...core.checks.fleet import ANNOUNCE, DRAIN, WAIT, Decision, FleetNode
from ...core.checks.verdict import CRITICAL, OK, WARNING, CheckVerdict
from ...core.model import Settings

NODE = "SLURMD_NODENAME"  # slurmd sets it for a Prolog and for HealthCheckProgram
PLACES = "/usr/bin:/bin:/usr/local/bin:/opt/slurm/bin"  # HealthCheckProgram gets no PATH
CALL_S = 5.0
ANSWER_MAX_BYTES = 32 << 20  # 0.7 kB a node
FILE = "slurm.json"
RETURNS_MAX, RETURNS_WITHIN_S = 3, 86400.0  # a node that comes and goes is a person's to judge
FIELD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
SET_BY = re.compile(r" \[[^\]]*@[^\]]*\]$")  # which scontrol adds to a reason


class Marks(msgspec.Struct):
    """`stand`: an announcement or a drain of ours may be in Slurm; `returned_wall_s`: when this
    node was given back."""

    stand: bool = False
    returned_wall_s: list[float] = []


class Slurm:
    """One node's view of its cluster.  `wait_s`, `share` and `settings` as in fleet.decide."""

    def __init__(self, folder: Path, wait_s: float, share: float, settings: Settings,
                 environ: Mapping[str, str]) -> None:
        self._node = environ[NODE]
        self._file = folder / FILE
        self._wait_s = wait_s
        self._share = share
        self._settings = settings
        self._environ = environ
        self._marks = _marks(self._file)

    def settle(self, verdicts: Sequence[CheckVerdict], prolog: bool) -> tuple[bool, str]:
        """Whether this node is refused, and what happened, in words.  A Prolog waits out a short
        announcement: those of a job's other nodes run at the same moment.  Slurm drains a node
        whose Prolog fails, whatever our share of drained ones: with our reason it comes back."""
        sick = next((one for one in verdicts if one.status == CRITICAL and one.confirmed), None)
        self._share = 1.0 if prolog else self._share
        try:
            if sick is None:
                return False, self._well(verdicts) if self._marks.stand else ""
            decision = self._decided(sick)
            if prolog and decision.act in (ANNOUNCE, WAIT):
                time.sleep(self._wait_s)
                decision = self._decided(sick)
            return decision.refuses, decision.why
        except (OSError, subprocess.TimeoutExpired) as error:
            return False, f"nothing is drained: Slurm does not answer: {error}"

    def _decided(self, sick: CheckVerdict) -> Decision:
        """Looks at all nodes and does what follows for this one."""
        now_s = time.time()
        nodes = self._nodes()
        decision = fleet.decide(self._node, sick.check, sick.reason, nodes, now_s, self._wait_s,
                                self._share, self._settings)
        if decision.act == ANNOUNCE:
            self._announce(nodes, fleet.announcement(sick.check, now_s))
        elif decision.act == DRAIN:
            self._keep(stand=True)
            self._update(state="drain", reason=decision.why)
        elif decision.tells:
            syslog.syslog(syslog.LOG_WARNING, f"holdfast: {decision.why}")
            self._announce(nodes, f"{fleet.announcement(sick.check, now_s)}: {decision.why}")
        return decision

    def _announce(self, nodes: Sequence[FleetNode], comment: str) -> None:
        here = next(one for one in nodes if one.name == self._node)
        if here.comment and not fleet.check_of(here.comment):
            raise OSError(f"this node's comment is somebody's: {here.comment[:80]}")
        self._keep(stand=True)
        self._update(comment=comment)

    def _well(self, verdicts: Sequence[CheckVerdict]) -> str:
        """Takes back what this node left in Slurm, once the check that it named has passed."""
        here = next(iter(self._nodes(self._node)), FleetNode(self._node))
        passed = {one.check for one in verdicts if one.status in (OK, WARNING)}
        drained_for = fleet.check_of(here.reason) if here.drained else ""
        announced = fleet.check_of(here.comment)
        if {drained_for, announced} - {""} - passed:
            return ""  # not looked at again yet
        if announced:
            self._update(comment="")
        now_s = time.time()
        lately = [one for one in self._marks.returned_wall_s if now_s - one < RETURNS_WITHIN_S]
        if drained_for and len(lately) >= RETURNS_MAX:
            return (f"{drained_for} passes again, and was given back {len(lately)} times in a day: "
                    f"look at it, then scontrol update nodename={self._node} state=resume")
        if drained_for:
            self._update(state="resume")
            lately.append(now_s)
        self._keep(stand=False, returned_wall_s=lately)
        return f"{drained_for} passes again: given back" if drained_for else ""

    def _nodes(self, name: str = "") -> list[FleetNode]:
        rows = (dict(FIELD.findall(line)) for line in
                self._scontrol("-o", "show", "node", *([name] if name else [])).splitlines())
        return [FleetNode(
            row["NodeName"], tuple(row.get("Partitions", "").strip().split(",")),
            "DRAIN" in row.get("State", ""), SET_BY.sub("", row.get("Reason", "")).strip(),
            row.get("Comment", "").strip(),
        ) for row in rows if row.get("NodeName")]

    def _update(self, **fields: str) -> None:
        self._scontrol("update", f"nodename={self._node}",
                       *(f"{name}={value}" for name, value in fields.items()))

    def _scontrol(self, *words: str) -> str:
        places = f"{self._environ.get('PATH', '')}:{PLACES}"
        program = shutil.which("scontrol", path=places)
        if program is None:
            raise FileNotFoundError("there is no scontrol")
        done = subprocess.run([program, *words], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=CALL_S, check=False, env=dict(self._environ))
        if done.returncode:
            raise OSError((done.stderr or done.stdout).decode("utf-8", "replace").strip()[:200])
        return done.stdout[:ANSWER_MAX_BYTES].decode("utf-8", "replace")

    def _keep(self, **changed: object) -> None:
        """Before Slurm is asked: a mark that is not remembered would stand for ever."""
        for name, value in changed.items():
            setattr(self._marks, name, value)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(self._marks))
        new.replace(self._file)


def _marks(file: Path) -> Marks:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Marks)
    except (OSError, ValueError, msgspec.MsgspecError):
        return Marks()
