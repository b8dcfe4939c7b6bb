"""What launchers say of their log children: a level of the run, metrics, status and a line."""

from __future__ import annotations

import asyncio
import json

import msgspec
from fakes import FakeLauncher, until

from holdfast.agent.cli import report, text
from holdfast.agent.config.load import Loaded
from holdfast.agent.config.settings import Config
from holdfast.agent.core.model import Decision, Incident, Verdict
from holdfast.agent.history.incident_log import IncidentLog
from holdfast.agent.launchers import log_child, protocol
from holdfast.agent.logs import operator_signatures
from holdfast.agent.metrics.exposition import rows_text
from holdfast.agent.metrics.families import Exposition
from holdfast.agent.metrics.names import LOG_CHILD
from holdfast.agent.web import status

ROOT = "root: cuda_ecc on rank 0 (infra): RuntimeError: CUDA error: uncorrectable ECC error"
LEVEL = {
    "read_bytes": 5000, "skipped_bytes": 700, "cpu_s": 1.25, "rss_bytes": 1 << 20, "failures": 2,
    "problem": "", "lines": [["io_error", "root", "storage", 3], ["a,b=c", "signal", "data", 1]],
    "seen": [{"signature": "io_error", "role": "root", "culprit": "storage", "rank": 0,
              "text": "OSError: [Errno 5]", "wall_s": 1.0}],
}


def test_a_level_becomes_metrics_and_status(agent, tmp_path):
    async def scenario():
        async with agent() as (daemon, node):
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            launcher.levels(generation=1, state="running", ranks=[])
            await until(lambda: node.seen and node.seen[-1].runs)
            assert node.seen[-1].runs[0].logs is False
            launcher.levels(generation=1, state="running", ranks=[], logs=LEVEL)
            await until(lambda: node.seen[-1].runs[0].logs)
            await until(lambda: daemon.state.runner is not None)
            shown = Exposition(daemon.state).text().decode()
            for line in (
                'holdfast_log_read_bytes_total{run="demo"} 5000.0',
                'holdfast_log_skipped_bytes_total{run="demo"} 700.0',
                'holdfast_log_child_cpu_seconds_total{run="demo"} 1.25',
                'holdfast_log_child_failures_total{run="demo"} 2.0',
                'holdfast_log_lines_total{culprit="storage",role="root",run="demo",'
                'signature="io_error"} 3.0',
                'holdfast_log_lines_total{culprit="",role="",run="demo",signature="other"} 1.0',
            ):
                assert line in shown, shown
            run = status.status(daemon.state)["runs"][0]
            assert run["logs"]["seen"][0]["line"] == "OSError: [Errno 5]" and run["root"] == ""
            said = " ".join(text.plain(report.status([status.status(daemon.state)])).split())
            assert "io_error on rank 0 (storage): OSError: [Errno 5]" in said
            node.extra = {"verdicts": (Verdict("log_root_cause", "run/demo/logs", "warn", 0.8,
                                               ROOT, detector="logs", run="demo"),)}
            daemon.wake("test")
            await until(lambda: daemon.state.snapshot.decision.verdicts)
            said = " ".join(text.plain(report.status([status.status(daemon.state)])).split())
            assert ROOT in said and "io_error" not in said
            launcher.close()

    asyncio.run(scenario())


def test_a_launcher_is_told_what_to_read(agent, tmp_path):
    async def scenario():
        async with agent(logs__sample_bytes_s=1000) as (daemon, _node):
            launcher = FakeLauncher(tmp_path / "run" / "agent.sock")
            launcher.hello()
            told = await launcher.receive("logs")
            assert told == {"t": "logs", "read": True, "sample_bytes_s": 1000, "own": []}
            await daemon.reload()
            assert (await launcher.receive("logs"))["own"] == []
            launcher.close()

    asyncio.run(scenario())


def test_what_a_launcher_is_told_fits_a_packet():
    row = {"id": "a" * 60, "pattern": "x" * 1000, "literals": ["y" * 100], "samples": ["z" * 2000]}
    rows = [row] * (operator_signatures.TOTAL_BYTES // len(json.dumps(row)))
    loaded = Loaded(Config(), {}, tuple(rows))
    assert len(rows) >= 7 and len(protocol.encode(log_child.order(loaded))) < 60_000


def said(run, *lines, **more):
    """A session whose launcher said this of its log child."""
    class RunSession:
        hello = protocol.Hello(run=run)
        level = msgspec.convert({**LEVEL, "lines": lines} | more, protocol.LogLevel)
        levels = protocol.Levels(logs=level)

    return RunSession()


def test_numbers_and_names_from_outside_are_bounded():
    own = Loaded(Config(), {}, ({"id": "our_storage"},))
    made_up = [[f"{n}" + "y" * 400, "root", "\x1b", 3] for n in range(50)]
    odd = [["io_error", "boss", "storage", 3], ["io_error", "root", "me", 3]]
    known = [["our_storage", "root", "storage", -3], ["io_error", "root", "storage", 1],
             ["python_exception", "root", "user", 2]]
    long = "n" * 100
    found = log_child.rows([said(f"{long},a", *made_up, *odd, cpu_s=-5),
                           said(f"{long}=b", *known)], own)
    assert found["log_child_cpu_seconds_total"] == [((f"{long},a",), 0.0), ((f"{long}=b",), 1.25)]
    assert found["log_lines_total"] == [
        ((f"{long},a", "other", "", ""), 156),
        ((f"{long}=b", "our_storage", "root", "storage"), 0),
        ((f"{long}=b", "io_error", "root", "storage"), 1),
        ((f"{long}=b", "python_exception", "root", "user"), 2),
    ]
    page = "".join(rows_text(one, found[one.name]) for one in LOG_CHILD)
    assert f'{{run="{long},a"}}' in page and f'{{run="{long}=b"}}' in page
    many = said("a", *([f"{n}", "root", "infra", 1] for n in range(1000)))
    assert log_child.rows([many], own)["log_lines_total"][0][1] == log_child.COUNTS_MAX


def test_a_root_is_said_once_on_the_terminal():
    incident = Incident("i", "rank_exited", "run/demo/rank/0", "fatal", "demo", 1, 5.0, 1.0,
                        "ended", "rank 0")
    log = IncidentLog(())
    assert len(log.follow(Decision(incidents=(incident,))).lines) == 1
    noted = msgspec.structs.replace(incident, timeline=((6.0, ROOT),))
    lines = log.follow(Decision(incidents=(noted,))).lines
    assert [(one.text, one.level) for one in lines] == [(f"rank_exited: {ROOT}", "warn")]
    more = msgspec.structs.replace(noted, timeline=((6.0, ROOT), (7.0, "more")))
    assert log.follow(Decision(incidents=(more,))).lines == ()
