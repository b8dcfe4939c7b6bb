"""`python -m holdfast.agent.evidence --pid P --json`: what a process is doing, within 2 seconds.

Owns one look at one process: its scheduler state, the kernel function it waits in, and its Python
stacks.  Runs as the job's user in a process of its own, started by the launcher, so that nothing
here can hang or crash the agent.  Reads only; the process is never stopped for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from holdfast.agent.system import procfs

LIMIT_S = 2.0
# read write fstat lseek pread64 pwrite64 readv writev fsync fdatasync ftruncate getdents getdents64
OF_A_FILE = ("0", "1", "5", "8", "17", "18", "19", "20", "74", "75", "77", "78", "217")
ANSWER_MAX_CHARS = 16_000
STACK_MAX = 64  # frames of a thread
THREADS_MAX = 64
TEXT_MAX = 200
FILES_MAX, FOLDERS_MAX = 1024, 16  # descriptors looked at, and folders named
NO_FILES = ("/dev/", "/proc/", "/sys/", "/memfd:")
# Frames of these are how a program waits or is started, not where its author would look.
NOT_USER = ("/torch/", "/threading.py", "/holdfast/worker/", "/worker/rank/", "/selectors.py",
            "<frozen ", "/site-packages/", "/dist-packages/", "/lib/python3")


def look(pid: int, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Everything known about `pid` now: where, stack (innermost first), state, wchan, threads,
    and `error` where something could not be had."""
    begin_s = time.monotonic()
    stat = procfs.parse_stat(procfs.read_small(f"/proc/{pid}/stat"))
    if stat is None:
        return _nothing("no such process")
    found = _nothing("")
    found["state"] = stat.state
    found["wchan"] = procfs.read_small(f"/proc/{pid}/wchan").decode("ascii", "replace").strip("0\n")
    found["syscall"] = procfs.read_small(f"/proc/{pid}/syscall").decode("ascii", "replace")[:80]
    found["path"] = _path(pid, str(found["syscall"]))
    found["open"] = _open(pid)
    threads, error = _python_stacks(pid, limit_s - (time.monotonic() - begin_s))
    found["error"] = error
    main = next((one for one in threads if one["main"]), threads[0] if threads else None)
    if main is not None:
        found["stack"] = main["stack"]
        found["where"] = where(main["frames"])
    found["threads"] = [
        {"name": one["name"], "active": one["active"], "stack": one["stack"][:8]}
        for one in threads if one is not main
    ][:THREADS_MAX]
    return _bounded(found)


def _path(pid: int, syscall: str) -> str:
    """The file whose descriptor is the first argument of the call that it waits in."""
    words = syscall.split()
    if platform.machine() != "x86_64" or len(words) < 2 or words[0] not in OF_A_FILE:
        return ""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    except (OSError, ValueError):
        return ""
    return path[:TEXT_MAX] if path.startswith("/") else ""


def _open(pid: int) -> list[str]:
    """Folders in which it has files open, those of the newest descriptors first.  The kernel says
    them out of its memory: no server is asked."""
    folders: dict[str, None] = {}
    try:
        numbers = sorted((int(one) for one in os.listdir(f"/proc/{pid}/fd")), reverse=True)
    except (OSError, ValueError):
        return []
    for number in numbers[:FILES_MAX]:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
        except OSError:
            continue  # closed since
        if path.startswith("/") and not path.startswith(NO_FILES):
            folders[os.path.dirname(path)[:TEXT_MAX]] = None
        if len(folders) >= FOLDERS_MAX:
            break
    return list(folders)


def _bounded(found: dict[str, Any]) -> dict[str, Any]:
    """Small enough to travel in one packet: other threads go first, then outer frames."""
    while len(json.dumps(found)) > ANSWER_MAX_CHARS:
        if found["threads"]:
            found["threads"].pop()
        else:
            found["stack"] = found["stack"][: len(found["stack"]) // 2]
    return found


def where(frames: list[dict[str, Any]]) -> str:
    """The innermost frame in the user's own code as `file.py:12 in f`; else the innermost."""
    stdlib = sysconfig.get_paths()["stdlib"]
    for frame in frames:
        file = str(frame.get("filename") or "")
        if not file.startswith(stdlib) and not any(part in file for part in NOT_USER):
            return _line(frame)
    return _line(frames[0]) if frames else ""


def _line(frame: dict[str, Any]) -> str:
    file = str(frame.get("short_filename") or frame.get("filename") or "?")
    return f"{file}:{frame.get('line', 0)} in {frame.get('name', '?')}"[:TEXT_MAX]


def _nothing(error: str) -> dict[str, Any]:
    return {"where": "", "stack": [], "state": "", "wchan": "", "threads": [], "error": error}


def _python_stacks(pid: int, limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """Stacks by py-spy without stopping the process (its default mode fails on a stopped one)."""
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return [], "py-spy is not installed: pip install py-spy to see Python stacks"
    command = [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=max(0.1, limit_s), check=False)
    except subprocess.TimeoutExpired:
        return [], f"py-spy did not answer within {limit_s:.1f} s"
    except OSError as error:
        return [], f"py-spy: {error.strerror}"
    if done.returncode != 0:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
        return [], f"py-spy: {lines[-1][:TEXT_MAX] if lines else 'failed'}"
    try:
        dumped = json.loads(done.stdout)
    except ValueError:
        return [], "py-spy: no valid answer"
    return [_thread(one, pid) for one in dumped[:THREADS_MAX]], ""


def _thread(dumped: dict[str, Any], pid: int) -> dict[str, Any]:
    frames = dumped.get("frames", [])[:STACK_MAX]
    name = str(dumped.get("thread_name") or "")
    return {
        "name": name[:TEXT_MAX], "main": name == "MainThread" or dumped.get("os_thread_id") == pid,
        "active": bool(dumped.get("active")), "frames": frames,
        "stack": [_line(frame) for frame in frames]}


def main() -> int:
    """Exit 0 when something was found, 1 when the process is gone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pid", type=int, required=True)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = look(given.pid)
    if given.json:
        print(json.dumps(found))
    else:
        print(f"{found['where'] or '(no Python frame)'}  state {found['state']}  {found['wchan']}")
        for line in found["stack"]:
            print(f"  {line}")
        if found["error"]:
            print(found["error"], file=sys.stderr)
    return 0 if found["state"] else 1


if __name__ == "__main__":
    sys.exit(main())
