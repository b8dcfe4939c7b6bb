"""Nodes on one machine: network namespaces on a bridge, which a test can hurt and heal.

Owns the nodes' cables, host names, directories, cgroups and processes, and their end.  A node has a
network namespace, a host name and directories of its own; it shares the machine's processors, disk,
kernel log and kernel.  What a test hurts is really hurt: rates by tc, loss and partitions by
nftables, delay by a forwarder of frames (this kernel may have no netem), processors by a quota,
freezing and killing by cgroups.

Everything is named after the process that made it.  Whatever a dead test left is found by that name
and removed when the next `Nodes` is made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from waiting import wait_for

MARK = "hfn"
NUMBERS = itertools.count()
LATE = str(Path(__file__).with_name("late_frames.py"))
NETNS, UNIFIED, CPU_V1 = Path("/run/netns"), Path("/sys/fs/cgroup/unified"), Path(
    "/sys/fs/cgroup/cpu")
ROOT_V2 = Path("/sys/fs/cgroup")
PERIOD_US = 10_000  # of a processor quota: short, so that a test of tens of milliseconds feels it
CABLE_MBIT = 10_000
BURST_BYTES = 64 << 10  # one segment that the kernel has not cut yet
QUEUE_MS = 200
TOOLS = (("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables"), ("nsenter", "util-linux"),
         ("unshare", "util-linux"))
ENTER = 'echo $$ > "$1/cgroup.procs"; [ -z "$2" ] || echo $$ > "$2/cgroup.procs"; ' \
        'hostname "$3"; [ -z "$4" ] || mount --bind "$4" /run; shift 4; exec "$@"'
NO_CGROUPS = "version 2 of control groups is mounted nowhere"
END_S = 60.0  # of what is killed: it may have gigabytes to give back, on a busy machine


def needed() -> None:
    """Skips the test where no such nodes can be made."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    for tool, package in TOOLS:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing (Debian package {package})")
    if _unified() is None:
        pytest.skip(NO_CGROUPS)


def _unified() -> Path | None:
    return next((one for one in (UNIFIED, ROOT_V2) if (one / "cgroup.procs").exists()
                 and (one / "cgroup.controllers").exists()), None)


def _owner() -> str:
    """A name for what this process makes.  Its start time is part of it: pids are used again."""
    return f"{MARK}-{os.getpid()}-{_started(os.getpid())}-{next(NUMBERS)}"


def _started(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _dead(name: str) -> bool:
    """Whether whoever made this is gone."""
    _, pid, started = name.split("-")[:3]
    return _started(int(pid)) != started


def _tool(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=60,
                          check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


class Place(NamedTuple):
    """Where a node's limits are set; `cpu` is where version 1 has the quota."""

    all: Path
    cpu: Path | None


class Node:
    """One of the nodes.  Commands run in it as root."""

    def __init__(self, owner: str, number: int, home: Path) -> None:
        self.number, self.name = number, f"n{number}"
        self.address = f"10.99.0.{number + 1}"
        self.netns = f"{owner}-{number}"
        self.home = home / self.name
        self.port = f"p{number}"  # at the switch
        self.run_folder = ""  # what its processes see as /run, where the node's agent listens
        self.started: list[subprocess.Popen[bytes]] = []
        unified = _unified()
        assert unified is not None
        self.cgroups = Place(unified / self.netns, CPU_V1 / self.netns
                             if (CPU_V1 / "tasks").exists() else None)

    def make(self, switch: str) -> None:
        self.home.mkdir(parents=True)
        _tool("ip", "netns", "add", self.netns)
        _tool("ip", "link", "add", "eth0", "netns", self.netns, "type", "veth", "peer", "name",
              self.port, "netns", switch)
        _tool("ip", "-n", self.netns, "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _tool("ip", "-n", self.netns, "link", "set", device, "up")
        _tool("ip", "-n", switch, "link", "set", self.port, "master", "br0", "up")
        self.cgroups.all.mkdir()
        if self.cgroups.cpu is not None:
            self.cgroups.cpu.mkdir()

    def environ(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Directories of the node's own; `/tmp/holdfast` and the like are not shared."""
        return {**os.environ, "HOLDFAST_STATE_DIR": str(self.home / "state"),
                "HOLDFAST_RUNTIME_DIR": str(self.home / "run"), "TMPDIR": str(self.home),
                "HOSTNAME": self.name, **(more or {})}

    def words(self, command: Sequence[str]) -> list[str]:
        cpu = str(self.cgroups.cpu) if self.cgroups.cpu else ""
        return ["nsenter", f"--net={NETNS / self.netns}", "unshare", "--uts",
                *(["--mount"] if self.run_folder else []), "--", "sh", "-c", ENTER, "enter",
                str(self.cgroups.all), cpu, self.name, self.run_folder, *command]

    def start(self, command: Sequence[str], environ: Mapping[str, str] | None = None,
              output: str = "") -> subprocess.Popen[bytes]:
        """Begins a command; its output goes to a file of the node's home."""
        path = self.home / (output or f"{len(self.started)}.out")
        with open(path, "wb") as file:
            process = subprocess.Popen(
                self.words(command), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, env=self.environ(environ), cwd=self.home,
                start_new_session=True)
        self.started.append(process)
        return process

    def said(self, output: str = "0.out") -> str:
        return (self.home / output).read_text(errors="replace")

    def run(self, command: Sequence[str], environ: Mapping[str, str] | None = None,
            timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.words(command), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, env=self.environ(environ), cwd=self.home,
                              timeout=timeout_s, check=False)

    def agent(self, *more: str) -> subprocess.Popen[bytes]:
        """An agent of this node's own; back when its socket is there."""
        process = self.start([sys.executable, "-P", "-m", "holdfast.agent", *more],
                             output="agent.out")
        wait_for(lambda: process.poll() is not None or any((self.home / "run").rglob("api.sock")),
                 what=lambda: self.said("agent.out"))
        assert process.poll() is None, self.said("agent.out")
        return process

    def pids(self) -> list[int]:
        try:
            return [int(one) for one in (self.cgroups.all / "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def throttled(self) -> int:
        """How often its quota of processor time ended before its period did."""
        stat = ((self.cgroups.cpu or self.cgroups.all) / "cpu.stat").read_text().split()
        return int(stat[stat.index("nr_throttled") + 1])

    def kill(self) -> None:
        """The node loses power: every process in it ends at once."""
        _kill_cgroup(self.cgroups.all)
        for process in self.started:
            process.wait(END_S)


class Nodes:
    """`with Nodes(4) as nodes:` makes them, and removes whatever they were and started."""

    def __init__(self, count: int, cable_mbit: float = CABLE_MBIT, weight: int = 1) -> None:
        """`weight`: how much more of a busy machine's processors a node gets than others do."""
        needed()
        sweep()
        self.owner = _owner()
        self.home = Path("/tmp") / self.owner
        self._switch = f"{self.owner}-sw"
        self._cable_mbit, self._weight = cable_mbit, weight
        self._drops: dict[tuple[str, ...], str] = {}
        self._slow: dict[int, float] = {}  # node -> Mbit/s of its cable
        self._slow_to: dict[tuple[int, int], float] = {}
        self._shaped: set[int] = set()
        self._delays: dict[int, subprocess.Popen[bytes]] = {}
        self.all = [Node(self.owner, number, self.home) for number in range(count)]

    def __enter__(self) -> Nodes:
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Node:
        return self.all[number]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.all)

    def _make(self) -> None:
        _tool("ip", "netns", "add", self._switch)
        _tool("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
        _tool("ip", "-n", self._switch, "link", "set", "br0", "up")
        for node in self.all:
            node.make(self._switch)
            if self._weight > 1 and node.cgroups.cpu is not None:
                (node.cgroups.cpu / "cpu.shares").write_text(str(1024 * self._weight))
            self._shape(node.number)

    def close(self) -> None:
        """Ends and removes everything, each by its name; twice does nothing."""
        for process in self._delays.values():
            process.kill()
            process.wait(END_S)
        _remove(self.owner)
        for node in self.all:
            for process in node.started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)

    @property
    def peers(self) -> str:
        """As `--peers` wants them."""
        return ",".join(f"{node.name}={node.address}" for node in self.all)

    # ----------------------------------------------------------------------------- to hurt them

    def rate(self, node: int, mbit: float | None, to: int | None = None) -> None:
        """What a node sends, at most: by its cable, or to one other node alone; None heals."""
        limits, key = (self._slow, node) if to is None else (self._slow_to, (node, to))
        limits.pop(key, None)  # type: ignore[call-overload]
        if mbit is not None:
            limits[key] = mbit  # type: ignore[index]
        self._shape(node)

    def link_rate(self, a: int, b: int, mbit: float | None) -> None:
        """The link between two nodes, in both directions."""
        self.rate(a, mbit, b)
        self.rate(b, mbit, a)

    def loss(self, node: int, percent: int, to: int | None = None) -> None:
        """Loses so many of the packets that a node sends; 0 heals."""
        key = ("loss", str(node), str(to))
        share = f"numgen random mod 100 < {percent} " if percent < 100 else ""
        self._drop({key: f"{_from_to(node, to)} {share}drop" if percent else ""})

    def blackhole(self, node: int, on: bool = True) -> None:
        """Nothing comes from it and nothing reaches it; its interface stays up."""
        self._drop({("hole", str(node), direction): f'{direction} "p{node}" drop' if on else ""
                    for direction in ("iifname", "oifname")})

    def partition(self, a: int, b: int, on: bool = True, one_way: bool = False) -> None:
        """Nothing passes from `a` to `b`, nor back unless `one_way`."""
        self._drop({("cut", str(source), str(target)):
                    f"{_from_to(source, target)} drop" if on else ""
                    for source, target in (((a, b),) if one_way else ((a, b), (b, a)))})

    def delay(self, node: int, ms: float) -> None:
        """Every frame of a node's cable is late by so much, in both directions; 0 heals."""
        old = self._delays.pop(node, None)
        inner = f"d{node}"
        if old is not None:
            old.kill()
            old.wait(END_S)
            _tool("ip", "-n", self._switch, "link", "del", inner)
            _tool("ip", "-n", self._switch, "link", "set", f"p{node}", "master", "br0")
        if ms:
            _tool("ip", "-n", self._switch, "link", "set", f"p{node}", "nomaster")
            _tool("ip", "-n", self._switch, "link", "add", inner, "type", "veth", "peer", "name",
                  f"e{node}")
            for device in (inner, f"e{node}"):
                _tool("ip", "-n", self._switch, "link", "set", device, "up")
            _tool("ip", "-n", self._switch, "link", "set", f"e{node}", "master", "br0")
            self.all[node].run([sys.executable, LATE, "whole", "eth0"])
            process = subprocess.Popen(
                ["nsenter", f"--net={NETNS / self._switch}", sys.executable, LATE, "late",
                 str(ms / 1000.0), f"p{node}", inner, f"e{node}"], stdout=subprocess.PIPE)
            self._delays[node] = process
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"

    def freeze(self, node: int, on: bool = True) -> None:
        """Its processes stand still; its network still answers, as the kernel does that."""
        place = self.all[node].cgroups.all
        (place / "cgroup.freeze").write_text("1" if on else "0")
        wait_for(lambda: f"frozen {int(on)}" in (place / "cgroup.events").read_text())

    def cpu(self, node: int, cores: float | None) -> None:
        """So many processors' time for the whole node; None heals."""
        place = self.all[node].cgroups
        if place.cpu is not None and (place.cpu / "cpu.cfs_quota_us").exists():
            (place.cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (place.cpu / "cpu.cfs_quota_us").write_text(
                str(int(cores * PERIOD_US)) if cores else "-1")
        elif (place.all / "cpu.max").exists():
            (place.all / "cpu.max").write_text(
                f"{int(cores * PERIOD_US) if cores else 'max'} {PERIOD_US}")
        else:
            pytest.skip("this machine's cgroups have no processor controller")

    def heal(self) -> None:
        """Undoes every hurt."""
        self._drops.clear()
        self._rules()
        self._slow.clear()
        self._slow_to.clear()
        for node in self.all:
            self._shape(node.number)
            if node.number in self._delays:
                self.delay(node.number, 0)
            self.freeze(node.number, False)
            self.cpu(node.number, None)

    def _drop(self, rules: Mapping[tuple[str, ...], str]) -> None:
        for key, rule in rules.items():
            self._drops.pop(key, None)
            if rule:
                self._drops[key] = rule
        self._rules()

    def _rules(self) -> None:
        """All rules in one transaction, so that nothing passes between two states, and both
        directions of a cut begin in one moment."""
        rules = "\n".join(self._drops.values())
        text = ("add table bridge hurt\ndelete table bridge hurt\ntable bridge hurt {\n"
                "chain passing {\ntype filter hook forward priority 0;\n" + rules + "\n}\n}\n")
        _tool("ip", "netns", "exec", self._switch, "nft", "-f", "-", text=text)

    def _shape(self, number: int) -> None:
        """The rates of what a node sends: one class for its cable, one for each slow target."""
        node = self.all[number]
        tc = ["tc", "-n", node.netns]
        if number in self._shaped:
            _tool(*tc, "qdisc", "del", "dev", "eth0", "root")
        self._shaped.add(number)
        cable = self._slow.get(number, self._cable_mbit)
        targets = {to: mbit for (source, to), mbit in self._slow_to.items() if source == number}
        _tool(*tc, "qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "1",
              "r2q", "1000")
        for minor, mbit in ((1, cable), *((10 + to, mbit) for to, mbit in targets.items())):
            rate = f"{min(mbit, cable):.3f}mbit"
            _tool(*tc, "class", "add", "dev", "eth0", "parent", "1:", "classid", f"1:{minor:x}",
                  "htb", "rate", rate, "ceil", rate, "burst", str(BURST_BYTES), "cburst",
                  str(BURST_BYTES))
            limit = max(BURST_BYTES, int(mbit * 125 * QUEUE_MS))
            _tool(*tc, "qdisc", "add", "dev", "eth0", "parent", f"1:{minor:x}", "bfifo", "limit",
                  str(limit))
        for to in targets:
            _tool(*tc, "filter", "add", "dev", "eth0", "parent", "1:", "protocol", "ip", "u32",
                  "match", "ip", "dst", f"{self.all[to].address}/32", "flowid", f"1:{10 + to:x}")


def _from_to(source: int, target: int | None) -> str:
    return f'iifname "p{source}"' + (f' oifname "p{target}"' if target is not None else "")


# ------------------------------------------------------------------------------- what is left


def sweep() -> None:
    """Removes what tests left behind that are dead by now."""
    unified = _unified() or ROOT_V2
    for folder in (NETNS, unified, CPU_V1, Path("/tmp")):
        for found in folder.glob(f"{MARK}-*-*-*"):
            owner = "-".join(found.name.split("-")[:4])
            if _dead(owner):
                _remove(owner)


def left(owner: str) -> list[str]:
    """Whatever of this name there still is."""
    unified = _unified() or ROOT_V2
    return sorted(str(found) for folder in (NETNS, unified, CPU_V1, Path("/tmp"))
                  for pattern in (owner, f"{owner}-*") for found in folder.glob(pattern))


def _remove(owner: str) -> None:
    """Processes first: what they hold goes with them.  Then names, then directories."""
    unified = _unified() or ROOT_V2
    for cgroup in unified.glob(f"{owner}-*"):
        with contextlib.suppress(OSError):
            (cgroup / "cgroup.freeze").write_text("0")
        _kill_cgroup(cgroup)
    for cgroup in [*unified.glob(f"{owner}-*"), *CPU_V1.glob(f"{owner}-*")]:
        _remove_cgroup(cgroup)
    for name in NETNS.glob(f"{owner}-*"):
        _tool("ip", "netns", "del", name.name)
    shutil.rmtree(Path("/tmp") / owner, ignore_errors=True)


def _kill_cgroup(cgroup: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        (cgroup / "cgroup.kill").write_text("1")
        wait_for(lambda: not (cgroup / "cgroup.procs").read_text().strip(), END_S)


def _remove_cgroup(cgroup: Path) -> None:
    """Once the last of what was killed in it is gone.  What was just being started when the others
    were killed enters behind that."""
    deadline_s = time.monotonic() + END_S
    while cgroup.exists():
        try:
            cgroup.rmdir()
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            with contextlib.suppress(OSError):  # CPU_V1's has no such file
                (cgroup / "cgroup.kill").write_text("1")
            time.sleep(0.005)
