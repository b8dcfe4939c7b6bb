"""When repeats of a kernel event mean more than a single one does.

Owns the windows in which they are counted, and their bounds.  Pure; the times live in the kernel
case's memory, and survive a restart of the agent and a reboot.
"""

from __future__ import annotations

from ..model import Escalation, Event, Now

WINDOWS_MAX = 256
TIMES_MAX = 32
Times = dict[str, list[float]]  # window -> wall_s of its events


def grown(kept: Times, event: Event, now: Now) -> Escalation | None:
    """The escalation that this event completes."""
    for one in event.escalations:
        place = event.place if one.place else ""
        if one.place and not place:
            continue
        key = f"{one.name}|{event.subject}|{place}"
        times, at_s = _window(kept, key, one, now), wall_s_of(event, now)
        if not times or at_s - times[-1] > one.burst_s:
            times.append(at_s)
        remember(kept, key, times)
        if len(times) >= one.count:
            return one
    return None


def _window(kept: Times, key: str, rule: Escalation, now: Now) -> list[float]:
    begin_s = now.wall_s - rule.window_h * 3600.0
    return [at_s for at_s in kept.get(key, ()) if begin_s < at_s <= now.wall_s]


def remember(kept: Times, key: str, times: list[float]) -> None:
    """The newest goes to the end: the oldest is forgotten first."""
    kept.pop(key, None)
    kept[key] = times[-TIMES_MAX:]
    while len(kept) > WINDOWS_MAX:
        del kept[next(iter(kept))]


def wall_s_of(event: Event, now: Now) -> float:
    """When it was said: lines from before a start of the agent are read late."""
    return now.wall_s - max(0.0, now.boot_s - event.boot_s) if event.boot_s else now.wall_s
