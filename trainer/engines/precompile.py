"""A trial of this run's graphs under neuron_parallel_compile, so that the real start finds them.

Owns who does it: the first process of a node, while the others wait for it.  The tool runs a
program once without computing, gathers what it would compile, and compiles that with all processors
into Neuron's cache; the program prepares a rank, which compiles all of a step's graphs, and takes
no step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from holdfast.worker.rank.rank import PR_SET_PDEATHSIG, prctl

from ..checkpoint.manifest import SDK_TOOLS
from ..config import Config, ConfigError, named_class

TOOL = "neuron_parallel_compile"
LIMIT_S = 6 * 3600.0  # of a large model's first compile
FOLDER = "precompiled"  # in work_dir
# The device's threads need not end in order.
TRIAL = """import os, sys
from holdfast.trainer import config, loop
loop.prepare(config.from_text(sys.argv[1]))
sys.stdout.flush()
os._exit(0)"""
CACHE = "/var/tmp/neuron-compile-cache"  # Neuron's own default
COMPILED, COMPILED_MAX = "*/MODULE_*", 10_000  # in it, by compiler: a graph each
TAIL = 300  # characters of what the tool said last


def precompile(config: Config) -> str:
    """What was done, for people; "" where it was done before.  Raises ConfigError when the tool
    fails."""
    tool = shutil.which(TOOL)
    if tool is None:
        return f"xla.precompile: {TOOL} is not installed: each rank compiles its graphs itself"
    trial = dataclasses.replace(config, xla=dataclasses.replace(config.xla, precompile=False))
    text = trial.text()
    folder, cache = Path(config.work_dir) / FOLDER, _cache()
    mark = folder / _key(tool, config, f"{os.uname().nodename}\n{cache}\n{text}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(mark.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if mark.exists() and all((cache / one).exists() for one in _noted(mark)):
                return ""
            _run(tool, text)
            mark.write_text(json.dumps(sorted(
                str(one.relative_to(cache)) for one in itertools.islice(
                    cache.glob(COMPILED), COMPILED_MAX))))
    except OSError as error:
        file = error.filename or folder
        raise ConfigError([f"xla.precompile: {file}: {error.strerror}"]) from None
    return f"xla.precompile: graphs compiled ahead by {tool}"


def _key(tool: str, config: Config, text: str) -> str:
    """A mark's name: another compiler, or other code of the model or of ours, has another one."""
    found = hashlib.sha256(text.encode())
    status = os.stat(tool)
    found.update(f"{tool} {status.st_size} {status.st_mtime_ns}".encode())
    for package in ("torch", *SDK_TOOLS):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.update(f"{package} {importlib.metadata.version(package)}".encode())
    model = sys.modules[named_class(config.model, "model").__module__]
    beside = Path(model.__file__).parent.glob("*.py") if model.__file__ else iter(())
    for path in sorted({*beside, *Path(__file__).parents[1].rglob("*.py")}):
        found.update(f"{path}\n".encode() + path.read_bytes())
    return found.hexdigest()[:32]


def _cache() -> Path:
    """Where Neuron keeps what it compiled.  One that is no directory (s3://) is not looked into."""
    flag = re.search(r"--cache_dir[= ](\S+)", os.environ.get("NEURON_CC_FLAGS", ""))
    return Path(flag[1] if flag else os.environ.get("NEURON_COMPILE_CACHE_URL", "") or CACHE)


def _noted(mark: Path) -> list[str]:
    """What was in the cache when it was made."""
    try:
        return [str(one) for one in json.loads(mark.read_text())]
    except ValueError:  # of a release before: it says nothing of the cache
        return []


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
