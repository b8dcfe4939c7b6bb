"""What one probe of `holdfast doctor` found.  A leaf."""

from __future__ import annotations

from typing import NamedTuple

HAVE, LACK, NEED = "have", "lack", "need"  # lack costs something; need: a job cannot run


class Finding(NamedTuple):
    what: str
    state: str
    said: str
    cost: str = ""  # what is lost without it
