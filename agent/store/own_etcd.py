"""The store of a first run over nodes: an etcd of one member, a child of the agent on one of them.

Owns which node that is, the child, its folder and its end, and that nothing an earlier run of the
name left is taken for this one's.  It ends with its run; a store that outlives a node is set up
under [store].
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import http.client
import ipaddress
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from holdfast.worker import addresses

from ..config.store import HOST_PORT
from ..peers.remembered import FILE as PEERS_FILE
from ..system import die_with_parent
from .base import StoreError
from .identity import FILE

FLAG = "--rdzv-endpoint"
PORT = 29400  # torchrun's, where the flag names none
FAR = "192.0.2.1"  # of nobody, by RFC 5737: which address has the route to elsewhere
FOLDER, LAUNCHER, LOG = "rendezvous", "launcher", "etcd.log"
# A member must have an address for others of its cluster.  A socket in a folder of this user's own
# is one that nobody else reaches; by its bare name it is never too long for one.
PEER = "unix://peer:1"
DOOR, LOCKED, SECRET = "client:1", "locked", "rendezvous.password"
USER = "root"  # etcd's own name of who may do all
LOCK_S = 20.0  # for its first start; a slow disk takes seconds
PREFIX = "run-"  # of the cluster's name and the member's
END_S = 2.0
LOOK_S, LOCK_LOOK_S = 0.25, 0.02
RESTART_S = 1.0
ASK_S = 1.0  # for what costs etcd nothing; its writes may wait for a disk
ANSWER_MAX = 1 << 16
# Of a static line, whose --master-port is that of the ranks' own store, the two are taken for one.
ANOTHER_PORT = (f"give this run another port with {FLAG} HOST:PORT, the same on all nodes "
                "(--master-port is that of the ranks' own store)")
HOW_TO_GET = ("install it on this node (Debian, Ubuntu: apt-get install etcd-server), or set url = "
              '"etcd://HOST:2379,..." under [store] on all nodes')


class Place(NamedTuple):
    """Where the store of a run is, as the caller named it to all nodes."""

    host: str
    port: int
    run: str
    address: str = ""  # that this node listens at; "" where the host is another one
    password: str = ""  # "": whoever reaches it may read and write

    @property
    def name(self) -> str:
        return _joined(self.host, self.port)

    @property
    def cluster(self) -> str:
        """Of each run its own: agents of two runs on one node never meet in one."""
        return PREFIX + self.run

    @property
    def url(self) -> str:
        return f"etcd://{_joined(self.address or self.host, self.port)}"


def _joined(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def parse(text: str, run: str) -> Place:
    """HOST or HOST:PORT.  ValueError says what to write."""
    whole = text if HOST_PORT.fullmatch(text) else _joined(text.strip("[]"), PORT)
    match = HOST_PORT.fullmatch(whole)
    host = match[1].strip("[]") if match is not None else ""
    if match is None or not 0 < int(match[2]) < 65536 or (":" in host and not _is_address(host)):
        raise ValueError(f"{FLAG} {text[:80]!r}: write HOST:PORT, the same on all nodes")
    return Place(host, int(match[2]), run)


def found(place: Place) -> Place:
    """With this node's address where the host is this node.  StoreError where no other node would
    reach it there."""
    own = [one for one in _resolved(place.host) if not addresses.can_bind(one)]
    far = [one for one in own if not _is_local(one)]
    if own and not far and place.host not in (*own, "localhost"):
        # A name that this node's /etc/hosts gives to loopback, as Debian does with its own.
        far = [one for one in (addresses.route_to(FAR),) if one and not _is_local(one)]
    if own and not far:
        raise StoreError(f"{FLAG} {place.name}: {own[0]} is an address that no other node "
                         "reaches: name one of this node that all of them do")
    return place._replace(address=far[0] if far else "")


def _resolved(host: str) -> list[str]:
    try:
        rows = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(row[4][0]) for row in rows]


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_local(address: str) -> bool:
    known = ipaddress.ip_address(address.partition("%")[0])
    return known.is_loopback or known.is_unspecified


def password_of(token: str, run: str) -> str:
    """What the run's etcd asks for: made of the token, and it gives none of it away."""
    key = token.encode("utf-8", "surrogateescape")
    return hmac.new(key, f"etcd of run {run}".encode(), hashlib.sha256).hexdigest()


def keep_password(state: Path, password: str) -> Path:
    """The file with it, for this user alone."""
    path = state / SECRET
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(fd, "w") as file:
            os.fchmod(fd, 0o600)
            file.write(password + "\n")
    except OSError as error:
        raise StoreError(f"{path}: {error.strerror}: the password of the run's etcd cannot be "
                         "kept; make room or mend the disk") from error
    return path


def keeper(place: Place, limit_s: float = ASK_S) -> str:
    """Which run's etcd listens there; "" where none of ours does.  Waits for it that long."""
    request = urllib.request.Request(
        f"http://{_joined(place.address or place.host, place.port)}/v3/cluster/member/list", b"{}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=limit_s) as answer:
            members = json.loads(answer.read(ANSWER_MAX))["members"]
        names = [str(one["name"]) for one in members]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    return names[0][len(PREFIX):] if len(names) == 1 and names[0].startswith(PREFIX) else ""


def begin_anew(state: Path, launcher: str) -> bool:
    """Forgets what an earlier launcher's run of this name left, on whatever node; whether it did.

    `launcher` is one process: an agent that it starts again goes on with what is there."""
    folder = state / FOLDER
    mark = folder / LAUNCHER
    with contextlib.suppress(OSError):
        if mark.read_text() == launcher:
            return False
    _forget_data(state)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark.write_text(launcher)
    return True


def forget(state: Path) -> None:
    """Leaves nothing behind: the run has ended, and its store with it."""
    _forget_data(state)
    (state / SECRET).unlink(missing_ok=True)
    (state / PEERS_FILE).unlink(missing_ok=True)


def _forget_data(state: Path) -> None:
    shutil.rmtree(state / FOLDER, ignore_errors=True)
    (state / FILE).unlink(missing_ok=True)


class OwnEtcd:
    """The child.  It dies with the agent, and is started again when it ends by itself."""

    def __init__(
        self, place: Place, state: Path, on_error: Callable[[str, BaseException | str], None],
    ) -> None:
        """StoreError says what this node lacks, or who has the port."""
        self._place, self._folder, self._on_error = place, state / FOLDER, on_error
        self._process: subprocess.Popen[bytes] | None = None
        self._binary = shutil.which("etcd") or ""
        if not self._binary:
            raise StoreError("a run over nodes without [store] keeps its state in an etcd that "
                             f"this node starts, and no etcd is on its PATH: {HOW_TO_GET}")
        why = _taken(place)
        if why:
            other = keeper(place)
            who = f": the etcd of run {other} is there" if other else ""
            raise StoreError(f"{FLAG} {place.name}: {why}{who}: {ANOTHER_PORT}")

    @property
    def pid(self) -> int:
        """0 while there is none."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """One that cannot be started is tried again by watch().  StoreError where it does not take
        the password: then it never listens to the network."""
        if self._place.password and not (self._folder / LOCKED).exists():
            self._lock(self._place.password)
        self._spawn(f"http://{_joined(self._place.address, self._place.port)}")

    def _lock(self, password: str) -> None:
        """Sets the password while only a socket in the folder of this user leads to it."""
        self._spawn(f"unix://{DOOR}")
        try:
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By this name its path is never too long for a socket.
                _lock_by(f"/proc/self/fd/{folder}/{DOOR}", password)
            finally:
                os.close(folder)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreError(f"the run's etcd takes no password: {error or 'no answer in time'}: "
                             f"{self._last_words()}") from error
        finally:
            self.end()
        (self._folder / LOCKED).touch(mode=0o600)

    def _spawn(self, here: str) -> None:
        name = self._place.cluster
        command = [
            self._binary, "--name", name, "--data-dir", "data",
            "--listen-client-urls", here, "--advertise-client-urls", here,
            "--listen-peer-urls", PEER, "--initial-advertise-peer-urls", PEER,
            "--initial-cluster", f"{name}={PEER}", "--logger", "zap", "--log-level", "warn",
            "--auto-compaction-mode", "revision", "--auto-compaction-retention", "1000"]
        environ = {key: value for key, value in os.environ.items() if not key.startswith("ETCD")}
        if platform.machine() == "aarch64":
            environ["ETCD_UNSUPPORTED_ARCH"] = "arm64"  # before 3.5 it does not start without
        try:
            with open(self._folder / LOG, "ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()),
                     *command],
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ,
                    cwd=self._folder)
        except OSError as error:
            self._process = None
            self._on_error("rendezvous", f"the run's etcd cannot be started: {error}")

    async def watch(self, died: Callable[[str], None]) -> None:
        """Starts it again when it ends, for ever; `died` is told why, each time."""
        while True:
            if self._process is None or self._process.poll() is not None:
                code = self._process.returncode if self._process is not None else None
                why = f"the run's etcd ended with {code}: {self._last_words()}"
                self._on_error("rendezvous", why)
                died(why)
                await asyncio.sleep(RESTART_S)
                self.start()
            await asyncio.sleep(LOOK_S)

    def _last_words(self) -> str:
        try:
            with open(self._folder / LOG, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - 4096))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            lines = []
        return lines[-1][:300] if lines else "it left no log"

    def end(self) -> None:
        """Bounded; its data goes with forget()."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


class _Door(http.client.HTTPConnection):
    """HTTP over a socket of the file system."""

    def __init__(self, path: str, limit_s: float) -> None:
        super().__init__("localhost", timeout=limit_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _lock_by(path: str, password: str) -> None:
    """A user for the agents, and nobody else from then on.  Raises OSError or ValueError."""
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            _asked(path, "cluster/member/list", {}, ASK_S)
            break
        except OSError:
            if time.monotonic() > end_s:
                raise
        time.sleep(LOCK_LOOK_S)
    with contextlib.suppress(FileExistsError):
        _asked(path, "auth/user/add", {"name": USER, "password": password}, LOCK_S)
    _asked(path, "auth/user/grant", {"user": USER, "role": USER}, LOCK_S)
    _asked(path, "auth/enable", {}, LOCK_S)


def _asked(path: str, call: str, body: dict[str, str], limit_s: float) -> None:
    door = _Door(path, limit_s)
    try:
        door.request("POST", f"/v3/{call}", json.dumps(body))
        answer = door.getresponse()
        said = answer.read(ANSWER_MAX).decode(errors="replace")
        if "already exists" in said:
            raise FileExistsError(said)
        if answer.status != http.client.OK:
            raise ValueError(f"{call}: {said[:200]}")
    finally:
        door.close()


def _taken(place: Place) -> str:
    """Why nothing can listen there, "" where it can."""
    family = socket.AF_INET6 if ":" in place.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((place.address, place.port))
            sock.listen()
        except OSError as error:
            return error.strerror or str(error)
    return ""
