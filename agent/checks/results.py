"""What checks said last: the cache, a short history, and what passed, as a baseline.

Owns results.json below the state directory, one writer at a time, replaced as a whole.  A file that
cannot be read counts as none, and one that cannot be written costs the memory alone: a check is
made all the same.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..core.checks.verdict import CRITICAL, OK, UNKNOWN, CheckVerdict, Measure
from ..system.regular import read_regular

FILE = "results.json"
FLEET_FILE = "fleet.json"  # what other nodes measured, as this node's agent wrote it down
FILE_MAX_BYTES = 8 << 20
HISTORY_MAX = 32  # of one check
PASSES_MAX = 64  # of one measure
MEASURES_MAX = 2048
TABLE_MAX = 400  # lines
NOT_AGAIN = "; not proven since: "


class Past(msgspec.Struct, frozen=True):
    """One verdict of the past, for people."""

    wall_s: float
    status: str
    value: float | None = None
    unit: str = ""


Fleet = dict[str, list[tuple[float, ...]]]  # as Results.baseline, one row a node


class Results(msgspec.Struct):
    """`baseline`: "machine|measure|subject" -> samples of each pass, oldest first."""

    boot_id: str = ""
    verdicts: dict[str, CheckVerdict] = {}
    history: dict[str, list[Past]] = {}
    baseline: dict[str, list[list[float]]] = {}

    def fresh(self, name: str, boot_id: str, now_s: float, max_age_s: float) -> CheckVerdict | None:
        """The last verdict, where it is of this boot and young enough."""
        found = self.verdicts.get(name)
        if found is None or boot_id != self.boot_id or not 0 <= now_s - found.wall_s <= max_age_s:
            return None
        return found

    def passes(self, machine: str, measure: Measure) -> Sequence[Sequence[float]]:
        return self.baseline.get(key_of(machine, measure), ())

    def take(self, verdict: CheckVerdict) -> CheckVerdict:
        """What stands from now on."""
        past = self.history.setdefault(verdict.check, [])
        past.append(Past(verdict.wall_s, verdict.status, verdict.value, verdict.unit))
        del past[:-HISTORY_MAX]
        found = standing(self.verdicts.get(verdict.check), verdict, time.time())
        self.verdicts[verdict.check] = msgspec.structs.replace(
            found, table=found.table[:TABLE_MAX])
        return found

    def learn(self, machine: str, verdict: CheckVerdict) -> None:
        """Only from what passed: a slow node must not teach that slow is usual."""
        for one in verdict.measures if verdict.status == OK else ():
            key = key_of(machine, one)
            if key in self.baseline or len(self.baseline) < MEASURES_MAX:
                passes = self.baseline.setdefault(key, [])
                passes.append(list(one.samples) or [one.value])
                del passes[:-PASSES_MAX]


def standing(last: CheckVerdict | None, new: CheckVerdict, now_s: float) -> CheckVerdict:
    """Which of two verdicts on one check holds: the newer, except that an unknown takes no proof
    away, and who is critical behind that is so twice in a row."""
    if last is None or last.wall_s > now_s:  # the clock was set back
        return new
    if new.wall_s < last.wall_s:
        return last
    if last.proven and new.status == UNKNOWN:
        said = last.reason.partition(NOT_AGAIN)[0]
        return msgspec.structs.replace(
            last, reason=f"{said}{NOT_AGAIN}{new.reason}", wall_s=new.wall_s)
    return msgspec.structs.replace(new, confirmed=True) if (
        last.proven and new.status == CRITICAL) else new


def key_of(machine: str, measure: Measure) -> str:
    return f"{machine}|{measure.name}|{measure.subject}"


def directory(environ: Mapping[str, str]) -> Path:
    """Where results are kept: beside the node agent's journal where this user may write there, so
    that the agent shows them, else in the user's own state directory."""
    if environ.get("HOLDFAST_STATE_DIR"):
        return Path(environ["HOLDFAST_STATE_DIR"]) / "checks"
    node = Path("/var/lib/holdfast")
    if os.access(node, os.W_OK | os.X_OK):
        return node / "checks"
    home = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(home) / "holdfast" / "checks"


def load(folder: Path) -> Results:
    """What is there; nothing where it is not, or not of this form."""
    try:
        raw = read_regular(folder / FILE, FILE_MAX_BYTES, follow=False)
        return msgspec.json.decode(raw, type=Results)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return Results()


def fleet(folder: Path) -> Fleet:
    """What is known of other nodes; nothing where that is not, or not of this form."""
    try:
        raw = read_regular(folder / FLEET_FILE, FILE_MAX_BYTES, follow=False)
        return msgspec.json.decode(raw, type=Fleet)
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
        return {}


def keep_fleet(folder: Path, found: Fleet) -> None:
    """Raises OSError where it cannot be kept."""
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{FLEET_FILE}.{os.getpid()}.new"
    try:
        new.write_bytes(msgspec.json.encode(found))
        os.replace(new, folder / FLEET_FILE)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def changing(folder: Path) -> Iterator[Results]:
    """The results, written back at the end.  Raises OSError where they cannot be kept."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "results.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        results = load(folder)
        yield results
        new = folder / f"results.{os.getpid()}.new"
        try:
            new.write_bytes(msgspec.json.encode(results))
            os.replace(new, folder / FILE)
        finally:
            new.unlink(missing_ok=True)
