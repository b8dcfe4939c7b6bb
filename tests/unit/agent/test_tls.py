"""The API over TLS: with a certificate of ours, without one, with another's."""

from __future__ import annotations

import asyncio
import os
import shutil
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
from fakes import until

from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.config.tls import client_names


class Files:
    """Certificates of two authorities, made with openssl."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is missing: see `make packages`")
        self.folder = folder
        for authority in ("ours", "theirs"):
            self._openssl("req", "-x509", "-subj", f"/CN={authority}", "-out", f"{authority}.pem")
        for name, authority in (("agent", "ours"), ("alerts", "ours"), ("reader", "ours"),
                                ("stranger", "theirs")):
            self._openssl("req", "-x509", "-CA", str(folder / f"{authority}.pem"), "-CAkey",
                          str(folder / f"{authority}.pem.key"), "-subj", f"/CN={name}", "-addext",
                          "subjectAltName=DNS:localhost,IP:127.0.0.1", "-addext",
                          "basicConstraints=critical,CA:FALSE", "-out", f"{name}.pem")

    def _openssl(self, *words: str) -> None:
        out = self.folder / words[-1]
        subprocess.run(
            ["openssl", *words[:-1], str(out), "-keyout", f"{out}.key", "-newkey", "ec", "-pkeyopt",
             "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"],
            check=True, capture_output=True, timeout=60)
        Path(f"{out}.key").chmod(0o600)

    def __getitem__(self, name: str) -> str:
        return str(self.folder / name)

    def client(self, name: str = "") -> ssl.SSLContext:
        made = ssl.create_default_context(cafile=self["ours.pem"])
        if name:
            made.load_cert_chain(self[f"{name}.pem"], self[f"{name}.pem.key"])
        return made


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls"))


def test_who_may_what_with_which_certificate(agent, files: Files) -> None:
    async def run() -> None:
        settings = {"api__tls_cert": files["agent.pem"], "api__tls_key": files["agent.pem.key"],
                    "api__tls_client_ca": files["ours.pem"], "api__tls_operators": ("alerts",)}
        async with agent(**settings) as (daemon, _):
            await until(lambda: daemon.launchers.address)
            address = daemon.launchers.address
            assert address.startswith("https://127.0.0.1:")

            async def asked(method: str, route: str, name: str) -> int:
                connector = aiohttp.TCPConnector(ssl=files.client(name))
                async with aiohttp.ClientSession(address, connector=connector) as client:
                    async with client.request(method, route, json={"reason": "x"}) as answer:
                        return answer.status

            pause = f"/api/v1/nodes/{daemon.state.name}/pause"
            assert await asked("GET", "/api/v1/status", "reader") == 200
            assert await asked("POST", pause, "reader") == 401
            assert await asked("POST", pause, "alerts") == 202
            for name in ("", "stranger"):  # nothing is answered to either
                with pytest.raises((aiohttp.ClientError, ConnectionError)):
                    await asked("GET", "/metrics", name)
            with pytest.raises(aiohttp.ClientError):
                async with aiohttp.ClientSession() as plain:
                    await plain.get(address.replace("https", "http"))

    asyncio.run(run())


@pytest.mark.parametrize(("lines", "why"), [
    ('tls_cert = "{agent.pem}"', "set both"),
    ('tls_client_ca = "{ours.pem}"', "set both"),
    ('tls_cert = "{agent.pem}"\ntls_key = "/nowhere"', "No such file"),
    ('tls_cert = "{agent.pem}"\ntls_key = "{alerts.pem.key}"', "belong together"),
    ('tls_cert = "{agent.pem}"\ntls_key = "{agent.pem.key}"\ntls_operators = ["x"]', "without"),
    ('tls_cert = "{agent.pem}"\ntls_key = "{agent.pem}"', "chmod 600"),
])
def test_what_is_wrong_is_said(lines: str, why: str, files: Files, tmp_path: Path) -> None:
    for name in ("agent.pem", "agent.pem.key", "ours.pem", "alerts.pem.key"):
        lines = lines.replace("{" + name + "}", files[name])
    file = tmp_path / "agent.toml"
    file.write_text(f"[api]\n{lines}\n")
    with pytest.raises(ConfigError, match=why):
        load(file, serves=True)


@pytest.mark.parametrize("setting", ["tls_cert", "tls_key", "tls_client_ca"])
def test_a_fifo_or_an_endless_file_in_a_certificates_place_is_said_by_its_setting(
    setting: str, files: Files, tmp_path: Path
) -> None:
    right = {"tls_cert": files["agent.pem"], "tls_key": files["agent.pem.key"],
             "tls_client_ca": files["ours.pem"]}
    fifo, large, file = tmp_path / "fifo", tmp_path / "large", tmp_path / "agent.toml"
    os.mkfifo(fifo, 0o600)
    large.touch(0o600)
    os.truncate(large, 1 << 40)
    for path, why in ((fifo, "is no regular file"), (large, "longer than 1048576 bytes")):
        named = right | {setting: str(path)}
        file.write_text("[api]\n" + "".join(f'{key} = "{one}"\n' for key, one in named.items()))
        with pytest.raises(ConfigError) as refused:
            load(file, serves=True)
        (error,) = refused.value.errors
        assert error.startswith(f"api.{setting}: {path}: {why}") and "set a file in PEM" in error


def test_beyond_loopback_a_certificate_of_each_client_will_do(files: Files, tmp_path: Path) -> None:
    file = tmp_path / "agent.toml"
    tls = f'tls_cert = "{files["agent.pem"]}"\ntls_key = "{files["agent.pem.key"]}"\n'
    file.write_text(f'[agent]\nlisten = "0.0.0.0:9855"\n[api]\n{tls}')
    with pytest.raises(ConfigError, match="api.tls_client_ca, or listen on 127.0.0.1"):
        load(file, serves=True)
    file.write_text(file.read_text() + f'tls_client_ca = "{files["ours.pem"]}"\n')
    load(file, serves=True)


def test_names_of_a_certificate() -> None:
    found = {"subject": ((("organizationName", "x"),), (("commonName", "a"),)),
             "subjectAltName": (("DNS", "b"), ("IP Address", "10.0.0.1"))}
    assert client_names(found) == ("a", "b") and client_names(None) == () == client_names({})
