"""Lines that real kernels wrote when something broke: each is recognised as what it is, or is
plain for a reason that stands beside it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.agent.catalog import load
from holdfast.agent.core.nodes.kernel_incidents import ACCELERATORS
from holdfast.agent.core.parse.kernel_line import parse

HERE = Path(__file__).resolve().parent
ROWS = [
    tuple(row.split(" | ", 1)) for row in (HERE / "kernel.txt").read_text().splitlines()
    if not row.startswith("#")
]
CATALOGUE = load.load(load.tables())


def said(line: str) -> str:
    """`source/code severity fault subject`, or "-" of a plain line."""
    found = parse(CATALOGUE, line)
    if found is None:
        return "-"
    name = f"{found.source}/{found.code}"
    return f"{name} {found.severity} {found.fault or '-'} {found.subject or '-'}"


@pytest.mark.parametrize(("wanted", "line"), ROWS)
def test_a_recorded_line_is_what_it_is(wanted, line):
    assert said(line) == ("-" if wanted.startswith("- ") else wanted)


@pytest.mark.parametrize(("wanted", "line"), ROWS)
def test_the_time_before_a_line_changes_nothing(wanted, line):
    bare = re.sub(r"^\[[^]]{8,}\] ", "", line)
    assert said(bare) == said(f"[  117.984502] {bare}") == said(line)


def test_every_kind_of_line_is_among_them():
    kinds = {wanted.partition("/")[0] for wanted, _ in ROWS if not wanted.startswith("- ")}
    assert kinds >= {*ACCELERATORS, "pcie", "cpu", "ib", "ena", "disk", "host"}
    plain = [wanted for wanted, _ in ROWS if wanted.startswith("- ")]
    assert all(len(one) > 8 for one in plain) and len(plain) > 50, "each says why"
