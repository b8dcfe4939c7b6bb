"""Runs checks: which of them, in which child, with which limits, and what their answers come to.

Owns the cache, the choice of the Python that has torch, the rule that nothing disturbs training,
and the memory of what passed.  It never raises for what a check does: whatever goes wrong in one is
its verdict `unknown`, and the others go on.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ..core.checks import baseline
from ..core.checks.verdict import (
    CRITICAL,
    FLEET,
    OPERATOR,
    UNKNOWN,
    WARNING,
    Answer,
    CheckVerdict,
    Limit,
    Measure,
    judged,
)
from . import isolate, profiles, results
from .facts import Facts
from .isolate import Call, Event, answering, run_all, write_line
from .table import AGENT, PATHS, TORCH, TORCH_START_S, Check

ENTRY = Path(__file__).with_name("torch_entry.py")
AT_ONCE = 3
TORCH_CALL = "torch"
WARM_S = 3600.0  # of one check's compile
NO_TORCH = ("name one that has it: --python, or `python` below [checks] in the configuration")


class Wanted(NamedTuple):
    """What is asked for.

    named      the checks were asked for by name: none is left out for lack of what it needs
    pythons    (interpreter, where it comes from), tried in their order for one that has torch
    busy       runs that train here now
    limits     the operator's: measure -> least value
    options    for the functions that run beside torch: sizes, ranks
    confirm    run what is critical a second time
    special    what another round finds at the same time is no answer: it has another profile,
               other sizes or ranks
    """

    checks: Sequence[Check]
    facts: Facts
    folder: Path
    boot_id: str = ""
    named: bool = False
    pythons: Sequence[tuple[str, str]] = ()
    busy: Sequence[str] = ()
    force: bool = False
    max_age_s: float = 0.0
    limits: Mapping[str, float] = {}
    options: Mapping[str, Any] = {}
    confirm: bool = False
    special: bool = False


class Runner:
    """One round of checks."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._results = results.load(wanted.folder)
        self._fleet = results.fleet(wanted.folder)
        if self._results.boot_id != wanted.boot_id:
            self._results.verdicts.clear()
        self._profile = wanted.facts.profile
        self._machine = "cpu"
        self.torch = ""  # "torch 2.9.0 of /opt/venv/bin/python", for people
        self.not_kept = ""  # why results are not written down
        self._not_made: set[str] = set()  # nothing was found out, so nothing is to be kept
        self._of_others: dict[str, CheckVerdict] = {}  # made while this round waited for them

    def run(self) -> Iterator[CheckVerdict]:
        """The verdicts, as they come in."""
        wanted, rest = self._wanted, []
        for check in wanted.checks:
            known = self._without_running(check)
            if known is not None:
                yield known
            elif not self._left_out(check):
                rest.append(check)
        doubtful: dict[str, CheckVerdict] = {}
        for verdict in self._made(rest):
            doubted = verdict.status == CRITICAL and not self._standing(verdict).proven
            if doubted and wanted.confirm:
                doubtful[verdict.check] = verdict  # made again when the others are through
                continue
            yield self._kept(verdict)
        for again in self._made([one for one in rest if one.name in doubtful]):
            self._not_made.discard(again.check)  # the first time it was
            yield self._kept(confirmed(doubtful[again.check], again))

    def _left_out(self, check: Check) -> bool:
        facts = self._wanted.facts
        lacks = (AGENT in check.needs and facts.status is None
                 or PATHS in check.needs and not facts.paths)
        return lacks and not self._wanted.named

    def _without_running(self, check: Check) -> CheckVerdict | None:
        """A verdict that needs no run: one young enough, or why there can be none."""
        wanted = self._wanted
        cached = self._results.fresh(check.name, wanted.boot_id, time.time(), wanted.max_age_s)
        doubtful = cached is not None and cached.status == CRITICAL and not cached.confirmed
        if cached is not None and not (wanted.confirm and doubtful):
            return cached
        if check.disturbs and wanted.busy and not wanted.force:
            return self._standing(_unknown(
                check, f"not made: {', '.join(wanted.busy)} trains here, and would be disturbed",
                "wait for its end, or give --force"))
        if PATHS in check.needs and not wanted.facts.paths and wanted.named:
            return _unknown(check, "no path is named", "give --path DIR, or `paths` below [checks]")
        return None

    def _made(self, checks: Sequence[Check]) -> Iterator[CheckVerdict]:
        """The verdicts of checks that are run now."""
        beside_torch = [one for one in checks if TORCH in one.needs]
        gate = [one for one in checks if TORCH not in one.needs]
        by_name = {one.name: one for one in checks}
        answers: dict[str, Any] = {}
        for event in run_all(self._calls(beside_torch, gate), AT_ONCE):
            if event.name == TORCH_CALL:
                yield from self._torch_event(event, by_name)
            elif event.ended and event.name in self._of_others:
                yield self._of_others.pop(event.name)
            elif event.ended:
                if not event.begun:
                    self._not_made.add(event.name)
                yield self._verdict(by_name[event.name], answers.get(event.name), event.problem,
                                    event.took_s)
            else:
                answers[event.name] = event.value

    def _calls(self, beside_torch: Sequence[Check], gate: Sequence[Check]) -> Iterator[Call]:
        """Torch first: it takes longest to be imported, and so do collectors and detectors here,
        on another core meanwhile."""
        if beside_torch:
            yield self._torch_call(beside_torch)
        yield from map(self._call, gate)

    def _call(self, check: Check) -> Call:
        module, function = check.place.split(":")
        called = getattr(import_module(f".{module}", __package__), function)

        def answer() -> Any:
            return msgspec.to_builtins(called(self._wanted.facts))

        begun_s = time.time()
        return Call(check.name, answering(answer), check.deadline_s, check.memory_bytes,
                    lock=self._lock(check.name),
                    left=lambda: self._call(check) if self._left([check], begun_s) else None)

    def _left(self, checks: Sequence[Check], since_s: float) -> list[Check]:
        """Those that nobody else has made since; what another round found meanwhile is taken."""
        found = self._known()
        for one in () if self._wanted.special else checks:
            verdict = found.get(one.name)
            # Where to write is each round's own.
            if verdict is not None and verdict.wall_s >= since_s and PATHS not in one.needs:
                self._of_others[one.name] = verdict
        return [one for one in checks if one.name not in self._of_others]

    def _known(self) -> dict[str, CheckVerdict]:
        """What stands now, whoever made it."""
        kept = results.load(self._wanted.folder)
        return kept.verdicts if kept.boot_id == self._wanted.boot_id else {}

    def _torch_call(self, checks: Sequence[Check]) -> Call:
        """All checks beside torch share one import of it, and have a child each below that."""
        pythons = [list(one) for one in self._wanted.pythons]
        asked = {
            "options": {**self._wanted.options, "folder": str(self._wanted.folder)},
            "calls": [{"name": one.name, "place": one.place, "deadline_s": self._deadline_s(one),
                       "memory_bytes": one.memory_bytes} for one in checks],
        }
        begun_s = time.time()

        def left() -> Call | None:
            rest = self._left(checks, begun_s)
            return self._torch_call(rest) if rest else None

        def become(descriptor: int) -> None:
            # In whichever Python this ends, the current folder must not be on its path.
            environ = {**os.environ, "PYTHONSAFEPATH": "1"}
            os.set_inheritable(descriptor, True)
            tried: list[list[str]] = []
            for place, (python, origin) in enumerate(pythons):
                spec = {"pythons": pythons[place:], "tried": tried, "held": isolate.HELD, **asked}
                try:
                    os.execve(python, [python, str(ENTRY), str(descriptor), json.dumps(spec)],
                              environ)
                except OSError as error:
                    tried.append([python, origin, str(error.strerror)])
            write_line(descriptor, {"no_torch": tried})

        deadline_s = TORCH_START_S + sum(map(self._deadline_s, checks))
        return Call(TORCH_CALL, become, deadline_s, lock=self._lock(TORCH_CALL), left=left)

    def _deadline_s(self, check: Check) -> float:
        return WARM_S if self._wanted.options.get("warm") else check.deadline_s

    def _torch_event(self, event: Event, by_name: dict[str, Check]) -> Iterator[CheckVerdict]:
        """Answers come in as lines; what has none when the child ends is unknown."""
        line = event.value if isinstance(event.value, dict) else {}
        if "torch" in line:
            self._torch_is(line)
        elif "ended" in line:
            check = by_name.pop(line["check"])
            yield self._verdict(check, line.get("answer"), line["ended"], line["took_s"])
        elif "no_torch" in line:
            tried = "; ".join(f"{python} ({origin}): {why}" for python, origin, why
                              in line["no_torch"])
            yield from self._torch_left(
                by_name, f"no Python here has torch; tried {tried}", NO_TORCH)
        if event.ended:
            yield from self._torch_left(
                by_name, event.problem or "it gave no answer", begun=event.begun)

    def _torch_left(
        self, by_name: dict[str, Check], why: str, todo: str = "", begun: bool = True
    ) -> Iterator[CheckVerdict]:
        """What another round found meanwhile, and `unknown` for the rest that needs torch."""
        for check in [one for one in by_name.values() if TORCH in one.needs]:
            del by_name[check.name]
            others = self._of_others.pop(check.name, None)
            if others is None and not begun:
                self._not_made.add(check.name)
            yield others or _unknown(check, why, todo or check.todo)

    def _torch_is(self, line: dict[str, Any]) -> None:
        models = [str(one) for one in line.get("models", ())]
        self.torch = f"torch {line['torch']} of {line.get('python')}"
        count = f"{len(models)} x {' and '.join(sorted(set(models)))}"
        self._machine = f"{count}, torch {line['torch']}"
        if self._profile is None and line.get("kind") == "cuda":
            self._profile = profiles.of_devices("nvidia", models)

    def _verdict(self, check: Check, answer: Any, problem: str, took_s: float) -> CheckVerdict:
        if not problem:
            try:
                found = msgspec.convert(answer, Answer)
            except msgspec.ValidationError as error:
                problem = f"its answer is none: {error}"
        if problem:
            return _unknown(check, problem, check.todo, took_s)
        limits = {one: self._limits(one) for one in found.measures}
        verdict = judged(check.name, found, limits, check.todo)
        beyond = self._profile.beyond(found.measures) if self._profile is not None else ""
        if beyond:
            verdict = msgspec.structs.replace(verdict, reason=f"{verdict.reason}; {beyond}")
        return msgspec.structs.replace(verdict, took_s=took_s, wall_s=time.time())

    def _limits(self, measure: Measure) -> list[Limit]:
        least = self._wanted.limits.get(measure.name)
        found = [
            Limit(OPERATOR, least, measure.value >= least, f"checks.limits: {measure.name}")
            if least is not None else None,
            baseline.limit_of(measure, self._fleet.get(
                results.key_of(self._machine, measure), ()), FLEET),
            baseline.limit_of(measure, self._results.passes(self._machine, measure)),
            self._profile.limit_of(measure) if self._profile is not None else None,
        ]
        return [one for one in found if one is not None]

    def _lock(self, name: str) -> str:
        """Where a check holds its place; "" where nothing can be kept."""
        try:
            self._wanted.folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return ""
        return str(self._wanted.folder / f"{name}.lock") if os.access(
            self._wanted.folder, os.W_OK) else ""

    def _kept(self, verdict: CheckVerdict) -> CheckVerdict:
        """Written down before the next one of this check begins, here or elsewhere; what stands
        from now on."""
        if verdict.check in self._not_made:
            return self._standing(verdict)
        if self._wanted.options.get("warm"):
            return verdict
        try:
            with results.changing(self._wanted.folder) as kept:
                if kept.boot_id != self._wanted.boot_id:
                    kept.verdicts.clear()
                kept.boot_id = self._wanted.boot_id
                if verdict == kept.verdicts.get(verdict.check):
                    return verdict  # another round's, which wrote it down itself
                if not self._wanted.busy:  # a disturbed measurement is nobody's usual
                    kept.learn(self._machine, verdict)
                return kept.take(verdict)
        except OSError as error:
            self.not_kept = f"{self._wanted.folder}: {error.strerror or error}"
            return verdict

    def _standing(self, verdict: CheckVerdict) -> CheckVerdict:
        return results.standing(self._known().get(verdict.check), verdict, time.time())


def confirmed(first: CheckVerdict, again: CheckVerdict) -> CheckVerdict:
    """Twice critical is proof enough for a scheduler; once is a warning."""
    if again.status == CRITICAL:
        return msgspec.structs.replace(again, confirmed=True)
    return msgspec.structs.replace(
        first, status=WARNING, reason=f"critical once, and {again.status} again: {first.reason}")


def _unknown(check: Check, why: str, todo: str, took_s: float = 0.0) -> CheckVerdict:
    return CheckVerdict(check.name, UNKNOWN, why, todo=todo, took_s=took_s, wall_s=time.time())
