"""One reading of the machine for a check, as collectors make it and detectors of a node see it.

Owns which collectors are read for a check and what detectors say of that, so that a limit of the
agent's stands in one place.  Runs in a check's own child.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from holdfast.collectors import ALL
from holdfast.collectors.contract import NoData, Probed, Sample, sound

from ..core.checks.verdict import Answer
from ..core.detect.registry import NodeWatch
from ..core.model import DEGRADED, FATAL, WARN, Observed, readings_of
from . import isolate
from .facts import Facts


class Reading(NamedTuple):
    """Samples of some collectors, and why others gave none."""

    samples: tuple[Sample, ...]
    absent: dict[str, str]  # no source on this machine
    failed: dict[str, str]  # there is one, and it does not answer


def read(facts: Facts, names: Sequence[str]) -> Reading:
    """One reading of each named collector."""
    samples: list[Sample] = []
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    for kind in ALL:
        if kind.name not in names:
            continue
        try:
            collector = kind()
            if isinstance(collector, Probed):
                os.environ.update(collector.environ(facts.roots))
            found = collector.collect(facts.roots, time.clock_gettime(time.CLOCK_BOOTTIME))
            samples += sound(found, collector.metrics)
        except NoData as reason:
            absent[kind.name] = str(reason)
        except OSError as error:
            failed[kind.name] = str(error)
    isolate.end_below()  # tools that a collector keeps for its next reading
    return Reading(tuple(samples), absent, failed)


def detected(facts: Facts, detectors: Sequence[str], collectors: Sequence[str],
             said: str) -> Answer:
    """What these detectors conclude from one reading, and what the agent's own conclude now, which
    see what takes more than one: a link that was up, a card that was there, a growth."""
    reading = read(facts, collectors)
    observed = Observed(samples=readings_of(reading.samples))
    found = [(one.fault, one.severity, one.reason)
             for one in NodeWatch(facts.node, {}).look(observed) if one.detector in detectors]
    seen = {(fault, severity) for fault, severity, _ in found}  # one look may say the milder thing
    found += [one for one in _open(facts, detectors) if one[:2] not in seen]
    unknown = [f"{name}: {why}" for name, why in reading.failed.items()]
    if not reading.samples and not unknown and not found:
        said = "; ".join(reading.absent.values()) or "nothing to look at here"
    return Answer(
        said=said, critical=tuple(why for _, severity, why in found if severity == FATAL),
        warning=tuple(why for _, severity, why in found if severity in (DEGRADED, WARN)),
        unknown=tuple(unknown),
        todo="; ".join(dict.fromkeys(f"`holdfast explain {fault}`" for fault, _, _ in found)),
    )


def _open(facts: Facts, detectors: Sequence[str]) -> list[tuple[str, str, str]]:
    """(fault, severity, reason) of what the agent's own have against this node now.  What the
    kernel's log says is another's: a check clears that."""
    return [(one.fault, one.severity, one.reason) for one in facts.faults
            if one.detector in detectors]
