"""`python -m holdfast.agent.logs.child`: reads the ranks' logs of one run for its launcher.

Owns one standing child: a request is a line of JSON on standard input, its answer a line on
standard output.  `diagnose` looks at the last 1 MB that one generation wrote into each file,
`sample` at a bounded part of what is new.  Runs as the job's user and only reads; its launcher puts
it below all others.  What lines mean is agent/core/detect's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, BinaryIO

from holdfast.agent.core.parse.logs.lines import NO_RANK
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.core.parse.logs.signatures import ROOT, SIGNAL, Catalogue, Match
from holdfast.agent.logs import files
from holdfast.agent.logs.files import Span
from holdfast.agent.system import procfs
from holdfast.worker.redact import redacted_head

REQUEST_MAX_BYTES = 1 << 18
TAILS_MAX_BYTES = 64 << 20  # of one diagnosis: half a second; many ranks get shorter tails
TAIL_LEAST_BYTES = 64 << 10
CONTEXT_BYTES = 4 << 10  # before a sample: where a traceback began
ANSWER_MAX_CHARS = 8000  # it travels on in one packet
LINE_MAX = 300
OTHERS_MAX = 12
SEEN_MAX = 8
KINDS_MAX = 32  # of one sample
STREAMS = ("stdout.log", "stderr.log")


class Reader:
    """Catalogue and positions; answers requests one after another."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.shipped = self.catalogue = catalogue
        self.positions: dict[str, int] = {}  # path -> the end of its last sample
        self.problem = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.  Raises ValueError, KeyError or TypeError for a bad
        request."""
        if "own" in request:
            self._take_own(request["own"])
        spans = spans_of(str(request["folder"]), request["ranks"])
        said = self._diagnose(spans) if request["do"] == "diagnose" else self._sample(
            spans, int(request["bytes"]))
        return {
            **said, "n": request["n"], "cpu_s": round(time.process_time(), 4),
            "rss_bytes": procfs.rss_bytes(), "problem": self.problem}

    def get_ready(self) -> None:
        """For a diagnosis, before anybody waits for it.  Samples need none of it."""
        try:
            files.get_ready(self.catalogue)
        except (OSError, ValueError, KeyError) as error:
            self.problem = f"families: {error}"[:LINE_MAX]

    def _take_own(self, rows: list[dict[str, Any]]) -> None:
        try:
            self.catalogue, self.problem = files.with_own(self.shipped, rows), ""
        except (ValueError, TypeError) as error:  # another release's rows; the agent checks its own
            self.catalogue, self.problem = self.shipped, f"own signatures: {error}"[:LINE_MAX]

    def _diagnose(self, spans: list[Span]) -> dict[str, Any]:
        most = max(TAIL_LEAST_BYTES, TAILS_MAX_BYTES // max(1, len(spans)))
        report = files.diagnose_tails(spans, self.catalogue, min(files.TAIL_BYTES, most))
        return {"detail": bounded(detail_of(report)), "read": report.nbytes}

    def _sample(self, spans: list[Span], budget_bytes: int) -> dict[str, Any]:
        read, skipped, problem = 0, 0, ""
        counts: Counter[tuple[str, str, str]] = Counter()
        seen: list[Match] = []
        for span, new, share in self._shares(spans, budget_bytes):
            try:
                nbytes, found = self._look(span, new, share, counts)
            except OSError as error:
                problem = problem or f"{span.path}: {error.strerror}"
                continue
            read += nbytes
            skipped += new - share
            seen += found
        self.problem = problem or self.problem
        return {
            "read": read, "skipped": skipped,
            "lines": [[*key, count] for key, count in counts.most_common(KINDS_MAX)],
            "seen": [seen_row(match) for match in seen[-SEEN_MAX:]]}

    def _shares(self, spans: list[Span], budget_bytes: int) -> list[tuple[Span, int, int]]:
        """(span, new bytes, how many of these to read) of each file.  The budget goes to the quiet
        files first, for there a line is rare; loud files divide the rest and lose their older
        part."""
        grown: list[tuple[int, Span]] = []
        for span in spans:
            try:
                size = os.stat(span.path).st_size
            except OSError:
                continue
            at = self.positions.get(span.path, span.begin)
            at = self.positions[span.path] = at if at <= size else 0  # somebody cut the file
            if size > at:
                grown.append((size - at, span._replace(begin=at, end=size)))
        left, shares = budget_bytes, []
        for number, (new, span) in enumerate(sorted(grown)):
            share = min(new, max(0, left // (len(grown) - number) - CONTEXT_BYTES))
            left -= share + CONTEXT_BYTES
            shares.append((span, new, share))
        return shares

    def _look(
        self, span: Span, new: int, share: int, counts: Counter[tuple[str, str, str]]
    ) -> tuple[int, list[Match]]:
        """Reads the newest `share` bytes up to the last whole line."""
        self.positions[span.path] = span.end
        if share <= 0:
            return 0, []
        since = span.end - share
        begin, data = files.read_tail(span._replace(begin=0), share + CONTEXT_BYTES)
        whole = data.rfind(b"\n") + 1
        if begin + whole > since:  # a line without an end is read when it has one
            data, self.positions[span.path] = data[:whole], begin + whole
        scanner = Scanner(self.catalogue, 0, span.rank)
        scanner.feed(data)
        scanner.close()
        found = [files.placed(one, span, begin) for one in scanner.matches]
        found = [one for one in found if one.offset >= since]
        for one in found:
            counts[one.signature, one.role, one.culprit] += 1
        for signature, times in scanner.handled.items():  # training went on after them
            counts[signature, "handled", ""] += times
        return len(data), [one for one in found if one.role in (ROOT, SIGNAL)]


def spans_of(folder: str, ranks: Sequence[Sequence[int]]) -> list[Span]:
    """Rows [rank, begin and end in stdout.log, begin and end in stderr.log]."""
    found = []
    for rank, *places in ranks:
        for name, begin, end in zip(STREAMS, places[::2], places[1::2], strict=True):
            path = os.path.join(folder, f"rank-{int(rank)}", name)
            found.append(Span(path, int(rank), int(begin), int(end)))
    return found


def detail_of(report: files.Report) -> dict[str, Any]:
    """The answer that agent/core/detect/ranks/live_logs.py reads."""
    found, root = report.diagnosis, report.diagnosis.root
    others: dict[tuple[str, str], set[int]] = {}
    for match in found.matches:
        if match is not root:
            ranks = others.setdefault((match.signature, match.role), set())
            ranks |= {match.rank} - {NO_RANK}
    return {
        "root": None if root is None else {
            "signature": root.signature, "culprit": root.culprit, "rank": root.rank,
            "line": redacted_head(root.text, LINE_MAX), "retryable": root.retryable,
            "weak": root.weak, "family": root.family, "path": report.names[root.file],
            "offset": root.offset},
        "blames": found.blames, "hint": redacted_head(found.hint, LINE_MAX),
        "note": redacted_head(report.note, LINE_MAX),
        "others": [
            {"signature": signature, "role": role, "ranks": sorted(ranks)[:16]}
            for (signature, role), ranks in list(others.items())[:OTHERS_MAX]],
        "problems": [text[:LINE_MAX] for text in report.problems[:4]], "skipped": report.skipped,
    }


def bounded(detail: dict[str, Any]) -> dict[str, Any]:
    """The answer, small enough for a packet: everything beside the root is dropped first."""
    while len(json.dumps(detail)) > ANSWER_MAX_CHARS and (detail["others"] or detail["problems"]):
        (detail["others"] or detail["problems"]).pop()
    return detail


def seen_row(match: Match) -> dict[str, Any]:
    return {
        "signature": match.signature, "role": match.role, "culprit": match.culprit,
        "rank": match.rank, "text": redacted_head(match.text, 200), "wall_s": round(time.time(), 3)}


def serve(source: BinaryIO, sink: BinaryIO, reader: Reader) -> None:
    """Until the launcher closes its end.  The first question is a sample most often, and asks for
    less than a diagnosis: what that needs is loaded behind it."""
    ready = False
    while line := source.readline(REQUEST_MAX_BYTES):
        try:
            said = reader.answer(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            said = {"error": f"{type(error).__name__}: {error}"[:LINE_MAX]}
        sink.write(json.dumps(said).encode() + b"\n")
        sink.flush()
        if not ready:
            reader.get_ready()
            ready = True


def main() -> int:
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer, Reader(files.load_catalogue()))
    except (BrokenPipeError, KeyboardInterrupt):
        return 1  # the launcher is gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
