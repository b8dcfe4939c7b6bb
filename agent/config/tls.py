"""TLS of the API: the agent's certificate, and those of the clients that it believes.

Owns what is read of the three files, and which name a client's certificate gives it.
"""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import Any

from ..system.regular import check_regular
from .settings import Api
from .store import PEM_MAX_BYTES

NAME_MAX = 253


def server_context(api: Api, errors: list[str]) -> ssl.SSLContext | None:
    """None without a certificate.  What is wrong is added to `errors`."""
    if not (api.tls_cert or api.tls_key or api.tls_client_ca or api.tls_operators):
        return None
    if not (api.tls_cert and api.tls_key):
        errors.append("api.tls_cert, api.tls_key: set both to files in PEM, or none of api.tls_*")
        return None
    if api.tls_operators and not api.tls_client_ca:
        errors.append("api.tls_operators: names without api.tls_client_ca: set the file of who "
                      "signs their certificates")
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    key = Path(api.tls_key)
    # OpenSSL waits for whatever is at a FIFO's other end.
    before = len(errors)
    for name, file in (("api.tls_cert", api.tls_cert), ("api.tls_key", api.tls_key),
                       ("api.tls_client_ca", api.tls_client_ca)):
        try:
            if file:
                check_regular(file, PEM_MAX_BYTES)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            errors.append(f"{name}: {file}: {why}: set a file in PEM that uid {os.getuid()} may "
                          "read")
    if len(errors) > before:
        return None
    try:
        if stat.S_IMODE(key.stat().st_mode) & 0o077:
            errors.append(f"api.tls_key: {key}: others may read it: chmod 600 {key}")
        # A pass phrase would be asked for at the terminal, of which there is none.
        made.load_cert_chain(api.tls_cert, key, password=lambda: "")
        if api.tls_client_ca:
            made.load_verify_locations(api.tls_client_ca)
            made.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:  # ssl.SSLError is one
        files = ", ".join(filter(None, (api.tls_cert, api.tls_key, api.tls_client_ca)))
        errors.append(f"api.tls_cert, api.tls_key, api.tls_client_ca: {error.strerror or error}: "
                      f"set files in PEM that belong together ({files})")
        return None
    return made


def client_names(certificate: Any) -> tuple[str, ...]:
    """The names that a verified certificate gives its owner: its common name and its DNS names."""
    if not isinstance(certificate, dict):
        return ()
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    found = [value for key, value in subject if key == "commonName"]
    found += [value for key, value in certificate.get("subjectAltName", ()) if key == "DNS"]
    return tuple(str(one)[:NAME_MAX] for one in found)
