"""Understands lines of the kernel's log: text in, Event or None out.

Owns the forms in which drivers print and the decoding of registers.  What a number or a phrase
means is data (agent/catalog/*.toml, read by agent/catalog/load.py).  Pure; a line is input from
outside: bounded, and never trusted to name a label of its own.

Any user has the kernel print text of his choice: the file name of a program that crashes, the name
of a cgroup, and, as the beginning of a line, a process's name.  So a line is read from its first
letter on (`at_begin`), and one that begins with a process's name is only for rules that say so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from ..actions import ASK_PERSON
from ..model import FATAL, OK, WARN, Escalation, Event

LINE_MAX = 2000  # what lies beyond is not looked at
TEXT_MAX = 400
SUBJECT_MAX = 64
PID_MAX = 1 << 22
UNCORRECTED_BIT = 61  # of a machine check's status register
OTHER = "other"  # the code of a number that the catalogue does not know
NVLINK_FAULT, INSPECT_FAULT = "gpu_nvlink_error", "gpu_needs_inspection"

# What dmesg puts before a line; strict, since a process's name may begin with a bracket as well.
TIME = (r"(?:\[ {0,7}\d{1,9}\.\d{1,6}\] "
        r"|\[\w{3} \w{3} [ \d]\d \d\d:\d\d:\d\d \d{4}\] )?")
# The kernel keeps 15 bytes of a name, any but NUL, and /dev/kmsg writes odd ones as `\x0a`.
COMM = r"(?:\\x[0-9a-f]{2}|.){0,15}"
# Lines that begin with a process's name, and may go on with a file's or a cgroup's.  In one of a
# hung task the name stands so near the begin that it could look like that.
LED = re.compile(
    rf"{TIME}(?!INFO: task )(?:traps: )?{COMM}"
    r"(?:\[\d{1,7}\][: ]|(?: ?\(\d{1,7}\)|/\d{1,7})[: ]"
    r"|: page allocation failure| invoked oom-killer: )"
)

XID = re.compile(
    TIME + r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F:.]{4,20})"
    r"(?: GPU-I:\d{1,4}(?: GPU-CI:\d{1,4})?)?\): (?P<xid>\d{1,6}), "  # a part of it, with MIG
    r"(?:pid='?(?P<pid>[^,']{0,40})'?, )?(?:name=" + COMM + r", )?(?P<text>.*)"
)
RECOVERY = re.compile(r"recovery action changed from 0x[0-9a-fA-F]+ \([^)]*\) to "
                      r"0x(?P<value>[0-9a-fA-F]{1,4})\b")
LINK5 = re.compile(
    r"(?P<unit>[\w/]+)\s+(?P<word>Nonfatal|Fatal)\s+XC\d\s+i\d+\s+Link (?P<link>-?\d+) "
    r"\((?P<registers>0x[0-9a-fA-F]{1,8}(?: 0x[0-9a-fA-F]{1,8}){0,7})\)"
)
LINK4 = re.compile(r"link (?P<link>\d+)\s?\((?P<registers>0x[0-9a-fA-F]{1,8}"
                   r"(?:, 0x[0-9a-fA-F]{1,8}){0,7})\)", re.IGNORECASE)
SXID = re.compile(
    TIME + r"nvidia-nvswitch(?P<switch>\d{1,4}): SXid \(PCI:(?P<pci>[0-9a-fA-F:.]{4,20})\): "
    r"(?P<sxid>\d{5}), (?P<text>.*)"
)
# How the driver begins the further lines of one error: two to three of its log, and of a switch's
# processor that halted, one a place where it was.
GOES_ON = ("Severity ", "Data {", "SOE HALT data[")
CALM = ("Non-fatal", "Correctable")
PLACE = re.compile(r"GPC (\d+), TPC (\d+)")
CLEAN = re.compile(r"[^\w.:/#+@-]")


class Numbered(msgspec.Struct, frozen=True):
    """What one XID or SXid means."""

    number: int
    class_: str
    bucket: str
    severity: str
    fault: str = ""
    meaning: str = ""
    stop: str = ""


UNKNOWN_XID = Numbered(0, "unknown", "contact_support", WARN, INSPECT_FAULT)
UNKNOWN_SXID = Numbered(0, "nvswitch", "contact_support", FATAL, NVLINK_FAULT,
                        "a switch error of no catalogue")


class Bits(msgspec.Struct, frozen=True):
    """Bits of one register of an XID 74."""

    register: int
    mask: int
    severity: str
    meaning: str


class Link5(msgspec.Struct, frozen=True):
    """One rule for an XID of 144 to 150: (mask, value) of intrinfo for old and new drivers."""

    xid: int
    units: tuple[str, ...]
    status: int
    severity: str
    resolution: str
    patterns: tuple[tuple[int, int], ...]


class Case(msgspec.Struct, frozen=True):
    """What a line of a rule says instead, when this is found in it."""

    match: re.Pattern[str]
    severity: str


class Rule(msgspec.Struct, frozen=True):
    """One kind of line that has no number."""

    code: str
    source: str
    class_: str
    bucket: str
    severity: str
    expression: re.Pattern[str]
    meaning: str
    fault: str = ""
    subject: str = ""
    uncorrected_in: str = ""  # group with a machine check's status
    code_group: str = ""  # the code is this group, if it is one of `codes`
    codes: tuple[str, ...] = ()
    led: bool = False  # its lines begin with a process's name, which any user chooses
    cases: tuple[Case, ...] = ()


class Catalogue(msgspec.Struct, frozen=True):
    """All of agent/catalog, ready for use."""

    xids: Mapping[int, Numbered]
    sxids: Mapping[int, Numbered]
    recovery: Mapping[int, tuple[str, str, str]]  # value -> (severity, text, action)
    register74: tuple[Bits, ...]
    link5: tuple[Link5, ...]
    needles: tuple[tuple[str, Rule], ...]  # in the rules' order
    escalations: tuple[Escalation, ...] = ()
    reboots: Escalation | None = None

    def alerted(self) -> tuple[tuple[str, str, str, str], ...]:
        """Labels of every event that may have a fault, and so an alert: their counters begin at
        0, for increase() does not see the first of a series that was not there before."""
        found: list[tuple[str, str, str, str]] = []
        for source, known, unknown in (("xid", self.xids, UNKNOWN_XID),
                                       ("sxid", self.sxids, UNKNOWN_SXID)):
            rows = [*((str(one.number), one) for one in known.values()), (OTHER, unknown)]
            found += [(source, code, one.class_, one.bucket) for code, one in rows if one.fault]
        for rule in dict.fromkeys(rule for _, rule in self.needles):
            if rule.fault:
                codes = (*rule.codes, OTHER) if rule.code_group else (rule.code,)
                found += [(rule.source, code, rule.class_, rule.bucket) for code in codes]
        return tuple(found)


def parse(catalogue: Catalogue, text: str, cursor: int = 0, boot_s: float = 0.0) -> Event | None:
    """The event that a line tells of; None for a line that no rule knows."""
    text = text[:LINE_MAX]
    event = None
    if "Xid (" in text and (match := XID.match(text)):
        event = _xid(catalogue, match, text)
    elif "SXid (" in text and (match := SXID.match(text)):
        event = _sxid(catalogue, match, text)
    else:
        for needle, rule in catalogue.needles:
            if needle not in text or not (found := rule.expression.match(text)):
                continue
            if rule.led == bool(LED.match(text)):  # here, since few lines come so far
                event = _ruled(catalogue, rule, found, text)
                break
    return msgspec.structs.replace(event, cursor=cursor, boot_s=boot_s) if event else None


def at_begin(expression: str) -> re.Pattern[str]:
    """A rule's expression, to be matched (not searched) from the line's beginning."""
    return re.compile(TIME + f"(?:{expression})")


def pci_of(text: str) -> str:
    """`00000000:4E:00.0` and `0000:4e:00` both as `0000:4e:00`: one name for one GPU."""
    parts = text.lower().strip(":.").split(":")
    if len(parts) == 3:
        parts[0] = parts[0][-4:].rjust(4, "0")
    return ":".join(parts).partition(".")[0][:SUBJECT_MAX]


# ------------------------------------------------------------------------------------ XID, SXid


def _xid(catalogue: Catalogue, match: re.Match[str], text: str) -> Event:
    number, said = int(match["xid"]), match["text"]
    if number == 71 and "NVLink" in said:
        number = 74  # some drivers print a broken link under the number of a copy engine
    known = catalogue.xids.get(number, UNKNOWN_XID)
    code = str(number) if known is not UNKNOWN_XID else OTHER
    severity, meaning, action = known.severity, known.meaning, ""
    meaning = meaning or f"number {number} is in no catalogue"
    fault = known.fault
    if number == 154:
        severity, meaning, action = _recovery(catalogue, said)
        fault = fault if action else ""
    elif number == 74:
        severity, meaning = _link4(catalogue, said, known)
    elif known.bucket == "decode_intrinfo":
        severity, meaning = _link5(catalogue, number, said, known)
    place = PLACE.search(said)
    return Event(
        source="xid", code=code, class_=known.class_, bucket=known.bucket, severity=severity,
        text=text[:TEXT_MAX], meaning=meaning, fault=fault if severity != OK else "",
        subject=f"gpu/{pci_of(match['pci'])}", pid=_pid(match["pid"]), action=action,
        place=place.group() if place else "", reboots=catalogue.reboots,
        escalations=tuple(
            one for one in catalogue.escalations
            if code in one.codes or (not one.codes and severity == FATAL)),
    )


def _recovery(catalogue: Catalogue, said: str) -> tuple[str, str, str]:
    """(severity, meaning, action) of the driver's instruction."""
    match = RECOVERY.search(said)
    known = catalogue.recovery.get(int(match["value"], 16) if match else -1)
    if known is None:
        return WARN, "the driver wants something done that no catalogue knows", ASK_PERSON
    severity, text, action = known
    return severity, f"the driver asks for: {text}", action


def _link4(catalogue: Catalogue, said: str, known: Numbered) -> tuple[str, str]:
    """(severity, meaning) from the registers of an XID 74."""
    match = LINK4.search(said)
    if match is None:
        fatal = "fatal error" in said and "non-fatal" not in said
        return (FATAL if fatal else known.severity), known.meaning
    registers = [int(part, 16) for part in match["registers"].split(",")]
    for bits in catalogue.register74:
        if bits.register < len(registers) and registers[bits.register] & bits.mask:
            return bits.severity, f"link {match['link']}: {bits.meaning}"
    return known.severity, f"link {match['link']}: {known.meaning}"


def _link5(catalogue: Catalogue, number: int, said: str, known: Numbered) -> tuple[str, str]:
    """(severity, meaning) from the registers of an XID of 144 to 150.  A rule must agree
    in pattern and status; where none does, or the vendor marks its rule so, the line's own word
    counts."""
    match = LINK5.search(said)
    if match is None:
        return known.severity, known.meaning
    registers = [int(part, 16) for part in match["registers"].split()]
    intrinfo, status = registers[0], registers[1] if len(registers) > 1 else 0
    link = int(match["link"])
    where = f"link {link}" if link >= 0 else "no single link"
    meaning = f"{match['unit']} on {where}, subcode {intrinfo >> 20 & 0x3F}"
    fatal = match["word"] == "Fatal"
    for rule in catalogue.link5:
        agrees = any(intrinfo & mask == value for mask, value in rule.patterns)
        if rule.xid != number or rule.status != status or not agrees:
            continue
        if rule.resolution == "RESET_GPU" and (fatal or not rule.severity.endswith("**")):
            return FATAL, meaning
        if rule.resolution == "XID_154_EVAL":
            return WARN, f"{meaning}: an XID 154 says what to do"
        return (WARN if fatal else OK), meaning
    return (FATAL if fatal else WARN), meaning


def _sxid(catalogue: Catalogue, match: re.Match[str], text: str) -> Event | None:
    number, said = int(match["sxid"]), match["text"]
    if said.startswith(GOES_ON):
        return None  # kernel_continuation.py finds the event that it belongs to
    known = catalogue.sxids.get(number, UNKNOWN_SXID)
    silent = not said.startswith(("Fatal", *CALM))
    calm = said.startswith(CALM) or (silent and known.stop == "no")
    return Event(
        source="sxid", code=str(number) if known is not UNKNOWN_SXID else OTHER,
        class_=known.class_, bucket=known.bucket, severity=WARN if calm else FATAL,
        text=text[:TEXT_MAX], meaning=known.meaning, fault=known.fault,
        subject=f"nvswitch/{pci_of(match['pci'])}", reboots=catalogue.reboots,
    )


# ------------------------------------------------------------------------------------ the others


def _ruled(catalogue: Catalogue, rule: Rule, match: re.Match[str], text: str) -> Event:
    groups = {name: value or "" for name, value in match.groupdict().items()}
    cases = (case.severity for case in rule.cases if case.match.search(text))
    severity = next(cases, rule.severity)
    if rule.uncorrected_in:
        status = int(groups[rule.uncorrected_in][:16] or "0", 16)
        severity = FATAL if status >> UNCORRECTED_BIT & 1 else severity
    code = rule.code
    if rule.code_group:
        code = groups[rule.code_group] if groups[rule.code_group] in rule.codes else OTHER
    return Event(
        source=rule.source, code=code, class_=rule.class_, bucket=rule.bucket,
        severity=severity, text=text[:TEXT_MAX], meaning=rule.meaning,
        fault=rule.fault if severity != OK else "", subject=_subject(rule.subject, groups),
        pid=_pid(groups.get("pid")), reboots=catalogue.reboots,
    )


def _subject(template: str, groups: dict[str, str]) -> str:
    """`disk/{dev}` with its group filled in; the node when the line does not name it."""
    kind, _, field = template.partition("/")
    value = groups.get(field.strip("{}"), "")
    # A card's ports are functions of one address; a GPU or switch has but one.
    whole = field == "{pci}" and kind in ("gpu", "nvswitch")
    value = pci_of(value) if whole else CLEAN.sub("", value).strip(":.")
    return f"{kind}/{value}"[:SUBJECT_MAX] if value else ""


def _pid(text: str | None) -> int:
    """0 for `<unknown>` and everything else that is no process id."""
    number = int(text) if text and text.isdecimal() and text.isascii() and len(text) < 9 else 0
    return number if 0 < number <= PID_MAX else 0

