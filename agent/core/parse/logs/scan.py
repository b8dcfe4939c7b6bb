"""Which of a training log's lines began the failure, and which only followed it.

Owns the reading of one log (Scanner) by the catalogue's signatures: a search for a few literals
first, whole lines only where one hits, tracebacks as one thing.  agent/core/parse/logs/root.py
weighs the matches of all ranks.  Pure and bounded: bytes in, matches out; files are read elsewhere.
"""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice

from ..neuron_codes import find
from . import literals, unlisted
from .families import HARMLESS, Families, Family
from .forms import LOUD, PLAIN, advises, bare, level_of, says_it_goes_on
from .lines import LINE_MAX, LOOK_BACK, NO_RANK, Clean, Ruler, clean, line_at
from .progress import Steps
from .signatures import (
    CARRIER,
    CASCADE,
    FOLLOWS,
    GENERIC,
    PYTHON,
    ROOT,
    TEARDOWN,
    Catalogue,
    Match,
    Signature,
)
from .tracebacks import (
    AT_ITS_END,
    HANDED_ON,
    IGNORED,
    LET_GO,
    ORIGINAL,
    TRACEBACK,
    Wrap,
    exception,
    frame_above,
    key_of,
    link,
    wrap_of,
)

LOOK_AHEAD = 64 << 10  # bytes: a traceback is whole within them
HITS_MAX = 20_000  # lines a feed of about 1 MB that are looked at; the rest is counted
KEPT_MAX = 8  # matches of one signature and stream
MATCHES_MAX = 512  # of one file
CHAIN_MAX = 32  # exceptions and lines of one chain
BLOCK_LINES_MAX = 600  # of one traceback, other ranks' lines between included
WOVEN_MAX = 64  # tracebacks of several ranks through each other, without prefixes
WOVEN_LINES = 200  # lines of the others between two of their ends
WRAP_LINES = 128  # among which the first frame with a prefix of its traceback stands
STREAMS_MAX = 8192
BELOW_LINES = 8  # of a summary
MESSAGE_LINES = 3  # in which an exception's message goes on
KNOWN_MAX = 4096  # exceptions whose places are remembered
RANK_DIGITS = 6
WALK_MAX = 100_000  # lines of tracebacks in a feed: about 0.3 s at the worst


class Stream:
    """What a rank's lines have left open: the chain of exceptions that may go on."""

    def __init__(self) -> None:
        self.chain: list[Match] = []
        self.linked = False  # a line said that the next traceback belongs to the last
        self.ignored = False  # a line said that Python let the next exception go


class Scanner:
    """Reads one log in pieces.  `feed` any number of times, then `close`; then `matches`."""

    def __init__(
        self, catalogue: Catalogue, file: int = 0, rank: int = NO_RANK, signals: bool = True,
        families: Families | None = None, later: bool = False,
    ) -> None:
        """`later`: whoever feeds it calls `look_further` by himself."""
        self.catalogue, self.families = catalogue, families
        self.file, self.rank, self.later = file, rank, later
        self.matches: list[Match] = []
        self.counts: Counter[tuple[int, str]] = Counter()  # all that were seen, kept or not
        self.kept: Counter[tuple[int, str, bool]] = Counter()
        self.handled: Counter[str] = Counter()  # the process went on after them
        self.skipped = 0  # lines with a hit that were not looked at
        self.streams: dict[int | str, Stream] = {}
        self._gates = catalogue.gates + (catalogue.signal_gates if signals else ())
        self._buffer = b""
        self._begin = 0  # index in the buffer from which lines are new
        self._base = 0  # offset of the buffer's begin in the file
        self._ruler = Ruler()
        self._inside: set[int] = set()  # starts of lines that belong to a traceback
        self._ignored = -1  # offset of a traceback that Python says it let go
        self._origin: int | None = None  # begin of the traceback that is being read
        self._walk = WALK_MAX  # lines that this feed may still follow
        self._steps = Steps()
        self._tail = b""  # for what no signature knows; empty without families
        self._end = (0, 0)  # of a closed log: its length, and the number of the line after it
        self._judged_at: deque[int] = deque(maxlen=KNOWN_MAX)  # offsets of exceptions

    def feed(self, data: bytes) -> None:
        """About 1 MB at a time; what could be cut in two waits for the next."""
        if self.families and not self.later:
            self._tail = (self._tail + data)[-unlisted.TAIL_BYTES :]
        buffer = self._buffer = self._buffer + data
        limit = buffer.rfind(b"\n", self._begin, max(self._begin, len(buffer) - LOOK_AHEAD)) + 1
        if limit == 0:  # no line ends here: a line longer than that is cut
            limit = len(buffer) - LOOK_AHEAD if len(buffer) > self._begin + (1 << 20) else 0
        if limit <= self._begin:
            return
        self._work(buffer, limit)
        cut = max(0, limit - LOOK_BACK)
        self._ruler.cut(buffer, cut)
        live = {one.offset for one in self.matches}
        live |= {one.offset for stream in self.streams.values() for one in stream.chain}
        self._steps.keep(live)
        self._inside = {start - cut for start in self._inside if start >= limit}
        self._buffer, self._begin, self._base = buffer[cut:], limit - cut, self._base + cut

    def close(self) -> None:
        self._work(self._buffer, len(self._buffer))
        for stream in self.streams.values():
            self._settle(stream)
        length = len(self._buffer)
        self._end = (self._base + length, self._ruler.number(self._buffer, self._base, length))
        if not self.later and not self.sure():
            self.look_further(self._tail)
        self.matches.sort(key=lambda one: one.offset)
        self._buffer = self._tail = b""

    def sure(self) -> bool:
        """Whether a root was found that nothing else can outweigh."""
        return any(one.role == ROOT and not one.weak and not one.mention
                   and one.signature != PYTHON.id for one in self.matches)

    # ------------------------------------------------------------ lines

    def _work(self, buffer: bytes, limit: int) -> None:
        self._walk = WALK_MAX
        for start, hit in sorted(self.hits(buffer, self._begin, limit).items()):
            if start not in self._inside:
                self._line(buffer, start, hit)
        self._progress(self._begin, limit)
        self._demote()

    def hits(self, buffer: bytes, begin: int, limit: int) -> dict[int, int]:
        """{begin of a line: first hit in it} for the lines that may matter."""
        found: dict[int, int] = {}
        for start, at in literals.hits(buffer, begin, limit, self._gates):
            if len(found) >= HITS_MAX and start not in found:
                self.skipped += 1
            else:
                found[start] = min(at, found.get(start, at))
        return found

    def _line(self, buffer: bytes, start: int, hit: int) -> None:
        far = hit - start > LINE_MAX // 2
        begin = hit - LINE_MAX // 4 if far else start  # its prefix is too far away to help
        read = clean(line_at(buffer, begin))
        stream = self._stream(read.stream)
        if TRACEBACK in read.text:
            self._traceback(buffer, start, read, stream)
        elif (before := link(read.text)) is not None:
            self.streams.get(key_of(before), stream).linked = True
        elif IGNORED in read.text:
            below = next(self._following(buffer, start, read.stream), None)
            self._ignored = self._base + below[0] if below else -1
        else:
            for signature in self._matching(read.text):
                if signature.role != ROOT or not self._no_root(read.text, signature.fatal):
                    self._keep(self._match(buffer, start, read, signature, not signature.fatal))

    def _stream(self, key: int | str, instead: Stream | None = None) -> Stream:
        """By the number of a known prefix, or by the text of an unknown one."""
        if key not in self.streams and len(self.streams) >= STREAMS_MAX:
            return instead or self.streams.setdefault(NO_RANK, Stream())
        return self.streams.setdefault(key, Stream())

    def _matching(self, text: str) -> list[Signature]:
        found: list[Signature] = []
        for one in self.catalogue.signatures:
            for literal in one.literals:  # loops, as any() takes five times as long
                if literal in text:
                    if one.pattern.search(text):
                        found.append(one)
                    break
        return found

    def _match(
        self, buffer: bytes, start: int, read: Clean, signature: Signature, mention: bool = False
    ) -> Match:
        said = _groups(signature.pattern, read.text)
        if signature.below and self.kept[read.stream, signature.id, mention] < KEPT_MAX:
            lines = islice(self._following(buffer, start, read.stream), BELOW_LINES)
            said |= _groups(signature.below, "\n".join(line.text for _, line in lines))
        fields = tuple(said.items())
        rank = read.rank if read.rank != NO_RANK else self.rank
        if (named := said.get("rank", "")).isdecimal() and len(named) <= RANK_DIGITS:
            rank = int(named)
        signature, told = self._coded(signature, read.text)
        fields += told
        return self._placed(Match(
            signature.id, signature.role, signature.category, signature.culprit,
            signature.retryable, rank, read.text.strip()[:1000], signature.weak,
            signature.id in GENERIC, fields, read.stream, self.file, self._base + start,
            time_s=read.time_s, mention=mention,
        ))

    def _coded(
        self, signature: Signature, text: str
    ) -> tuple[Signature, tuple[tuple[str, str], ...]]:
        """A code of the Neuron runtime says more than the line around it."""
        code = find(self.catalogue.nrt, text) if signature.role == ROOT else None
        if code is None:
            return signature, ()
        told = (("nrt", code.name), ("nrt_said", code.said))
        if code.follows:
            return signature._replace(role=CASCADE), told
        if code.culprit == "unknown":
            return signature, told
        category = "neuron_runtime" if signature.category == "user_code" else signature.category
        return signature._replace(
            category=category, culprit=code.culprit, retryable=code.retryable
        ), told

    # ------------------------------------------------------------ tracebacks

    def _traceback(self, buffer: bytes, start: int, read: Clean, stream: Stream) -> None:
        """Takes the frames out of the signatures' reach and finds the exception below them."""
        wrap = self._wrap(buffer, start, read)
        if wrap:
            stream = self._stream(wrap.key, stream)
            read = read._replace(rank=wrap.rank if wrap.rank != NO_RANK else read.rank)
        stream.linked = stream.linked or ORIGINAL in read.text
        if not stream.linked:
            self._settle(stream)
        stream.linked = False
        stream.ignored = self._base + start == self._ignored or _let_go(buffer, start)
        self._origin = start
        self._block(buffer, start, read, stream, wrap)
        self._origin = None

    def _wrap(self, buffer: bytes, start: int, read: Clean) -> Wrap | None:
        """A prefix of a tool that nobody here knows: a frame below has the same."""
        wrap = wrap_of(read.text)
        if wrap is not None:
            for _, line in islice(self._following(buffer, start, read.stream), WRAP_LINES):
                if (wrap.strip(line.text) or "").startswith("  File "):
                    return wrap
        return None

    def _block(
        self, buffer: bytes, start: int, read: Clean, stream: Stream, wrap: Wrap | None
    ) -> None:
        indent = len(read.text) - len(read.text.lstrip())
        framed, waiting, since = False, 1, 0  # several ranks in one stream end one by one
        for begin, line in self._following(buffer, start, read.stream):
            text: str | None = line.text
            since += 1
            if wrap:
                text = wrap.strip(line.text)
            elif line.text[:indent].isspace():
                text = line.text[indent:]
            if text is None:
                continue  # another's
            if TRACEBACK in text and waiting < WOVEN_MAX:
                self._inside.add(begin)
                waiting += 1
                continue
            if text[:1].isspace():
                self._inside.add(begin)
                framed = True
                stream.ignored = stream.ignored or text.endswith(AT_ITS_END)
                continue
            if name := exception(text, framed):
                self._inside.add(begin)
                rank = line.rank if line.rank != NO_RANK else read.rank
                self._exception(
                    buffer, begin, line._replace(text=text, rank=rank), name, stream, wrap
                )
                waiting, since = waiting - 1, 0
                if waiting == 0:
                    return
                self._settle(stream)
                continue
            if since > WOVEN_LINES and waiting > 1:
                return
            framed = framed and not text.strip()

    def _exception(
        self, buffer: bytes, start: int, read: Clean, name: str, stream: Stream, wrap: Wrap | None
    ) -> None:
        stream.chain.append(self._judged(buffer, start, read, name))
        for count, (begin, line) in enumerate(self._following(buffer, start, read.stream)):
            text = wrap.strip(line.text) if wrap else line.text
            if count >= 3 or not (text or "").strip():
                break
            assert text is not None
            ended = link(text) is not None or TRACEBACK in text or exception(text, False) != ""
            if ended or line.time_s is not None or level_of(text) != PLAIN:
                break  # not the message's next line
            line = line._replace(text=text, rank=read.rank)
            for signature in self._matching(text):
                self._inside.add(begin)
                stream.chain.append(self._match(buffer, begin, line, signature))
        del stream.chain[CHAIN_MAX:]

    def _judged(self, buffer: bytes, start: int, read: Clean, name: str) -> Match:
        """The exception's line: by signature, then by its class, else it is the job's own."""
        catalogue = self.catalogue
        self._judged_at.append(self._base + start)
        known = self._matching(read.text)
        roots = [one for one in known if one.role == ROOT and one.id not in GENERIC]
        role = catalogue.exceptions.get(name, "")
        if not role and any(text in read.text for text in catalogue.cascade_text):
            role = CASCADE
        if roots:
            return self._match(buffer, start, read, roots[0])
        row = self._family(buffer, start, read, name, role)
        told = (known or role) if row and row.role != ROOT else known and (
            row and row.culprit == known[0].culprit)
        if row is not None and not told:
            found = self._match(buffer, start, read, _signature_of(row))
            return found._replace(family=True, generic=row.culprit == "user")
        if role:
            same = next((one for one in known if one.role == role), None)
            return self._match(buffer, start, read, same or FOLLOWS._replace(role=role))
        ordered = sorted(known, key=lambda one: one.role not in (CASCADE, CARRIER))
        found = self._match(buffer, start, read, ordered[0] if ordered else PYTHON)
        named = (("class", name), *found.fields)
        return found if ordered else found._replace(generic=not found.fields, fields=named)

    def _settle(self, stream: Stream) -> None:
        """One chain, one verdict: the last exception that says something of its own."""
        chain, stream.chain = stream.chain, []
        if not chain:
            return
        own = [one for one in chain if one.role == ROOT and not one.generic]
        follows = any(one.role in (CASCADE, TEARDOWN, CARRIER) for one in chain)
        generic = [one for one in chain if one.role == ROOT and one.generic]
        chosen = own[-1] if own else None if follows else generic[-1] if generic else None
        ignored, stream.ignored = stream.ignored, False
        for one in chain:
            if one.role == ROOT and ignored:
                self.handled[one.signature] += 1
                continue
            if one.role == ROOT and one is not chosen:
                one = one._replace(role=CARRIER if chosen else CASCADE)
            self._keep(one)

    def _following(self, buffer: bytes, start: int, stream: int) -> Iterator[tuple[int, Clean]]:
        """The lines after this one of the same stream, within the bounds of a traceback."""
        at = buffer.find(b"\n", start)
        for _ in range(BLOCK_LINES_MAX):
            if at < 0 or at + 1 >= len(buffer) or at - start > LOOK_AHEAD or not self._walk:
                return
            self._walk -= 1
            begin = at + 1
            at = buffer.find(b"\n", begin)
            read = clean(line_at(buffer, begin))
            if read.stream == stream:
                yield begin, read

    # ------------------------------------------------------------ what no signature knows

    def look_further(self, data: bytes, budget_chars: int = unlisted.BUDGET_CHARS) -> None:
        """By form and family, in `data`: the last bytes of a log that is closed."""
        if self.families is None:
            return
        end, below = self._end
        if len(data) < end:  # its first line is not whole
            data = data[data.find(b"\n") + 1 :]
        begin = end - len(data)
        vague = {one.offset for one in self.matches if one.generic and one.mention}
        sure = {one.offset for one in self.matches} - vague
        reader = unlisted.Reader(
            self.families, self.catalogue, self.file, self.rank, budget_chars)
        known = sure.union(self._judged_at)
        found = reader.read(data, begin, known, below - data.count(b"\n"))
        found = [one for one in found if one.offset not in vague or one.culprit != "user"]
        better = {one.offset for one in found if one.role == ROOT}
        kept = [one if one.offset < begin else unlisted.outlived(one, data, begin)
                for one in self.matches if one.offset not in vague & better]
        self.matches = sorted(kept + found, key=lambda one: one.offset)

    def _no_root(self, text: str, fatal: bool) -> bool:
        """Whether a line that mentions an error takes it back, or a harmless row has it."""
        if _taken_back(text, fatal):
            return True
        row = None if fatal or self.families is None else self.families.by_text(text)
        return row is not None and row.role == HARMLESS

    def _family(
        self, buffer: bytes, start: int, read: Clean, name: str, role: str
    ) -> Family | None:
        """Of an uncaught exception: by its words, else by its class."""
        if self.families is None:
            return None
        row = self.families.by_text(read.text)
        if row is None or row.role != ROOT:
            row = self.families.by_frame(frame_above(buffer, start), name) or row
        if row is None and not role:
            below = (line for _, line in islice(
                self._following(buffer, start, read.stream), MESSAGE_LINES))
            more = " ".join((read.text, *unlisted.message(below, read.text)))
            row = self.families.by_text(more) or self.families.by_class(name)
        return None if row is None or row.role == HARMLESS else row

    # ------------------------------------------------------------ what is kept

    def _placed(self, match: Match) -> Match:
        """With line number and time, which cost a look around, while it may still be kept."""
        if not self._has_room(match):
            return match
        at = match.offset - self._base
        number = self._ruler.number(self._buffer, self._base, at)
        time_s = match.time_s
        if time_s is None:  # above the frames, which have none and fill any window
            look = at if self._origin is None else self._origin
            time_s = self._ruler.time_before(self._buffer, self._base, look)
        return match._replace(number=number, time_s=time_s)

    def _has_room(self, match: Match) -> bool:
        """What is only mentioned never takes the place of what ended a process."""
        most = MATCHES_MAX // 2 if match.mention else MATCHES_MAX
        return len(self.matches) < most and self.kept[_kind(match)] < KEPT_MAX

    def _keep(self, match: Match) -> None:
        self.counts[match.stream, match.signature] += 1
        if self._steps.handled(match):
            self.handled[match.signature] += 1
        elif self._has_room(match):
            self.kept[_kind(match)] += 1
            self.matches.append(match)

    def _progress(self, begin: int, limit: int) -> None:
        """Which steps went by after each root: a job that trains on had handled it."""
        open_chains = (one for stream in self.streams.values() for one in stream.chain)
        live = [one for one in (*self.matches, *open_chains) if one.role == ROOT]
        self._steps.look(live, self._buffer, self._base, begin, limit)

    def _demote(self) -> None:
        for one in [match for match in self.matches if self._steps.handled(match)]:
            self.matches.remove(one)
            self.kept[_kind(one)] -= 1
            self.handled[one.signature] += 1


def _kind(match: Match) -> tuple[int, str, bool]:
    return match.stream, match.signature, match.mention


def _taken_back(text: str, fatal: bool) -> bool:
    """Whether a line that mentions an error is advice, or says at no error's level that it goes on,
    which what is fatal does not."""
    if advises(text):
        return True
    return not fatal and level_of(bare(text)) != LOUD and says_it_goes_on(text, mildly=True)


def _let_go(buffer: bytes, start: int) -> bool:
    """Whether the line above says that a traceback is told and no more."""
    text = ""
    for _ in range(2):  # a blank line may stand between them
        above = buffer.rfind(b"\n", max(0, start - LINE_MAX), max(0, start - 1)) + 1
        text = line_at(buffer, above) if start > 0 else ""
        if text.strip():
            break
        start = above
    introduces = text.rstrip().endswith(":") and HANDED_ON.search(text) is not None
    return any(words in text for words in LET_GO) or introduces and says_it_goes_on(text)


def _signature_of(row: Family) -> Signature:
    return PYTHON._replace(
        id=row.id, role=row.role, weak=row.weak, category=row.category, culprit=row.culprit,
        retryable=row.retryable, note=row.note,
    )


def _groups(pattern: re.Pattern[str], text: str) -> dict[str, str]:
    found = pattern.search(text)
    said = found.groupdict() if found else {}
    return {name: value[:200] for name, value in said.items() if value is not None}
