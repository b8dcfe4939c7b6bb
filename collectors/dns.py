"""Names that must resolve on this node: whether they do, and how fast.

Owns asking the resolver for the names that the operator gave; without one, nothing is asked.  Runs
in a probe child, one thread a name: a resolver whose servers are gone takes half a minute to say
that.
"""

from __future__ import annotations

import socket
from functools import partial

from .contract import SLOW, Metric, NoData, Probed, Roots, Sample
from .sources.questions import Questions

NAMES_MAX = 16


class DnsCollector(Probed):
    """Whether each configured name resolves, and how fast; read in a child."""

    name = "dns"
    pace = SLOW
    metrics = (
        Metric("host_dns_lookup_seconds", "gauge", "How long the last answer for a name took.",
               ("name",)),
        Metric("host_dns_waiting_seconds", "gauge",
               "Age of a question for a name that has no answer; 0 when it is answered.",
               ("name",)),
        Metric("host_dns_failed", "gauge", "1 when a name does not resolve.", ("name", "error"),
               True),
    )

    def __init__(self) -> None:
        self._questions: Questions[int] = Questions()

    def here(self, roots: Roots) -> str:
        """"" when there are names to ask for."""
        return "" if roots.dns_names else "no name to resolve is configured (collectors.dns_names)"

    def collect(self, roots: Roots, boot_s: float) -> list[Sample]:
        """One reading.  NoData without a name."""
        names = [name for name in roots.dns_names
                 if "," not in name and name.isprintable()][:NAMES_MAX]  # else no subject holds it
        if not names:
            raise NoData("no name to resolve is configured (collectors.dns_names)")
        calls = {name: partial(_resolve, name) for name in names}
        found: list[Sample] = []
        for name, waited_s, answer in self._questions.round(calls, boot_s):
            subject = f"name={name}"
            found.append(Sample("host_dns_waiting_seconds", subject, waited_s, boot_s))
            if answer is None:
                continue
            found.append(Sample("host_dns_lookup_seconds", subject, answer.took_s, answer.boot_s))
            if answer.error is not None:
                more = f"{subject},error={_word(answer.error)}"
                found.append(Sample("host_dns_failed", more, 1.0, answer.boot_s))
        return found


def _resolve(name: str) -> int:
    """How many addresses the name has.  Raises OSError (socket.gaierror is one) when it has
    none."""
    try:
        return len(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except UnicodeError as error:  # a label that is empty or too long
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error


def _word(error: OSError) -> str:
    """The word for an error: EAI_AGAIN means that no server answered; EAI_NONAME is an answer, that
    there is no such name."""
    names = {getattr(socket, one): one for one in dir(socket) if one.startswith("EAI_")}
    return names.get(error.errno, "EAI_SYSTEM") if isinstance(error, socket.gaierror) else "OSERROR"
