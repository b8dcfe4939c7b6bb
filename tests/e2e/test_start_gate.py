"""A run starts on a node that is well, is refused by name on one that is not, or told to go on."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from types import ModuleType

import pytest
from running import ROOT, Run, Runs

from holdfast.agent.checks import results
from holdfast.collectors import clock

STATES = ROOT / "tests/nvml/states"
SAID = "it started"


def standin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("standin", ROOT / "tests/nvml/nvml_standin.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Node:
    """A node with NVIDIA's GPUs, by a stand-in for their library."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.file, self.count = runs, runs.home / "gpus.txt", 0
        library = runs.home / "nvml"
        library.mkdir()
        module = standin()
        try:
            module.compile_library(library)
        except module.Missing as error:
            pytest.skip(str(error))
        config = runs.home / "agent.toml"
        config.write_text(f'[collectors]\nnvml = "{library}"\n')
        runs.environ |= {"HOLDFAST_CONFIG": str(config), "HOLDFAST_FAKE_NVML": str(self.file),
                         "LD_LIBRARY_PATH": str(library)}
        runs.environ.pop("CUDA_VISIBLE_DEVICES", None)

    def becomes(self, state: str) -> None:
        shutil.copy(STATES / f"{state}.txt", self.file)

    def run(self, *flags: str, **environ: str) -> Run:
        self.count += 1
        run = self.runs.start("run", "--no-python", *flags, "/bin/echo", SAID,
                              name=f"r{self.count}", **environ)
        run.wait(60)
        return run


@pytest.fixture()
def node(runs: Runs) -> Node:
    return Node(runs)


def test_a_lost_gpu_refuses_the_start_and_lets_it_go_when_it_is_back(node: Node) -> None:
    node.becomes("gpu_lost")
    refused = node.run()
    assert refused.process.returncode == 75 and SAID not in refused.output
    for words in ("starts no run: ", "check devices: ", "lost", "Do: ", "reboot the node",
                  "--ignore-check devices", "--reason TEXT"):
        assert words in refused.output, refused.output
    (incident,) = [one for one in refused.incidents() if one["fault"] == "start_refused"]
    assert incident["state"] == "closed" and "check devices" in incident["reason"]

    # By the checks of the same minute, kept on disk: they are made again before they refuse.
    spared = node.run(CUDA_VISIBLE_DEVICES="0")
    assert spared.process.returncode == 0 and SAID in spared.output
    told = node.run("--ignore-check", "devices", "--ignore-check", "accelerators",
                    "--ignore-check", "incidents", "--reason", "it is on its way out")
    assert told.process.returncode == 0 and SAID in told.output
    (ignored,) = [one for one in told.incidents() if one["fault"] == "check_ignored"]
    assert "check devices" in ignored["reason"] and "on its way out" in ignored["reason"]

    node.becomes("healthy")
    well = node.run()
    assert well.process.returncode == 0 and SAID in well.output, well.output


def test_a_checkpoint_path_on_a_full_disk_refuses_and_a_reason_is_asked_for(runs: Runs) -> None:
    place = runs.home / "mount"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(place)],
                          capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        config = runs.home / "agent.toml"
        config.write_text(f'[checks]\npaths = ["{place}"]\n')
        runs.environ["HOLDFAST_CONFIG"] = str(config)
        run = runs.start("run", "--no-python", "/bin/echo", SAID)
        assert run.wait(60) == 75 and f"check paths: {place}: " in run.output
        silent = runs.start("run", "--no-python", "--ignore-check", "paths", "/bin/echo", SAID)
        assert silent.wait(60) == 78 and "--reason TEXT" in silent.output
        wrong = runs.start("run", "--no-python", "--ignore-check", "path", "--reason", "x",
                           "/bin/echo", SAID)
        assert wrong.wait(60) == 78 and "did you mean paths?" in wrong.output
        subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
        again = runs.start("run", "--no-python", "/bin/echo", SAID)
        assert again.wait(60) == 0 and SAID in again.output
    finally:
        subprocess.run(["umount", str(place)], check=True)
        assert not os.path.ismount(place)


def test_a_check_that_hangs_is_unknown_and_holds_a_start_up_no_longer_than_its_deadline(
    runs: Runs,
) -> None:
    source = runs.home / "sys" / clock.SOURCE
    source.parent.mkdir(parents=True)
    os.mkfifo(source)  # whoever opens it waits for ever
    config = runs.home / "agent.toml"
    config.write_text(f'[collectors]\nsys = "{runs.home}/sys"\n'
                      'disable = ["clock"]\n[checks]\ngate = ["clock"]\n')
    runs.environ["HOLDFAST_CONFIG"] = str(config)
    run = runs.start("run", "--no-python", "/bin/echo", SAID)
    assert run.wait(60) == 0 and SAID in run.output, run.output
    kept = results.load(runs.home / "st" / "checks").verdicts["clock"]
    assert kept.status == "unknown" and "no answer within 5 s" in kept.reason
