"""Why a generation broke, from how its ranks ended: the first root is to blame, never a cascade.

Owns the reading of exits.  Input is levels (every rank's end as its launcher keeps it), output is
one Cause or none.  It does not weigh budgets and orders nothing.
"""

from __future__ import annotations

import re

import msgspec

from ...model import DEGRADED, FATAL, Ended, Event, RankView, Value, Verdict, rank_subject

DETECTOR = "ended"
CASCADE_S = 5.0  # an end this soon after the first, with such an error, is its consequence

# What a rank says when a peer went away.  Compared in lower case.
CONSEQUENCES = (
    "connection closed by peer",
    "connection reset",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "socket timeout",
    "timed out waiting",
    "distnetworkerror",
    "diststoreerror",
    "nrt_exec_hw_err_collectives",
    "distbackenderror",
)

# What Python raises of a connection of the script's own; torch's errors are of other types.
OWN_CONNECTION = re.compile(r"(?:BrokenPipe|Connection(?:Reset|Refused|Aborted))Error\b")

# What gloo prints before it aborts a rank whose peer came with another operation or size.
MISMATCH = "collective mismatch"

OUT_OF_MEMORY = "host_oom"  # the fault of the kernel's lines that say so
OF_THE_JOB = ("rank_exited", "collective_mismatch")  # a run that ends by these has the job's code

# Errors of a script that another start meets again, by the worker's own word, and only before
# anything was trained.  Those that an interpreter raises about the program or its settings alone:
# a rendezvous or a store that fails raises a RuntimeError, an OSError or one of their kinds then.
# A key counts where it is spelt like a variable of the environment; an answer of a server may lack
# any other.
FINAL = re.compile(
    r"(?:Import|ModuleNotFound|Syntax|Indentation|Tab|FileNotFound|Name|UnboundLocal|Argument"
    r"|ConfigAttribute|ConfigKey)Error:|MissingMandatoryValue:"
    r"|TypeError: .{1,200}\(\) (?:got an unexpected keyword argument|got multiple values for"
    r"|missing \d+ required|takes .{1,80} positional arguments? but)"
    r"|KeyError: '[A-Z][A-Z0-9_]*'$")
USAGE = 2  # sys.exit of argparse and click, for flags that they do not know
NO_COMMAND = (126, 127)  # of a shell: the command is no program, or is missing

# Signals that a process earns by itself (SIGILL SIGTRAP SIGABRT SIGBUS SIGFPE SIGSEGV SIGSYS).
OWN_SIGNALS = {4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 11: "SIGSEGV",
               31: "SIGSYS"}
SIGNALS = {**OWN_SIGNALS, 1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 9: "SIGKILL", 15: "SIGTERM"}


class Cause(Value, frozen=True):
    """Why a generation must be replaced, with the one to blame where evidence names it."""

    fault: str
    generation: int
    reason: str
    rank: int = -1  # -1: nobody can be named
    node: str = ""
    pid: int = 0
    user: bool = False  # the job's own doing: its exit code is the run's
    code: int = 1
    error: str = ""
    step: int = -1  # the trainer's true one, a script's own count; -1: unknown, which is no number
    boot_s: float = 0.0  # when it happened
    confidence: float = 1.0
    severity: str = FATAL
    detector: str = DETECTOR
    evidence: tuple[tuple[str, str], ...] = ()
    bad_from: int = 0  # first step whose result is wrong on every rank; 0 = none
    charged: bool = True  # an operator's wish costs no budget
    excused: bool = False  # ... nor does what a known condition of a node did
    final: bool = False  # the job cannot run as it is: a module, a file or a command is missing
    request: str = ""  # whose wish it is
    saves: bool = False  # ... with a checkpoint written before
    place: str = ""  # of the rank in the trainer's strategy
    parks: bool = False  # nothing is broken: ranks leave at the end of their step
    among: tuple[str, ...] = ()  # nodes one of which it is of, where a collective names nobody


def detector_of(fault: str) -> str:
    """Which detector of ranks says this fault."""
    return "hang" if fault.startswith(("rank_hung", "rank_gil", "rank_stopped", "collective_")) \
        else DETECTOR


def verdict_of(cause: Cause, run: str, act: bool = True) -> Verdict:
    return Verdict(
        fault=cause.fault, subject=rank_subject(run, cause.rank), severity=cause.severity,
        confidence=cause.confidence, reason=cause.reason, evidence=cause.evidence, act=act,
        detector=cause.detector, run=run, generation=cause.generation,
    )


def ended_well(ended: Ended) -> bool:
    """The worker's own outcome wins: exit codes lie at interpreter teardown with gloo."""
    if ended.outcome:
        return ended.outcome == "done" or (ended.outcome == "exit" and ended.code == 0)
    return ended.code == 0 and ended.signal == 0


def is_consequence(ended: Ended) -> bool:
    text = ended.error.lower()
    if MISMATCH in text:
        return False
    return ended.outcome in ("", "exception") and any(sign in text for sign in CONSEQUENCES)


def failed_ranks(ranks: tuple[RankView, ...]) -> list[RankView]:
    """Ranks that ended badly and not on an order of ours, earliest first."""
    bad = [r for r in ranks if r.ended and not r.ended.by_us and not ended_well(r.ended)]
    return sorted(bad, key=lambda r: (r.ended.boot_s if r.ended else 0.0, r.rank))


def first_root(failed: list[RankView]) -> tuple[RankView | None, bool]:
    """(the rank to blame, whether it is a root).  Only ends within CASCADE_S of the first count."""
    if not failed or failed[0].ended is None:
        return None, False
    horizon_s = failed[0].ended.boot_s + CASCADE_S
    near = [r for r in failed if r.ended and r.ended.boot_s <= horizon_s]
    roots = [r for r in near if r.ended and not is_consequence(r.ended)]
    return (roots[0], True) if roots else (near[0], False)


def cause_of(rank: RankView, cascades: int, oom_pids: tuple[int, ...]) -> Cause:
    """The cause that one badly ended rank is."""
    ended = rank.ended or Ended(code=1)
    who = rank.who
    base = Cause(
        fault="rank_exited", generation=rank.generation, reason="", rank=rank.rank, node=rank.node,
        pid=rank.pid, code=ended.code or 1, error=ended.error, step=rank.known_step,
        boot_s=ended.boot_s, evidence=_evidence(rank, ended, cascades), place=rank.place,
    )
    replace = msgspec.structs.replace
    if MISMATCH in ended.error.lower():
        # The rank that aborts received what it did not expect: that names a pair, not a culprit.
        reason = f"ranks disagree about a collective: {who} aborted ({ended.error})"
        return replace(base, fault="collective_mismatch", user=True, rank=-1, node="", pid=0,
                       confidence=0.9, reason=reason)
    if ended.outcome == "bad_checkpoint":
        reason = f"{who} refused a checkpoint: {ended.error or 'its bytes do not match'}"
        return replace(base, fault="checkpoint_bad", severity=DEGRADED, reason=reason)
    if ended.outcome in ("exception", "exit"):
        what = ended.error or f"exit code {ended.code}"
        final = bool(FINAL.match(ended.error)) if ended.outcome == "exception" \
            else ended.code == USAGE
        did = "raised" if rank.state == "parked" else "ended by itself:"
        return replace(base, user=True, final=final, reason=f"{who} {did} {what}")
    if ended.signal and rank.pid in oom_pids:
        reason = f"{who} was killed by the kernel: out of memory"
        return replace(base, fault="rank_oom_killed", reason=reason)
    name = SIGNALS.get(ended.signal, f"signal {ended.signal}")
    if ended.signal and ended.signal not in OWN_SIGNALS:
        reason = f"{who} was killed from outside by {name}"
        return replace(base, fault="rank_killed", reason=reason)
    what = f"crashed with {name}" if ended.signal else f"exit code {ended.code}"
    final = not ended.signal and ended.code in NO_COMMAND
    return replace(base, user=True, final=final,
                   reason=f"{who} ended by itself: {ended.error or what}")


def own_connection(failed: list[RankView]) -> RankView | None:
    """The first that raised an error of a connection of its own, to whomever: the one to blame
    where no other rank or node is found that it was with.  Only ends within CASCADE_S of the first
    count: a later one is most likely what that did to it."""
    first = failed[0].ended if failed else None
    return next((r for r in failed if r.ended and first is not None
                 and r.ended.boot_s <= first.boot_s + CASCADE_S
                 and OWN_CONNECTION.match(r.ended.error)), None)


def victims_only(first: RankView, others: int, oom_pids: tuple[int, ...]) -> Cause:
    """The cause when every end is the consequence of one that nobody saw: a victim is named as
    evidence, and nobody as the culprit."""
    cause = cause_of(first, others, oom_pids)
    error = first.ended.error if first.ended is not None else ""
    more = f" and {others} more" if others else ""
    return msgspec.structs.replace(
        cause, rank=-1, node="", pid=0, confidence=0.5,
        reason=f"culprit unknown: rank {first.rank}{more} ended because a peer went away ({error})",
        evidence=(*cause.evidence, ("first victim", f"rank {first.rank} (pid {first.pid}) on "
                                                    f"{first.node}")),
    )


def oom_pids(events: tuple[Event, ...], pids: tuple[int, ...]) -> list[int]:
    """Which of our ranks the kernel says it killed for want of memory."""
    return [event.pid for event in events if event.fault == OUT_OF_MEMORY and event.pid in pids]


def step_words(rank: RankView) -> str:
    """A rank's step, in a row of evidence."""
    return str(rank.step) if rank.page else "unknown"


def _evidence(rank: RankView, ended: Ended, cascades: int) -> tuple[tuple[str, str], ...]:
    rows = [("exit", f"code {ended.code}, signal {ended.signal}"), ("step", step_words(rank))]
    if ended.outcome:
        rows.append(("outcome", ended.outcome))
    if ended.error:
        rows.append(("error", ended.error))
    if cascades:
        rows.append(("cascades", f"{cascades} more ranks ended as a consequence"))
    return tuple(rows)
