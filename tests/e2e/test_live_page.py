"""The live page in a real browser: what it says of other nodes, wide and on a telephone."""

from __future__ import annotations

import contextlib
import http.server
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from running import wait_for

from bench import live_page
from holdfast.agent.web.page import load_page

NODE = {"fatal": "", "excluded": False, "draining": False, "reason": "", "age_s": 0.4}
STATUS = {
    "node": "gpu-0", "version": "1", "store_up": True, "store_answer_s": 0.01,
    "journal_stalled": False, "paused": False,
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


RANK = {"pid": 4711, "state": "running", "proc_state": "R", "step": 60, "phase": "data",
        "phase_age_s": 0.1, "health": "ok", "why": "", "where": "", "place": "",
        "phase_s": {"forward_backward": 30.0, "data": 10.0}}
RUN = {
    "run": "m5", "grade": "trainer", "generation": 2, "state": "running", "connected": True,
    "paused": False, "training": True, "doing": "training step 60", "need": "nothing",
    "suspicion": "", "step": 60, "loss": 2.0, "step_time_s": 0.5,
    "checkpoint": {"step": 50, "age_s": 5.0}, "snapshot_step": 59, "restarts": 1, "root": "",
    "logs": None, "books": {"total_steps": 100, "eta_s": 20.0, "tokens_s": 16384.0,
                            "samples_s": 128.0, "mfu": 0.48, "late_s": 7200.0},
    "ranks": [{**RANK, "rank": 0}, {**RANK, "rank": 1, "health": "suspect", "why": "behind"}]}
FIRST_S = 1_750_000_000.0
# A step a second; generation 2 begins again at step 20, 30 s on.
POINTS = [[FIRST_S + at, at if at < 30 else at - 10, 1 if at < 30 else 2, 0.5 + at % 2 / 4,
           4.0 - at / 30] for at in range(61)]
KILLED = {
    "id": "m5-g1-rank_killed-r1-1", "fault": "rank_killed", "subject": "run/m5/rank/1",
    "severity": "fatal", "run": "m5", "generation": 1, "opened_wall_s": FIRST_S + 30,
    "reason": "rank 1 died of SIGKILL", "state": "closed", "culprit": "rank 1 (pid 4712)",
    "evidence": [["signal", "9 (SIGKILL)"]], "timeline": [[FIRST_S + 30, "rank 1 ended"]],
    "actions": [], "closed_wall_s": FIRST_S + 31, "lost_steps": 10, "lost_s": 1.0}
HOT = {**KILLED, "id": "gpu-0-gpu_hot-1", "fault": "gpu_hot", "run": "", "severity": "warn",
       "subject": "gpu/0", "culprit": "", "reason": "GPU 0 is at 96 C", "state": "open"}
OF_A_RUN: dict[str, Any] = {
    "/api/v1/status": {**STATUS, "nodes": STATUS["nodes"][:1], "elsewhere": [],
                       "runs": [RUN, {**RUN, "run": "other", "ranks": []}]},
    "/api/v1/incidents": [KILLED, HOT],
    "/api/v1/runs/m5/curves": {"points": POINTS}, "/api/v1/runs/other/curves": {"points": []},
    "/api/v1/ledger": {"categories": {"training": 30.0, "recovery": 10.0}, "wall_s": 40.0,
                       "cost": None},
}


class Agent(http.server.BaseHTTPRequestHandler):
    """What an agent would say, and its own page."""

    def do_GET(self) -> None:
        page, policy = load_page()
        found = self.server.answers.get(self.path)  # type: ignore[attr-defined]
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
def served(answers: dict[str, Any]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        server.answers = answers  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join(10)


@pytest.fixture(autouse=True)
def chromium_is_here() -> None:
    if shutil.which("chromium") is None:
        pytest.skip("chromium is missing (Debian package chromium)")


class View(NamedTuple):
    """One page in the browser."""

    browser: live_page.Browser
    session: str
    url: str

    def say(self, expression: str) -> Any:
        return self.browser.say(self.session, f"({expression})")

    def wait(self, expression: str) -> Any:
        return wait_for(lambda: self.say(expression), 30, expression)

    def press(self, key: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.browser.ask("Input.dispatchKeyEvent", self.session, type=kind, key=key, code=key,
                             windowsVirtualKeyCode={"Tab": 9, "Enter": 13}[key], **more)

    def named(self) -> set[tuple[str, str]]:
        """What a screen reader is told: roles and names."""
        nodes = self.browser.ask("Accessibility.getFullAXTree", self.session)["nodes"]
        return {(one["role"]["value"], one.get("name", {}).get("value", "").casefold())
                for one in nodes if not one["ignored"]}


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    with served(OF_A_RUN) as url, live_page.chromium(tmp_path) as browser:
        session = browser.open()
        browser.ask("Emulation.setFocusEmulationEnabled", session, enabled=True)
        browser.ask("Page.navigate", session, url=url)
        made = View(browser, session, url)
        made.wait("document.querySelectorAll('figure path').length === 2")
        yield made


CURVES = """JSON.stringify([...document.querySelectorAll("figure")].slice(0, 2).map(one => ({
  label: one.querySelector("svg").getAttribute("aria-label"),
  caption: one.querySelector("figcaption").textContent,
  strokes: one.querySelector("path").getAttribute("d").match(/M/g).length,
  points: one.querySelector("path").getAttribute("d").match(/[ML]/g).length,
  marks: [...one.querySelectorAll("line")].map(line => [
    line.getAttribute("x1"), line.textContent.split(",")[0]])})))"""
SHOWN = """JSON.stringify({
  runs: [...document.querySelectorAll("#runs section")].map(one => one.getAttribute("aria-label")),
  incidents: [...document.querySelectorAll("#incidents summary b")].map(one => one.textContent),
  opened: [...document.querySelectorAll("#incidents details[open] summary b")].map(
    one => one.textContent),
  view: [...document.querySelectorAll("nav a[aria-current=page]")].map(one => one.textContent)})"""
FOCUSED = """JSON.stringify({text: document.activeElement.textContent.slice(0, 30),
  outline: getComputedStyle(document.activeElement).outlineStyle,
  width: parseFloat(getComputedStyle(document.activeElement).outlineWidth)})"""
# The least contrast, as WCAG counts it, of text that people read with what lies behind it.
CONTRAST = """(() => {
  const rgb = text => text.match(/[0-9.]+/g).slice(0, 4).map(Number);
  const light = text => rgb(text).slice(0, 3).map(v => v / 255).map(
    v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = one => { while (one) { const c = getComputedStyle(one).backgroundColor;
    if (rgb(c)[3] !== 0) return c; one = one.parentElement; } };
  return Math.min(...[...document.querySelectorAll("b, .soft, .pill, td, th, a, dd")]
    .filter(one => one.textContent.trim() && one.offsetParent).map(one => {
      const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
      return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); })); })()"""


def test_curves_show_loss_and_step_time_and_each_restart(view: View) -> None:
    loss, step_time = json.loads(view.say(CURVES))
    assert loss["label"] == "loss from 4.00 to 2.00 in 60 s, 1 restart"
    assert step_time["label"] == "step time from 500 ms to 500 ms in 60 s, 1 restart"
    assert loss["caption"].startswith("loss2.002.00 to 4.00 in 60 s")
    for curve in (loss, step_time):
        assert curve["points"] == len(POINTS)
        assert curve["strokes"] == 2, "a line is drawn through the restart"
        assert curve["marks"] == [["500.0", "generation 2 at step 20"]]
    facts = view.say("[...document.querySelectorAll('.fact')].map(one => one.textContent).join()")
    for fact in ("done in20 sof 100 steps", "deadlinelateby 2.0 h",
                 "tokens/s16 k", "samples/s128", "MFU48.0 %"):
        assert fact in facts


def test_each_run_and_each_incident_has_a_view_of_its_own(view: View) -> None:
    every = {"runs": ["run m5", "run other"], "incidents": ["gpu hot", "rank killed"],
             "opened": ["gpu hot"], "view": ["Node gpu-0"]}
    run = {"runs": ["run m5"], "incidents": ["rank killed"], "opened": [], "view": ["Run m5"]}
    one = {"runs": [], "incidents": ["rank killed"], "opened": ["rank killed"],
           "view": [f"Incident {KILLED['id']}"]}
    opened_by_hand = {**run, "opened": ["rank killed"]}
    gone = {"runs": [], "incidents": [], "opened": [], "view": []}
    for hash, wanted in (("", every), ("#run/m5", run), (f"#incident/{KILLED['id']}", one),
                         ("#run/m5", opened_by_hand), ("#run/nowhere", gone)):
        view.say(f"location.hash = {json.dumps(hash)}")
        wait_for(lambda wanted=wanted: json.loads(view.say(SHOWN)) == wanted, 15,
                 f"{hash}: {wanted}, not {view.say(SHOWN)}")
    assert "No run nowhere on this node" in view.say("document.getElementById('runs').textContent")


def test_the_page_is_used_by_keyboard_alone(view: View) -> None:
    seen = []
    for _ in range(8):
        view.press("Tab")
        seen.append(json.loads(view.say(FOCUSED)))
    assert [one["text"] for one in seen[:6]] == [
        "Skip to the runs", "Node gpu-0", "Run m5", "Run other", "m5", "other"]
    assert all(one["outline"] == "solid" and one["width"] >= 2 for one in seen), seen
    assert "gpu hot" in seen[6]["text"] and seen[7]["text"] == "alone"
    # The page is drawn anew each second: the focus stays where it was put.
    view.say("document.querySelector('#runs a[href=\"#run/m5\"]').focus()")
    view.say("window.first = document.querySelector('#runs section')")
    view.wait("!document.contains(window.first)")
    assert json.loads(view.say(FOCUSED))["text"] == "m5"
    view.press("Enter", "\r")
    view.wait("document.querySelectorAll('#runs section').length === 1")
    assert view.say("location.hash") == "#run/m5"
    view.say("document.querySelector('#incidents summary').focus()")
    view.press("Enter", "\r")
    view.wait("document.querySelector('#incidents details').open")


def test_it_is_dark_where_the_system_is_and_can_be_read(view: View) -> None:
    for scheme, background in (("light", "rgb(246, 247, 249)"), ("dark", "rgb(16, 21, 27)")):
        view.browser.ask("Emulation.setEmulatedMedia", view.session,
                         features=[{"name": "prefers-color-scheme", "value": scheme}])
        view.wait(f"getComputedStyle(document.body).backgroundColor === '{background}'")
        contrast = view.say(CONTRAST)
        assert contrast >= 4.5, f"{scheme}: {contrast:.2f}, and WCAG asks for 4.5"


def test_a_screen_reader_is_told_what_is_to_be_seen(view: View) -> None:
    view.browser.ask("Accessibility.enable", view.session)
    told = view.named()
    for wanted in (
        ("navigation", "Views"), ("link", "Run m5"), ("region", "run m5"), ("region", "Incidents"),
        ("region", "Where the time went"), ("heading", "Holdfast"), ("columnheader", "health"),
        ("image", "loss from 4.00 to 2.00 in 60 s, 1 restart"),
        ("image", "training 30 s, recovery 10 s"),
        ("StaticText", "run m5: training; run other: training"),
    ):
        assert (wanted[0], wanted[1].casefold()) in told, (wanted, sorted(told))
    live = view.say("document.getElementById('said').getAttribute('aria-live')")
    assert live == "polite"


def test_other_nodes_are_said_in_words_and_fit_on_a_telephone(tmp_path: Path) -> None:
    with served(ANSWERS) as url, live_page.chromium(tmp_path) as browser:
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
