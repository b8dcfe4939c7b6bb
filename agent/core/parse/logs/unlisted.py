"""Errors at the end of a log that no signature knows, by their form and their family.

Owns the reading of a log's last part once nothing sure was found in it.  An error that the lines
below it show to be handled is not kept, and one without a family is kept as `unplaced`: it is told
and never blamed.  Pure and bounded: so many bytes, so many lines, each cut to a length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import islice

from ..neuron_codes import Code, find
from . import endings, literals
from .families import DIGITS, HARMLESS, TEXT_MAX, Families, Family
from .forms import (
    GOES_ON,
    INFO,
    LOUD,
    PLAIN,
    WARN,
    Form,
    bare,
    cut_off,
    form,
    headed,
    level_of,
    named,
)
from .lines import NO_RANK, Clean, clean, line_at
from .progress import Steps
from .signatures import ABOUT, CASCADE, ROOT, UNPLACED, Catalogue, Match
from .tracebacks import TRACEBACK, exception, frame_above

TAIL_BYTES = 1 << 20  # of a log that are read
LINES_MAX = 3000  # of these, the last ones
BUDGET_CHARS = 220_000  # of these lines: about 0.7 s at the worst
KEPT_MAX = 4  # of one family
ALIKE_MAX = 8  # of the lines that differ in numbers alone, the first ones and as many last ones
BELOW = 3  # lines in which an error's message goes on, or is said to be handled
VALUES_MAX = 32  # of one line
NAME_LEAST = 5  # characters of a class's name, by which a cut one is known
LAST_LINES = 40  # among which a traceback that is cut off ends
_FRAME = re.compile(r"^\s*(?:File \"|\^|~|\[\d{1,4}\] |Original Traceback)|^\s{4,}\S")
_FRAME_BEGINS = ("File \"", "Traceback ", "-> ")
_LETTER = re.compile(rb"(?<!\w)[EF](?:\d{3,4} \d\d:| [\w/.-]{1,100}:\d)")  # glog's severities
LETTER_WITHIN = 120  # bytes of a line in which the letter stands
_CLASS = re.compile(r"(?:[A-Za-z_]\w{0,60}\.){1,8}(?P<last>[A-Z]\w{1,60}): ")
_LAST_ERROR = b"Last error:"
_SOURCE = re.compile(rb'File "|[\^~]|(?:raise|return|assert|with|for|if|self\.)\b')
_SOUNDS_BAD = re.compile(
    r"(?i)(?<![a-z])(?:errors?|fail(?:ed|ure|s)?|fatal|abort(?:ed|ing|s)?|exception|killed|crashed|"
    r"cannot|could not|couldn.t|unable to|terminated|termination|timed out|panic|corrupt(?:ed)?|"
    r"denied|refused|not (?:found|enough)|no such|restricted|incompatib(?:le|ility)|WTERMSIG|"
    r"unexpected eof|do(?:es)? not exist|invalid|unrecogni[sz]ed|"
    r"unknown (?:shorthand )?(?:flag|option|command)|"
    r"not defined|rejected|forbidden|unauthorized|unreachable|unhealthy|evicted|exceed(?:ed|s)|"
    r"was lost|lost (?:connection|contact)|expired|incorrect|undefined|unsupported|unavailable|"
    r"missing (?:key|input|file|option|value)\w*|python[\d.]*: no module|no rule to|not authorized|"
    r"detected an attempt|not in struct|diverged|too (?:small|large|many)|err!|"
    r"not allowed|disk ?pressure|reclaim|overflow|timeout|stuck|degraded|unmounted|on hold|held|"
    r"suspend(?:ed|ing)|offline|missing separator|limits? (?:was |has been |is )?reached|"
    r"undefined reference|revoked|unresponsive|unrecoverable|unknown authority|"
    r"bad (?:magic|interpreter|request)|closed by|disconnected)(?![a-z])"
    r"|^\w{2,60}NotFound: "
)
_FAILS = re.compile(  # said as what ended something
    r"(?i)\b(?:failed (?:to|with|on|at)|failed[:!.,;]|failed$|exceeded|unable to|cannot|can.?t|"
    r"could not|couldn.t|fatal|(?<!no )errors?:|is not (?:available|supported|allowed)|"
    r"abort(?:ing|ed:)|panic|stuck|degraded|"
    r"(?<!auto)unmounted|(?:on|was) h(?:old|eld)|suspended|suspending|"
    r"(?:went|is|was|goes) (?:offline|dead)|"
    r"limits? (?:was |has been |is )?reached|unresponsive|revoked|"
    r"undefined (?:reference|function|variable|symbol)|missing separator|"
    r"unrecoverable|does(?:n.t| not) (?:respond|answer)|rejected|was lost|"
    r"(?:is|was|has been) (?:evicted|denied|refused|corrupt(?:ed)?|killed|expired))(?![a-z])"
    r"|: failed\b|^\W{0,3}error \w|evicted(?:[:;]| by\b)"
)
# A frame as a traceback has it: faulthandler's and a notebook's are others.
_SHOWN_FRAME = re.compile(r'.{0,200}?\s{2}File "(?P<path>[^"]{1,400})", line \d{1,7}, in ')
# Files in which Python waits for others, or raises again what they raised.
_WAITS = re.compile(
    r"/torch/(?:distributed|utils/data|multiprocessing|_utils|autograd|cuda)\b|/(?:multiprocessing|"
    r"concurrent|ray|asyncio|batchgenerators|deepspeed|accelerate|lightning|pytorch_lightning|"
    r"megatron|horovod)/|/(?:threading|selectors|subprocess|queue|runpy|ssl)\.py"
)
# A compiler's word: the place in a source, then how bad it is.
_IN_SOURCE = re.compile(
    r"^\S{1,200}\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|f|f90|F90|rs|go|java|ts|js|pyx|tex)"
    r"(?::\d+(?::\d+)?:|\(\d+\):) (?:fatal )?error\b|^(?:GNU)?[Mm]akefile\S{0,20}:\d+: \*\*\*"
)
# The kernel's word on a program, where that is none that trains.
_OTHERS_CRASH = re.compile(
    r"^(?:\S{1,64} )?(?:kernel: )?(?:\[ *[\d.]{1,20}\] )?(?:traps: )?"
    r"(?!\S{0,30}(?:py|pt_|train|torch|ray|mpi|cuda|nccl|a\.out))[\w.:/#-]{1,40}\[\d{1,9}\]:? "
    r"(?:segfault at|trap |general protection)"
)
_OF_PEERS = re.compile(
    r"(?i)\b(?:peers?|remote|another|others|coordinator|closed unexpectedly|proxy service|"
    r"service thread)\b"
)
_COUNTED = re.compile(r"(?i)\b(?:errors?|failed|failures?|aborted|killed)\W{0,3}[=: ]\W{0,3}0\b")
ADVICE = re.compile(  # what frameworks add to an error of any kind
    r"Compile with .TORCH_|For debugging consider |(?:CUDA|HIP) kernel errors might|Search for ."
)
ESCAPED = "\\n  File \\\""
ESCAPED_LAST = 1500  # bytes of such a line in which the exception stands
NRT = "neuron_code"
FAINT_WITHIN = 60  # lines of a log's end in which an error that no rule knows may have ended it
NOT_HEALTHY = "nan_loss"  # the steps that are skipped for it are no work that went on
LIVED_BY = ("user", "data")  # a step shows that what a line missed of these was not needed
UNKNOWN = Family("unknown_error", UNPLACED, "unplaced", "unknown", "depends", ())
CUT = UNKNOWN._replace(id="traceback_cut")
WARNED = UNKNOWN._replace(id="warning")
HANDLED = UNKNOWN._replace(id="handled_error")
PYTHON = Family("python_error", ROOT, "user_code", "user", "no", (), weak=True)
RETRIES = {"infra": "after_repair", "network": "once", "storage": "once", "policy": "requeue"}


class Reader:
    """One log's last part."""

    def __init__(
        self, families: Families, catalogue: Catalogue, file: int, rank: int,
        budget_chars: int = BUDGET_CHARS,
    ) -> None:
        self.families, self.file, self.rank, self.budget = families, file, rank, budget_chars
        self.roles, self.codes = catalogue.exceptions, catalogue.nrt
        self._kept: dict[str, int] = {}

    def read(self, data: bytes, base: int, known: set[int], line: int = 1) -> list[Match]:
        """`base` is the place of the data in its log, `known` the places that were judged, `line`
        the number of the data's first line."""
        found: list[Match] = []
        self._until: dict[str, str] = {}  # family -> what shows that it went well
        counted, ends = 0, line
        for start in self._places(data):
            ends += data.count(b"\n", counted, start)
            counted = start
            if base + start in known:
                continue
            match = self._line(data, start)
            if match is not None and self._room(match):
                found.append(match._replace(offset=base + start, number=ends))
        steps = Steps()
        roots = [one for one in found if one.role == ROOT]
        steps.look(roots, data, base, 0, len(data))
        found = [one for one in found if not steps.handled(one) and not self._well(one, data, base)]
        found = [one for one in found if not (
            one.mention and one.culprit in LIVED_BY and steps.after(one))]
        found = [outlived(one, data, base) for one in found]
        found += self._values(data, base, line)
        if not any(one.role == ROOT for one in found):
            found += self._cut(data, base, line, known)
        return found

    def _places(self, data: bytes) -> list[int]:
        """Begins of the lines that may matter: the last ones where there are many."""
        starts = sorted(_hit(data, self.families.gates))
        chosen: list[int] = []
        left, end = self.budget, len(data)
        for start in starts[: -LINES_MAX - 1 : -1]:
            left -= min(end - start, TEXT_MAX)
            if left < 0:
                break
            chosen.append(start)
            end = start
        return chosen[::-1]

    def _well(self, match: Match, data: bytes, base: int) -> bool:
        patterns = [self._until.get(match.signature), match.mention and self.families.finished]
        after = data[match.offset - base :].decode("utf-8", "replace") if any(patterns) else ""
        return any(
            self.families.compiled(one).search(after) is not None for one in patterns if one)

    def _room(self, match: Match) -> bool:
        self._kept[match.signature] = self._kept.get(match.signature, 0) + 1
        return self._kept[match.signature] <= KEPT_MAX

    # ------------------------------------------------------------ one line

    def _line(self, data: bytes, start: int) -> Match | None:
        read = clean(line_at(data, start))
        if TRACEBACK in read.text and ESCAPED in read.text:  # all of it is one line of JSON
            read = read._replace(text=_last_of_escaped(data, start))
        if TRACEBACK in read.text or ADVICE.match(read.text):
            return None
        if _FRAME.match(read.text) and _in_frames(data, start):
            return None
        if level_of(bare(read.text)) == INFO:  # most lines end here
            small = read.text.lower()
            if not any(word in small for word in self.families.notices):
                return None
        said = form(read.text)
        frame = frame_above(data, start)
        if frame and not said.name and (name := exception(read.text, True)):
            said = said._replace(name=name, ends=True)
        below = list(islice(_below(data, start, read.stream), BELOW))
        row = self._family(read.text, said, below, frame)
        if row is None or row.role == HARMLESS or said.level == INFO and not row.noticed:
            return None
        if row.role == ROOT and (said.supposed or row.loud and _quiet(read.text, said)):
            return None
        if row.culprit == "unknown" and _OTHERS_CRASH.match(read.text):
            row = UNKNOWN
        if row.role == ROOT and said.level == WARN and not (row.warned or row.noticed):
            row = WARNED
        elif row.role == ROOT and not row.retried and _handled(said, below):
            row = HANDLED
        if row.until:
            self._until[row.id] = row.until
        if _LAST_ERROR in data[max(0, start - 200) : start].rsplit(b"\n", 2)[-2:][0]:
            said = said._replace(ends=True)  # NCCL's own word on what ended it
        return self._match(row, read, said)

    def _family(
        self, text: str, said: Form, below: list[Clean], frame: str
    ) -> Family | None:
        families = self.families
        row = families.by_text(text, said.ends)
        if (row is None or row.culprit == "unknown") and (code := find(self.codes, text)):
            return _of_code(code)
        open_end = row is not None and row.culprit == "unknown" and text.rstrip().endswith(":")
        if (row is None and (said.name or said.level == LOUD) or open_end) and said.level >= PLAIN:
            more = " ".join((text, *message(below, text)))
            row = families.by_text(more) if len(more) > len(text) else row
        if row is None or row.role == CASCADE:
            row = (said.name and self.families.by_frame(frame, said.name)) or row
        if row is not None:
            return row
        if said.name:
            return self._of_class(said.name)
        if said.level == PLAIN and (listed := _CLASS.match(text.strip())):
            return families.by_class(listed["last"])  # without a row it may be a logger's name
        if said.level == LOUD and (inner := named(text)):
            return self._of_class(inner)
        if said.level == LOUD or said.level == PLAIN and _SOUNDS_BAD.search(text):
            if _COUNTED.search(text):
                return None
            placed = not said.supposed and (said.level == LOUD or _FAILS.search(text))
            return self._about(text) if placed else UNKNOWN
        return WARNED if said.level == WARN and _SOUNDS_BAD.search(text) else None

    def _about(self, text: str) -> Family:
        """By the things that an error names, when no rule knows it."""
        culprit = "" if _OF_PEERS.search(text) else self.families.subjects.of(text)
        culprit = "user" if _IN_SOURCE.match(text) else culprit
        if not culprit:
            return UNKNOWN
        return Family(ABOUT + culprit, ROOT, ABOUT + culprit, culprit,
                      RETRIES.get(culprit, "no"), (), weak=True)

    def _of_class(self, name: str) -> Family:
        role = self.roles.get(name, "")
        if role:
            return UNKNOWN._replace(id="python_consequence", role=role)
        return self.families.by_class(name) or PYTHON

    def _match(self, row: Family, read: Clean, said: Form) -> Match:
        rank = read.rank if read.rank != NO_RANK else self.rank
        generic = row is PYTHON
        fields: tuple[tuple[str, str], ...] = (("class", said.name),) if generic else ()
        fields += (("nrt_said", row.note),) if row.id == NRT else ()
        return Match(
            row.id, row.role, row.category, row.culprit, row.retryable, rank,
            read.text.strip()[:1000], row.weak, generic, fields, read.stream, self.file,
            time_s=read.time_s, mention=not (said.ends or row.ends), family=True,
            faint=row.id.startswith(ABOUT))

    # ------------------------------------------------------------ several lines

    def _values(self, data: bytes, base: int, line: int) -> list[Match]:
        """Values of each step that are no numbers, when the last one still is none."""
        found = []
        for row in self.families.lasting:
            last: tuple[int, Clean] | None = None
            wrong = 0
            pattern = self.families.pattern(row)
            pieces = tuple(word.encode() for word in row.words)
            places = {start for start, _ in literals.hits(data.lower(), 0, len(data), pieces)}
            for start in sorted(places, reverse=True)[:LINES_MAX]:  # up to the last good value
                read = clean(line_at(data, start))
                values = list(islice(pattern.finditer(read.text), VALUES_MAX))
                bad = [one for one in values if one["bad"]]
                if bad:
                    wrong += 2 if any(one.groupdict().get("mean") for one in bad) else 1
                    last = (start, read)
                elif values:
                    break
            if last is not None and wrong > 1:
                start, read = last
                match = self._match(row, read, Form(PLAIN, "", False, False))
                number = line + data.count(b"\n", 0, start)
                found.append(match._replace(offset=base + start, number=number))
        return found

    def _cut(self, data: bytes, base: int, line: int, known: set[int]) -> list[Match]:
        """A traceback without its last line: its last source line may say what it raises."""
        starts = _last_lines(data)
        if any(base + start in known for start in starts):
            return []
        name, at, framed = "", -1, False
        for start in starts:
            read = clean(line_at(data, start))
            framed = framed or any(word in read.text for word in _FRAME_BEGINS)
            if name and exception(read.text, True) == name:
                return []  # it has its end, which was handled
            if raised := cut_off(read.text) or headed(read.text):
                name, at = raised, start
        if not framed:
            return []
        start = at if at >= 0 else starts[-1]
        name = self._whole(name)
        listed = self.roles.get(name) or self.families.by_class(name)
        sounds = name and (listed or exception(f"{name}: ", True))
        row = self._of_class(name) if sounds else self._of_frame(data, starts)
        read = clean(line_at(data, start))
        match = self._match(row, read, Form(PLAIN, name, True, False))
        return [match._replace(offset=base + start, number=line + data.count(b"\n", 0, start),
                               faint=not sounds)]


    def _of_frame(self, data: bytes, starts: list[int]) -> Family:
        """By where a traceback was as the log ended in it, and by nothing else.  Below a stack that
        was only shown the log goes on."""
        last = [line_at(data, start) for start in starts[-2:]]
        ends = last[-1] if _SHOWN_FRAME.match(last[-1]) else last[0]
        frame = _SHOWN_FRAME.match(ends)
        if frame is None or ends is not last[-1] and not _indented(last[-1], ends):
            return CUT
        path = frame["path"]
        return CUT if _WAITS.search(path) else self.families.by_frame(path) or PYTHON

    def _whole(self, name: str) -> str:
        """The class of which a cut line shows the begin, where only one that is known has it."""
        known = {one for one in (*self.roles, *self.families.classes) if one.startswith(name)}
        return known.pop() if len(name) >= NAME_LEAST and len(known) == 1 else name


def outlived(match: Match, data: bytes, base: int) -> Match:
    """An error that was only mentioned in a log that ends well was handled, and so was what a
    script's small tool said before the script went on, and what no rule knows far from the end."""
    if match.role != ROOT or form(match.text).ends or match.category == NOT_HEALTHY:
        return match
    start = match.offset - base
    aside = match.culprit == "user" and endings.outlived(bare(match.text), data, start)
    aside = aside or match.faint and data.count(b"\n", start) > FAINT_WITHIN
    if not aside and not (match.mention and endings.ends_well(data, start)):
        return match
    return match._replace(signature=HANDLED.id, role=UNPLACED, category=HANDLED.category,
                          culprit=HANDLED.culprit, retryable=HANDLED.retryable)


def _hit(data: bytes, gates: tuple[bytes, ...]) -> Iterator[int]:
    """Begins of the lines with a gate, or with glog's letter of an error.  Lines of a log differ in
    numbers mostly: one of each kind is searched, and of many alike the first and last count."""
    kinds: dict[bytes, list[int]] = {}
    start = 0
    for line in data.lower().translate(None, DIGITS).split(b"\n"):
        kinds.setdefault(line, []).append(start)
        start = data.find(b"\n", start) + 1
    joined = b"\n".join(kinds)
    begins, at = {}, 0
    for line, starts in kinds.items():
        begins[at] = starts
        at += len(line) + 1
    found = {place: begins[place] for place, _ in literals.hits(joined, 0, len(joined), gates)}
    found |= {at: starts for at, starts in begins.items()
              if at not in found and _LETTER.search(data, starts[0], starts[0] + LETTER_WITHIN)}
    for starts in found.values():
        yield from starts[:ALIKE_MAX]
        yield from starts[max(ALIKE_MAX, len(starts) - ALIKE_MAX) :]


def _last_of_escaped(data: bytes, start: int) -> str:
    """The exception of a traceback in one line, whose line ends a logger has escaped."""
    end = data.find(b"\n", start)
    line = data[start : end if end >= 0 else len(data)][-ESCAPED_LAST:].decode("utf-8", "replace")
    for part in reversed(line.split("\\n")):
        if exception(part.split('"')[0].strip(), True):
            return part.split('",')[0].rstrip('"}] \r')
    return ""


def _of_code(code: Code) -> Family:
    role = CASCADE if code.follows else ROOT
    return Family(NRT, role, "neuron_runtime", code.culprit, code.retryable, (), note=code.said)


def _quiet(text: str, said: Form) -> bool:
    if said.level != PLAIN or said.ends or _CLASS.match(text.strip()):
        return False
    return _SOUNDS_BAD.search(text) is None


def _below(data: bytes, start: int, stream: int) -> Iterator[Clean]:
    """The next lines of the same stream."""
    at = data.find(b"\n", start)
    for _ in range(4 * BELOW):
        if at < 0 or at + 1 >= len(data):
            return
        read = clean(line_at(data, at + 1))
        at = data.find(b"\n", at + 1)
        if read.stream == stream:
            yield read


def message(below: Iterable[Clean], head: str = "") -> Iterator[str]:
    """The lines that an error's message goes on with.  What stands below a colon belongs to it,
    whatever level it gives itself: `Exception thrown in a.cxx:7:`, `lib::ERROR: no such reader`."""
    told = head.rstrip().endswith(":")
    for read in below:
        if told and not read.text.strip():
            continue
        if not read.text.strip() or read.time_s is not None or TRACEBACK in read.text:
            return
        if ADVICE.match(read.text):
            continue
        said = form(read.text)
        if said.name or said.level != PLAIN and not (told and said.level == LOUD):
            return
        told = False
        yield read.text.strip()


def _handled(said: Form, below: list[Clean]) -> bool:
    if said.goes_on:
        return True
    return any(GOES_ON.search(read.text) and form(read.text).goes_on for read in below[:2])


def _indented(line: str, frame: str) -> bool:
    """Whether a line stands as far in as the source below a frame does, behind the same prefix."""
    before = frame[: frame.index("File ")]
    return line.startswith(before + "  ")


def _in_frames(data: bytes, start: int) -> bool:
    """Whether an indented line is a frame of a traceback or a source line below one."""
    before = data[data.rfind(b"\n", 0, max(0, start - 1)) + 1 : start]
    line = data[start : start + 200].lstrip()
    return b'File "' in before[:400] or _SOURCE.match(line) is not None


def _last_lines(data: bytes) -> list[int]:
    starts: list[int] = []
    end = len(data.rstrip())
    while end > 0 and len(starts) < LAST_LINES:
        begin = data.rfind(b"\n", 0, end) + 1
        starts.append(begin)
        end = begin - 1
    return starts[::-1]


