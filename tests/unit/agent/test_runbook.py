"""Runbooks: the shipped ones load, an operator's shadow, an error names file, line and key."""

from __future__ import annotations

import pytest

from holdfast.agent.config.runbooks import RunbookError, load_documents, load_runbooks, parse

GOOD = """+++
severity = "fatal"
scope    = "rank"
ladder   = ["restart_ranks", "stop_run"]
budget   = { count = 2, window_h = 12 }
clears   = "check"
alert    = "HoldfastRankKilled"
+++
## Meaning
A rank was killed.
"""


def test_the_shipped_ones_load():
    runbooks = load_runbooks()
    assert runbooks["rank_killed"].ladder and runbooks["rank_killed"].path.endswith(".md")


def test_a_good_one():
    document = parse("rank_killed", GOOD, "x.md")
    assert document.runbook.ladder == ("restart_ranks", "stop_run")
    assert (document.runbook.budget_count, document.runbook.budget_window_h) == (2, 12.0)
    assert document.prose.startswith("## Meaning")


@pytest.mark.parametrize(
    "old, new, says",
    [
        ('"stop_run"', '"shoot_it"', "x.md:4: ladder: rung 'shoot_it' is unknown"),
        ('"fatal"', '"deadly"', "x.md:2: severity: 'deadly': set one of ok, unknown"),
        ('scope    = "rank"', 'scope    = "moon"', "x.md:3: scope: 'moon'"),
        ('scope    = "rank"\n', "", "x.md:1: scope: is missing"),
        ("count = 2", "count = -2", "x.md:5: budget: count = -2"),
        ("window_h = 12", 'window_h = "x"', "x.md:5: budget: window_h = 'x'"),
        *(("window_h = 12", f"window_h = {hours}",
           f"x.md:5: budget: window_h = {hours}: set hours > 0 and <= 8784")
          for hours in ("nan", "inf", "0", "8785", "1e+300")),
        ("window_h = 12", "hours = 12", "x.md:5: budget: set { count"),
        ('"check"', '"never"', "x.md:6: clears: 'never'"),
        ('"HoldfastRankKilled"', '"RankKilled"', "x.md:7: alert"),
        ("alert   ", "alarm   ", "x.md:7: alarm: is unknown"),
        ('scope    = "rank"', "scope    = ", "(at line 3"),
        ("+++\nsev", "sev", "begins without TOML"),
    ],
)
def test_a_bad_one_is_named(old, new, says):
    assert old in GOOD
    with pytest.raises(RunbookError) as caught:
        parse("rank_killed", GOOD.replace(old, new, 1), "x.md")
    assert says in str(caught.value)


def test_shadows_speak_and_keep_the_shipped_prose(tmp_path):
    machine = GOOD.split("## Meaning")[0]
    (tmp_path / "rank_killed.md").write_text(machine.replace("count = 2", "count = 7"))
    document = load_documents(tmp_path)["rank_killed"]
    assert document.runbook.budget_count == 7
    assert document.runbook.path == str(tmp_path / "rank_killed.md")
    assert document.prose == load_documents()["rank_killed"].prose
    (tmp_path / "bad.md").write_bytes(b"\xff\xfe\xfd")
    (tmp_path / "worse.md").write_text("+++\n")
    with pytest.raises(RunbookError) as caught:
        load_runbooks(tmp_path)
    assert "bad.md" in str(caught.value) and "worse.md" in str(caught.value)
