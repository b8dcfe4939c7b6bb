"""What this node is labelled with: its places in the network, and what accelerators it has.

Owns what is taken from readings where the operator says nothing.  Which ranks lie beside which
neighbours, and which models make one world, is agent/core/run/layout.py's.  Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..model import EFA_GROUP, MODEL, Labels, Readings, Rows, Selection, labels_of

INSTANCE, ACCELERATOR = "ec2_instance_info", "accelerator_info"
LABEL = r"[A-Za-z0-9][A-Za-z0-9 ._:/+@=-]*"  # what may stand in a label
LABEL_MAX = 64  # characters
ODD = re.compile(r"[^A-Za-z0-9 ._:/+@=-]")


class NodeLabels:
    """This node's labels.  Steps come up to a hundred times a second and devices change seldom:
    equal readings are looked at once."""

    def __init__(self) -> None:
        self._selection = Selection((INSTANCE, ACCELERATOR).__contains__)
        self._rows: Rows = ()
        self._found: dict[str, str] = {}

    def of(self, given: Iterable[tuple[str, str]], samples: Readings) -> Labels:
        """The operator's labels, and what the readings say beside them."""
        rows = self._selection.of(samples)
        if rows is not self._rows:
            self._rows, self._found = rows, found(rows)
        return tuple(sorted({**self._found, **dict(given)}.items()))


def found(rows: Rows) -> dict[str, str]:
    """What the machine itself tells.  EC2 names a zone, which EFA does not cross, and within it the
    placement group; of racks and rails it tells an instance nothing."""
    models, group = set(), ""
    for name, subject, _, _ in rows:
        labels = labels_of(subject)
        if name == ACCELERATOR:
            models.add(labels.get("name", ""))  # a lost device may have none
        elif name == INSTANCE:
            zone = labels.get("zone_id") or labels.get("zone", "")
            group = "/".join(one for one in (zone, labels.get("placement_group", "")) if one)
    return {label: text for label, text in
            ((EFA_GROUP, legible(group)), (MODEL, legible(" + ".join(sorted(models - {""})))))
            if text}


def legible(text: str) -> str:
    return ODD.sub("_", text)[:LABEL_MAX].strip()
