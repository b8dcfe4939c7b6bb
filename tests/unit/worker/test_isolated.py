"""What stands in the current folder, or in a PYTHONPATH that names it, enters no child of ours."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from holdfast.agent.checks import round as checks_round
from holdfast.agent.cli import accept, demo
from holdfast.agent.cli.doctor import job_interpreter
from holdfast.agent.config.settings import Collectors
from holdfast.agent.peers import attend as peers_attend
from holdfast.agent.peers import tester as peers_tester
from holdfast.agent.system import die_with_parent
from holdfast.collectors import PROBED
from holdfast.collectors.contract import Roots
from holdfast.worker import page as pages
from holdfast.worker.launcher import forking
from holdfast.worker.launcher.agent_link import own_module
from holdfast.worker.rank.rank import Program, Seat

ROOT = Path(__file__).resolve().parents[3]
TYPES = str(ROOT / ".types")
TRAPS = sorted(sys.stdlib_module_names - {"sys", "builtins", "__future__"} - {
    name for name in sys.stdlib_module_names if name.startswith("_")} | {
    "msgspec", "aiohttp", "prometheus_client", "sitecustomize", "usercustomize"})
# Every file that starts a process, and the test here that tries it; "": it runs no Python of ours,
# or one that the user named.
STARTERS = {
    "agent/actions/root_helper.py": "",
    "agent/actions/schedulers/slurm.py": "",
    "agent/checks/runner.py": "check",
    "agent/checks/torch_entry.py": "check",
    "agent/checks/vendor.py": "",
    "agent/cli/accept.py": "accept",
    "agent/cli/check.py": "check",
    "agent/cli/child.py": "demo",
    "agent/cli/doctor.py": "doctor",
    "agent/cli/doctor_node.py": "",
    "agent/cli/launch.py": "launcher",
    "agent/cli/start_on.py": "launcher",
    "agent/config/child.py": "agents",
    "agent/daemon/parts/checks.py": "agents",
    "agent/daemon/peer_rounds.py": "agents",
    "agent/evidence/__main__.py": "",
    "agent/peers/tester.py": "peers",
    "agent/store/own_etcd.py": "",
    "agent/system/child_probe.py": "collectors",
    "agent/system/die_with_parent.py": "",
    "agent/system/systemd.py": "",
    "agent/telemetry/collectors.py": "collectors",
    "agent/telemetry/journalctl.py": "journalctl",
    "collectors/amd.py": "",
    "collectors/neuron.py": "",
    "collectors/nvme_smart.py": "",
    "collectors/sources/neuron_monitor.py": "",
    "collectors/units.py": "",
    "trainer/checkpoint/manifest.py": "",
    "trainer/engines/precompile.py": "",  # behind a vendor's tool; -P, as test_xla.py looks
    "trainer/feed/fetch.py": "rank",  # in the job's Python, with the path that its rank has
    "worker/launcher/agent_link.py": "agent",
    "worker/launcher/child_tasks.py": "evidence",
    "worker/launcher/forking.py": "rank",
    "worker/launcher/launcher.py": "launcher",
    "worker/launcher/log_watch.py": "logs",
}
STARTS = re.compile(r"subprocess\.(run|Popen|call|check)|subprocess_exec\(|os\.exec|posix_spawn"
                    r"|prober\.ask\(|\bHelper\(")  # these two start what they are handed


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder in which every module's name is taken by a file that leaves a mark."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(
            f"open({str(tmp_path / 'sprung')!r}, 'a').write({name!r} + chr(10))\n"
            f"raise ImportError('the trap {name}')\n")
    monkeypatch.chdir(folder)
    # An empty part of PYTHONPATH is the current folder: PYTHONPATH=$PYTHONPATH:/x makes one.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", str(folder), ".", TYPES)))
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    return folder


def sprung(tmp_path: Path) -> str:
    mark = tmp_path / "sprung"
    return mark.read_text() if mark.exists() else ""


def run(command: list[str], environ: dict[str, str], asked: str = "") -> str:
    done = subprocess.run(command, env=environ, input=asked, capture_output=True, text=True,
                          timeout=60, check=False)
    return f"{done.stdout}\n{done.stderr}"


def agent() -> str:
    command, environ = own_module("holdfast.agent", dict(os.environ))
    return run([*command, "--help"], environ)


def evidence() -> str:
    command, environ = own_module("holdfast.agent.evidence", dict(os.environ))
    return run([*command, "--pid", str(os.getpid()), "--json"], environ)


def logs() -> str:
    command, environ = own_module("holdfast.agent.logs.child", dict(os.environ))
    question = {"n": 1, "do": "diagnose", "folder": os.getcwd(), "ranks": [[0, 0, -1, 0, -1]]}
    return run(command, environ, json.dumps(question) + "\n")


@pytest.mark.parametrize(("child", "says"), [
    (agent, "--private"), (evidence, '"state"'), (logs, '"n": ?1'),
])
def test_a_child_of_the_launcher(
    traps: Path, tmp_path: Path, child: Callable[[], str], says: str
) -> None:
    said = child()
    assert not sprung(tmp_path), said
    assert re.search(says, said), said


def source(file: str) -> str:
    return (ROOT / file).read_text()


@pytest.mark.parametrize("collector", [one.name for one in PROBED])
def test_a_collectors_child(traps: Path, tmp_path: Path, collector: str) -> None:
    assert '(sys.executable, "-P", "-m", "holdfast.collectors"' in source(
        "agent/telemetry/collectors.py")
    command, environ = own_module("holdfast.collectors", dict(os.environ))  # as the agent has it
    assert command[1:3] == ["-P", "-m"]
    run([*command, collector, json.dumps(Roots())], environ)
    assert not sprung(tmp_path)


@pytest.mark.parametrize(("file", "module", "asked", "says"), [
    ("agent/config/child.py", "holdfast.agent.config.child", lambda folder: ["", {}],
     '"errors":[],"config"'),
    ("agent/daemon/parts/checks.py", "holdfast.agent.checks.round",
     lambda folder: checks_round.Round("a", ("clock",), str(folder / "kept"), "b", Collectors()),
     '"check":"clock"'),
    ("agent/daemon/peer_rounds.py", "holdfast.agent.peers.attend",
     # An address that this machine has not: it can coordinate nothing, and says so.
     lambda folder: peers_attend.Asked((("a", "203.0.113.1"),), 0, 1, 1.0, str(folder), "b"),
     '"problem":"a: '),
])
def test_a_child_of_the_agents(
    traps: Path, tmp_path: Path, file: str, module: str, asked: Callable[[Path], object], says: str
) -> None:
    assert f'command = (sys.executable, "-P", "-m", "{module}"' in source(file)
    command, environ = own_module(module, dict(os.environ))  # as the agent has it
    assert command[1:3] == ["-P", "-m"]
    said = run([*command, msgspec.json.encode(asked(tmp_path)).decode()], environ)
    assert not sprung(tmp_path), said
    assert says in said, said


def test_journalctl(traps: Path, tmp_path: Path) -> None:
    assert 'sys.executable, "-I", "-S", str(DIE_WITH_PARENT)' in source(
        "agent/telemetry/journalctl.py")
    command = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
    assert "hello" in run([*command, "/bin/echo", "hello"], dict(os.environ))
    assert not sprung(tmp_path)


def test_doctor(traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TYPES)  # the job's own path is the job's affair
    finding = job_interpreter(os.environ)
    assert not sprung(tmp_path) and "%d.%d" % sys.version_info[:2] in str(finding), finding


def test_the_checks(traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a prolog starts them; the Python with torch is entered by file."""
    monkeypatch.setenv("PYTHONPATH", TYPES)
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    said = run([sys.executable, "-P", "-m", "holdfast.agent.cli", "check", "tensor",
                "--python", sys.executable, "--json"], dict(os.environ))
    assert not sprung(tmp_path), said
    assert "tensor" in said, said


def test_the_process_of_peers_beside_torch(
    traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is entered by file into the Python that the job would have."""
    monkeypatch.setenv("PYTHONPATH", TYPES)

    async def found() -> peers_tester.Tester:
        tester = peers_tester.Tester([(sys.executable, "this one")])
        try:
            await tester.start()
        finally:
            await tester.close()
        return tester

    tester = asyncio.run(found())
    assert not sprung(tmp_path), sprung(tmp_path)
    assert tester.here or "no torch" in tester.problem, tester.problem


def test_the_root_unit(traps: Path, tmp_path: Path) -> None:
    (line,) = [row for row in source("deploy/systemd/holdfast-node@.service").splitlines()
               if row.startswith("ExecStart=")]
    flags = line.split()[1:]
    assert flags[0] == "-I"
    run([sys.executable, *flags, "--help"], dict(os.environ))
    assert not sprung(tmp_path)


def test_the_demos_run(
    traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", TYPES)
    started: list[list[str]] = []
    monkeypatch.setattr(demo, "Child", lambda command, environ, log: started.append(command))
    one = object.__new__(demo.Stage)
    one.directory, one.ranks, one.steps, one.token = tmp_path, 2, 5, "t"
    one._child("x")
    command = started[0][: started[0].index("train") + 1]
    assert "--nproc-per-node" in run([*command, "--help"], dict(os.environ))
    assert not sprung(tmp_path)


def test_what_is_accepted(traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TYPES)
    launchers = accept.Launchers()
    launchers.start({"id": "1", "run": "x", "command": "run", "arguments": ["--help"],
                     "folder": str(traps), "environment": {}, "by": "a test"})
    assert launchers.running.pop("1").wait(60) == 0
    assert not sprung(tmp_path), sprung(tmp_path)


def test_the_launcher(traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", TYPES)
    said = run([sys.executable, forking.BOOTSTRAP, "run", "--help"], dict(os.environ))
    assert "--nproc-per-node" in said and not sprung(tmp_path), said


@pytest.mark.parametrize("kind", ["script", "trainer"])
def test_a_spawned_rank(traps: Path, tmp_path: Path, kind: str) -> None:
    """Only the script's own folder is on its path, as `python SCRIPT` has it."""
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    script = scripts / "job.py"
    script.write_text("import sys, csv, json\nprint('path', sys.path[0], '' in sys.path)\n")
    program = Program("script", str(script), [])
    if kind == "trainer":  # what it says of its configuration comes after its imports
        program = Program("module", "holdfast.trainer", ["nothing=1"], trainer=True)
    page = pages.create()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environ = {**os.environ, "PYTHONPATH": TYPES, "RANK": "0", "WORLD_SIZE": "1"}
    out = tmp_path / "out"
    seat = Seat(page, right.fileno(), str(out), str(out), environ, os.getpid(), 0, 0, 1)
    child = forking.spawn_rank(program, seat)
    try:
        os.waitpid(child.pid, 0)
    finally:
        for fd in (page, child.pidfd):
            os.close(fd)
        left.close()
        right.close()
    said = out.read_text()
    assert not sprung(tmp_path), said
    assert kind == "trainer" or f"path {scripts} False" in said, said


def test_every_starter_is_known_here() -> None:
    found = {
        str(file.relative_to(ROOT))
        for folder in ("agent", "worker", "collectors", "trainer", "dashboards", "runbooks")
        for file in (ROOT / folder).rglob("*.py") if STARTS.search(file.read_text())
    }
    assert found == set(STARTERS), "say which test tries a new one"


def test_a_module_of_ours_is_never_run_with_the_current_folder() -> None:
    for file in STARTERS:
        for line in source(file).splitlines():
            ours = '"-m", "holdfast' in line or '"-m", name' in line
            assert not ours or '"-P"' in line, (file, line)

