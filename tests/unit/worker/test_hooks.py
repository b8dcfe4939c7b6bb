"""The optimizer hooks go in once, whole, and not while torch is still being imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
import types

import pytest

from holdfast.worker import page as pages
from holdfast.worker.rank import hooks

NAME = "torch.optim.optimizer"


class Worker:
    """As much of a rank's worker as the hooks touch."""

    def __init__(self):
        self.fields = [0] * pages.FIELDS
        self.phases = []
        self.injected = None
        self.ticker = types.SimpleNamespace(
            each_beat=[], forget_groups=lambda: None, watch_group=lambda group: None
        )

    def switch_phase(self, number):
        self.phases.append(pages.PHASES[number])

    def finish_step(self, step):
        self.fields[pages.F_STEP] = step


class SlowTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torch.optim.optimizer, whose import stands still before its last lines."""

    def __init__(self):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.registered = []

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == NAME else None

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.register_optimizer_step_pre_hook = self.registered.append
        self.begun.set()
        assert self.go_on.wait(10.0)
        module.register_optimizer_step_post_hook = self.registered.append


@pytest.fixture()
def torch(monkeypatch):
    """A torch of our own in sys.modules, without torch.optim.optimizer."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("torch", "torch.optim"):
        module = types.ModuleType(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    slow = SlowTorch()
    monkeypatch.setattr(sys, "meta_path", [slow, *sys.meta_path])
    yield slow
    sys.modules.pop(NAME, None)


def test_a_half_imported_torch_is_looked_at_again(torch, capsys):
    found = hooks.install(Worker())
    importing = threading.Thread(target=importlib.import_module, args=(NAME,))
    importing.start()
    assert torch.begun.wait(10.0)
    found.each_beat()  # the ticker beats in the middle of the import
    assert not found.settled and torch.registered == [] and capsys.readouterr().err == ""
    torch.go_on.set()
    importing.join(10.0)
    for _ in range(3):
        found.each_beat()
    assert found.settled and torch.registered == [found.before_step, found.after_step]


def test_a_torch_without_hooks_is_said_once(torch, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, NAME, types.ModuleType(NAME))
    found = hooks.install(Worker())
    found.each_beat()
    assert found.settled and capsys.readouterr().err.count("steps are unseen") == 1


def test_a_step_is_one_of_the_busiest_optimizer():
    worker = Worker()
    found = hooks.ScriptHooks(worker)
    first, second = object(), object()
    for optimizer in (first, second, first, second):
        found.before_step()
        assert worker.fields[pages.F_STEP_BEGIN] != worker.fields[pages.F_STEP_END]
        found.after_step(optimizer)
    assert worker.fields[pages.F_STEP] == 2 and worker.phases[-1] == "unknown"
    assert worker.fields[pages.F_STEP_BEGIN] == worker.fields[pages.F_STEP_END] == 4
