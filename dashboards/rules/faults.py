"""Alerts that follow from the runbooks' machine parts.

Owns their shape: a fault gives one ticket, named as its runbook says and worded as its runbook is;
two pages stand for all faults after which training does not come back without a person.  Pure:
values in, values out; dashboards/rules/files.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from holdfast.agent.core.actions import bringing_back
from holdfast.agent.core.ladder import first
from holdfast.agent.core.model import FATAL, OK, UNKNOWN, Runbook

Rule = dict[str, Any]  # as Prometheus has it; `runbook` among the annotations is a page's name
CRITICAL, WARNING, INFO = "critical", "warning", "info"
# A fault is a fact at once; these give the agent the time to cure it before anybody reads of it.
FOR = {CRITICAL: "1m", WARNING: "2m", INFO: "15m"}


class Entry(NamedTuple):
    """A runbook and the two texts of it that an alert carries, each on one line."""

    runbook: Runbook
    summary: str
    impact: str


def needs_person(runbook: Runbook) -> bool:
    """Whether training stays away at this fault's worst until somebody acts."""
    return runbook.severity not in (OK, UNKNOWN) and not first(runbook, bringing_back())


def ticket(entry: Entry) -> Rule:
    """The alert that a fault's runbook names, whatever the weight of the verdict: one corrected
    memory error and a dead processor are the same fault, and only the second pages."""
    runbook = entry.runbook
    severity = INFO if runbook.severity in (OK, UNKNOWN) else WARNING
    series = f'holdfast_fault_active{{fault="{runbook.fault}"}}'
    return {
        "alert": runbook.alert,
        "expr": f"max by (instance, subject) ({series}) > 0",
        "for": FOR[severity],
        "labels": {"severity": severity, "fault": runbook.fault, "scope": runbook.scope},
        "annotations": {
            "summary": entry.summary,
            "description": f"{{{{ $labels.subject }}}}: {entry.impact}",
            "runbook": runbook.fault,
        },
    }


def page(name: str, what: str, faults: Iterable[str]) -> Rule:
    """One page for any of these faults in its fatal form, once an agent and fault."""
    series = f'holdfast_fault_active{{severity="{FATAL}",fault=~"{"|".join(sorted(faults))}"}}'
    return {
        "alert": name,
        "expr": f"sum by (instance, fault) ({series}) > 0",
        "for": FOR[CRITICAL],
        "labels": {"severity": CRITICAL},
        "annotations": {
            "summary": what,
            "description": "{{ $labels.fault }} stands on {{ $labels.instance }} ({{ $value }} "
                           "places), and nothing that Holdfast may do brings training back.",
            "runbook": "{{ $labels.fault }}",
        },
    }


def groups(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The tickets, sorted by name, and the two pages; faults without an alert are left out."""
    listed = sorted((one for one in entries if one.runbook.alert),
                    key=lambda one: one.runbook.alert)
    hopeless = [one.runbook for one in listed if needs_person(one.runbook)]
    pages = [
        page("HoldfastRunStopped", "A run was given up, and waits for a person.",
             (one.fault for one in hopeless if one.scope == "run")),
        page("HoldfastNodeNeedsPerson", "A node has a fault that only a person can cure.",
             (one.fault for one in hopeless if one.scope != "run")),
    ]
    return [{"name": "holdfast_faults", "rules": [ticket(one) for one in listed]},
            {"name": "holdfast_fault_pages", "rules": pages}]
