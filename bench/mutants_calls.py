"""Which test calls which function of ours, and for how long it runs: a plugin of pytest.

Owns what a mutant's choice of tests is made from (`bench.mutants`): a test that never calls the
mutated function cannot notice.  Loaded by `-p bench.mutants_calls`, writes to HOLDFAST_CALLS.
Knows calls of pytest's own process alone, threads included; those of a child are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

OURS = ".types/holdfast/"  # how the tree's packages are imported


class Calls:
    """One run of the tests."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.codes: set[CodeType] = set()
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self.imported: list[str] = []  # called before any test began
        self._listen()

    def _listen(self) -> None:
        """Anew for each test: one that debugs or profiles may have taken the place."""
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, _event: str, _argument: Any) -> None:
        self.codes.add(frame.f_code)  # None: the lines of this call are of no interest

    def _taken(self) -> list[str]:
        codes, self.codes = self.codes, set()
        return sorted({name for code in codes if (name := name_of(code))})

    def pytest_collection_finish(self) -> None:
        self.imported = self._taken()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._taken()
        self._listen()
        begin_s = time.perf_counter()
        result = yield
        self.tests[item.nodeid] = (time.perf_counter() - begin_s, self._taken())
        return result

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.file.write_text(json.dumps({"tests": self.tests, "imported": self.imported}))


def name_of(code: CodeType) -> str:
    """`agent/core/ladder.py:next_rung`, whatever is nested in it; "" for what is not ours."""
    _, found, module = code.co_filename.partition(OURS)
    return f"{module}:{code.co_qualname.split('.<locals>')[0]}" if found else ""


def pytest_configure(config: pytest.Config) -> None:
    if file := os.environ.get("HOLDFAST_CALLS"):
        config.pluginmanager.register(Calls(Path(file)))
