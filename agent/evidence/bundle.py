"""A bundle: one incident and what stood around it, without secrets, as a tar for whoever helps.

Owns what goes in, and what never does: the words of other runs, secrets in any form that
worker/redact.py knows, and the variables of anybody's program.  The agent makes one of what it
knows; `holdfast bundle` adds the ends of the ranks' logs, which their owner alone may read.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.worker.redact import GONE, redacted

AROUND_S = 3600.0  # incidents that opened so long before or after
AROUND_MAX = 200
FILE_MAX_BYTES = 4 << 20  # of one part, before it is packed
LOG_TAIL_BYTES = 256 << 10
LOGS_MAX = 256
MODE = 0o640
NEVER = ("locals", "environ", "environment")  # what a program held in its hands
SECRET_KEY = re.compile(
    r"password|passwd|passphrase|secret|credential|(?:api|access|private|auth)[_-]?key|token(?!s)",
    re.IGNORECASE)
KEY_END = re.compile(r"-----END [A-Z ]{0,30}PRIVATE KEY-----")
Json = dict[str, Any]


def file_name(id: str) -> str:
    """An incident's id as a file's name."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in id)[:200]


def parts_of(incident: Json, status: Json, incidents: list[Json], **more: Any) -> dict[str, Any]:
    """The documents of a bundle, by name: of all that is told those of this node and this run."""
    run = incident.get("run", "")
    opened_s = incident["opened_wall_s"]
    near = [one for one in incidents if abs(one["opened_wall_s"] - opened_s) <= AROUND_S
            and one.get("run", "") in ("", run) and one["id"] != incident["id"]]
    node = {key: value for key, value in status.items() if key not in ("runs", "incidents")}
    node["faults"] = [one for one in status.get("faults", []) if one.get("run", "") in ("", run)]
    runs = [one for one in status.get("runs", []) if run and one["run"] == run]
    return {"incident": incident, "around": near[:AROUND_MAX], "node": node, "run": runs, **more}


def pack(id: str, parts: Mapping[str, Any], logs: Mapping[str, str]) -> bytes:
    """A tar.gz: each part as JSON, each log as text, all of it redacted."""
    packed = io.BytesIO()
    with gzip.GzipFile("", "wb", 6, packed, 0) as outer:
        with tarfile.open(fileobj=outer, mode="w") as archive:
            for name, part in parts.items():
                text = json.dumps(clean(part), indent=1, default=str).encode()
                if len(text) > FILE_MAX_BYTES:
                    text = f"left out: {len(text)} bytes\n".encode()
                _add(archive, f"{file_name(id)}/{name}.json", text)
            for name, log in logs.items():
                _add(archive, f"{file_name(id)}/logs/{file_name(name)}", clean_log(log).encode())
    return packed.getvalue()


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), MODE
    archive.addfile(member, io.BytesIO(content))


def clean(value: Any) -> Any:
    """The same without secrets, also where one has a name of its own beside it."""
    if isinstance(value, Mapping):
        return {redacted(str(key)): GONE if _named(key, one) else clean(one)
                for key, one in value.items() if str(key).lower() not in NEVER}
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and _named(value[0], value[1]):
            return [clean(value[0]), GONE]
        return [clean(one) for one in value]
    return redacted(value) if isinstance(value, str) else value


def _named(key: object, value: object) -> bool:
    """Whether a text is a secret by the name that it has; a path or a number of tokens is none."""
    if not isinstance(key, str) or not isinstance(value, str) or not value:
        return False
    return bool(SECRET_KEY.search(key)) and not value.startswith("/")


def clean_log(text: str) -> str:
    """A log's end, from the first whole line on.  Of a private key whose beginning was cut off only
    the lines in between would be left, which look like nothing."""
    cut = KEY_END.search(text)
    if cut is not None and "PRIVATE KEY-----" not in text[: cut.start()]:
        text = f"-----PRIVATE KEY {GONE}{text[cut.end():]}"
    return redacted(text)


def tail(path: Path) -> str:
    """The end of a log.  Raises OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_TAIL_BYTES))
        raw = file.read(LOG_TAIL_BYTES)
    if size > LOG_TAIL_BYTES:
        raw = raw.partition(b"\n")[2]
    return raw.decode("utf-8", "replace")


def write(path: Path, content: bytes) -> None:
    """A new file that its group may read and nobody else; FileExistsError where there is one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    with open(fd, "wb") as file:
        os.fchmod(fd, MODE)
        file.write(content)
