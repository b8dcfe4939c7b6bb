"""`python -m holdfast.agent`: starts the agent, a node's or a private one.

Owns the command line, and which exit code an end has.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from holdfast.worker import exits

from .config.load import DEFAULT_FILE, ConfigError, load, load_all, within_limit
from .config.runbooks import RunbookError
from .config.store import read_password
from .daemon.daemon import Daemon, Node, Options
from .launchers.admission import raise_open_files
from .store import own_etcd
from .store.base import InUse, StoreError
from .system.arguments import Parser

M_ARENA_MAX = -8  # of glibc's <malloc.h>
GC_THRESHOLDS = 10_000, 10, 20  # one reading of the cores makes 1,500 tuples, and none is garbage
DESCRIPTION = "Watch this node and the runs on it; a run without one starts a private agent."
EPILOG = f"""example:
  holdfast agent --config /etc/holdfast/agent.toml

{exits.told("agent")}
"""


def options_of(arguments: Sequence[str]) -> Options:
    """The command line as options; argparse ends the process on a bad one."""
    parser = Parser(
        prog="holdfast agent", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, help=f"TOML file; a node agent's is {DEFAULT_FILE}")
    parser.add_argument("--private", action="store_true", help="serve one run alone, then end")
    parser.add_argument("--run", default="", help="the private agent's run")
    parser.add_argument("--rendezvous", default="", metavar="HOST:PORT", help=(
        "of a private agent without [store]: where the store of its run is, and is started"))
    parser.add_argument("--state", help="directory of journal and store")
    parser.add_argument("--runtime", metavar="DIRECTORY", help=(
        "directory of sockets; where it is not /run/holdfast, runs start private agents, and "
        "commands need HOLDFAST_RUNTIME_DIR=DIRECTORY to find this one"))
    parser.add_argument("--listen", help="HOST:PORT of page, API and metrics")
    given = parser.parse_args(arguments)
    if given.private and not (given.run and given.state and given.runtime):
        parser.error("--private needs --run, --state and --runtime")
    if not given.private and (given.run or given.rendezvous):
        parser.error(f"{'--run' if given.run else '--rendezvous'} belongs to --private")
    overrides: dict[str, tuple[object, str]] = {}
    for key, variable, value in (
        ("agent.state_dir", "HOLDFAST_STATE_DIR", given.state),
        ("agent.runtime_dir", "HOLDFAST_RUNTIME_DIR", given.runtime),
        ("agent.listen", "", given.listen),
    ):
        if value is not None:
            overrides[key] = (value, "command line")
        elif os.environ.get(variable):
            overrides[key] = (os.environ[variable], f"environment {variable}")
    if given.private:
        overrides["inject.enabled"] = (True, "private agent")
    file = given.config
    if file is None and not given.private and DEFAULT_FILE.exists():
        file = DEFAULT_FILE
    return Options(given.private, given.run, file, overrides, given.rendezvous)


def _make_node(*arguments: object) -> Node:
    from .core.node import Node as CoreNode  # the largest import; nothing above needs it

    return CoreNode(*arguments)  # type: ignore[arg-type]


def share_one_arena() -> None:
    """Has all threads of this process allocate in one place.  They wait for the interpreter and not
    for each other; an arena each was about a megabyte of the agent's memory in all.  By a call,
    since the children, which compute, would inherit the variable."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def main(arguments: Sequence[str]) -> int:
    options = options_of(arguments)
    share_one_arena()
    gc.set_threshold(*GC_THRESHOLDS)
    if options.private:
        os.umask(0o077)  # what it keeps of a run is its user's alone
    raise_open_files()
    try:
        with within_limit("holdfast agent", options.config_file):
            try:
                loaded = load(options.config_file, options.overrides, serves=True)
            except ConfigError:
                load_all(options.config_file, options.overrides)  # with the runbooks' errors
                raise
        if options.rendezvous and not loaded.config.store.url:
            place = own_etcd.found(own_etcd.parse(options.rendezvous, options.run))
            token_file = loaded.config.cluster.token_file
            if token_file:
                place = _locked(place, token_file, options)
            options = options._replace(place=place)
            options.overrides.update({
                "store.url": (place.url, own_etcd.FLAG),
                "store.cluster": (place.cluster, own_etcd.FLAG)})
            loaded = load(options.config_file, options.overrides, serves=True)
    except (ConfigError, StoreError, ValueError) as error:
        print(f"holdfast agent: {error}", file=sys.stderr)
        return exits.CONFIGURATION
    try:
        return asyncio.run(Daemon(loaded, options, _make_node).run())
    except InUse as error:
        print(f"holdfast agent: {error}", file=sys.stderr)
        return exits.FAILED
    except (ConfigError, RunbookError, StoreError) as error:
        print(f"holdfast agent: {error}", file=sys.stderr)
        return exits.CONFIGURATION
    except OSError as error:
        why = _explained(error, loaded.config.agent.runtime_dir)
        print(f"holdfast agent: {why}", file=sys.stderr)
        return exits.FAILED


def _locked(place: own_etcd.Place, token_file: str, options: Options) -> own_etcd.Place:
    """With the password that all nodes of the token come to."""
    token = read_password(token_file, "cluster.token_file")
    place = place._replace(password=own_etcd.password_of(token, options.run))
    state = Path(str(options.overrides["agent.state_dir"][0]))
    file = own_etcd.keep_password(state, place.password)
    options.overrides.update({
        "store.user": (own_etcd.USER, own_etcd.FLAG),
        "store.password_file": (str(file), own_etcd.FLAG)})
    return place


def _explained(error: OSError, runtime: str) -> str:
    name = str(error.filename or "")
    if not name:
        return str(error)
    what = ": set agent.runtime_dir, or --runtime, to a directory that this user may write"
    return f"{name}: {error.strerror}{what if Path(name).is_relative_to(runtime) else ''}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
