"""Profiles of machines: how many devices of which model, and limits that somebody published.

Owns profiles.toml's way into types, an operator's own profile in a file of the same form, and which
profile is a machine's.  A shipped number without a source is no limit; a profile's limit only warns
(agent/core/checks/verdict.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import msgspec

from holdfast.worker import toml_text

from ..core.checks.verdict import LIMIT_MAX, PROFILE, Limit, Measure
from ..system.regular import read_regular

FILE_MAX_BYTES = 1 << 20
DEVICES_MAX = 1024
VENDORS = ("nvidia", "neuron", "amd")
FORM = ('write one [profile] with name = "...", vendor = "nvidia", "neuron" or "amd", model = a '
        "part of the device's name and devices = how many")


class ProfileLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`at_bytes`: the size from which on it holds; a smaller test never reaches it."""

    measure: str
    value: float
    source: str
    date: str
    at_bytes: int = 0


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row; the file's head says what each key means."""

    name: str
    vendor: str
    model: str
    devices: int
    source: str
    date: str
    product: tuple[str, ...] = ()
    limit: tuple[ProfileLimit, ...] = ()

    def limit_of(self, measure: Measure) -> Limit | None:
        """What it says of a measure; None for nothing."""
        size = _bytes_of(measure)
        for one in sorted(self.limit, key=lambda one: one.at_bytes, reverse=True):
            if one.measure == measure.name and size >= one.at_bytes:
                return Limit(PROFILE, one.value, measure.value >= one.value,
                             f"{self.name}, {one.source}, {one.date}")
        return None

    def beyond(self, measures: Sequence[Measure]) -> str:
        """Which limits hold from larger sizes on than these are, and how to have them asked for."""
        largest: dict[str, int] = {}
        for each in measures:
            largest[each.name] = max(largest.get(each.name, 0), _bytes_of(each))
        found = [(one.measure, _size_word(one.at_bytes)) for one in self.limit
                 if one.at_bytes > largest.get(one.measure, one.at_bytes)]
        return "; ".join(f"{self.name} has a limit of {name} at {size}: `holdfast check nccl_tests "
                         f"--sizes {size}`" for name, size in found)


def _bytes_of(measure: Measure) -> int:
    return int(measure.subject.split()[0]) if measure.subject.endswith(" bytes") else 0


def _size_word(size: int) -> str:
    """As --sizes takes it."""
    for shift, unit in ((30, "G"), (20, "M"), (10, "K")):
        if size and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)


@lru_cache(maxsize=1)
def shipped() -> tuple[Profile, ...]:
    file = resources.files("holdfast.agent.checks").joinpath("profiles.toml")
    rows = tomllib.loads(file.read_text("utf-8"))["profile"]
    return msgspec.convert(rows, tuple[Profile, ...])


def named(name: str) -> Profile:
    """Raises ValueError that names those that there are."""
    found = {one.name: one for one in shipped()}
    if name not in found:
        raise ValueError(f"there is no profile {name!r}; there are {', '.join(found)}")
    return found[name]


def chosen(text: str) -> Profile | None:
    """`checks.profile` and `--profile`: a shipped one's name, or, where it has a slash, a file that
    holds one; None for "".  Raises ValueError with what is wrong and what to write."""
    if not text:
        return None
    return _of_file(text) if "/" in text else named(text)


def _of_file(path: str) -> Profile:
    try:
        rows = toml_text.parse(tomllib.loads, read_regular(path, FILE_MAX_BYTES))["profile"]
        (row,) = rows if isinstance(rows, list) else [rows]
        here = {"source": path, "date": "the operator's"}
        row = {**here, **row, "limit": [{**here, **one} for one in row.get("limit", ())]}
        found = msgspec.convert(row, Profile)
    except OSError as error:
        raise ValueError(f"the profile {path} cannot be read: {error.strerror or error}") from error
    except (LookupError, ValueError, TypeError, msgspec.ValidationError) as error:
        why = "it has no [profile]" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"the profile {path}: {why}; {FORM}") from error
    if found.vendor not in VENDORS or not 1 <= found.devices <= DEVICES_MAX:
        raise ValueError(f"the profile {path}: vendor {found.vendor!r}, {found.devices} devices, "
                         f"of at most {DEVICES_MAX}: {FORM}")
    for one in found.limit:
        if not 0 <= one.value <= LIMIT_MAX:
            raise ValueError(f"the profile {path}: limit of {one.measure}: value = {one.value}: "
                             f"set 0 to {LIMIT_MAX:g}; {FORM}")
    return found


def of_product(product: str) -> Profile | None:
    """The one whose machines have this name."""
    return next((one for one in shipped() if product in one.product), None)


def of_devices(vendor: str, models: Sequence[str]) -> Profile | None:
    """The one that these devices look like.  It proves no count: seven of eight look like none."""
    return next((one for one in shipped() if not one.product and one.vendor == vendor
                 and len(models) == one.devices and all(one.model in model for model in models)),
                None)
