"""A stand-in for Grafana's HTTP API, after the documents of release 11: folders, dashboards, data
sources; versions, conflicts, and the answers to a token that may not.  No Grafana server."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "glsa_of_this_test"
PROMETHEUS = {"id": 1, "uid": "prom-1", "name": "Prometheus", "type": "prometheus",
              "isDefault": True}


class Grafana:
    """What it holds, what was asked of it, and how it may fail."""

    def __init__(self) -> None:
        self.folders: list[dict[str, Any]] = []
        self.boards: dict[str, dict[str, Any]] = {}  # uid -> {"dashboard", "meta"}
        self.sources: list[dict[str, Any]] = [PROMETHEUS]
        self.asked: list[tuple[str, str]] = []
        self.forbidden: set[str] = set()  # paths that this token may not use
        self.list_is_cut = False  # the list of folders ends before ours
        self.page: tuple[int, str] | None = None  # answers everything with this page instead
        self.before_save = lambda: None

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in self.forbidden:
            return 403, {"message": "You'll need additional permissions to perform this action."}
        match method, path.strip("/").split("/"):
            case "GET", ["api", "datasources"]:
                return 200, self.sources
            case "GET", ["api", "folders"]:
                return 200, [] if self.list_is_cut else self.folders
            case "GET", ["api", "folders", uid]:
                found = [one for one in self.folders if one["uid"] == uid]
                return (200, found[0]) if found else (404, {"message": "folder not found"})
            case "POST", ["api", "folders"]:
                if any(one["uid"] == body["uid"] for one in self.folders):
                    return 409, {"message": "a folder with that uid already exists"}
                self.folders.append({"id": len(self.folders) + 1, **body})
                return 200, self.folders[-1]
            case "GET", ["api", "dashboards", "uid", uid]:
                if uid not in self.boards:
                    return 404, {"message": "Dashboard not found"}
                return 200, self.boards[uid]
            case "POST", ["api", "dashboards", "db"]:
                return self._save(body)
        return 404, {"message": "Not found"}

    def _save(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.before_save()
        board, uid = dict(body["dashboard"]), body["dashboard"]["uid"]
        kept = self.boards.get(uid, {"dashboard": {"version": 0}})["dashboard"]
        if not body["overwrite"] and uid in self.boards and board.get("version") != kept["version"]:
            return 412, {"status": "version-mismatch",
                         "message": "The dashboard has been changed by someone else"}
        if body["folderUid"] and all(one["uid"] != body["folderUid"] for one in self.folders):
            return 400, {"message": "folder not found"}
        board |= {"id": kept.get("id") or len(self.boards) + 1, "version": kept["version"] + 1}
        self.boards[uid] = {"dashboard": board, "meta": {"folderUid": body["folderUid"]}}
        return 200, {"id": board["id"], "uid": uid, "status": "success",
                     "version": board["version"]}


@contextlib.contextmanager
def grafana(prefix: str = "") -> Iterator[tuple[Grafana, str]]:
    """(what it holds, its address), behind a proxy's path `prefix`."""
    held = Grafana()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            path = self.path.removeprefix(prefix)
            held.asked.append((self.command, path))
            code, answer = 200, ""
            if held.page is not None:
                code, text = held.page
            else:
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    code, answer = 401, {"message": "Invalid API key"}
                else:
                    code, answer = held.answer(self.command, path, body)
                text = json.dumps(answer)
            self.send_response(code)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield held, f"http://127.0.0.1:{server.server_address[1]}{prefix}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
