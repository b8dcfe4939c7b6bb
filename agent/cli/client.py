"""Finds the agents of this machine and asks them, over their Unix sockets.

Owns where sockets are (the node's, and one per private run), whose answers are believed, and what
is said when nothing answers.  The socket's permissions are the credential: no token is needed here.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import socket
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar
from urllib.parse import quote

from holdfast.worker import peers
from holdfast.worker.exits import FAILED

from ..system.regular import read_regular
from .text import Failure, harmless

NODE_RUNTIME = Path("/run/holdfast")
TIMEOUT_S = 5.0
ASKED_AT_ONCE = 16  # agents
ANSWER_BYTES_MAX = 16 << 20
AGENTS_MAX = 64
RUNS_MAX = 4096
ADDRESS_MAX = 200
P = ParamSpec("P")
T = TypeVar("T")


class Stranger(Failure):
    """What answers, or would, is neither this user's nor an agent's that everybody believes."""


class Malformed(Failure):
    """An answer that is none: too long, too deep, or not of the form that this version knows."""


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path, self._timeout_s = path, timeout_s

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._timeout_s)
        self.sock.connect(str(self._path))
        try:
            peers.check_peer(self.sock, str(self._path), os.environ)
        except peers.Stranger as stranger:
            raise Stranger(str(stranger)) from stranger


class Answering(Protocol):
    """An agent, or what one has left."""

    def get(self, route: str) -> Any:
        """The parsed answer."""


class Agent(NamedTuple):
    """One agent's API socket, and how long it may be silent."""

    path: Path
    timeout_s: float = TIMEOUT_S

    def get(self, route: str) -> Any:
        """The parsed answer.  Raises OSError when nobody listens, Failure for an error answer."""
        return self._ask("GET", route, None)

    def post(self, route: str, body: Mapping[str, object]) -> Any:
        return self._ask("POST", route, json.dumps(body).encode())

    def _ask(self, method: str, route: str, body: bytes | None) -> Any:
        connection = _Connection(self.path, self.timeout_s)
        try:
            headers = {"Content-Type": "application/json"} if body else {}
            connection.request(method, route, body, headers)
            response = connection.getresponse()
            raw = response.read(ANSWER_BYTES_MAX + 1)
        except http.client.HTTPException as error:
            raise OSError(f"{self.path} does not speak HTTP: {error!r}") from error
        finally:
            connection.close()
        if len(raw) > ANSWER_BYTES_MAX:
            raise Malformed(f"{self.path}: its answer is longer than {ANSWER_BYTES_MAX} bytes")
        try:
            answer = json.loads(raw or b"null")
        except (ValueError, RecursionError) as error:
            if response.status < 400:
                raise Malformed(f"{self.path}: its answer is no JSON: {error}") from error
            answer = {"error": raw[:200].decode(errors="replace")}
        if response.status >= 400:
            said = answer if isinstance(answer, dict) else {}
            text = said.get("error") or f"{method} {route}: status {response.status}"
            raise Failure(f"{text}; set {said['set']}" if said.get("set") else text)
        return answer

    def address(self) -> str:
        """Where its page can be seen, "" if it has none."""
        try:
            raw = read_regular(self.path.parent / "address", ADDRESS_MAX, follow=False)
        except (OSError, ValueError):
            return ""
        return raw.decode(errors="replace").strip()


def owned(path: Path, environ: Mapping[str, str]) -> None:
    """Raises Stranger where another user could have put this, or could put something into it: the
    rule of the launcher's own line.  A path that is not there is nobody's."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not peers.believed(found.st_uid, environ):
        raise Stranger(f"{path} belongs to uid {found.st_uid}, which is neither root, you nor the "
                       "agent's user (HOLDFAST_AGENT_USER)")
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise Stranger(f"{path} may be written by everybody: chmod o-w {path}")


def asking(command: Callable[P, T], code: int = FAILED) -> Callable[P, T]:
    """A command that tells what agents answer.  Whatever they answer, it ends in a sentence."""

    @functools.wraps(command)
    def bounded(*given: P.args, **named: P.kwargs) -> T:
        try:
            return command(*given, **named)
        except BrokenPipeError:
            raise  # whoever reads our words has gone: no agent's fault
        except OSError as error:
            raise Failure(f"the agent does not answer any more: {error}", code) from error
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError,
                OverflowError) as error:
            raise Malformed("an agent's answer is not of the form that this version knows "
                            f"({type(error).__name__}: {str(error)[:100]}): is it of another "
                            "release?", code) from error

    return bounded


def places(environ: Mapping[str, str]) -> tuple[Path, Path]:
    """The node agent's directory, and the one below which private runs have theirs."""
    if environ.get("HOLDFAST_RUNTIME_DIR"):
        own = Path(environ["HOLDFAST_RUNTIME_DIR"])
        return own, own
    base = Path(environ.get("XDG_RUNTIME_DIR") or f"/tmp/holdfast-{os.getuid()}") / "holdfast"
    return NODE_RUNTIME, base


def node_socket(environ: Mapping[str, str]) -> Path:
    """Where the node's agent answers, for what no run's own agent does."""
    return places(environ)[0] / "api.sock"


def runtime_directories(environ: Mapping[str, str], refused: list[str]) -> list[Path]:
    """Directories that may hold an api.sock: the node's first, then private runs', newest first.
    Why one is passed by is added to `refused`."""
    node, base = places(environ)
    private: list[tuple[float, Path]] = []
    try:
        for folder in (base.parent, base) if base != node else (base,):
            owned(folder, environ)
        for path in base.iterdir():
            try:
                found = os.lstat(path / "api.sock")
                if stat.S_ISSOCK(found.st_mode):
                    owned(path, environ)
                    owned(path / "api.sock", environ)
                    private.append((found.st_mtime, path))
            except OSError:
                continue  # no agent's, or it has gone
            except Stranger as stranger:
                refused.append(str(stranger))
    except OSError:
        pass
    except Stranger as stranger:
        refused.append(str(stranger))
    private.sort(reverse=True)
    return [node, *(path for _, path in private[:AGENTS_MAX])]


def reach(
    environ: Mapping[str, str] | None = None, timeout_s: float = TIMEOUT_S
) -> list[tuple[Agent, dict[str, Any]]]:
    """Every agent that answers, with its status.  Raises Failure when none does.  They are asked at
    once: one that hangs costs its time, and not the others' as well."""
    environ = os.environ if environ is None else environ
    refused: list[str] = []
    agents = [Agent(folder / "api.sock", timeout_s)
              for folder in runtime_directories(environ, refused)]
    with ThreadPoolExecutor(max(1, min(ASKED_AT_ONCE, len(agents)))) as pool:
        answers = list(pool.map(lambda agent: _asked(agent, environ), agents))
    found = [(agent, answer) for agent, answer in zip(agents, answers) if isinstance(answer, dict)]
    refused += [str(answer) for answer in answers if isinstance(answer, Stranger)]
    silent = [answer for answer in answers if isinstance(answer, str) and answer]
    for why in refused[:AGENTS_MAX] if found else ():
        print(f"holdfast: passed by: {harmless(why)}", file=sys.stderr)
    silent += refused
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


def _asked(agent: Agent, environ: Mapping[str, str]) -> dict[str, Any] | Stranger | str:
    """An agent's status, or whose socket it is, or why there is none; "" where no agent is."""
    try:
        owned(agent.path, environ)
        return _status(agent)
    except (FileNotFoundError, ConnectionRefusedError):
        return ""  # none here, or one that has gone
    except Stranger as stranger:
        return stranger
    except PermissionError:
        return f"{agent.path} is not yours to read"
    except OSError as error:
        return f"{agent.path} does not answer: {error}"
    except Failure as failure:
        return str(failure)


def _status(agent: Agent) -> dict[str, Any]:
    """Its status, as far as its form decides what is asked next."""
    answer = agent.get("/api/v1/status")
    if not isinstance(answer, dict) or not isinstance(answer.get("node"), str) or not (
        isinstance(answer.get("runs"), list)
        and all(isinstance(run, dict) and isinstance(run.get("run"), str) for run in answer["runs"])
    ):
        raise Malformed(f"{agent.path}: its answer is no agent's status")
    return answer


def states(environ: Mapping[str, str]) -> Path:
    """Where runs with an agent of their own keep their state, a folder each."""
    base = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(environ.get("HOLDFAST_STATE_DIR") or f"{base}/holdfast") / "runs"


def state_folder(environ: Mapping[str, str], run: str) -> Path:
    """Where a run's own agent kept its state here: of a run over nodes each has its own, for
    they may share a home.  The newer one where a name was both."""
    folders = [states(environ) / name for name in (run, f"{run}@{socket.gethostname()}")]
    known = [(_written_s(folder), folder) for folder in folders if folder.is_dir()]
    return max(known)[1] if known else folders[0]


def _written_s(folder: Path) -> float:
    """When its agent began or last wrote.  Whoever reads the journal changes the folder as well:
    SQLite puts files of its own beside it."""
    times = [0.0]
    for name in ("lock", "journal.db"):
        with contextlib.suppress(OSError):
            times.append((folder / name).stat().st_mtime)
    return max(times)


def _left_behind(environ: Mapping[str, str]) -> str:
    """How to ask about the last run that had an agent of its own."""
    runs = states(environ)
    try:
        with os.scandir(runs) as listing:
            known = [(_written_s(Path(one.path)), one.name) for one in islice(listing, RUNS_MAX)
                     if one.name.partition("@")[2] in ("", socket.gethostname())]
    except OSError:
        return ""
    if not known:
        return ""
    name = max(known)[1]
    folder, name = runs / name, name.partition("@")[0]
    logs = folder / "logs"
    asks = [f"`holdfast diagnose {logs}`"] if logs.is_dir() else []
    if (folder / "journal.db").is_file():
        asks += [f"`holdfast incidents --run {name}`", f"`holdfast ledger --run {name}`"]
    return f"\nThe last run has ended: {', '.join(asks)}" if asks else ""


A = TypeVar("A", bound=Answering)


def choose(
    found: Sequence[tuple[A, dict[str, Any]]], name: str | None
) -> tuple[A, dict[str, Any], str]:
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
