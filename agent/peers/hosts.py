"""Who the peers are: from a list, a hostfile or Slurm, and which of them this node is.

Owns the three notations and the addresses behind the names.  Bad input is a ValueError that says
what to give instead.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..system.regular import read_regular

PEERS_MAX = 4096
HOSTFILE_MAX_BYTES = 1 << 20
SLURM = "slurm"
BRACKETS = re.compile(r"([^,\[\]]*)\[([^\[\]]*)\]([^,\[\]]*)|([^,\[\]]+)")
RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class Peer(NamedTuple):
    name: str
    address: str


def peers(words: str, hostfile: str, environ: Mapping[str, str]) -> list[Peer]:
    """`words`: `a,b=10.0.0.2,c`, or `slurm`.  Names without an address are resolved."""
    if hostfile:
        names = _of_file(Path(hostfile))
    elif words == SLURM:
        nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
        if not nodes:
            raise ValueError("--peers slurm: there is no SLURM_JOB_NODELIST: start it by srun")
        names = expand(nodes)
    else:
        names = expand(words)
    found = [Peer(*_split(name)) for name in names]
    if len(found) < 2:
        raise ValueError(f"--peers: {len(found)} named; a test between nodes needs two")
    if len(found) > PEERS_MAX:
        raise ValueError(f"--peers: {len(found)} named; {PEERS_MAX} are the most")
    twice = sorted({one.name for one in found if sum(one.name == o.name for o in found) > 1})
    if twice:
        raise ValueError(f"--peers: {', '.join(twice)} named twice: name each node once")
    return [Peer(one.name, _address(one)) for one in found]


def expand(text: str) -> list[str]:
    """Names of a list as Slurm writes them: `gpu[1-3,07],login` is gpu1, gpu2, gpu3, gpu07, login.
    One pair of brackets a name."""
    names: list[str] = []
    for part in _parts(text):
        match = BRACKETS.fullmatch(part)
        if not match:
            raise ValueError(f"{part!r} in {text[:60]!r} is no name: write a,b or gpu[1-4,7]")
        before, ranges, after, plain = match.groups()
        if plain is not None:
            names.append(plain)
            continue
        for one in ranges.split(","):
            numbers = RANGE.fullmatch(one.strip())
            if not numbers:
                raise ValueError(f"[{ranges}] is no range: write gpu[1-4,7]")
            first, last = numbers[1], numbers[2] or numbers[1]
            if not 0 <= int(last) - int(first) < PEERS_MAX:
                raise ValueError(f"[{ranges}]: {one} is no range of at most {PEERS_MAX} numbers")
            names += [f"{before}{number:0{len(first)}}{after}"
                      for number in range(int(first), int(last) + 1)]
        if len(names) > PEERS_MAX:
            break
    return names


def _parts(text: str) -> list[str]:
    """What stands between commas that are not in brackets."""
    found, inside = [""], False
    for piece in re.split(r"([\[\],])", text):
        if piece == "," and not inside:
            found.append("")
        else:
            inside = piece == "[" or inside and piece != "]"
            found[-1] += piece
    return [one.strip() for one in found]


def _of_file(path: Path) -> list[str]:
    """One node a line; what stands behind its name (`slots=8`) is for others."""
    try:
        text = read_regular(path, HOSTFILE_MAX_BYTES).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"--hostfile {path}: {error}") from error
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return [line[0] for line in lines if line]


def _split(word: str) -> tuple[str, str]:
    name, _, address = word.partition("=")
    if not name or not re.fullmatch(r"[\w.-]+", name):
        raise ValueError(f"{word!r} is no node: write NAME or NAME=ADDRESS")
    return name, address


def _address(peer: Peer) -> str:
    try:
        return socket.gethostbyname(peer.address or peer.name)
    except OSError as error:
        raise ValueError(f"{peer.name} has no address here ({error.strerror or error}): "
                         f"write {peer.name}=ADDRESS") from error


def own(found: Sequence[Peer], named: str, environ: Mapping[str, str], slurm: bool) -> int:
    """Which of them this node is: as told, by Slurm, by its name, or by an address of its own."""
    names = [one.name for one in found]
    if named:
        if named not in names:
            raise ValueError(f"--as {named}: it is none of {', '.join(names[:8])}")
        return names.index(named)
    number = environ.get("SLURM_NODEID", "") if slurm else ""
    if number.isdecimal() and int(number) < len(found):
        return int(number)
    host = socket.gethostname()
    mine = [at for at, name in enumerate(names) if name.split(".")[0] == host.split(".")[0]]
    if len(mine) != 1:
        mine = [at for at, one in enumerate(found) if _is_here(one.address)]
    if len(mine) != 1:
        raise ValueError(f"which of {', '.join(names[:8])} is this node? Its name is {host}: say "
                         "it with --as NAME")
    return mine[0]


def _is_here(address: str) -> bool:
    """Whether a socket can be bound to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True
