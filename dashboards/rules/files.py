"""The files that `holdfast dashboards render` writes for Prometheus and Alertmanager.

Owns what stands in them, where a runbook's address comes from, and the writing of YAML.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from typing import Any

import yaml

from . import faults

FLEET = "fleet.yml"
SAMPLES = ("prometheus.yml", "alertmanager.yml")  # written beside the rules, to start from
# Any living agent serves the runbooks, so the address opens inside a closed network as well.  Where
# none lives it is of one that did today: it opens once that is back.  The first by name, since
# Prometheus gives them in an order of chance and a notice must not change from look to look.
SERVED = ('http://{{ with query "holdfast_build_info or '
          '(last_over_time(holdfast_build_info[1d]) unless on () holdfast_build_info)" }}'
          '{{ . | sortByLabel "instance" | first | label "instance" }}{{ end }}/runbooks')
HEAD = "# Written by `holdfast dashboards render`: change runbooks or dashboards/rules instead.\n"


def text(name: str) -> str:
    """A file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def addressed(rule: dict[str, Any], folder: str, runbook_base: str) -> dict[str, Any]:
    """The rule with its runbook's address in place of the page's name."""
    if "alert" not in rule:
        return rule
    texts = dict(rule["annotations"])
    texts["runbook_url"] = f"{runbook_base.rstrip('/')}/{folder}{texts.pop('runbook')}.md"
    return {**rule, "annotations": texts}


def rules(entries: Iterable[faults.Entry], runbook_base: str = SERVED) -> str:
    """All rules as one file for Prometheus."""
    fleet = yaml.safe_load(text(FLEET))["groups"]
    groups = [
        {"name": group["name"],
         "rules": [addressed(rule, folder, runbook_base) for rule in group["rules"]]}
        for folder, found in (("", faults.groups(entries)), ("fleet/", fleet)) for group in found
    ]
    return HEAD + yaml.safe_dump({"groups": groups}, sort_keys=False, width=100, allow_unicode=True)
