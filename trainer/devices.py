"""Where a rank computes: the processor, torch's accelerator, or a device of XLA's.

Owns the choice, and what the trainer has to know of a device: where state and messages lie, who
carries messages, how much memory there is, and which classes compute there.  A device is opened
when a process prepares, once; torch_xla is imported only where device = "xla" asks for it.
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from . import breakable
from .config import Config, ConfigError

MEMORY_SHARE = 0.8  # of a device; the rest is the allocator's and other people's
NEURON_DEVICES = "/dev/neuron[0-9]*"
VISIBLE_CORES, NUMBER_OF_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
XLA_ENGINES = {"ddp": "holdfast.trainer.engines.xla:DataParallel"}


class Device(NamedTuple):
    """What was opened."""

    home: torch.device  # of the state, of batches, and of what ranks send each other
    engines: Mapping[str, str] | None = None  # the only strategies there, and their classes
    compiles: bool = False  # the first steps compile what they compute


def open_device(config: Config) -> Device:
    """The device of this process.  Raises ConfigError where there is none such."""
    return KINDS[config.device](config)


def _auto(config: Config) -> Device:
    return _cuda(config) if torch.cuda.is_available() else _cpu(config)


def _cpu(_config: Config) -> Device:
    return Device(torch.device("cpu"))


def _cuda(_config: Config) -> Device:
    torch.cuda.set_device(_local_rank() % max(1, torch.cuda.device_count()))
    return Device(torch.device("cuda", torch.cuda.current_device()))


def _accelerator(_config: Config) -> Device:
    """Whatever this build of torch computes on: torch knows one accelerator at most."""
    if not torch.accelerator.is_available():
        raise ConfigError(['device = "accelerator": torch finds none here; set device = "cpu"'])
    torch.accelerator.set_device_index(_local_rank() % torch.accelerator.device_count())
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return Device(torch.device(found.type, torch.accelerator.current_device_index()))


def _xla(config: Config) -> Device:
    """Ranks meet on the host, so that one that is lost takes no other one's device along."""
    if importlib.util.find_spec("torch_xla") is None:
        raise ConfigError([
            'device = "xla": this Python has no torch_xla: install torch_xla 2.9 beside torch 2.9, '
            'or set device = "cpu"'])
    if config.strategy not in XLA_ENGINES:
        raise ConfigError([
            f'device = "xla" and strategy = "{config.strategy}": set strategy = "ddp", the only '
            "one that computes on XLA devices"])
    if config.xla.neuron_cc_flags:
        os.environ["NEURON_CC_FLAGS"] = config.xla.neuron_cc_flags  # read at the first import
    if glob.glob(NEURON_DEVICES) and not (
            os.environ.get(VISIBLE_CORES) or os.environ.get(NUMBER_OF_CORES)):
        # Neuron's runtime takes all cores otherwise, and lets no second process have one of them.
        os.environ[VISIBLE_CORES] = str(_local_rank())
    return Device(torch.device("cpu"), XLA_ENGINES, compiles=True)


def _local_rank() -> int:
    """This process's among those of the node; a launcher's standby has one too.  Checked in
    standalone.py."""
    return int(os.environ.get("LOCAL_RANK", "0"))


KINDS: dict[str, Callable[[Config], Device]] = {
    "auto": _auto, "cpu": _cpu, "cuda": _cuda, "accelerator": _accelerator, "xla": _xla}


def backend(home: torch.device) -> str:
    """Who carries messages between ranks whose tensors lie there."""
    if home.type == "cpu":
        return breakable.NAME
    return str(dist.get_default_backend_for_device(home))


def answers(home: torch.device) -> bool:
    """Whether the device can still compute: behind an error of its own CUDA refuses everything for
    as long as the process lives.  Asked and not waited for: a message to a lost peer may never end.
    """
    if home.type == "cpu":
        return True
    try:
        torch.get_device_module(home).current_stream().query()
    except (RuntimeError, AttributeError):  # AttributeError: it has no streams to ask
        return False
    return True


def total_memory(home: torch.device) -> int:
    """Bytes that may be planned with.  Of all memory and not of what is free now: a rank that
    joins later must come to the same groups."""
    if home.type == "cpu":
        return int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return int(MEMORY_SHARE * torch.get_device_module(home).mem_get_info(home)[1])
