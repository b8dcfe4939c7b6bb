"""`holdfast dashboards render | push`: what Prometheus, Alertmanager and Grafana read.

Owns where it is written.  The content is that of dashboards/ and of the runbooks in force.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from pathlib import Path

from holdfast.dashboards.grafana import boards
from holdfast.dashboards.grafana import push as grafana
from holdfast.dashboards.rules import faults, files
from holdfast.runbooks import prose
from holdfast.worker.exits import USAGE

from ..config.tokens import is_loopback
from ..system.regular import open_regular
from .policy import runbooks
from .text import GOOD, STRONG, Failure, Span, clock, count, line, show

FILE = "holdfast-alerts.yml"
TOKEN_MAX_BYTES = 4096
OVER_TLS = "https://"  # as --runbook-base


def dashboards(options: argparse.Namespace) -> int:
    return _render(options) if options.what == "render" else _push(options)


def _render(options: argparse.Namespace) -> int:
    """Writes rules, samples and dashboards into --to; the rules alone to standard output."""
    entries = []
    for name, (book, text) in runbooks().items():
        meaning = prose.sections(text).get("Meaning", f"The fault {name}.")
        entries.append(faults.Entry(book, prose.first_sentence(meaning)))
    rules = files.rules(entries, _base(options, files.SERVED))
    if options.to is None:
        sys.stdout.write(rules)
        sys.stdout.flush()
        return 0
    texts_by_name = {FILE: rules} | {f"holdfast-{one}": files.text(one) for one in files.SAMPLES}
    folder = Path(options.to)
    rendered = boards.files(_base(options, boards.SERVED))
    provisioning = boards.provisioning(str(folder.absolute()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in (texts_by_name | rendered | provisioning).items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise Failure(f"{error.filename or folder}: {error.strerror}") from error
    alerts = count(rules.count("- alert:"), "alert rule")
    samples = (*(f"holdfast-{one}" for one in files.SAMPLES), *provisioning)
    show([line(f"{folder / FILE}: {alerts}, written {clock(time.time())}"),
          *(line(f"{folder / one}: a sample to start from") for one in samples),
          *(line(f"{folder / one}: a dashboard for Grafana") for one in rendered)])
    return 0


def _base(options: argparse.Namespace, served: str) -> str:
    """Where the runbooks are: `served` by the agents, over TLS where that alone is said."""
    base: str = options.runbook_base or served
    return served.replace("http://", base, 1) if base == OVER_TLS else base


def _push(options: argparse.Namespace) -> int:
    if not options.url or not options.token_file:
        raise Failure("`holdfast dashboards push` needs --url and --token-file", USAGE)
    name, _, uid = options.datasource.partition("=")
    if options.datasource and (name != grafana.PROMETHEUS or not uid):
        raise Failure(f"--datasource {options.datasource!r}: the dashboards read from one data "
                      f"source: set it as {grafana.PROMETHEUS}=UID", USAGE)
    try:
        server = grafana.Server(options.url, _token(Path(options.token_file)))
        uid, remark = grafana.source_uid(server, uid)
        texts = boards.files(_base(options, boards.SERVED)).values()
        for word in (remark, _in_clear(options.url)):
            if word:
                print(f"holdfast: {word}", file=sys.stderr)
        for change in grafana.push(server, texts, options.folder, uid, options.dry_run):
            done = change.done if change.done == "unchanged" or not options.dry_run else (
                f"would be {change.done}")
            show([line(f"{change.what}: ", Span(done, "" if done == "unchanged" else GOOD))])
            if options.diff and change.diff:
                show([line(Span(row, STRONG if row[:1] in "+-" else ""))
                      for row in change.diff.splitlines()])
    except grafana.Refused as refused:
        raise Failure(str(refused)) from refused
    return 0


def _in_clear(url: str) -> str:
    scheme, _, rest = url.partition("://")
    host = rest.partition("/")[0].rpartition(":")[0] or rest.partition("/")[0]
    return "" if scheme != "http" or is_loopback(host) else (
        f"{url}: the token goes there unencrypted; https would keep it secret")


def _token(path: Path) -> str:
    try:
        with open(open_regular(path), "rb") as file:
            if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                raise Failure(f"{path}: others may read it: chmod 600 {path}")
            token = file.read(TOKEN_MAX_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise Failure(f"{path}: {error.strerror}") from error
    if not token or not token.isprintable() or " " in token or "\ufffd" in token:
        raise Failure(f"{path}: no token: one line, as Grafana shows it when it is made")
    return token
