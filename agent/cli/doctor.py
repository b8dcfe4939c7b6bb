"""`holdfast doctor`: what this host lacks, and what that costs.

Owns one probe for each thing that Holdfast can use; every probe is bounded, changes nothing, and
its finding names the promise or the command that is lost.  A probe that fails is a finding.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from holdfast.agent.system import procfs
from holdfast.collectors import clock, nvme, nvme_smart
from holdfast.collectors.contract import NoData, Roots

from .doctor_node import HAVE, LACK, NEED, Finding, neuron, orders
from .launch import job_python
from .store import findings as store_findings
from .text import (
    BAD,
    CARE,
    GOOD,
    WIDTH,
    Failure,
    Line,
    Span,
    field,
    line,
    print_json,
    show,
    wrapped,
)

PROBE_TIMEOUT_S = 20.0  # a cold `import torch` reads 300 MB
STYLES = {HAVE: GOOD, LACK: CARE, NEED: BAD}
DISK_FREE_MIN_BYTES = 1 << 30
CAP_SYS_PTRACE = 1 << 19
CAP_SYSLOG = 1 << 34
JOURNALS = ("/run/log/journal", "/var/log/journal")


def doctor(options: argparse.Namespace) -> int:
    """0 when a job can run here, 1 when something that it needs is missing."""
    findings = [*(probe(os.environ) for probe in PROBES), orders(options.config),
                *store_findings(options.config)]
    if options.json:
        print_json([one._asdict() for one in findings])
    else:
        show(report(findings))
    return 1 if any(one.state == NEED for one in findings) else 0


def report(findings: list[Finding]) -> list[Line]:
    lines: list[Line] = []
    width = max(len(one.what) for one in findings) + 2
    for one in findings:
        head = [Span(one.state.ljust(6), STYLES[one.state]), Span(one.what.ljust(width))]
        first, *more = wrapped(one.said, WIDTH - 6 - width) or [""]
        lines.append(line(*head, first))
        lines += [line(" " * (6 + width), row) for row in more]
        if one.cost and one.state != HAVE:
            lines += field("", f"without: {one.cost}", indent=6 + width)
    lacking = [one for one in findings if one.state != HAVE]
    return [*lines, (), line(f"{len(lacking)} of {len(findings)} things are missing here"
                             if lacking else "nothing is missing here")]


# -------------------------------------------------------------------------------------- probes


def job_interpreter(environ: Mapping[str, str]) -> Finding:
    """The interpreter that `holdfast run` would take, and the torch that it has."""
    what, cost = "job's Python", "`holdfast run` cannot start here"
    try:
        python = job_python([], environ)
    except Failure as failure:
        return Finding(what, NEED, str(failure), cost)
    # Before 3.11 no flag keeps the current folder, whose json.py anybody may have written, off the
    # path of `-c` without the job's own PYTHONPATH going as well.
    code = (
        "import sys\nsys.path[:1] = [p for p in sys.path[:1] if p]\nimport importlib.util as u\n"
        "version = '%d.%d.%d' % sys.version_info[:3]\n"
        "spec = u.find_spec('torch')\n"
        "from importlib import metadata as m\n"
        "print(version, m.version('torch') if spec else '-')"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True,
                              timeout=PROBE_TIMEOUT_S, check=True)
        version, torch = done.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finding(what, NEED, f"{python}: {error}", cost)
    if tuple(int(part) for part in version.split(".")[:2]) < (3, 9):
        return Finding(what, NEED, f"{python} is {version}; 3.9 or later is needed", cost)
    if torch == "-":
        return Finding(what, LACK, f"{version} without torch ({python})",
                       "no warm start, no step and phase of a script; no built-in trainer")
    return Finding(what, HAVE, f"{version} with torch {torch} ({python})")


def trainer(environ: Mapping[str, str]) -> Finding:
    """What the built-in trainer needs, in the Python that would run it."""
    cost = "`holdfast train`; install holdfast[trainer] there"
    code = (
        "import sys\nsys.path[:1] = [p for p in sys.path[:1] if p]\nimport importlib.util as u\n"
        "names = ['torch', 'tokenizers', 'numpy', 'holdfast']\n"
        "print(*[name for name in names if u.find_spec(name) is None])"
    )
    try:
        python = job_python([], environ)
        done = subprocess.run([python, "-c", code], capture_output=True, text=True,
                              timeout=PROBE_TIMEOUT_S, check=True)
    except Failure as failure:
        return Finding("trainer", LACK, str(failure), cost)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("trainer", LACK, f"{python}: {error}", cost)
    lacking = done.stdout.split()
    if lacking:
        return Finding("trainer", LACK, f"no {', '.join(lacking)} in {python}", cost)
    return Finding("trainer", HAVE, "holdfast[trainer] is installed")


def memfd(_: Mapping[str, str]) -> Finding:
    cost = "no page: no step, phase or hang of any rank is seen"
    try:
        import fcntl

        descriptor = os.memfd_create("holdfast-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, 4096)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return Finding("memfd", NEED, f"sealed memfds fail: {error}", cost)
    return Finding("memfd", HAVE, "sealed memfds work")


def pidfd(_: Mapping[str, str]) -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        return Finding("pidfd", LACK, f"pidfd_open fails: {error}",
                       "a rank's death is seen by its launcher only, not by the agent at once")
    return Finding("pidfd", HAVE, "deaths are seen in under a millisecond")


def py_spy(_: Mapping[str, str]) -> Finding:
    beside = Path(sys.executable).with_name("py-spy")
    found = str(beside) if beside.is_file() else shutil.which("py-spy")
    cost = "a hung rank is named without its source line"
    if not found:
        return Finding("py-spy", LACK, "not installed beside this Python", cost)
    try:
        done = subprocess.run([found, "--version"], capture_output=True, text=True, check=True,
                              timeout=PROBE_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Finding("py-spy", LACK, f"{found}: {error}", cost)
    return Finding("py-spy", HAVE, done.stdout.strip())


def effective_capabilities() -> int:
    for row in Path("/proc/self/status").read_text().splitlines():
        if row.startswith("CapEff:"):
            return int(row.split()[1], 16)
    return 0


def ptrace(_: Mapping[str, str]) -> Finding:
    cost = "stacks of ranks cannot be read; a hung rank is named without its source line"
    try:
        scope = int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return Finding("ptrace", HAVE, "Yama is off: a user may read own processes' stacks")
    if scope <= 1:
        return Finding("ptrace", HAVE, f"ptrace_scope {scope}: a rank permits its own reader")
    if effective_capabilities() & CAP_SYS_PTRACE:
        return Finding("ptrace", HAVE, f"ptrace_scope {scope}, and CAP_SYS_PTRACE is held")
    return Finding("ptrace", LACK, f"ptrace_scope {scope}: only CAP_SYS_PTRACE may", cost)


def kernel_log(_: Mapping[str, str]) -> Finding:
    cost = "kernel lines (out of memory, I/O errors) are not read; wait statuses are"
    try:
        with open("/dev/kmsg", "rb", buffering=0):
            pass
    except OSError as error:
        why = f"/dev/kmsg: {error.strerror}"
        readable = (one for one in JOURNALS if os.access(one, os.R_OK | os.X_OK))
        kept = [one for one in readable if any(os.scandir(one))]
        if kept and shutil.which("journalctl"):
            return Finding("kernel log", HAVE, f"{why}; read through journalctl from {kept[0]}")
        return Finding("kernel log", LACK, f"{why}, and no journal that may be read", cost)
    return Finding("kernel log", HAVE, "/dev/kmsg is readable")


def cgroup(_: Mapping[str, str]) -> Finding:
    cost = "an out-of-memory kill is told by the kernel log only, else shown as rank_killed"
    try:
        rows = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError as error:
        return Finding("cgroup", LACK, f"/proc/self/cgroup: {error.strerror}", cost)
    own = [row.partition("::")[2] for row in rows if row.startswith("0::")]
    for place in own:
        events = Path("/sys/fs/cgroup") / place.lstrip("/") / "memory.events"
        if events.is_file():
            return Finding("cgroup", HAVE, f"v2 with memory events ({place})")
    if any(":memory:" in row for row in rows):
        return Finding("cgroup", HAVE, "v1 with a memory controller")
    return Finding("cgroup", LACK, "no memory controller here", cost)


def systemd(_: Mapping[str, str]) -> Finding:
    if Path("/run/systemd/system").is_dir():
        return Finding("systemd", HAVE, "runs here")
    return Finding("systemd", LACK, "does not run here",
                   "nothing restarts a node agent; private agents, one a run, need none")


def state_directory(environ: Mapping[str, str]) -> Finding:
    default = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "holdfast"
    place = Path(environ.get("HOLDFAST_STATE_DIR") or default)
    there = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding("state directory", NEED, f"{there} is not writable",
                       "no journal and no store: no plan; set HOLDFAST_STATE_DIR")
    if free < DISK_FREE_MIN_BYTES:
        return Finding("state directory", LACK, f"{free >> 20} MB free for {place}",
                       "the journal stalls when the disk is full")
    return Finding("state directory", HAVE, f"{place}, {free >> 30} GB free")


def node_agent(_: Mapping[str, str]) -> Finding:
    if Path("/run/holdfast/agent.sock").is_socket():
        return Finding("node agent", HAVE, "/run/holdfast/agent.sock is there")
    return Finding("node agent", LACK, "none on this node",
                   "each run starts a private one: no faults of the host, no memory of the node")


def processes(_: Mapping[str, str]) -> Finding:
    if procfs.hides_others():
        return Finding("processes", LACK, "/proc hides those of other users (hidepid)",
                       "an agent that may not see them lets no order for the node leave, and takes "
                       "each rank that stands still for one that computes")
    return Finding("processes", HAVE, "/proc shows those of all users")


def cores(_: Mapping[str, str]) -> Finding:
    number = len(os.sched_getaffinity(0))
    if number < 2:
        return Finding("cores", LACK, "1 core", "the agent and a rank share it: slower verdicts")
    return Finding("cores", HAVE, f"{number} cores")


def drives(_: Mapping[str, str]) -> Finding:
    """Whether an agent with the permissions of this process would read SMART."""
    roots = Roots()
    if not nvme.drives(roots):
        return Finding("NVMe SMART", HAVE, "no NVMe drive here")
    why_not = nvme_smart.NvmeSmartCollector().here(roots)
    if why_not:
        return Finding("NVMe SMART", LACK, why_not, "wear, media errors and warnings of the drives "
                       "are not seen; state and temperature are")
    return Finding("NVMe SMART", HAVE, "readable")


def time_service(_: Mapping[str, str]) -> Finding:
    cost = "lines of several nodes cannot be put in order; object stores may refuse requests"
    try:
        state = clock.ask_kernel()
    except NoData as reason:
        return Finding("clock", LACK, str(reason), "whether the clock is kept is not seen")
    if not state.synchronized:
        return Finding("clock", LACK, "no time service keeps it", cost)
    return Finding("clock", HAVE, f"kept, off by at most {state.max_error_s:.3f} s")


PROBES: tuple[Callable[[Mapping[str, str]], Finding], ...] = (
    job_interpreter, trainer, memfd, pidfd, py_spy, ptrace, kernel_log, cgroup, systemd,
    state_directory, node_agent, processes, cores, drives, time_service, neuron,
)
