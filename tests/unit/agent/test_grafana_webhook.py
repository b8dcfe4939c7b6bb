"""The body that Grafana's own alerting sends, by the fields that its documents name."""

from __future__ import annotations

import json
from typing import Any

from browsing import browse

# Version "1", a startsAt with a zone, and per alert dashboardURL, panelURL, values, valueString and
# imageURL, none of which Alertmanager has; title, state and message are for people.
ALERT: dict[str, Any] = {
    "status": "firing",
    "labels": {"alertname": "FabricStorm", "grafana_folder": "Cluster", "run": "demo",
               "holdfast_runbook": "fabric_storm"},
    "annotations": {"summary": "switch 4 drops packets", "runbook_url": "https://books/fabric"},
    "startsAt": "2026-11-22T11:00:00.157076+01:00", "endsAt": "0001-01-01T00:00:00Z",
    "generatorURL": "https://grafana/alerting/grafana/u1/view", "fingerprint": "c0ffee00c0ffee00",
    "silenceURL": "https://grafana/alerting/silence/new", "dashboardURL": "https://grafana/d/x",
    "panelURL": "https://grafana/d/x?viewPanel=2", "values": {"A": 44.2, "C": 1},
    "valueString": "[ var='A' labels={} value=44.2 ]", "imageURL": "https://grafana/img.png",
}
BODY: dict[str, Any] = {
    "receiver": "holdfast", "status": "firing", "orgId": 1, "alerts": [ALERT],
    "groupLabels": {"alertname": "FabricStorm"}, "commonLabels": ALERT["labels"],
    "commonAnnotations": {}, "externalURL": "https://grafana/", "version": "1",
    "groupKey": "{}:{alertname=\"FabricStorm\"}", "truncatedAlerts": 0,
    "title": "[FIRING:1] FabricStorm", "state": "alerting", "message": "**Firing**",
}


def test_grafanas_own_body_is_taken_once_and_ended(agent, tmp_path):
    async def scenario(daemon, node, launcher, tcp, unix):
        async def send(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            async with unix.post("/api/v1/alerts", data=json.dumps(body)) as answer:
                return answer.status, await answer.json()

        async def kept() -> list[dict[str, Any]]:
            async with unix.get("/api/v1/alerts") as answer:
                return await answer.json()

        assert await send(BODY) == (200, {"alerts": 1, "new": 1})
        assert await send(BODY) == (200, {"alerts": 1, "new": 0}), "sent again: nothing new"
        # A rule without a value: Grafana sends null there, and an alert that it made itself.
        other = {**ALERT, "values": None, "fingerprint": "0ddba11", "labels": {
            "alertname": "DatasourceNoData", "rulename": "FabricStorm", "ref_id": "A"}}
        assert await send({**BODY, "alerts": [other]}) == (200, {"alerts": 1, "new": 1})
        storm, no_data = await kept()
        assert (storm["name"], storm["run"], storm["runbook"], storm["firing"]) == (
            "FabricStorm", "demo", "fabric_storm", True)
        assert storm["summary"] == "switch 4 drops packets"
        assert (no_data["name"], no_data["run"], no_data["runbook"]) == ("DatasourceNoData", "", "")
        ended = {**ALERT, "status": "resolved", "endsAt": "2026-11-22T11:05:00+01:00"}
        status, _ = await send({**BODY, "status": "resolved", "state": "ok", "alerts": [ended]})
        assert status == 200 and [one["firing"] for one in await kept()] == [False, True]
        status, said = await send({**BODY, "alerts": [{**ALERT, "fingerprint": ""}]})
        assert status == 400 and "fingerprint" in said["error"]

    browse(scenario, agent, tmp_path)
