"""Files of a data set, brought to local disk: from a directory, or by a child from S3 or Ray.

Owns the child, its deadline and the local copies.  boto3 and ray stay in the child: what they
import, their threads, memory and death do not enter a rank, and a request that hangs is ended with
it.  A store that is slow or out of reach is waited for there; the rank waits outside collectives.
Copies are named by the caller, by what is in them: ranks of a node share them, whoever brought one.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import queue
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

SLOW = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequestsException",
                  "RequestLimitExceeded", "RequestTimeout", "InternalError"})
ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "404"})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 20.0
ASKED_MAX = 64
LANES = 4  # requests at a time: what is asked ahead must not hold up what is waited for
WRITTEN_S = 3600.0  # a file without a name that is older is nobody's any more
SAID_S = 1.0  # beyond the deadline, for the child to say why
AGAIN_S = 1.0  # from the death of a child to the next
TRIES = 3  # of a copy that another rank evicts before it is read


Get = Callable[[str], bytes]


class Source(NamedTuple):
    """What the child reads from."""

    get: str  # module:function that makes a Get of a root
    extra: str  # of Holdfast's, which it needs
    look_at: str  # where what fails for a while is looked into
    cure: str  # of what no asking again cures


S3 = Source("holdfast.trainer.feed.fetch:s3_get", "s3", "the network",
            "set data_options.root, or the credentials of AWS_*")
SOURCES = {"s3://": S3, "ray:": Source(
    "holdfast.trainer.feed.ray_source:ray_get", "ray", "Ray's nodes and workers",
    "mend the dataset, or set data_options.dataset")}


def source_of(root: str) -> Source | None:
    """None for a directory."""
    return next((one for prefix, one in SOURCES.items() if root.startswith(prefix)), None)


class NotThere(Exception):
    """The file does not exist."""


class TooSlow(Exception):
    """It did not come in time, or cannot come."""


class Fetcher:
    """Brings files by name; `root` is a directory or begins as one of SOURCES.

    `local_bytes` bounds all copies in `folder`, 0 for half of what that disk has free; a copy that
    this rank has asked for and not read yet is never evicted for another one.
    """

    def __init__(self, root: str, folder: Path, deadline_s: float, local_bytes: int = 0) -> None:
        source = source_of(root)
        self._remote, self._look_at = source is not None, source.look_at if source else ""
        self._root, self._deadline_s = root, deadline_s
        self._folder = folder if self._remote else Path(root)
        self._local_bytes = local_bytes
        self._child: subprocess.Popen[str] | None = None
        self._asked: set[str] = set()  # copies that are on their way
        self._wanted: set[str] = set()  # copies that are to be read yet
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()

    def ask(self, copies: Mapping[str, str]) -> None:
        """Begins to bring those of these that are not here (copy -> name), in place of what was
        asked for before; at most ASKED_MAX at a time.  Whether they come is found out by reading.
        """
        if not self._remote:
            return
        self._hear()
        self._wanted = set(copies)
        for copy, name in copies.items():
            asked = len(self._asked) < ASKED_MAX and copy not in self._asked
            if asked and not (self._folder / copy).exists():
                self._tell(name, copy)

    def read(self, name: str, copy: str) -> bytes:
        """What is in it, once it is here.  Raises NotThere, TooSlow or OSError."""
        if not self._remote:
            try:
                return (self._folder / name).read_bytes()
            except FileNotFoundError:
                raise NotThere("no such file") from None
        self._hear()
        self._wanted.add(copy)
        try:
            for _ in range(TRIES):
                if not (self._folder / copy).exists():
                    self._wait(name, copy)
                with contextlib.suppress(FileNotFoundError):
                    data = (self._folder / copy).read_bytes()
                    os.utime(self._folder / copy)  # the oldest are evicted first
                    return data
            raise TooSlow(f"is evicted from {self._folder} before it is read: set a larger "
                          "data_options.local_gb")
        finally:
            self._wanted.discard(copy)

    def forget(self, copy: str) -> None:
        """A copy that is not what it should be, or not wanted: the next reading brings it anew."""
        if self._remote:
            (self._folder / copy).unlink(missing_ok=True)

    def close(self) -> None:
        child, self._child = self._child, None
        self._asked.clear()
        if child is not None:
            child.kill()
            child.wait(10)
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # what it was asked last is not wanted any more
                child.stdin.close()

    def _wait(self, name: str, copy: str) -> None:
        # What was asked ahead may have been missing, or had its time, while nobody waited: then it
        # is asked again.
        ahead, deadline_s = copy in self._asked, time.monotonic() + self._deadline_s
        if not ahead:
            self._tell(name, copy)
        while True:
            answer = self._hear(deadline_s + SAID_S - time.monotonic(), copy)
            if answer is None:
                self.close()
                raise TooSlow(f"did not come within {self._deadline_s:.0f} s: look at "
                              f"{self._look_at}, or set a larger data_options.deadline_s")
            if answer.get("ended"):
                self.close()
                raise TooSlow(f"is not to be had: {answer['ended']}")
            if answer.get("died"):  # with a head of Ray's, or for want of memory
                self.close()
                if time.monotonic() + AGAIN_S > deadline_s:
                    raise TooSlow(f"is not to be had: {answer['died']}: look at {self._look_at}")
                time.sleep(AGAIN_S)
                ahead = False
                self._tell(name, copy)
                continue
            if not answer.get("absent") and not answer.get("failed"):
                return
            if not ahead and answer.get("absent"):
                raise NotThere(answer["absent"])
            if not ahead:
                raise TooSlow(answer["failed"])
            ahead = False
            self._tell(name, copy)

    def _hear(self, within_s: float = 0.0, copy: str = "") -> dict[str, Any] | None:
        """Takes in what the child has said, until it speaks of this copy, or of its own end."""
        deadline_s = time.monotonic() + within_s
        while True:
            left_s = deadline_s - time.monotonic()
            try:
                answer = self._answers.get(timeout=left_s) if left_s > 0 else (
                    self._answers.get_nowait())
            except queue.Empty:
                return None
            if answer.get("ended") or answer.get("died"):
                self._asked.clear()
                if copy:
                    return answer
                self.close()
                continue
            self._asked.discard(answer["copy"])
            if answer["copy"] == copy:
                return answer
            # Of what was asked ahead: who needs it and does not find it asks again, and is told.

    def _tell(self, name: str, copy: str) -> None:
        if self._child is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._child = child = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.trainer.feed.fetch"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            self._say([self._root, str(self._folder), self._local_bytes])
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        self._asked.add(copy)
        question = {"name": name, "copy": copy, "within_s": self._deadline_s,
                    "asked_s": time.monotonic(),
                    "keep": sorted(self._wanted)}
        self._say(question)

    def _say(self, what: object) -> None:
        assert self._child is not None and self._child.stdin is not None
        with contextlib.suppress(OSError):  # its thread says why
            self._child.stdin.write(json.dumps(what) + "\n")
            self._child.stdin.flush()

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                self._answers.put(json.loads(line))
        if child is self._child:
            self._answers.put({"died": f"the child that fetches ended with {child.wait()}"})


# ------------------------------------------------------------------------------------ in the child


class Absent(Exception):
    """The store has no such file."""


class Slow(Exception):
    """The store asks for patience, or cannot be reached: the same request may go well later."""


def bring(
    get: Get, keep: Callable[[str, bytes], None], name: str, copy: str, within_s: float,
    sleep: Callable[[float], object] = time.sleep, source: Source = S3,
    asked_s: float | None = None,
) -> dict[str, Any]:
    """One file.  A store that is slow is asked again, each time later and not all at once.

    `asked_s` by the clock that all processes share: who asked waits as long, and is to hear why.
    """
    begun_s = time.monotonic() if asked_s is None else asked_s
    deadline_s, wait_s = begun_s + within_s, FIRST_WAIT_S
    while True:
        try:
            keep(copy, get(name))
            return {"copy": copy}
        except Absent as error:
            return {"copy": copy, "absent": str(error)}
        except Slow as error:
            pause_s = wait_s * random.uniform(0.5, 1.0)
            if time.monotonic() + pause_s > deadline_s:
                return {"copy": copy, "failed":
                        f"cannot be fetched within {within_s:.0f} s ({str(error)[:200]}): look at "
                        f"{source.look_at}, or set a larger data_options.deadline_s"}
            sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
        except OSError as error:
            return {"copy": copy, "failed": f"cannot be kept in {error.strerror}"}
        except Exception as error:
            return {"copy": copy,
                    "failed": f"cannot be fetched: {str(error)[:200]}: {source.cure}"}


class Copies:
    """The folder of copies, kept below its bound: the one that was read longest ago goes first."""

    def __init__(self, folder: Path, local_bytes: int) -> None:
        self._folder, self._local_bytes = folder, local_bytes
        self._lock = threading.Lock()
        self.wanted: frozenset[str] = frozenset()  # never evicted: asked for, and to be read yet

    def keep(self, copy: str, data: bytes) -> None:
        """Raises OSError that names the folder and what to do."""
        from ..checkpoint.format import write_file

        with self._lock:
            try:
                self.evict(len(data))
                write_file(self._folder / copy, data)
            except OSError as error:
                raise OSError(error.errno, f"{self._folder}: {error.strerror}: make room there, or "
                              "set work_dir or a smaller data_options.local_gb") from None

    def evict(self, room: int) -> None:
        """Until so many bytes more are within the bound, or all that is left is wanted."""
        found = []
        for entry in os.scandir(self._folder):
            with contextlib.suppress(FileNotFoundError):  # another rank was here first
                status = entry.stat()
                if entry.name.startswith(".") and time.time() - status.st_mtime < WRITTEN_S:
                    continue  # it is being written
                found.append((status.st_mtime_ns, status.st_size, entry.name))
        used = sum(size for _, size, _ in found)
        bound = self._local_bytes or (used + shutil.disk_usage(self._folder).free) // 2
        for _, size, name in sorted(found):
            if used + room <= bound:
                break
            if name not in self.wanted:
                (self._folder / name).unlink(missing_ok=True)
                used -= size


def s3_get(root: str, connect_s: float = 10.0, read_s: float = 60.0) -> Get:
    """Reads an object below `root`.  Raises Absent, Slow, or what no asking again cures."""
    import boto3
    from botocore import exceptions as errors
    from botocore.config import Config
    from botocore.exceptions import ClientError, IncompleteReadError

    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL") or None,
                          config=Config(connect_timeout=connect_s, read_timeout=read_s,
                                        max_pool_connections=LANES,
                                        retries={"max_attempts": 1}))

    def get(name: str) -> bytes:
        key = f"{prefix}/{name}" if prefix else name
        try:
            return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            if code in ABSENT:
                raise Absent(code) from None
            if code in SLOW or status == 429 or status >= 500:
                raise Slow(code) from None
            raise ValueError(code) from None
        # Everything between this client and the server: names, connections, time, half an answer.
        except (errors.HTTPClientError, errors.ConnectionError, IncompleteReadError,
                OSError) as error:
            raise Slow(f"{type(error).__name__}: {error}") from None

    return get


def main() -> int:
    """Answers each line of standard input but the first with one line; ends with it.

    The first says what is read and where it is kept, and not the command line, which all users of
    the machine can read: what a dataset is given may hold a token."""
    root, folder, local_bytes = json.loads(sys.stdin.readline())
    source = source_of(root)
    assert source is not None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    try:
        get: Get = pkgutil.resolve_name(source.get)(root)
    except ImportError as error:
        print(json.dumps({"ended": f"no {error.name}: install holdfast[{source.extra}]"}),
              file=answers, flush=True)
        return 0
    copies, lock = Copies(Path(folder), local_bytes), threading.Lock()

    def work(asked: dict[str, Any]) -> None:
        answer = bring(get, copies.keep, asked["name"], asked["copy"], asked["within_s"],
                       source=source, asked_s=asked["asked_s"])
        with lock:
            print(json.dumps(answer), file=answers, flush=True)

    lanes = ThreadPoolExecutor(LANES)
    for line in sys.stdin:
        asked = json.loads(line)
        copies.wanted = frozenset(asked["keep"])
        lanes.submit(work, asked)
    os._exit(0)  # whoever asked has gone: nothing on its way is waited for


if __name__ == "__main__":
    # Under the name by which sources import it: their exceptions are caught by class.
    sys.exit(pkgutil.resolve_name("holdfast.trainer.feed.fetch:main")())
