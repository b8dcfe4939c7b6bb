"""A Python of its own with torch_xla 2.9, which wants torch 2.9: named, or made once and kept; and
what runs in it.

HOLDFAST_TEST_XLA_PYTHON names one.  Else one is made below .xla-venv, where CI runs and 20 GB are
free: two minutes and 7 GB.  `make xla-python` makes it anywhere.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "tests/unit/trainer"
PLACE = ROOT / ".xla-venv"
FREE_BYTES = 20 << 30
MAKE_S, END_S = 900.0, 30.0
PACKAGES = (("torch==2.9.1", "torch_xla==2.9.0"),
            ("-c", str(ROOT / "constraints.txt"), "numpy", "xxhash", "tokenizers"))


def xla_python() -> str:
    """Skips the test, with a line, where there is none."""
    python, why = found()
    if why:
        pytest.skip(why)
    return python


def missing() -> str:
    """Why there is none; "" where there is one."""
    return found()[1]


@lru_cache(maxsize=1)
def found() -> tuple[str, str]:
    """The Python; or "", and why there is none."""
    if named := os.environ.get("HOLDFAST_TEST_XLA_PYTHON", ""):
        return named, ""
    if not (PLACE / "made").exists():
        if os.environ.get("CI") != "true":
            return "", ("HOLDFAST_TEST_XLA_PYTHON names no Python of its own with torch_xla 2.9: "
                        "`make xla-python` makes one")
        if problem := make():
            return "", f"no Python of its own with torch_xla 2.9: {problem}"
    return str(PLACE / "bin/python"), ""


def make() -> str:
    """Why it cannot be made; "" when it is there.  One process makes it, others wait for that."""
    if shutil.disk_usage(ROOT).free < FREE_BYTES:
        return f"less than {FREE_BYTES >> 30} GB are free here"
    PLACE.mkdir(exist_ok=True)
    with open(PLACE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (PLACE / "made").exists():
            return ""
        python = str(PLACE / "bin/python")
        steps = [[sys.executable, "-m", "venv", str(PLACE)]]
        steps += [[python, "-m", "pip", "install", "-q", *words] for words in PACKAGES]
        for step in steps:
            try:
                done = subprocess.run(step, capture_output=True, text=True, timeout=MAKE_S,
                                      check=False)
            except subprocess.TimeoutExpired:
                return f"{' '.join(step[1:5])} took longer than {MAKE_S:.0f} s"
            if done.returncode:
                return (done.stderr.strip().splitlines() or ["pip failed"])[-1][:200]
        (PLACE / "made").touch()
        return ""


class OnXla:
    """A case of tests/unit/trainer/on_xla.py on XLA's processor device, in a process of its own:
    each of its answers is a line of JSON."""

    def __init__(self, case: str, *words: Any, **environ: str) -> None:
        command = [xla_python(), str(UNIT / "on_xla.py"), case, *map(str, words)]
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env={**os.environ, "PYTHONPATH": f"{ROOT / '.types'}:{UNIT}", "OMP_NUM_THREADS": "1",
                 "PJRT_DEVICE": "CPU", **environ})

    def __enter__(self) -> OnXla:
        return self

    def __exit__(self, *_error: object) -> None:
        """It ends what it has started, where it still can."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=END_S)
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def answer(self, limit_s: float) -> Any:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as ready:
            ready.register(self.process.stdout, selectors.EVENT_READ)
            line = self.process.stdout.readline() if ready.select(limit_s) else b""
        if not line:
            self.process.kill()
            self.process.wait()
            self.errors.seek(0)
            raise AssertionError(self.errors.read()[-3000:].decode(errors="replace"))
        return json.loads(line)

    def ask(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")
        self.process.stdin.flush()


if __name__ == "__main__":
    sys.exit(make())
