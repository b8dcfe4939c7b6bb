"""What Debian's tools do on a node of a test, where no systemd runs: apt-get, systemctl and scp.

Owns as much of each as docs/cluster.md types, and refuses every other word.  A unit is read from
its own file: its environment, its user, its command, and that a start waits for READY=1.  To
install etcd-server does what the package's scripts do: its user's directory, and a start without
settings.

    debian_tools.py NODES'-HOME COMMAND ARGUMENTS
"""

from __future__ import annotations

import os
import pwd
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNITS = {"etcd": Path("/lib/systemd/system/etcd.service"),
         "holdfast": ROOT / "deploy/systemd/holdfast.service"}
OWN_COMMAND = {"/opt/holdfast/bin/holdfast": "holdfast"}  # the tree that is tested, no package
START_S, END_S = 90.0, 30.0  # DefaultTimeoutStartSec=; of a test's own
RUN = Path("/run")


class Unit:
    """One service of this node."""

    def __init__(self, name: str) -> None:
        self.name = name.removesuffix(".service")
        if self.name not in UNITS:
            sys.exit(f"Unit {name} not found.")
        self.settings: list[tuple[str, str]] = []
        for line in UNITS[self.name].read_text().splitlines():
            key, equals, value = line.partition("=")
            if equals and not line.startswith("#"):
                self.settings.append((key, value.replace("%p", self.name).replace(
                    "%H", socket.gethostname())))
        self.mark = RUN / f"{self.name}.pid"

    def of(self, key: str) -> list[str]:
        return [value for name, value in self.settings if name == key]

    def environ(self) -> dict[str, str]:
        """A file's lines stand above Environment=, as systemd has it."""
        lines = [word for value in self.of("Environment") for word in shlex.split(value)]
        for value in self.of("EnvironmentFile"):
            file = Path(value.lstrip("-"))
            if file.exists() or not value.startswith("-"):
                lines += [line for line in file.read_text().splitlines()
                          if line.strip() and not line.lstrip().startswith(("#", ";"))]
        pairs = dict(line.partition("=")[::2] for line in lines)
        return {"PATH": os.environ["PATH"], **{key: value.strip("'\"")
                                               for key, value in pairs.items()}}

    def alive(self) -> int:
        """The main process, or 0."""
        try:
            pid = int(self.mark.read_text())
            return 0 if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in (
                "Z", "X") else pid
        except (OSError, ValueError):
            return 0

    def start(self) -> None:
        if self.alive():
            return
        environ = self.environ()
        program, *rest = shlex.split(re.sub(
            r"\$(\w+)", lambda found: environ.get(found[1], ""), self.of("ExecStart")[0]))
        user = {}
        if program not in OWN_COMMAND:  # nobody else may read the tree that is tested
            entry = pwd.getpwnam(self.of("User")[0])
            user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        for folder in self.of("RuntimeDirectory"):
            (RUN / folder).mkdir(exist_ok=True)
        ready = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        place = RUN / f"{self.name}.notify"
        place.unlink(missing_ok=True)
        ready.bind(str(place))
        place.chmod(0o777)
        with open(RUN / f"{self.name}.out", "ab") as output:
            process = subprocess.Popen(
                [OWN_COMMAND.get(program, program), *rest], stdin=subprocess.DEVNULL,
                stdout=output, stderr=output, cwd="/", start_new_session=True,
                env={**environ, "NOTIFY_SOCKET": str(place)}, **user)  # type: ignore[call-overload]
        self.mark.write_text(str(process.pid))
        deadline_s = time.monotonic() + START_S
        ready.settimeout(0.1)
        while process.poll() is None and time.monotonic() < deadline_s:
            try:
                if b"READY=1" in ready.recv(4096):
                    return
            except TimeoutError:
                pass
        self.stop()
        sys.exit(f"Job for {self.name}.service failed.\n"
                 + (RUN / f"{self.name}.out").read_text()[-2000:])

    def stop(self) -> None:
        deadline_s = time.monotonic() + END_S
        while pid := self.alive():
            number = signal.SIGTERM if time.monotonic() < deadline_s else signal.SIGKILL
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                break
            time.sleep(0.05)
        self.mark.unlink(missing_ok=True)


def systemctl(verb: str, *words: str) -> None:
    now, units = "--now" in words, [Unit(word) for word in words if word != "--now"]
    if verb not in ("start", "stop", "restart", "enable"):
        sys.exit(f"Unknown command verb {verb}.")
    for unit in units:
        if verb in ("stop", "restart"):
            unit.stop()
        if verb in ("start", "restart") or now:
            unit.start()


def apt_get(verb: str, *words: str) -> None:
    if verb == "update":
        return
    packages = [word for word in words if word != "-y"]
    if verb != "install" or not set(packages) <= {"etcd-server", "etcd-client"}:
        sys.exit(f"apt-get {verb} {' '.join(words)}: no test has this")
    if "etcd-server" in packages:
        home, entry = Path("/var/lib/etcd"), pwd.getpwnam("etcd")
        home.mkdir(exist_ok=True)
        home.chmod(0o700)
        os.chown(home, entry.pw_uid, entry.pw_gid)
        try:
            Unit("etcd").start()
        except SystemExit as error:  # `deb-systemd-invoke start ... || true`
            print(error, file=sys.stderr)


def scp(home: Path, *words: str) -> None:
    *sources, target = words[1:] if words[0] == "-r" else words
    address, _, folder = target.removeprefix("root@").partition(":")
    there = home / f"n{int(address.rpartition('.')[2]) - 1}" / (folder or "root").lstrip("/")
    for source in sources:
        if Path(source).is_dir():
            shutil.copytree(source, there / Path(source).name)
        else:
            shutil.copy(source, there)


if __name__ == "__main__":
    command, arguments = sys.argv[2], sys.argv[3:]
    if command == "scp":
        scp(Path(sys.argv[1]), *arguments)
    else:
        {"systemctl": systemctl, "apt-get": apt_get}[command](*arguments)
