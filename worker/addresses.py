"""Under which address the other nodes of a run reach this one, and over which interface.

Owns the choice, and what gloo and nccl are told of it.  torch looks the host's name up by itself,
which names loopback on many distributions and another network on nodes with several.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Dict, Mapping

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


def chosen(wanted: str, environ: Mapping[str, str], toward: str, agents: str) -> str:
    """--local-addr, HOLDFAST_ADDR, the address that routes to the rendezvous, else the agent's.

    Raises OSError, naming the setting, where a name does not resolve.
    """
    for text, origin in ((wanted, "--local-addr"), (environ.get("HOLDFAST_ADDR", ""),
                                                    "HOLDFAST_ADDR")):
        if text:
            return resolved(text, origin)
    address = route_to(toward) if toward else ""
    return address if address and not address.startswith("127.") else agents or address


def resolved(host: str, origin: str) -> str:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise OSError("%s %s: no such address (%s)" % (origin, host, error)) from None
    return str(found[0][4][0])


def host_of(endpoint: str) -> str:
    """`host`, `host:port` or `[v6]:port` without the port."""
    if endpoint.startswith("["):
        return endpoint[1:].partition("]")[0]
    host, colon, port = endpoint.rpartition(":")
    return host if colon and port.isdecimal() and ":" not in host else endpoint


def route_to(host: str) -> str:
    """The address that this node has toward `host`; "" where there is no route.  Sends nothing."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except (OSError, UnicodeError):
        return ""


def interface_of(address: str) -> str:
    """The name of the interface that has this address; "" where none has."""
    for _, name in socket.if_nameindex():
        if address in _addresses(name):
            return name
    return ""


def _addresses(name: str) -> "set[str]":
    found = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            found.add(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has none of version 4
    try:
        with open("/proc/net/if_inet6") as file:
            rows = [line.split() for line in file]
    except OSError:
        return found
    for row in rows:
        if len(row) == 6 and row[5] == name:
            found.add(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])))
    return found


def interface_environ(interface: str, environ: Mapping[str, str]) -> Dict[str, str]:
    """What keeps gloo and nccl on that interface; what the user chose stands."""
    return {name: interface for name in VARIABLES if interface and name not in environ}


def can_bind(address: str) -> str:
    """Why nothing can listen at this address here; "" when something can."""
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return ""
