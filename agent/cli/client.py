"""Finds the agents of this machine and asks them, over their Unix sockets.

Owns where sockets are (the node's, and one per private run) and what is said when nothing
answers.  The socket's permissions are the credential: no token is needed here.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from .text import Failure

NODE_RUNTIME = Path("/run/holdfast")
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 16 << 20
AGENTS_MAX = 64
RUNS_MAX = 4096


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))


class Agent(NamedTuple):
    """One agent's API socket."""

    path: Path

    def get(self, route: str) -> Any:
        """The parsed answer.  Raises OSError when nobody listens, Failure for an error answer."""
        return self._ask("GET", route, None)

    def post(self, route: str, body: Mapping[str, object]) -> Any:
        return self._ask("POST", route, json.dumps(body).encode())

    def _ask(self, method: str, route: str, body: bytes | None) -> Any:
        connection = _Connection(self.path)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, route, body, headers)
            response = connection.getresponse()
            raw = response.read(ANSWER_BYTES_MAX)
        except http.client.HTTPException as error:
            raise OSError(f"{self.path} does not speak HTTP: {error!r}") from error
        finally:
            connection.close()
        try:
            answer = json.loads(raw or b"null")
        except ValueError:
            answer = {"error": raw[:200].decode(errors="replace")}
        if response.status >= 400:
            said = answer if isinstance(answer, dict) else {}
            text = said.get("error") or f"{method} {route}: status {response.status}"
            raise Failure(f"{text}; set {said['set']}" if said.get("set") else text)
        return answer

    def address(self) -> str:
        """Where its page can be seen, "" if it has none."""
        try:
            return (self.path.parent / "address").read_text(encoding="utf-8")[:200].strip()
        except OSError:
            return ""


def places(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """The node agent's directory, and the one below which private runs have theirs."""
    if environ.get("HOLDFAST_RUNTIME_DIR"):
        own = Path(environ["HOLDFAST_RUNTIME_DIR"])
        return own, own
    base = Path(environ.get("XDG_RUNTIME_DIR") or f"/tmp/holdfast-{os.getuid()}") / "holdfast"
    return NODE_RUNTIME, base


def runtime_directories(environ: Mapping[str, str]) -> list[Path]:
    """Directories that may hold an api.sock: the node's first, then private runs', newest first."""
    node, base = places(environ)
    try:
        private = [path for path in base.iterdir() if (path / "api.sock").is_socket()]
        private.sort(key=lambda path: (path / "api.sock").stat().st_mtime, reverse=True)
    except OSError:
        private = []
    return [node, *private[:AGENTS_MAX]]


def reach(environ: Mapping[str, str] | None = None) -> list[tuple[Agent, dict[str, Any]]]:
    """Every agent that answers, with its status.  Raises Failure when none does."""
    environ = os.environ if environ is None else environ
    found, silent = [], []
    for directory in runtime_directories(environ):
        agent = Agent(directory / "api.sock")
        try:
            found.append((agent, agent.get("/api/v1/status")))
        except (FileNotFoundError, ConnectionRefusedError):
            continue  # none here, or one that has gone
        except PermissionError:
            silent.append(f"{agent.path} is not yours to read")
        except OSError as error:
            silent.append(f"{agent.path} does not answer: {error}")
    if found:
        return found
    if silent:
        raise Failure("; ".join(silent))
    node, base = places(environ)
    raise Failure(
        f"nothing runs here: no agent answers in {node}, nor below {base}. Start a job with "
        "`holdfast run` or `holdfast train`, or the node's agent with `holdfast agent`; one whose "
        "agent.runtime_dir is elsewhere is found with HOLDFAST_RUNTIME_DIR set to that"
        + _left_behind(environ)
    )


def _left_behind(environ: Mapping[str, str]) -> str:
    """How to ask the logs of the last run that had an agent of its own: nobody else tells of it."""
    base = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    runs = Path(environ.get("HOLDFAST_STATE_DIR") or f"{base}/holdfast") / "runs"
    try:
        with os.scandir(runs) as listing:
            known = [(one.stat().st_mtime, one.name) for one in islice(listing, RUNS_MAX)]
    except OSError:
        return ""
    logs = runs / max(known)[1] / "logs" if known else runs
    return f"\nThe last run has ended: `holdfast diagnose {logs}`" if logs.is_dir() else ""


def choose(
    found: Sequence[tuple[Agent, dict[str, Any]]], name: str | None
) -> tuple[Agent, dict[str, Any], str]:
    """The agent, its status and the run that `--run` names, or the only one that there is."""
    runs = {run["run"]: (agent, status) for agent, status in found for run in status["runs"]}
    if name is None and not runs:
        raise Failure("no run is registered here")
    if name is None:
        going_on = {run["run"] for _, status in found for run in status["runs"]
                    if run.get("state") != "done"} or set(runs)
        if len(going_on) != 1:
            names = ", ".join(sorted(going_on)) or "none"
            raise Failure(f"which run? choose with --run NAME (there are: {names})")
        name = going_on.pop()
    if name not in runs:
        raise Failure(f"no run {name!r} here (there are: {', '.join(sorted(runs)) or 'none'})")
    return (*runs[name], name)


def run_route(run: str, verb: str) -> str:
    return f"/api/v1/runs/{quote(run, safe='')}/{verb}"


def node_route(node: str, verb: str) -> str:
    return f"/api/v1/nodes/{quote(node, safe='')}/{verb}"
