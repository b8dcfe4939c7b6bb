"""Reads what Alertmanager (webhook version 4) and Grafana send.

Owns their form.  Both send the same fields for what matters here; unknown ones are passed over,
because new releases add some.
"""

from __future__ import annotations

import re

import msgspec

from holdfast.worker.redact import redacted

from ..core.model import UNREADABLE, Alert

ALERTS_MAX = 1000  # in one delivery
BODY_MAX_BYTES = 4 << 20  # of so many: what is refused as too long is never sent again
NAME_MAX, SUMMARY_MAX = 128, 300
RUNBOOK_LABEL, RUN_LABEL, NODE_LABEL = "holdfast_runbook", "run", "node"
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class Sent(msgspec.Struct):
    """One alert of a delivery."""

    status: str
    labels: dict[str, str]
    fingerprint: str
    startsAt: str
    annotations: dict[str, str] = {}


class Delivery(msgspec.Struct):
    alerts: list[Sent]
    receiver: str = ""
    externalURL: str = ""


def read(body: bytes, now_wall_s: float) -> list[Alert]:
    """The alerts of a delivery.  ValueError says what is wrong with it."""
    try:
        delivery = msgspec.json.decode(body, type=Delivery)
    except UNREADABLE as error:
        raise ValueError(f"no webhook of Alertmanager or Grafana: {error}") from error
    if len(delivery.alerts) > ALERTS_MAX:
        raise ValueError(f"{len(delivery.alerts)} alerts in one delivery: set max_alerts to "
                         f"{ALERTS_MAX} at most")
    by = _text(f"{delivery.receiver} {delivery.externalURL}".strip(), NAME_MAX)
    return [_alert(one, by, now_wall_s) for one in delivery.alerts]


def _alert(sent: Sent, by: str, now_wall_s: float) -> Alert:
    if sent.status not in ("firing", "resolved"):
        raise ValueError(f"status {sent.status[:40]!r}: firing or resolved")
    if not sent.fingerprint or not sent.startsAt:
        raise ValueError("an alert without fingerprint or startsAt")
    texts = sent.annotations
    return Alert(
        id=_text(f"{sent.fingerprint}/{sent.startsAt}", NAME_MAX),
        name=_text(sent.labels.get("alertname", ""), NAME_MAX),
        runbook=_text(sent.labels.get(RUNBOOK_LABEL, ""), NAME_MAX),
        run=_text(sent.labels.get(RUN_LABEL, ""), NAME_MAX),
        node=_text(sent.labels.get(NODE_LABEL, ""), NAME_MAX),
        summary=_text(texts.get("summary", "") or texts.get("description", ""), SUMMARY_MAX),
        taken_wall_s=now_wall_s, firing=sent.status == "firing", by=by)


def _text(text: str, most: int) -> str:
    return redacted(UNPRINTABLE.sub(" ", text)).strip()[:most]
