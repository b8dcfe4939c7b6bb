"""`holdfast run` and `holdfast train`: from Holdfast's interpreter into the job's own.

Owns which interpreter that is.  Holdfast's packages must not enter the job, so this process
replaces itself: same pid, same terminal, same cgroup, the launcher found by its file.  All other
arguments are the launcher's to read (worker/bootstrap.py).
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from holdfast.worker import peers
from holdfast.worker.exits import CONFIGURATION, RETRY

from .text import Failure, count

SITE_RUNBOOKS = "/etc/holdfast/runbooks"  # as settings.py has it by default; a test compares them
# Flags of the launcher that take no value.  Of every other flag the next word is the value, so
# that a script's own `--python` is never read as ours.
# A test compares this list with worker/launcher/spec.py's parser.
WITHOUT_VALUE = frozenset({
    "-h", "--help", "-m", "--module", "--standalone", "--no-python", "--no-hooks", "--run-path",
    "--virtual-local-rank", "--allow-mixed", "--time-collectives",
})


def own_flags(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The launcher's own flags and their values, up to where script, module or key=value begins."""
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or word == "--":
            return
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-")
        if not equals and flag not in WITHOUT_VALUE:
            value = next(words, "")
        yield flag, value


def python_flag(argv: Sequence[str]) -> str:
    """The value of `--python` among the launcher's own flags; "" when it is not given."""
    return next((value for flag, value in own_flags(argv) if flag == "--python"), "")


def job_python(argv: Sequence[str], environ: Mapping[str, str]) -> str:
    """The job's interpreter: --python, the active venv's, conda's, else this one; from a package,
    whose own no job may run in, the one on the PATH.

    Raises Failure (78) when the one that was named is not there."""
    named = python_flag(argv)
    if named:
        return _existing(named, "--python", environ)
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if environ.get(variable):
            return _existing(f"{environ[variable]}/bin/python", f"${variable}", environ)
    is_packaged = sys.flags.isolated  # bin/holdfast of a package begins so, and no other
    on_path = shutil.which("python3", path=environ.get("PATH", "")) if is_packaged else None
    return os.path.abspath(on_path) if on_path else sys.executable


def _existing(python: str, origin: str, environ: Mapping[str, str]) -> str:
    found = shutil.which(python, path=environ.get("PATH"))
    if not found:
        hint = "deactivate that environment, or name the interpreter with --python"
        raise Failure(f"{origin} names {python}, which cannot be executed: {hint}", CONFIGURATION)
    return os.path.abspath(found)


def bootstrap() -> str:
    """The launcher's file, found without importing it."""
    spec = find_spec("holdfast.worker")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        file = Path(place) / "bootstrap.py"
        if file.is_file():
            return str(file.resolve())
    raise Failure("this installation has no launcher (worker/bootstrap.py): install it again")


def check_configuration(environ: Mapping[str, str]) -> None:
    """Raises Failure (78) with every error of the files that the run's own agent would read: once
    the launcher runs, its agent could only fail, again and again, and the run go unwatched."""
    file = environ.get("HOLDFAST_CONFIG")
    # Without a file it reads the site's runbooks alone, where there are any.
    if not file and not _may_be(SITE_RUNBOOKS):
        return
    if not environ.get("HOLDFAST_RUNTIME_DIR") and _node_agent(environ):
        return
    from holdfast.agent.config import load

    try:
        with load.within_limit("holdfast run", Path(file) if file else None, RETRY):
            if file:
                load.load_all(Path(file))
            else:
                load.load_all(None, {"runbooks.directory": (SITE_RUNBOOKS, "default")})
    except load.ConfigError as error:
        told, of = "\n  ".join(error.errors), "HOLDFAST_CONFIG" if file else SITE_RUNBOOKS
        raise Failure(f"{of}: {count(len(error.errors), 'error')}:\n  {told}",
                      CONFIGURATION) from error


def _may_be(path: str) -> bool:
    """Whether something is there, or is hidden from this user."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def check_names(argv: Sequence[str]) -> None:
    """Raises Failure (78) for an --ignore-check of a check that there is not."""
    names = [value for flag, value in own_flags(argv) if flag == "--ignore-check"]
    if not names:
        return
    from holdfast.agent.checks import table
    from holdfast.agent.core.run.start_gate import UNLISTED

    try:
        table.chosen(tuple(name for name in names if name not in UNLISTED))
    except ValueError as error:
        raise Failure(f"--ignore-check: {error}", CONFIGURATION) from error


def _node_agent(environ: Mapping[str, str]) -> bool:
    """Whether the node has an agent that this run would go to."""
    from .client import NODE_RUNTIME

    path = str(NODE_RUNTIME / "agent.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        try:
            sock.connect(path)
            peers.check_peer(sock, path, environ)
        except (OSError, peers.Stranger):
            return False
    return True


def launch(command: str, argv: Sequence[str]) -> NoReturn:
    """Replaces this process by the launcher.  Returns never; raises Failure before."""
    python = job_python(argv, os.environ)
    check_configuration(os.environ)
    check_names(argv)
    environ = {**os.environ, "HOLDFAST_PYTHON": sys.executable}
    if sys.stdout is not None:  # started without one
        sys.stdout.flush()
    entry = bootstrap()
    flags = {flag for flag, _ in own_flags(argv)}
    if flags & {"--on", "--env"} and not flags & {"-h", "--help"}:
        from .start_on import start_on

        raise SystemExit(start_on(command, argv, [python, entry, command], environ, WITHOUT_VALUE))
    # While one interpreter leaves and another begins nobody could answer a Ctrl-C: it waits until
    # the launcher does (worker/launcher/ending.py).
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execve(python, [python, entry, command, *argv], environ)
    except OSError as error:
        raise Failure(f"cannot start {python}: {error.strerror}", CONFIGURATION) from error
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
