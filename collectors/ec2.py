"""EC2's instance metadata: which instance this is, and what EC2 is about to do with it.

Owns the questions and what their answers mean as samples; imds.py owns the conversation.  Asks only
where the machine says that it is of EC2, or where an address is configured.  Runs in a probe child
only: a metadata service that swallows packets must hold up nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .sources.accelerator import plain
from .sources.files import text_of
from .sources.imds import ADDRESS, Metadata, Refused

IDENTITY_EVERY_S = 600.0
EVENTS_MAX = 16
SPOT = "meta-data/spot/instance-action"
REBALANCE = "meta-data/events/recommendations/rebalance"
SCHEDULED = "meta-data/events/maintenance/scheduled"
DOCUMENT = "dynamic/instance-identity/document"
DOCUMENTS = {SPOT: "spot_action", REBALANCE: "rebalance", SCHEDULED: "scheduled_events",
             DOCUMENT: "identity"}
# label -> key of the identity document
OF_DOCUMENT = {"id": "instanceId", "type": "instanceType", "region": "region",
               "zone": "availabilityZone", "image": "imageId"}
# label -> a path of its own, plain text; most instances lack some
PLACEMENT = {"zone_id": "meta-data/placement/availability-zone-id",
             "placement_group": "meta-data/placement/group-name",
             "lifecycle": "meta-data/instance-life-cycle"}


class Ec2Collector(Probed):
    """Samples `ec2_*` of this instance; read in a child, absent off EC2."""

    name = "ec2"
    pace = SLOW
    metrics = (
        Metric("ec2_instance_info", "gauge", "Always 1; which instance this is, and where.",
               (*OF_DOCUMENT, *PLACEMENT), True),
        Metric("ec2_spot_action_timestamp_seconds", "gauge",
               "When EC2 takes this spot instance back, Unix time; 0 when that cannot be read.",
               ("action",), True),
        Metric("ec2_rebalance_recommended_timestamp_seconds", "gauge",
               "When EC2 said that this spot instance is likelier to be taken back.", (), True),
        Metric("ec2_scheduled_event_timestamp_seconds", "gauge",
               "Earliest begin of an event that EC2 has planned for this instance.",
               ("event", "code"), True),
        Metric("ec2_metadata_rejected_total", "counter",
               "Documents of the metadata service that could not be understood.", ("document",)),
    )

    def __init__(self) -> None:
        self._metadata: Metadata | None = None
        self._identity = ""  # labels of ec2_instance_info
        self._due_s = 0.0  # CLOCK_MONOTONIC
        self._rejected = dict.fromkeys(DOCUMENTS.values(), 0)

    def here(self, roots: Roots) -> str:
        """"" where an address is configured, or on a machine that says that it is of EC2; two
        small files."""
        return "" if roots.ec2 or is_ec2(roots) else "not an instance of EC2"

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData off EC2, and where only the first version of the protocol is
        spoken; OSError when nobody answers or the answer is a refusal."""
        if why := self.here(roots):
            raise NoData(why)
        if self._metadata is None:
            self._metadata = Metadata(roots.ec2 or ADDRESS)
        found: list[tuple[str, str, float]] = []
        with self._metadata as metadata:
            # What is about to happen comes first: identity may wait for the next reading.
            found += self._of(metadata, SPOT, spot_action)
            found += self._of(metadata, REBALANCE, rebalance)
            found += self._of(metadata, SCHEDULED, scheduled)
            if not self._identity or time.monotonic() >= self._due_s:
                try:
                    self._identify(metadata)
                except Refused:  # what is about to happen is known, and not lost for this
                    self._rejected[DOCUMENTS[DOCUMENT]] += 1
        if self._identity:
            found.append(("instance_info", self._identity, 1.0))
        found += [("metadata_rejected_total", f"document={name}", float(count))
                  for name, count in self._rejected.items()]
        return [Sample(f"ec2_{name}", subject, value, boot_s) for name, subject, value in found]

    def _of(self, metadata: Metadata, path: str, understand: Any) -> list[tuple[str, str, float]]:
        """Rows of one document; none, and counted as a failure, when the text is no such document;
        none when it is absent."""
        text = metadata.get(path)
        if text is None:
            return []
        rows: list[tuple[str, str, float]] = []
        try:
            rows += understand(json.loads(text))
        except (ValueError, RecursionError):
            self._rejected[DOCUMENTS[path]] += 1
        if path == SPOT and not rows:
            # The document is there only when something is about to happen: what exactly is then
            # not known, which is not the same as nothing.
            rows.append(("spot_action_timestamp_seconds", "action=unknown", 0.0))
        return rows

    def _identify(self, metadata: Metadata) -> None:
        text = metadata.get(DOCUMENT)
        try:
            document = json.loads(text or "null")
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            self._rejected[DOCUMENTS[DOCUMENT]] += 1
            return
        labels = {label: document.get(key) for label, key in OF_DOCUMENT.items()}
        labels |= {label: metadata.get(path) for label, path in PLACEMENT.items()}
        known = {label: value.strip() if isinstance(value, str) else ""
                 for label, value in labels.items()}
        self._identity = ",".join(f"{label}={plain(value)}" for label, value in known.items())
        self._due_s = time.monotonic() + IDENTITY_EVERY_S


def is_ec2(roots: Roots) -> bool:
    """What the machine's own tables say; without them it is not of EC2."""
    beginnings = {"class/dmi/id/sys_vendor": "amazon ec2",
                  "class/dmi/id/board_vendor": "amazon ec2", "hypervisor/uuid": "ec2"}
    return any(text_of(f"{roots.sys}/{path}", 256).strip().lower().startswith(beginning)
               for path, beginning in beginnings.items())


# ------------------------------------------------------------- what a document says


def unix_s(text: Any) -> float:
    """A time as the documents write it: 2026-11-20T10:02:00Z, or 20 Nov 2026 10:02:00 GMT.
    ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError("no time")
    try:
        then = datetime.fromisoformat(text[:64])
    except ValueError:
        from email.utils import parsedate_to_datetime  # here: the agent imports this module

        try:
            then = parsedate_to_datetime(text[:64])
        except (TypeError, IndexError) as error:
            raise ValueError(f"no time: {text[:64]}") from error
    try:
        return max(0.0, (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp())
    except (OverflowError, OSError) as error:
        raise ValueError(f"no time: {text[:64]}") from error


def when_s(text: Any) -> float:
    """The time of an event in seconds; 0 where it cannot be read, since the event counts for more
    than its time."""
    try:
        return unix_s(text)
    except ValueError:
        return 0.0


def spot_action(document: Any) -> Iterator[tuple[str, str, float]]:
    """{"action": "terminate", "time": ...}"""
    action = document.get("action") if isinstance(document, dict) else None
    if not isinstance(action, str):
        raise ValueError("no action")
    when = when_s(document.get("time"))
    yield "spot_action_timestamp_seconds", f"action={plain(action)}", when


def rebalance(document: Any) -> Iterator[tuple[str, str, float]]:
    """{"noticeTime": ...}"""
    if not isinstance(document, dict):
        raise ValueError("no table")
    yield "rebalance_recommended_timestamp_seconds", "", unix_s(document.get("noticeTime"))


def scheduled(document: Any) -> Iterator[tuple[str, str, float]]:
    """[{"EventId": ..., "Code": "system-reboot", "NotBefore": ..., "State": "active"}, ...]"""
    if not isinstance(document, list):
        raise ValueError("no list")
    events = [one for one in document[:EVENTS_MAX] if isinstance(one, dict)]
    for one in events:
        if one.get("State") in ("completed", "canceled"):
            continue
        labels = f"event={plain(one.get('EventId', ''))},code={plain(one.get('Code', 'unknown'))}"
        yield "scheduled_event_timestamp_seconds", labels, when_s(one.get("NotBefore"))
    if len(events) < len(document):
        raise ValueError("an event that is no table, or too many of them")
