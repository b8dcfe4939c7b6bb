"""How long the live page takes in headless Chromium: first paint, and what the agent says on it.

A node's agent with a run of two ranks, and a browser that has never seen the page before each load.
Chromium is asked through a pipe, in its own protocol; the times are the browser's, from the start
of the navigation on.

    python -m bench.live_page [--loads 20]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import common

LIMIT_S = 60.0
BARE = "data:text/html,<p>one word"  # what the browser takes by itself on this machine
CHROMIUM = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
            "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
            "--remote-debugging-pipe", "about:blank")
WAITS = "import time\nwhile True:\n    time.sleep(1.0)\n"  # ranks that need no processor
# Runs in the page before its own script: when the agent's first answer is shown.
FILLED = """new MutationObserver((_, self) => {
  const runs = document.getElementById("runs");
  if (runs && document.getElementById("node").textContent && !runs.querySelector(".empty")) {
    window.filledMs = performance.now(); self.disconnect(); }
}).observe(document, {childList: true, subtree: true})"""
TIMES = """JSON.stringify({filled_ms: window.filledMs || 0,
  bytes: performance.getEntriesByType("navigation")[0].encodedBodySize,
  first_byte_ms: performance.getEntriesByType("navigation")[0].responseStart,
  paints: performance.getEntriesByType("paint").map(p => [p.name, p.startTime])})"""


class Browser:
    """One Chromium, asked through its pipe: JSON documents with a zero byte behind each."""

    def __init__(self, out: int, come: int) -> None:
        self.out, self.come, self.rest, self.asked = out, come, b"", 0

    def ask(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        self.asked += 1
        words = {"id": self.asked, "method": method, "params": params}
        os.write(self.out, json.dumps(words | ({"sessionId": session} if session else {})).encode()
                 + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.asked:
                if "error" in answer:
                    raise common.Failed(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.come, 1 << 16)
            if not more:
                raise common.Failed("Chromium has ended")
            self.rest += more
        one, _, self.rest = self.rest.partition(b"\0")
        return dict(json.loads(one))

    def open(self, context: str = "") -> str:
        """An empty page; the session by which it is asked."""
        more = {"browserContextId": context} if context else {}
        target = self.ask("Target.createTarget", url="about:blank", **more)["targetId"]
        session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.ask("Page.enable", session)
        return str(session)

    def say(self, session: str, expression: str) -> Any:
        """What a line of script comes to on the page."""
        answer = self.ask("Runtime.evaluate", session, expression=expression)
        return answer["result"].get("value")

    def load(self, url: str) -> dict[str, Any]:
        """The times of one load with nothing cached; 0 for what a bare page does not have."""
        context = self.ask("Target.createBrowserContext")["browserContextId"]
        session = self.open(context)
        self.ask("Page.addScriptToEvaluateOnNewDocument", session, source=FILLED)
        self.ask("Page.navigate", session, url=url)
        end_s = time.monotonic() + LIMIT_S
        while time.monotonic() < end_s:
            found = json.loads(self.say(session, TIMES))
            paints = dict(found.pop("paints"))
            is_full = found["filled_ms"] or url == BARE
            if is_full and "first-contentful-paint" in paints:
                self.ask("Target.disposeBrowserContext", browserContextId=context)
                return found | {"first_paint_ms": paints["first-paint"],
                                "first_contentful_paint_ms": paints["first-contentful-paint"]}
            time.sleep(0.05)
        raise common.Failed(f"{url}: nothing is shown after {LIMIT_S:.0f} s: {found}")


@contextlib.contextmanager
def chromium(home: Path) -> Iterator[Browser]:
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # It leaves its socket's folder behind, whose path must be short: `home` may be long.
    with tempfile.TemporaryDirectory() as short, open(home / "chromium.log", "wb") as log:
        process = subprocess.Popen(  # its pipe is descriptors 3 and 4, whatever ours are
            ["bash", "-c", f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}',
             *CHROMIUM, f"--user-data-dir={home / 'profile'}"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "TMPDIR": short})
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Browser(ours_out, ours_in)
        finally:
            os.close(ours_out)  # it ends itself then
            os.close(ours_in)
            common.end_tree(process)


def measured(loads: int, results: common.Results) -> list[dict[str, Any]]:
    rows = []
    with common.place("page") as where:
        script = where.home / "waits.py"
        script.write_text(WAITS)
        command = common.run_command([str(script)], 2, "page", "--preload", "none")
        with common.running(command, where), chromium(where.home) as browser:
            address = where.home / "r/page/address"
            end_s = time.monotonic() + LIMIT_S
            while not address.exists() or not common.api(where, "page", "/api/v1/status")["runs"]:
                if time.monotonic() > end_s:
                    raise common.Failed(common.log_text(where))
                time.sleep(0.1)
            for number in range(loads):
                bare = browser.load(BARE)
                found = browser.load(address.read_text().strip())
                found["bare_first_paint_ms"] = bare["first_paint_ms"]
                rows.append({name: round(value, 1) for name, value in found.items()})
                results.add({"load": number, "load_1m": round(os.getloadavg()[0], 2), **rows[-1]})
                time.sleep(0.5)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--out", type=Path, default=common.BENCH / "results")
    options = parser.parse_args()
    common.become_subreaper()
    rows = measured(options.loads, common.Results("live_page", options.out))
    for name in ("bare_first_paint_ms", "first_byte_ms", "first_paint_ms", "filled_ms"):
        values = [row[name] for row in rows]
        print(f"{name}: median {common.percentile(values, 0.5):.0f}, "
              f"{min(values):.0f} to {max(values):.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
