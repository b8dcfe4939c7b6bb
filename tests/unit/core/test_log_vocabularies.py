"""Whose an error is by one line: the words of schedulers, kernels, containers, stores and tools."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from holdfast.agent.core.parse.logs import forms
from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.logs import files

CATALOGUE, FAMILIES = files.load_catalogue(), files.load_families()
LINES: dict[str, list[str]]
LINES, WIDE = (tomllib.loads(Path(__file__).with_name(name).read_text())
               for name in ("log_lines.toml", "log_lines_wide.toml"))
TOLD_ONLY = ("unknown", "consequence")


def diagnose(text: str) -> logroot.Diagnosis:
    scanner = Scanner(CATALOGUE, families=FAMILIES)
    scanner.feed(text.encode())
    scanner.close()
    return logroot.diagnose(scanner.matches, CATALOGUE.exit_codes)


def culprit(text: str) -> str:
    root = diagnose(text).root
    return root.culprit if root else ""


@pytest.mark.parametrize("whose", [key for key in LINES if key not in (*TOLD_ONLY, "harmless")])
def test_a_line_alone_says_whose_it_is(whose: str) -> None:
    assert len(LINES[whose]) >= 10
    lines = LINES[whose] + WIDE[whose]
    assert [line for line in lines if culprit(line + "\n") != whose] == []


@pytest.mark.parametrize("kind", TOLD_ONLY)
def test_what_names_nobody_is_told(kind: str) -> None:
    for line in LINES[kind] + WIDE.get(kind, []):
        found = diagnose(line + "\n")
        assert found.root is None or found.root.culprit == "unknown", line
        assert found.root is not None or not found.hint.startswith("nothing known"), line


def test_what_is_no_error_is_never_blamed() -> None:
    assert len(LINES["harmless"]) > 200
    lines = LINES["harmless"] + WIDE["harmless"]
    assert [line for line in lines if culprit(line + "\n")] == []
    assert culprit("\n".join(LINES["harmless"]) + "\n") == ""


def test_a_consequence_beside_a_root_is_not_the_root() -> None:
    for whose in ("infra", "storage", "user", "policy"):
        for line in LINES["consequence"][:40]:
            assert culprit(f"{line}\n{LINES[whose][0]}\n") == whose, line


@pytest.mark.parametrize(
    ("line", "goes_on"),
    [
        ("attempt 2 of 5 failed: read timed out", True), ("try 5/5 failed: timed out", False),
        ("attempt 5 of 5 failed: read timed out", False), ("4 attempts remaining", True),
        ("0 retries left", False), ("this won't affect the run", True),
        ("failed; giving up before the next attempt", False), ("batch 2/5 failed", False),
        ("this is expected on the first step", True),
        ("connection reset, 4 s until the next attempt", True),
        ("RuntimeError: weight is expected on cuda:0 but got cpu", False),
        ("dataset shard 17 is corrupt: rebuilding failed", False),
        ("error: GPU 3 fell off the bus, reboot before the next job", False),
        ("[Errno 28] No space left on device, cannot write before next checkpoint", False),
    ],
)
def test_whether_a_line_says_that_the_work_goes_on(line: str, goes_on: bool) -> None:
    assert forms.says_it_goes_on(line) == goes_on


def test_the_last_attempt_is_no_retry() -> None:
    failed = "ERROR attempt {} of 5: https://store.local answers 503 Slow Down\n"
    assert culprit(failed.format(2)) == ""
    assert culprit(failed.format(5)) == "storage"


def test_a_signature_in_a_line_that_goes_on_is_no_root() -> None:
    assert culprit("WARNING upload failed (SlowDown), will retry in 3 s\n") == ""
    assert culprit("botocore.errorfactory: upload failed (SlowDown)\n") == "storage"


def test_advice_takes_back_nothing_that_was_said_before_it() -> None:
    failed = "Failed to connect to the storage container."
    assert culprit(failed + " There might be something wrong with its key.\n") == "storage"
    assert culprit("This may be slow if it failed to connect to the storage container.\n") == ""


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("INFO: task nfsd:81 blocked for more than 9 seconds.", forms.PLAIN),
        ("rcu: INFO: rcu_sched self-detected stall on CPU", forms.PLAIN),
        ("INFO: task 7 done", forms.INFO),
        ("INFO: event for pod-7: {kubelet n1} Failed: Failed to pull image", forms.PLAIN),
        ("INFO: event for pod-7: {kubelet n1} Pulling: Pulling image", forms.INFO),
        ("[    8.15] ACPI BIOS Error (bug): Could not resolve symbol", forms.INFO),
    ],
)
def test_levels_that_are_none_and_events_that_have_their_own(line: str, level: int) -> None:
    assert forms.level_of(line) == level


def test_a_limit_on_pulls_that_ended_well_was_none() -> None:
    limited = "Failed to pull image \"a:7\": toomanyrequests: the limit is reached\n"
    assert culprit(limited) == "storage"
    pulled = "Normal  Pulled  9s  kubelet  Successfully pulled image \"a:7\"\n"
    assert culprit(limited + pulled) == ""


def test_what_a_part_of_the_plant_said_before_its_wrapper_counts() -> None:
    wrapper = "slurmstepd: error: spank: required plugin spank_x.so: init() failed with rc=-1\n"
    inner = "slurmstepd: error: pyxis: enroot-mount: failed to mount: /data: Permission denied\n"
    assert culprit(wrapper) == "infra"
    assert culprit(inner + wrapper) == "user"
    assert culprit(wrapper + inner) == "user"


def test_a_loss_scale_that_cannot_fall_further_is_the_datas() -> None:
    skipped = "[INFO] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {}, reducing to {}\n"
    floor, falls = skipped.format(1, 1), skipped.format(65536, 32768)
    assert culprit(falls * 3) == ""
    assert culprit(floor) == ""  # once is no floor
    assert culprit(falls + floor * 2) == "data"
    assert culprit(floor * 2 + falls) == ""


def test_shared_memory_that_is_full_is_not_the_storages() -> None:
    full = "No space left on device"
    assert culprit(f"OSError: [Errno 28] {full}: '/out/a'\n") == "storage"
    assert culprit(f"OSError: [Errno 28] {full}: '/dev/shm/a'\n") == "user"
    allocated = "n1:1:2 [0] shm.h:9 NCCL WARN Call to posix_fallocate failed"
    assert culprit(f"{allocated} : {full}\n") == "user"


def test_an_end_of_file_without_a_word_blames_no_data() -> None:
    assert culprit("EOFError: Compressed file ended before the end-of-stream marker\n") == "data"
    assert culprit("EOFError\n") == "unknown"


def raised(path: str, line: str) -> str:
    return f'Traceback (most recent call last):\n  File "{path}", line 7, in a\n    b()\n{line}\n'


@pytest.mark.parametrize(
    ("path", "line", "whose"),
    [
        ("/lib/site-packages/urllib3/connection.py", "TimeoutError: timed out", "network"),
        ("/lib/python3.11/http/client.py", "OSError: [Errno 60] it took too long", "network"),
        ("/lib/python3.11/site-packages/requests/sessions.py", "TypeError: not a name", "user"),
        ("/home/u/train.py", "TimeoutError: timed out", "unknown"),
        ("/lib/python3.11/site-packages/PIL/ImageFile.py", "ValueError: too few of them", "data"),
        ("C:\\py\\site-packages\\soundfile.py", "RuntimeError: no frames", "data"),
        ("/lib/python3.11/tarfile.py", "FileNotFoundError: [Errno 2] No such file: 'a'", "user"),
        ("/home/u/train.py", "ValueError: too few of them", "user"),
    ],
)
def test_where_an_exception_was_raised_says_whose_it_is(path: str, line: str, whose: str) -> None:
    whole = raised(path, line)
    assert culprit(whole) == whose
    assert culprit(whole.split("\n", 1)[1]) == whose  # its first line is cut off


def test_a_small_class_below_a_frame_is_an_exception() -> None:
    cut = '  File "/home/u/a.py", line 7, in a\n    b()\n'
    assert culprit(cut + "lib.error: nothing that is known\n") == "user"
    assert culprit("lib.error: nothing that is known\n") == ""


def test_an_exception_without_a_message_follows_from_what_was_printed_above_it() -> None:
    above = "ExternalError:  NCCL error, unhandled cuda error\n\n"
    assert culprit(above + raised("/home/u/train.py", "lib.EnforceNotMet: ")) == "unknown"
    assert culprit(above + raised("/home/u/train.py", "lib.EnforceNotMet: no axis 7")) == "user"


def test_a_code_counts_as_a_whole_word_alone() -> None:
    assert culprit("launcher: cudaErrorExternalDevice\n") == "infra"
    assert culprit("launcher: error: MycudaErrorExternalDevices\n") != "infra"
    assert culprit("retry_on: [SlowDown, ServerBusy]\n") == ""
    assert culprit("upload failed: SlowDown\n") == "storage"


def test_a_warning_that_no_rule_knows_is_told() -> None:
    found = diagnose("W1120 10:00:00.1 7 a.cc:9] the sampler was aborted at step 7\n")
    assert found.root is None
    assert found.hint.startswith("no error, but a warning: ")


def test_what_came_back_or_ended_well_was_no_error() -> None:
    down, up = (f"igb 0000:07:00.0 eth1: NIC Link is {way}\n" for way in ("Down", "Up"))
    assert culprit(down) == culprit(up + down) == "network"
    assert culprit(down + up) == ""
    waits = "nfs: server store7 not responding, still trying\n"
    assert culprit(waits) == "storage"
    assert culprit(waits + "nfs: server store7 OK\n") == ""
    mentioned = "upload of events failed: 503 Service Unavailable\n"
    assert culprit(mentioned) == "storage"
    for end in ("Training completed.", "the run finished successfully", "81 COMPLETED 0:0"):
        assert culprit(f"{mentioned}{end}\n") == "", end
    assert culprit(mentioned + "a process finished with exit code 0\n") == "storage"
    assert culprit(f"RuntimeError: {mentioned}the run finished successfully\n") == "storage"


def test_advice_is_no_error_even_with_the_words_of_one() -> None:
    said = "CUDA error: device-side assert triggered"
    assert culprit(f"RuntimeError: {said}\n") == "user"
    for advice in ("TIP: if you see '{}', set a flag", "If {} is printed, set a flag"):
        assert culprit(advice.format(said) + "\n") == ""


@pytest.mark.parametrize(
    ("status", "whose"),
    [("be00000000800400", "infra"), ("bd80000000100134", "infra"), ("fe00000000800400", "infra"),
     ("8c00000000010091", ""), ("9c00000000010091", ""), ("cc00000000010091", "")],
)
def test_a_machine_check_counts_when_its_bank_says_uncorrected(status: str, whose: str) -> None:
    assert culprit(f"mce: [Hardware Error]: CPU 7: Machine Check: 0 Bank 7: {status}\n") == whose


def test_an_exception_is_known_by_the_module_that_defines_it() -> None:
    assert culprit("lib.exceptions.NameNotFound: no such environment\n") == "user"
    assert culprit("lib.nets.NameNotFound: no such environment\n") == ""


def test_a_notebooks_frames_say_where_it_was_raised_too() -> None:
    old = "/lib/urllib3/a.py in connect(self)\n      7     a()\nTimeoutError: timed out\n"
    new = "File /lib/urllib3/a.py:7, in connect(self)\n      a()\nTimeoutError: timed out\n"
    assert [culprit(old), culprit(new)] == ["network", "network"]


def test_a_count_of_steps_is_no_step() -> None:
    counts = "number of skipped iterations:   {0} | number of nan iterations:   {0} |\n"
    after = f"iteration 7/ 100 | {counts.format(0)}iteration 8/ 100 | {counts.format(1)}"
    assert culprit("NVRM: GPU 0000:07:00.0: rm_init_adapter failed\n" + after) == "infra"
    assert culprit("NVRM: GPU 0000:07:00.0: rm_init_adapter failed\n" + after + "step 9\n") == ""


def test_a_traceback_that_was_introduced_as_handled_is_let_go() -> None:
    whole = raised("/home/u/train.py", "KeyError: 'a'")
    assert culprit("could not read the cache, rebuilding it:\n" + whole) == ""
    assert culprit("could not read the cache, rebuilding it\n" + whole) == "user"
    assert culprit("could not read the cache:\n" + whole) == "user"


def test_weak_words_of_going_on_count_where_nothing_ends() -> None:
    said = "CUDA out of memory at batch 64; using 32"
    assert culprit(said + "\n") == ""
    assert culprit(f"RuntimeError: {said}\n") == "user"
    assert culprit("CUDA out of memory, using 7 GiB of 8\n") == "user"
    assert forms.says_it_goes_on(said, mildly=True)
    assert not forms.says_it_goes_on(said)


def test_a_reset_inside_a_client_of_the_network_is_no_consequence() -> None:
    reset = "ConnectionResetError: [Errno 104] Connection reset by peer"
    assert culprit(raised("/lib/aiohttp/connector.py", reset)) == "network"
    assert culprit(raised("/lib/torch/distributed/rendezvous.py", reset)) == ""


def test_what_python_let_go_stays_let_go_below_a_blank_line() -> None:
    whole = raised("/home/u/train.py", "ResourceWarning: unclosed <a>")
    said = "a.py:7: PytestUnraisableExceptionWarning: Exception ignored in: <a>\n"
    assert culprit(said + "\n" + whole) == ""
    assert culprit(said + whole) == ""
    assert culprit("the run begins\n\n" + whole) == "user"
