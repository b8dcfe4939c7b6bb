"""Codes of the Neuron runtime: found in text, shown in the incident, weighed in a log."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.catalog import load
from holdfast.agent.core.detect.ranks import ended
from holdfast.agent.core.model import Ended, RankView
from holdfast.agent.core.parse import neuron_codes
from holdfast.agent.core.parse.logs import root
from holdfast.agent.core.parse.logs.signatures import CULPRITS, RETRYABLE
from holdfast.agent.launchers import protocol
from holdfast.agent.launchers.run_session import explained
from holdfast.agent.logs import files

from .driver import Lab
from .test_logs import scan

CODES = load.neuron_codes()
HBM = "RuntimeError: nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE (1201)"
STUCK = "RuntimeError: nrt_execute status=1200"


def test_every_code_is_whole():
    assert len(CODES) == 27 and CODES[1201].name == "NRT_EXEC_HW_ERR_HBM_UE"
    assert len({one.name for one in CODES.values()}) == len(CODES)
    for code in CODES.values():
        assert code.culprit in CULPRITS and code.retryable in RETRYABLE, code
        assert neuron_codes.find(CODES, f"x {code.name}: y") == code
        assert neuron_codes.find(CODES, f"ERROR nrt_load status={code.code}, more") == code
        # The words that we add must make no consequence of a root.
        rank = Ended(1, 0, "exception", neuron_codes.explained(CODES, f"E: {code.name}"))
        assert ended.is_consequence(rank) == (code.code == 1200), code


@pytest.mark.parametrize(("text", "code"), [
    ("Inference completed with err: 1004", 1004), ("NRT_TIMEOUT", 5), ("nrt_load status=1, x", 1),
    ("NRT_NO_SUCH nrt_x status=7", 7), ("nrt_execute_repeat() returned status: 1202", 1202),
    ("NRT_SUCCESS", 0), ("nrt_load status=0", 0), ("nrt_load status=99999", 0), ("NRT_", 0),
    ("status=1202", 0), ("error 1202", 0), ("", 0), ("x" * 5000 + HBM, 0),
])
def test_only_the_runtimes_own_forms_are_believed(text, code):
    assert getattr(neuron_codes.find(CODES, text), "code", 0) == code


@given(st.text(max_size=60).map(lambda text: f"nrt_{text} status={text}"))
def test_no_text_breaks_the_search(text):
    assert len(neuron_codes.explained(CODES, text)) <= max(len(text), neuron_codes.ERROR_MAX + 300)


def test_a_rank_that_ended_with_a_code_is_told_with_its_meaning():
    levels = protocol.Levels(ranks=(
        protocol.RankLevel(0, 10, 1, "ended", ended=Ended(1, 0, "exception", HBM)),
        protocol.RankLevel(1, 11, 1, "ended", ended=Ended(1, 0, "exception", "KeyError: 'x'")),
        protocol.RankLevel(2, 12, 1, "running"),
    ))
    told = explained(levels).ranks
    assert told[0].ended.error.startswith(HBM)
    assert "1201 NRT_EXEC_HW_ERR_HBM_UE: device memory failed beyond repair" in told[0].ended.error
    assert told[1:] == levels.ranks[1:]


def test_the_incident_shows_it_and_the_one_that_was_stuck_is_not_blamed():
    lab = Lab(nproc=2)
    lab.begin()
    lab.train(3)
    lab.raises(0, neuron_codes.explained(CODES, STUCK))
    lab.raises(1, neuron_codes.explained(CODES, HBM), after_s=1.0)
    lab.step(0.1)
    (incident,) = [one for one in lab.decision.incidents if one.fault == "rank_exited"]
    assert incident.subject == "run/r/rank/1" and "replace the node" in incident.reason
    assert incident.state == "acted" and not any(e.kind == "put" and e.outlives_node
                                                 for e in lab.log)
    assert isinstance(lab.view.ranks[0], RankView)


def traceback(error: str) -> str:
    return ("Traceback (most recent call last):\n"
            '  File "train.py", line 3, in step\n    xm.mark_step()\n' + error + "\n")


def test_a_code_in_a_log_decides_whose_fault_it_is():
    found = root.diagnose(scan(traceback(HBM)), {})
    assert (found.root.culprit, found.root.retryable) == ("infra", "elsewhere")
    assert found.blames == "node" and not found.root.generic
    assert found.root.category == "neuron_runtime"
    assert dict(found.root.fields)["nrt"] == "NRT_EXEC_HW_ERR_HBM_UE"
    plain = root.diagnose(scan(traceback("RuntimeError: shapes do not fit")), {})
    assert plain.root.culprit == "user" and plain.root.generic
    stuck = root.diagnose(scan(traceback(STUCK)), {})
    assert stuck.root is None and stuck.matches[0].role == "cascade"
    both = root.diagnose(scan(traceback(STUCK), traceback(HBM)), {})
    assert both.root.culprit == "infra"
    bad = scan("Inference completed with err: 1002")[0]
    assert (bad.culprit, bad.retryable) == ("user", "no")


def test_diagnose_says_what_to_do(tmp_path):
    log = tmp_path / "rank0.log"
    log.write_text(traceback(HBM))
    assert "replace the node" in files.diagnose([str(log)]).note
    log.write_text(traceback("RuntimeError: shapes do not fit"))
    assert "Neuron" not in files.diagnose([str(log)]).note
