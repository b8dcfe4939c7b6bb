"""A stand-in for EC2's instance metadata service, on a free port of loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest

from holdfast.collectors.contract import Roots

TOKEN = "AQAEAtoken=="
DOCUMENT = {
    "accountId": "123456789012", "architecture": "x86_64", "availabilityZone": "us-east-2b",
    "imageId": "ami-0abcdef1234567890", "instanceId": "i-0abcd1234ef567890",
    "instanceType": "p5.48xlarge", "privateIp": "10.1.2.3", "region": "us-east-2",
}


class Service(ThreadingHTTPServer):
    """Answers from `documents`; the attributes say what is wrong with it."""

    daemon_threads = True
    documents: dict[str, bytes]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.documents = {}
        self.token = TOKEN
        self.token_status = 200
        self.hold = threading.Event()  # set: nothing waits any more
        self.slow: set[str] = set()  # paths that are answered when `hold` is set
        self.cut: set[str] = set()  # paths whose answer breaks off
        self.drip: set[str] = set()  # paths that are answered a byte at a time
        self.status: dict[str, int] = {}
        self.asked: list[tuple[str, str]] = []
        self.says("dynamic/instance-identity/document", DOCUMENT)
        self.says("meta-data/placement/availability-zone-id", "use2-az2")
        self.says("meta-data/instance-life-cycle", "spot")

    def says(self, path: str, document: object) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        self.documents[path] = text.encode()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    @property
    def roots(self) -> Roots:
        return Roots(sys="/nowhere", ec2=self.address)


class Handler(BaseHTTPRequestHandler):
    server: Service
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float] = 30.0

    def log_message(self, *_: object) -> None: ...

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            pass  # the reader had enough

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.server.asked.append(("PUT", self.path))
        if "token" in self.server.slow:
            self.server.hold.wait(30.0)
        seconds = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds", "")
        good = self.path == "/latest/api/token" and 1 <= int(seconds or 0) <= 21600
        status = self.server.token_status if good else 400
        self.reply(status, self.server.token.encode() if status == 200 else b"")

    def do_GET(self) -> None:
        self.server.asked.append(("GET", self.path))
        path = self.path.removeprefix("/latest/")
        if self.headers.get("X-aws-ec2-metadata-token") != self.server.token:
            self.reply(401, b"")
        elif path in self.server.slow:
            self.server.hold.wait(30.0)
            self.close_connection = True
        elif path in self.server.drip:
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            while not self.server.hold.wait(0.02):
                self.wfile.write(b"x")
        elif path in self.server.cut:
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.documents[path])))
            self.end_headers()
            self.wfile.write(self.server.documents[path][:20])
            self.close_connection = True
        elif path in self.server.status:
            self.reply(self.server.status[path], b"")
        elif path in self.server.documents:
            self.reply(200, self.server.documents[path])
        else:
            self.reply(404, b"<html>404</html>")


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()
    thread = threading.Thread(target=one.serve_forever, args=(0.02,))
    thread.start()
    yield one
    one.hold.set()
    one.shutdown()
    one.server_close()
    thread.join()
