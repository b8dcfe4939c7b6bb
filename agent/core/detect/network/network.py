"""Network cards: links that went down, flap or run slower, errors by the thousand, dead cards.

Owns what the readings of collectors/network.py and collectors/rdma.py mean, card by card.  A link
is judged against what it was in this boot, a counter by its growth, EFA by its signs of life; what
is not read stays as it was.  Shown and counted, never acted on.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from ...model import DEGRADED, FATAL, WARN, Rows, Verdict, labels_of
from ...series.counters import COUNTERS_MAX, Growth, Rate
from ...series.streak import Streak, Times, recent, strike
from ..detector import Detector, NodeView
from ..devices.absence import BOUND, Bus
from .rules import RULES, Rule

PREFIX = "network_"
HOLD_S = 600.0  # a storm is shown this long after it was last seen
FLAP_COUNT, WINDOW_S = 3, 12 * 3600.0  # strikes, and within which time; gpud's numbers
STRIKE_S = 30.0  # changes within this time of each other are one strike
# Below this share of the cards that the instance type can have, somebody attached fewer on purpose.
EXPECTED_SHARE = 0.75
STILL_S = 60.0  # a card without a sign of life for this long is dead ...
STILL_GAPS = 3.0  # ... and for this many times the longest pause that ended well
# The same for a card that gave signs of life before it was watched, and none since.
UNSEEN, UNSEEN_STILL_S = -1.0, 300.0
SLOW_SHARE = 0.9  # of the speed that the link had in this boot
STORM_READINGS = 2  # a rate must hold this long; one burst is no storm
ERROR_SHARE, ERRORS_PER_S = 0.01, 10.0  # of an interface's packets
# This project's judgement: TCP over one switch loses less than one segment in a thousand.  Over one
# that loses 30 % each way nothing computes: agents alone are left, with some 95 a second.
RETRANSMIT_SHARE, SEGMENTS_PER_S, RETRANSMIT_READINGS = 0.05, 50.0, 4
PORTS_MAX, VERDICTS_MAX = 1024, 64
RDMA_KINDS = ("efa", "infiniband", "roce")
STATES = {2.0: "initialised: the cable is in, and no subnet manager answers",
          3.0: "armed, not yet active"}
PHYSICAL = {1.0: "asleep", 2.0: "polling: nothing answers at the other end", 3.0: "disabled",
            4.0: "training", 6.0: "recovering"}
Port = tuple[str, str]  # device, port; "" for an interface, and for what concerns a whole card
RULE_OF = {(PREFIX + rule.name, rule.what): rule for rule in RULES}
ERRORS = f"{PREFIX}errors_total"
CARRIER, KEEP_ALIVE = f"{PREFIX}carrier_changes_total", f"{PREFIX}keep_alives_total"
TIMEOUTS, INDEX = f"{PREFIX}transmit_timeouts_total", f"{PREFIX}interface_index"
UP, ENABLED, INFO = f"{PREFIX}link_up", f"{PREFIX}link_enabled", f"{PREFIX}info"
STATE, PHYSICAL_STATE = f"{PREFIX}port_state", f"{PREFIX}port_physical_state"
EXPECTED = f"{PREFIX}cards_expected"
SPEED, UNREAD = f"{PREFIX}speed_bytes_per_second", f"{PREFIX}unread_files"
SEGMENTS, RETRANSMITS = f"{PREFIX}tcp_segments_total", f"{PREFIX}tcp_retransmits_total"
SUMS = {f"{PREFIX}receive_packets_total": "packets", f"{PREFIX}transmit_packets_total": "packets"}
COUNTERS = frozenset({CARRIER, KEEP_ALIVE, TIMEOUTS, SEGMENTS, RETRANSMITS, ERRORS, *SUMS,
                      *(name for name, _ in RULE_OF)})
LEVELS = frozenset({UP, ENABLED, INDEX, STATE, PHYSICAL_STATE, SPEED})
LABELS = ("error", "event", "direction")


class NetworkMemory(msgspec.Struct):
    """What a restart of the agent remembers, within one boot; seconds are of its clock."""

    up: dict[str, float] = {}  # "device/port" that was up -> best speed, 0 unknown
    cards: dict[str, str] = {}  # PCI address of a card that was here -> its name
    strikes: dict[str, list[float]] = {}  # "device/port" -> when its link went down
    resets: dict[str, list[float]] = {}  # device -> when its driver reset it
    alive: dict[str, float] = {}  # "device/port" that gave signs of life -> its longest pause


class Found(NamedTuple):
    """One finding about one port, and until when it is shown."""

    fault: str
    severity: str
    why: str
    until_s: float


class Networks(Detector):
    """The verdicts on this node's cards.  Steps come up to a hundred times a second, readings every
    few seconds: the same readings are looked at once."""

    name = "network"
    reads = (PREFIX,)
    beside = ("host_pci_",)  # the collector that lists who is on the bus
    warm_s = 60.0  # storms are some readings in a row
    memory = NetworkMemory

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self._own: Rows = ()
        self._read_s = 0.0
        self._verdicts: list[Verdict] = []
        self._rate = Rate()
        self._places: dict[str, tuple[str, str, str]] = {}  # subject -> device, port, label
        self._levels: dict[Port, dict[str, float]] = {}
        self._info: dict[str, dict[str, str]] = {}  # device -> its labels
        self._off: set[str] = set()  # devices that a person switched off
        self._expected = 0.0  # cards for EFA that the instance type can have, 0 unknown
        self._listed_s = 0.0  # when the cards were listed last
        self._bus = Bus()
        self._bound: Rows = ()
        self._alive: dict[Port, tuple[float, float]] = {}  # last sign of life, longest pause
        self._streak = Streak(COUNTERS_MAX)  # readings beyond a limit
        self._held: dict[tuple[Port, str], Found] = {}

    def look(self, view: NodeView) -> list[Verdict]:
        bound = view.observed.samples.of(BOUND)
        if view.rows is not self._own or bound is not self._bound:
            self._own, self._bound = view.rows, bound
            self._take(view.rows, view.memory)
        return self._verdicts

    def _take(self, rows: Rows, memory: NetworkMemory) -> None:
        before = self._bus.lost
        self._bus.take(self._bound, memory.cards)
        read_s = max((row[3] for row in rows), default=self._read_s)
        if read_s != self._read_s:
            self._read_s = read_s
            self._cards(rows, memory)
            self._off = self._by_hand(rows)
            self._count(rows, memory)
            self._look(rows, memory)
        elif self._bus.lost == before:
            return  # fewer readings, none of them new
        self._verdicts = self._conclude(memory)

    # ------------------------------------------------------------ which cards are here

    def _cards(self, rows: Rows, memory: NetworkMemory) -> None:
        """Remembers the cards that are on the bus; what becomes of one there is Bus's.  What is not
        listed any more may have been renamed, bonded or given to a container: it is forgotten."""
        listed_s = max((row[3] for row in rows
                        if row[0] == UNREAD and "collector=network," in row[1]),
                       default=self._listed_s)
        if listed_s == self._listed_s:
            return  # not read, or not anew
        self._listed_s = listed_s
        self._expected = next((row[2] for row in rows if row[0] == EXPECTED), 0.0)
        listed = [labels_of(row[1]) for row in rows if row[0] == INFO]
        listed_now = {labels.get("device", ""): labels for labels in listed}
        cards = {labels["pci"]: name for name, labels in listed_now.items()
                 if labels.get("kind") in RDMA_KINDS and labels.get("pci") in self._bus.bound}
        for key in [address for address, name in memory.cards.items()
                    if name in listed_now and listed_now[name].get("pci") != address]:
            del memory.cards[key]  # the same name at another address
        memory.cards |= dict(list(cards.items())[: max(0, PORTS_MAX - len(memory.cards))])
        for device in [card for card in self._info if card not in listed_now]:
            self._forget(device, memory)
        remembered = {name: self._info.get(name, {"pci": address})
                      for address, name in memory.cards.items()}
        self._info = remembered | listed_now

    def _forget(self, device: str, memory: NetworkMemory) -> None:
        for port in [port for port in self._levels if port[0] == device]:
            del self._levels[port]
            memory.up.pop(_key(port), None)

    def _by_hand(self, rows: Rows) -> set[str]:
        """Interfaces that were switched off, and RoCE's cards on their addresses, whose ports go
        down with them; one of InfiniBand does not."""
        off = {self._place(row[1])[0] for row in rows if row[0] == ENABLED and row[2] <= 0}
        addresses = {self._pci((device, "")) for device in off} - {""}
        return off | {name for name, info in self._info.items()
                      if info.get("kind") == "roce" and info.get("pci") in addresses}

    # ------------------------------------------------------------ counters

    def _count(self, rows: Rows, memory: NetworkMemory) -> None:
        sums: dict[tuple[Port, str], float] = {}
        spans: dict[Port, float] = {}
        for name, subject, value, boot_s in rows:
            if name not in COUNTERS:
                continue
            growth = self._rate.take((name, subject), value, boot_s)
            device, number, what = self._place(subject)
            port = device, number
            if name == KEEP_ALIVE:
                self._sign_of_life(port, value, growth, memory)
            if growth is None:
                continue
            spans[port] = growth.seconds
            rule = RULE_OF.get((name, what))
            if rule is not None:
                self._judge(port, rule, growth)
            if device not in self._off and growth.amount > 0 and (
                name == ERRORS and what == "link_downed"
                or name == CARRIER and self._went_down(port, growth)
            ):
                _strike(memory.strikes, _key(port), self._read_s)
            elif name == TIMEOUTS and growth.amount > 0 and not growth.fell:
                _strike(memory.resets, device, self._read_s)
            sort = SUMS.get(name) or (what if name in (ERRORS, SEGMENTS) else name)
            sums[port, sort] = sums.get((port, sort), 0.0) + growth.amount
        self._shares(sums, spans)

    def _judge(self, port: Port, rule: Rule, growth: Growth) -> None:
        beyond = growth.per_s > rule.per_s
        needed = STORM_READINGS if rule.per_s else 1
        if self._beyond((port, rule.what or rule.name), beyond) >= needed:
            counter = rule.what or rule.name.removesuffix("_total")
            how = f"grows by {growth.per_s:.3g} a second"
            if not rule.per_s:
                how = f"grew by {growth.amount:.0f}"
            self._hold(port, counter, rule.fault, rule.severity, f"{rule.why} ({counter} {how})")

    def _went_down(self, port: Port, growth: Growth) -> bool:
        """Every other change of a carrier is a loss; the first one is when the link was up."""
        return (growth.amount + self._levels.get(port, {}).get(UP, 0.0)) // 2 >= 1

    def _sign_of_life(
        self, port: Port, value: float, growth: Growth | None, memory: NetworkMemory
    ) -> None:
        """A card that never gave one has a driver that counts none.  One that did counts from the
        first reading on: it may have died before the agent came."""
        last, key = self._alive.get(port), _key(port)
        longest_s = last[1] if last else UNSEEN
        if growth is not None and growth.amount > 0:
            # Readings that failed in between say nothing about the card's own pauses.
            counts = longest_s != UNSEEN and growth.seconds <= STILL_S
            pause_s = self._read_s - last[0] if last and counts else 0.0
            self._alive[port] = self._read_s, max(pause_s, longest_s)
            if key in memory.alive or len(memory.alive) < PORTS_MAX:
                memory.alive[key] = max(pause_s, longest_s)
            self._held.pop((port, "keep_alives"), None)
        elif last is None and value > 0:
            self._alive[port] = self._read_s, memory.alive.get(key, UNSEEN)
        elif last is not None and growth is not None:
            still_s = self._read_s - last[0]
            limit_s = UNSEEN_STILL_S if longest_s == UNSEEN else STILL_GAPS * longest_s
            if still_s >= max(STILL_S, limit_s):
                self._hold(port, "keep_alives", "nic_unresponsive", FATAL,
                           f"the card gave no sign of life for {still_s:.0f} s")

    def _shares(self, sums: dict[tuple[Port, str], float], spans: dict[Port, float]) -> None:
        """Errors of an interface against its packets, and what TCP sends twice."""
        for port in [port for port, sort in sums if sort == "rx_errors"]:
            seconds = spans[port]
            bad = sums[port, "rx_errors"] + sums.get((port, "tx_errors"), 0.0)
            packets = sums.get((port, "packets"), 0.0)
            beyond = bad > ERROR_SHARE * packets and bad > ERRORS_PER_S * seconds
            if self._beyond((port, "errors"), beyond) >= STORM_READINGS:
                self._hold(port, "errors", "nic_error_rate", DEGRADED,
                           f"{bad / seconds:.0f} packets a second are broken, of "
                           f"{packets / seconds:.0f}")
        node = ("", "")
        if (node, RETRANSMITS) in sums:
            again, sent = sums[node, RETRANSMITS], sums.get((node, "out"), 0.0)
            beyond = again > RETRANSMIT_SHARE * sent and sent > SEGMENTS_PER_S * spans[node]
            if self._beyond((node, "tcp"), beyond) >= RETRANSMIT_READINGS:
                self._hold(node, "tcp", "tcp_retransmits_high", WARN,
                           f"{100 * again / sent:.0f} % of TCP's segments are sent again")

    def _beyond(self, key: tuple[Port, str], beyond: bool) -> int:
        """Readings in a row beyond a limit."""
        return self._streak.add(key, self._read_s, beyond).readings

    def _hold(self, port: Port, what: str, fault: str, severity: str, why: str) -> None:
        self._held[port, what] = Found(fault, severity, why, self._read_s + HOLD_S)

    # ------------------------------------------------------------ levels

    def _look(self, rows: Rows, memory: NetworkMemory) -> None:
        for name, subject, value, _ in rows:
            if name not in LEVELS:
                continue
            device, number, _ = self._place(subject)
            port = device, number
            if port not in self._levels and len(self._levels) >= PORTS_MAX:
                continue
            levels = self._levels.setdefault(port, {})
            before = levels.get(name, value)
            levels[name] = value
            if name == INDEX and value != before:
                _strike(memory.resets, device, self._read_s)
            elif name == UP and value > 0:
                memory.up.setdefault(_key(port), 0.0)
            elif name == UP and value <= 0 < before and device not in self._off:
                _strike(memory.strikes, _key(port), self._read_s)
            elif name == SPEED and _key(port) in memory.up:
                memory.up[_key(port)] = max(memory.up[_key(port)], value)

    def _place(self, subject: str) -> tuple[str, str, str]:
        """Device, port and further label of a subject; the same few come again and again."""
        place = self._places.get(subject)
        if place is None:
            if len(self._places) >= 16 * PORTS_MAX:
                self._places.clear()
            labels = labels_of(subject)
            what = next((labels[name] for name in LABELS if name in labels), "")
            place = labels.get("device", ""), labels.get("port", ""), what
            self._places[subject] = place
        return place

    # ------------------------------------------------------------ conclusions

    def _conclude(self, memory: NetworkMemory) -> list[Verdict]:
        found: list[tuple[Port, Found]] = []
        lost = {memory.cards[key] for key in self._bus.lost if key in memory.cards}
        why = "it is not on the PCI bus any more, or no driver has it"
        found += [((device, ""), Found("nic_lost", FATAL, why, 0.0)) for device in sorted(lost)]
        efa = sum(card.get("kind") == "efa" for card in self._info.values())
        if not lost and self._expected * EXPECTED_SHARE <= efa < self._expected:
            why = f"{efa} of {self._expected:.0f} cards that this instance type can have are listed"
            found.append((("efa", ""), Found("nic_lost", WARN, why, 0.0)))
        for port in sorted(self._levels):
            if port[0] not in lost:
                found += [(port, finding) for finding in self._link(port, memory)]
        for device, times in sorted(memory.resets.items()):
            found += [((device, ""), finding) for finding in self._resets(times)]
        self._held = {key: finding for key, finding in self._held.items()
                      if finding.until_s > self._read_s}
        found += [(port, self._held[port, what]) for port, what in sorted(self._held)
                  if port[0] not in lost]
        said_of_cards = {(self._pci(port), finding.fault) for port, finding in found
                if self._kind(port) in RDMA_KINDS}
        return [self._verdict(port, finding) for port, finding in found
                if self._kind(port) in RDMA_KINDS or not self._pci(port)
                or (self._pci(port), finding.fault) not in said_of_cards][:VERDICTS_MAX]

    def _link(self, port: Port, memory: NetworkMemory) -> list[Found]:
        levels, key = self._levels[port], _key(port)
        found = []
        if levels.get(UP, 1.0) <= 0 and key in memory.up:
            by_hand = port[0] in self._off
            how = STATES.get(levels.get(STATE, 0.0)) or PHYSICAL.get(
                levels.get(PHYSICAL_STATE, 0.0), "no carrier")
            why = "it was switched off" if by_hand else f"its link is down ({how})"
            severity = WARN if by_hand else DEGRADED
            found.append(Found("nic_link_down", severity, f"{why}; it was up in this boot", 0.0))
        elif 0.0 < levels.get(SPEED, 0.0) < SLOW_SHARE * memory.up.get(key, 0.0):
            speeds = levels[SPEED] * 8e-9, memory.up[key] * 8e-9
            found.append(Found("nic_link_slow", WARN, "its link runs at {:g} Gbit/s, and ran at "
                               "{:g} in this boot".format(*speeds), 0.0))
        recent = _recent(memory.strikes.get(key, []), self._read_s)
        if len(recent) >= FLAP_COUNT:
            ago_min = (self._read_s - recent[-1]) / 60
            found.append(Found("nic_flapping", DEGRADED, f"its link went down {len(recent)} times "
                               f"in 12 hours, last {ago_min:.0f} min ago", 0.0))
        return found

    def _resets(self, times: list[float]) -> list[Found]:
        recent = _recent(times, self._read_s)
        if not recent or self._read_s - recent[-1] > HOLD_S:
            return []
        severity = DEGRADED if len(recent) >= FLAP_COUNT else WARN
        why = "its driver reset it"
        if len(recent) > 1:
            why += f" {len(recent)} times in 12 hours"
        return [Found("nic_reset", severity, why, 0.0)]

    def _verdict(self, port: Port, found: Found) -> Verdict:
        device, number = port
        parts = [f"nic/{device}"] * bool(device) + [number] * (number not in ("", "1"))
        info = self._info.get(device, {})
        where = f" at {info['pci']}" if info.get("pci") else ""
        what = f"{info.get('kind', 'card')} {device}{where}: " if device else ""
        evidence = tuple((name, info[name]) for name in ("kind", "pci", "driver", "firmware")
                         if info.get(name))
        return self.node_verdict(
            found.fault, "/".join(parts), found.severity, what + found.why, evidence)

    def _kind(self, port: Port) -> str:
        return self._info.get(port[0], {}).get("kind", "")

    def _pci(self, port: Port) -> str:
        return self._info.get(port[0], {}).get("pci", "")


def _key(port: Port) -> str:
    return "/".join(port)


def _strike(times: Times, key: str, boot_s: float) -> None:
    """Once for what is seen by its state and by a counter."""
    strike(times, key, boot_s, STRIKE_S, PORTS_MAX)


def _recent(times: list[float], now_s: float) -> list[float]:
    return recent(times, now_s, WINDOW_S)
