"""What outlives the machine is on its disk before anybody is told so: the system's calls say it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

# Writes a line for each sync of a file, in the order of the calls, to the descriptor in SYNCED.
SPY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void tell(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 2);
    const char *to = getenv("SYNCED");
    if (size > 0 && to) { path[size] = '\n'; if (write(atoi(to), path, size + 1) < 0) abort(); }
}
#define SPY(name) int name(int fd) { \
    int (*real)(int) = dlsym(RTLD_NEXT, #name); int done = real(fd); tell(fd); return done; }
SPY(fsync)
SPY(fdatasync)
"""
STORE = """
import asyncio, os, sys
from pathlib import Path
from holdfast.agent.core.model import StoreWrite
from holdfast.agent.store.sqlite import SqliteStore

async def main():
    store = SqliteStore(Path(sys.argv[1]))
    for version in range(3):
        os.write(int(os.environ["SYNCED"]), b"put\\n")
        await store.put(StoreWrite("run/r", version, b"{}"))
        os.write(int(os.environ["SYNCED"]), b"told\\n")
    store.close()

asyncio.run(main())
"""
JOURNAL = """
import asyncio, os, sys
from pathlib import Path
from holdfast.agent.history.journal import Intent, Journal

async def main():
    journal = Journal(Path(sys.argv[1]))
    for number in range(3):
        os.write(int(os.environ["SYNCED"]), b"put\\n")
        intent = Intent(str(number), "reboot_node", "node/a", "f", "", "r", 0.0)
        await journal.append(intent, synced=True, wait=True)
        os.write(int(os.environ["SYNCED"]), b"told\\n")
    journal.close()

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def spy(tmp_path_factory):
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc is missing (Debian package build-essential): no spy on fsync")
    source = tmp_path_factory.mktemp("spy") / "spy.c"
    source.write_text(SPY)
    made = source.with_suffix(".so")
    subprocess.run([gcc, "-shared", "-fPIC", "-Wall", "-Werror", "-o", made, source, "-ldl"],
                   check=True, timeout=60)
    return made


@pytest.mark.parametrize(("program", "file"), [(STORE, "store.db"), (JOURNAL, "journal.db")])
def test_a_plan_and_a_lasting_intent_are_on_the_disk_before_it_is_said(
    program, file, spy, tmp_path
):
    with open(tmp_path / "calls", "w+b") as calls:
        environ = {**os.environ, "LD_PRELOAD": str(spy), "SYNCED": str(calls.fileno())}
        subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environ, check=True,
                       pass_fds=(calls.fileno(),), timeout=60)
    said = (tmp_path / "calls").read_text().split("put\n")[1:]
    assert len(said) == 3
    for one in said:
        before, _, _ = one.partition("told\n")
        assert f"{file}-wal\n" in before, said
