"""Carries connections to a server whose answers are to come late: `PORT HOST:PORT FILE`.

Owns the delay alone: FILE holds the least and the most seconds, is read again for every piece of an
answer, and "0 0" is none.  What one connection answers keeps its order.  Standard library alone;
says "ready" once it listens, on all addresses, and dies with whoever started it.
"""

from __future__ import annotations

import asyncio
import ctypes
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PIECE = 1 << 16


async def late(source: asyncio.StreamReader, into: asyncio.StreamWriter, file: Path) -> None:
    loop = asyncio.get_running_loop()
    held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

    async def deliver() -> None:
        while True:
            due_s, piece = await held.get()
            await asyncio.sleep(due_s - loop.time())
            into.write(piece)
            if not piece:
                return into.close()

    async def take() -> None:
        due_s, piece = 0.0, b"."
        while piece:
            try:
                piece = await source.read(PIECE)
            except OSError:
                piece = b""
            least_s, most_s = map(float, file.read_text().split())
            due_s = max(due_s, loop.time() + random.uniform(least_s, most_s))
            held.put_nowait((due_s, piece))

    await asyncio.gather(deliver(), take())


async def at_once(source: asyncio.StreamReader, into: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await source.read(PIECE):
            into.write(piece)
    into.close()


async def serve(port: int, host: str, target: int, file: Path) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection(host, target)
        except OSError:
            return writer.close()
        await asyncio.gather(late(from_server, writer, file), at_once(reader, to_server))

    server = await asyncio.start_server(carry, "0.0.0.0", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    where, _, number = sys.argv[2].rpartition(":")
    asyncio.run(serve(int(sys.argv[1]), where, int(number), Path(sys.argv[3])))
