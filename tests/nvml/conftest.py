"""Compiles the stand-in for libnvidia-ml.so.1 and hands out states of a node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

import nvml_standin as standin

from holdfast.collectors.contract import Roots

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    """Directories with the library of a new driver and of an old one, by name."""
    try:
        return {
            name: standin.compile_library(tmp_path_factory.mktemp(f"nvml-{name}"), *flags)
            for name, flags in (("new", ()), ("old", ("-DOLD_DRIVER",)))
        }
    except standin.Missing as error:
        pytest.skip(str(error))


class Node:
    """A node whose driver says what `state` says; the file may change at any time."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.file = folder / "state.txt"
        self.library = library

    def becomes(self, state: str) -> None:
        """A file of states/, or the text itself."""
        named = HERE / "states" / f"{state}.txt"
        text = named.read_text() if "\n" not in state and named.exists() else state
        draft = self.file.with_suffix(".new")
        draft.write_text(text)
        draft.replace(self.file)

    def read(self, times: int = 1, timeout_s: float = 20.0) -> list[dict]:
        """The answers of one collector's child, asked `times` times."""
        roots = Roots(nvml=str(self.library))
        done = subprocess.run(
            [sys.executable, "-m", "holdfast.collectors", "nvidia", json.dumps(roots)],
            input="1.0\n" * times, capture_output=True, text=True, timeout=timeout_s, check=True,
            env={**os.environ, "HOLDFAST_FAKE_NVML": str(self.file)},
        )
        return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def node(libraries, tmp_path, monkeypatch):
    """A healthy node with the new driver."""
    one = Node(tmp_path, libraries["new"])
    one.becomes("healthy")
    monkeypatch.setenv("HOLDFAST_FAKE_NVML", str(one.file))
    return one
