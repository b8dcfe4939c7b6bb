"""Where generations begin in the files, and the child's life: asked, late, dead, in state D."""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import time

import pytest

from holdfast.worker.launcher import log_watch
from holdfast.worker.launcher.process import StartCommand

SCRIPTED = """
import json, sys, time
for line in sys.stdin:
    asked = json.loads(line)
    if asked["folder"].endswith("hang"):
        time.sleep(600)
    if asked["folder"].endswith("die"):
        sys.exit(3)
    if asked["folder"].endswith("junk"):
        print("no json", flush=True)
        continue
    said = {"n": asked["n"], "cpu_s": 0.25, "rss_bytes": 7, "problem": "", "read": 100}
    if asked["do"] == "sample":
        said.update(skipped=asked["bytes"], lines=[["x", "root", "infra", 2]],
                    seen=[{"signature": "x"}])
    else:
        said["detail"] = {"own": asked.get("own"), "ranks": asked["ranks"]}
    print(json.dumps(said), flush=True)
"""


class Process:
    """As much of a rank's process as is looked at."""

    def __init__(self, rank, generation, ended_s=None):
        self.rank, self.generation, self.assigned = rank, generation, True
        self.ended = self.over = None if ended_s is None else {"boot_s": ended_s}


class RankProcesses:
    def __init__(self):
        self.processes = []


class Watch(log_watch.LogWatch):
    """A log watch whose child is the script above."""

    def __init__(self, folder, tmp_path):
        os.makedirs(folder, exist_ok=True)
        ranks, selector = RankProcesses(), selectors.DefaultSelector()
        super().__init__(ranks, str(folder), dict(os.environ), selector)
        self.script = tmp_path / "child.py"
        self.script.write_text(SCRIPTED)
        self.told = []

    def ask_now(self, generation=1):
        self.diagnose(generation, lambda ok, text: self.told.append((ok, text)))

    def until(self, holds, limit_s=90.0):
        """Turns the loop until a condition holds.  The child has the lowest priority there is: on a
        busy machine it needs tens of seconds to start, and more than a moment to die."""
        deadline_s = time.monotonic() + limit_s
        while not holds():
            assert time.monotonic() < deadline_s, (self.told, self.summary)
            for key, _ in self.selector.select(0.02):
                key.data.read()
            self.tend(time.monotonic())


@pytest.fixture
def make(tmp_path, monkeypatch):
    made = []

    def start(name="logs"):
        watch = Watch(tmp_path / name, tmp_path)
        real = log_watch.subprocess.Popen

        def scripted(command, **options):
            return real([sys.executable, str(watch.script)], **options)

        monkeypatch.setattr(log_watch.subprocess, "Popen", scripted)
        made.append(watch)
        return watch

    yield start
    for watch in made:
        watch.end()
        watch.until(lambda watch=watch: not watch.pids())
        watch.selector.close()


def command(generation, *ranks):
    return StartCommand(generation, ranks, (), len(ranks), {}, [], 0)


def write(watch, rank, data, name="stdout.log"):
    folder = os.path.join(watch.log_dir, "rank-%d" % rank)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "ab") as file:
        file.write(data)


def test_each_generation_has_its_own_part_of_each_file(make):
    watch = make()
    write(watch, 0, b"of an earlier run\n")
    watch.begin_generation(command(1, 0, 1))
    write(watch, 0, b"one\n")
    write(watch, 1, b"uno\n", "stderr.log")
    assert watch.places(1) == [[0, 18, -1, 0, -1], [1, 0, -1, 0, -1]]
    watch.begin_generation(command(2, 0))
    assert watch.places(1) == [[0, 18, 22, 0, 0], [1, 0, -1, 0, -1]]
    assert watch.places(2) == [[0, 22, -1, 0, -1]]
    for generation in range(3, 20):
        watch.begin_generation(command(generation, 0))
    assert watch.places(1) == [] and len(watch.begins) == log_watch.GENERATIONS_KEPT


def test_who_ended_first_comes_first_also_when_it_is_forgotten_since(make):
    watch = make()
    watch.begin_generation(command(1, 0, 1, 2))
    watch.ranks.processes = [Process(0, 1), Process(1, 1, 7.0), Process(2, 1, 5.0)]
    watch.begin_generation(command(2, 0, 1, 2))
    watch.ranks.processes = []
    assert [row[0] for row in watch.places(1)] == [2, 1, 0]
    assert [row[0] for row in watch.places(2)] == [0, 1, 2]


def test_a_question_is_answered_and_the_cost_is_told(make):
    watch = make()
    watch.begin_generation(command(1, 0))
    watch.ask_now()
    watch.until(lambda: watch.told)
    ok, text = watch.told[0]
    assert ok and json.loads(text) == {"own": None, "ranks": [[0, 0, -1, 0, -1]]}
    level = watch.level()
    assert (level["read_bytes"], level["cpu_s"], level["rss_bytes"]) == (100, 0.25, 7)
    pid = watch.process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 10
    watch.ask_now()
    watch.until(lambda: len(watch.told) == 2)
    assert watch.process.pid == pid and watch.level()["read_bytes"] == 200


def test_own_signatures_are_told_once_and_again_to_the_next_child(make):
    watch = make()
    watch.begin_generation(command(1, 0))
    watch.configure({"t": "logs", "own": [{"id": "a"}], "sample_bytes_s": None})
    for number in (1, 2):
        watch.ask_now()
        watch.until(lambda number=number: len(watch.told) == number)
    os.kill(watch.process.pid, signal.SIGKILL)
    watch.until(lambda: watch.process is None and not watch.dying)
    watch.pause_until_s = 0.0
    watch.ask_now()
    watch.until(lambda: len(watch.told) == 3)
    own = [json.loads(text)["own"] for _, text in watch.told]
    assert own == [[{"id": "a"}], None, [{"id": "a"}]]


def test_a_child_that_hangs_costs_its_question_and_no_more(make, monkeypatch):
    monkeypatch.setattr(log_watch, "ANSWER_S", 0.3)
    watch = make("hang")
    watch.begin_generation(command(1, 0))
    watch.ask_now()
    pid = watch.process.pid
    watch.until(lambda: watch.told)
    assert watch.told == [(False, "the log child did not answer within 0.3 s")]
    watch.until(lambda: not watch.dying)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    watch.ask_now()  # the pause: nothing is started, and the question is answered at once
    assert watch.told[1] == watch.told[0] and watch.process is None
    assert watch.level()["failures"] == 1


@pytest.mark.parametrize(("name", "said"), [("die", "ended"), ("junk", "log child: ")])
def test_a_child_that_dies_or_says_rubbish(make, name, said):
    watch = make(name)
    watch.begin_generation(command(1, 0))
    watch.ask_now()
    watch.until(lambda: watch.told)
    assert watch.told[0][0] is False and said in watch.told[0][1]


def test_a_child_that_cannot_be_ended_is_not_waited_for_nor_followed(make, monkeypatch):
    watch = make("hang")
    watch.begin_generation(command(1, 0))
    watch.ask_now()
    monkeypatch.setattr(log_watch.os, "kill", lambda pid, number: None)  # as in state D
    watch.fail("late")
    stuck = watch.dying[0]
    watch.pause_until_s = 0.0
    watch.ask_now()
    assert watch.told[1] == (False, "late") and watch.process is None
    assert watch.pids() == [stuck]
    monkeypatch.undo()
    os.kill(stuck, signal.SIGKILL)


def test_a_sample_is_taken_on_time_of_the_newest_generation_while_ranks_run(make):
    watch = make()
    watch.begin_generation(command(1, 0))
    watch.begin_generation(command(2, 0))
    watch.ranks.processes = [Process(0, 2)]
    begin_s = watch.sampled_s
    watch.tend(begin_s + 4.9)
    assert watch.process is None
    watch.configure({"t": "logs", "sample_bytes_s": 1000})
    watch.tend(begin_s + 5.0)  # the first one has a child begin, before anybody asks it
    watch.until(lambda: watch.summary["skipped_bytes"])
    assert watch.summary["skipped_bytes"] == 5_000
    assert watch.level()["lines"] == [["x", "root", "infra", 2]]
    watch.tend(begin_s + 19.9)
    assert watch.asked is None
    watch.tend(begin_s + 20.0)
    watch.until(lambda: watch.asked is None)
    watch.tend(begin_s + 34.0)
    assert watch.asked is None and watch.summary["skipped_bytes"] == 20_000
    watch.ranks.processes = [Process(0, 2, 9.0)]
    watch.tend(begin_s + 55.0)
    assert watch.asked is None and watch.summary["skipped_bytes"] == 20_000


def test_switched_off_nothing_is_read_or_told(make):
    watch = make()
    watch.begin_generation(command(1, 0))
    watch.ranks.processes = [Process(0, 1)]
    watch.configure({"t": "logs", "read": False})
    watch.ask_now()
    watch.tend(watch.sampled_s + 100)
    assert watch.told == [(False, "logs are not read")] and watch.level() is None
    assert watch.process is None


def test_a_generation_that_nobody_knows_is_refused(make):
    watch = make()
    watch.ask_now(9)
    assert watch.told == [(False, "no lines of generation 9 are known")]


def test_many_ranks_and_signatures_fit_the_pipe(make):
    watch = make()
    watch.begin_generation(command(1, *range(256)))
    watch.configure({"t": "logs", "own": [{"id": "a%d" % n, "pattern": "x" * 300}
                                          for n in range(64)]})
    watch.ask_now()
    watch.until(lambda: watch.told)
    assert watch.told[0][0] is True
