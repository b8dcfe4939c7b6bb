"""Runs of a node's own agent that ask for one GPU: one has it, the others go elsewhere or wait."""

from __future__ import annotations

import os

from .harness import Nodes
from .test_jobs import LOOPING, Cluster
from .worlds import ANSWER_S, CLI, ROOT

ADDRESS = "0000:1b:00.0"
LIMIT_S = "3"  # of the run that waits for nobody longer
END_S = 60.0
# What the driver shows of one GPU, to whoever looks below these two paths.
DRIVER = '''
import builtins, glob, os
ROOT = {root!r}

def there(path):
    known = isinstance(path, str) and path.startswith(("/proc/driver/nvidia", "/dev/nvidia"))
    return ROOT + path if known else path

look, may, read = glob.glob, os.access, builtins.open
glob.glob = lambda path, **more: look(there(path), **more)
os.access = lambda path, *more, **rest: may(there(path), *more, **rest)
builtins.open = lambda path, *more, **rest: read(there(path), *more, **rest)
'''


class Gpus(Cluster):
    """Nodes of one GPU each, which their launchers see and nobody computes on."""

    def make_driver(self) -> None:
        root, site = self.nodes.home / "root", self.nodes.home / "site"
        gpu = root / f"proc/driver/nvidia/gpus/{ADDRESS}"
        for folder in (gpu, root / "dev", site):
            folder.mkdir(parents=True)
        (gpu / "information").write_text("GPU UUID: \t GPU-5f3a1c2\nDevice Minor: \t 0\n")
        (root / "dev/nvidia0").touch()
        (site / "sitecustomize.py").write_text(DRIVER.format(root=str(root)))

    def begin(self, job: str, numbers: tuple[int, ...], *words: str) -> None:
        folder = self.shared / job
        folder.mkdir(exist_ok=True)
        for number in numbers:
            paths = (str(self.nodes.home / "site"), str(ROOT / ".types"))
            environ = {**self.environ(number), "HOLDFAST_RUNTIME_DIR": "",
                       "PYTHONPATH": os.pathsep.join(paths)}
            environ.pop("CUDA_VISIBLE_DEVICES", None)
            self.jobs[job, number] = self.nodes[number].start(
                [*CLI, "run", "--run", job, "--nproc-per-node", "1", "--preload", "none", *words,
                 LOOPING, str(folder)], environ, output=f"{job}.out")

    def placed(self, job: str) -> dict[str, int]:
        """Node -> generation of the job's rank there."""
        return {node: generation for node, (generation, _) in self.pids(job).items()}

    def refused(self, job: str, number: int, holder: str) -> bool:
        """Whether the job's terminal on this node says which run has the GPU there."""
        return f"GPU {ADDRESS}: run {holder} (uid 0) has it" in self.nodes[number].said(
            f"{job}.out")

    def end(self, job: str, *numbers: int) -> None:
        (self.shared / job / "end").write_text("")
        for number in numbers:
            assert self.jobs[job, number].wait(END_S) == 0, self.said()


def test_a_gpu_is_one_runs_and_the_others_take_another_node_leave_or_wait() -> None:
    with Nodes(3) as nodes:
        cluster = Gpus(nodes, members=(2,))
        cluster.start_store()
        cluster.start_agents()
        cluster.make_driver()
        cluster.begin("first", (0,), "--nnodes", "1")
        cluster.wait(lambda: cluster.placed("first") == {"n0": 1})

        # One node of the second run is taken, and says so; its rank is on the other.
        cluster.begin("second", (0,), "--nnodes", "1")
        cluster.wait(lambda: cluster.refused("second", 0, "first"))
        cluster.begin("second", (1,), "--nnodes", "1")
        cluster.wait(lambda: cluster.placed("second") == {"n1": 1})

        # Both nodes of the third are taken: it leaves for elsewhere, and says why on each.
        cluster.begin("third", (0, 1), "--nnodes", "2", "--gang-limit", LIMIT_S)
        cluster.begin("fourth", (0,), "--nnodes", "1")
        for number, holder in ((0, "first"), (1, "second")):
            assert cluster.jobs["third", number].wait(END_S) == 75, cluster.said()
            assert cluster.refused("third", number, holder), cluster.said()
        cluster.wait(lambda: cluster.placed("first") == {"n0": 1}
                     and cluster.placed("second") == {"n1": 1}, ANSWER_S)

        # Who waits has the GPU once the run that had it has ended.
        cluster.wait(lambda: cluster.refused("fourth", 0, "first"))
        assert not cluster.placed("fourth")
        cluster.end("first", 0)
        cluster.wait(lambda: cluster.placed("fourth") == {"n0": 1})
        cluster.end("second", 0, 1)
        cluster.end("fourth", 0)
