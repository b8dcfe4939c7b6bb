"""The root side of an order that concerns the whole node: one verb of four, or nothing.

    holdfast-node@.service: an order comes in by standard input, its answer goes out by standard
    output; systemd has accepted the connection (deploy/systemd/holdfast-node.socket).

Owns the closed list of verbs, and the promise that none is carried out twice in one boot (a reset:
of one GPU), whoever asks how often.  Trusts no byte that comes in: nothing of it reaches a command
but the fault's name and the address of a GPU.
Standard library alone, for it runs as root; imports nothing of ours.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

ORDER_MAX_BYTES = 4096
READ_S = 5  # in which a whole order must be here
COMMAND_S = 20.0
KILL_S = 0.5  # for what was killed to go
LOCK_S = 5.0  # for the order before to end, which was answered already
RESET_S = 60.0  # of a GPU: its firmware begins anew, and on some machines that of its links
AGE_MAX_S = 60.0  # of an order: one that lay about is not meant any more
REBOOTS_MAX, REBOOTS_WINDOW_S = 3, 86400.0
RESETS_MAX = 16  # in one boot, of all GPUs: a node has so many at most
DONE_MAX = 200  # lines that are kept of what was done
DONE_MAX_BYTES = 1 << 20
FIELDS: dict[str, tuple[type, ...]] = {
    "verb": (str,), "id": (str,), "node": (str,), "boot_id": (str,), "wall_s": (int, float),
    "fault": (str,),
}
DEVICE = {"device": (str,)}  # besides, and for a reset alone
REBOOT = ("/usr/bin/systemctl", "--no-block", "reboot")
RESET = ("/usr/bin/nvidia-smi", "--gpu-reset", "-i")  # and the address
RESET_GPU = "reset_gpu"
VERBS = ("drain", "reboot", "replace", RESET_GPU)
FAULT = re.compile(r"[a-z][a-z0-9_]{0,63}")
ID = re.compile(r"[\x21-\x7e]{1,300}")
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")  # on PCI


class Refused(Exception):
    """The order is not carried out; the message says why."""


class Failed(Refused):
    """It was carried out, and its program did not do it."""


class Place(NamedTuple):
    """What belongs to this machine: where verbs and memory lie, and which boot it is."""

    commands: Path  # an operator's program for each verb, by its name
    state: Path
    node: str
    boot_id: str
    wall_s: float


def carry_out(line: bytes, place: Place) -> None:
    """One order.  Refused when it is none, or must not be; nothing has happened then.  Refused
    as well when the verb's program fails, which counts as carried out."""
    order = parse(line)
    check(order, place)
    command = command_of(order, place)
    place.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(place.state / "lock", "a", encoding="ascii") as lock:
        take(lock)
        remember(order, place)
        run(command, RESET_S if order["verb"] == RESET_GPU else COMMAND_S)


def take(lock: TextIO) -> None:
    """Orders are carried out one by one.  One that waited until nobody expects it any more would
    come upon a node where the next run has begun."""
    end_s = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end_s:
                raise Refused("another order is still being carried out") from error
        time.sleep(0.05)


def parse(line: bytes) -> dict[str, Any]:
    """Exactly the fields of an order, each of its kind."""
    if len(line) > ORDER_MAX_BYTES or not line.endswith(b"\n"):
        raise Refused("no whole order")
    try:
        order = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise Refused(f"no order: {error}") from error
    is_reset = isinstance(order, dict) and order.get("verb") == RESET_GPU
    fields = FIELDS | (DEVICE if is_reset else {})
    if not isinstance(order, dict) or set(order) != set(fields):
        raise Refused(f"an order has the fields {', '.join(fields)} and no other")
    for key, kinds in fields.items():
        if not isinstance(order[key], kinds) or isinstance(order[key], bool):
            raise Refused(f"{key} is of the wrong kind")
    if order["verb"] not in VERBS:
        raise Refused(f"the verb must be one of {', '.join(VERBS)}")
    if not FAULT.fullmatch(order["fault"]) or not ID.fullmatch(order["id"]):
        raise Refused("fault or id holds what no name holds")
    if is_reset and not ADDRESS.fullmatch(order["device"]):
        raise Refused("the device must be an address on PCI, as 0000:4e:00.0")
    return order


def check(order: dict[str, Any], place: Place) -> None:
    """It is meant for this machine, this boot and now."""
    if order["boot_id"] != place.boot_id:
        raise Refused("the order is of another boot")
    if order["node"] != place.node:
        raise Refused(f"the order is for another node than {place.node}")
    # Compared, not subtracted: a whole number of any length compares with a float and none is too
    # large for it.  NaN is refused as well.
    if not place.wall_s - AGE_MAX_S <= order["wall_s"] <= place.wall_s + AGE_MAX_S:
        raise Refused(f"the order is older than {AGE_MAX_S:g} s, or of the future")


def command_of(order: dict[str, Any], place: Place) -> tuple[str, ...]:
    """The operator's program where there is one; for a reboot systemd's own is enough, for a reset
    the driver's.  One that cannot be looked at is none of ours to pass over: refused."""
    verb = order["verb"]
    program = place.commands / verb
    device = (order["device"],) if verb == RESET_GPU else ()
    try:
        for path in (program, place.commands):
            status = os.lstat(path)
            if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
                raise Refused(f"{path} may be changed by others than root: chown, chmod go-w")
        if not stat.S_ISREG(os.lstat(program).st_mode) or not os.access(program, os.X_OK):
            raise Refused(f"{program} is no program")
    except OSError as error:
        if verb == "reboot" and isinstance(error, FileNotFoundError):
            return REBOOT
        if device and isinstance(error, FileNotFoundError) and os.access(RESET[0], os.X_OK):
            return (*RESET, *device)
        raise Refused(f"{program}: {error.strerror}: put the program for {verb} there") from error
    return (str(program), place.node, order["fault"], *device)


def remember(order: dict[str, Any], place: Place) -> None:
    """Notes the order on disk before it is carried out; refuses what was done in this boot, and
    the reboot or reset that would be one too many."""
    path = place.state / "done"
    done, verb, device = _done(path), order["verb"], order.get("device", "")
    now = [one for one in done if one["boot_id"] == place.boot_id and one["verb"] == verb]
    same = [one for one in now if one["device"] == device]
    if same:
        of = f" of {device}" * bool(device)
        raise Refused(f"{verb}{of} was carried out in this boot, for {same[-1]['id']}")
    if len(now) >= RESETS_MAX:  # each is of another device; lines that push older ones out
        raise Refused(f"{len(now)} resets in this boot: a person must look, or reboot")
    since_s = place.wall_s - REBOOTS_WINDOW_S
    recent = [one for one in done if one["verb"] == "reboot" and one["wall_s"] > since_s]
    if verb == "reboot" and len(recent) >= REBOOTS_MAX:
        raise Refused(f"{len(recent)} reboots within a day: a person must look, then empty {path}")
    kept = [*done, {key: order[key] for key in ("boot_id", "verb", "id")}
            | {"device": device, "wall_s": place.wall_s}][-DONE_MAX:]
    draft = path.with_suffix(".new")
    with open(draft, "w", encoding="ascii") as file:
        file.writelines(json.dumps(one) + "\n" for one in kept)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    folder = os.open(place.state, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _done(path: Path) -> list[dict[str, Any]]:
    """What was carried out so far.  Refused when that cannot be known: then nothing is done."""
    try:
        with open(path, "rb") as file:
            text = file.read(DONE_MAX_BYTES)
        done = [json.loads(line) for line in text.splitlines()]
        return [{"boot_id": str(one["boot_id"]), "verb": str(one["verb"]), "id": str(one["id"]),
                 "device": str(one.get("device", "")), "wall_s": float(one["wall_s"])}
                for one in done]
    except FileNotFoundError:
        return []
    except (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f"{path} is not understood ({error}): look at it, then empty it") from error


def run(command: Sequence[str], timeout_s: float) -> None:
    """The verb's program, without a shell, within `timeout_s`; then it is ended with whatever it
    started.  A reset that hangs in the driver cannot be: who asked must hear of it all the same,
    for then a reboot is what is left."""
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"})
    except (OSError, subprocess.SubprocessError) as error:
        raise Refused(f"{command[0]}: {error}") from error
    try:
        code = child.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        os.killpg(child.pid, signal.SIGKILL)  # it is not reaped yet: the number is still its own
        try:
            child.wait(KILL_S)
            hangs = ""
        except subprocess.TimeoutExpired:
            hangs = f", and cannot be killed (pid {child.pid})"
        raise Failed(f"{command[0]}: not done within {timeout_s:g} s{hangs}") from error
    if code:
        raise Failed(f"{command[0]} ended with {code}")


def main(arguments: Sequence[str]) -> int:
    """Serves one connection; 0 when the order was carried out."""
    parser = argparse.ArgumentParser(description="The root side of Holdfast's orders for a node.")
    parser.add_argument("--commands", type=Path, default=Path("/etc/holdfast/node.d"))
    parser.add_argument("--state", type=Path, default=Path("/var/lib/holdfast-node"))
    parser.add_argument("--node", default="", help="name of this node; empty: the host name")
    options = parser.parse_args(arguments)
    signal.alarm(READ_S)  # who connects and says nothing holds up nobody
    line = sys.stdin.buffer.readline(ORDER_MAX_BYTES + 1)
    signal.alarm(0)
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    place = Place(options.commands, options.state, options.node or os.uname().nodename, boot_id,
                  time.time())
    answer: dict[str, object] = {"ok": True, "error": "", "ran": True}
    try:
        carry_out(line, place)
    except (Refused, OSError) as error:
        answer = {"ok": False, "error": str(error)[:500], "ran": isinstance(error, Failed)}
    said = json.dumps(answer)
    print(f"holdfast node: {line[:ORDER_MAX_BYTES]!r}: {said}", file=sys.stderr)
    print(said, flush=True)
    return 0 if answer["ok"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
