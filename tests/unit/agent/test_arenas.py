"""The agent's threads share one arena of the C library's memory, as it says of itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

THREADS = 3
ALLOCATES = f"""
import ctypes, sys, threading
from holdfast.agent import __main__ as agent

if sys.argv[1] == "shared":
    agent.share_one_arena()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.fdopen.argtypes = [ctypes.c_size_t], [ctypes.c_int, ctypes.c_char_p]
libc.malloc_info.argtypes, libc.fflush.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]
met = threading.Barrier({THREADS})


def allocate():
    met.wait()
    assert libc.malloc(50_000)
    met.wait()  # an arena whose thread has ended is the next one's


threads = [threading.Thread(target=allocate) for _ in range({THREADS})]
[one.start() for one in threads]
[one.join() for one in threads]
stdout = libc.fdopen(1, b"w")
assert libc.malloc_info(0, stdout) == 0
libc.fflush(stdout)
"""


@pytest.mark.parametrize(("how", "arenas"), [("each", 1 + THREADS), ("shared", 1)])
def test_threads_allocate_in_one_arena(how: str, arenas: int) -> None:
    said = subprocess.run([sys.executable, "-c", ALLOCATES, how], capture_output=True, text=True,
                          check=True, timeout=60).stdout
    if "<heap" not in said:
        pytest.skip("the C library is not glibc")
    assert said.count("<heap nr=") == arenas, said[:2000]
