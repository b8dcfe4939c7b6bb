"""What a check may look at: the machine's roots, what the agent knows, and the node's profile.

Owns these as one value, and whose profile the machine's own is.  It imports no detector: whoever
starts checks begins with the longest, torch's import, before a detector is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from holdfast.collectors.contract import Roots

from . import profiles
from .profiles import Profile


class Facts(NamedTuple):
    """`status`: the agent's, None without one; `paths`: where checkpoints go."""

    node: str
    roots: Roots = Roots()
    status: dict[str, Any] | None = None
    no_agent: str = ""  # why there is none
    profile: Profile | None = None
    paths: tuple[str, ...] = ()


def profile_of(roots: Roots) -> Profile | None:
    """The machine's own profile, by its name."""
    try:
        product = Path(roots.sys, "class/dmi/id/product_name").read_text().strip()
    except OSError:
        return None
    return profiles.of_product(product)
