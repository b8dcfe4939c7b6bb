"""Wheel and tarball, installed where nothing of the repository is seen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import setuptools
from packages import ROOT, SYSTEM_PYTHON, made
from running import wait_for

BARE = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}
CONFIG = """
[agent]
listen = "127.0.0.1:0"
runtime_dir = "{home}/run"
state_dir = "{home}/state"
[collectors]
kmsg = "/dev/null"
"""


def said(command: list[str], home: Path, codes: tuple[int, ...] = (0,)) -> str:
    """What it prints, with nothing of this process's environment and in a folder of its own."""
    done = subprocess.run(command, env={**BARE, "HOME": str(home)}, cwd=home, capture_output=True,
                          text=True, timeout=300, check=False)
    assert done.returncode in codes, f"{command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@contextlib.contextmanager
def agent(holdfast: Path, home: Path) -> Iterator[str]:
    """The address of an agent of that installation."""
    (home / "agent.toml").write_text(CONFIG.format(home=home))
    for name in ("run", "state"):
        (home / name).mkdir()
    process = subprocess.Popen(
        [str(holdfast), "agent", "--config", str(home / "agent.toml")], cwd=home,
        env={**BARE, "HOME": str(home)}, stderr=subprocess.PIPE, start_new_session=True)
    try:
        place = home / "run/address"
        wait_for(lambda: place.exists() or process.poll() is not None, 60, "the agent's address")
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield place.read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)


def demonstrates(venv: Path, home: Path) -> None:
    """The demo, trained by what the wheel installed; torch and what the trainer needs beside it are
    lent by this Python, behind the venv's own packages."""
    (packages,) = (venv / "lib").glob("python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = said([str(venv / "bin/python"), "-c",
                  "import holdfast.trainer, holdfast.worker as w;"
                  "print(holdfast.trainer.__path__[0], w.__path__[0])"], home)
    assert all(one.startswith(str(venv)) for one in where.split()), where
    shown = said([str(venv / "bin/holdfast"), "demo", "--steps", "60"], home)
    assert "2 ranks, 60 steps, three faults" in shown, shown  # and it ended with 0: all held


def test_the_wheel_serves_a_node_from_a_venv_of_its_own(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    packages = made()
    venv = home / "venv"
    said([sys.executable, "-m", "venv", "--without-pip", str(venv)], home)
    said([sys.executable, "-m", "pip", "-q", "--python", str(venv / "bin/python"), "install",
          "--no-index", "--no-deps", *map(str, packages.wheels.glob("*.whl"))], home)
    holdfast = str(venv / "bin/holdfast")
    assert said([holdfast, "--version"], home) == f"holdfast {packages.version}\n"
    inside = said([str(venv / "bin/python"), "-c",
                   "import holdfast.agent as a; print(a.__path__[0])"], home)
    assert inside.startswith(str(venv))
    assert "things are missing here" in said([holdfast, "doctor"], home, (0, 1))
    (home / "empty.toml").touch()
    assert "by default" in said([holdfast, "config", "check", "--config", "empty.toml"], home)
    said([holdfast, "dashboards", "render", "--to", str(home / "rules")], home)
    assert len(list((home / "rules").rglob("*.json"))) >= 4
    assert (home / "rules/holdfast-alerts.yml").stat().st_size > 10_000
    assert "rank_hung" in said([holdfast, "explain"], home, (0, 1))
    demonstrates(venv, home)
    with agent(Path(holdfast), home) as address:
        for route in ("/runbooks/rank_hung.md", "/", "/metrics"):
            with urllib.request.urlopen(address + route, timeout=10) as answer:
                assert answer.status == 200 and len(answer.read()) > 500, route


def test_debians_own_python_builds_it(tmp_path: Path) -> None:
    """3.11.2, whose tarfile knows no filters; setuptools is lent to it."""
    if not Path(SYSTEM_PYTHON).exists():
        pytest.skip(f"no {SYSTEM_PYTHON}")
    code = "import pathlib, build, sys; print(build.build_wheel('9.8', pathlib.Path(sys.argv[1])))"
    lent = f"PYTHONPATH={ROOT}/deploy:{Path(setuptools.__file__).parent.parent}"
    said(["/usr/bin/env", lent, SYSTEM_PYTHON, "-c", code, str(tmp_path)], tmp_path)
    assert {one.name for one in tmp_path.iterdir()} >= {
        "holdfast-9.8-py3-none-any.whl", "holdfast-9.8.tar.gz"}


def test_the_sdist_holds_what_the_wheel_is_made_of_and_the_licence() -> None:
    with tarfile.open(made().sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "runbooks/rank_hung.md",
            "agent/catalog/kernel.toml", "agent/web/page.html"} <= names
    assert not [name for name in names if name.startswith(("tests/", ".")) or ".pyc" in name]


def test_the_sdist_installs_without_a_network(tmp_path: Path) -> None:
    """What it is built with and what it needs is there; the command is the one that it brought."""
    there = tmp_path / "there"
    said([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
          "--no-build-isolation", "--target", str(there), str(made().sdist)], tmp_path)
    shown = said(["env", f"PYTHONPATH={there}", sys.executable, "-P", "-c",
                  "import holdfast.agent.cli as cli; print(cli.__file__); cli.main(['--version'])"],
                 tmp_path)
    assert shown.startswith(f"{there}/holdfast/agent/cli/"), shown
    assert f"holdfast {made().version}" in shown


def test_the_tarball_installs_and_runs_where_there_is_no_network(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    packages = made()
    said(["tar", "-xf", str(packages.tarballs[0])], home)
    (unpacked,) = home.glob("holdfast-*")
    # A network namespace that is new has no route, and not even its loopback is up.
    alone = ["unshare", "--net", *(["--map-root-user"] if os.geteuid() else [])]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("the kernel gives no network namespace")
    prefix = home / "there/holdfast"
    install = [*alone, str(unpacked / "install.sh"), "--prefix", str(prefix), "--no-units"]
    if not Path(SYSTEM_PYTHON).exists():
        install += ["--python", sys.executable]
    assert said(install, home) == (
        f"installed holdfast {packages.version} in {prefix}; its command is {prefix}/bin/holdfast, "
        "to be called so or linked to from a folder of your PATH\n")
    said(install, home)  # again, over it
    assert not list(prefix.parent.glob("holdfast.*"))
    (home / "linked").symlink_to(prefix / "bin/holdfast")
    holdfast = str(home / "linked")
    assert said([*alone, holdfast, "--version"], home) == f"holdfast {packages.version}\n"
    script = home / "job.py"
    script.write_text("import os; print('rank', os.environ['RANK'], 'ran')\n")
    run = [*alone, holdfast, "run", "--python", sys.executable, "--nproc-per-node", "2",
           str(script)]
    shown = said(run, home)
    assert "rank 0 ran" in shown and "rank 1 ran" in shown
    # Another's folder is left alone, and a Python that is too old or none is said.
    other = home / "other"
    other.mkdir()
    (other / "precious").touch()
    refused = said([*install[:-1], "--no-units", "--prefix", str(other)], home, (1,))
    assert "not ours" in refused and (other / "precious").exists()
    assert "does not run" in said([*install, "--python", "/bin/false"], home, (1,))
    remove = [str(unpacked / "install.sh"), "--no-units", "--uninstall", "--prefix"]
    assert "nothing is removed" in said([*remove, str(other)], home, (1,))
    said([*remove, str(prefix)], home)
    assert not prefix.exists() and (other / "precious").exists()
