"""A systemd of the test's own, as the first process of namespaces that end with it.

Owns the small root that it lives in: the machine's /usr and Python, read-only, and everything else
on a tmpfs of its own mount namespace.  Nothing of it reaches the machine: its processes, mounts,
network, host name and cgroups are its own, CAP_SYS_BOOT and what else could touch the kernel are
taken from it, /proc/sys is read-only, and the program by which systemd ends a machine is a script
that notes its verb and exits.  Killed with the test, it leaves an empty cgroup.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

from nodes.harness import NO_CGROUPS

import holdfast.agent

SYSTEMD = Path("/usr/lib/systemd/systemd")
SHUTDOWN = "/usr/lib/systemd/systemd-shutdown"
UNITS = Path(__file__).resolve().parents[2] / "deploy/systemd"
PARTS = ("agent", "collectors", "dashboards", "runbooks", "trainer", "worker")
BORROWED = ("basic", "local-fs", "network", "reboot", "shutdown", "sockets", "sysinit", "timers",
            "paths", "slices", "final", "umount", "local-fs-pre", "network-pre")
# What a root without a machine under it must never have.
TAKEN = ("sys_boot", "sys_module", "sys_rawio", "sys_time", "mac_admin", "mac_override")
SETUP = r"""
set -e
root=$1
mount -t tmpfs -o mode=755 own "$root"
cd "$root"
mkdir -p usr proc sys dev run tmp var/tmp var/lib etc opt/python opt/site opt/holdfast shared root
chmod 1777 tmp var/tmp
for link in bin lib lib64 sbin; do [ -L /$link ] && cp -P /$link $link; done
only() { mount --bind "$1" "$2"; mount -o remount,bind,ro "$2"; }
only /usr usr
only "$PYTHON" opt/python
only "$SITE" opt/site
cp -r "$STAGE/." .
for part in $PARTS; do
    mkdir -p "opt/holdfast/lib/$VERSION/site-packages/holdfast/$part"
    only "$(readlink -f "$CODE/$part")" "opt/holdfast/lib/$VERSION/site-packages/holdfast/$part"
done
mount --bind "$SHARED" shared
mount -t tmpfs -o mode=755 dev dev
for node in null zero full random urandom tty kmsg; do
    touch dev/$node; mount --bind /dev/$node dev/$node
done
mkdir dev/shm dev/pts
mount -t proc proc proc
only proc/sys proc/sys
mount -t sysfs -o ro sys sys
mount -t cgroup2 cgroup sys/fs/cgroup
chmod 755 shared/ended
mount --bind shared/ended "usr/${SHUTDOWN#/usr/}"
chroot . /sbin/ldconfig
chown 999:999 shared/holdfast
hostname holdfast-test
mkdir old
pivot_root . old
cd /
umount -l old
rmdir old
exec setpriv --bounding-set "$TAKEN" --inh-caps "$TAKEN" -- \
    env -i container=holdfast-test PATH=/usr/sbin:/usr/bin SYSTEMD_UNIT_PATH=/etc/systemd/system \
    SYSTEMD_GENERATOR_PATH=/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/none \
    SYSTEMD_PRESET_PATH=/none /usr/lib/systemd/systemd --system --unit=test.target \
    --log-target=null --show-status=no
"""
AGENT = """#!/opt/holdfast/bin/python
import sys
from holdfast.agent.cli import main
sys.exit(main(sys.argv[1:]))
"""
TARGET = """[Unit]
Requires=holdfast.service holdfast-node.socket
After=holdfast.service holdfast-node.socket
AllowIsolate=yes
"""
ENDED = """#!/bin/sh
cp /var/lib/holdfast-node/done /shared/done
echo "$1" > /shared/new && mv /shared/new /shared/verb
"""
KEEP = "[Unit]\nDefaultDependencies=no\n"  # mounts stay until all ends, or the script would be gone


class Cannot(Exception):
    """There can be no systemd of our own here; the message says why."""


def cgroups() -> Path:
    """Where version 2 of cgroups is mounted.  Cannot, without that or another thing it takes."""
    if os.geteuid():
        raise Cannot("needs root for namespaces of its own")
    missing = [tool for tool in ("unshare", "setpriv", "pivot_root", "systemctl")
               if shutil.which(tool) is None]
    if missing or not SYSTEMD.exists() or not Path(SHUTDOWN).exists():
        raise Cannot(f"{', '.join(missing) or SYSTEMD} is missing (Debian package systemd)")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        if line.split()[2] == "cgroup2":
            return Path(line.split()[1])
    raise Cannot(NO_CGROUPS)


class OwnSystemd:
    """See the module.  `shared` is the one folder that both sides see; `programs` are verbs of the
    node's unit, by their names."""

    def __init__(
        self, folder: Path, agent_toml: str, kernel_log: str, programs: dict[str, str]
    ) -> None:
        self.shared = folder / "shared"
        self.cgroup = cgroups() / f"holdfast-test-{os.getpid()}"
        stage, root = folder / "stage", folder / "root"
        for path in (self.shared / "holdfast", root, stage):
            path.mkdir(parents=True)
        (self.shared / "ended").write_text(ENDED)
        (self.shared / "kmsg").write_text(kernel_log)
        _stage(stage, agent_toml)
        for name, text in programs.items():
            program = stage / "etc/holdfast/node.d" / name
            program.parent.mkdir(mode=0o755, exist_ok=True)
            program.write_text(text)
            program.chmod(0o755)
        environ = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHON": sys.base_prefix,
            "SITE": sysconfig.get_path("purelib"), "STAGE": str(stage), "SHARED": str(self.shared),
            "CODE": str(Path(holdfast.agent.__file__).parent.parent), "PARTS": " ".join(PARTS),
            "VERSION": f"python{sys.version_info[0]}.{sys.version_info[1]}", "SHUTDOWN": SHUTDOWN,
            "TAKEN": ",".join(f"-{one}" for one in TAKEN),
        }
        self.begin(SETUP, str(root), environ)

    def begin(self, setup: str, root: str, environ: dict[str, str]) -> None:
        """Starts the script that makes its root and becomes its systemd."""
        try:
            self.cgroup.mkdir()
        except OSError as error:
            raise Cannot(f"no cgroup of its own: {error}") from error
        command = 'echo $$ > "$1/cgroup.procs"; shift; exec setpriv --pdeathsig KILL "$@"'
        self.process = subprocess.Popen(
            ["sh", "-c", command, "sh", str(self.cgroup), "unshare", "--mount", "--pid", "--fork",
             "--uts", "--ipc", "--net", "--cgroup", "--kill-child", "sh", "-c", setup, "sh", root],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        try:
            self.wait(lambda: self._comm() == "systemd", 30.0, "its systemd begins")
        except AssertionError as error:
            self.close()
            raise Cannot(f"no namespaces with a systemd of their own: {error}") from error

    def _comm(self) -> str:
        try:
            return Path(f"/proc/{self.first()}/comm").read_text().strip()
        except OSError:
            return ""

    def first(self) -> int:
        """The process id, out here, of its first process."""
        pid = self.process.pid
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(found[0]) if found else 0

    def inside(self, *command: str) -> str:
        """What a command prints that runs in its namespaces."""
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True,
                              timeout=120, check=False)
        return done.stdout + done.stderr

    def enter(self) -> list[str]:
        """The words before a command that is to run inside."""
        return ["nsenter", "--target", str(self.first()), "--mount", "--pid", "--uts", "--ipc",
                "--net", "--cgroup", "--root", "--"]

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str) -> None:
        """Until it is so; ends the test, with what the units said, when it never is."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s or self.process.poll() is not None:
                raise AssertionError(f"never: {what}\n{self.said()}")
            time.sleep(0.05)

    def said(self) -> str:
        """What the units wrote, and what went wrong before there were any."""
        texts = [f"{one.name}: {one.read_text(errors='replace')[-4000:]}"
                 for one in sorted(self.shared.glob("*.err"))]
        if self.process.poll() is not None and self.process.stderr is not None:
            texts.append(self.process.stderr.read())
        return "\n".join(texts)

    def close(self) -> None:
        """Ends what is left, and takes the cgroups away."""
        self.process.kill()
        self.process.wait(30.0)
        if self.process.stderr is not None:
            self.process.stderr.close()
        events = self.cgroup / "cgroup.events"
        deadline_s = time.monotonic() + 30.0
        while "populated 1" in events.read_text() and time.monotonic() < deadline_s:
            time.sleep(0.02)
        for folder, _, _ in os.walk(self.cgroup, topdown=False):
            os.rmdir(folder)


def _stage(stage: Path, agent_toml: str) -> None:
    """Files that are copied into its root."""
    units, opt = stage / "etc/systemd/system", stage / "opt/holdfast"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site = opt / "lib" / version / "site-packages"
    for path in (units, site, opt / "bin", stage / "etc/holdfast", stage / "run/host"):
        path.mkdir(parents=True)
    (site / "site.pth").write_text("/opt/site\n")
    (opt / "pyvenv.cfg").write_text(
        "home = /opt/python/bin\ninclude-system-site-packages = false\n"
    )
    (opt / "bin/python").symlink_to(f"/opt/python/bin/{version}")
    (opt / "bin/holdfast").write_text(AGENT)
    (opt / "bin/holdfast").chmod(0o755)
    etc = {
        "passwd": "root:x:0:0::/root:/bin/sh\nholdfast:x:999:999::/:/usr/sbin/nologin\n"
        "nobody:x:65534:65534::/:/usr/sbin/nologin\n",
        "group": "root:x:0:\nholdfast:x:999:\nnogroup:x:65534:\n", "hostname": "holdfast-test\n",
        "machine-id": "0" * 31 + "1\n", "nsswitch.conf": "passwd: files\ngroup: files\n",
        "ld.so.conf": "/opt/python/lib\ninclude /usr/share/none/*.conf\n",
        "holdfast/agent.toml": agent_toml,
    }
    for name, text in etc.items():
        (stage / "etc" / name).write_text(text)
    (stage / "run/host/container-manager").write_text("holdfast-test\n")
    (units / "mount.d").mkdir()
    (units / "mount.d/keep.conf").write_text(KEEP)
    # What any user can do: a path that can never be followed, where the cache would be.
    (stage / "var/tmp").mkdir(parents=True)
    (stage / "var/tmp/neuron-compile-cache").symlink_to("neuron-compile-cache")
    for target in BORROWED:
        file = Path(f"/usr/lib/systemd/system/{target}.target")
        if file.exists():
            shutil.copy(file, units)
    shutil.copy("/usr/lib/systemd/system/systemd-reboot.service", units)
    (units / "test.target").write_text(TARGET)
    for name in ("holdfast.service", "holdfast-node.socket", "holdfast-node@.service"):
        shutil.copy(UNITS / name, units)
        drop_in = units / f"{name}.d"
        if name.endswith(".service"):  # there is no journal here
            drop_in.mkdir()
            (drop_in / "said.conf").write_text(
                f"[Service]\nStandardError=append:/shared/{name}.err\n"
            )
    shutil.copy(UNITS / "holdfast-evidence.conf", units / "holdfast.service.d/evidence.conf")
