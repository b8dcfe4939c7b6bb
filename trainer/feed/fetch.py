"""Files of a data set, brought to local disk: from a directory, or from S3 by a child process.

Owns the child, its deadline and the local copies.  boto3 stays in the child: what it imports, its
threads and its memory do not enter a rank, and a request that hangs is ended with it.  A store that
says SlowDown is waited for in the child, while the rank waits outside any collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SLOW = frozenset({"SlowDown", "503", "Throttling", "ThrottlingException", "RequestLimitExceeded",
                  "RequestTimeout", "InternalError", "500"})
ABSENT = frozenset({"NoSuchKey", "NoSuchBucket", "404"})
FIRST_WAIT_S, LONGEST_WAIT_S = 0.2, 20.0
ASKED_MAX = 64


class NotThere(Exception):
    """The file does not exist."""


class TooSlow(Exception):
    """It did not come in time."""


class Fetcher:
    """Brings files by name; `root` is a directory or s3://bucket/prefix."""

    def __init__(self, root: str, folder: Path, deadline_s: float) -> None:
        self._remote = root.startswith("s3://")
        self._root, self._deadline_s = root, deadline_s
        self._folder = folder if self._remote else Path(root)
        self._child: subprocess.Popen[str] | None = None
        self._asked: set[str] = set()
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._found: dict[str, dict[str, Any]] = {}

    def ask(self, name: str) -> None:
        """Begins to bring a file, if it is not here; at most ASKED_MAX at a time."""
        here = not self._remote or (self._folder / name).exists()
        if here or name in self._asked or len(self._asked) >= ASKED_MAX:
            return
        self._asked.add(name)
        self._tell({"name": name, "to": str(self._folder / name), "within_s": self._deadline_s})

    def get(self, name: str) -> Path:
        """The file, once it is here.  Raises NotThere, TooSlow or OSError."""
        path = self._folder / name
        if not self._remote or path.exists():
            if not path.exists():
                raise NotThere("no such file")
            return path
        self.ask(name)
        deadline_s = time.monotonic() + self._deadline_s
        while name not in self._found:
            left_s = deadline_s - time.monotonic()
            try:
                answer = self._answers.get(timeout=max(left_s, 0.01))
            except queue.Empty:
                self.close()
                raise TooSlow(f"did not come within {self._deadline_s:.0f} s") from None
            if answer.get("ended"):
                self.close()
                raise TooSlow(f"is not to be had: {answer['ended']}")
            self._found[str(answer["name"])] = answer
        answer = self._found.pop(name)
        self._asked.discard(name)
        if answer.get("absent"):
            raise NotThere(answer["absent"])
        if answer.get("failed"):
            raise TooSlow(answer["failed"])
        return path

    def forget(self, name: str) -> None:
        """A copy that is not what it should be: the next `get` brings it anew."""
        if self._remote:
            (self._folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        child, self._child = self._child, None
        self._asked.clear()
        if child is not None:
            child.kill()
            child.wait(10)
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # what it was asked last is not wanted any more
                child.stdin.close()

    def _tell(self, question: dict[str, Any]) -> None:
        if self._child is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._child = child = subprocess.Popen(
                [sys.executable, "-P", "-m", "holdfast.trainer.feed.fetch", self._root],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            threading.Thread(target=self._listen, args=(child,), daemon=True).start()
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
        except OSError:  # its thread says why
            pass

    def _listen(self, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        with child.stdout:
            for line in child.stdout:
                self._answers.put(json.loads(line))
        if child is self._child:
            self._answers.put({"ended": f"the child that fetches ended with {child.wait()}"})


# ------------------------------------------------------------------------------------ in the child


def bring(
    get: Callable[[str], bytes], code_of: Callable[[Exception], str], name: str, to: Path,
    within_s: float, sleep: Callable[[float], object] = time.sleep,
) -> dict[str, Any]:
    """One file.  A store that is slow is asked again, each time later and not all at once."""
    deadline_s, wait_s = time.monotonic() + within_s, FIRST_WAIT_S
    while True:
        try:
            data = get(name)
            break
        except Exception as error:
            code = code_of(error)
            if code in ABSENT:
                return {"name": name, "absent": code}
            if not code:
                return {"name": name, "failed": f"cannot be fetched: {str(error)[:200]}"}
            pause_s = wait_s * random.uniform(0.5, 1.0)
            if code not in SLOW or time.monotonic() + pause_s > deadline_s:
                return {"name": name, "failed": f"cannot be fetched: {code}"}
            sleep(pause_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    from ..checkpoint.format import write_file

    write_file(to, data)
    return {"name": name}


def main(root: str) -> int:
    """Answers each line of standard input with one line; ends with it."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError as error:
        print(json.dumps({"ended": f"no {error.name}: install holdfast[s3]"}), flush=True)
        return 0
    bucket, _, prefix = root.removeprefix("s3://").partition("/")
    client = boto3.client("s3", endpoint_url=os.environ.get("AWS_ENDPOINT_URL") or None,
                          config=Config(connect_timeout=10, read_timeout=60,
                                        retries={"max_attempts": 1}))

    def get(name: str) -> bytes:
        key = f"{prefix}/{name}" if prefix else name
        return bytes(client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def code_of(error: Exception) -> str:
        if isinstance(error, ClientError):
            return str(error.response.get("Error", {}).get("Code", ""))
        return "RequestTimeout" if isinstance(error, BotoCoreError) and "imed out" in str(
            error) else ""

    for line in sys.stdin:
        asked = json.loads(line)
        answer = bring(get, code_of, asked["name"], Path(asked["to"]), asked["within_s"])
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
