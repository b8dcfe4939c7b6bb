"""The etcd of a first run over nodes: which node has it, what it needs, and what is left of it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from ports import free_port
from waiting import wait_for

from holdfast.agent.config import settings
from holdfast.agent.store import own_etcd
from holdfast.agent.store.base import StoreError
from holdfast.agent.store.etcd import open_etcd
from holdfast.agent.store.own_etcd import Place
from holdfast.worker import addresses


@pytest.mark.parametrize(("text", "host", "port"), [
    ("node0:29500", "node0", 29500), ("10.0.0.1", "10.0.0.1", 29400), ("node0", "node0", 29400),
    ("[fd00::1]:7", "fd00::1", 7), ("[fd00::1]", "fd00::1", 29400), ("fd00::1", "fd00::1", 29400),
])
def test_an_endpoint_is_a_host_and_a_port(text: str, host: str, port: int) -> None:
    place = own_etcd.parse(text, "job")
    assert (place.host, place.port, place.cluster) == (host, port, "run-job")
    joined = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    assert (place.name, place.url) == (joined, f"etcd://{joined}")
    assert place._replace(address="10.9.9.9").url == f"etcd://10.9.9.9:{port}"


@pytest.mark.parametrize("text", ["node0:0", "node0:65536", "node0:x", ":29400", "a b:1", "a/b"])
def test_what_is_no_endpoint_is_said_with_what_to_write(text: str) -> None:
    with pytest.raises(ValueError, match="--rdzv-endpoint .*: write HOST:PORT"):
        own_etcd.parse(text, "job")


def hosts(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]], own: set[str],
          route: str = "") -> None:
    """A machine with these names and addresses."""
    def look(host: str, *_: object, **__: object) -> list[tuple[object, ...]]:
        if host not in names:
            raise socket.gaierror("Name or service not known")
        return [(0, 0, 0, "", (one, 0)) for one in names[host]]

    monkeypatch.setattr(own_etcd.socket, "getaddrinfo", look)
    monkeypatch.setattr(addresses, "can_bind", lambda one: "" if one in own else "not here")
    monkeypatch.setattr(addresses, "route_to", lambda host: route)


def test_which_node_the_endpoint_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"n0": ["127.0.1.1"], "n1": ["10.0.0.2"], "both": ["127.0.0.1", "10.0.0.1"]}
    hosts(monkeypatch, names, {"127.0.1.1", "127.0.0.1", "10.0.0.1"}, route="10.0.0.1")
    # Debian has a host's own name at 127.0.1.1: the others find it by its address.
    found = {host: own_etcd.found(Place(host, 1, "r")).address for host in ("n0", "n1", "both")}
    assert found == {"n0": "10.0.0.1", "n1": "", "both": "10.0.0.1"}
    assert own_etcd.found(Place("unknown", 1, "r")).address == ""


@pytest.mark.parametrize(("host", "at"), [
    ("localhost", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "0.0.0.0"), ("::1", "::1"),
    ("n0", "127.0.1.1"),
])
def test_an_endpoint_that_no_other_node_reaches_is_refused(
    monkeypatch: pytest.MonkeyPatch, host: str, at: str
) -> None:
    route = "" if host == "n0" else "10.0.0.1"
    hosts(monkeypatch, {host: [at]}, {at}, route)
    with pytest.raises(StoreError, match=f"{at} is an address that no other node reaches"):
        own_etcd.found(Place(host, 29400, "r"))


class Members(BaseHTTPRequestHandler):
    """Answers as an etcd whose members have the server's names."""

    def do_POST(self) -> None:
        body = self.server.body  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture()
def listener() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Members)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(5.0)
    server.server_close()


@pytest.mark.parametrize(("body", "run"), [
    (b'{"members": [{"name": "run-night"}]}', "night"),
    (b'{"members": [{"name": "default"}]}', ""),
    (b'{"members": [{"name": "run-a"}, {"name": "run-b"}]}', ""),
    (b'{"members": [{}]}', ""), (b'{"members": 3}', ""), (b"[]", ""), (b"<html>", ""),
    (b"\xff" * 100000, ""),
])
def test_whose_etcd_listens_is_told_by_its_name(
    listener: HTTPServer, body: bytes, run: str
) -> None:
    listener.body = body  # type: ignore[attr-defined]
    assert own_etcd.keeper(Place("127.0.0.1", listener.server_port, "mine")) == run


def test_a_port_that_is_taken_is_named_with_who_has_it(
    listener: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_etcd.shutil, "which", lambda name: "/usr/bin/true")
    port = listener.server_port
    place = Place("n0", port, "mine", "127.0.0.1")
    for body, who in ((b"{}", "Address already in use: give"),
                      (b'{"members": [{"name": "run-night"}]}', "the etcd of run night is there")):
        listener.body = body  # type: ignore[attr-defined]
        with pytest.raises(StoreError, match=f"n0:{port}: .*{who}.* another port "
                           "with --rdzv-endpoint HOST:PORT"):
            own_etcd.OwnEtcd(place, tmp_path, lambda part, why: None)


def test_a_node_without_etcd_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StoreError, match=r"apt-get install etcd-server.*\[store\]"):
        own_etcd.OwnEtcd(Place("n0", 1, "r", "127.0.0.1"), tmp_path, lambda part, why: None)


def test_only_the_launcher_that_left_it_goes_on_with_what_is_there(tmp_path: Path) -> None:
    assert own_etcd.begin_anew(tmp_path, "7 boot 100")
    folder = tmp_path / own_etcd.FOLDER
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "data").mkdir()
    (tmp_path / "store.json").write_text("{}")
    assert not own_etcd.begin_anew(tmp_path, "7 boot 100") and (folder / "data").exists()
    assert own_etcd.begin_anew(tmp_path, "7 boot 200")  # the same pid, and another process
    assert not (folder / "data").exists() and not (tmp_path / "store.json").exists()
    own_etcd.forget(tmp_path)
    own_etcd.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_etcd_that_is_killed_is_started_again_with_its_data(tmp_path: Path) -> None:
    if own_etcd.shutil.which("etcd") is None:
        pytest.skip("etcd is missing (Debian package etcd-server)")
    place = Place("127.0.0.1", free_port(), "mine", "127.0.0.1")
    own_etcd.begin_anew(tmp_path, "x")
    died: list[str] = []
    etcd = own_etcd.OwnEtcd(place, tmp_path, lambda part, why: None)

    async def answers(but: int = 0) -> None:
        end_s = asyncio.get_running_loop().time() + 60.0
        while await asyncio.to_thread(own_etcd.keeper, place) != "mine" or died == [] and but:
            assert asyncio.get_running_loop().time() < end_s
            await asyncio.sleep(0.05)

    async def scene() -> None:
        watching = asyncio.create_task(etcd.watch(died.append))
        await answers()
        os.kill(etcd.pid, signal.SIGKILL)
        await answers(but=1)
        watching.cancel()

    try:
        etcd.start()
        asyncio.run(scene())
        assert len(died) == 1 and "ended with -9" in died[0]
        assert (tmp_path / own_etcd.FOLDER / "data" / "member").is_dir()
    finally:
        etcd.end()
    wait_for(lambda: own_etcd.keeper(place) == "")


def test_a_token_gives_each_run_a_password_of_its_own(tmp_path: Path) -> None:
    one, other = (own_etcd.password_of("word", run) for run in ("a", "b"))
    assert one == own_etcd.password_of("word", "a") != other and "word" not in one
    path = own_etcd.keep_password(tmp_path, one)
    assert (path.stat().st_mode & 0o777, path.read_text()) == (0o600, one + "\n")
    own_etcd.begin_anew(tmp_path, "x")
    assert path.exists()
    own_etcd.forget(tmp_path)
    assert not path.exists()
    with pytest.raises(StoreError, match="cannot be kept"):
        own_etcd.keep_password(tmp_path / "nowhere", one)


def test_with_a_token_nobody_without_it_reads_or_writes(tmp_path: Path) -> None:
    if own_etcd.shutil.which("etcd") is None:
        pytest.skip("etcd is missing (Debian package etcd-server)")
    password = own_etcd.password_of("word", "mine")
    place = Place("127.0.0.1", free_port(), "mine", "127.0.0.1", password)
    own_etcd.begin_anew(tmp_path, "x")
    etcd = own_etcd.OwnEtcd(place, tmp_path, lambda part, why: None)
    secrets = {"own": password, "others": "x" * 64}
    for name, secret in secrets.items():
        (tmp_path / name).mkdir()
        own_etcd.keep_password(tmp_path / name, secret)

    async def view(**more: str) -> str:
        """Why the store cannot be used by whoever has this."""
        config = settings.Store(url=place.url, cluster=place.cluster, **more)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        store = open_etcd(config, "a", folder, lambda: 5.0)
        end_s = asyncio.get_running_loop().time() + 60.0
        await store.refresh()
        while "no member" in store.view().problem and asyncio.get_running_loop().time() < end_s:
            await store.refresh()
        await store.close()
        return "" if store.view().up else store.view().problem

    async def scene() -> list[str]:
        files = [str(tmp_path / name / own_etcd.SECRET) for name in secrets]
        known = [await view(user=own_etcd.USER, password_file=file) for file in files]
        return [*known, await view()]

    try:
        for _ in range(2):  # as it was first, and after it was killed
            etcd.start()
            good, wrong, none = asyncio.run(scene())
            assert (good, "authentication failed" in wrong, "user" in none) == ("", True, True)
            etcd.end()
    finally:
        etcd.end()


def test_an_etcd_that_takes_no_password_never_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho \"$@\" >> calls\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setattr(own_etcd.shutil, "which", lambda name: str(program))
    monkeypatch.setattr(own_etcd, "LOCK_S", 2.0)  # it tells its call before, however busy
    own_etcd.begin_anew(tmp_path, "x")
    place = Place("127.0.0.1", free_port(), "mine", "127.0.0.1", "secret")
    etcd = own_etcd.OwnEtcd(place, tmp_path, lambda part, why: None)
    with pytest.raises(StoreError, match="takes no password"):
        etcd.start()
    assert etcd.pid == 0 and "127.0.0.1" not in (tmp_path / "rendezvous/calls").read_text()


def test_a_write_that_waits_for_a_slow_disk_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What costs etcd nothing is asked again soon; a password on its way to the disk is not."""
    monkeypatch.setattr(own_etcd, "ASK_S", 0.1)
    asked: list[str] = []

    class Slow(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(self.path)
            threading.Event().wait(0.0 if "member" in self.path else 3 * own_etcd.ASK_S)
            self.send_response(200)
            self.end_headers()

        def address_string(self) -> str:
            return ""  # a socket by name has none

        def log_message(self, *_: object) -> None:
            pass

    with socketserver.UnixStreamServer(str(tmp_path / "door"), Slow) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            own_etcd._lock_by(str(tmp_path / "door"), "secret")
        finally:
            server.shutdown()
            thread.join()
    assert asked[-3:] == ["/v3/auth/user/add", "/v3/auth/user/grant", "/v3/auth/enable"]
