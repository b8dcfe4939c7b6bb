"""A run's checkpoints over nodes: who leads lets go what is beyond keep-N, and the newest are known
when the node of rank 0, whose launcher alone hears of them, is gone."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from holdfast.agent.core.model import Beat, Commit, Delete, Now, Observed, Settings
from holdfast.agent.core.run import members
from holdfast.agent.core.run.heard import look
from holdfast.agent.core.run.state import Heard

from .driver import Cluster

replace = msgspec.structs.replace


def started(**given: object) -> Cluster:
    cluster = Cluster(**given)  # type: ignore[arg-type]
    cluster.run(6)
    return cluster


@pytest.mark.parametrize("leads", ["the node of rank 0", "the other", "a spare"])
@pytest.mark.parametrize("keep", [2, 30])
def test_whoever_leads_lets_go_what_is_beyond_keep_n(leads: str, keep: int) -> None:
    """The launcher of rank 0's node alone hears of commits, and that they were read back."""
    cluster = started(settings=Settings(single_node=False, keep_checkpoints=keep), keep=keep)
    host = dict(cluster.plan().ranks)[0]
    other = next(name for name in cluster.plan().members if name != host)
    leader = {"the node of rank 0": host, "the other": other, "a spare": "c"}[leads]
    cluster.leases["r"] = leader, 1e9
    asked = []
    for step in range(5, 5 * (keep + 4), 5):
        cluster.labs[host].commit(step)
        cluster.run(2)
    for name, lab in cluster.labs.items():
        asked += [(name, path) for one in lab.log if isinstance(one.body, Delete)
                  for path in one.body.paths]
    assert asked == [(leader, f"step-{step}.gen-1") for step in (5, 10, 15)]


@pytest.mark.parametrize("what", ["another folder", "another's", "older", "of an older generation"])
def test_whose_word_of_checkpoints_is_not_believed(what: str) -> None:
    cluster = started(settings=Settings(single_node=False, keep_checkpoints=1))
    plan, lab = cluster.plan(), cluster.labs["c"]
    host = dict(plan.ranks)[0]
    said = replace(
        cluster.heard[host, "r"], boot_s=99.5, uid=1000, generation=plan.generation,
        commits=tuple(Commit(1, step, f"p{step}", verified=True) for step in (5, 10)))
    changed = {"another folder": {"checkpoint_dir": "/else"}, "another's": {"uid": 1001},
               "older": {"boot_s": 0.0}, "of an older generation": {"generation": 0}}[what]
    view, now, settings = replace(lab.view, uid=1000), Now(100.0, 100.0), lab.settings

    def known(beat: Beat) -> list[str]:
        return [one.path for one in members.kept_commits(view, plan, (beat,), now, settings)]

    assert known(said) == ["p5", "p10"]
    assert known(replace(said, **changed)) == []


@pytest.mark.parametrize("again", [False, True])
def test_checkpoints_outlive_the_node_whose_launcher_alone_heard_of_them(again: bool) -> None:
    """Rank 0's node is gone, and nobody holds its state: the folder has it.  A launcher that began
    since then has listed the folder itself."""
    cluster = Cluster("abc", 1, checkpoint_dir="/ckpt")
    cluster.run(4)
    first = cluster.plan().members[0]
    for step in (7, 14):
        cluster.labs[first].commit(step)
        cluster.run(2)
    left = [lab for name, lab in cluster.labs.items() if name != first]
    if again:
        for lab in left:
            lab.view = replace(lab.view, registered_boot_s=lab.boot_s)
    cluster.dead.add(first)
    cluster.lost.add(first)
    cluster.run(30)
    resume = cluster.plan().resume
    assert cluster.plan().members[0] != first
    assert (resume.kind, resume.step) == (("fresh", 0) if again else ("disk", 14))


@pytest.mark.parametrize(("keep", "most"), [(0, 5), (1, 3), (30, 16)])
def test_of_a_folders_checkpoints_those_that_may_still_stand_are_remembered(
    keep: int, most: int
) -> None:
    cluster = Cluster("ab", 1, checkpoint_dir="/ckpt", keep=keep)
    cluster.run(4)
    plan = cluster.plan()
    first = plan.members[0]
    lab = cluster.labs["b" if first == "a" else "a"]
    for step in range(1, 40):
        cluster.labs[first].commit(step)
        cluster.run(1)
    state = lab.node.cases["r"].state
    (path, commits), = state.heard.by_folder.items()
    assert path == "/ckpt" and [one.step for one in commits] == [*range(40 - most, 40)]
    now, before = lab.node._seen[0], state.heard  # type: ignore[index]
    said = replace(cluster.heard[first, "r"], boot_s=now.boot_s)

    def after(**changed: object) -> Heard:
        beat = replace(said, **changed)
        looked = SimpleNamespace(
            view=lab.view, now=now, settings=lab.settings, observed=Observed(beats=(beat,)))
        state.heard = before
        look(state, looked, plan)  # type: ignore[arg-type]
        return state.heard

    more = after(commits=(Commit(1, 40, "step-40.gen-1"),)).by_folder["/ckpt"]
    assert [one.step for one in more] == [*range(41 - most, 41)] and after() is before
    for changed in ({"commits": ()}, {"lost": True}, {"boot_s": 0.0}):
        assert after(**changed) is before
    moved = after(checkpoint_dir="/other", commits=(Commit(9, 3, "p"),)).by_folder
    assert {path: [one.path for one in found] for path, found in moved.items()} == {"/other": ["p"]}
