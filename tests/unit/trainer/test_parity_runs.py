"""`holdfast parity` over runs that were really trained, and each of its three exit codes."""

from __future__ import annotations

from functools import partial

import pytest
from harness import Launcher
from own_python import on_xla

from holdfast.agent.cli import main
from holdfast.trainer.config import load

STEPS, MICRO_BATCHES, LIMIT_S = 60, 12, 120.0
METRIC = ("--metric", "mrr@10")
SETTINGS = ("model=paired:Encoder", "data=paired:Data", f"steps={STEPS}", "batch=16",
            f"micro_batches={MICRO_BATCHES}", "checkpoint.every=0",
            "optimizer.learning_rate=0.02", "optimizer.warmup_steps=5")
FEW = ("steps=5", "data_options.held_out=20")


class Shrinks(Launcher):
    """Goes on without the rank that was lost, which is the last."""

    def died(self, rank):
        assert rank == self.world - 1
        self.world -= 1
        super().died(rank)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """By name: a run's directory of checkpoints; each is trained once, when it is asked for."""
    made = {}

    def run(name, *more, world=1, launcher=Launcher, **given):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            config = load(None, [*SETTINGS, f"work_dir={folder}", *more])
            started = launcher(config, world, folder, **given)
            (found,) = {result.evaluation["mrr_at_10"] for result in started.run(
                timeout_s=LIMIT_S).values()}
            made[name] = str(config.checkpoint_dir), found, started
        return made[name]

    return run


def test_a_run_that_shrank_is_as_good_as_one_that_did_not(trained, capsys):
    plain, found, _ = trained("four", world=4)
    assert found > 0.2  # it has learnt: whoever guesses among 2000 finds 0.0015
    shrank, _, launcher = trained("shrank", world=4, launcher=Shrinks, faults={
        (1, 3, STEPS // 3, "forward_backward"): "kill"})
    assert launcher.world == 3 and [kind for kind, _ in launcher.plans] == ["fresh", "survivor"]
    assert main(["parity", plain, shrank, *METRIC, "--within", "1%"]) == 0, capsys.readouterr()
    assert "within (2000 pairs" in capsys.readouterr().out


def test_bf16_is_as_good_as_fp32_and_half_a_training_is_not(trained, capsys):
    plain, _, _ = trained("four", world=4)
    bf16, _, _ = trained("bf16", "model_options.bf16=true")
    assert main(["parity", plain, bf16, *METRIC, "--within", "5%"]) == 0, capsys.readouterr()
    short, _, _ = trained("short", "steps=5")
    assert main(["parity", plain, short, *METRIC, "--within", "5%"]) == 1, capsys.readouterr()
    assert "outside" in capsys.readouterr().out


def test_twenty_pairs_are_too_few_to_tell(trained, capsys):
    run = partial(trained, world=1)
    few = [run(f"few{seed}", f"seed={seed}", *FEW)[0] for seed in (0, 1)]
    assert main(["parity", *few, *METRIC, "--within", "50%"]) == 3, capsys.readouterr()
    assert "20 pairs, and 30 are the least" in capsys.readouterr().out


def test_xla_is_as_good_as_the_processor(trained, capsys, tmp_path):
    """One rank on XLA's processor device, whose kernels are others, for a third of the steps."""
    third = f"steps={STEPS // 3}"
    with on_xla("quality", tmp_path, *SETTINGS, third) as run:
        xla = run.answer(2 * LIMIT_S)
    plain, found, _ = trained("third", third)
    assert found > 0.2
    assert main(["parity", plain, xla["whole"], *METRIC, "--within", "1%"]) == 0, \
        capsys.readouterr()
    assert "within (2000 pairs" in capsys.readouterr().out
    short, _, _ = trained("short", "steps=5")
    assert main(["parity", short, xla["whole"], *METRIC, "--within", "5%"]) == 1
    few, _, _ = trained("few1", "seed=1", *FEW)
    assert main(["parity", few, xla["few"], *METRIC, "--within", "50%"]) == 3
    assert "20 pairs, and 30 are the least" in capsys.readouterr().out
