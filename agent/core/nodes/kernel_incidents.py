"""The node's own faults, from what its kernel said.

Owns the open incidents of the node's devices, the windows in which repeats are counted, and the
choice of an action.  Reads no line: events come understood.  Orders nothing but evidence of a rank
that a line names: one that a fatal event names becomes a cause of its run
(agent/core/run/causes.py); what concerns the node beyond a run is said here, and done by
agent/core/nodes/repair.py where the operator allows it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import msgspec

from .. import actions, ladder
from ..detect.ranks.ended import Cause
from ..effects import drafts
from ..incidents import values
from ..incidents.book import Entry, IncidentBook, plain, worse
from ..model import (
    FATAL,
    OK,
    SEVERITIES,
    Event,
    Incident,
    RankView,
    Runbook,
    TakeEvidence,
    Verdict,
    node_subject,
)
from ..model.subject import INCIDENT, Subject
from ..parse.kernel_line import pci_of
from ..run.incidents import evidence_rows
from ..run.state import Context
from ..series.streak import strike
from . import escalations, exclusions
from .device_ranks import Place, Places, plain_name, rank_of
from .escalations import wall_s_of

DETECTOR = "kernel"
OPEN_MAX = 64
QUIET_S = 600.0  # clears = "quiet_10m"; what is fatal is not well again because it is silent
FOLLOWS_S = 60.0  # an XID 45 this soon after another of its GPU is that one's clean-up
FOLLOWER = "follow_companion_xid"
INSTRUCTION = "154"  # the XID by which a driver says what it wants done
# Sources whose fatal line ends training there.
ACCELERATORS = ("xid", "sxid", "nvidia", "amd", "neuron")
LIVED_MAX = 8  # ranks that one line names
MORE = "kernel line, continued"
MORE_MAX = 12  # of them in one incident, so that a flood leaves room for what a person needs
LIVING = ("starting", "running")
CULPRIT_MAX = 300  # characters: no further ranks join an incident


class Watched(Entry):
    """An open incident with what decides when it is said again and when it closes."""

    boot_id: str
    last_boot_s: float  # newest event of it
    count: int = 1
    said: int = 1  # how many of them the incident tells
    action: str = msgspec.field(default="", name="rung")  # instructed by the driver, or by repeats
    patient: bool = False  # ... for when nothing works there any more
    # "RUN/RANK/PID" that its lines name -> whether what was seen of it is still to come
    looks: dict[str, bool] = {}


class KernelMemory(msgspec.Struct):
    """Survives a restart of the agent, and a reboot."""

    boot_id: str = ""
    cursor: int = -1  # newest event taken, of this boot
    book: IncidentBook[Watched] = msgspec.field(default_factory=IncidentBook)  # "fault|subject" ->
    times: dict[str, list[float]] = {}  # window -> wall_s of its events
    places: dict[str, Place] = {}  # of this boot


class KernelIncidents:
    """Turns kernel events into one incident a device and fault, over restarts of the agent."""

    def __init__(self, name: str, memory: KernelMemory) -> None:
        self.name = name
        self.memory = memory
        self.book = memory.book
        self.places = Places(memory.places)

    def step(self, ctx: Context, paused: str = "") -> list[tuple[int, Cause]]:
        """Takes the new events; (pid, cause) of each process under a fatal one.  Nobody is looked
        at while this node is `paused`."""
        self._reboot(ctx)
        self._looked(ctx)
        if self.places.look(ctx.observed):
            self._name(ctx)
        found: list[tuple[int, Cause]] = []
        for event in sorted(ctx.observed.events, key=lambda one: one.cursor):
            if event.cursor > self.memory.cursor:
                self.memory.cursor = event.cursor
                found += self._take(ctx, event)
                if not paused:
                    self._look_at(ctx, event)
            if event.more:
                self._more(ctx, event)
        self._quiet(ctx)
        self._by_hand(ctx)
        ctx.verdicts.extend(self._verdict(one) for one in self.book.entries())
        return found

    def addresses(self) -> dict[str, str]:
        """Address and subject of the devices that have an open incident here -> its severity."""
        found: dict[str, str] = {}
        rank = SEVERITIES.index
        for one in sorted(self.book.entries(), key=lambda it: rank(it.incident.severity)):
            subject = one.incident.subject
            if subject != self._where(""):
                found[subject] = found[pci_of(subject.rpartition("/")[2])] = one.incident.severity
        return found

    # ------------------------------------------------------------ events

    def _take(self, ctx: Context, event: Event) -> list[tuple[int, Cause]]:
        grown = escalations.grown(self.memory.times, event, ctx.now)
        fault, severity = event.fault, event.severity
        if event.code == INSTRUCTION and severity == OK:
            # The driver takes its instruction back: the device was reset.
            for key in [k for k in sorted(self.book.open) if k.endswith(f"|{event.subject}")]:
                self.book.close(ctx, key, event.meaning)
        if not fault or severity == OK:
            return []
        action = event.action
        if grown is not None:
            severity, action = grown.severity, grown.then
        same = self._of_subject(event.subject)
        if event.bucket == FOLLOWER and any(
            event.boot_s - one.last_boot_s < FOLLOWS_S for one in same
        ):
            return []
        if event.code == INSTRUCTION and same:
            # The driver's instruction for a device whose incident is open already.
            was_fatal = any(one.incident.severity == FATAL for one in same)
            for one in same:
                self._worsen(ctx, one, event, severity)
                self._instruct(ctx, one, event.action, event.meaning, severity != FATAL)
            return [] if was_fatal else self._causes(ctx, event, severity)
        item = self.book.open.get(f"{fault}|{event.subject}")
        if item is not None:
            self._again(ctx, item, event, severity)
        elif self.book.room(ctx, severity, self.book.open, OPEN_MAX):
            item = self._open(ctx, event, severity)
        else:
            return []  # counted in any case
        if grown is not None:
            self._instruct(ctx, item, grown.then, grown.text)
        elif action:
            patient = event.code == INSTRUCTION and severity != FATAL
            self._instruct(ctx, item, action, event.meaning, patient)
        return self._causes(ctx, event, severity)

    def _causes(self, ctx: Context, event: Event, severity: str) -> list[tuple[int, Cause]]:
        """The ranks that this line ends."""
        if severity != FATAL or not self._restarts(ctx, event.fault):
            return []
        return [(pid, self._cause(event, pid)) for pid in self._under(ctx, event)]

    def _under(self, ctx: Context, event: Event) -> list[int]:
        """Processes of ranks under a fatal line: the one that it names, else all on that device.
        Drivers name whoever asked the GPU when it failed: often a monitor, or our own probe."""
        if rank_of(event, ctx.observed) is not None:
            return [event.pid]
        return sorted({rank.pid for _, rank in self.places.ranks(event, ctx.observed)})

    # ------------------------------------------------------------ evidence

    def _look_at(self, ctx: Context, event: Event) -> None:
        """Has the rank that the line names looked at: once a process, and no more of them in one
        incident than its runbook's budget.  A line that names no living rank of ours asks for
        nothing."""
        item = self.book.open.get(f"{event.fault}|{event.subject}")
        book, named = ctx.runbooks.get(event.fault), rank_of(event, ctx.observed)
        if item is None or book is None or named is None or not looks_at(book):
            return
        run, rank = named
        who = f"{run}/{rank.rank}/{rank.pid}"
        here = rank.node == self.name and rank.state in LIVING
        if not here or who in item.looks or len(item.looks) >= book.budget_count:
            return
        view = next(view for view in ctx.observed.runs if view.run == run)
        draft = drafts.evidence(view, rank, "the kernel names its process")
        effect = ctx.emit(rank.generation, draft)
        # What somebody else has asked for of this rank serves here as well.
        if effect is None and not ctx.in_flight.busy(draft.subject, draft.kind):
            return
        item.looks = {**item.looks, who: True}
        noted = values.noted(item.incident, ctx.now, f"{actions.TAKE_EVIDENCE}: rank {rank.rank} "
                             f"of run {run} is looked at: {draft.reason}")
        self.book.change(ctx, item, values.with_action(noted, effect.id) if effect else noted)

    def _looked(self, ctx: Context) -> None:
        """What was seen of a rank joins the incidents whose lines name it; a failure is a line."""
        for done in ctx.settled:
            body = done.effect.body
            if done.effect.kind != "evidence" or not isinstance(body, TakeEvidence):
                continue
            who = f"{body.run}/{body.rank}/{body.pid}"
            for item in self.book.entries():
                if not item.looks.get(who):
                    continue
                item.looks = {**item.looks, who: False}
                rows = tuple((f"rank {body.rank} {what}", value)
                             for what, value in evidence_rows(done))
                text = f"rank {body.rank} of run {body.run} was looked at" if done.ok else (
                    f"{actions.TAKE_EVIDENCE} of rank {body.rank} failed: {done.error}")
                noted = values.noted(item.incident, ctx.now, text)
                self.book.change(ctx, item, values.with_evidence(noted, rows))

    # ------------------------------------------------------------ events, within

    def _restarts(self, ctx: Context, fault: str) -> bool:
        """Whether the runbook answers this with a restart: a run is not ended for want of one."""
        return restarts(ctx.runbooks.get(fault))

    def _open(self, ctx: Context, event: Event, severity: str) -> Watched:
        m, now = self.memory, ctx.now
        key = f"{event.fault}|{event.subject}"
        number = self.book.number(event.fault)
        where = self._where(event.subject)
        lived, cgroup = self._lived(ctx, event)
        incident = Incident(
            id=f"node-{self.name}-{event.fault}-{plain(event.subject)}-{number}",
            fault=event.fault, subject=where, severity=severity, run="", generation=0,
            opened_wall_s=wall_s_of(event, now), opened_boot_s=event.boot_s or now.boot_s,
            reason=self._reason(event),
            culprit="; ".join(filter(None, (self._named(event.subject), lived))),
            evidence=(("kernel line", event.text), *((("cgroup", cgroup),) if cgroup else ())),
            timeline=((wall_s_of(event, now), f"the kernel said: {event.text}"),),
            would_have=self._would_have(ctx, event.fault, "", severity),
        )
        item = Watched(incident, now.boot_id, event.boot_s or now.boot_s)
        self.book.add(ctx, key, item)
        reboots = len(m.times.get(f"reboots|{key}", ()))
        if event.reboots is not None and reboots >= event.reboots.count:
            self._instruct(ctx, item, event.reboots.then, event.reboots.text)
        return item

    def _again(self, ctx: Context, item: Watched, event: Event, severity: str) -> None:
        """One incident, however often it is said; its record changes when the number doubles."""
        item.count += 1
        item.last_boot_s = max(item.last_boot_s, event.boot_s)
        lived, culprit = self._lived(ctx, event)[0], item.incident.culprit
        if lived not in culprit and len(culprit) < CULPRIT_MAX:
            changed = msgspec.structs.replace(item.incident, culprit=f"{culprit}; {lived}")
            self.book.change(ctx, item, changed)
        if self._worsen(ctx, item, event, severity) or item.count >= 2 * item.said:
            item.said = item.count
            # At least: of a flood only some of each kind come so far; the counter has them all.
            text = f"said at least {item.count} times, the last: {event.text}"
            self.book.note(ctx, item, text)

    def _worsen(self, ctx: Context, item: Watched, event: Event, severity: str) -> bool:
        """Whether the incident is worse than it was, by this line."""
        if not worse(severity, item.incident.severity):
            return False
        would = self._would_have(ctx, item.incident.fault, item.action, severity)
        changed = msgspec.structs.replace(
            item.incident, severity=severity, reason=self._reason(event), would_have=would)
        self.book.change(ctx, item, values.with_evidence(changed, (("kernel line", event.text),)))
        return True

    def _more(self, ctx: Context, event: Event) -> None:
        """What further lines said of it, which may come a step later than the event."""
        item = self.book.open.get(f"{event.fault}|{event.subject}")
        if item is None or event.boot_s < item.incident.opened_boot_s:
            return  # closed since; a later one of this name is another's
        known = item.incident.evidence
        room = max(0, MORE_MAX - sum(what == MORE for what, _ in known))
        if new := tuple((MORE, one) for one in event.more if (MORE, one) not in known)[:room]:
            self.book.change(ctx, item, values.with_evidence(item.incident, new))

    def _instruct(
        self, ctx: Context, item: Watched, action: str, why: str, patient: bool = False
    ) -> None:
        """An action that somebody who knows asks for: it goes before the runbook's own."""
        if not action or (action == item.action and patient == item.patient):
            return
        item.action, item.patient = action, patient
        noted = values.noted(item.incident, ctx.now, f"{action} is asked for: {why}")
        would = self._would_have(ctx, item.incident.fault, action,
                                 FATAL if patient else item.incident.severity)
        self.book.change(ctx, item, msgspec.structs.replace(noted, would_have=would))

    def _cause(self, event: Event, pid: int) -> Cause:
        return Cause(
            fault=event.fault, generation=0, reason=self._reason(event), pid=pid,
            boot_s=event.boot_s, detector=DETECTOR, evidence=(("kernel line", event.text),))

    # ------------------------------------------------------------ a run that climbs

    def of_cause(self, ctx: Context, cause: Cause) -> Watched:
        """The open incident of this node that a run's cause belongs to; a new one, not open yet."""
        for item in self.book.entries():
            if item.incident.fault == cause.fault:
                return item
        number = self.book.numbers.get(cause.fault, 0) + 1
        text = f"a run climbs beyond itself: {cause.reason}"
        incident = Incident(
            id=f"node-{self.name}-{cause.fault}-host-{number}", fault=cause.fault,
            subject=self._where(""), severity=cause.severity, run="", generation=0,
            opened_wall_s=ctx.now.wall_s, opened_boot_s=ctx.now.boot_s, reason=text,
            culprit=self.name, evidence=cause.evidence[: values.EVIDENCE_MAX],
            timeline=((ctx.now.wall_s, text),),
        )
        return Watched(incident, ctx.now.boot_id, ctx.now.boot_s)

    def climb(self, ctx: Context, cause: Cause, action: str, why: str) -> None:
        """A run's ladder has come to an action for this node."""
        item = self.of_cause(ctx, msgspec.structs.replace(cause, severity=FATAL))
        key = f"{cause.fault}|"
        if item not in self.book.entries():
            if not self.book.room(ctx, FATAL, self.book.open, OPEN_MAX):
                return
            self.book.number(cause.fault)
            self.book.add(ctx, key, item)
        self._instruct(ctx, item, action, why)

    # ------------------------------------------------------------ closing

    def _reboot(self, ctx: Context) -> None:
        m, now = self.memory, ctx.now
        if now.boot_id == m.boot_id:
            return
        m.boot_id, m.cursor = now.boot_id, -1
        m.places.clear()
        for key in [k for k, item in sorted(self.book.open.items()) if item.boot_id != now.boot_id]:
            name = f"reboots|{key}"
            m.times[name] = [at for at in m.times.get(name, ()) if now.wall_s - at < 7 * 86400.0]
            strike(m.times, name, now.wall_s, -math.inf, escalations.WINDOWS_MAX)
            self.book.close(ctx, key, "the machine was rebooted")

    def _quiet(self, ctx: Context) -> None:
        for key, item in sorted(self.book.open.items()):
            book = ctx.runbooks.get(item.incident.fault)
            quiet = ctx.now.boot_s - item.last_boot_s > QUIET_S
            asked = item.patient or item.incident.severity == FATAL
            if quiet and not asked and book is not None and book.clears == "quiet_10m":
                self.book.close(ctx, key, "not said again for ten minutes")

    def _by_hand(self, ctx: Context) -> None:
        """A card that was changed, a disk taken out, a GPU reset without its driver's word: none
        of them is heard, so whoever did it says so."""
        asked = {one.subject: one for one in ctx.observed.requests
                 if one.action == actions.CLOSE_INCIDENT}
        for key, item in sorted(self.book.open.items()):
            request = asked.get(str(Subject(INCIDENT, item.incident.id)))
            if request is not None:
                self.book.close(ctx, key, f"closed by {request.by or 'a person'}: {request.reason}")

    def well(self, ctx: Context, ids: Collection[str], text: str) -> None:
        """These incidents are over."""
        for key, item in sorted(self.book.open.items()):
            if item.incident.id in ids:
                self.book.close(ctx, key, text)

    # ------------------------------------------------------------ words

    def _would_have(self, ctx: Context, fault: str, action: str, severity: str) -> str:
        """What the ladder asks for beyond the run, and why it is not done."""
        book = ctx.runbooks.get(fault)
        beyond = actions.beyond_run()
        wanted = action * (action in beyond) if action else ladder.first(book, beyond)
        if not wanted:
            return ""
        settings = ctx.settings
        withheld = actions.ACTIONS[wanted].withheld(
            settings.allow, settings.alone or exclusions.sees_fleet(self.name, ctx),
            severity == FATAL)
        if withheld:
            return withheld
        if actions.is_root_verb(wanted) and severity != FATAL:
            return f"{wanted}: a person's part: the fault is not fatal"
        if actions.is_root_verb(wanted):
            return f"{wanted}: allowed, and ordered when nothing speaks against it"
        if wanted == actions.RUN_CHECK:
            return f"{wanted}: asked for"
        return f"{wanted}: allowed, and left to a person by this release"

    def _reason(self, event: Event) -> str:
        number = {"xid": f"XID {event.code} on ", "sxid": f"SXid {event.code} on "}
        said = number.get(event.source, "")
        what = event.meaning or event.code
        stop = event.severity == FATAL and event.source in ACCELERATORS
        return f"{said}{self._named(event.subject)}: {what}" + ("; training must stop" * stop)

    def _named(self, subject: str) -> str:
        named = self.places.named(subject)
        return f"{named} of {self.name}" if named else self.name

    def _lived(self, ctx: Context, event: Event) -> tuple[str, str]:
        """(whose ranks were hit, the cgroup of one that the kernel names for itself)."""
        named = rank_of(event, ctx.observed)
        there = self.places.ranks(event, ctx.observed) or ((named,) if named else ())
        ranks = ", ".join(f"rank {rank.rank} of run {run}" for run, rank in there[:LIVED_MAX])
        if ranks and event.source in ACCELERATORS:
            return f"{ranks} lived there", ""
        return (f"the process was {ranks}", there[0][1].cgroup) if ranks else ("", "")

    def _name(self, ctx: Context) -> None:
        """The kernel may speak before a driver was asked: its number joins the incident later."""
        for item in self.book.entries():
            subject = item.incident.subject.removeprefix(self._where("")).lstrip("/")
            bare, named = f"{plain_name(subject)} of {self.name}", self._named(subject)
            culprit = item.incident.culprit
            if subject and named != bare and culprit.startswith(bare):
                culprit = named + culprit.removeprefix(bare)
                self.book.change(ctx, item, msgspec.structs.replace(item.incident, culprit=culprit))

    def _where(self, subject: str) -> str:
        return node_subject(self.name, subject)

    def _of_subject(self, subject: str) -> list[Watched]:
        where = self._where(subject)
        return [one for one in self.book.entries() if one.incident.subject == where]

    def tell(self, ctx: Context, item: Watched, would_have: str) -> None:
        """What an action waits for; said again only when it is something else."""
        if would_have != item.incident.would_have:
            changed = msgspec.structs.replace(item.incident, would_have=would_have)
            self.book.change(ctx, item, changed)

    def _verdict(self, item: Watched) -> Verdict:
        one = item.incident
        return Verdict(
            fault=one.fault, subject=one.subject, severity=one.severity, confidence=1.0,
            reason=one.reason, evidence=one.evidence[:2], detector=DETECTOR)


def restarts(book: Runbook | None) -> bool:
    return book is None or bool(ladder.first(book, actions.restarting()))


def ends_ranks(book: Runbook) -> bool:
    """Whether a run's ranks are ended for such a fault."""
    return book.severity == FATAL and restarts(book)


def looks_at(book: Runbook) -> bool:
    """Whether it has the rank looked at that a line names."""
    return bool(ladder.first(book, (actions.TAKE_EVIDENCE,)))


def cause_of(
    found: list[tuple[int, Cause]], ranks: tuple[RankView, ...], generation: int
) -> Cause | None:
    """The first cause whose process is a rank that still runs; one that ended explains itself."""
    for pid, cause in found:
        for rank in ranks:
            if rank.pid == pid and rank.ended is None and rank.generation == generation:
                return msgspec.structs.replace(
                    cause, generation=generation, rank=rank.rank, node=rank.node,
                    step=rank.known_step, reason=f"rank {rank.rank} works there: {cause.reason}")
    return None
