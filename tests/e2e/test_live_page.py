"""The live page in a real browser: what it says of other nodes, wide and on a telephone."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import wait_for

from bench import live_page
from holdfast.agent.web.page import load_page

NODE = {"fatal": "", "excluded": False, "draining": False, "reason": "", "age_s": 0.4}
STATUS = {
    "node": "gpu-0", "version": "1", "store_up": True, "journal_stalled": False, "paused": False,
    "fleet_paused": False, "breaker_open": False, "config_reload_ok": True, "devices": [],
    "collectors": [], "runs": [],
    "agent": {"pid": 1, "rss_bytes": 1, "uptime_s": 1.0},
    "nodes": [
        {**NODE, "node": "gpu-0"}, {**NODE, "node": "gpu-1"},
        {**NODE, "node": "gpu-2", "fatal": "gpu_fell_off_bus"},
        {**NODE, "node": "gpu-3", "excluded": True, "reason": "its <b>fan</b>, ticket 4711"},
        {**NODE, "node": "gpu-4", "age_s": 80.0}, {**NODE, "node": "gpu-5", "age_s": None}],
    "elsewhere": [{
        "run": "a-run-with-a-long-name-on-other-nodes", "leader": "gpu-1", "generation": 2,
        "step": 812, "running": 8, "world": 8, "nodes": [
            {"node": "gpu-1", "word": "fresh", "part": "member", "age_s": 0.7},
            {"node": "gpu-2", "word": "lost", "part": "member", "age_s": 66.0}]}],
}
ANSWERS: dict[str, Any] = {
    "/api/v1/status": STATUS, "/api/v1/incidents": [],
    "/api/v1/ledger": {"categories": {"idle": 5.0}, "wall_s": 5.0, "cost": None},
    "/api/v1/fleet/incidents": {"node": "gpu-0", "nodes": [
        {"node": "gpu-4", "age_s": 71.0, "problem": "no answer", "answer": None}]},
}
SAID = """[...document.querySelectorAll("#nodes tbody tr, #runs tbody tr")].map(row =>
  [...row.cells].map(cell => cell.textContent.trim()).join(" | ")).join("\\n")"""


class Agent(http.server.BaseHTTPRequestHandler):
    """What an agent would say of a fleet, and its own page."""

    def do_GET(self) -> None:
        page, policy = load_page()
        found = ANSWERS.get(self.path)
        body, kind = (page, "text/html") if found is None else (
            json.dumps(found).encode(), "application/json")
        self.send_response(200)
        for name, value in (("Content-Type", kind), ("Content-Length", str(len(body))),
                            ("Content-Security-Policy", policy)):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def served() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(10)


def test_other_nodes_are_said_in_words_and_fit_on_a_telephone(tmp_path: Path) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is missing (Debian package chromium)")
    with served() as url, live_page.chromium(tmp_path) as browser:
        session = browser.open()
        for width in (1280, 390):
            browser.ask("Emulation.setDeviceMetricsOverride", session, width=width, height=900,
                        deviceScaleFactor=1, mobile=width < 500)
            browser.ask("Page.navigate", session, url=url)
            said = wait_for(lambda: "does not answer" in (found := browser.say(session, SAID))
                            and found)
            assert said.splitlines() == [
                "gpu-1 | fresh | 700 ms ago | member, leads", "gpu-2 | lost | 66 s ago | member",
                "gpu-1 | ok | 400 ms ago", "gpu-2 | gpu fell off bus | 400 ms ago",
                "gpu-3 | excluded | 400 ms ago", "its <b>fan</b>, ticket 4711",
                "gpu-4 | silent | 80 s ago",
                "does not answer: no answer; its incidents are 71 s old",
                "gpu-5 | not heard of | –"]
            wide = browser.say(session, """[...document.querySelectorAll(".scroll")].filter(
                one => one.scrollWidth > one.clientWidth).length""")
            assert wide == 0, f"at {width} pixels a table is wider than its card"
            assert browser.say(session, "document.getElementById('lost').textContent") == ""
