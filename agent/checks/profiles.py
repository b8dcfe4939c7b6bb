"""Profiles of machines: how many devices of which model, and limits that somebody published.

Owns profiles.toml's way into types, and which profile is a machine's.  A number without a source
is no limit; a shipped limit only warns (agent/core/checks/verdict.py).
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources

import msgspec

from ..core.checks.verdict import PROFILE, Limit, Measure


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
    product: tuple[str, ...]
    vendor: str
    model: str
    devices: int
    source: str
    date: str
    limit: tuple[ProfileLimit, ...] = ()

    def limit_of(self, measure: Measure) -> Limit | None:
        """What it says of a measure; None for nothing."""
        size = int(measure.subject.split()[0]) if measure.subject.endswith(" bytes") else 0
        for one in self.limit:
            if one.measure == measure.name and size >= one.at_bytes:
                return Limit(PROFILE, one.value, measure.value >= one.value,
                             f"{self.name}, {one.source}, {one.date}")
        return None


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


def of_product(product: str) -> Profile | None:
    """The one whose machines have this name."""
    return next((one for one in shipped() if product in one.product), None)


def of_devices(vendor: str, models: Sequence[str]) -> Profile | None:
    """The one that these devices look like.  It proves no count: seven of eight look like none."""
    return next((one for one in shipped() if not one.product and one.vendor == vendor
                 and len(models) == one.devices and all(one.model in model for model in models)),
                None)
