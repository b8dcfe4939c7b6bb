"""What torch's DDP measured of its sums is copied to the page, and nothing else is touched."""

from __future__ import annotations

import gc
import sys
import types

import pytest

from holdfast.worker import page as pages
from holdfast.worker.rank import gradients

MEASURED = {
    "iteration": 100, "backward_comm_time": 50_000_000, "forward_compute_time": 60_000_000,
    "backward_compute_comm_overlap_time": 20_000_000, "backward_compute_time": 90_000_000,
    "total_parameter_size_bytes": 4096, "world_size": 4, "backend_name": "gloo",
}
READ = pages.Gradients(100, 50_000_000, 30_000_000, 150_000_000, 4096, 4)


class Parallel:
    """As much of DistributedDataParallel as is touched."""

    _active_ddp_module = None

    def __init__(self, data):
        self.data = data

    def _get_ddp_logging_data(self):
        if isinstance(self.data, Exception):
            raise self.data
        return self.data


@pytest.fixture()
def watch(monkeypatch):
    module = types.SimpleNamespace(DistributedDataParallel=Parallel)
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", module)
    monkeypatch.setattr(Parallel, "_active_ddp_module", None)
    return gradients.Watch([0] * pages.FIELDS)


def written(watch):
    return pages.Gradients(*watch.fields[pages.F_GRADIENTS : pages.F_COLLECTIVES])


def test_the_module_whose_forward_pass_is_under_way_is_followed_while_it_lives(watch):
    watch.each_beat()
    watch.copy()
    assert written(watch) == pages.Gradients()  # none was met yet
    ours, other = Parallel(MEASURED), Parallel({**MEASURED, "iteration": 900})
    Parallel._active_ddp_module = ours
    watch.each_beat()
    Parallel._active_ddp_module = other
    watch.each_beat()
    watch.copy()
    assert written(watch) == READ
    del ours
    gc.collect()
    watch.copy()
    assert written(watch) == READ  # the module of a generation that is over
    watch.each_beat()
    watch.copy()
    assert written(watch).iteration == 900


@pytest.mark.parametrize("data", [
    {}, {"iteration": 3}, None, {**MEASURED, "backward_comm_time": 0}, RuntimeError("gone"),
    {**MEASURED, "iteration": -1}, {**MEASURED, "backward_comm_time": 2**63},
    {**MEASURED, "world_size": "many"}, {**MEASURED, "total_parameter_size_bytes": 2**60},
])
def test_what_is_no_measurement_changes_nothing(watch, data):
    module = Parallel._active_ddp_module = Parallel(data)
    watch.each_beat()
    watch.copy()
    assert module is not None and written(watch) == pages.Gradients()


def test_the_size_of_what_a_hook_compresses_is_unknown_and_no_wait_is_negative():
    assert gradients.read({**MEASURED, "comm_hook": "FP16_COMPRESS"}) == READ._replace(size_bytes=0)
    hidden = gradients.read({**MEASURED, "backward_compute_comm_overlap_time": 60_000_000})
    assert (hidden.wait_ns, hidden.sum_ns) == (0, 50_000_000)


def test_a_torch_without_these_names_is_left_alone(watch, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.nn.parallel.distributed", types.SimpleNamespace())
    watch.each_beat()
    watch.copy()
    monkeypatch.delitem(sys.modules, "torch.nn.parallel.distributed")
    watch.each_beat()
    watch.copy()
    assert written(watch) == pages.Gradients()


def test_this_torch_measures_what_is_read():
    """The names are torch's own and no promise of it: one process that trains with itself."""
    torch = pytest.importorskip("torch")
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        met = []
        model.module.register_forward_pre_hook(
            lambda *_: met.append(type(model)._active_ddp_module))
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
        assert met[0] is model
        found = gradients.read(model._get_ddp_logging_data())
    finally:
        dist.destroy_process_group()
    assert found.iteration >= 1 and (found.size_bytes, found.world) == (80, 1)
    assert 0 <= found.wait_ns <= found.sum_ns and found.compute_ns > 0


def test_what_was_waited_in_all_collectives_stands_where_no_ddp_is_followed(watch):
    waited = pages.Gradients(34, 40, 30, 100, 0, 2, 1)
    watch.write_waited(None)
    assert written(watch) == pages.Gradients()
    watch.write_waited(waited)
    assert written(watch) == waited
    ours = Parallel._active_ddp_module = Parallel(MEASURED)
    watch.each_beat()
    watch.copy()
    watch.write_waited(waited._replace(iteration=54))
    assert ours is not None and written(watch) == READ
