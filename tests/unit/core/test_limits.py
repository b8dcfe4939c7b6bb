"""How long a wait may last: the same for ranks that are alike."""

from __future__ import annotations

import msgspec

from holdfast.agent.core.detect.ranks.limits import Costs, act_s, alike, suspect_s
from holdfast.agent.core.model import RankView, Settings
from holdfast.agent.core.series.wait_history import History, Waits

replace = msgspec.structs.replace


def test_ranks_that_are_alike_have_the_same_limits() -> None:
    """Of thousands one is asked for all that are alike; a limit that reads more would be missed."""
    other = {"rank": 9, "node": "z", "pid": 9, "generation": 9, "page": False, "step": 9,
             "still_s": 9.0, "beat_age_s": 9.0, "proc_state": "D", "traced": True, "stopped_s": 9.0,
             "active": True, "reading": True,
             "seq": ((0, 9),), "step_seq": ((9, 9),), "step_time_s": 9.0,
             "flight": ((9, "all_reduce", "9"),), "where": "x.py:9", "phase_s": (("data", 9.0),),
             "cgroup": "/z", "start_boot_s": 9.0, "place": "stage 9", "told_s": 9.0}
    history = History(restarts_s=[3.0], step_s=0.5)
    for phase in ("data", "collective", "eval", "startup", "compile"):
        for wait_s in (2.0, 3.0, 4.0, 5.0, 6.0):
            history.waits.setdefault(phase, Waits()).add(wait_s)
    base = [RankView(0, "a", 1, 1, state, phase=phase) for state in ("starting", "running")
            for phase in ("data", "collective", "eval", "startup", "compile", "exit", "unknown")]
    fields = [{}, *({name: value} for name, value in other.items())]
    assert {*other, "state", "phase", "ended", "parked", "gradients"} == set(
        RankView.__struct_fields__)
    ranks = [replace(one, **field) for one in base for field in fields]
    for grade in ("trainer", "script", "opaque"):
        for started in (True, False):
            costs = Costs(grade, startup_s=2.0, steps_to_redo=3, hang_limit_s=7.0, started=started)
            for limit in (costs, replace(costs, hang_limit_s=0.0)):
                seen: dict[object, set[tuple[float, float]]] = {}
                for rank in ranks:
                    seen.setdefault(alike(rank), set()).add((
                        suspect_s(rank, limit, history, Settings()),
                        act_s(rank, limit, history, Settings())))
                assert all(len(found) == 1 for found in seen.values())


def test_input_that_comes_slowly_is_waited_for_and_one_that_stands_still_is_not() -> None:
    """Begun anew it would be read anew.  What else reads meanwhile holds up no other phase."""
    history, settings = History(restarts_s=[3.0], step_s=0.5), Settings()
    still = RankView(0, "a", 1, 1, "running", phase="data", active=True)
    reads, costs = replace(still, reading=True), Costs("trainer", startup_s=2.0)
    assert act_s(still, costs, history, settings) == settings.odds_active * 3.0
    assert act_s(reads, costs, history, settings) == settings.quiet_limit_s
    assert suspect_s(reads, costs, history, settings) == suspect_s(still, costs, history, settings)
    elsewhere = replace(reads, phase="collective")
    assert act_s(elsewhere, costs, history, settings) == settings.odds_active * 3.0
    limited = replace(costs, hang_limit_s=7.0)
    assert act_s(reads, limited, history, settings) == 7.0
