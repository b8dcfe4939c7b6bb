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
# EC2 says these ahead of time, a spot instance's end about two minutes ahead: after a wait the
# node would be gone before anybody reads of it, and nothing that Holdfast does cures them.
ANNOUNCED = frozenset({
    "ec2_rebalance_recommended", "ec2_scheduled_event", "ec2_spot_interruption",
})


class Entry(NamedTuple):
    """A runbook and what an alert says of it, on one line."""

    runbook: Runbook
    summary: str  # the first sentence of its Meaning


def needs_person(runbook: Runbook) -> bool:
    """Whether training stays away at this fault's worst until somebody acts."""
    return runbook.severity not in (OK, UNKNOWN) and not first(runbook, bringing_back())


def ticket(entry: Entry) -> Rule:
    """The alert that a fault's runbook names, whatever the weight of the verdict: one corrected
    memory error and a dead processor are the same fault, and only the second pages."""
    runbook = entry.runbook
    severity = INFO if runbook.severity in (OK, UNKNOWN) else WARNING
    series = f'holdfast_fault_active{{fault="{runbook.fault}"}}'
    places = named(f"max by (instance, subject) ({series} > 0)")
    return {
        "alert": runbook.alert,
        # The value: in how many places of the fleet the fault is.
        "expr": f"{places} * on () group_left () count({places})",
        "for": "0m" if runbook.fault in ANNOUNCED else FOR[severity],
        "labels": {"severity": severity, "fault": runbook.fault, "scope": runbook.scope},
        "annotations": {
            "summary": entry.summary,
            "description": f"{{{{ $labels.subject }}}} on {{{{ $labels.instance }}}} "
                           f"({verdict_severity(runbook.fault)}; places in the fleet: "
                           f"{{{{ $value }}}}): {entry.summary}",
            "runbook": runbook.fault,
        },
    }


def verdict_severity(fault: str) -> str:
    """A template for how bad the fault is at the alert's subject.  It is asked for when the alert
    is worded: as a label of the alert it would make a new alert of each change."""
    series = f'holdfast_fault_active{{fault=\\"{fault}\\",instance=%q,subject=%q}}'
    return (f'{{{{ with printf "{series}" $labels.instance $labels.subject | query }}}}'
            '{{ . | first | label "severity" }}{{ end }}')


def named(series: str) -> str:
    """With the run of a subject in a run as a label, by which a page stands for its tickets."""
    return f'label_replace({series}, "run", "$1", "subject", "run/([^/]+).*")'


def page(name: str, summary: str, expr: str, description: str) -> Rule:
    return {
        "alert": name,
        "expr": f"{expr} > 0",
        "for": FOR[CRITICAL],
        "labels": {"severity": CRITICAL},
        "annotations": {"summary": summary, "description": description,
                        "runbook": "{{ $labels.fault }}"},
    }


def pages(hopeless: Iterable[Runbook]) -> list[Rule]:
    """One for any of these faults in its fatal form: once a run or an agent, and fault."""
    of_runs, of_nodes = (
        f'holdfast_fault_active{{severity="{FATAL}",fault=~"'
        + "|".join(sorted(one.fault for one in hopeless if (one.scope == "run") == is_run)) + '"}'
        for is_run in (True, False))
    return [
        # However many agents say it of the run.
        page("HoldfastRunStopped", "A run was given up, and waits for a person.",
             f"count by (run, fault) ({named(of_runs)})",
             "Run {{ $labels.run }} was given up ({{ $labels.fault }}): nothing that Holdfast may "
             "do brings training back."),
        page("HoldfastNodeNeedsPerson", "A node has a fault that only a person can cure.",
             f"sum by (instance, fault) ({of_nodes})",
             "{{ $labels.fault }} stands on {{ $labels.instance }} ({{ $value }} places), and "
             "nothing that Holdfast may do brings training back."),
    ]


def groups(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """The tickets, sorted by name, and the two pages; faults without an alert are left out."""
    listed = sorted((one for one in entries if one.runbook.alert),
                    key=lambda one: one.runbook.alert)
    hopeless = [one.runbook for one in listed if needs_person(one.runbook)]
    return [{"name": "holdfast_faults", "rules": [ticket(one) for one in listed]},
            {"name": "holdfast_fault_pages", "rules": pages(hopeless)}]
