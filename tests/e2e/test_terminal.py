"""A person's terminal: Ctrl-C, a window that closes, a pipe that ends, an encoding of its own."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from running import LIMIT_S, SCRIPTS, Run, Runs, wait_for

pytest.importorskip("torch", reason="the trainer's extra is not installed")

TRAINER = (
    "steps=400", "micro_batches=4", "batch=2", "model_options.width=32", "model_options.layers=1",
    "model_options.heads=2", "data_options.vocabulary=512", "checkpoint.every=10000",
)
SHORT = (*TRAINER, "steps=300")
ENDLESS = (*TRAINER, "steps=100000")  # never at its end before it is told, however busy the machine


class OnTerminal(Run):
    """A run in a window of its own: a pseudo-terminal whose session it leads."""

    def __init__(self, home: Path, name: str, command: list[str], environ: dict[str, str],
                 nohup: bool = False) -> None:
        self.home, self.name = home, name
        self.window, theirs = os.openpty()
        self.shown = bytearray()

        def enter() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
            # Tests that were started under nohup hand their SIG_IGN down.
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, cwd=home,
            start_new_session=True, preexec_fn=enter,
        )
        os.close(theirs)
        self.closing = threading.Event()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        """Until the window is to close: nobody else has it open, so the terminal is gone then."""
        while not self.closing.is_set():
            ready, _, _ = select.select([self.window], [], [], 0.05)
            try:
                self.shown += os.read(self.window, 65536) if ready else b""
            except OSError:  # nobody has the terminal open any more
                break
        os.close(self.window)

    def close(self) -> None:
        self.closing.set()
        self.reader.join()

    def wait(self, limit_s: float = LIMIT_S) -> int:
        code = super().wait(limit_s)
        self.reader.join(10.0)  # it ends when nobody has the terminal open: all is read then
        return code

    @property
    def output(self) -> str:
        return self.shown.decode(errors="replace")

    def press_ctrl_c(self) -> None:
        os.write(self.window, b"\x03")


def on_terminal(runs: Runs, command: str, *words: str, name: str = "t", nohup: bool = False
                ) -> OnTerminal:
    line = [sys.executable, "-m", "holdfast.agent.cli", command, "--run", name, *words]
    run = OnTerminal(runs.home, name, line, runs.environ, nohup)
    runs.started.append(run)
    return run


def train(runs: Runs, work: Path, name: str = "t", settings: tuple[str, ...] = TRAINER,
          nohup: bool = False) -> OnTerminal:
    return on_terminal(
        runs, "train", "--nproc-per-node", "2", f"work_dir={work}", *settings,
        f"checkpoint.dir={runs.home / name / 'ckpt'}", name=name, nohup=nohup)


def saved(runs: Runs, name: str = "t") -> int:
    """The newest step whose checkpoint is committed."""
    folder = runs.home / name / "ckpt"
    return max((int(one.parent.name[5:14]) for one in folder.glob("step-*/COMMIT")), default=0)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and tokenizer are made once; checkpoints go elsewhere."""
    return tmp_path_factory.mktemp("work")


def test_ctrl_c_saves_says_so_and_the_same_command_goes_on(runs: Runs, work: Path) -> None:
    run = train(runs, work, settings=ENDLESS)
    run.at_step(13)
    run.press_ctrl_c()
    assert run.wait(40) == 130, run.output
    step = saved(runs)
    assert step >= 13, run.output
    last = run.output.strip().splitlines()[-1]
    assert "interrupted" in last and f"step {step}" in last and "code 130" in last, run.output
    logs = runs.home / "st" / "runs" / "t" / "logs"
    assert len(list(logs.glob("standby-*"))) <= 4, sorted(logs.iterdir())  # 3, and one made later
    again = train(runs, work, settings=(*TRAINER, f"steps={step + 2}"))
    assert again.wait() == 0, again.output
    assert f"from the checkpoint of step {step}" in again.output, again.output
    assert "code 0" in again.output.strip().splitlines()[-1], again.output


def test_a_second_ctrl_c_ends_at_once(runs: Runs) -> None:
    run = on_terminal(runs, "run", "--grace", "3000", str(SCRIPTS / "talks_back.py"), "deaf")
    run.wait_output("on stderr")
    run.press_ctrl_c()
    run.wait_output("told")
    assert run.process.poll() is None
    run.press_ctrl_c()
    assert run.wait() == 130, run.output
    assert "at once" in run.output and "code 130" in run.output.splitlines()[-1], run.output


def test_ctrl_c_ends_the_imports_too(runs: Runs) -> None:
    mark = runs.home / "importing"
    runs.environ.update(
        IMPORTING=str(mark), PYTHONPATH=":".join([str(SCRIPTS), runs.environ["PYTHONPATH"]]))
    run = on_terminal(runs, "run", "--preload", "endless_import", str(SCRIPTS / "talks_back.py"))
    wait_for(mark.exists, what=run.output)
    run.press_ctrl_c()
    assert run.wait() == 130, run.output
    assert "code 130" in run.output and "Traceback" not in run.output, run.output


PRESSES = """
import os, signal, sys
class Presses:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ.get("PRESS_AT"):
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Presses())
"""


@pytest.mark.parametrize("at", [
    "holdfast.agent.cli.text", "holdfast.agent.cli.launch", "holdfast.worker.launcher",
    "holdfast.worker.launcher.spec",
])
def test_ctrl_c_while_the_interpreters_start(runs: Runs, at: str) -> None:
    (runs.home / "sitecustomize.py").write_text(PRESSES)
    path = f"{runs.home}:{runs.environ['PYTHONPATH']}"
    run = runs.script("talks_back.py", "slow", "600", PYTHONPATH=path, PRESS_AT=at)
    assert run.wait() == 130, run.output
    assert "Traceback" not in run.output and "code 130" in run.output, run.output


def test_a_terminal_that_closes_ends_a_trainer_with_its_checkpoint(runs: Runs, work: Path) -> None:
    run = train(runs, work, settings=ENDLESS)
    run.at_step(13)
    run.close()
    assert run.wait(40) == 75, run.output
    assert saved(runs) >= 13


def test_a_terminal_that_closes_ends_a_script_as_it_asks_to_be(runs: Runs) -> None:
    run = on_terminal(runs, "run", str(SCRIPTS / "talks_back.py"), "slow", "600")
    run.wait_output("line 3")
    run.close()
    assert run.wait(40) == 75, run.output
    log = runs.home / "st" / "runs" / "t" / "logs" / "rank-0" / "stdout.log"
    assert "leaves" not in log.read_text()


def test_under_nohup_it_goes_on_without_its_terminal(runs: Runs, work: Path) -> None:
    run = train(runs, work, settings=SHORT, nohup=True)
    run.at_step(5)
    run.close()
    assert run.wait() == 0
    assert saved(runs) == 300


@pytest.mark.parametrize("full", [False, True])
def test_output_that_goes_nowhere_is_dropped(runs: Runs, full: bool) -> None:
    """`holdfast run ... | head -1` and a disk that is full behind the shell's redirect."""
    mark = runs.home / "done"
    line = (f'"$@" > /dev/full 2>&1; echo $? > {mark}' if full else
            f'{{ "$@" 2>&1; echo $? > {mark}; }} | head -1')
    words = ["bash", "-c", line, "-", sys.executable, "-m", "holdfast.agent.cli", "run", "--run",
             "t", str(SCRIPTS / "talks_back.py"), "slow", "15"]
    run = Run(runs.home, "t", words, runs.environ)
    runs.started.append(run)
    run.wait()
    wait_for(lambda: mark.exists() and mark.read_text(), what=run.output)
    assert mark.read_text() == "0\n", run.output
    log = runs.home / "st" / "runs" / "t" / "logs" / "rank-0" / "stdout.log"
    assert "leaves" in log.read_text()


def test_a_terminal_that_knows_only_ascii_is_told_all_the_same(runs: Runs) -> None:
    run = runs.script("talks_back.py", PYTHONIOENCODING="ascii", flags=("--nproc-per-node", "1"))
    assert run.wait() == 0, run.output
    assert "caf\\xe9" in run.output and "rank 0 leaves" in run.output, run.output


def test_stdout_holds_what_it_would_hold_under_torchrun(runs: Runs) -> None:
    """Holdfast speaks on stderr; there it says where the page and the logs are, short as it is."""
    script = os.path.relpath(SCRIPTS / "talks_back.py", runs.home)
    ours = subprocess.run(
        [sys.executable, "-m", "holdfast.agent.cli", "run", "--run", "t", script],
        env=runs.environ, cwd=runs.home, capture_output=True, text=True, timeout=90)
    theirs = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", script],
        env=runs.environ, cwd=runs.home, capture_output=True, text=True, timeout=90)
    assert ours.stdout == theirs.stdout, ours.stderr
    for said in ("live page http://", "logs in /", "on stderr caf\u00e9", "code 0"):
        assert ours.stderr.count(said) == 1, ours.stderr


def test_a_terminal_that_stands_still_holds_nothing_up(runs: Runs) -> None:
    """Ctrl-S, and a rank that dies meanwhile: it is replaced, and Ctrl-Q shows every line."""
    run = on_terminal(runs, "run", str(SCRIPTS / "talks_back.py"), "slow", "600")
    run.wait_output("line 3")
    os.write(run.window, b"\x13")
    first = wait_for(run.ranks)[0]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: run.ranks().get(0, {}).get("pid", first) != first, what="another rank 0")
    assert run.output.count("line 0") == 1, run.output
    os.write(run.window, b"\x11")
    run.wait_output("line 3\r\n", count=2)
    assert run.output.count("planned generation 2") == 1, run.output
