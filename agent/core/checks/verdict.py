"""What a check's answer comes to: ok, warning, critical or unknown, and by whose limit.

Owns the answer that a check gives, the origins of a limit and which of them may say what, and the
exit codes of Nagios and of the schedulers.  A limit that was shipped only warns: tables of other
people's numbers go stale with the next driver.  What this node, or others of its fleet, did when
they were well only warns too, since a busy node is slow as well.  Shipped and measured together are
critical, and so is the operator's own limit.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..model.checked import CRITICAL as CRITICAL
from ..model.checked import NO_LIMIT as NO_LIMIT
from ..model.checked import OK as OK
from ..model.checked import STATUSES as STATUSES
from ..model.checked import UNKNOWN as UNKNOWN
from ..model.checked import WARNING as WARNING
from ..model.checked import CheckVerdict as CheckVerdict
from ..model.checked import Measure as Measure
from ..model.time import Value

CODES = {OK: 0, WARNING: 1, CRITICAL: 2, UNKNOWN: 3}  # Nagios; also holdfast_check_status
WORST_FIRST = CRITICAL, WARNING, UNKNOWN, OK
OPERATOR, FLEET, BASELINE, PROFILE = "operator", "fleet", "baseline", "profile"
LIMIT_MAX = 1e21  # of a limit that somebody writes: a thousand exaflops
MEASURED = FLEET, BASELINE  # by whom: distributions are compared, of other nodes or of this one
SLURM_PROLOG, SLURM_HEALTH, BATCH, K8S = CONVENTIONS = (
    "slurm-prolog", "slurm-health", "batch", "k8s")


class Answer(Value, frozen=True):
    """What a check found; what follows from its numbers is said by `judged`."""

    said: str = ""  # one sentence about what was looked at, for when all is well
    critical: tuple[str, ...] = ()
    warning: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    measures: tuple[Measure, ...] = ()
    table: tuple[str, ...] = ()  # lines for people, as they are
    devices: tuple[str, ...] = ()  # whom all of `critical` is about: "gpu/3"; () = the node
    todo: str = ""  # where it is another than the check's own


class Limit(Value, frozen=True):
    """What one origin says of one measure."""

    origin: str
    value: float
    met: bool
    source: str = ""  # "hgx-h100: Azure ..., 2026-11-20", "12 passes, similarity 0.97 of 0.95"


def judged(check: str, answer: Answer, limits: Mapping[Measure, Sequence[Limit]],
           todo: str) -> CheckVerdict:
    """`limits`: those of each measure, none where no origin knows one."""
    critical, warning = list(answer.critical), list(answer.warning)
    # The one that is nearest to its limit, and where there is none the largest.
    shown: tuple[float, float, Measure, Limit | None] | None = None
    for each in answer.measures:
        status, limit = held(limits.get(each, ()))
        if limit is not None and status in (CRITICAL, WARNING):
            words = f"below {amount(limit.value, each.unit)} ({limit.origin})"
            if limit.origin in MEASURED:  # which compares distributions, so that its value only
                words = limit.source      # says about where the limit is
            which = f"{each.name} of {each.subject}" if each.subject else each.name
            (critical if status == CRITICAL else warning).append(
                f"{which} is {amount(each.value, each.unit)}, {words}")
        near = each.value / limit.value if limit is not None and limit.value > 0 else float("inf")
        if shown is None or (near, -each.value) < shown[:2]:
            shown = (near, -each.value, each, limit)
    status = (CRITICAL if critical else WARNING if warning else UNKNOWN if answer.unknown else OK)
    whys = {CRITICAL: critical, WARNING: warning, UNKNOWN: list(answer.unknown), OK: []}[status]
    measure, limit = shown[2:] if shown else (None, None)
    return CheckVerdict(
        check, status, "; ".join(whys) or answer.said or "nothing was found",
        measure.value if measure else None, measure.unit if measure else "",
        limit.value if limit else None, limit.origin if limit else NO_LIMIT,
        limit.source if limit else "", "" if status == OK else answer.todo or todo,
        measures=answer.measures, table=answer.table,
        devices=answer.devices if len(critical) == len(answer.critical) else (),
    )


def held(limits: Sequence[Limit]) -> tuple[str, Limit | None]:
    """What the limits of one measure come to, and which of them speaks."""
    by = {one.origin: one for one in limits}
    operator, profile = by.get(OPERATOR), by.get(PROFILE)
    measured = [by[one] for one in MEASURED if one in by]
    if operator is not None:  # whoever set it meant it to count alone
        return (OK if operator.met else CRITICAL), operator
    if profile is not None and not profile.met and any(not one.met for one in measured):
        return CRITICAL, profile
    known = [*measured, profile] if profile is not None else measured
    for one in known:
        if not one.met:
            return WARNING, one
    return OK, known[0] if known else None


def worst(statuses: Iterable[str]) -> str:
    """ok for none."""
    return min(statuses, key=WORST_FIRST.index, default=OK)


def exit_code(verdicts: Sequence[CheckVerdict], convention: str = "",
              breaker_open: bool = False) -> int:
    """Nagios' without a convention.  Schedulers take a node out of service, or leave a job held,
    for any other status than 0: with them it is 1 for a critical that came twice in a row, alone,
    and not while the breaker says that many nodes have the same."""
    if not convention:
        return CODES[worst(one.status for one in verdicts)]
    refused = any(one.proven for one in verdicts)
    return int(refused and not breaker_open)


def amount(value: float, unit: str) -> str:
    """12.3 GB/s, 51 GFLOP/s: three digits and a decimal prefix."""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or prefix == "P":
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000.0
    raise AssertionError("the last prefix takes every number")
