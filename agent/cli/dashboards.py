"""`holdfast dashboards render`: alert rules for Prometheus, made from the runbooks in force.

Owns where they are written.  Their content is dashboards/rules.py's and the runbooks' own.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from holdfast.dashboards import rules
from holdfast.runbooks import prose

from .policy import runbooks
from .text import Failure, clock, count, line, show

FILE = "holdfast-alerts.yml"


def render(options: argparse.Namespace) -> int:
    """Writes the alert rules into --to, else to standard output."""
    entries = []
    for name, book in runbooks().items():
        _, sections = prose.split(prose.text_of(name))
        texts = (prose.first_sentence(sections[one]) for one in ("Meaning", "Impact"))
        entries.append(rules.Entry(book, *texts))
    text = rules.render(entries, options.runbook_base)
    if options.to is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return 0
    target = Path(options.to) / FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{error.filename or target}: {error.strerror}") from error
    rules_made = count(text.count("- alert:"), "alert rule")
    show([line(f"{target}: {rules_made}, written {clock(time.time())}")])
    return 0
