"""Checks of each XLA device, Neuron cores first of all: a compile is told apart from the run.

Owns the same checks as device.py for devices that run compiled graphs only.  A cold compile takes
minutes on Trainium, so nothing is compiled unasked: `check --warm` does it, and a marker for each
version of the SDK says that it was done.  Each core is asked in a child of its own, for a core
belongs to one process.  Imports torch_xla in those children alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from importlib import import_module, metadata
from typing import Any

import torch

from . import device as devices
from . import isolate, vendor

MARKER = "warm.json"  # in the folder of the results
MARKER_MAX_BYTES, VERSIONS_MAX = 1 << 16, 16
CORE_S, WARM_S = 45.0, 3500.0  # of one core's child; the second where it compiles
PACKAGES = ("torch", "torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc")
REPEATS_MAX = 12
CHAIN = 8  # products one behind the other in a graph: else its start would be measured
# Small where the processor stands in for a device.
SIZES = {True: {"gemm": 4096, "copy": 256 << 20}, False: {"gemm": 256, "copy": 8 << 20}}
WARM_FIRST = ("not compiled yet with %s: `holdfast check --warm` does it once, which takes minutes "
              "on a Neuron device")
Answer = dict[str, Any]
Timed = Callable[[], object]


# ------------------------------------------------------------------------ which devices, which SDK


def subjects(environ: Mapping[str, str]) -> list[str]:
    """neuron:0, neuron:1, ... as far as this process may use them; else the one of PJRT_DEVICE.
    Raises LookupError that says why none is known."""
    if not devices.has_neuron():
        return ["xla:0"]
    return ["neuron:%d" % core for core in vendor.neuron_cores(environ)]


def what_is_here() -> dict[str, Any]:
    """As device.py's, and begins nothing: a core belongs to one process."""
    models = ["Neuron core" if name.startswith("neuron:") else "XLA device (%s)" % os.environ.get(
        "PJRT_DEVICE") for name in subjects(os.environ)]
    return {"torch": versions().partition(" ")[2],  # other compilers, other rates
            "python": sys.executable, "kind": "xla", "models": models}


def versions() -> str:
    """Of all that a compiled graph depends on."""
    found = []
    for name in PACKAGES:
        try:
            found.append("%s %s" % (name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _key() -> str:
    """Another version of this file, or of device.py with its sizes, may have other graphs."""
    seen = 0
    for path in (__file__, devices.__file__):
        with open(path, "rb") as file:
            seen = zlib.crc32(file.read(), seen)
    return "%s; %08x" % (versions(), seen)


def _marked(folder: str) -> dict[str, dict[str, float]]:
    """Version -> check -> seconds that its compile took; nothing for a file that is none."""
    try:
        with open(os.path.join(folder, MARKER), "rb") as file:
            found = json.loads(file.read(MARKER_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, dict)}


def _mark(folder: str, check: str, took_s: float | None) -> None:
    """`took_s`: None takes the mark away.  Raises OSError where nothing can be kept."""
    found = _marked(folder)
    mine = found.pop(_key(), {})
    mine.pop(check, None)
    if took_s is not None:
        mine[check] = took_s
    found[_key()] = mine
    kept = dict(list(found.items())[-VERSIONS_MAX:])
    new = os.path.join(folder, "%s.%d.new" % (MARKER, os.getpid()))
    with open(new, "w") as file:
        json.dump(kept, file)
    os.replace(new, os.path.join(folder, MARKER))


# -------------------------------------------------------------------------------- one child a core


def _each(options: dict[str, Any], check: str, said: str,
          one: Callable[[str], Answer]) -> Answer:
    """What `one` finds on every core; to warm, on the first alone, since graphs are the same."""
    folder = str(options.get("folder", ""))
    names = subjects(os.environ)
    if options.get("warm"):
        return _warmed(folder, check, names[0], one)
    if check not in _marked(folder).get(_key(), {}):
        return {"unknown": [WARM_FIRST % versions()], "todo": "`holdfast check --warm`"}
    calls = [_call(name, one, CORE_S) for name in names]
    whole: Answer = {"critical": [], "unknown": [], "measures": []}
    for event in isolate.run_all(calls, max(1, len(os.sched_getaffinity(0)) // 2)):
        if not event.ended:
            for key, value in event.value.items():
                whole[key] += value
        elif event.problem:
            whole["unknown"].append("%s: %s" % (event.name, event.problem))
            if "no answer within" in event.problem:  # a compile cache that was emptied
                _forgotten(folder, check)
    whole["said"] = "%s: %s" % (names[0] if len(names) == 1 else "%d cores" % len(names), said)
    return whole


def _forgotten(folder: str, check: str) -> None:
    try:
        _mark(folder, check, None)
    except OSError:
        return  # then it costs its deadline once more


def _warmed(folder: str, check: str, name: str, one: Callable[[str], Answer]) -> Answer:
    begin_s, problem = time.monotonic(), ""
    for event in isolate.run_all([_call(name, one, WARM_S)], 1):
        problem = event.problem or problem
    if problem:
        return {"unknown": ["%s: %s" % (name, problem)]}
    took_s = time.monotonic() - begin_s
    try:
        _mark(folder, check, round(took_s, 1))
    except OSError as error:
        return {"unknown": ["compiled in %.1f s, and %s cannot be kept: %s" % (
            took_s, MARKER, error.strerror)]}
    return {"said": "compiled and run in %.1f s with %s" % (took_s, versions())}


def _call(name: str, one: Callable[[str], Answer], deadline_s: float) -> isolate.Call:
    def asked() -> Answer:
        if name.startswith("neuron:"):
            os.environ["NEURON_RT_VISIBLE_CORES"] = name.partition(":")[2]
            os.environ.pop("NEURON_RT_NUM_CORES", None)
            os.environ.setdefault("PJRT_DEVICE", "NEURON")
        print("%s begins, and compiles what is in no cache" % name, flush=True)
        return one(name)

    return isolate.Call(name, isolate.answering(asked), deadline_s)


def _torch_xla(part: str = "") -> Any:
    """In a core's own child alone: what is imported begins with that child's environment."""
    return import_module("torch_xla" + part)


def _device() -> torch.device:
    found: torch.device = _torch_xla().device()
    return found


def _run() -> None:
    """Has everything that was asked for so far computed now."""
    _torch_xla().sync()
    _torch_xla(".core.xla_model").wait_device_ops()


def _compiles() -> int:
    found = _torch_xla(".debug.metrics").metric_data("CompileTime")
    return int(found[0]) if found else 0


def timed(once: Timed, compiles: Callable[[], int] = _compiles,
          run: Callable[[], None] = _run) -> list[float]:
    """Seconds of each repeat; one during which something was compiled is not counted."""
    found: list[float] = []
    for _ in range(REPEATS_MAX):
        before = compiles()
        begin_s = time.perf_counter()
        once()
        run()
        took_s = max(time.perf_counter() - begin_s, 1e-9)
        if compiles() == before:
            found.append(took_s)
        last = found[-devices.REPEATS:]
        if len(found) > devices.REPEATS and max(last) <= (1 + devices.STEADY) * min(last):
            return last
    if not found:
        raise RuntimeError("each of %d repeats was compiled anew" % REPEATS_MAX)
    return found[1:] or found


# -------------------------------------------------------------------------------------- the checks


def tensor(options: dict[str, Any]) -> Answer:
    """Products of matrices: against the host's, and against the core's own second run."""
    seed = os.environ.get(devices.FLIP_VARIABLE, "")
    flip = devices.flipped(int(seed)) if seed.isdecimal() else None
    return _each(options, "tensor", "every bit as it must be",
                 lambda name: {"critical": known_answers(name, flip)})


def known_answers(name: str, flip: devices.Flip | None = None) -> list[str]:
    """As device.py's.  Each product is a run of its own: within one graph the compiler would make
    of two equal products one, and a core would be compared with nothing."""
    device = _device()

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        there = a.to(device), b.to(device)
        _run()
        found = there[0] @ there[1]
        _run()
        return found.cpu()

    return devices.compared(name, product, flip)


def memory_bandwidth(options: dict[str, Any]) -> Answer:
    def one(name: str) -> Answer:
        size = SIZES[name.startswith("neuron:")]["copy"]
        source = torch.ones(size // 4, device=_device())
        _run()
        kept: list[torch.Tensor] = []

        def once() -> None:
            kept[:] = [source + 1.0]  # reads all and writes as much

        rates = [2 * size / took for took in timed(once)]
        return {"measures": [_measure("memory_bandwidth", name, rates, "B/s")]}

    return _each(options, "memory_bandwidth", "one sum over memory", one)


def gemm(options: dict[str, Any]) -> Answer:
    def one(name: str) -> Answer:
        on_core = name.startswith("neuron:")
        types = (torch.float32, torch.bfloat16) if on_core else (torch.float32,)
        return {"measures": [_multiplied(name, of, SIZES[on_core]["gemm"]) for of in types]}

    return _each(options, "gemm", "products of matrices", one)


def _multiplied(name: str, of: torch.dtype, size: int) -> dict[str, Any]:
    a = torch.full((size, size), 1.0 / size, dtype=of).to(_device())
    _run()
    kept: list[torch.Tensor] = []

    def once() -> None:
        found = a
        for _ in range(CHAIN):
            found = found @ a  # which needs the one before: none of them can be left out
        kept[:] = [found]

    rates = [2 * CHAIN * size**3 / took for took in timed(once)]
    return _measure("gemm_%s" % str(of).split(".")[-1], name, rates, "FLOP/s")


def host_copy(options: dict[str, Any]) -> Answer:
    def one(name: str) -> Answer:
        size = SIZES[name.startswith("neuron:")]["copy"]
        generator = torch.Generator().manual_seed(20261121)
        host = torch.randint(0, 1 << 20, (size // 4,), dtype=torch.int32, generator=generator)
        device = _device()
        there: list[torch.Tensor] = []
        back: list[torch.Tensor] = []

        def out() -> None:
            there[:] = [host.to(device)]

        def home() -> None:
            back[:] = [there[0].cpu()]

        rates = [[size / took for took in timed(way)] for way in (out, home)]
        same = torch.equal(host, back[0])
        return {"measures": [_measure("host_copy", name, min(rates, key=statistics.median), "B/s")],
                "critical": [] if same else ["%s: what comes back is not what was sent" % name]}

    return _each(options, "host_copy", "the same bytes came back", one)


def _measure(name: str, subject: str, rates: list[float], unit: str) -> dict[str, Any]:
    return {"name": name, "value": statistics.median(rates), "unit": unit, "subject": subject,
            "samples": rates}
