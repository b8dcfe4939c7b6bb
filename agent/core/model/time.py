"""The base of every value, and the only time there is.

Frozen, of tuples: a step over an equal observation is idempotent.  Units: `_s` seconds, `_bytes`
bytes.  `boot_s` is CLOCK_BOOTTIME, `wall_s` is UTC, for people only.
"""

from __future__ import annotations

import msgspec


class Value(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of every value of the core."""


class Now(Value, frozen=True):
    """The only time there is."""

    boot_s: float
    wall_s: float
    boot_id: str = ""
