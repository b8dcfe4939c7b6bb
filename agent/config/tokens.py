"""The file of bearer tokens, and which addresses need one.

Owns the file's form, and the rule that nothing listens beyond this machine without a token.  What
a role may do is agent/web/auth.py's.
"""

from __future__ import annotations

import os
import stat
import tomllib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname

from holdfast.worker import toml_text

from ..system.regular import open_regular

CREDENTIALS = "CREDENTIALS_DIRECTORY"  # systemd.exec(5)
OPERATOR, READ = "operator", "read"
TOKENS_MAX = 1000
TOKEN_MIN = 16
FILE_MAX_BYTES = 1 << 20
NAME = "tokens"  # of the credential in the unit, and of the file beside the configuration


def usual_file(config: Path | None, environ: Mapping[str, str]) -> str:
    """The tokens of an agent whose configuration names none: what systemd hands over
    (LoadCredential=), else the file `tokens` beside the configuration, where this process may read
    it: under systemd that file is root's alone.  "" when there is neither."""
    handed = environ.get(CREDENTIALS)
    places = [Path(handed)] if handed else [config.parent] if config is not None else []
    return next((str(one / NAME) for one in places if os.access(one / NAME, os.R_OK)), "")


def _handed_over(path: Path) -> bool:
    """Whether systemd made this file for us.  It guards the folder, and shows the entry by which
    our user may read as a right of the group (an access control list's mask)."""
    handed = os.environ.get(CREDENTIALS)
    return bool(handed) and path.parent == Path(str(handed))


def read_tokens(file: str, errors: list[str]) -> list[tuple[bytes, str]]:
    """(token, role) of each line of FILE; nothing for "".  What is wrong is added to `errors`."""
    if not file:
        return []
    path = Path(file)
    try:
        with open(open_regular(path), "rb") as handle:
            mode = stat.S_IMODE(os.fstat(handle.fileno()).st_mode)
            if mode & 0o077 and not _handed_over(path):
                errors.append(f"{path}: others may read it: chmod 600 {path}")
                return []
            text = handle.read(FILE_MAX_BYTES + 1)
        if len(text) > FILE_MAX_BYTES:
            raise ValueError(f"longer than {FILE_MAX_BYTES} bytes")
        table = toml_text.parse(tomllib.loads, text)
    except OSError as error:
        errors.append(f"{path}: {error.strerror}: set api.tokens_file to a file that uid "
                      f"{os.getuid()} may read")
        return []
    except ValueError as error:
        errors.append(f"{path}: no valid TOML: {error}")
        return []
    bad = [number for number, (token, role) in enumerate(table.items(), 1)
           if role not in (OPERATOR, READ) or len(token) < TOKEN_MIN or number > TOKENS_MAX]
    errors += [f"{path}: token {number}: set a token of at least {TOKEN_MIN} characters to "
               '"operator" or "read"' for number in bad[:10]]
    return [(token.encode(), role) for token, role in table.items()] if not bad else []


def is_loopback(host: str) -> bool:
    """Whether a name or address can only be this machine."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def openable(host: str) -> str:
    """The host of an address that a person can open: for all of this machine's, its name."""
    try:
        return gethostname() if ip_address(host.strip("[]")).is_unspecified else host
    except ValueError:
        return host


def check_listening(
    listen: str, tokens_file: str, certified: bool, origin: str, errors: list[str]
) -> None:
    """What would leave an agent without its page: a bad file, or nobody who may ask.  `certified`:
    whoever asks needs a certificate."""
    before = len(errors)
    tokens = read_tokens(tokens_file, errors)
    if len(errors) == before and listen and not tokens and not certified:
        if not is_loopback(listen.rpartition(":")[0]):
            errors.append(f"{origin}: agent.listen = {listen!r} is not loopback: set "
                          "api.tokens_file or api.tls_client_ca, or listen on 127.0.0.1")
