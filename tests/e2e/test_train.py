"""The trainer loses ranks every way there is, and ends with the same weights to the last bit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from running import SCRIPTS, Run, Runs, wait_for

from holdfast.agent.cli import main
from holdfast.worker.rank import snapshot

torch = pytest.importorskip("torch", reason="the trainer's extra is not installed")

SMALL = (
    "steps=40", "micro_batches=12", "batch=2", "model_options.width=32", "model_options.layers=1",
    "model_options.heads=2", "data_options.vocabulary=512", "checkpoint.every=10",
)


LONG = ("steps=120",)  # a step that is looked for is not over before it is seen


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and tokenizer are made once; checkpoints go elsewhere."""
    return tmp_path_factory.mktemp("work")


def train(runs: Runs, work: Path, name: str, nproc: int = 2, *more: str,
          flags: tuple[str, ...] = (), **environ: str) -> Run:
    checkpoints = f"checkpoint.dir={runs.home / name / 'ckpt'}"
    return runs.start("train", "--nproc-per-node", str(nproc), *flags, f"work_dir={work}", *SMALL,
                      checkpoints, *more, name=name, **environ)


class Clean:
    """Runs without a fault, each made once: their weights are what a fault must not change."""

    def __init__(self, runs: Runs, work: Path) -> None:
        self.runs, self.work = runs, work
        self.made: dict[tuple[int, tuple[str, ...]], Run] = {}

    def __call__(self, nproc: int = 2, *more: str) -> Run:
        if (nproc, more) not in self.made:
            run = train(self.runs, self.work, f"clean-{len(self.made)}", nproc, *more)
            assert run.wait() == 0, run.output
            self.made[nproc, more] = run
        return self.made[nproc, more]


@pytest.fixture(scope="module")
def clean(shared_runs: Runs, work: Path) -> Clean:
    return Clean(shared_runs, work)


@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_a_killed_rank_leaves_no_trace_in_the_weights(
    runs: Runs, work: Path, clean: Clean, nproc: int
) -> None:
    without_fault = clean(nproc, *LONG)
    run = train(runs, work, "faulty", nproc, *LONG)
    os.kill(run.at_step(5), signal.SIGKILL)
    wait_for(lambda: run.status()["generation"] == 2)
    os.kill(run.at_step(15, rank=0), signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert run.result()["digest"] == without_fault.result()["digest"]
    runs_of = [str(one.home / one.name / "ckpt") for one in (without_fault, run)]
    assert main(["parity", *runs_of, "--metric", "mrr@10", "--within", "0.1%"]) == 0
    # The rank that dies may have finished the step that the others are still in.
    lost = [int(steps) for steps in re.findall(r"(\d+) steps? lost", run.output)]
    assert len(lost) == 2 and max(lost) <= 1, run.output


def test_a_rank_lost_while_the_others_join_leaves_no_trace(
    runs: Runs, work: Path, clean: Clean
) -> None:
    digest = clean(3, *LONG).result()["digest"]
    for when in ("before", "after"):  # of its group's connections
        dies = runs.home / "dies"
        run = train(runs, work, when, 3, *LONG, "data=dies_joining:Data", DIES_JOINING=f"{dies}-",
                    PYTHONPATH=os.pathsep.join([runs.environ["PYTHONPATH"], str(SCRIPTS)]))
        rank = run.at_step(5)
        Path(f"{dies}-{when}").touch()
        os.kill(rank, signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert run.result()["digest"] == digest
        killed = [one["generation"] for one in run.own_incidents() if one["fault"] == "rank_killed"]
        assert sorted(killed) == [1, 2], run.output


def test_all_ranks_killed_at_once_come_back_from_memory_or_disk(
    runs: Runs, work: Path, clean: Clean
) -> None:
    digest = clean(2, *LONG).result()["digest"]
    run = train(runs, work, "faulty", 2, *LONG)
    run.at_step(22)
    for rank in run.all_ranks().values():
        os.kill(rank["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "from the snapshot of step" in run.output or "from the checkpoint of step" in run.output
    assert run.result()["digest"] == digest


@pytest.mark.parametrize(
    ("fault", "expected"),
    [("stop", "rank_stopped"), ("stall", "rank_hung"), ("hold-gil", "rank_gil_held"),
     ("exception", "rank_exited"), ("skip-collective", "collective_skipped")],
)
def test_an_injected_fault_is_named_and_survived(
    runs: Runs, work: Path, clean: Clean, fault: str, expected: str
) -> None:
    digest = clean(2, *LONG).result()["digest"]
    run = train(runs, work, "faulty", 2, *LONG)
    run.at_step(12)
    run.inject(fault, 1)
    found = wait_for(
        lambda: [i for i in run.incidents() if i["fault"] == expected and i["actions"]],
        60, f"{expected}\n{run.output}",
    )
    assert "rank 1" in found[0]["culprit"], found
    assert run.wait() == 0, run.output
    assert run.result()["digest"] == digest


def test_who_raises_keeps_its_process_and_is_named(runs: Runs, work: Path, clean: Clean) -> None:
    digest = clean(2, *LONG).result()["digest"]
    run = train(runs, work, "faulty", 2, *LONG)
    before = {rank: run.at_step(12, rank) for rank in (0, 1)}
    for rank in (1, 0):
        run.inject("exception", rank)
        found = wait_for(
            lambda rank=rank: [i for i in run.incidents() if i["fault"] == "rank_exited"
                               and f"rank {rank}" in i["culprit"] and i["state"] == "closed"],
            60, f"rank {rank}\n{run.output}")
        assert "raised RuntimeError: injected by holdfast inject exception" in found[0]["reason"]
        assert {number: one["pid"] for number, one in run.all_ranks().items()} == before
    assert run.wait() == 0, run.output
    assert run.output.count("RuntimeError: injected by holdfast inject exception") >= 2
    assert run.result()["digest"] == digest


def test_preempted_it_checkpoints_within_the_grace_and_goes_on_later(
    runs: Runs, work: Path, clean: Clean
) -> None:
    digest = clean(2, *LONG).result()["digest"]
    run = train(runs, work, "job", 2, *LONG)
    run.at_step(13)
    run.process.terminate()
    assert run.wait(40) == 75, run.output
    again = train(runs, work, "job", 2, *LONG)
    assert again.wait() == 0, again.output
    assert again.result()["step"] == 120
    assert again.result()["digest"] == digest


def test_drained_it_checkpoints_within_the_grace_and_says_retry_elsewhere(
    runs: Runs, work: Path
) -> None:
    run = train(runs, work, "job", 2, "checkpoint.every=1000", "steps=100000")
    run.at_step(13)
    run.post("/api/v1/runs/job/drain", reason="maintenance")
    assert run.wait(40) == 75, run.output
    assert "maintenance" in run.output
    kept = [int(one.name[5:14]) for one in (runs.home / "job" / "ckpt").glob("step-*")]
    assert max(kept, default=0) >= 13, (kept, run.output)  # the grace saved what was done


def test_a_flipped_byte_on_disk_is_put_aside_and_the_older_one_used(
    runs: Runs, work: Path, clean: Clean
) -> None:
    digest = clean(2, *LONG).result()["digest"]
    run = train(runs, work, "job", 2, *LONG)
    run.at_step(23)
    run.process.terminate()
    assert run.wait(40) == 75, run.output
    newest, older = sorted((runs.home / "job" / "ckpt").glob("step-*"))[::-1][:2]
    shard = next(newest.glob("shard-00001-*.bin"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    again = train(runs, work, "job", 2, *LONG)
    assert again.wait() == 0, again.output
    assert "checkpoint put aside" in again.output and newest.name in again.output
    assert f"the checkpoint of step {int(older.name[5:14])}" in again.output, again.output
    assert not newest.exists() and list((runs.home / "job" / "ckpt" / "quarantine").iterdir())
    assert again.result()["digest"] == digest


@pytest.mark.parametrize("nproc", [3, 2])
def test_a_state_torn_in_the_optimizer_is_not_used(
    runs: Runs, work: Path, clean: Clean, nproc: int
) -> None:
    """One rank is half through its optimizer step while another is lost: the third one's state is
    taken, and where there is no third, what was kept of an earlier step."""
    order = runs.home / "order"
    run = train(runs, work, "faulty", nproc, *LONG, "data=tears:Data", TEARS=str(order),
                PYTHONPATH=os.pathsep.join([runs.environ["PYTHONPATH"], str(SCRIPTS)]))
    run.at_step(12)
    order.touch()
    torn = int(wait_for(partial(said, order.with_suffix(".torn")), 30, run.output))
    os.kill(run.all_ranks()[(torn + 1) % nproc]["pid"], signal.SIGKILL)
    assert run.wait() == 0, run.output
    sources = ("the survivors' memory",) if nproc == 3 else (
        "the snapshot of step", "the checkpoint of step")
    assert any(f"from {source}" in run.output for source in sources), run.output
    assert run.result()["digest"] == clean(nproc, *LONG).result()["digest"]


def said(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def damage_snapshots(pids: Iterable[int]) -> int:
    """One byte of each half of every snapshot that these processes hold; how many there were."""
    files = {}
    for link in [link for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(OSError):
            if "holdfast-snapshot" in os.readlink(link):
                files[link.stat().st_ino] = link
    for file in files.values():
        with open(file, "r+b") as shard:
            half = (shard.seek(0, os.SEEK_END) - snapshot.HEADER_BYTES) // 2
            for at in (snapshot.HEADER_BYTES + 100, snapshot.HEADER_BYTES + half + 100):
                shard.seek(at)
                (byte,) = shard.read(1)
                shard.seek(at)
                shard.write(bytes([byte ^ 1]))
    return len(files)


def test_damaged_snapshots_are_not_used(runs: Runs, work: Path, clean: Clean) -> None:
    run = train(runs, work, "faulty", 2, *LONG, "snapshot.every=5")
    run.at_step(22)
    ranks = [rank["pid"] for rank in run.all_ranks().values()]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # none writes a newer one
    assert damage_snapshots(runs.left()) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert "from the checkpoint of step" in run.output, run.output
    assert run.result()["digest"] == clean(2, *LONG).result()["digest"]


def weights(run: Run) -> dict[str, Any]:
    """At its end, by name."""
    file, newest = run.home / f"{run.name}.pt", max((run.home / run.name / "ckpt").glob("step-*"))
    assert main(["checkpoint", "export", str(newest), str(file)]) == 0
    return dict(torch.load(file))


def test_another_number_of_ranks_goes_on_with_the_same_batches(
    runs: Runs, work: Path, clean: Clean
) -> None:
    """Sums of floats are made in another order, so that the last bits differ, and nothing else."""
    run = train(runs, work, "job", 2, *LONG)
    run.at_step(13)
    run.process.terminate()
    assert run.wait(40) == 75, run.output
    again = train(runs, work, "job", 4, *LONG)
    assert again.wait() == 0, again.output
    assert "from the checkpoint of step" in again.output, again.output
    without_fault = clean(2, *LONG)
    assert again.result()["step"] == without_fault.result()["step"] == 120
    torch.testing.assert_close(
        weights(again), weights(without_fault), rtol=1e-3, atol=1e-4)


def test_an_interrupted_trainer_leaves_nothing(runs: Runs, work: Path) -> None:
    run = train(runs, work, "job", 2, "steps=100000", flags=("--grace", "300"))
    run.at_step(5)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.wait() == 130, run.output
    wait_for(lambda: not runs.left(), 30, "every process gone")
