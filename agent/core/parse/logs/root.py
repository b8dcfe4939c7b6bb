"""From the matches of all ranks to one root, or to none with what can still be said.

Owns the weighing: the earliest root of all ranks, a weak one yielding to a firm one near it, and
never a cascade.  What a line means is agent/core/parse/logs/scan.py's.  Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .lines import NO_RANK, YEAR_S, around_new_year
from .signatures import CARRIER, CASCADE, PYTHON, ROOT, SIGNAL, TEARDOWN, UNPLACED, Match

WEAK_YIELDS_S = 5.0  # a firm root this long after a weak one was only printed later
SAID_BEFORE_LINES = 30
REASONLESS = ("slurm_cancelled",)  # want of memory, which Slurm counts at the end, is its reason
ENDS_ALONE = ("process_exit",)  # consequences of any end, a peer's or its own
BLAMES = {"infra": "node", "network": "link"}  # the rest is not this cluster's hardware
ASKED = ("-15", "143", "signal 15", "Terminated")  # SIGTERM, as the ranks get it that did not fail
RETRY_WORDS = {
    "yes": "yes", "no": "no, it would fail again", "once": "once", "depends": "it depends",
    "elsewhere": "on another node", "after_repair": "after a repair",
    "back_off": "with back-off", "requeue": "by the scheduler's queue",
}


TOLD = {  # what is told of errors that nobody is blamed for, the first that there is
    "device_xid": "a GPU error that the driver counts, of the job or of the GPU",
    "shell_without_conda": "a shell that conda was not set up for, and no more",
    "unknown_error": "an error that no rule knows; the last one",
    "traceback_cut": "a traceback without its end",
    "handled_error": "only errors that were handled, as their lines say",
    "warning": "no error, but a warning",
}


class Diagnosis(NamedTuple):
    """`root` is None when nothing but consequences was found; `hint` is never empty then."""

    root: Match | None
    matches: tuple[Match, ...]  # in order of time
    hint: str = ""

    @property
    def blames(self) -> str:
        """node, link, or job: what the root speaks about.  Never acted on by itself."""
        return BLAMES.get(self.root.culprit, "job") if self.root else ""


def diagnose(matches: Sequence[Match], exit_codes: dict[str, str]) -> Diagnosis:
    ordered = in_order(matches)
    root = find_root(ordered)
    return Diagnosis(root, tuple(ordered), "" if root else hint(ordered, exit_codes))


def in_order(matches: Sequence[Match]) -> list[Match]:
    """By time where lines have one; a line without has that of the match before it in its file."""
    matches = _carried_on(matches)
    border_s = around_new_year([m.time_s for m in matches if m.time_s is not None])

    def key(match: Match) -> tuple[float, int, int]:
        if match.time_s is None:  # before the first time of its file: as early as that file is
            return (0.0, match.file, match.offset)
        time_s = match.time_s + (YEAR_S if match.time_s < border_s else 0.0)
        return (time_s, match.file, match.offset)

    return sorted(matches, key=key)


def _carried_on(matches: Sequence[Match]) -> list[Match]:
    timed: list[Match] = []
    for match in sorted(matches, key=lambda one: (one.file, one.offset)):
        if match.time_s is None and timed and timed[-1].file == match.file:
            match = match._replace(time_s=timed[-1].time_s)
        timed.append(match)
    return timed


def find_root(ordered: Sequence[Match]) -> Match | None:
    """The earliest root; one that may be a consequence gives way to a surer one near it.

    What a logger only mentioned counts where nothing firm ended a process: the warning of a missing
    module or of another driver's version stands at the begin of runs that end hours later, and
    often of one rank alone.  What was mentioned and is known by its family alone comes after it;
    what is only placed by the things that it names comes last, where no peer was lost.
    """
    roots = [match for match in ordered if match.role == ROOT and not match.faint]
    telling = [match for match in roots if not (match.family and match.culprit == "unknown")]
    found = _earliest([match for match in telling if not (match.family and match.mention)])
    if found is not None and found.signature == PYTHON.id and (said := _said_before(found, roots)):
        return said
    if found is None or found.weak and found.culprit == "unknown":
        found = _earliest(telling)
    return found or _earliest(roots) or _placed(ordered)


def _placed(ordered: Sequence[Match]) -> Match | None:
    followed = [one for one in ordered if one.role == CASCADE]
    if any(one.category not in ENDS_ALONE for one in followed):
        return None
    return _earliest([match for match in ordered if match.role == ROOT and match.faint
                      and not (followed and match.generic)])


def _said_before(found: Match, roots: Sequence[Match]) -> Match | None:
    """The error that a library printed right before it raised an exception that says nothing."""
    silent = found.text.rstrip().endswith(":")  # not even a message
    near = [one for one in roots if one.family and one.culprit != "user"
            and (silent or one.mention and one.culprit != "unknown")
            and (one.file, one.stream) == (found.file, found.stream)
            and 0 < found.number - one.number <= SAID_BEFORE_LINES]
    return near[0] if near else None


def _earliest(roots: list[Match]) -> Match | None:
    ended = [match for match in roots if not match.mention]
    if any(not match.weak for match in ended):
        roots = ended
    if not roots:
        return None
    first = roots[0]
    firm = next((match for match in roots if not match.weak), None)
    if first.weak and firm is not None:
        apart_s = _apart_s(first, firm)
        return firm if apart_s is None or apart_s <= WEAK_YIELDS_S else first
    if first.signature in REASONLESS:
        near = (m for m in roots if m.category.startswith("oom") and not m.mention
                and (_apart_s(first, m) or 0.0) <= WEAK_YIELDS_S)
        return next(near, first)
    if first.generic:  # where the order is not known, the line that says more is taken
        certain = (m for m in roots if not m.weak and not m.generic and _apart_s(first, m) is None)
        return next(certain, first)
    return first


def _apart_s(first: Match, second: Match) -> float | None:
    """None where two files' lines cannot be put in order."""
    if first.time_s is not None and second.time_s is not None:
        return abs(second.time_s - first.time_s)
    return 0.0 if first.file == second.file else None


def hint(ordered: Sequence[Match], exit_codes: dict[str, str]) -> str:
    """What a person should look at, when the logs hold no root."""
    if gone := _without_a_word(ordered, exit_codes):
        return gone
    if behind := _behind(ordered):
        return behind
    peers = [dict(m.fields)["peer"] for m in ordered if "peer" in dict(m.fields)]
    if peers:
        return f"only consequences: the other side went first; look at {peers[0]}"
    present = {match.role for match in ordered}
    told = {match.signature: match.text[:200] for match in ordered if match.role == UNPLACED}
    if present & {CASCADE, CARRIER}:
        return "only consequences: the log of the rank that failed first is not among these"
    for name, words in TOLD.items():
        if name in told:
            return f"{words}: {told[name]}"
    if SIGNAL in present:
        return "nothing ended by itself, but the values are not healthy"
    if TEARDOWN in present:
        return "the ranks were asked to end"
    return "nothing known stands in these logs; a process killed from outside leaves no line"


def _without_a_word(ordered: Sequence[Match], exit_codes: dict[str, str]) -> str:
    """What the exit status of the first rank says; the others were asked to stop."""
    ended = [dict(match.fields) for match in ordered if match.role == CARRIER]
    known = [fields for fields in ended if _status(fields) in exit_codes]
    known.sort(key=lambda fields: (_status(fields) in ASKED, "rank" not in fields))
    if known:
        said = exit_codes[_status(known[0])]
        return f"{_who(known[0])} ended without a word; its exit status says: {said}"
    named = next((fields for fields in ended if "rank" in fields), None)
    return f"{_who(named)} failed first, as its launcher says: look at its log" if named else ""


def _status(fields: dict[str, str]) -> str:
    return fields.get("rc") or fields.get("how", "")


def _who(fields: dict[str, str]) -> str:
    """As much as a launcher's summary says: the rank, its process and its node."""
    kinds = {"rank": "rank", "lr": "local rank", "t": "task"}
    who = next((f"{kinds[key]} {fields[key]}" for key in kinds if key in fields), "a rank")
    who += f" (pid {fields['pid']})" if "pid" in fields else ""
    return f"{who} on {fields['n']}" if "n" in fields else who


def _behind(ordered: Sequence[Match]) -> str:
    """Of all that waited in a collective, the rank that had come least far."""
    furthest: dict[int, int] = {}
    for match in ordered:
        fields = dict(match.fields)
        number = fields.get("enq") or fields.get("seq") or ""
        if match.category == "collective_timeout" and match.rank != NO_RANK and number.isdigit():
            furthest[match.rank] = max(int(number), furthest.get(match.rank, 0))
    if len(furthest) < 2:
        return ""
    least = min(furthest.values())
    ranks = sorted(rank for rank, number in furthest.items() if number == least)
    if len(ranks) == len(furthest):
        seen = ", ".join(str(rank) for rank in sorted(furthest)[:16])
        return f"ranks {seen} waited for one that did not come: look at those not named here"
    named = ", ".join(str(rank) for rank in ranks[:16])
    return f"a collective timed out; furthest behind: rank {named} (sequence number {least})"


def as_json(found: Diagnosis, names: Sequence[str]) -> dict[str, object]:
    return {
        "root": _one(found.root, names) if found.root else None, "blames": found.blames,
        "hint": found.hint, "matches": [_one(match, names) for match in found.matches]}


def _one(match: Match, names: Sequence[str]) -> dict[str, object]:
    return {
        "signature": match.signature, "role": match.role, "category": match.category,
        "culprit": match.culprit, "retryable": match.retryable,
        "known_by": "words" if match.faint else "family" if match.family else "signature",
        "rank": None if match.rank == NO_RANK else match.rank, "line": match.text,
        "file": names[match.file] if match.file < len(names) else "",
        "line_number": match.number, "fields": dict(match.fields),
    }


