"""One round of checks for an agent, in a child: `python -m holdfast.agent.checks.round ROUND`.

Owns the child's two ends: what the agent asks for, as JSON in its argument, and the verdicts that
it prints.  What is critical is made a second time, for only that counts as proof.  The child may
fork, which the agent with its threads may not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from ..config.settings import Collectors
from . import profiles, table
from .facts import Facts, Fault, profile_of, roots_of
from .runner import Runner, Wanted


class Round(msgspec.Struct):
    """What an agent asks for; see Wanted in runner.py.  `profile`: as checks.profile has it."""

    node: str
    checks: tuple[str, ...]
    folder: str
    boot_id: str
    collectors: Collectors
    pythons: tuple[tuple[str, str], ...] = ()
    busy: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    profile: str = ""
    max_age_s: float = 0.0
    faults: tuple[Fault, ...] = ()  # what the agent's detectors conclude, which saw more readings


def wanted_of(asked: Round) -> Wanted:
    roots = roots_of(asked.collectors)
    facts = Facts(asked.node, roots, profile=profiles.chosen(asked.profile) or profile_of(roots),
                  faults=asked.faults)
    checks = [table.BY_NAME[name] for name in asked.checks if name in table.BY_NAME]
    return Wanted(
        checks, facts, Path(asked.folder), asked.boot_id, pythons=asked.pythons, busy=asked.busy,
        max_age_s=asked.max_age_s, limits=table.limits_of(asked.limits), confirm=True)


def pythons(
    named: str, jobs: Iterable[str], environ: Mapping[str, str]
) -> tuple[tuple[str, str], ...]:
    """Interpreters that may have torch: the one that is named and no other, or those of the jobs,
    this one and the one on the PATH."""
    if named:
        return ((named, "named"),)
    found = {job: "the job's" for job in jobs if job}
    found.setdefault(sys.executable, "Holdfast's own")
    for folder in environ.get("PATH", "").split(":"):
        path = os.path.join(folder, "python3")
        if os.path.isabs(path) and os.access(path, os.X_OK):
            found.setdefault(path, "on the PATH")
            break
    return tuple(found.items())


if __name__ == "__main__":
    try:
        wanted = wanted_of(msgspec.json.decode(sys.argv[1], type=Round))
    except ValueError as wrong:  # the profile's file, which was well when the agent began
        sys.exit(str(wrong))
    answers = list(Runner(wanted).run())
    sys.stdout.write(msgspec.json.encode(answers).decode())
