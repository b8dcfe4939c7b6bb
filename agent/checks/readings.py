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
    """What these detectors conclude from one reading.  What takes them a while to see (a growth, a
    streak) is only in the agent's incidents."""
    reading = read(facts, collectors)
    observed = Observed(samples=readings_of(reading.samples))
    found = [one for one in NodeWatch(facts.node, {}).look(observed) if one.detector in detectors]
    unknown = [f"{name}: {why}" for name, why in reading.failed.items()]
    if not reading.samples and not unknown:
        said = "; ".join(reading.absent.values()) or "nothing to look at here"
    return Answer(
        said=said, critical=tuple(one.reason for one in found if one.severity == FATAL),
        warning=tuple(one.reason for one in found if one.severity in (DEGRADED, WARN)),
        unknown=tuple(unknown),
        todo="; ".join(dict.fromkeys(f"`holdfast explain {one.fault}`" for one in found)),
    )
