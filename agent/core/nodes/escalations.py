"""When repeats of a kernel event mean more than a single one does.

Owns which repeats count together.  Pure; the times (wall_s) live in the kernel case's memory, and
survive a restart of the agent and a reboot.
"""

from __future__ import annotations

from ..model import Escalation, Event, Now
from ..series.streak import Times, recent, strike

WINDOWS_MAX = 256


def grown(kept: Times, event: Event, now: Now) -> Escalation | None:
    """The escalation that this event completes."""
    for one in event.escalations:
        place = event.place if one.place else ""
        if one.place and not place:
            continue
        key = f"{one.name}|{event.subject}|{place}"
        kept[key] = recent(kept.get(key, ()), now.wall_s, one.window_h * 3600.0)
        times = strike(kept, key, wall_s_of(event, now), one.burst_s, WINDOWS_MAX)
        if len(times) >= one.count:
            return one
    return None


def wall_s_of(event: Event, now: Now) -> float:
    """When it was said: lines from before a start of the agent are read late."""
    return now.wall_s - max(0.0, now.boot_s - event.boot_s) if event.boot_s else now.wall_s
