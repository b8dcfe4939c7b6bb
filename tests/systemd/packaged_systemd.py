"""A machine's root with a systemd of its own over it, on which Debian packages are installed.

Owns an overlay over the machine's whole root, so that dpkg works there as on the machine and what
it does is seen in one folder; that folder outlives the systemd, which can be ended as by a power
cut and started again.  What is taken from it is own_systemd.py's; the kernel's log is not shown.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from own_systemd import SHUTDOWN, TAKEN, Cannot, OwnSystemd, cgroups
from packages import SYSTEM_PYTHON

SETUP = r"""
set -e
top=$1
mkdir -p "$top/upper" "$top/work" "$top/root"
mount -t overlay own "$top/root" -o "lowerdir=/,upperdir=$top/upper,workdir=$top/work"
cd "$top/root"
mkdir -p shared old
mount --bind "$SHARED" shared
mount --bind "$DEBS" mnt
for place in run tmp dev; do mount -t tmpfs -o mode=755 own $place; done
chmod 1777 tmp
mkdir -p run/host dev/shm dev/pts
echo holdfast-test > run/host/container-manager
for node in null zero full random urandom tty; do
    touch dev/$node; mount --bind /dev/$node dev/$node
done
mount -t proc proc proc
mount --bind proc/sys proc/sys; mount -o remount,bind,ro proc/sys
mount -t sysfs -o ro sys sys
mount -t cgroup2 cgroup sys/fs/cgroup
if [ ! -e etc/own ]; then
    touch etc/own
    echo 00000000000000000000000000000002 > etc/machine-id
    echo holdfast-test > etc/hostname
    rm -rf etc/systemd/system/*.wants usr/lib/systemd/system/*.wants usr/sbin/policy-rc.d
    mkdir -p usr/lib/systemd/system/sysinit.target.wants var/log/journal
    ln -s ../systemd-journald.service usr/lib/systemd/system/sysinit.target.wants
    mkdir -p etc/systemd/system/mount.d
    printf '[Unit]\nDefaultDependencies=no\n' > etc/systemd/system/mount.d/keep.conf
fi
chmod 755 shared/ended
mount --bind shared/ended "usr/${SHUTDOWN#/usr/}"
hostname holdfast-test
ip link set lo up
pivot_root . old
cd /
umount -l old
mount --make-rshared /  # a credential is mounted elsewhere and comes by propagation
exec setpriv --bounding-set "$TAKEN" --inh-caps "$TAKEN" -- \
    env -i container=holdfast-test PATH=/usr/sbin:/usr/bin \
    SYSTEMD_UNIT_PATH=/etc/systemd/system:/run/systemd/system:/usr/lib/systemd/system \
    SYSTEMD_GENERATOR_PATH=/none SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/none \
    /usr/lib/systemd/systemd --system --unit=multi-user.target --log-target=null --show-status=no
"""
READY_S = 120.0
ENDED = "#!/bin/sh\necho \"$1\" > /shared/verb\n"

JOB = """
import os, time
path = "/shared/rank-" + os.environ["RANK"]
count = 0
while not os.path.exists("/shared/enough"):
    count += 1
    with open(path + ".new", "w") as file:
        file.write(f"{os.getpid()} {count}")
    os.replace(path + ".new", path)
    time.sleep(0.05)
"""


class PackagedSystemd(OwnSystemd):
    """See the module.  `debs` is shown as /mnt."""

    def __init__(self, folder: Path, debs: Path) -> None:
        if shutil.which("dpkg") is None or shutil.which("ip") is None:
            raise Cannot("dpkg or ip is missing (Debian packages dpkg, iproute2)")
        self.shared, self.top, self.debs = folder / "shared", folder / "top", debs
        self.shared.mkdir()
        self.shared.chmod(0o777)
        self.top.mkdir()
        (self.shared / "ended").write_text(ENDED)
        self.cgroup = cgroups() / f"holdfast-package-{os.getpid()}"
        self.boot()

    def boot(self) -> None:
        """Begins, over what the last one left."""
        environ = {
            "PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SHARED": str(self.shared),
            "DEBS": str(self.debs), "SHUTDOWN": SHUTDOWN,
            "TAKEN": ",".join(f"-{one}" for one in TAKEN)}
        self.begin(SETUP, str(self.top), environ)

    def cut(self) -> None:
        """As when its power is cut: the first process is killed, and all others with it."""
        self.close()

    def upper(self, *names: str) -> list[str]:
        """Paths in its root that hold one of these words and are not the machine's own."""
        found = []
        for folder, folders, files in os.walk(self.top / "upper"):
            for name in folders + files:
                path = Path(folder, name)
                if any(one in name for one in names) and not path.is_char_device():
                    found.append("/" + str(path.relative_to(self.top / "upper")))
        return sorted(found)

    def must(self, *command: str) -> str:
        """What a command prints that must succeed."""
        done = subprocess.run([*self.enter(), *command], capture_output=True, text=True,
                              timeout=300, check=False)
        assert done.returncode == 0, (
            f"{command}: {done.returncode}\n{done.stdout}{done.stderr}{self.said()}")
        return done.stdout

    def said(self) -> str:
        """The journal's last lines, and what went wrong before there was one."""
        return super().said() or self.inside("journalctl", "-n", "60", "--no-pager")

    def active(self) -> bool:
        return self.inside("systemctl", "is-active", "holdfast.service") == "active\n"

    def status(self) -> dict[str, Any]:
        """The node's, {} where nobody answers."""
        said = self.inside("holdfast", "status", "--json")
        return json.loads(said)[0] if said.startswith("[") else {}

    def answers(self) -> bool:
        return bool(self.status())

    def agent(self) -> int:
        return int(self.must("systemctl", "show", "-P", "MainPID", "holdfast.service"))

    def ranks(self) -> tuple[list[int], int]:
        """The ranks' process ids, and how often they have gone round, in all."""
        files = sorted(self.shared.glob("rank-?"))
        found = [[int(word) for word in one.read_text().split()] for one in files]
        return [pid for pid, _ in found], sum(count for _, count in found)

    def watched(self) -> bool:
        return [one["run"] for one in self.status().get("runs", [])] == ["long"]

    def start_job(self, holdfast: str) -> list[int]:
        """The process ids of the ranks of a run of two."""
        for old in self.shared.glob("rank-?"):
            old.unlink()
        (self.shared / "job.py").write_text(JOB)
        self.must("systemd-run", "--unit=job", "--uid=nobody", "--setenv=HOME=/tmp", holdfast,
                  "run", "--run", "long", "--python", SYSTEM_PYTHON, "--nproc-per-node", "2",
                  "/shared/job.py")
        self.wait(lambda: self.watched() and len(self.ranks()[0]) == 2, READY_S,
                  "the run is watched")
        return self.ranks()[0]

    def goes_on(self, agent: int, pids: list[int]) -> None:
        """Another agent than that, the same ranks, which go on."""
        self.wait(lambda: self.active() and self.agent() not in (0, agent), READY_S,
                  "another agent")
        self.wait(self.watched, READY_S, "the run is watched again")
        rounds = self.ranks()[1]
        self.wait(lambda: self.ranks()[1] > rounds, READY_S, "the ranks go on")
        assert self.ranks()[0] == pids

    def install(self, which: Path) -> None:
        self.must("dpkg", "--install", f"/mnt/{which.name}")
