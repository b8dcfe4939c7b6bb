"""Prometheus's own tool takes every page that the other tests compare with a file.

The page is that file to the letter, so it is looked at here, once: what is skipped without the tool
is this alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import promtool, taken_by_prometheus

TESTS = Path(__file__).resolve().parents[1]
PAGES = sorted(
    file.relative_to(TESTS).as_posix() for file in TESTS.glob("*/golden/*.txt")
    if file.read_text().startswith("# HELP ")
)


@pytest.mark.parametrize("name", PAGES)
def test_prometheus_takes_the_page(name: str) -> None:
    taken_by_prometheus((TESTS / name).read_text())


def test_the_tool_can_say_no() -> None:
    promtool()
    with pytest.raises(AssertionError, match="no help text"):
        taken_by_prometheus("# TYPE holdfast_x gauge\nholdfast_x 1\n")
