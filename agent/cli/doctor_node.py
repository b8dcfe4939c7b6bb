"""The part of `holdfast doctor` about a node's owner: who may open devices, what node orders need.

Owns these probes, and the type of every finding.  A device's mode is looked at and the device is
not opened, for a driver may do something then; a folder that does not answer is left.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from holdfast.agent.actions import root_helper
from holdfast.agent.config import load as configuration
from holdfast.agent.config.settings import Config
from holdfast.agent.core.actions import REBOOT_NODE, RESET_GPU, needing_alone, root_verbs

DEVICES_MAX = 64
FOLDER_S = 5.0  # for the folder of evidence.store to answer
AGENT_USER = "holdfast"  # HOLDFAST_AGENT_USER names another, or a uid, as for the launcher
PROGRAMS = Path("/etc/holdfast/node.d")  # where the root unit looks
UNIT = ", or name the group in SupplementaryGroups= of holdfast.service"
BY_ITSELF = {REBOOT_NODE: root_helper.REBOOT[0], RESET_GPU: root_helper.RESET[0]}
NEURON, ORDERS = "Neuron devices", "node orders"


HAVE, LACK, NEED = "have", "lack", "need"  # lack costs something; need: a job cannot run


class Finding(NamedTuple):
    """What one probe of `holdfast doctor` found."""

    what: str
    state: str
    said: str
    cost: str = ""  # what is lost without it


class User(NamedTuple):
    name: str
    uid: int
    groups: frozenset[int]


def me() -> User:
    """The user of this process, whose jobs are meant."""
    groups = frozenset((os.getegid(), *os.getgroups()))
    return User(f"uid {os.geteuid()}", os.geteuid(), groups)


def agents_user(environ: Mapping[str, str]) -> User | None:
    """The node agent's; None where this machine knows no such user."""
    name = environ.get("HOLDFAST_AGENT_USER") or AGENT_USER
    try:
        entry = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        groups = frozenset(os.getgrouplist(entry.pw_name, entry.pw_gid))
    except (KeyError, OSError, OverflowError):
        return None
    return User(entry.pw_name, entry.pw_uid, groups)


def may_open(found: os.stat_result, user: User) -> bool:
    """For reading and writing, by owner, group and mode."""
    if user.uid == 0:
        return True
    if found.st_uid == user.uid:
        wanted = stat.S_IRUSR | stat.S_IWUSR
    elif found.st_gid in user.groups:
        wanted = stat.S_IRGRP | stat.S_IWGRP
    else:
        wanted = stat.S_IROTH | stat.S_IWOTH
    return found.st_mode & wanted == wanted


def neuron(environ: Mapping[str, str]) -> Finding:
    return neuron_devices(Path("/dev"), me(), agents_user(environ))


def neuron_devices(dev: Path, job: User, agent: User | None) -> Finding:
    """Whether a job of this user and the node's agent may open each /dev/neuronN."""
    found = []
    for path in sorted(dev.glob("neuron[0-9]*"))[:DEVICES_MAX]:
        try:
            found.append((path, path.stat()))
        except OSError as error:
            return Finding(NEURON, LACK, f"{path}: {error.strerror}", "its device may be gone")
    if not found:
        return Finding(NEURON, HAVE, "no Neuron device here")
    for user, state, cost in ((job, NEED, "no job of this user runs there"), (agent, LACK,
                               "neuron-monitor and neuron-ls tell the node's agent nothing")):
        closed = [(path, it) for path, it in found if user and not may_open(it, user)]
        if user and closed:
            path, it = closed[0]
            said = f"{path} {stat.S_IMODE(it.st_mode):04o} {it.st_uid}:{it.st_gid}"
            return Finding(NEURON, state, f"{said}: closed to {user.name}",
                           f"{cost} ({len(closed)} of {len(found)}): {_remedy(it, user.name)}"
                           + UNIT * (user is agent))
    return Finding(NEURON, HAVE, f"{len(found)}, open to {job.name}"
                   + (f" and {agent.name}" if agent else ""))


def _remedy(found: os.stat_result, user: str) -> str:
    mask = stat.S_IRGRP | stat.S_IWGRP
    if found.st_mode & mask == mask and found.st_gid:
        return f"put {user} into the group {found.st_gid}"
    return "give them a group and mode 0660 by a udev rule"


def orders(config_file: str | None) -> Finding:
    """The same for the configuration in FILE, or the node's own."""
    file = Path(config_file) if config_file else configuration.DEFAULT_FILE
    try:
        there = bool(config_file) or file.exists()
        return node_orders(configuration.load(file if there else None).config)
    except configuration.ConfigError as error:
        number = len(error.errors)
        return Finding(ORDERS, LACK, f"{file} is refused ({number} of its lines)",
                       f"the agent keeps its last configuration or does not start: {error}")
    except OSError as error:
        return Finding(ORDERS, LACK, f"{file}: {error.strerror}",
                       "whether an order for the node could leave is not known")


def node_orders(config: Config, programs: Path = PROGRAMS) -> Finding:
    """What actions.allow needs beside the word itself: who takes the order, where its reason is
    kept, and what carries it out."""
    allowed = [action for action in root_verbs() if action in config.actions.allow]
    if not allowed:
        return Finding(ORDERS, HAVE, "actions.allow names none: nothing is done here")
    lacking = [*_alone(config), *_socket(Path(config.actions.socket)),
               *_store(config.evidence.store), *_programs(allowed, programs)]
    if not lacking:
        return Finding(ORDERS, HAVE, f"{', '.join(allowed)}: what they need is there")
    more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
    return Finding(ORDERS, LACK, f"{lacking[0].what}{more}",
                   f"{', '.join(allowed)}: allowed, and not carried out until you "
                   + "; ".join(one.remedy for one in lacking))


class Lacking(NamedTuple):
    what: str
    remedy: str


def _alone(config: Config) -> Sequence[Lacking]:
    """What keeps an allowed order from being given: on one node no breaker can open."""
    named = needing_alone(config.actions.allow, config.actions.alone or bool(config.store.url))
    return (Lacking("actions.alone is not set", "set actions.alone = true: this node sees no "
                    f"fleet, and {' and '.join(named)} wait for a breaker that cannot open"),
            ) if named else ()


def _socket(path: Path) -> Sequence[Lacking]:
    if path.is_socket():
        return ()
    return (Lacking(f"no socket {path}", "enable the socket: "
                    "systemctl enable --now holdfast-node.socket"),)


def _store(folder: str) -> Sequence[Lacking]:
    if not folder:
        return (Lacking("evidence.store is not set", "set evidence.store to a folder that "
                        "outlives this node"),)
    asked = subprocess.Popen(["test", "-d", folder])
    try:
        if asked.wait(FOLDER_S) == 0:
            return ()
    except subprocess.TimeoutExpired:
        asked.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel may hold it: it is left
            asked.wait(1.0)
        return (Lacking("evidence.store does not answer", f"mend the mount of {folder}"),)
    return (Lacking("no folder evidence.store", f"mount or make {folder} for the agent's user, and "
                    "name it in ReadWritePaths= of holdfast.service"),)


def _programs(allowed: Sequence[str], programs: Path) -> list[Lacking]:
    """Where none is, systemd itself reboots, and the driver's own tool resets."""
    wanted = [(programs / root_verbs()[action], BY_ITSELF.get(action, "")) for action in allowed]
    return [Lacking(f"no program {path}", f"put a program of root's into {path}")
            for path, tool in wanted
            if not os.access(path, os.X_OK) and not os.access(tool, os.X_OK)]
