"""A trial of this run's graphs under neuron_parallel_compile, so that the real start finds them.

Owns who does it: the first process of a node, while the others wait for it.  The tool runs a
program once without computing, gathers what it would compile, and compiles that with all processors
into Neuron's cache; the program prepares a rank, which compiles all of a step's graphs, and takes
no step.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.worker.rank.rank import PR_SET_PDEATHSIG, prctl

from ..config import Config, ConfigError

TOOL = "neuron_parallel_compile"
LIMIT_S = 6 * 3600.0  # of a large model's first compile
FOLDER = "precompiled"  # in work_dir
# The device's threads need not end in order.
TRIAL = """import os, sys
from holdfast.trainer import config, loop
loop.prepare(config.from_text(sys.argv[1]))
sys.stdout.flush()
os._exit(0)"""
TAIL = 300  # characters of what the tool said last


def precompile(config: Config) -> str:
    """What was done, for people; "" where it was done before.  Raises ConfigError when the tool
    fails."""
    tool = shutil.which(TOOL)
    if tool is None:
        return f"xla.precompile: {TOOL} is not installed: each rank compiles its graphs itself"
    trial = dataclasses.replace(config, xla=dataclasses.replace(config.xla, precompile=False))
    text = trial.text()
    folder = Path(config.work_dir) / FOLDER
    mark = folder / hashlib.sha256(f"{os.uname().nodename}\n{text}".encode()).hexdigest()[:32]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(mark.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if mark.exists():
                return ""
            _run(tool, text)
            mark.write_text(text)
    except OSError as error:
        file = error.filename or folder
        raise ConfigError([f"xla.precompile: {file}: {error.strerror}"]) from None
    return f"xla.precompile: graphs compiled ahead by {tool}"


def _run(tool: str, text: str) -> None:
    command = [tool, sys.executable, "-P", "-c", TRIAL, text]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=LIMIT_S, check=False, preexec_fn=die_with_parent)
    except subprocess.TimeoutExpired:
        raise ConfigError([f"xla.precompile: {tool} took longer than {LIMIT_S:.0f} s"]) from None
    if done.returncode:
        said = " ".join(done.stdout.decode("utf-8", "replace").split())[-TAIL:]
        raise ConfigError([
            f"xla.precompile: {tool} ended with code {done.returncode}: {said}: mend that, or set "
            "xla.precompile = false"])


def die_with_parent() -> None:
    """Nobody waits for it once its rank is gone."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
