"""The trainer, top to bottom: prepare, join, restore, step; and when a peer is lost, join again.

Owns the training loop and the order of things.  Must not decide where a generation resumes or who
is in it: the agent plans, the launcher hands out assignments, `elastic` carries them here.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import math
import re
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import devices, lineage
from . import export as exporting
from . import optimizer as adamw
from .checkpoint import format as files
from .checkpoint.manifest import Manifest
from .checkpoint.restore import Held, refusal, restore
from .checkpoint.snapshot import Snapshots
from .checkpoint.write import Checkpoints
from .config import Config, ConfigError, named_class
from .data import Sampler, seed_for
from .devices import open_device
from .engines import topology
from .engines.precompile import precompile
from .engines.strategy import (
    Layout,
    Member,
    MicroBatch,
    Movable,
    Setup,
    Strategy,
    build,
    chain,
    of_memory,
    told,
)
from .evaluate import Evaluated, evaluate
from .group import BadCheckpoint, Group, RestoreFailed, came_from_a_call, is_broken_group
from .move import go_over
from .quality import kept
from .state import State

PARK_S = 50.0  # for a checkpoint before ranks park, and for each other; the agent allows 120
MEET_S = 5.0  # ... without one; the agent allows 10
CAUSES_SHOWN, FRAMES_SHOWN, SAID_SHOWN = 4, 16, 2000  # of a lost peer's error; and characters
LINE_SHOWN = 300
# Of torch's words for a lost connection: where in its sources, its advice, and what a future says
# of the value that it has not.
TORCHS_OWN = re.compile(
    r"^Unable to cast |\[/\S+:\d+\] | This is typically caused by .*| to Tensor$")
STEP_TIMES = 64  # the latest, for the snapshots' cadence
ENDS = (ConfigError, FloatingPointError)  # settings, and what every rank raises alike


class Job(NamedTuple):
    """What a process builds once and keeps through all its generations."""

    config: Config
    strategy: Strategy
    data: Any
    device: torch.device
    manifest: Manifest
    said: list[str]  # what the strategy chose last
    buffers_after: list[Tensor]  # of a step whose gradients are whole, and that was not entered


class Result(NamedTuple):
    rank: int
    step: int
    loss: float
    digest: str
    evaluation: dict[str, float]


def train(config: Config, elastic: Any) -> Result:
    """Trains to the last step through any number of generations.

    Raises what the user's own code raises, FloatingPointError when the loss is no number,
    ConfigError for settings; a lost peer is none of these: this rank parks and goes on.  So it does
    once where its own code raised, if the device still answers.
    """
    job = prepare(config, elastic)
    checkpoints = Checkpoints(
        config.checkpoint, config.checkpoint_dir, elastic, job.manifest)
    held, loss = Held(), math.nan
    steps = 0  # done here since this process began, or raised last
    root = str(config.checkpoint_dir) if config.checkpoint.every else ""
    commits = [found._asdict() for found in files.listing(root)] if root else []
    assignment = elastic.ready(root, config.checkpoint.keep, commits)
    while True:
        generation = Generation(job, held, checkpoints, elastic, loss)
        try:
            result = generation.run(assignment)
        except Exception as error:
            # A strategy of the user's may have put a lost peer into words of its own.
            steps, loss = steps + generation.steps, generation.loss
            if any(map(generation.is_lost, chain(error))):
                raised = ""
                generation.show(error)
            elif steps and generation.outlives(error):
                # What it raises before a step is done, or again at once, it may owe to itself.
                raised, steps = elastic.raised(error), 0
            else:
                raise
            reason = _reason(error, "raised" if raised else "peer_lost")
        else:
            generation.leave()
            checkpoints.close()
            return result
        checkpoints.generation_over()
        assignment = elastic.park(
            held.step, held.torn, reason, generation.leave, held.shard, held.shards, held.ready,
            raised)


def _reason(error: BaseException, word: str) -> str:
    if isinstance(error, BadCheckpoint):
        word = "bad_checkpoint"
    elif isinstance(error, RestoreFailed):
        word = "restore_failed"
    elif type(error).__name__ == "Broken":
        word = "generation_over"
    return f"{word}: {' '.join(str(error).split())}"  # cut where secrets are taken out


def _in_short(error: BaseException) -> str:
    """Its traceback and those of what led to it, bounded, and without lines of source: to read
    torch's long files takes longer than others should wait for this rank."""
    told = []
    for one in reversed([*itertools.islice(chain(error), CAUSES_SHOWN)]):
        frames = [(frame.f_code.co_filename, line, frame.f_code.co_name, "")
                  for frame, line in traceback.walk_tb(one.__traceback__)]
        places = "".join(traceback.StackSummary.from_list(frames[-FRAMES_SHOWN:]).format())
        said = "".join(traceback.format_exception_only(one))[:SAID_SHOWN].rstrip()
        told.append(f"Traceback (most recent call last):\n{places}{said}\n")
    return "\nDuring handling of the above exception, another exception occurred:\n\n".join(told)


# ------------------------------------------------------------------------------------ prepare


def prepare(config: Config, elastic: Any = None) -> Job:
    """Model, data and strategy, warm: a rank that waits here joins at once and steps at once."""
    lineage.check(config)
    home, engines, compiles = open_device(config)
    if compiles and elastic is not None:
        elastic.phase("compile")
    if compiles and config.xla.precompile and (said := precompile(config)) and elastic is not None:
        elastic.report("", said)
    model_class, data_class = (named_class(config.model, "model"), named_class(config.data, "data"))
    data = data_class(config.data_options, Path(config.work_dir))

    def build_model() -> nn.Module:
        torch.manual_seed(seed_for(config.seed, 0, -1))
        model: nn.Module = model_class(config.model_options)
        return model

    strategy = build(Setup(config, build_model, home, engines))
    batch = data.batch(range(min(config.batch, len(data))))
    with told(config.strategy):
        strategy.warm_up({key: value.to(home) for key, value in batch.items()})
    # What that took goes back to the kernel: a standby may wait for days.
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
    if compiles and elastic is not None:
        elastic.phase("startup")
    # What lives now lives to the end: a collection in a recovery need not look at it (240 ms).
    gc.freeze()
    return Job(config, strategy, data, home, Manifest(config, data.digest), [""], [])


# ------------------------------------------------------------------------------------ generation


class Generation:
    """This process's part in one generation, from joining to its end or its last step."""

    state: State

    def __init__(self, job: Job, held: Held, checkpoints: Checkpoints, elastic: Any,
                 loss: float = math.nan) -> None:
        """`loss`: of the last step that this process did."""
        self.job, self.held, self.checkpoints = job, held, checkpoints
        self.elastic, self.strategy = elastic, job.strategy
        self.group: Group | None = None
        self.buffers, self.buffers_before = list[Tensor](), list[Tensor]()
        self.loss, self.step_times_s, self.steps = loss, list[float](), 0

    def run(self, assignment: Any) -> Result:
        self.join(assignment)
        group = self.group
        assert group is not None
        if self.job.config.export.dir:
            return self.export()
        job, held, elastic = self.job, self.held, self.elastic
        config = job.config
        while held.step < config.steps:
            begin = time.monotonic()
            tokens = self.step()
            self.after_step()
            self.step_times_s = [*self.step_times_s[1 - STEP_TIMES :], time.monotonic() - begin]
            self.tell(tokens / self.step_times_s[-1])
            with self.told():
                self.go_over_if_slow()
            self.park_if_asked()
            if 0 < elastic.stop_after() <= held.step:
                break
        return self.finish()

    def join(self, assignment: Any) -> None:
        """The group, then proven state on every rank, then the strategy around it."""
        job, elastic, strategy = self.job, self.elastic, self.strategy
        self.assignment = assignment
        with self.told():
            self.group = group = Group(assignment, job.device, elastic)
            said = strategy.said() if isinstance(strategy, Movable) else ""
            group.join(
                assignment, elastic, self.lay_out, said, job.data.digest, self.held.told)
            self.check_data(group)
            layout = group.layout
            self.state = state = strategy.hold(layout, group.rank)
            kept = strategy.kept() if isinstance(strategy, Movable) else None
            began = restore(assignment, group, state, self.held, elastic, self.begin,
                            self.end_step, kept)
            strategy.forget()
            job.buffers_after.clear()
            strategy.wrap(group, self.check)
        if words := layout.places[group.rank].words:
            elastic.placed(words)
        if layout.words not in job.said:
            job.said[:] = ["", layout.words]
            if group.rank == 0:
                elastic.report("", layout.words)
        job.manifest.began_from(began)
        job.manifest.strategy = {"name": job.config.strategy, **layout.about}
        if group.rank == 0:
            job.manifest.keep(assignment.run, assignment.generation, elastic.report)
            if began["from"] == "weights":
                elastic.report("", f"a new run from the weights of {began['path']}")
        self.buffers = state.buffers
        micro_batches = job.config.micro_batches or layout.data
        self.sampler = Sampler(len(job.data), job.config.seed, job.config.batch, micro_batches)
        self.mine = self.sampler.mine(layout.places[group.rank].data, layout.data)
        self.soon = getattr(job.data, "soon", None)
        self.checkpoints.join(assignment, group, state)
        self.snapshots = Snapshots(job.config.snapshot, state, group, self.held, elastic)

    def lay_out(self, members: Sequence[Member]) -> Layout:
        """As the strategy does; its words say whose labels were taken, and who has none."""
        layout = self.strategy.lay_out(members)
        more = topology.words(self.job.config.topology, members)
        return layout._replace(words=layout.words + more) if layout.words else layout

    def check_data(self, group: Group) -> None:
        """An index that was changed as the run goes on would be seen by new ranks alone."""
        own = self.job.data.digest
        for rank, other in enumerate(group.data):
            if other not in ("", own):
                raise ConfigError([
                    f"data: rank {rank} sees data of digest {other}, rank {group.rank} of {own}: "
                    "it was changed as the run went on; put it back, or start all ranks anew"])

    def begin(self) -> dict[str, Any]:
        """The state of step 0, and what the run begins from.  Raises ConfigError."""
        config = self.job.config
        self.strategy.initialise()  # which may be a collective, where a user wrote it
        saves = config.checkpoint.every and not config.export.dir
        if saves and self.assignment.rank == 0 and (why := refusal(config.checkpoint_dir)):
            raise ConfigError([why])
        return lineage.begin(config, self.state)

    def step(self) -> int:
        """One optimizer step over all micro-batches; returns the tokens of the whole step."""
        job, held, elastic, strategy = self.job, self.held, self.elastic, self.strategy
        elastic.phase("data")
        batches = [
            {key: value.to(job.device) for key, value in
             job.data.batch(self.sampler.indices(held.step, number)).items()}
            for number in self.mine]
        if self.soon is not None and held.step + 1 < job.config.steps:
            self.soon([index for number in self.mine
                       for index in self.sampler.indices(held.step + 1, number)])
        elastic.phase("forward_backward")
        self.buffers_before = [buffer.clone() for buffer in self.buffers]
        with self.told():
            self.forward_backward(batches)
            # From here on a shard of the next step is here, though not every rank may get its norm.
            held.ready = self.group is not None and self.group.layout.shards > 1
            norm = strategy.norm()
        if not math.isfinite(norm):
            # On every rank alike, and before the weights are touched.
            raise FloatingPointError(
                f"gradient norm is {norm} at step {held.step}: set a lower learning_rate")
        elastic.phase("optimizer")
        elastic.step_begin()
        held.torn = True
        self.update(held.step, norm)
        held.step, held.torn, held.ready, held.norm = held.step + 1, False, False, norm
        elastic.step_end(held.step, self.loss)
        self.steps += 1
        self.buffers_before = []
        with self.told():
            strategy.forget()
        tokens: int = sum(value.numel() for value in batches[0].values())
        return tokens * self.sampler.micro_batches

    def forward_backward(self, batches: list[dict[str, Tensor]]) -> None:
        """Gradients of the mean over all micro-batches of all ranks; the buffers as rank 0's."""
        config, step, of = self.job.config, self.held.step, self.sampler.micro_batches
        assert self.group is not None
        self.loss = self.strategy.run(
            [MicroBatch(number, seed_for(config.seed, step, number), batch, of)
             for number, batch in zip(self.mine, batches)],
            self.look, self.elastic.skip_collective)
        for buffer in self.buffers:
            self.group.broadcast(buffer)

    def update(self, step: int, norm: float) -> None:
        config = self.job.config
        with self.told():
            self.strategy.update(adamw.learning_rate(config.optimizer, step, config.steps), norm)

    def end_step(self, step: int, norm: float) -> None:
        """Enters the optimizer with what the generation before has kept."""
        for buffer, after in zip(self.state.buffers, self.job.buffers_after):
            buffer.copy_(after)
        self.update(step, norm)

    def look(self, number: int, loss: float) -> None:
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"loss is {loss} at step {self.held.step}, micro-batch {number}: "
                "set a lower learning_rate, or look at the data")
        self.check()

    def check(self, _parameter: Tensor | None = None) -> None:
        """Leaves a generation that is over at once, and not only at the end of a backward pass."""
        if self.elastic.broken():
            raise self.elastic.Broken("generation is over")

    def is_lost(self, error: BaseException) -> bool:
        """Whether the generation is over by it, and no code of the user's is to blame."""
        return isinstance(error, self.elastic.Broken) or is_broken_group(
            error, self.elastic.broken())

    def show(self, error: BaseException) -> None:
        """Where a peer was lost by what an exception says of itself alone, people may judge it."""
        if self.elastic.broken() or isinstance(
                error, (self.elastic.Broken, RestoreFailed, dist.DistError)):
            return
        then = ", continuing in the next generation" if self.elastic.active() else ""
        if len([*chain(error)]) == 1 and came_from_a_call(error):  # torch's own, and no one's words
            line = TORCHS_OWN.sub("", " ".join(str(error).split()))
            said = f"holdfast: a peer was lost{then}: {line[:LINE_SHOWN]}"
        else:
            said = (f"holdfast: an error that is taken for a lost peer's{then}:\n"
                    f"{_in_short(error)}")
        with suppress(OSError, ValueError, AttributeError):  # closed, full or replaced
            print(said, file=sys.stderr, flush=True)

    def outlives(self, error: BaseException) -> bool:
        """Whether this process can go on in the next generation though its own code raised this."""
        return (self.elastic.active() and self.job.config.device != "xla"
                and not any(isinstance(one, ENDS) for one in chain(error))
                and of_memory(error) is None and devices.answers(self.job.device))

    def told(self) -> AbstractContextManager[None]:
        """Around every call of the strategy."""
        return told(self.job.config.strategy, self.is_lost)

    def after_step(self) -> None:
        step, elastic = self.held.step, self.elastic
        last = step == self.job.config.steps or 0 < elastic.stop_after() <= step
        self.snapshots.after_step(step, self.step_times_s or [math.inf])
        if self.checkpoints.due(step) or (last and self.job.config.checkpoint.every):
            elastic.phase("checkpoint")
            if last:
                self.checkpoints.wait()
            self.checkpoints.save(step)
        if self.job.config.eval_every and step % self.job.config.eval_every == 0 and not last:
            found = self.evaluate()
            if found and self.group is not None and self.group.rank == 0:
                words = ", ".join(f"{key} {value:.4f}" for key, value in found.items())
                elastic.report("", f"held out at step {step}: {words}")

    def go_over_if_slow(self) -> None:
        """Goes on under another layout where the strategy asks for one; no step is done twice."""
        strategy, group, config = self.strategy, self.group, self.job.config
        if not isinstance(strategy, Movable) or group is None:
            return
        asked = strategy.proposed(config.steps - self.held.step)
        if asked is None:
            return
        said = f"step {self.held.step}: {asked.words}"
        if asked.layout is not None:
            before = group.layout
            found = go_over(group, strategy, self.state, asked.layout, self.elastic)
            if found.state is None:
                strategy.hold(before, group.rank)
                said += f": left as it is, {found.why}"
            else:
                group.layout, self.state = asked.layout, found.state
                self.checkpoints.hold(group, self.state)
                self.snapshots = Snapshots(
                    config.snapshot, self.state, group, self.held, self.elastic)
                self.job.manifest.strategy = {"name": config.strategy, **group.layout.about}
                if group.rank == 0:
                    self.job.manifest.keep(
                        self.assignment.run, self.assignment.generation, self.elastic.report)
                said += (f"; {found.sent_bytes / 1e6:.1f} MB sent, every byte proven, in "
                         f"{found.seconds:.2f} s")
            strategy.moved(group.layout, found.seconds)
        if group.rank == 0:
            self.elastic.report("", said)

    def park_if_asked(self) -> None:
        """Leaves behind the step that all ranks were told, with a proven checkpoint where one is
        wanted; nobody leaves before every part of it is there.  The run's last step ends it."""
        step, group = self.held.step, self.group
        after, saves = self.elastic.park_after()
        if not 0 < after <= step or step == self.job.config.steps or group is None:
            return
        saves = saves and bool(self.job.config.checkpoint.every)
        if saves:
            self.elastic.phase("checkpoint")
            self.checkpoints.wait()
            if not self.checkpoints.due(step):
                self.checkpoints.save(step)
            self.checkpoints.prove(PARK_S)
        # Who leaves cuts the others' connections: a shard of which there is one copy must be here.
        group.meet(f"park/{step}", PARK_S if saves else MEET_S)
        raise self.elastic.Broken(f"asked to leave behind step {step}")

    def tell(self, tokens_per_s: float) -> None:
        config, step, loss = self.job.config, self.held.step, self.loss
        self.elastic.progress(step, loss, tokens_per_s, config.steps)
        if self.elastic.active() or self.group is None or self.group.rank:
            return
        if step % config.log_every == 0 or step == config.steps:
            print(f"step {step}/{config.steps}  loss {loss:.4f}  {tokens_per_s:.0f} tokens/s",
                  flush=True)

    def evaluate(self) -> dict[str, float]:
        if not hasattr(self.job.data, "heldout"):
            return {}
        assert self.group is not None
        with self.told(), self.strategy.encoder() as embed:
            if embed is None:
                return {}
            self.elastic.phase("eval")
            found = evaluate(embed, self.job.data.heldout(), self.group)
        weights = self.group.weights_digest(self.state)
        if self.group.rank == 0:
            self.keep(found, weights)
        return found.figures

    def keep(self, found: Evaluated, weights: str) -> None:
        """With the run, for `holdfast parity`.  A full disk does not end a training."""
        job, place = self.job, self.assignment
        try:
            kept.save(job.config.checkpoint_dir, kept.Evaluation(
                place.run, place.generation, self.held.step, job.data.digest,
                weights, found.tasks))
        except OSError as error:
            self.elastic.report("", f"evaluation of step {self.held.step} is not kept: "
                                f"{error.strerror or error}")

    def export(self) -> Result:
        """Embeddings of all samples, in place of steps.  A part is made by whoever is there."""
        job, group, elastic = self.job, self.group, self.elastic
        assert group is not None
        if job.manifest.began.get("from") == "nothing":
            raise ConfigError([f"export: there is no checkpoint in {job.config.checkpoint_dir}: "
                               "set checkpoint.dir to a run's, or init_from"])
        # Of the weights alone, whoever holds what: another strategy or world may go on with it.
        about = {"data_digest": job.data.digest, "step": self.held.step,
                 "weights": group.from_first(group.weights_digest(self.state))}
        parts = exporting.Parts(job.config.export, len(job.data), about)
        parts.begin()
        with self.told(), self.strategy.encoder() as embed:
            if embed is None:
                raise ConfigError([f"export: {self.state.model_class} has no `embed`"])
            while True:
                # Rank 0's list: others may look when some parts are made already.
                missing = json.loads(group.from_first(
                    json.dumps(parts.missing() if group.rank == 0 else [])))
                for part, mine in exporting.turns(missing, group.rank, group.world):
                    elastic.phase("eval")  # before each part: it raises when a peer is lost
                    samples = parts.samples_of(part)
                    made = exporting.encode(
                        embed, job.data, job.config.export.field, samples if mine else samples[-1:],
                        job.device, self.check, parts.batches)
                    if mine:
                        parts.write(part, made)
                group.any(False)  # every rank has made its parts
                bad = parts.commit() if group.rank == 0 else []
                if not group.any(bool(bad)):
                    break
                elastic.report("", f"export: {len(bad) or 'some'} parts do not prove: made again")
        if group.rank == 0:
            elastic.report("", f"export: {parts.samples} embeddings in {parts.count} parts, every "
                           f"byte proven: {parts.root}")
        return Result(group.rank, self.held.step, 0.0, group.digest(self.state), {})

    def finish(self) -> Result:
        """After the last step: quality, the proof line's digest, and the last checkpoint."""
        assert self.group is not None
        evaluation = self.evaluate() if self.held.step == self.job.config.steps else {}
        self.elastic.phase("checkpoint")
        self.checkpoints.wait()
        self.save_last()
        if self.group.rank == 0 and (summary := self.checkpoints.summary()):
            self.elastic.report("", summary)
        self.group.tell("loss", [self.loss, len(self.mine)])
        digest = self.group.digest(self.state)
        # Nobody leaves while another may still need a peer; and behind it all have said their loss.
        self.group.any(False)
        return Result(self.group.rank, self.held.step, self.whole_loss(), digest, evaluation)

    def whole_loss(self) -> float:
        """The last step's mean over all micro-batches, whoever computed them; this rank's share of
        it beside one of a release that does not say its own."""
        assert self.group is not None
        # One that came behind the last step has no loss of it.
        known = [one for one in self.group.all_say("loss") if math.isfinite(one[0])]
        if not known:
            return self.loss
        return float(sum(loss * count for loss, count in known) / sum(one[1] for one in known))

    def save_last(self) -> None:
        """The last step's checkpoint, once more where a loss kept it from being committed."""
        job = self.job
        if not job.config.checkpoint.every or self.group is None:
            return
        found = files.listing(job.config.checkpoint_dir)
        if self.group.any(not any(f.step == self.held.step and not f.bad for f in found)):
            self.checkpoints.save(self.held.step)
            self.checkpoints.wait()

    def leave(self) -> None:
        """Drops the half step and frees the group.  The optimizer was not entered for it; gradients
        that are whole are kept while another rank may have stepped with theirs."""
        self.elastic.register_group(None, None)
        if self.group is not None:
            self.group.cut()
        # The generation is over in any case: a lost peer's is only what says so itself.
        with told(self.job.config.strategy, lambda error: is_broken_group(error, False)):
            if not self.held.ready:
                self.strategy.forget()
            elif self.buffers_before:
                self.job.buffers_after[:] = [buffer.clone() for buffer in self.buffers]
            for buffer, before in zip(self.buffers, self.buffers_before):
                buffer.copy_(before)
            self.strategy.leave()
        gc.collect()  # DDP is in cycles, and its hooks sit on the parameters until it is gone
        if self.group is not None:
            self.group.leave()
            self.group = None
