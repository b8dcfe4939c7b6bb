"""What was heard of checkpoints, for when the node that told of them is gone.

Owns RunState.heard.  Rank 0's launcher alone hears that one was committed; they stand in the shared
folder all the same when its node is lost, and its word with it.  Decides nothing: which one counts
is validity.py's, and one that is not there any more does not prove.
"""

from __future__ import annotations

from msgspec.structs import replace

from ..model import Plan
from . import members
from .state import Context, Heard, RunState

HEARD_MAX = 16  # of one folder, the newest
UNPROVEN = 2  # beyond those kept: an older one is deleted by now


def look(state: RunState, ctx: Context, plan: Plan) -> None:
    """Remembers what rank 0's node says now."""
    view, before = ctx.view, state.heard
    if before.registered_boot_s != view.registered_boot_s:
        before = state.heard = Heard(view.registered_boot_s)
    beat = members.of_rank_0(view, plan, ctx.observed.beats)
    if beat is None or not beat.commits or not members.is_fresh(beat, ctx.now, ctx.settings):
        return
    known = before.by_folder.get(beat.checkpoint_dir, ())
    found = {one.path: one for one in (*known, *beat.commits)}
    newest = sorted(found.values(), key=lambda one: (one.generation, one.step, one.path))
    keep = view.keep or ctx.settings.keep_checkpoints
    last = tuple(newest[-min(HEARD_MAX, keep + UNPROVEN) :])
    if last != known:
        state.heard = replace(before, by_folder={beat.checkpoint_dir: last})
