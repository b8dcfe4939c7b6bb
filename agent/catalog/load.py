"""Reads agent/catalog/*.toml: what the kernel's lines mean, and the Neuron runtime's codes.

Owns the way from files to the core's Catalogue, and docs/kernel-events.md.  Knows no line itself;
adding one is a row there and, for a new fault, a runbook.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from importlib import resources
from typing import Any

from ..core.model import FATAL, WARN, Escalation
from ..core.parse.kernel_line import (
    NVLINK_FAULT,
    Bits,
    Case,
    Catalogue,
    Link5,
    Numbered,
    Rule,
    at_begin,
)
from ..core.parse.logs.signatures import FOLLOWS, PYTHON
from ..core.parse.neuron_codes import Code, Codes

FILES = ("nvidia_xid", "nvidia_sxid", "kernel", "nrt")


def tables() -> dict[str, dict[str, Any]]:
    """The shipped files as they are, by name."""
    return {name: _table(name) for name in FILES}


def _table(name: str) -> dict[str, Any]:
    file = resources.files("holdfast.agent.catalog").joinpath(f"{name}.toml")
    return tomllib.loads(file.read_text("utf-8"))


@lru_cache(maxsize=1)
def neuron_codes() -> Codes:
    """Status codes of the Neuron runtime by their number.  A millisecond, once."""
    return {row["code"]: Code(**row) for row in _table("nrt")["code"]}


@lru_cache(maxsize=1)
def log_signatures() -> frozenset[str]:
    """Names of what lines of a training log may mean.  8 ms, once, where logs are read."""
    shipped = (row["id"] for row in _table("log_signatures")["signature"])
    return frozenset((*shipped, PYTHON.id, FOLLOWS.id))


def load(read: dict[str, dict[str, Any]] | None = None) -> Catalogue:
    """The shipped catalogue.  About 30 ms: not to be done before launchers are served."""
    read = read or tables()
    xid, sxid = read["nvidia_xid"], read["nvidia_sxid"]["sxid"]
    return Catalogue(
        xids={row["number"]: _xid(row) for row in xid["xid"]},
        sxids={row["number"]: _sxid(row) for row in sxid},
        recovery={row["value"]: (row["severity"], row["text"], row["rung"])
                  for row in xid["recovery"]},
        register74=tuple(
            Bits(row["register"], sum(1 << bit for bit in row["bits"]), row["severity"],
                 row["text"])
            for row in xid["register74"]),
        link5=tuple(_link5(row) for row in xid["nvlink5"]),
        needles=tuple(
            (needle, rule) for row in read["kernel"]["rule"] for rule in [_rule(row)]
            for needle in row["needle"]),
        escalations=tuple(_escalation(row) for row in xid["escalation"]),
        reboots=_escalation({"name": "reboots", **xid["reboots"]}),
    )


def _xid(row: dict[str, Any]) -> Numbered:
    text = row.get("text", "")
    meaning = f"{row['name']}: {text}" if text else row["name"]
    return Numbered(row["number"], row["class"], row["action"], row["severity"],
                    row.get("fault", ""), meaning, row["stop"])


def _sxid(row: dict[str, Any]) -> Numbered:
    severity = WARN if row["stop"] == "no" else FATAL
    return Numbered(row["number"], "nvswitch", row["action"], severity, NVLINK_FAULT, row["name"],
                    row["stop"])


def _link5(row: dict[str, Any]) -> Link5:
    patterns = tuple(_pattern(row[key]) for key in ("before", "since"))
    return Link5(row["xid"], tuple(row["unit"].split("/")), row["status"], row["severity"],
                 row["resolution"], patterns)


def _pattern(text: str) -> tuple[int, int]:
    """32 characters of 0, 1 and - as (mask, value)."""
    mask = int("".join("0" if c == "-" else "1" for c in text), 2)
    return mask, int(text.replace("-", "0"), 2)


def _rule(row: dict[str, Any]) -> Rule:
    return Rule(
        code=row["code"], source=row["source"], class_=row["class"], bucket=row["action"],
        severity=row["severity"], expression=at_begin(row["expression"]), meaning=row["text"],
        fault=row.get("fault", ""), subject=row.get("subject", ""),
        uncorrected_in=row.get("uncorrected_in", ""), code_group=row.get("code_group", ""),
        codes=tuple(row.get("codes", ())), led=row.get("led", False),
        cases=tuple(Case(re.compile(one["match"]), one["severity"]) for one in row.get("when", ())),
    )


def _escalation(row: dict[str, Any]) -> Escalation:
    return Escalation(
        row["name"], row["count"], float(row["window_h"]), row["then"], row["text"],
        row.get("severity", FATAL), tuple(row.get("codes", ())), float(row.get("burst_s", 0.0)),
        row.get("place", False))


def render_docs() -> str:
    """docs/kernel-events.md."""
    read = tables()
    lines = [
        "# Kernel events", "",
        "Generated from agent/catalog/*.toml; do not edit. Each row is a value of the labels",
        "`source`, `code`, `class` and `action` of `holdfast_events_total`. A row without a fault",
        "is counted and shown nowhere else. How a severity is found, and where each row comes",
        "from, stands in those files.", "",
        "## XID", "", "| XID | name | class | action | training | severity | fault |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['number']} | {row['name']}{' (uncertain)' if row.get('uncertain') else ''} "
        f"| {row['class']} | {row['action']} | {row['stop']} | {row['severity']} "
        f"| {row.get('fault', '')} |"
        for row in read["nvidia_xid"]["xid"]
    ]
    lines += ["", "## Repeats", "", "| what | how often | within | then |", "|---|---|---|---|"]
    rows = [*read["nvidia_xid"]["escalation"], read["nvidia_xid"]["reboots"]]
    lines += [f"| {r['text']} | {r['count']} | {r['window_h']} h | {r['then']} |" for r in rows]
    lines += ["", "## SXid", "",
              "The switches' driver prints one error as several lines. The first counts, the rest",
              "(`Severity`, `Data`, `SOE HALT data`) is kept with it, as evidence of its incident.",
              "", "| SXid | name | table | action |", "|---|---|---|---|"]
    lines += [f"| {row['number']} | {row['name']} | {row['table']} | {row['action']} |"
              for row in read["nvidia_sxid"]["sxid"]]
    lines += ["", "## Lines without a number", "",
              "| code | source | class | action | severity | fault | meaning |",
              "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['code']} | {row['source']} | {row['class']} | {row['action']} "
        f"| {row['severity']} | {row.get('fault', '')} | {row['text']} |"
        for row in read["kernel"]["rule"]]
    lines += [
        "", "`/var/log/fabricmanager.log` is not read: a fabric manager that runs repeats there",
        "the SXids and XIDs that the drivers print into the kernel's log, and one that does not",
        "run, or leaves GPUs outside their fabric, is told by its unit and by NVML, as the fault",
        "`fabric_manager_down`.",
    ]
    lines += ["", "## Status codes of the Neuron runtime", "",
              "No lines of the kernel's: what a rank's error or a line of its log names is shown",
              "with its meaning, by the incident and by `holdfast diagnose`.", "",
              "| code | name | culprit | retry | meaning | what to do |",
              "|---|---|---|---|---|---|"]
    lines += [
        f"| {row['code']} | {row['name']} | {row['culprit']} | {row['retryable']} "
        f"| {row['meaning']} | {row['do']} |"
        for row in read["nrt"]["code"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_docs(), end="")
