"""Loads the live page and the policy that allows its own script and style and nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources


def load_page() -> tuple[bytes, str]:
    """(the page, its Content-Security-Policy)."""
    page = resources.files(__package__).joinpath("page.html").read_bytes()
    script, style = (_hashes(page, tag) for tag in (b"script", b"style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return page, policy


def _hashes(page: bytes, tag: bytes) -> str:
    """The sources of all inline elements of one kind, as CSP writes them."""
    bodies = re.findall(b"<" + tag + b">(.*?)</" + tag + b">", page, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(body).digest()).decode() for body in bodies)
    return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
