"""`holdfast dashboards render`: what Prometheus, Alertmanager and Grafana read.

Owns where it is written.  The content is that of dashboards/ and of the runbooks in force.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.dashboards.grafana import boards
from holdfast.dashboards.rules import faults, files
from holdfast.runbooks import prose

from .policy import runbooks
from .text import Failure, clock, count, line, show

FILE = "holdfast-alerts.yml"


def render(options: argparse.Namespace) -> int:
    """Writes rules, samples and dashboards into --to; the rules alone to standard output."""
    entries = []
    for name, book in runbooks().items():
        _, sections = prose.split(prose.text_of(name))
        texts = (prose.first_sentence(sections[one]) for one in ("Meaning", "Impact"))
        entries.append(faults.Entry(book, *texts))
    rules = files.rules(entries, options.runbook_base or files.SERVED)
    if options.to is None:
        sys.stdout.write(rules)
        sys.stdout.flush()
        return 0
    texts_by_name = {FILE: rules} | {f"holdfast-{one}": files.text(one) for one in files.SAMPLES}
    dashboards = boards.files(options.runbook_base or boards.SERVED)
    folder = Path(options.to)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (texts_by_name | dashboards).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{error.filename or folder}: {error.strerror}") from error
    alerts = count(rules.count("- alert:"), "alert rule")
    show([line(f"{folder / FILE}: {alerts}, written {clock(time.time())}"),
          *(line(f"{folder}/holdfast-{one}: a sample to start from") for one in files.SAMPLES),
          *(line(f"{folder / one}: a dashboard for Grafana") for one in dashboards)])
    return 0
