"""The commands against a stand-in agent that speaks the API over a real Unix socket."""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.cli import control, main
from holdfast.agent.cli.client import Agent, choose
from holdfast.agent.cli.text import Failure
from holdfast.agent.web import openapi

GOLDEN = Path(__file__).resolve().parents[2] / "golden/cli"


class StandIn(socketserver.UnixStreamServer):
    """One agent: answers from its tables, keeps what was posted."""

    def __init__(self, socket: Path, node: str, run: str) -> None:
        socket.parent.mkdir(parents=True, exist_ok=True)
        status = json.loads((GOLDEN / "status.json").read_text())
        status["node"], status["runs"][0]["run"] = node, run
        incident = json.loads((GOLDEN / "incident.json").read_text())
        self.answers: dict[str, Any] = {
            "/api/v1/status": status,
            "/api/v1/incidents": status["incidents"],
            "/api/v1/incidents?all=1": [*status["incidents"], incident],
            "/api/v1/incidents/i-16": incident,
            f"/api/v1/drift?run={run}": json.loads((GOLDEN / "drift.json").read_text()),
            "/api/v1/explain/rank_killed": [
                {"subject": f"run/{run}", "rung": "restart_ranks", "reason": "", "code": -1}],
            "/api/v1/ledger": json.loads((GOLDEN / "ledger.json").read_text()),
            "/api/v1/requests/r-1": {"id": "r-1", "state": "done", "text": "taken"},
            "/api/v1/refusals": [
                {"uid": 4711, "what": "POST /api/v1/runs/{run}/{verb}", "times": 200, "wall_s": 1.0,
                 "why": "uid 4711 may change its own runs only", "example": "/api/v1/runs/m5/pause"}
            ],
        }
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.refuse = ""
        super().__init__(str(socket), Handler)


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None: ...

    def reply(self, code: int, answer: object) -> None:
        body = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path in self.server.answers:
            self.reply(200, self.server.answers[self.path])
        else:
            self.reply(404, {"error": f"no {self.path}"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuse:
            self.reply(403, {"error": self.server.refuse, "set": "inject.enabled = true"})
            return
        self.server.posted.append((self.path, body))
        self.reply(200, {"id": "r-1"})


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, StandIn]]:
    """Two private agents, of runs m5 and other, on one node."""
    base = tmp_path / "r"
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(base))
    found = {run: StandIn(base / run / "api.sock", "node-a", run) for run in ("m5", "other")}
    threads = [threading.Thread(target=one.serve_forever, args=(0.02,)) for one in found.values()]
    for thread in threads:
        thread.start()
    yield found
    for one, thread in zip(found.values(), threads, strict=True):
        one.shutdown()
        one.server_close()
        thread.join()


Captured = pytest.CaptureFixture[str]


def test_status_shows_every_run_and_answers_four_questions_first(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["status", "--run", "m5"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[:4]] == ["training", "checkpoint", "doing", "you"]
    assert main(["status", "--json"]) == 0
    runs = {one["runs"][0]["run"] for one in json.loads(capsys.readouterr().out)}
    assert runs == set(agents)


def test_who_was_refused_is_told(agents: dict[str, StandIn], capsys: Captured) -> None:
    assert main(["incidents", "--refused", "--run", "m5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "uid 4711, 200 times: POST /api/v1/runs/{run}/{verb}" in said
    assert "uid 4711 may change its own runs only; last for /api/v1/runs/m5/pause" in said
    agents["m5"].answers["/api/v1/refusals"] = []
    assert main(["incidents", "--refused", "--run", "m5"]) == 0
    assert "nobody" in capsys.readouterr().out
    assert main(["incidents", "--refused", "--json"]) == 0
    assert [one["uid"] for one in json.loads(capsys.readouterr().out)] == [4711]


def test_an_answer_is_waited_for(
    agents: dict[str, StandIn], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = ["pause", "--run", "m5", "--reason", "x"]
    answers, place = agents["m5"].answers, "/api/v1/requests/r-1"
    assert main(pause) == 0
    assert capsys.readouterr().out == "run m5: Holdfast will watch and not act\n"
    answers[place] = {"id": "r-1", "state": "refused", "text": "no launcher is connected"}
    assert main(pause) == 1
    assert "run m5: refused: no launcher is connected" in capsys.readouterr().err
    answers[place] = {"id": "r-1", "state": "waiting", "text": ""}
    assert main([*pause, "--no-wait"]) == 0
    assert capsys.readouterr().out == "run m5: asked\n"
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    assert main(pause) == 1
    assert "not answered within 0.1 s" in capsys.readouterr().err


def test_two_runs_need_a_choice_and_an_unknown_one_is_refused(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["inject", "kill"]) == 1
    assert "--run NAME (there are: m5, other)" in capsys.readouterr().err
    assert main(["inject", "kill", "--run", "m6"]) == 1
    assert "no run 'm6' here (there are: m5, other)" in capsys.readouterr().err


def test_inject_asks_the_right_agent(agents: dict[str, StandIn]) -> None:
    assert main(["inject", "stall", "--run", "m5", "--rank", "1", "--seconds", "3"]) == 0
    route, body = agents["m5"].posted[0]
    assert route == "/api/v1/runs/m5/inject"
    assert (body["fault"], body["rank"], body["args"]) == ("stall", 1, {"seconds": 3.0})
    assert not agents["other"].posted


def test_inject_refuses_a_rank_that_is_not_there(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["inject", "kill", "--run", "m5", "--rank", "7"]) == 1
    assert "has no rank 7 here: it has 0 to 1" in capsys.readouterr().err


def test_an_agents_no_says_what_to_set(agents: dict[str, StandIn], capsys: Captured) -> None:
    agents["m5"].refuse = "injection is off"
    assert main(["inject", "kill", "--run", "m5"]) == 1
    assert capsys.readouterr().err == "holdfast: injection is off; set inject.enabled = true\n"


def test_a_kernel_incident_is_closed_on_all_agents_that_have_it(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["close", "i-16", "--reason", "cable changed"]) == 1
    assert "incident i-16 is closed already" in capsys.readouterr().err
    for one in agents.values():  # which list what is over as well
        one.answers["/api/v1/incidents"] = [one.answers["/api/v1/incidents/i-16"]]
    assert main(["close", "i-16", "--reason", "cable changed"]) == 1
    assert "incident i-16 is closed already" in capsys.readouterr().err
    for one in agents.values():
        still = {**one.answers["/api/v1/incidents/i-16"], "state": "acted"}
        one.answers["/api/v1/incidents"] = [still]
    assert main(["close", "i-16", "--reason", "cable changed"]) == 0
    for one in agents.values():
        ((route, body),) = one.posted
        assert route == "/api/v1/incidents/i-16/close" and body["reason"] == "cable changed"
    assert capsys.readouterr().out == "i-16: closed\n"


def test_a_node_is_paused_on_all_its_agents(agents: dict[str, StandIn], capsys: Captured) -> None:
    assert main(["pause", "--node", "node-a", "--reason", "disk"]) == 0
    for one in agents.values():
        assert one.posted[0][0] == "/api/v1/nodes/node-a/pause"
        assert one.posted[0][1]["reason"] == "disk"
    assert main(["pause", "--node", "node-b", "--reason", "disk"]) == 1
    assert "no node 'node-b'" in capsys.readouterr().err
    assert main(["pause", "--node", "a", "--run", "b", "--reason", "c"]) == 2


def test_a_node_is_excluded_drained_and_released_by_any_agent_that_knows_it(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    row = {"node": "node-b", "age_s": 2.0, "fatal": "", "excluded": True, "draining": False,
           "reason": "loose cable", "by": "ann", "fault": "", "strikes": 1}
    for one in agents.values():
        one.answers["/api/v1/status"]["nodes"] = [row]
    for verb, said in (("exclude", "no run gets ranks there until it is released"),
                       ("drain", "nothing of any run is left there, and none comes until it is "
                        "released"), ("release", "runs may have ranks there again")):
        assert main([verb, "node-b", "--reason", "loose cable"]) == 0
        assert capsys.readouterr().out == f"node node-b: {said}\n"
    asked = [path for one in agents.values() for path, _ in one.posted]
    assert asked == [f"/api/v1/nodes/node-b/{verb}" for verb in ("exclude", "drain", "release")]
    assert main(["exclude", "node-z", "--reason", "x"]) == 1
    assert "no node 'node-z' is known here (there are: node-a, node-b)" in capsys.readouterr().err
    assert main(["why", "node-b"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node node-b: heard of 2.0 s ago",
        "  excluded   excluded, gets no ranks: loose cable (ann)",
        "  do         holdfast release node-b --reason TEXT, when it is well",
        "  strikes    excluded for faults 1 time lately"]


def test_a_run_that_is_over_is_asked_of_the_agent_that_had_it(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    for words in ("incidents --all", "ledger"):
        assert main([*words.split(), "--run", "gone"]) == 1
        assert "no run 'gone' here" in capsys.readouterr().err
    node = agents["other"].answers
    node["/api/v1/jobs"] = [{"run": "gone"}]
    node["/api/v1/incidents?all=1"] = [
        {**node["/api/v1/incidents/i-16"], "id": "gone-g1", "run": "gone"},
        {**node["/api/v1/incidents/i-16"], "run": "other"}]
    node["/api/v1/ledger"]["runs"]["gone"] = {"training": 60.0}
    assert main(["incidents", "--all", "--run", "gone", "--json"]) == 0
    assert [one["id"] for one in json.loads(capsys.readouterr().out)] == ["gone-g1"]
    assert main(["ledger", "--run", "gone"]) == 0
    assert "wall time 60 s" in capsys.readouterr().out
    assert main(["status", "--run", "gone"]) == 1
    assert "run gone has ended: `holdfast incidents --run gone`" in capsys.readouterr().err


def test_incidents_and_seconds_of_several_attempts_are_told_as_such(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    answers = agents["m5"].answers
    incident = answers["/api/v1/incidents/i-16"] | {"run": "m5"}
    answers["/api/v1/incidents"] = [
        incident | {"id": "m5-g1", "attempt": 1}, incident | {"id": "m5-g9", "attempt": 2},
        incident | {"id": "node-1", "run": ""},
        *(incident | {"id": f"else-{at}", "run": "else", "attempt": at, "node": f"n{at}"}
          for at in (3, 4))]  # each node's own number
    answers["/api/v1/ledger"] |= {"attempts": {"m5": 2, "else": 1}}
    answers["/api/v1/ledger"]["runs"]["m5"] = {"training": 60.0}
    assert main(["incidents", "--run", "m5"]) == 0
    said = capsys.readouterr().out
    places = [said.index(text) for text in ("attempt 2\n", "m5-g9", "attempt 1\n", "m5-g1")]
    assert places == sorted(places)
    again = "of several attempts under one name: holdfast incidents --run m5\n"
    assert again not in said
    assert main(["incidents"]) == 0
    said = capsys.readouterr().out
    assert again in said and "attempt 1\n" not in said, "whose would it be?"
    assert "--run else" not in said
    assert main(["ledger", "--run", "m5"]) == 0
    said = capsys.readouterr().out
    assert "\nover 2 attempts under this name: holdfast jobs tells them apart\n" in said
    assert main(["ledger"]) == 0
    assert "\nm5: over 2 attempts under this name" in capsys.readouterr().out
    answers["/api/v1/incidents/m5-g9"] = incident | {"id": "m5-g9", "attempt": 2}
    answers["/api/v1/incidents?all=1"] = answers["/api/v1/incidents"]
    assert main(["incidents", "m5-g9", "--run", "m5"]) == 0
    assert ", attempt 2\n" in capsys.readouterr().out


def test_an_incident_is_found_by_the_beginning_of_its_id(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["incidents", "i-16", "--run", "m5"]) == 0
    assert "i-16, closed" in capsys.readouterr().out
    assert main(["incidents", "i-1", "--run", "m5"]) == 1
    assert "fits several: i-16, i-17" in capsys.readouterr().err
    assert main(["incidents", "x", "--run", "m5"]) == 1
    assert "no incident 'x'" in capsys.readouterr().err
    assert main(["incidents", "--all", "--run", "m5", "--json"]) == 0
    assert {one["id"] for one in json.loads(capsys.readouterr().out)} == {"i-16", "i-17"}


def test_why_and_ledger(agents: dict[str, StandIn], capsys: Captured) -> None:
    assert main(["why", "node-a"]) == 0
    assert "rank_hung" in capsys.readouterr().out
    assert main(["why", "node-z"]) == 1
    assert "there are: node-a" in capsys.readouterr().err
    assert main(["ledger"]) == 0
    assert "each of them in one category" in capsys.readouterr().out


def test_drift_says_by_its_code_what_it_found(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    answer = agents["m5"].answers["/api/v1/drift?run=m5"]
    assert main(["drift", "--run", "m5"]) == 1
    assert "550.54.15" in capsys.readouterr().out
    answer["differences"] = []
    assert main(["drift", "--run", "m5", "--json"]) == 3, "one node is unread, one unknown"
    assert json.loads(capsys.readouterr().out) == answer
    answer["unread"], answer["unknown"] = [], []
    assert main(["drift", "--run", "m5"]) == 0
    assert main(["drift"]) == 3
    assert "choose with --run NAME (there are: m5, other)" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["drift", "--help"])
    assert "example: holdfast drift --run m5" in capsys.readouterr().out


def test_nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    assert main(["status"]) == 1
    said = capsys.readouterr().err
    assert f"nothing runs here: no agent answers in {tmp_path}, nor below {tmp_path}." in said
    assert "agent.runtime_dir" in said and "HOLDFAST_RUNTIME_DIR" in said


def test_of_a_run_that_is_over_its_logs_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOLDFAST_STATE_DIR", str(tmp_path / "state"))
    for turn, run in enumerate(("new", "old")):
        (tmp_path / "state/runs" / run / "logs").mkdir(parents=True)
        (tmp_path / "state/runs" / run / "lock").touch()
        os.utime(tmp_path / "state/runs" / run / "lock", (1000 - turn, 1000 - turn))
    assert main(["incidents"]) == 1
    logs = tmp_path / "state/runs/new/logs"
    assert capsys.readouterr().err.endswith(f"ended: `holdfast diagnose {logs}`\n")
    logs.rmdir()  # --log-dir put them elsewhere
    assert main(["incidents"]) == 1
    assert "ended" not in capsys.readouterr().err


def test_a_socket_that_nobody_listens_on_is_passed_over(
    agents: dict[str, StandIn], tmp_path: Path, capsys: Captured
) -> None:
    dead = StandIn(tmp_path / "r/dead/api.sock", "node-a", "dead")
    dead.server_close()
    assert main(["status", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 2


def test_without_a_run_none_can_be_chosen() -> None:
    with pytest.raises(Failure, match="^no run is registered here$"):
        choose([(Agent(Path("/nowhere/api.sock")), {"runs": []})], None)


def test_a_paused_run_is_told_apart(agents: dict[str, StandIn], capsys: Captured) -> None:
    assert main(["explain", "rank_killed"]) == 0
    assert "paused" not in capsys.readouterr().out.split("Meaning")[0]
    agents["m5"].answers["/api/v1/status"]["runs"][0]["paused"] = True
    assert main(["explain", "rank_killed"]) == 0
    now = " ".join(capsys.readouterr().out.split("Meaning")[0].split())
    assert "nothing for m5: paused" in now and "nothing for other" not in now


def test_the_fleet_is_paused_by_every_agent_here(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["pause", "--fleet", "--for", "2h", "--reason", "switch"]) == 0
    for one in agents.values():
        ((route, body),) = one.posted
        assert route == "/api/v1/fleet/pause"
        assert (body["reason"], body["for_s"]) == ("switch", 7200.0)
    assert capsys.readouterr().out == "fleet: Holdfast will watch and not act for 2 h 0 min\n"
    assert main(["pause", "--fleet", "--run", "m5", "--reason", "c"]) == 2
    agents["m5"].answers["/api/v1/status"] |= {
        "fleet_paused": True, "fleet_paused_reason": "switch", "fleet_paused_until_wall_s": None}
    assert main(["status", "--run", "m5"]) == 0
    assert "the fleet is paused (switch)" in " ".join(capsys.readouterr().out.split())
    assert main(["why", "node-a"]) == 0
    assert "the whole fleet, by an operator" in " ".join(capsys.readouterr().out.split())


def test_what_was_asked_for_is_told(agents: dict[str, StandIn], capsys: Captured) -> None:
    row = {"id": "op-1", "action": "pause", "subject": "fleet", "reason": "switch upgrade",
           "by": "ann (uid 0)", "wall_s": 1e9, "until_wall_s": 1e9 + 7200.0, "state": "done",
           "text": "x"}
    agents["m5"].answers["/api/v1/requests"] = [
        row, row | {"action": "drain", "state": "refused", "text": "nobody took them"}]
    agents["other"].answers["/api/v1/requests"] = []
    assert main(["incidents", "--asked", "--run", "m5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "fleet, by ann (uid 0), done switch upgrade" in said
    assert "refused: nobody took them" in said
    assert main(["incidents", "--asked", "--run", "other"]) == 0
    assert "nobody asked for anything" in capsys.readouterr().out


def test_an_alert_is_told_with_what_it_names(agents: dict[str, StandIn], capsys: Captured) -> None:
    row = {"id": "f/t", "name": "HotRack", "runbook": "hot_rack", "run": "", "node": "node-a",
           "summary": "", "taken_wall_s": 1e9, "firing": True, "outcome": "node-a is excluded"}
    before = {what: value for what, value in row.items() if what != "node"}  # of an older agent
    agents["m5"].answers["/api/v1/alerts"] = [
        row, before | {"run": "m5", "firing": False, "outcome": ""}]
    assert main(["incidents", "--alerts", "--run", "m5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "HotRack, node node-a, firing node-a is excluded" in said
    assert "HotRack, run m5, resolved waits to be settled" in said


@pytest.mark.parametrize(("words", "said"), [
    ("--asked --alerts", "--alerts and --asked exclude each other"),
    ("i-16 --ack --refused", "--refused and --ack exclude each other"),
    ("i-16 --ack --label true", "--label and --ack exclude each other"),
    ("i-16 --alerts", "ID and --alerts exclude each other"),
    ("--all --asked", "--all and --asked exclude each other"),
    ("--would-have --refused", "--would-have and --refused exclude each other"),
    ("i-16 --reason seen", "--reason belongs to --ack or --label"),
    ("--ack", "which incident? Give its ID"),
])
def test_incidents_answers_one_question_and_passes_over_nothing(
    agents: dict[str, StandIn], capsys: Captured, words: str, said: str
) -> None:
    assert main(["incidents", *words.split()]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out
    assert not [one.posted for one in agents.values() if one.posted]


def test_a_review_goes_to_the_run_that_is_named(
    agents: dict[str, StandIn], capsys: Captured
) -> None:
    assert main(["incidents", "i-16", "--ack", "--run", "m5"]) == 0
    assert len(agents["m5"].posted) == 1 and not agents["other"].posted
    assert main(["incidents", "i-16", "--ack"]) == 0
    assert len(agents["other"].posted) == 1
    # A run that is over is reviewed where it is remembered, and nowhere else.
    assert main(["incidents", "i-16", "--ack", "--run", "gone"]) == 1
    assert "no run 'gone' here" in capsys.readouterr().err
    agents["other"].answers["/api/v1/jobs"] = [{"run": "gone"}]
    assert main(["incidents", "i-16", "--ack", "--run", "gone"]) == 0
    assert [len(agents[name].posted) for name in ("m5", "other")] == [2, 2]


# The API's word -> the command line that asks for it: what one offers, the other does.
SAME = {
    ("runs/m5", "pause"): "pause --run m5", ("runs/m5", "resume"): "resume --run m5",
    ("runs/m5", "restart"): "restart --run m5", ("runs/m5", "drain"): "drain --run m5",
    ("runs/m5", "inject"): "inject kill --run m5",
    ("nodes/node-a", "pause"): "pause --node node-a",
    ("nodes/node-a", "resume"): "resume --node node-a",
    ("nodes/node-a", "exclude"): "exclude node-a", ("nodes/node-a", "drain"): "drain node-a",
    ("nodes/node-a", "release"): "release node-a", ("nodes/node-a", "check"): "check --agent",
    ("fleet", "pause"): "pause --fleet", ("fleet", "resume"): "resume --fleet",
    ("incidents/i-16", "close"): "close i-16", ("incidents/i-16", "ack"): "incidents i-16 --ack",
    ("incidents/i-16", "label"): "incidents i-16 --label true",
    ("incidents/i-16", "bundle"): "bundle i-16",
}


def test_what_the_api_offers_and_the_command_line_offers_is_one_list(
    agents: dict[str, StandIn], tmp_path: Path
) -> None:
    offered = set()
    for path, methods in openapi.paths().items():
        parts = path.removeprefix("/api/v1/").split("/")
        # Alertmanager's, nobody's hand; and what carries `run --on`, `accept` and `end`.
        if "post" not in methods or parts[0] in ("alerts", "starts"):
            continue
        whose = {"runs": "runs/m5", "nodes": "nodes/node-a", "incidents": "incidents/i-16",
                 "fleet": "fleet"}[parts[0]]
        verbs = [parts[-1]]
        if parts[-1] == "{verb}":
            (verb,) = [one for one in methods["parameters"] if one["name"] == "verb"]
            verbs = verb["schema"]["enum"]
        offered |= {(whose, verb) for verb in verbs}
    assert offered == set(SAME)
    for one in agents.values():
        still = {**one.answers["/api/v1/incidents/i-16"], "state": "acted"}
        one.answers["/api/v1/incidents"] = [still]
        one.answers |= {"/api/v1/checks": {}, "/api/v1/drift": {}}
    for (whose, verb), words in SAME.items():
        for one in agents.values():
            one.posted.clear()
        to = ["--to", str(tmp_path / "i-16.tar.gz")] if verb == "bundle" else []
        assert main([*words.split(), *to, "--reason", "why"]) == 0, words
        posted = [(path, body) for one in agents.values() for path, body in one.posted]
        assert {path for path, _ in posted} == {f"/api/v1/{whose}/{verb}"}, words
        assert all(body["reason"] == "why" and body["by"] for _, body in posted), words
