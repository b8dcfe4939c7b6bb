"""A real Prometheus and real Alertmanagers on loopback, what they scrape, and who they tell."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port
from running import wait_for

PROMETHEUS, ALERTMANAGER = "prometheus", "prometheus-alertmanager"


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return json.loads(answer.read() or b"null")


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Server:
    """An HTTP server of a test: `pages` are served, and POSTs kept by their path."""

    def __init__(self) -> None:
        self.pages: dict[str, str] = {}
        self.posted: list[tuple[str, dict[str, Any]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = server.pages.get(self.path)
                self.send_response(404 if page is None else 200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write((page or "").encode())

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.posted.append((self.path, json.loads(body)))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def alerts(self, path: str) -> list[dict[str, Any]]:
        """Firing alerts that came to that path, each as often as it came."""
        return [one for where, body in self.posted if where == path for one in body["alerts"]
                if one["status"] == "firing"]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def servers(count: int) -> Iterator[list[Server]]:
    made = [Server() for _ in range(count)]
    try:
        yield made
    finally:
        for one in made:
            one.stop()


@contextlib.contextmanager
def program(command: list[str], ready: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs until the end of the block, from when `ready` answers."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is missing: see `make packages`")
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_for(lambda: answers(ready) or process.poll() is not None, 30, f"{ready}: {log}")
        assert process.poll() is None, log.read_text()
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def alertmanager(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Its address."""
    folder.mkdir()
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [ALERTMANAGER, f"--config.file={folder / 'alertmanager.yml'}",
               f"--storage.path={folder / 'data'}", f"--web.listen-address={address}",
               "--cluster.listen-address="]
    with program(command, f"http://{address}/-/ready", folder / "log"):
        yield address


@contextlib.contextmanager
def prometheus(
    folder: Path, rules: str, targets: list[str], managers: list[str], every: str = "500ms",
    names: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Its address.  `targets` are scraped as the job `holdfast`, by address, and shown by it or by
    the instance that `names` has for it."""
    named = names or {}
    folder.mkdir()
    (folder / "rules.yml").write_text("groups: []\n")
    (folder / "prometheus.yml").write_text(yaml.safe_dump({
        "global": {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every},
        "rule_files": ["rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": managers}]}]},
        "scrape_configs": [{"job_name": "holdfast", "static_configs": [
            {"targets": [one], "labels": {"instance": named.get(one, one)}} for one in targets]}],
    }))
    address = f"127.0.0.1:{free_port()}"
    command = [PROMETHEUS, f"--config.file={folder / 'prometheus.yml'}",
               f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}",
               "--rules.alert.resend-delay=1s", "--web.enable-lifecycle"]
    with program(command, f"http://{address}/-/ready", folder / "log"):
        # It learns of its targets up to five seconds late, and a rule about absent ones would fire.
        scraped = f"http://{address}/api/v1/query?query=up"
        wait_for(lambda: len(get(scraped)["data"]["result"]) == len(targets), 30,
                 "Prometheus has scraped each target")
        (folder / "rules.yml").write_text(rules)
        with urllib.request.urlopen(urllib.request.Request(
                f"http://{address}/-/reload", method="POST"), timeout=30) as answer:
            assert answer.status == 200
        found = f"http://{address}/api/v1/alertmanagers"
        wait_for(lambda: len(get(found)["data"]["activeAlertmanagers"]) == len(managers), 30,
                 "Prometheus knows whom to tell")
        yield address
