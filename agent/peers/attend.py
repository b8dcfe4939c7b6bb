"""A node's part in the tests between the nodes of a run, as a child of its agent makes it.

    python -m holdfast.agent.peers.attend ASKED

Owns the child's two ends: what the agent asks for, as JSON in its argument, with the token in its
environment; and what was found, which the child of the node that coordinates prints.  Each node
keeps its own verdict as `holdfast check --peers` does.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from pathlib import Path

import msgspec

from ..core.checks import node_tests
from ..core.checks.node_tests import Found
from ..core.checks.preflight import Member
from . import kept
from .coordinator import Plan
from .hosts import Peer
from .member import Heard, attend
from .transport import Refused

TOKEN_VARIABLE = "HOLDFAST_NODE_TESTS_TOKEN"
JOIN_SHARE, JOIN_MAX_S = 0.125, 10.0  # of the limit: who was asked and took it comes at once,
JOIN_LEAST_S = 9.0  # and whoever asks comes when it has asked all of them
READY_SHARE = 0.375  # until torch is imported, which a cold disk makes the longest part
EXCHANGE_SHARE, EXCHANGE_MAX_S = 0.125, 15.0
PR_SET_PDEATHSIG = 1


class Asked(msgspec.Struct):
    """What an agent asks for.  `peers`: (name, address), who coordinates first; `own`: which of
    them this node is; `why_not`: it comes, and says why it makes no test."""

    peers: tuple[tuple[str, str], ...]
    own: int
    port: int
    limit_s: float
    folder: str
    boot_id: str
    pythons: tuple[tuple[str, str], ...] = ()
    groups: bool = False
    why_not: str = ""


def plan_of(asked: Asked, token: bytes) -> Plan:
    limit_s = asked.limit_s
    return Plan(
        [Peer(*one) for one in asked.peers], token, asked.port,
        min(JOIN_MAX_S, max(JOIN_LEAST_S, JOIN_SHARE * limit_s)),
        min(EXCHANGE_MAX_S, EXCHANGE_SHARE * limit_s),
        usual=lambda model: kept.usual(Path(asked.folder), model, 0),
        ready_s=READY_SHARE * limit_s, groups=asked.groups, candidates=1)


def made(asked: Asked, token: bytes) -> Found:
    """This node's part; what was found, or why nothing was."""
    name = asked.peers[asked.own][0]
    itself = Member(name, asked.boot_id, len(os.sched_getaffinity(0)), error=asked.why_not,
                    devices=0)
    try:
        heard: Heard = asyncio.run(
            attend(plan_of(asked, token), asked.own, itself, asked.pythons, lambda words: None))
    except (OSError, Refused) as error:
        return Found(problem=f"{name}: {error}")
    if heard.report is None:
        return Found(problem=heard.problem)
    verdict = kept.verdict(heard.report, name, kept.status_of(heard.report, name), heard.took_s)
    kept.keep(Path(asked.folder), asked.boot_id, verdict, heard.model, 0)
    return node_tests.found_of(heard.report, heard.took_s)


if __name__ == "__main__":
    # What stands beside torch ends with this process.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    secret = os.environ.pop(TOKEN_VARIABLE, "").encode()
    found = made(msgspec.json.decode(sys.argv[1], type=Asked), secret)
    sys.stdout.write(msgspec.json.encode(found).decode())
