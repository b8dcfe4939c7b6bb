"""The seam: which strategy is taken, and what a strategy of the user's own may do."""

from __future__ import annotations

import concurrent.futures
import functools
import json
from types import SimpleNamespace

import own
import pytest
import test_checkpoint as runs
import torch
import torch.distributed as dist
from harness import Broken, Launcher, Lost

from holdfast.trainer.breakable import Breakable
from holdfast.trainer.checkpoint.restore import Held, agreed_step
from holdfast.trainer.config import ConfigError, load
from holdfast.trainer.engines.strategy import Layout, Place, chain
from holdfast.trainer.loop import Generation
from holdfast.trainer.state import Rows, Spec, State

CPU = torch.device("cpu")
clean_group = runs.clean_group


def config(tmp, *more):
    return load(None, ["model=tiny:Model", "data=tiny:Data", "steps=6", "batch=3",
                       "micro_batches=3", f"work_dir={tmp}", "checkpoint.every=0", *more])


def test_a_strategy_of_ones_own_is_taken_and_says_what_it_chose(tmp_path):
    launcher = Launcher(config(tmp_path, "strategy=own:Plain"), 2, tmp_path,
                        {(1, 1, 3, "forward_backward"): "kill"})
    own = launcher.run()
    plain = Launcher(config(tmp_path), 2, tmp_path).run()
    assert {r.digest for r in own.values()} == {r.digest for r in plain.values()}
    assert [e[4] for e in launcher.said("report")].count("own: 2 ranks") == 1


@pytest.mark.parametrize(("name", "said"), [
    ("own:FailsAtOnce", "raised KeyError: 'no such thing'"),
    ("own:FailsInAStep", "raised RuntimeError: my mistake"),
    ("own:Nothing", "own has no 'Nothing'"), ("nowhere:X", "no module 'nowhere'"),
])
def test_what_it_raises_is_a_setting_of_the_users(tmp_path, name, said):
    with pytest.raises(Lost, match="ConfigError: strategy = ") as found:
        Launcher(config(tmp_path, f"strategy={name}"), 2, tmp_path).run()
    assert said in str(found.value)


@pytest.mark.parametrize("call", [
    "warm_up", "lay_out", "hold", "initialise 2", "wrap", "run", "norm 2", "update 2", "said",
    "kept", "forget 2", "forget 3", "proposed", "hold 2", "moves", "moved", "encoder", "leave",
    "forget 5",  # in warm_up, as the generation begins, in two steps, and as it is left
])
def test_wherever_it_raises_that_is_a_setting_of_the_users(tmp_path, call):
    """The exception surfaces inside torch, which was given something wrong."""
    where, _, number = call.partition(" ")
    with pytest.raises(ConfigError) as found:
        runs.run(tmp_path, "strategy=own:Fails", "steps=2", "checkpoint.every=0",
                 "data=blocks:Data", f"strategy_options.where={where}",
                 f"strategy_options.call={number or 1}")
    assert "strategy = 'own:Fails' raised AttributeError: 'NoneType'" in str(found.value)
    assert "(own.py, line " in str(found.value)


def test_and_where_it_raises_in_an_export(tmp_path):
    more = ("strategy=own:Fails", "model=tiny:Embedding", "checkpoint.every=2", "steps=2",
            "strategy_options.where=encoder", "strategy_options.call=1")
    runs.run(tmp_path, *more)
    with pytest.raises(ConfigError, match="own.py"):
        runs.run(tmp_path, *more, f"export.dir={tmp_path / 'to'}", "export.field=x")


def generation(broken=False, strategy=None):
    elastic = SimpleNamespace(
        Broken=Broken, broken=lambda: broken, register_group=lambda group, cut: None)
    job = SimpleNamespace(config=SimpleNamespace(strategy="own:Plain"), strategy=strategy)
    return Generation(job, Held(), None, elastic)


CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
                      "closed by peer [127.0.0.1]:9")


@pytest.mark.parametrize("error", [
    CLOSED, Broken("generation is over"), dist.DistBackendError("NCCL communicator was aborted"),
    MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
                 "allocate memory: you tried to allocate 8 bytes."),
    OSError(12, "Cannot allocate memory"), FloatingPointError("loss is nan"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    ConnectionResetError(104, "Connection reset by peer"), TimeoutError("timed out"),
    EOFError(), concurrent.futures.CancelledError(), RuntimeError("can't start new thread"),
    OSError(28, "No space left on device"), OSError(24, "Too many open files"),
])
def test_what_a_restart_may_cure_is_never_a_setting(error):
    """Though its own file is where it surfaces, as of a call without a frame of Python's."""
    with pytest.raises(type(error)) as found, generation().told():
        own.fail(error)
    assert found.value is error


def test_whose_an_exception_is():
    own_mistake = RuntimeError("my mistake")
    with pytest.raises(ConfigError, match="raised RuntimeError: my mistake"), generation().told():
        own.fail(own_mistake)
    # In a generation that is over that may be anything; if it is a mistake, it comes again.
    with pytest.raises(RuntimeError, match="my mistake"), generation(broken=True).told():
        own.fail(own_mistake)
    with pytest.raises(ConfigError, match="raised JSONDecodeError"), generation().told():
        own.call(functools.partial(json.loads, "{"))
    with pytest.raises(ConfigError, match="raised FileNotFoundError"), generation().told():
        own.fail(FileNotFoundError(2, "No such file or directory"))
    with pytest.raises(KeyError), generation().told():
        own.call(lambda: {}["of another file"])
    # DDP may tell a lost peer in words that name none, from torch.
    with pytest.raises(RuntimeError, match="normalized_shape"), generation().told():
        own.call(functools.partial(torch.nn.functional.layer_norm, torch.ones(2), (3,)))
    with pytest.raises(AttributeError), generation().told():  # torch, called by another file
        own.call(lambda: torch.nn.functional.mse_loss(torch.ones(1), None))
    with pytest.raises(KeyError, match="my sums"), generation().told():
        own.put_into_words(CLOSED)
    with pytest.raises(ConfigError, match="raised RuntimeError: my mistake"):
        generation(broken=True, strategy=own.Gone()).leave()


class Reads:
    """A dataset of the user's."""

    def __init__(self, load):
        self.load = load

    def __getitem__(self, index):
        return self.load(index)


@pytest.mark.parametrize("said", [
    "failed to connect to 10.0.0.3", "Broken pipe", "Connection reset by peer", "Socket closed",
    "TCPStore of mine", "no gloo/ here", "Connection closed by peer",
])
def test_what_a_users_own_code_says_of_its_own_connections_is_no_lost_peer(said):
    """As a data class does, and whatever it makes of that, and where torch raises it again."""
    def load(index):
        raise RuntimeError(said)

    def in_words():
        try:
            load(0)
        except RuntimeError:
            raise KeyError("row 7") from None

    loader = torch.utils.data.DataLoader(Reads(load), sampler=[0])
    again = torch._utils.ExceptionWrapper(
        (RuntimeError, RuntimeError(said), None)).reraise
    for code in (functools.partial(load, 0), in_words, lambda: next(iter(loader)), again):
        with pytest.raises(Exception) as found:
            code()
        assert not any(map(generation().is_lost, chain(found.value)))
    # Of a generation that is over it may be anything.
    assert any(map(generation(broken=True).is_lost, chain(RuntimeError(said))))


def test_what_a_call_into_the_group_says_is_a_lost_peer():
    """Of torch's, of ours, and of gloo's without a frame of Python's; whatever words a strategy of
    the user's has for it."""
    def left():
        Breakable.check(SimpleNamespace(over_s=0.0))

    future = torch.futures.Future()
    future.set_exception(RuntimeError("Socket closed"))
    for code in (left, future.wait, functools.partial(own.fail, CLOSED)):
        with pytest.raises(RuntimeError) as found:
            code()
        assert generation().is_lost(found.value), code
        with pytest.raises(KeyError) as worded:
            own.put_into_words(found.value)
        assert any(map(generation().is_lost, chain(worded.value)))


def test_both_ways_to_write_it(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('[strategy]\nname = "own:Plain"\n[strategy.strategy_options]\na = 1\n')
    chosen = load(str(file))
    assert (chosen.strategy, chosen.strategy_options) == ("own:Plain", {"a": 1})
    with pytest.raises(ConfigError, match="strategy = 'dpd': set one of ddp"):
        load(None, ["strategy=dpd"])


def filled(cut=lambda name, spec: None, names=None):
    specs = {"model.a": Spec(torch.float32, (5, 3)), "model.b": Spec(torch.float32, ())}
    state = State(specs, CPU, cut=cut, names=names)
    return state


def test_pieces_of_any_cut_make_any_other():
    whole = filled()
    whole.views["model.a"].copy_(torch.arange(15.0).view(5, 3))
    whole.views["model.b"].fill_(7.0)

    def rows(shard, shards):
        each = -(-5 // shards)
        first = min(5, shard * each)
        return lambda name, spec: Rows(first, min(5, first + each) - first, each)

    pieces = []
    for shard in range(3):
        piece = filled(rows(shard, 3))
        covered = {}
        entries, begin, end = whole.share(0, 1)
        piece.fill(entries, whole.bytes(begin, end), covered)
        assert piece.missing(covered) == ""
        first = 2 * shard
        assert piece.views["model.a"].tolist() == whole.views["model.a"][first : first + 2].tolist()
        pieces.append(piece)
    for shards in (1, 2, 5):
        for shard in range(shards):
            other, covered = filled(rows(shard, shards)), {}
            for piece in pieces:
                entries, begin, end = piece.share(0, 1)
                if other.wants(entries):
                    other.fill(entries, piece.bytes(begin, end), covered)
            assert other.missing(covered) == ""
            first, number, _ = rows(shard, shards)("", None)
            assert other.views["model.a"].tolist() == \
                whole.views["model.a"][first : first + number].tolist()
            assert float(other.views["model.b"]) == 7.0
    lacking, covered = filled(), {}
    for piece in (pieces[0], pieces[2]):
        entries, begin, end = piece.share(0, 1)
        lacking.fill(entries, piece.bytes(begin, end), covered)
    assert lacking.missing(covered) == "model.a"


def test_a_stage_holds_its_own_tensors_and_takes_no_others():
    stage, covered = filled(names=["model.b"]), {}
    whole = filled()
    whole.views["model.b"].fill_(3.0)
    entries, begin, end = whole.share(0, 1)
    stage.fill(entries, whole.bytes(begin, end), covered)
    assert stage.missing(covered) == "" and float(stage.views["model.b"]) == 3.0
    assert stage.fingerprint == whole.fingerprint and stage.nbytes < whole.nbytes


TWO_OF_TWO = Layout(tuple(Place(shard=rank % 2, data=rank) for rank in range(4)), shards=2, data=4)


def held(step, shard, torn=False, ready=False, shards=2):
    return Held(step=step, torn=torn, shard=shard, shards=shards, ready=ready)


@pytest.mark.parametrize(("ranks", "agreed"), [
    ([held(5, 0), held(5, 1), held(5, 0), Held()], 5),  # its copy has it
    ([held(5, 0), Held(), held(5, 0), Held()], None),  # both copies of shard 1 are gone
    ([held(6, 0), held(5, 1), held(5, 0), Held()], 5),  # one is ahead, another copy is not
    ([held(6, 0), held(5, 1, ready=True), held(5, 0), Held()], 6),  # it can follow
    ([held(6, 0), held(5, 1, torn=True, ready=True), held(5, 0), Held()], None),
    ([held(5, 0, ready=True), held(5, 1, ready=True), Held(), Held()], 5),  # nobody went ahead
    ([held(5, 0), held(5, 1, shards=4), Held(), Held()], None),  # cut in another way
    ([held(5, 1), held(5, 0), Held(), Held()], None),  # of another place
])
def test_the_step_that_survivors_agree_on(ranks, agreed):
    assert agreed_step(ranks, TWO_OF_TWO) == agreed
