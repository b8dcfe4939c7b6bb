"""Passwords, certificates, versions and answers that are not as they should be: each is said with
what to set, nothing hangs, and nothing is written."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import ClientConnectorDNSError
from aiohttp.client_reqrep import ConnectionKey
from etcd_servers import etcd
from ports import free_ports
from waiting import until

from holdfast.agent.cli import main
from holdfast.agent.cli.store import findings
from holdfast.agent.config import settings
from holdfast.agent.config import store as address
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.metrics.families import Exposition
from holdfast.agent.store import etcd_gateway
from holdfast.agent.store.base import StoreError
from holdfast.agent.store.etcd import open_etcd
from holdfast.agent.web.status import status

LONGEST_CALL_S = 8.0  # the store's own limit, and as much for a busy machine


def opened(tmp_path, **keys):
    folder = tmp_path / "node"
    folder.mkdir(exist_ok=True)
    return open_etcd(settings.Store(**keys), "a", folder, lambda: 5.0)


def problem_of(tmp_path, **keys) -> str:
    """What a store says that cannot be used; within the limit."""
    async def ask() -> str:
        store = opened(tmp_path, **keys)
        try:
            begun_s = time.monotonic()
            await store.refresh()
            assert not store.view().up and time.monotonic() - begun_s < LONGEST_CALL_S
            with pytest.raises(StoreError):
                await store.put(StoreWrite("run/m", 0, b"never"))
            return store.view().problem
        finally:
            await store.close()

    return asyncio.run(ask())


def secret(tmp_path, text: str):
    file = tmp_path / f"password-{text}"
    file.write_text(text + "\n")
    file.chmod(0o600)
    return str(file)


def test_a_user_with_a_password(tmp_path):
    async def good(cluster, **keys):
        store = opened(tmp_path, **keys)
        watching = asyncio.create_task(store.watch(lambda why: None))
        try:
            await until(lambda: store.view().up)
            assert await store.put(StoreWrite("run/m", 0, b"one")) == 1
            (member,) = cluster.members
            member.kill()  # tokens live in its memory alone: the old one is none any more
            cluster.start()
            await until(lambda: member.ask("/v3/maintenance/status").get("leader"))
            await until(lambda: store.view().up)
            store.gateway._token = "one that ran out"
            assert await store.put(StoreWrite("run/m", 1, b"two")) == 2
            other = opened(tmp_path, **keys)
            await other.refresh()
            await other.put(StoreWrite("run/m", 2, b"three"))
            await until(lambda: store.view().docs.get("run/m").body == b"three")
            await other.close()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()

    with etcd(tmp_path / "etcd", 1) as cluster:
        for command in (("user", "add", "root:rootpass"), ("user", "grant-role", "root", "root"),
                        ("role", "add", "holdfast"),
                        ("role", "grant-permission", "holdfast", "readwrite", "--prefix=true",
                         "/holdfast/main/"),
                        ("user", "add", "agent:secret"), ("user", "add", "stranger:secret"),
                        ("user", "grant-role", "agent", "holdfast")):
            cluster.ctl(*command)
        with_user = {"url": cluster.url, "user": "agent"}
        right = secret(tmp_path, "secret")
        assert "take store.user out, or run etcdctl auth enable" in problem_of(
            tmp_path, password_file=right, **with_user)
        cluster.ctl("auth", "enable")
        wrong = problem_of(tmp_path, password_file=secret(tmp_path, "guess"), **with_user)
        assert "set store.user and store.password_file to what etcd has for 'agent'" in wrong
        assert "guess" not in wrong
        assert "set store.user and store.password_file" in problem_of(tmp_path, url=cluster.url)
        assert "grant-permission ROLE readwrite --prefix=true /holdfast/" in problem_of(
            tmp_path, url=cluster.url, user="stranger", password_file=right)
        asyncio.run(asyncio.wait_for(good(cluster, password_file=right, **with_user), 60.0))


def authority(tmp_path, name: str):
    """A new one, and a certificate of 127.0.0.1 that it signed."""
    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=tmp_path, check=True, capture_output=True)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", f"{name}-ca.key", "-out", f"{name}-ca.pem", "-subj", f"/CN={name}",
            "-days", "2")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=member")
    (tmp_path / f"{name}.ext").write_text(
        "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-ca.pem", "-CAkey",
            f"{name}-ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext",
            "-out", f"{name}.pem")
    return [str(tmp_path / f"{name}{end}") for end in ("-ca.pem", ".pem", ".key")]


def test_a_certificate_with_a_common_name_is_told_as_that():
    """What etcd 3.4 answers it with, once it has users; no JSON."""
    said = b"CommonName of client sending a request against gateway will be ignored and not used\n"
    with pytest.raises(StoreError, match="set store.cert_file to one of none"):
        etcd_gateway._decoded("https://m1:2379", "/v3/auth/authenticate", said)


def test_a_name_that_nobody_resolves_is_told_as_that():
    error = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    key = ConnectionKey("nosuchhost", 2379, False, True, None, None, None)
    assert etcd_gateway._why(ClientConnectorDNSError(key, error)) == "Name or service not known"


def test_certificates_of_both_sides(tmp_path):
    ca, certificate, key = authority(tmp_path, "ours")
    foreign_ca, foreign, foreign_key = authority(tmp_path, "foreign")
    tls = ("--cert-file", certificate, "--key-file", key, "--trusted-ca-file", ca,
           "--client-cert-auth")

    async def good(url):
        store = opened(tmp_path, url=url, ca_file=ca, cert_file=certificate, key_file=key)
        watching = asyncio.create_task(store.watch(lambda why: None))
        try:
            await until(lambda: store.view().up)
            await store.put(StoreWrite("lease/m", 0, b"a"))
            assert await store.put(StoreWrite("run/m", 0, b"one", lease="m")) == 1
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await store.close()

    with etcd(tmp_path / "etcd", 1, tls, scheme="https") as cluster:
        url = cluster.url.replace("etcd://", "etcds://")
        problem = ""
        deadline_s = time.monotonic() + 60.0
        while problem != "good" and time.monotonic() < deadline_s:  # until it has a leader
            try:
                asyncio.run(asyncio.wait_for(good(url), 30.0))
                problem = "good"
            except (StoreError, TimeoutError, AssertionError) as error:
                problem = str(error)
        assert problem == "good"
        unsigned = problem_of(tmp_path, url=url, ca_file=foreign_ca, cert_file=certificate,
                              key_file=key)
        assert "set store.ca_file to the certificates that signed its own" in unsigned
        assert "no member of etcd answers" in problem_of(tmp_path, url=url, ca_file=ca)
        assert "no member of etcd answers" in problem_of(
            tmp_path, url=url, ca_file=ca, cert_file=foreign, key_file=foreign_key)
        assert "no member of etcd answers" in problem_of(tmp_path, url=cluster.url)


@asynccontextmanager
async def answering(respond):
    """A server that says `respond(path)` to every request: (status, body), or never anything."""
    async def serve(reader, writer):
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            answer = respond(head.split()[1].decode())
            if answer is None:
                await asyncio.sleep(60.0)
            status, body = answer
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
                         % (status, len(body)) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, TypeError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "etcd://127.0.0.1:%d" % server.sockets[0].getsockname()[1]
    finally:
        server.close()


def version(text: str):
    return lambda path: (200, json.dumps({"etcdserver": text}).encode())


@pytest.mark.parametrize(("respond", "said"), [
    (version("3.3.27"), "is etcd 3.3.27: install 3.4 or newer there"),
    (version("2.3.8"), "is etcd 2.3.8: install 3.4 or newer there"),
    (lambda path: (200, b"<html>a page</html>"), "set store.url to etcd's client port"),
    (lambda path: (200, b'{"version": "1.27"}'), "is no etcd"),
    (lambda path: (200, b"[" * 100_000), "set store.url to etcd's client port"),
    (lambda path: (200, b'{"etcdserver": "3.5.0", "kvs": 7, "header": []}'), "store: "),
    (lambda path: (503, b'{"message": "etcdserver: request timed out", "code": 14}')
        if path != "/version" else version("3.5.9")(path), "request timed out"),
    (lambda path: (429, b"slow down"), "set store.url to etcd's client port"),
    (lambda path: None, "no answer in time"),
    (lambda path: None if path != "/version" else version("3.6.1")(path), "no answer in time"),
], ids=range(10))
def test_what_is_no_etcd_or_does_not_answer_is_named(tmp_path, respond, said):
    async def scenario():
        async with answering(respond) as url:
            store = opened(tmp_path, url=url)
            await asyncio.wait_for(store.refresh(), 60.0)  # it has an end of its own
            assert not store.view().up and said in store.view().problem
            assert url.removeprefix("etcd://") in store.view().problem
            await store.close()

    asyncio.run(scenario())


def test_nobody_there(tmp_path):
    ports = free_ports(2)
    url = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports)
    problem = problem_of(tmp_path, url=url)
    assert all(f"127.0.0.1:{port}: Connection refused" in problem for port in ports)


@pytest.mark.parametrize(("lines", "said"), [
    ('url = "10.0.0.1:2379"', "does not begin with etcd://"),
    ('url = "etcd://10.0.0.1"', "is no HOST:PORT"),
    ('url = "etcd://a:2379,a:2379"', "once"),
    ('url = "etcd://a:99999"', "is no HOST:PORT"),
    ('url = "etcd://a:2379"\ncluster = "a/b"', "letters, digits"),
    ('url = "etcd://a:2379"\nuser = "x"', "store.password_file is not set"),
    ('url = "etcd://a:2379"\nca_file = "/x"', "write etcds:// in place of etcd://"),
    ('url = "etcds://a:2379"\nkey_file = "/x"', "store.key_file without store.cert_file"),
    ('url = "etcds://a:2379"\nca_file = "/nowhere"', "/nowhere: No such file"),
    ('url = "etcd://a:2379"\nuser = "x"\npassword_file = "/nowhere"', "/nowhere: No such file"),
    ('urls = "etcd://a:2379"', "did you mean url?"),
])
def test_a_bad_setting_is_said_with_what_to_set(tmp_path, lines, said):
    file = tmp_path / "agent.toml"
    file.write_text(f"[store]\n{lines}\n")
    with pytest.raises(ConfigError, match="agent.toml|/nowhere") as caught:
        load(file, serves=True)
    assert said in str(caught.value)


def test_a_password_that_others_may_read_is_refused(tmp_path):
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        address.read_password(str(file))


def test_a_whole_agent_says_what_is_wrong_and_goes_on_when_it_is_back(agent, tmp_path):
    async def scenario(cluster):
        async with agent(store__url=cluster.url) as (daemon, node):
            assert not node.settings.single_node
            await until(lambda: node.seen and node.seen[-1].store.up)
            assert all(one.store.up for one in node.seen)  # from the first step on
            assert await daemon.store.put(StoreWrite("run/m", 0, b"one")) == 1
            text = Exposition(daemon.state).text().decode()
            assert 'holdfast_store_requests_total{call="txn",outcome="ok"}' in text
            assert not daemon.state.disk_problem  # which would stop all that outlives the node
            (member,) = cluster.members
            member.kill()
            await until(lambda: not node.seen[-1].store.up)
            told = status(daemon.state)
            assert not told["store_up"] and member.address in told["store_problem"]
            assert "start etcd there, or set store.url" in told["store_problem"]
            cluster.start()
            await until(lambda: node.seen[-1].store.up)
            assert node.seen[-1].store.docs.get("run/m").body == b"one"

    with etcd(tmp_path / "etcd", 1) as cluster:
        asyncio.run(asyncio.wait_for(scenario(cluster), 60.0))


def test_the_command_looks_seeds_and_forgets(tmp_path, capsys):
    file = tmp_path / "agent.toml"

    def holdfast(*arguments: str) -> tuple[int, dict]:
        code = main(["store", *arguments, "--json", "--config", str(file)])
        return code, json.loads(capsys.readouterr().out or "{}")

    with etcd(tmp_path / "etcd", 1) as cluster:
        file.write_text(f'[agent]\nstate_dir = "{tmp_path}"\n[store]\nurl = "{cluster.url}"\n')
        code, report = holdfast("show")
        assert code == 1 and "is empty" in report["problem"]
        code, seeded = holdfast("seed")
        assert code == 0 and len(seeded["id"]) == 16
        assert holdfast("seed") == (0, seeded)  # and once more, which changes nothing
        code, report = holdfast("show")
        assert (code, report["known_id"], report["problem"]) == (0, seeded["id"], "")
        assert report["members"][0]["is_leader"] and "three outlive one" in report["warnings"][0]
        cluster.ctl("del", "--prefix", "/holdfast/")
        assert "came back empty" in holdfast("show")[1]["problem"]
        assert holdfast("seed") == (0, seeded)  # the id that every node knows
        assert holdfast("show")[0] == 0
        assert holdfast("forget")[1]["id"] == seeded["id"]
        assert holdfast("show")[0] == 0  # it knows none, and takes that which is there
        cluster.ctl("put", "/holdfast/main/cluster", '{"id": "another"}')
        file.with_name("store.json").write_text(json.dumps(
            {"node_id": "n", "cluster": "main", "cluster_id": seeded["id"]}))
        assert "holdfast store forget" in holdfast("show")[1]["problem"]
        assert holdfast("seed")[0] == 1
        (found,) = findings(str(file))
        assert found.state == "need" and "is another than this node knows" in found.said
        holdfast("forget")
        (found,) = findings(str(file))
        assert found.state == "lack" and "1 of 1 members answer" in found.said  # three are better
