"""Pythons of their own, for what cannot be installed beside the rest: named, or made once and kept;
and what runs in them.

A variable of the environment names one, or `make NAME-python` makes it below the repository, where
the disk has room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import selectors
import shutil
import subprocess
import sys
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNIT = ROOT / "tests/unit/trainer"
MAKE_S, END_S = 900.0, 30.0
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))


@dataclasses.dataclass
class OwnPython:
    """`packages` are the words of one `pip install` each."""

    name: str
    holds: str
    free_bytes: int
    packages: tuple[tuple[str, ...], ...]
    beside: bool = False  # whether it sees what this Python has installed, too

    @property
    def variable(self) -> str:
        return f"HOLDFAST_TEST_{self.name.upper()}_PYTHON"

    @property
    def place(self) -> Path:
        return ROOT / f".{self.name}-venv"

    def path(self) -> str:
        """Skips the test, with a line, where there is none."""
        python, why = self.found
        if why:
            pytest.skip(why)
        return python

    @property
    def missing(self) -> str:
        """Why there is none; "" where there is one."""
        return self.found[1]

    @cached_property
    def found(self) -> tuple[str, str]:
        """The Python; or "", and why there is none."""
        if named := os.environ.get(self.variable, ""):
            return named, ""
        if not (self.place / "made").exists():
            return "", (f"{self.variable} names no Python of its own with {self.holds}: "
                        f"`make {self.name}-python` makes one")
        return str(self.place / "bin/python"), ""

    def make(self) -> str:
        """Why it cannot be made; "" when it is there.  One process makes it, others wait."""
        if shutil.disk_usage(ROOT).free < self.free_bytes:
            return f"less than {self.free_bytes >> 30} GB are free here"
        self.place.mkdir(exist_ok=True)
        with open(self.place / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if (self.place / "made").exists():
                return ""
            if problem := _run([sys.executable, "-m", "venv", str(self.place)]):
                return problem
            if self.beside:
                (site,) = self.place.glob("lib/python*/site-packages")
                others = [path for path in sys.path if path.endswith("site-packages")]
                (site / "beside.pth").write_text(
                    "".join(f"import site; site.addsitedir({path!r})\n" for path in others))
            for words in self.packages:
                python = str(self.place / "bin/python")
                if problem := _run([python, "-m", "pip", "install", "-q", *words]):
                    return problem
            (self.place / "made").touch()
            return ""


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"{' '.join(command[1:5])} took longer than {MAKE_S:.0f} s"
    return (done.stderr.strip().splitlines() or ["failed"])[-1][:200] if done.returncode else ""


# torch_xla 2.9 wants torch 2.9: two minutes and 7 GB.
XLA = OwnPython("xla", "torch_xla 2.9", 20 << 30, (
    ("torch==2.9.1", "torch_xla==2.9.0"), (*CONSTRAINTS, "numpy", "xxhash", "tokenizers")))
# ray brings what no other test needs: a minute and 0.6 GB.
RAY = OwnPython("ray", "ray", 4 << 30, ((*CONSTRAINTS, "ray[data]>=2.60"),), beside=True)


class Case:
    """A case of a script of tests/unit/trainer in such a Python: each of its answers is a line of
    JSON."""

    def __init__(self, python: OwnPython, script: str, *words: Any, **environ: str) -> None:
        command = [python.path(), str(UNIT / script), *map(str, words)]
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env={**os.environ, "PYTHONPATH": f"{ROOT / '.types'}:{UNIT}", "OMP_NUM_THREADS": "1",
                 **environ})

    def __enter__(self) -> Case:
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


def on_xla(case: str, *words: Any, **environ: str) -> Case:
    """On XLA's processor device."""
    return Case(XLA, "on_xla.py", case, *words, PJRT_DEVICE="CPU", **environ)


if __name__ == "__main__":
    sys.exit({one.name: one for one in (XLA, RAY)}[sys.argv[1]].make() or 0)
