"""What stands around an error changes no verdict: colours, clocks, prefixes, other lines."""

from __future__ import annotations

import json
import random
import time
import tomllib

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.agent.core.parse.logs import forms, signatures, unlisted
from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.logs import files

CATALOGUE = files.load_catalogue()
FAMILIES = files.load_families()
FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 7, in <module>\n    main()\n'
TRACEBACKS = (
    FRAMES + "RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
    FRAMES + "OSError: [Errno 28] No space left on device\n",
    FRAMES + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 7.00 GiB\n",
    FRAMES + "zipfile.BadZipFile: File is not a zip file\n",
    FRAMES + "KeyError: 'tokens'\n",
    FRAMES + "requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='hub', port=443)\n",
    FRAMES + "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.\n",
    FRAMES + "jaxlib.xla_extension.XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: 7\n",
)
LINES = (
    "RuntimeError: HIP error: an illegal memory access was encountered\n"
    "Compile with `TORCH_USE_HIP_DSA` to enable device-side assertions.\n",
    "tar: Unexpected EOF in archive\n",
    "minio.error.S3Error: S3 operation failed; code: SlowDown, message: None\n",
    "safetensors_rust.SafetensorError: Error while deserializing header: InvalidHeader\n",
    "slurmstepd: error: *** JOB 8 ON gpu07 CANCELLED AT 2026-11-20 DUE TO TIME LIMIT ***\n",
    "slurmstepd: error: Detected 2 oom_kill events in StepId=8.batch.\n",
    "mpirun noticed that process rank 3 with PID 8 on node gpu07 exited on signal 9 (Killed).\n",
)
CALM = (
    "loaded 812 shards, errors=0 failed=0", "/opt/a.py:7: FutureWarning: `x` is deprecated",
    "config: {\"on_error\": \"raise\", \"max_failures\": 3}",
    "tests/test_failures.py::test_a PASSED",
    "  --max-restarts N  restarts before a run counts as failed", "validation error 0.031",
    "wandb: Network error (ReadTimeout), entering retry loop.",
    "libpng warning: iCCP: bad profile",
    "NCCL INFO NET/Plugin : No plugin found (libnccl-net.so)", "Resuming after a preemption",
    "fetch of shard 3 failed (attempt 1/5), retrying", "Gradient overflow. Skipping step",
)
PREFIXES = (
    "[rank3]: ", "2026-11-20 10:00:00,123 ", "Nov 20 10:00:00 ", "(Worker pid=81, ip=10.0.0.7) ",
    "3: ", "[default3]:", "stderr F ",
)


def judged(*texts: str) -> tuple[str, str, bool]:
    """(signature, culprit, something is said) of one log a rank."""
    found: list[signatures.Match] = []
    for number, text in enumerate(texts):
        scanner = Scanner(CATALOGUE, number, number, families=FAMILIES)
        scanner.feed(text.encode("utf-8", "surrogatepass"))
        scanner.close()
        found += scanner.matches
    result = logroot.diagnose(found, CATALOGUE.exit_codes)
    root = result.root
    said = root is not None or not result.hint.startswith("nothing known")
    return (root.signature, root.culprit, said) if root else ("", "", said)


def told(text: str) -> tuple[str, str, bool]:
    return KNOWN[text]


KNOWN = {text: judged(text) for text in TRACEBACKS + LINES}


def test_the_errors_are_told_apart() -> None:
    assert [told(text)[1] for text in TRACEBACKS] == [
        "infra", "storage", "user", "data", "user", "network", "", ""]
    assert [told(text)[1] for text in LINES] == [
        "unknown", "data", "storage", "data", "policy", "user", ""]
    assert all(told(text)[2] for text in TRACEBACKS + LINES)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TRACEBACKS + LINES), st.lists(st.sampled_from(CALM), max_size=6),
       st.lists(st.sampled_from(CALM), max_size=6))
def test_calm_lines_before_and_after(text: str, before: list[str], after: list[str]) -> None:
    after = [line for line in after if not forms.GOES_ON.search(line)]  # these say it was handled
    around = "".join(f"{line}\n" for line in before), "".join(f"\n{line}\n" for line in after)
    assert judged(around[0] + text + around[1])[:2] == told(text)[:2]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(TRACEBACKS + LINES), st.sampled_from(PREFIXES), st.booleans(), st.booleans())
@example(TRACEBACKS[0], PREFIXES[0], True, True)
def test_prefixes_colours_and_line_ends(text: str, prefix: str, red: bool, windows: bool) -> None:
    lines = [prefix + line for line in text.splitlines()]
    if red:
        lines = [f"\x1b[31m{line}\x1b[0m" for line in lines]
    end = "\r\n" if windows else "\n"
    assert judged(end.join(lines) + end)[:2] == told(text)[:2]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(TRACEBACKS), st.lists(st.integers(0, 7), max_size=12))
def test_other_ranks_steps_between(text: str, steps: list[int]) -> None:
    """They train on for a moment after one rank has failed."""
    lines = [f"[rank3]: {line}" for line in text.splitlines()]
    rnd = random.Random(len(steps))
    for number, rank in enumerate(steps):
        step = f"[rank{rank + 8}]: iteration {number} | loss 2.5"
        lines.insert(rnd.randrange(len(lines) + 1), step)
    assert judged("\n".join(lines) + "\n")[:2] == told(text)[:2]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(TRACEBACKS + LINES), st.permutations(range(4)))
def test_the_order_of_the_files(text: str, order: list[int]) -> None:
    others = [TRACEBACKS[-2], "iteration 7 | loss 2.5\n", FRAMES + "BrokenPipeError: [Errno 32]\n"]
    logs = [text, *others]
    assert judged(*(logs[at] for at in order))[1] == told(text)[1]


STRANGE = (
    "trainer_1  | ", "worker-0: ", "[1,0]<stderr>:", "algo-1-abc12  | ", "7f00 [rank=3] || ",
    "[ERROR] ", "stderr: ", "10:01:02 ", "[1700000000.123456] ", "[1827] ", "10.0.0.7: ", "E   ",
    "2026-11-20 10:00:00.123 | ERROR    | app.train:run:12 - ", "Nov 20 10:00:00 gpu07 python[8]: ",
)
ENDS = (
    ("ValueError: too many values to unpack", "user"),
    ("OSError: [Errno 28] No space left on device", "storage"),
    ("zipfile.BadZipFile: File is not a zip file", "data"),
    ("BrokenPipeError: [Errno 32] Broken pipe", ""),
)


@pytest.mark.parametrize("prefix", STRANGE)
def test_an_exceptions_last_line_behind_any_prefix(prefix: str) -> None:
    for line, culprit in ENDS:
        whole = "".join(f"{prefix}{one}\n" for one in (FRAMES + line).splitlines())
        assert judged(whole)[1:] == (culprit, True)
        assert judged(f"{prefix}{line}\n")[1:] == (culprit, True)


@pytest.mark.parametrize(("line", "culprit"), ENDS)
def test_a_traceback_that_a_logger_wrote_into_one_line(line: str, culprit: str) -> None:
    row = json.dumps({"level": "error", "event": "it failed", "exception": FRAMES + line, "n": 7})
    assert judged(row + "\n")[1:] == (culprit, True)
    assert judged(f"ERROR main failed: {line}\n")[1:] == (culprit, True)


@pytest.mark.parametrize("line", [
    "removed 31 corrupted images from the training set", "12 samples with nan values: 12 dropped",
    "export NCCL_IB_TIMEOUT=22 # avoid transport retry count exceeded",
    "PASSED tests/test_oom.py::test_out_of_memory_is_reported", "[ RUN      ] Error.OutOfMemory",
    'test "stale file handle recovers" [ OK ]', "ACPI Error: AE_NOT_FOUND, Could not resolve",
    "Aggregate DRAM Uncorrectable : 0", "# Out of bounds values : 0 OK",
    "sh: warning: setlocale: LC_ALL: cannot change locale",
])
def test_more_healthy_lines(line: str) -> None:
    assert judged(line + "\n")[1] == ""


def test_what_fails_in_an_exit_function_ended_nothing() -> None:
    text = "Error in atexit._run_exitfuncs:\n" + FRAMES + "XlaRuntimeError: DEADLINE_EXCEEDED\n"
    assert judged(text)[1] == ""


def test_steps_after_an_error_outweigh_its_words() -> None:
    text = "ERROR store: S3 operation failed; code: SlowDown\n"
    steps = "".join(f"iteration {number} | loss 2.5\n" for number in range(9))
    assert judged(text)[1] == "storage"
    assert judged(text + steps)[1] == ""


def test_a_library_said_it_before_it_raised() -> None:
    """An exception without a word of its own follows from the error right before it."""
    nrt = "2026-Nov-20 10:00:00.1  1:1  ERROR  NRT:nrt_init  Unable to determine Neuron Driver\n"
    empty = FRAMES + "RuntimeError: the model cannot be traced\n"
    assert judged(nrt + empty)[1] == "infra"
    assert judged(nrt + "a line of the program\n" * 60 + empty)[1] == "user"
    assert judged(empty + nrt)[1] == "user"


@pytest.mark.parametrize(("text", "culprit"), [
    ("gaierror                        Traceback (most recent call last)\n"
     "/opt/urllib/request.py in do_open(self, req)\n   1349     h.request(\n", "network"),
    ("File [request.py:7](https://x/request.py:7), in do_open(self)\n"
     "   [6](https://x/request.py:6)     except OSError as err:\n"
     "-> [7](https://x/request.py:7)         raise URLError(err)\n", "network"),
])
def test_a_notebooks_traceback_without_its_end(text: str, culprit: str) -> None:
    assert judged(text)[1] == culprit


def test_an_adapter_that_was_not_used_is_nobodys_fault() -> None:
    probe = "node1:1:2 [0] transport/net_ib.cc:9 NCCL WARN NET/IB : Unable to open device mlx5_7\n"
    assert judged(probe)[1] == "infra"
    assert judged(probe + "node1:1:2 [0] NCCL INFO Using network IB\n")[1] == ""


def test_of_lines_that_differ_in_numbers_alone_few_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[str] = []
    form = forms.form
    monkeypatch.setattr(unlisted, "form", lambda text: looked.append(text) or form(text))
    noise = "".join(f"shard {number} could not be shown\n" for number in range(20_000))
    assert judged(noise + "tar: Unexpected EOF in archive\n" + noise)[1] == "data"
    assert len(looked) < 200


def test_hostile_lines_cost_a_bounded_time() -> None:
    """By ratio to a plain log of the same length, so that a busy machine does not fail it."""
    def spent_s(text: str) -> float:
        best = 1e9
        for _ in range(2):
            begin_s = time.process_time()
            judged(text)
            best = min(best, time.process_time() - begin_s)
        return best

    size = 400_000
    line = "2026-11-20 10:00:00,123 INFO iteration 7 | loss 2.5 | a failed words error count 3\n"
    plain = spent_s(line * (size // len(line)))
    for hostile in ("[" * size, "(" * size + "\n", "error: " * (size // 7),
                    ("a" * 999 + ": ") * 400,
                    ("[" * 1990 + " error\n") * 200, "\x1b[3" * (size // 4), "\r" * size,
                    'File "' * (size // 6), "Traceback (most recent call last)\n" * 4000):
        assert spent_s(hostile) < 40 * plain + 1.0, hostile[:20]


def test_the_new_rows_are_few() -> None:
    """Vocabulary is data and grows slowly: a row is a subject, not a log that somebody had.  It was
    119 before boards, stores, pods' addresses, Slurm's reasons and other tongues got rows."""
    assert len(tomllib.loads(files.FAMILIES.read_text())["family"]) < 140
