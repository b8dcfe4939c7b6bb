"""The simulator: the real core and performer on a virtual cluster, in storms, with invariants.

`run_storm(seed, storm) -> Report` is what `holdfast simulate` and the tests use.
"""

from __future__ import annotations

from .run import Report, run_storm
from .storms import STORMS, Storm

__all__ = ["STORMS", "Report", "Storm", "run_storm"]
