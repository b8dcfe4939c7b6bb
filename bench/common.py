"""What every measurement here shares: processes that end, rows that last, facts of the machine.

Owns starting and ending what is measured, the rows' common fields, and the statistics.  Must not
know what any one measurement means.  Standard library only, so that measuring costs little.

A bench process is a subreaper: whatever it starts, and whatever that leaves behind, becomes its
descendant, and `end_tree` ends exactly those, by pid and start time.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import math
import os
import platform
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
BOOTSTRAP = ROOT / "worker" / "bootstrap.py"
POLL_S = 0.002
END_WAIT_S = 10.0
API_TIMEOUT_S = 2.0
API_BYTES_MAX = 4 << 20
LOG_BYTES_MAX = 2 << 20
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OTHERS_VARIABLES = ("HOLDFAST_CONFIG", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID")


class Failed(RuntimeError):
    """A row that has no number, with the reason; never an end of the whole bench."""


# ------------------------------------------------------------------------------------ processes


class Place(NamedTuple):
    """One run's own directories; gone when the run is over."""

    home: Path
    environ: dict[str, str]

    @property
    def log(self) -> Path:
        return self.home / "output.log"


@contextmanager
def place(name: str) -> Iterator[Place]:
    """A scratch directory and an environment in which nothing of another run is seen."""
    with tempfile.TemporaryDirectory(prefix="hfb-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        environ = {k: v for k, v in os.environ.items() if k not in OTHERS_VARIABLES}
        environ.update(
            OMP_NUM_THREADS="1", HOLDFAST_STATE_DIR=str(home / "s"),
            HOLDFAST_RUNTIME_DIR=str(home / "r"), PYTHONUNBUFFERED="1", TMPDIR=folder,
        )
        environ.setdefault("HOLDFAST_PYTHON", sys.executable)
        (home / "steps").touch()
        yield Place(home, environ)


def become_subreaper() -> None:
    """Orphans of measured processes come back to this process, which can then end them."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


@contextmanager
def running(command: Sequence[str], where: Place) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a command in its own session; afterwards no process of its tree is left."""
    become_subreaper()
    with open(where.log, "ab") as log:
        process = subprocess.Popen(
            list(command), cwd=ROOT, env=where.environ, stdin=subprocess.DEVNULL, stdout=log,
            stderr=log, start_new_session=True, preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        end_tree(process)


def stat_fields(pid: int) -> list[str]:
    """/proc/PID/stat behind the name: [0] state, [1] parent, [11] utime, [19] start time."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()


def descendants(of: int) -> dict[int, str]:
    """pid -> start time of every process below `of`, and never `of` itself."""
    parents: dict[int, tuple[int, str]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                fields = stat_fields(int(name))
            except OSError:
                continue  # it ended between the listing and the reading
            parents[int(name)] = (int(fields[1]), fields[19])
    found: dict[int, str] = {}
    level = {of}
    while level:
        level = {pid for pid, (parent, _) in parents.items() if parent in level} - set(found)
        found.update({pid: parents[pid][1] for pid in level})
    return found


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """Asks the root to end, then kills by pid all that is left below this process."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_WAIT_S / 2)
        except subprocess.TimeoutExpired:
            pass  # a launcher with a stopped rank may wait for it; the kill below does not
    deadline = time.monotonic() + END_WAIT_S
    while left := descendants(os.getpid()):
        for pid, started in left.items():
            try:
                if stat_fields(pid)[19] == started:
                    os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        reap_orphans(process)
        if time.monotonic() > deadline:
            raise Failed(f"processes that do not end: {sorted(left)}")
        time.sleep(POLL_S)


def reap_orphans(process: subprocess.Popen[bytes]) -> None:
    """Collects what ended; the root's own status stays with its Popen object."""
    process.poll()
    for pid in descendants(os.getpid()):
        try:
            if pid != process.pid:
                os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # a grandchild: its parent collects it


def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """The exit code, None if it goes on."""
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None


def log_text(where: Place) -> str:
    try:
        with open(where.log, errors="replace") as file:
            return file.read(LOG_BYTES_MAX)
    except OSError:
        return ""


def log_tail(where: Place, lines: int = 6) -> list[str]:
    """The last lines of the run's output, then of its agent's log, without this machine's paths."""
    agents = (where.home / "s").glob("runs/*/agent.log")
    texts = [log_text(where), *(path.read_text(errors="replace")[-8000:] for path in agents)]
    return [neutral([line[:300]], where) for text in texts for line in text.splitlines()[-lines:]]


def train_command(ranks: int, run: str, *settings: str, flags: Sequence[str] = ()) -> list[str]:
    """The built-in trainer on the reference workload."""
    return [
        sys.executable, str(BOOTSTRAP), "train", "--nproc-per-node", str(ranks), "--run", run,
        *flags, "--config", str(ROOT / "trainer" / "reference.toml"), *settings,
    ]


def run_command(script: Sequence[str], ranks: int, run: str, *flags: str) -> list[str]:
    return [sys.executable, str(BOOTSTRAP), "run", "--standalone", "--nproc-per-node", str(ranks),
            "--run", run, *flags, *script]


def torchrun_command(script: Sequence[str], ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(ranks), "--max-restarts", "3", *script]


# ------------------------------------------------------------------------------------ agent's API


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=API_TIMEOUT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(API_TIMEOUT_S)
        self.sock.connect(self.path)


def api(where: Place, run: str, route: str, body: Mapping[str, object] | None = None) -> Any:
    """The private agent's answer, parsed; a refusal or an error is Failed.

    No row's time depends on it: what is measured from outside needs no agent to answer.
    """
    connection = _UnixConnection(str(where.home / "r" / run / "api.sock"))
    try:
        text = json.dumps(body) if body is not None else None
        headers = {"Content-Type": "application/json"} if body is not None else {}
        connection.request("GET" if body is None else "POST", route, text, headers)
        response = connection.getresponse()
        raw = response.read(API_BYTES_MAX)
        if response.status >= 400:
            raise Failed(f"{route}: status {response.status}: {raw[:200]!r}")
        if response.headers.get_content_type() != "application/json":
            return raw.decode(errors="replace")
        return json.loads(raw)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Failed(f"{route}: the agent's API does not answer: {error!r}") from error
    finally:
        connection.close()


def incidents(where: Place, run: str) -> list[dict[str, Any]]:
    """All incidents of the run; the API leaves out what has its default."""
    defaults = {"state": "open", "timeline": [], "lost_steps": 0, "lost_s": 0.0}
    return [{**defaults, **item} for item in api(where, run, "/api/v1/incidents?all=1")]


def boot_minus_monotonic_s() -> float:
    """CLOCK_BOOTTIME - CLOCK_MONOTONIC: how long the machine slept, nearly always 0."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def wall_minus_monotonic_s() -> float:
    return time.time() - time.monotonic()


# ------------------------------------------------------------------------------------ rows


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def revision() -> str:
    """Short commit, with + when the tree differs from it; "" outside a repository."""
    git = ["git", "-C", str(ROOT)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True,
                                text=True, timeout=10, check=True).stdout.strip()
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True,
                               text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
    return commit + ("+" if dirty else "")


def machine() -> dict[str, Any]:
    """What a number depends on besides the code."""
    model = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo")
                  if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gb": round(memory / 1e9, 1),
        "kernel": platform.release(), "load_1m": round(os.getloadavg()[0], 2),
        "python": platform.python_version(), "torch": version_of("torch"),
        "holdfast": version_of("holdfast"), "revision": revision(),
    }


def neutral(words: Sequence[str], where: Place | None = None) -> str:
    """A command line without this machine's paths."""
    text = " ".join(words).replace(sys.executable, "python").replace(str(ROOT), ".")
    text = text.replace(str(where.home), "$SCRATCH") if where else text
    return re.sub(r"/\S*/hfb-\w+", "$SHARED", text)


class Results:
    """Appends rows to bench/results/NAME-DATE.jsonl; one invocation shares one id."""

    def __init__(self, name: str, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(
                f"--out {folder}: {error.strerror}; give a folder for the rows") from None
        stamp = time.strftime("%Y-%m-%d")
        self.path = folder / f"{name}-{stamp}.jsonl"
        self.common = {
            "bench": name, "invocation": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
            "arguments": re.sub(r" ?--out[ =]\S+", "", " ".join(sys.argv[1:])).strip(),
        }
        self.machine = machine()

    def add(self, row: Mapping[str, Any]) -> None:
        full = {**self.common, "wall_s": round(time.time(), 3), **row, "machine": self.machine}
        text = json.dumps(full)
        for place in (ROOT, sys.base_prefix):  # a log in a row speaks of no machine's folders
            text = text.replace(f"{place}/", "")
        with open(self.path, "a") as file:
            file.write(f"{text}\n")


def read_rows(path: Path) -> list[dict[str, Any]]:
    with open(path) as file:
        return [json.loads(line) for line in file if line.strip()]


# ------------------------------------------------------------------------------------ statistics


def percentile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; NaN for nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def bootstrap(values: Sequence[float], draws: int = 2000, seed: int = 7) -> tuple[float, float]:
    """95 % interval of the mean, by resampling whole pairs."""
    if len(values) < 2:
        return math.nan, math.nan
    generator = random.Random(seed)
    count = len(values)
    means = [statistics.fmean(generator.choices(values, k=count)) for _ in range(draws)]
    return percentile(means, 0.025), percentile(means, 0.975)


def rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None or math.isnan(value) else round(value, digits)
