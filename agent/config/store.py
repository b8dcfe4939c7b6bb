"""The address of the store of many nodes, and the files that open it.

Owns the form of `store.url`, the file with the password, and what is wrong with either.  Who talks
to the store is agent/store/etcd_gateway.py.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..system.regular import check_regular, open_regular
from . import settings

if TYPE_CHECKING:
    import ssl

ENDPOINTS_MAX = 9  # etcd itself advises seven members at most
PASSWORD_MAX = 4096
PEM_MAX_BYTES = 1 << 20  # the authorities of a whole distribution are a quarter of it
EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379,10.0.0.3:2379"
CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9][A-Za-z0-9._-]*):(\d{1,5})")


class Address(NamedTuple):
    """Where the store is: each member as http://HOST:PORT or https://HOST:PORT."""

    endpoints: tuple[str, ...] = ()

    @property
    def is_tls(self) -> bool:
        return any(one.startswith("https:") for one in self.endpoints)


def parse(url: str) -> Address:
    """ValueError says what is wrong with it, and an example."""
    if not url:
        return Address()
    scheme, mark, rest = url.partition("://")
    if not mark or scheme not in ("etcd", "etcds"):
        raise ValueError(f"{url[:200]!r} does not begin with etcd:// (or etcds://, with TLS): "
                         f"set for example {EXAMPLE}")
    found = []
    for part in rest.rstrip("/").split(","):
        match = HOST_PORT.fullmatch(part.strip())
        if match is None or not 0 < int(match[2]) <= 65535:
            raise ValueError(f"{part[:200]!r} is no HOST:PORT: set for example {EXAMPLE}")
        found.append(f"{'https' if scheme == 'etcds' else 'http'}://{part.strip()}")
    if len(set(found)) < len(found) or len(found) > ENDPOINTS_MAX:
        raise ValueError(f"name each of at most {ENDPOINTS_MAX} members once")
    return Address(tuple(found))


def read_password(file: str, key: str = "store.password_file") -> str:
    """The first line of FILE, which `key` names.  ValueError says what is wrong with it."""
    path = Path(file)
    try:
        with open(open_regular(path), "rb") as handle:
            if stat.S_IMODE(os.fstat(handle.fileno()).st_mode) & 0o077:
                raise ValueError(f"{path}: others may read it: chmod 600 {path}")
            line = handle.readline(PASSWORD_MAX).rstrip(b"\r\n")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}: set {key} to a file that uid "
                         f"{os.getuid()} may read") from error
    if not line:
        raise ValueError(f"{path}: its first line is empty: write the password or token there")
    return line.decode("utf-8", "surrogateescape")


def tls_context(store: settings.Store) -> ssl.SSLContext | None:
    """None without TLS.  ValueError names the file that is not as it must be."""
    import ssl  # costs 2 MB, and most agents need none

    if not parse(store.url).is_tls:
        return None
    named = (("store.ca_file", store.ca_file), ("store.cert_file", store.cert_file),
             ("store.key_file", store.key_file))
    for key, file in named:
        try:
            if file:
                check_regular(file, PEM_MAX_BYTES)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(f"{file}: {why}: set {key} to a file that uid {os.getuid()} may read"
                             ) from error
    try:
        context = ssl.create_default_context(cafile=store.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{store.ca_file}: {error}: set store.ca_file to the certificates, in "
                         "PEM, that signed the members'") from error
    if store.cert_file:
        try:
            context.load_cert_chain(store.cert_file, store.key_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{store.cert_file}: {error}: set store.cert_file and store.key_file "
                             "to a certificate and its key, in PEM") from error
    return context


def check(store: settings.Store, origin: Callable[[str], str], errors: list[str],
          serves: bool = False) -> None:
    """What is wrong with [store].  `serves`: the files as well, which only the agent's own user
    can judge."""
    try:
        address = parse(store.url)
    except ValueError as error:
        errors.append(f"{origin('store.url')}: store.url: {error}")
        return
    if not CLUSTER.fullmatch(store.cluster):
        errors.append(f"{origin('store.cluster')}: store.cluster: {store.cluster[:200]!r}: set "
                      "letters, digits and . _ - alone, for example \"main\"")
    for key in ("ca_file", "cert_file", "key_file"):
        if getattr(store, key) and not address.is_tls:
            errors.append(f"{origin(f'store.{key}')}: store.{key} is set, but store.url has no "
                          "TLS: write etcds:// in place of etcd://")
    if store.key_file and not store.cert_file:
        errors.append(f"{origin('store.key_file')}: store.key_file without store.cert_file: set "
                      "both")
    if bool(store.user) != bool(store.password_file):
        lacking = "store.password_file" if store.user else "store.user"
        errors.append(f"{origin('store.user')}: {lacking} is not set: set both store.user and "
                      "store.password_file, or neither")
    if serves and not errors:
        try:
            tls_context(store)
            if store.password_file:
                read_password(store.password_file)
        except ValueError as error:
            errors.append(str(error))
