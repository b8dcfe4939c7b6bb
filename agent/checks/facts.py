"""What a check may look at: the machine's roots, what the agent knows, and the node's profile.

Owns these as one value, and whose profile the machine's own is.  It imports no detector: whoever
starts checks begins with the longest, torch's import, before a detector is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.collectors.contract import Roots

from . import profiles
from .profiles import Profile

if TYPE_CHECKING:
    from ..config.settings import Collectors


class Facts(NamedTuple):
    """`status`: the agent's, None without one; `paths`: where checkpoints go."""

    node: str
    roots: Roots = Roots()
    status: dict[str, Any] | None = None
    no_agent: str = ""  # why there is none
    profile: Profile | None = None
    paths: tuple[str, ...] = ()
    drift: dict[str, Any] | None = None  # what the agent knows of this node beside the others
    sizes: tuple[int, ...] = ()  # of the vendors' collective tests; () = their usual ones


def profile_of(roots: Roots) -> Profile | None:
    """The machine's own profile, by its name."""
    try:
        product = Path(roots.sys, "class/dmi/id/product_name").read_text().strip()
    except OSError:
        return None
    return profiles.of_product(product)


def roots_of(places: Collectors) -> Roots:
    """Where the configuration says that the machine is."""
    return Roots(places.proc, places.sys, places.kmsg, places.nvml, places.neuron,
                 places.compile_cache, tools=places.tools, rocm=places.rocm, root=places.root,
                 shm=places.shm, systemd=places.systemd, systemctl=places.systemctl)
