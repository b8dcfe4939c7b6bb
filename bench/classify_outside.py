"""Excerpts of public threads and logs, labelled before any rule was looked at: how many come right.

Owns the scoring.  The texts belong to those who wrote them and are not in this repository; an index
of those that were scored, without text, is bench/outside_index.jsonl.  Its `half`: rules were
written against seen, opened, dev, third_dev and fourth_dev, and against fourth_opened after it had
been scored once; sealed and third_sealed stayed closed; measured was opened after its score.  The
fourth set is split by its threads' hashes: opened where the SHA-256 of the source is odd.  Against
fifth no rule was written; one was taken back for what it did there.  Rules were written against
sixth_dev; sixth stayed closed and was scored once.  The seventh set, in texts written anew with the
programs' own messages, was scored whole first; then rules were written against seventh_dev, and
seventh was scored once more.  The eighth, of training jobs' logs alone and written anew as well,
was scored whole first; rules were written against eighth_dev, and eighth was scored once more.
Half of its labels were given twice, by readers who did not know each other's: what they did not
agree on was decided by a third.  A case is a line of JSON: id, source, project, text, culprit,
role (root, cascade, harmless), retryable, family, and `disputed`, where who labelled it would not
bet on it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.logs import files

WANTED, WANTED_USEFUL = 0.85, 0.95
NOTHING = "nothing known"
INDEXED = (
    "id", "source", "project", "culprit", "role", "retryable", "family", "half", "disputed")


def read(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """(name, cases) of a file, or of each file in a folder."""
    paths = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [(one.stem, [json.loads(line) for line in one.read_text().splitlines() if line.strip()])
            for one in paths]


def judge(case: dict[str, Any]) -> dict[str, Any]:
    """What the diagnosis says of one case, without its text."""
    catalogue = files.load_catalogue()
    scanner = Scanner(catalogue, families=files.load_families())
    scanner.feed(case["text"].encode("utf-8", "replace"))
    scanner.close()
    found = logroot.diagnose(scanner.matches, catalogue.exit_codes)
    got = found.root.culprit if found.root else "none"
    useful = found.root is not None or not found.hint.startswith(NOTHING)
    return {
        "id": case["id"], "role": case["role"], "expected": case["culprit"], "got": got,
        "rule": found.root.signature if found.root else "", "useful": useful,
        "right": right(case["role"], case["culprit"], got, useful),
        "disputed": case.get("disputed"),  # None: nobody was asked
    }


def right(role: str, expected: str, got: str, useful: bool) -> bool:
    """A consequence blames nobody but is told; a culprit that is not known may be left open."""
    if role == "harmless":
        return got == "none"
    if role == "cascade":
        return got in ("none", "unknown") and useful
    return got == expected or (expected == "unknown" and got == "none" and useful)


def score(rows: Iterable[dict[str, Any]]) -> dict[str, Any]:
    rows = list(rows)
    failures = [one for one in rows if one["role"] != "harmless"]
    beyond_dispute = [one for one in failures if one["disputed"] is False]
    by_culprit: dict[str, list[int]] = {}
    for one in failures:
        of = by_culprit.setdefault(f"{one['role']} {one['expected']}", [0, 0])
        of[0] += one["right"]
        of[1] += 1
    return {
        "cases": len(rows), "failures": len(failures),
        "right": sum(one["right"] for one in failures),
        "useful": sum(one["useful"] for one in failures),
        "beyond_dispute": [sum(one["right"] for one in beyond_dispute), len(beyond_dispute)],
        "harmless": len(rows) - len(failures),
        "harmless_blamed": sum(one["role"] == "harmless" and not one["right"] for one in rows),
        "cascades_blamed": sum(
            one["role"] == "cascade" and one["got"] not in ("none", "unknown") for one in rows),
        "by_culprit": dict(sorted(by_culprit.items())),
    }


def good(found: dict[str, Any]) -> bool:
    most = max(1, found["failures"])
    return bool(found["right"] >= WANTED * most and found["useful"] >= WANTED_USEFUL * most
                and not found["harmless_blamed"] and not found["cascades_blamed"])


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Expected against got, of the failures that have a root."""
    counts = Counter((one["expected"], one["got"]) for one in rows if one["role"] == "root")
    names = sorted({name for pair in counts for name in pair})
    lines = [" " * 10 + "".join(f"{name:>9}" for name in names)]
    for expected in sorted({pair[0] for pair in counts}):
        cells = "".join(f"{counts[expected, name] or '.':>9}" for name in names)
        lines.append(f"{expected:<10}{cells}")
    return lines


def show(name: str, found: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    def share(part: int) -> str:
        return f"{part} of {found['failures']} ({100 * part / max(1, found['failures']):.1f} %)"

    return [
        f"{name}",
        f"  culprit right     {share(found['right'])}",
        *([f"  beyond dispute    {found['beyond_dispute'][0]} of {found['beyond_dispute'][1]}"]
          if found["beyond_dispute"][1] else []),
        f"  says something    {share(found['useful'])}",
        f"  harmless blamed   {found['harmless_blamed']} of {found['harmless']}",
        f"  cascades as root  {found['cascades_blamed']}",
        *(f"    {kind:<18}{good_} of {of}" for kind, (good_, of) in found["by_culprit"].items()),
        "  expected (down) against got (across), roots alone",
        *(f"    {line}" for line in table(rows)),
    ]
