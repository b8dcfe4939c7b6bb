"""The operations guide: its harmless commands run, the flags of all others exist, and so do the
settings that it names."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from holdfast.agent.cli.parser import build
from holdfast.agent.config.load import load
from holdfast.worker.launcher import spec

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "docs/operations.md", ROOT / "docs/turn-it-off.md")
LINE = re.compile(r"^    (holdfast [^#\n]+)|`(holdfast [a-z][^`]+)`", re.MULTILINE)
BLOCK = re.compile(r"(?:^    .*\n)+", re.MULTILINE)
# What neither disturbs a node nor needs an agent, and how each may end.
HARMLESS = {"doctor": (0, 1), "check --list": (0,), "config check": (0,), "config show": (0,),
            "explain rank_hung": (0,), "dashboards render": (0,), "diagnose": (0,)}
LOG = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"


def commands(text: str) -> list[list[str]]:
    found = [first or second for first, second in LINE.findall(text)]
    return [shlex.split(one)[1:] for one in found]


ALL = [one for page in PAGES for one in commands(page.read_text())]


def test_every_command_of_the_guide_is_understood() -> None:
    assert len(ALL) > 25
    for words in ALL:
        if words[0] == "run":
            given = [one for one in words[1:] if one != "..."]
            spec.build("run").parse_known_args([*given, "train.py"])
        elif "FAULT" not in words:
            build().parse_args(words)
    with pytest.raises(SystemExit):
        build().parse_args(["pause", "--forever"])


@pytest.mark.parametrize("start", HARMLESS)
def test_the_harmless_ones_run(start: str, tmp_path: Path) -> None:
    found = [one for one in ALL if " ".join(one).startswith(start)]
    assert found, start
    (tmp_path / "slurm-4711.out").write_text(LOG)
    (tmp_path / "agent.toml").touch()
    words = ["rules" if one == "/etc/prometheus" else one for one in found[0]]
    if words[0] == "config":
        words += ["--config", "agent.toml"]
    environ = {**os.environ, "HOLDFAST_RUNTIME_DIR": str(tmp_path / "rt"), "HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-m", "holdfast.agent.cli", *words], cwd=tmp_path,
                          env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in HARMLESS[start], done.stdout + done.stderr
    assert done.stdout


def test_the_settings_that_it_shows_are_taken(tmp_path: Path) -> None:
    shown = [block for page in PAGES for block in BLOCK.findall(page.read_text())
             if block.lstrip().startswith("[")]
    assert len(shown) == 2
    for number, block in enumerate(shown):
        text = "\n".join(line[4:] for line in block.splitlines() if "systemctl" not in line)
        tomllib.loads(text)
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        load(file)
