"""What a check may look at: the machine's roots, what the agent knows, and the node's profile.

Owns these as one value, and whose profile the machine's own is.  It imports no detector: whoever
starts checks begins with the longest, torch's import, before a detector is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast.collectors.contract import Roots

from . import profiles
from .profiles import Profile

if TYPE_CHECKING:
    from ..config.settings import Collectors


class Fault(NamedTuple):
    """What a detector of the node's agent concludes now."""

    detector: str
    fault: str
    severity: str
    reason: str


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
    faults: tuple[Fault, ...] = ()  # of the agent's detectors that look at nodes


def faults_in(status: Mapping[str, Any] | None) -> tuple[Fault, ...]:
    """Those of an agent's status; what has another form is none."""
    found = (status or {}).get("faults")
    return tuple(Fault(*(str(one.get(name)) for name in Fault._fields))
                 for one in (found if isinstance(found, list) else ())
                 if isinstance(one, dict) and not one.get("run"))


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
