"""Checks of each device: known answers bit for bit, and how fast it computes and copies.

Owns the functions that the table's rows name, each called in a child beside torch with the options
of the round.  The same code runs on the processor where there is no accelerator.  They measure and
compare alone: what is too slow is said elsewhere (agent/core/checks/verdict.py).  Imports torch and
the standard library.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

REPEATS, REPEATS_MAX = 3, 9
STEADY = 0.1  # repeats that differ by no more need no further ones
MB = 1 << 20
INTEGER_SIZE, FLOAT_SIZE = 256, 512
# The largest factor and the type: 256 products of them are exact below 2^24, and up to 2^8.
WHOLE = ((8, "float32"), (1, "bfloat16"))
# The command with this set (any number, the seed) flips one bit of a result, so that an operator
# sees what silent corruption looks like here.
NEURON_DEVICES = "/dev/neuron[0-9]*"
FLIP_VARIABLE = "HOLDFAST_CHECK_FLIP_BIT"
Answer = dict[str, Any]  # the fields of agent/core/checks/verdict.py's Answer
Flip = Callable[[torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# With these texts an operation that is the same everywhere fails for a device, or the fabric that
# it needs, and for nobody's program: cudaError 214, 220, 700, 702, 714 to 719, 802 and 999 and
# their like of HIP, as torch shows them.  Want of memory, a device that another job has to itself,
# and an installation that has no kernel for it are not among them, nor cuBLAS' own words, which
# may mean each of these: a launch that failed shows as CUDA's error as well.
OF_DEVICE = (
    "uncorrectable ECC error", "uncorrectable NVLink error", "illegal memory access",
    "launch timed out", "hardware stack error", "illegal instruction", "misaligned address",
    "not supported on global/shared address space", "invalid program counter",
    "unspecified launch failure", "system not yet initialized", "CUDA error: unknown error",
    "HIP error: unknown error",
)


def kind() -> str:
    """cuda (NVIDIA's and AMD's), xla (Neuron's, whose checks are xla.py's) or cpu."""
    if torch.cuda.device_count():
        return "cuda"
    named = has_neuron() or os.environ.get("PJRT_DEVICE")
    return "xla" if named and importlib.util.find_spec("torch_xla") is not None else "cpu"


def has_neuron() -> bool:
    return bool(glob.glob(NEURON_DEVICES))


def devices() -> list[str]:
    """As torch names them."""
    return ["cuda:%d" % one for one in range(torch.cuda.device_count())] or ["cpu"]


def what_is_here() -> dict[str, Any]:
    """Begins a context where there is an accelerator, after which no child can be forked."""
    if kind() == "cuda":
        models = [torch.cuda.get_device_name(one) for one in range(torch.cuda.device_count())]
    else:
        models = [_processor()]
    return {"torch": torch.__version__, "python": sys.executable, "kind": kind(), "models": models,
            "versions": _versions() if kind() == "cuda" else {}}


def _versions() -> dict[str, str]:
    """What torch was built with, which the peers must have alike."""
    found = {"cuda": str(torch.version.cuda or torch.version.hip)}
    try:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AttributeError):
        pass  # built without it
    return found


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file.read(8192).split("\n") if line.startswith("model name")]
    except OSError:
        lines = []
    name = lines[0].partition(":")[2].strip() if lines else "processor"
    return "%s, %d cores" % (name, len(os.sched_getaffinity(0)))


def _beginning(device: str) -> str:
    """Says which device comes now: the last words of a check that hangs or dies."""
    print(device, flush=True)
    if device != "cpu":
        torch.cuda.set_device(device)
    return device


def on_each(function: Callable[[str], Any]) -> tuple[list[Any], list[str], list[str]]:
    """(what the function gave for each device, what failed for a device's own sake, what failed for
    another reason): the others are tested all the same."""
    found, critical, unknown = list[Any](), list[str](), list[str]()
    for device in devices():
        try:
            found.append(function(_beginning(device)))
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) and device == "cpu":
                raise  # the child's own limit, which is said of the whole check
            said = "%s: %s" % (device, (str(error) or type(error).__name__).split("\n")[0][:200])
            (critical if is_of_device(error) else unknown).append(said)
    return found, critical, unknown


def is_of_device(error: BaseException) -> bool:
    """Whether an operation failed because its device, or the way to it, is not well."""
    return any(words in str(error) for words in OF_DEVICE)


# ------------------------------------------------------------------------------ known answers


def tensor(options: dict[str, Any]) -> Answer:
    """Products of matrices on every device."""
    seed = os.environ.get(FLIP_VARIABLE, "")
    flip = flipped(int(seed)) if seed.isdecimal() else None
    wrong, critical, unknown = on_each(lambda device: known_answers(device, flip))
    return {"said": "%s: every bit as it must be" % _counted(devices()),
            "critical": [one for of in wrong for one in of] + critical, "unknown": unknown}


def known_answers(device: str, flip: Flip | None = None) -> list[str]:
    """What is wrong with this device's results; nothing when all is well.  An accelerator makes
    each product as often as it has multiprocessors, all at once: one alone would be computed by a
    few of them, and the others would be proven by nothing."""
    copies = _multiprocessors(device)

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        there = [one.to(device) for one in (a, b)]
        if copies > 1:
            there = [one.expand(copies, *one.shape).contiguous() for one in there]
        return there[0] @ there[1]

    return compared(device, product, flip)


def _multiprocessors(device: str) -> int:
    if device == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def compared(name: str, product: Product, flip: Flip | None = None) -> list[str]:
    """`product` takes the host's tensors and multiplies them on the device of this name, once or
    many times over.

    The integers of a product stay so small that the type holds each sum on the way exactly, so that
    a device may multiply them as it does best and there is one right answer, which the host finds
    by other instructions.  Of other numbers the order of the sums decides over the last bits, so a
    device is held against itself there.
    """
    wrong = []
    generator = torch.Generator().manual_seed(20261120)
    for most, name_of in WHOLE:
        of = getattr(torch, name_of)
        a, b = (torch.randint(-most, most + 1, (INTEGER_SIZE, INTEGER_SIZE), generator=generator)
                for _ in range(2))
        expected = (a @ b).to(of)  # int64, on the host
        first, again = product(a.to(of), b.to(of)), product(a.to(of), b.to(of))
        first = flip(first) if flip is not None else first
        said = "integers" if of == torch.float32 else "integers as %s" % name_of
        if not _same(first, again):
            wrong.append("%s: the same product of %s twice, and %s" % (
                name, said, _difference(first, again)))
        elif not torch.equal(first.cpu(), expected.expand_as(first)):
            wrong.append("%s: a product of %s is not the host's" % (name, said))
    for kind_of_float in (torch.float32, torch.bfloat16):
        x, y = (torch.randn(FLOAT_SIZE, FLOAT_SIZE, generator=generator).to(kind_of_float)
                for _ in range(2))
        first, again = product(x, y), product(x, y)
        first = flip(first) if flip is not None else first
        if not _same(first, again):
            wrong.append("%s: the same product of %s twice, and %s" % (
                name, str(kind_of_float).split(".")[-1], _difference(first, again)))
    return wrong


def _bits(of: torch.Tensor) -> torch.Tensor:
    """As integers: a comparison of numbers would miss a sign of zero, and NaN is unlike itself."""
    return of.view(torch.int16 if of.element_size() == 2 else torch.int32)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _difference(a: torch.Tensor, b: torch.Tensor) -> str:
    count = int((_bits(a) != _bits(b)).sum())
    return "%d of %d results differ" % (count, a.numel())


def flipped(seed: int) -> Flip:
    """One bit of one result, another with each call."""
    draw = random.Random(seed)

    def flip(result: torch.Tensor) -> torch.Tensor:
        changed = result.clone()
        bits = _bits(changed).view(-1)
        place = draw.randrange(bits.numel())
        wide = 8 * bits.element_size()
        bit = draw.randrange(wide)
        bits[place] = bits[place] ^ (1 << bit if bit < wide - 1 else -1 << bit)
        return changed

    return flip


# -------------------------------------------------------------------------------------- rates


def memory_bandwidth(options: dict[str, Any]) -> Answer:
    """Bytes read and written a second by copies inside a device's memory."""
    measures, critical, unknown = on_each(_copied)
    return {"said": "copies within memory", "measures": measures, "critical": critical,
            "unknown": unknown}


def _copied(device: str) -> dict[str, Any]:
    size = (32 if device == "cpu" else 1024) * MB
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    rates = [2 * size / took for took in _timed(device, lambda: target.copy_(source))]
    return _measure("memory_bandwidth", device, rates, "B/s")


def gemm(options: dict[str, Any]) -> Answer:
    """Floating-point operations a second in products of square matrices."""
    # Many processors only imitate the shorter type.
    measures, critical, unknown = on_each(lambda device: [
        _multiplied(device, of) for of in (torch.float32, torch.bfloat16)[:1 + (device != "cpu")]])
    return {"said": "products of matrices", "measures": [one for of in measures for one in of],
            "critical": critical, "unknown": unknown}


def _multiplied(device: str, of: torch.dtype) -> dict[str, Any]:
    size = 512 if device == "cpu" else 8192
    a = torch.ones(size, size, dtype=of, device=device)
    b, out = torch.ones_like(a), torch.empty_like(a)
    rates = [2 * size**3 / took for took in _timed(device, lambda: torch.mm(a, b, out=out))]
    return _measure("gemm_%s" % str(of).split(".")[-1], device, rates, "FLOP/s")


def host_copy(options: dict[str, Any]) -> Answer:
    """Copies from the host's memory to a device and back: the same bytes, and how fast."""
    found, critical, unknown = on_each(_there_and_back)
    return {"said": "the same bytes came back",
            "measures": [measure for measure, _ in found],
            "critical": ["%s: what comes back is not what was sent" % measure["subject"]
                         for measure, same in found if not same] + critical,
            "unknown": unknown}


def _there_and_back(device: str) -> tuple[dict[str, Any], bool]:
    size = (8 if device == "cpu" else 256) * MB
    generator = torch.Generator().manual_seed(20261121)
    host = torch.randint(0, 256, (MB,), dtype=torch.uint8, generator=generator).repeat(size // MB)
    host = host if device == "cpu" else host.pin_memory()
    back = torch.empty_like(host, pin_memory=device != "cpu")
    there = torch.empty(size, dtype=torch.uint8, device=device)
    out = [size / took for took in _timed(device, lambda: there.copy_(host, non_blocking=True))]
    home = [size / took for took in _timed(device, lambda: back.copy_(there, non_blocking=True))]
    slower = min(out, home, key=statistics.median)
    return _measure("host_copy", device, slower, "B/s"), torch.equal(host, back)


def _timed(device: str, once: Callable[[], object]) -> list[float]:
    """Seconds of each repeat, after one that is not counted; as many as it takes until the last
    ones are alike."""
    found: list[float] = []
    while len(found) <= REPEATS_MAX:
        _wait(device)
        begin_s = time.perf_counter()
        once()
        _wait(device)
        found.append(max(time.perf_counter() - begin_s, 1e-9))
        last = found[-REPEATS:]
        if len(found) > REPEATS and max(last) <= (1 + STEADY) * min(last):
            return last
    return found[1:]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _measure(name: str, device: str, rates: list[float], unit: str) -> dict[str, Any]:
    return {"name": name, "value": statistics.median(rates), "unit": unit, "subject": device,
            "samples": rates}


def _counted(found: list[str]) -> str:
    return found[0] if len(found) == 1 else "%d devices" % len(found)
