"""Real Slurm: Holdfast as Prolog and as HealthCheckProgram of four nodes, one of which loses a GPU.

Each node has its own state directory and its own stand-in for NVML, chosen by the name that slurmd
gives to both programs.  Healthy nodes have eight GPUs, as their machine's name says.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from slurm_cluster import NODES, Cluster
from waiting import wait_for

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nvml"))
import nvml_standin

CHECKS = "devices accelerators network"
A100 = "driver 550.90.07\ngpus 8\nname NVIDIA A100-SXM4-40GB"
WAIT_S = 4.0


class Machines:
    """The four nodes: their programs, their GPUs, and the cluster that they are."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        sys_root = folder / "sys"
        (sys_root / "class/dmi/id").mkdir(parents=True)
        (sys_root / "class/dmi/id/product_name").write_text("p4d.24xlarge\n")
        (folder / "agent.toml").write_text(
            f'[collectors]\nsys = "{sys_root}"\n[checks]\ndrain_after_s = {WAIT_S}\n')
        for node in NODES:
            (folder / node).mkdir()
            self.becomes(node, A100)
        self.programs = {
            name: self._program(name, library, words) for name, words in (
                ("prolog", f"{CHECKS} --for slurm-prolog"), ("health", "--for slurm-health"),
                ("made", f"{CHECKS} --for batch --max-age 0"))}
        self.cluster: Cluster

    def _program(self, name: str, library: Path, words: str) -> Path:
        file = self.folder / name
        file.write_text(
            "#!/bin/sh\n"
            f'export HOLDFAST_STATE_DIR={self.folder}/$SLURMD_NODENAME/state '
            f'HOLDFAST_RUNTIME_DIR={self.folder}/run SLURM_CONF={self.folder}/slurm.conf '
            f'LD_LIBRARY_PATH={library} HOME={self.folder} '
            f'HOLDFAST_FAKE_NVML={self.folder}/$SLURMD_NODENAME/gpus\n'
            f'[ {name} != health ] || [ ! -e {self.folder}/quiet ] || exit 0\n'
            f'exec {sys.executable} -P -m holdfast.agent.cli check {words} '
            f'--config {self.folder}/agent.toml '
            f'>> {self.folder}/$SLURMD_NODENAME/{name}.log 2>&1\n')
        file.chmod(0o755)
        return file

    def becomes(self, node: str, gpus: str) -> None:
        (self.folder / node / "gpus").write_text(gpus + "\n")

    def look(self, *nodes: str) -> None:
        """Has these nodes' checks made anew, as a health program does in the background; what came
        of them is seen of all at once, however busy this machine is."""
        (self.folder / "quiet").touch()
        made = [subprocess.Popen([self.programs["made"]], env={"SLURMD_NODENAME": node})
                for node in nodes]
        assert all(one.wait(60) in (0, 1) for one in made)
        (self.folder / "quiet").unlink()

    def log(self, node: str, program: str) -> str:
        file = self.folder / node / f"{program}.log"
        return file.read_text() if file.exists() else ""


@pytest.fixture()
def machines() -> Iterator[Callable[[str], Machines]]:
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    made: list[Machines] = []

    def start(program: str) -> Machines:
        library = folder / "library"
        library.mkdir()
        try:
            one = Machines(folder, nvml_standin.compile_library(library))
        except nvml_standin.Missing as error:
            pytest.skip(str(error))
        settings = {"prolog": {"Prolog": one.programs["prolog"], "PrologFlags": "Alloc",
                               "SchedulerParameters": "nohold_on_prolog_fail"},
                    "first step": {"Prolog": one.programs["prolog"]},
                    "health": {"HealthCheckProgram": one.programs["health"],
                               "HealthCheckInterval": 1}}[program]
        one.cluster = Cluster(folder, settings)
        made.append(one)
        if program == "health":
            one.look(*NODES)
        one.cluster.start()
        return one

    try:
        yield start
    finally:
        for one in made:
            one.cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def lost(gpu: int) -> str:
    return f"{A100}\ngpu {gpu} lost 1"


def test_a_lost_device_drains_its_node_and_a_fleet_wide_one_none(
    machines: Callable[[str], Machines]
) -> None:
    """HealthCheckProgram, whose exit status Slurm takes no notice of."""
    all_of = machines("health")
    slurm = all_of.cluster
    # A driver roll-out: the same check fails on all of them.
    for node in NODES:
        all_of.becomes(node, lost(5))
    all_of.look(*NODES)

    def told() -> list[str]:
        return [name for name, one in slurm.nodes().items()
                if "a common cause" in one.get("Comment", "")]

    (one,) = wait_for(told, what=slurm.logs)
    assert "devices on " in slurm.nodes()[one]["Comment"]
    until_s = time.time() + WAIT_S
    wait_for(lambda: time.time() > until_s)  # and nothing follows
    assert slurm.drained() == {} and told() == [one]
    # It is rolled back, apart from one node that has lost a device and one with a warning.
    for node in NODES:
        all_of.becomes(node, A100)
    all_of.becomes("node1", f"{A100}\ngpu 2 remap_pending 1")
    all_of.becomes("node2", lost(3))
    all_of.look(*NODES)
    drained = wait_for(slurm.drained, what=slurm.logs)
    assert drained.keys() == {"node2"}
    assert drained["node2"].startswith(
        "holdfast: devices critical: 7 nvidia devices, and p4d has 8 (")
    wait_for(lambda: "accelerators warning" in all_of.log("node1", "health"), what=slurm.logs)
    assert slurm.drained().keys() == {"node2"}
    # Well again: this reason is ours, so it is taken back; an administrator's stands.
    slurm.say("scontrol", "update", "nodename=node3", "state=drain", "reason=disk swap")
    all_of.becomes("node2", A100)
    all_of.look("node2", "node3")
    wait_for(lambda: slurm.drained().keys() == {"node3"}, what=slurm.logs)
    assert all("Comment" not in one for one in slurm.nodes().values())


def test_a_job_starts_on_the_nodes_that_passed(machines: Callable[[str], Machines]) -> None:
    """Prolog: the sick node is drained by its reason, and the job goes to the others."""
    all_of = machines("prolog")
    slurm = all_of.cluster
    all_of.becomes("node1", f"{A100}\ngpu 2 remap_pending 1")
    all_of.becomes("node0", lost(0))
    out = all_of.folder / "hosts"
    again = all_of.folder / "hosts.1"
    slurm.say("sbatch", "-N3", "--output=/dev/null", "--wrap",
              f"srun -N3 sh -c 'echo $SLURMD_NODENAME >> {out}.$SLURM_RESTART_COUNT'")
    wait_for(slurm.drained, what=slurm.logs)
    wait_for(lambda: "PENDING" in slurm.say("squeue", "-h", "-o", "%T"), what=slurm.logs)
    slurm.say("scontrol", "update", "jobid=1", "starttime=now")  # a requeue waits for 120 s
    wait_for(lambda: again.exists() and len(again.read_text().split()) == 3,
             what=lambda: slurm.say("squeue") + slurm.logs() + all_of.log("node1", "prolog"))
    assert set(again.read_text().split()) == {"node1", "node2", "node3"}
    drained = slurm.drained()
    assert drained.keys() == {"node0"}
    assert "devices critical: 7 nvidia devices, and p4d has 8" in drained["node0"]
    assert "accelerators warning" in all_of.log("node1", "prolog")


def test_a_job_that_got_its_nodes_before_one_was_drained_does_not_begin_there(
    machines: Callable[[str], Machines]
) -> None:
    """Without PrologFlags=Alloc a Prolog is run where a job's first step comes to, which may be
    long after the node was allocated."""
    all_of = machines("first step")
    slurm = all_of.cluster
    go, begun = all_of.folder / "go", all_of.folder / "begun"
    slurm.say("sbatch", "-N2", "-wnode0,node1", "--output=/dev/null", "--wrap",
              f"touch {begun}; while [ ! -e {go} ]; do sleep 0.1; done; "
              f"srun -N2 sh -c 'touch {all_of.folder}/ran.$SLURMD_NODENAME'")
    wait_for(begun.exists, what=slurm.logs)
    all_of.becomes("node1", lost(0))
    reason = "holdfast: devices critical: 7 nvidia devices"
    slurm.say("scontrol", "update", "nodename=node1", "state=drain", f"reason={reason}")
    go.touch()
    wait_for(lambda: "drained already" in all_of.log("node1", "prolog"),
             what=lambda: slurm.say("squeue") + slurm.logs())
    wait_for(lambda: "RUNNING" not in slurm.say("squeue", "-h", "-o", "%T"), what=slurm.logs)
    assert not (all_of.folder / "ran.node1").exists()
    drained = slurm.drained()
    assert drained.keys() == {"node1"} and drained["node1"].startswith(reason)  # as it was
