"""The grammar of single lines: severities, what was corrected, what is asked of a reader."""

from __future__ import annotations

import pytest

from holdfast.agent.core.parse.logs import forms
from holdfast.agent.core.parse.logs.lines import clean

from .test_log_vocabularies import culprit, diagnose, raised


@pytest.mark.parametrize(
    ("line", "goes_on"),
    [
        ("cannot provision it. Please retry with another type", False),
        ("cannot provision it. Retry using another type, or retry later", False),
        ("upload failed, retrying with a new token", True), ("request failed, retry 2", True),
        ("severity=Uncorrected (Non-Fatal)", False), ("no plugin (non-fatal)", True),
        ("digest mismatch, pulling it again", True), ("rank 7 is failing again", False),
        ("Runtime error during autotuning: ", True),
    ],
)
def test_what_is_asked_of_a_reader_is_no_retry(line: str, goes_on: bool) -> None:
    assert forms.says_it_goes_on(line, mildly=True) == goes_on


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("  main|n7|W|a file is gone", forms.WARN), ("main|n7|E|a file is gone", forms.LOUD),
        ("worker|n7|I|starting up", forms.INFO), ("  main|n7|P|busy 7 %", forms.INFO),
        ("a|b|W|", forms.WARN), ("a | b | W | c", forms.PLAIN),
    ],
)
def test_grid_engines_levels(line: str, level: int) -> None:
    assert forms.level_of(line.strip()) == level


def test_a_board_counts_what_is_asserted_and_not_what_is_over() -> None:
    event = "   7 | 11/20/2026 | 10:00:00 | {} | {}"
    for said in ("Processor CPU1 | IERR", "Temperature Inlet | Upper Critical going high"):
        assert culprit(event.format(said, "Asserted") + "\n") == "infra"
        assert culprit(event.format(said, "Deasserted") + "\n") == ""
    assert culprit(event.format("Memory #7 | Correctable ECC", "Asserted") + "\n") == ""


def test_the_lines_below_a_machine_check_say_nothing_of_their_own() -> None:
    check = "mce: [Hardware Error]: CPU 7: Machine Check: 0 Bank 7: {}\n"
    below = "mce: [Hardware Error]: TSC 0 ADDR 81 MISC 81\n" \
            "mce: [Hardware Error]: PROCESSOR 0:806f8 TIME 1700000000 SOCKET 0 APIC 7\n"
    assert culprit(check.format("cc00008000010091") + below) == ""
    assert culprit(check.format("be00000000800400") + below) == "infra"


def test_a_store_that_found_the_good_copy_lost_nothing() -> None:
    wrong = "[81.5] BTRFS warning (device sdz7): csum failed root 7 ino 81 off 0 mirror 1\n"
    assert culprit(wrong) == "storage"
    assert culprit(wrong + "[81.6] BTRFS info (device sdz7): read error corrected: ino 81\n") == ""


def test_what_follows_from_a_fact_takes_it_not_back() -> None:
    differs = "/d/a.bin has a checksum (81) differing from expected (18)"
    assert culprit(differs + ", file may be corrupted.\n") == "data"
    assert culprit("If the checksum differs from expected, file may be corrupted.\n") == ""


def test_a_pci_address_is_no_count_of_failures() -> None:
    assert culprit("[81.5] nvidia: probe of 0000:07:00.0 failed with error -1\n") == "infra"
    assert culprit("loader: 0 failed, 0 corrupt\n") == ""


def test_a_certificate_is_the_networks_but_for_a_path_of_the_jobs_own() -> None:
    unknown = "Get \"https://hub.local/v2/\": x509: certificate signed by unknown authority\n"
    assert culprit("Error response from daemon: " + unknown) == "network"
    assert culprit("OSError: Could not find a suitable TLS CA certificate bundle, "
                   "invalid path: /home/u/ca.pem\n") == "user"
    assert culprit("I1120 10:00:00.1 7 a.go:7] certificate has expired, rotating it now\n") == ""


def test_a_refused_submission_is_no_wait_even_when_a_script_submits_again() -> None:
    refused = "ERROR: submit: sbatch: error: QOSMinGRES\n"
    again = "WARNING: submit: sbatch a.sh failed; will retry in 60 seconds.\n"
    assert culprit(refused + again) == "policy"
    assert culprit(refused + again + "Submitted batch job 81\n") == ""
    assert culprit("normal QOS: MaxSubmitJobsPerUser=100 MaxWall=1-00:00:00\n") == ""


def test_a_table_of_states_counts_with_its_exit_code() -> None:
    assert culprit("81.batch|train|PREEMPTED|0:0\n") == "policy"
    assert culprit("81  train  gpu  TIMEOUT  0:0\n") == "policy"
    assert culprit("case 7 | TIMEOUT | 0:30\n") == ""
    assert culprit("81  train  gpu  COMPLETED  0:0\n") == ""


def test_a_manager_of_services_says_only_that_something_failed() -> None:
    ended = "n7 systemd[1]: a.service: {}\n"
    for said in ("Start request repeated too quickly.", "Failed with result 'exit-code'.",
                 "start operation timed out. Terminating."):
        found = diagnose(ended.format(said))
        assert found.root is None and not found.hint.startswith("nothing known"), said
    assert culprit(ended.format("Failed with result 'oom-kill'.")) == "user"
    own = "n7 a[81]: OSError: [Errno 28] No space left on device: '/out/a'\n"
    assert culprit(own + ended.format("Failed with result 'exit-code'.")) == "storage"


def test_a_message_goes_on_below_its_colon_whatever_level_that_line_gives_itself() -> None:
    head = "RuntimeError: Exception thrown in lib Read: /src/reader.cxx:7:"
    told = "lib::ERROR: Unable to determine ImageIO reader for \"/d/7.nii\""
    assert culprit(raised("/home/u/a.py", head) + told + "\n") == "data"
    assert culprit(raised("/home/u/a.py", head[:-1]) + told + "\n") != "data"
    rust = "thread 'main' panicked at src/main.rs:7:5:\n"
    assert culprit(rust) == "unknown"
    assert culprit(rust + "index out of bounds: the len is 7 but the index is 7\n") == "user"


def test_a_traceback_that_has_its_end_is_not_cut() -> None:
    frames = '  File "/lib/a.py", line 7, in b\n    raise RuntimeError(f"none: {exc}")\n'
    end = "RuntimeError: none: out of resource\nRuntime error during autotuning: \nnone\n"
    assert culprit(frames + end + "Ignoring this choice.\n") == ""
    assert culprit(frames) == "user"


def test_a_signature_in_a_line_that_is_harmless_is_no_root() -> None:
    probe = "E external/cuda_driver.cc:7] failed call to cuInit: no CUDA-capable device is detected"
    assert culprit(probe + "\n") == ""
    assert culprit("CUDA Error: no CUDA-capable device is detected\n") == "infra"


def test_errnos_word_in_a_fabrics_error_is_no_disks() -> None:
    said = "OFI poll failed (ofi_events.c:7:a:Input/output error - {})\n"
    assert culprit(said.format("UNDELIVERABLE")) == "network"
    assert culprit(said.format("CANCELED")) == ""  # another rank's end took it back
    assert culprit("dd: error reading '/d/a': Input/output error\n") == "storage"


def test_a_pods_address_is_the_networks_and_the_rest_of_its_sandbox_is_not() -> None:
    sandbox = "Failed to create pod sandbox: rpc error: code = Unknown desc = "
    assert culprit(sandbox + "add cmd: failed to assign an IP address to container\n") == "network"
    assert culprit(sandbox + "no runtime for \"nvidia\" is configured\n") == "infra"


@pytest.mark.parametrize("month", ["Nov", "nov.", "Mär", "févr.", "août", "11月"])
def test_a_clock_in_another_tongue_is_taken_off(month: str) -> None:
    read = clean(f"{month} 20 10:00:00 n7 a[81]: said")
    assert read.text == "n7 a[81]: said"
    assert (read.time_s is not None) == (month == "Nov")
    assert clean("step 20 loss 2.5").text == "step 20 loss 2.5"


def test_words_in_other_tongues() -> None:
    assert culprit("Fehler in f(x) : Objekt 'x' nicht gefunden\n") == "user"
    assert culprit("Fehler: 0, Warnungen: 3\n") == ""
    full = "cp: /out/a: Auf dem Gerät ist kein Speicherplatz mehr verfügbar\n"
    assert culprit(full) == "storage"


def test_a_shell_without_conda_is_told_and_nobody_is_blamed() -> None:
    found = diagnose("CommandNotFoundError: Your shell has not been properly configured to use "
                     "'conda activate'.\n")
    assert found.root is None and found.hint.startswith("a shell that conda")


def test_what_a_configurations_error_says_of_ignored_settings_takes_it_not_back() -> None:
    said = "ValueError: with a `plan_file` these variables will be ignored: ['stage'].\n"
    assert culprit(said) == "user"
    assert culprit("ValueError: sample 7 cannot be read, it will be ignored\n") == ""


def test_advice_behind_an_error_leaves_it_told_and_blames_nobody() -> None:
    found = diagnose("A fatal error occurred in the engine. If you do not know why, set LOUD=1\n")
    assert found.root is None and "no rule knows" in found.hint


def test_a_class_that_is_cut_is_known_where_only_one_begins_so() -> None:
    cut = 'Traceback (most recent call last):\n  File "a.py", line 7, in f\n    raise lib.{}\n'
    assert culprit(cut.format("CalledProc")) == ""  # what ran said why
    assert culprit(cut.format("Cal")) == "user"


def test_an_example_of_pytorchs_counts_samples_behind_its_epoch() -> None:
    lost = "THCudaCheck FAIL file=a.cpp line=7 error=38 : no CUDA-capable device is detected\n"
    step = "Train Epoch: 1 [{}/9000 (1%)]\tLoss: 2.1\n"
    assert culprit(lost + step.format(0)) == "infra"
    assert culprit(lost + "".join(step.format(64 * n) for n in range(3))) == ""


@pytest.mark.parametrize(("text", "who"), [
    ("terminate called after throwing an instance of 'std::system_error'\n"
     "  what():  Transport endpoint is not connected\n"
     "  what():  CUDA error: uncorrectable NVLink error detected during the execution\n", "infra"),
    ("OSError: [Errno 107] Transport endpoint is not connected: '/mnt/s3/a'\n", "storage"),
    ("E executor.cc:9] BaseCollectiveExecutor::StartAbort DEADLINE_EXCEEDED: Deadline\n", ""),
    ("E executor.cc:9] BaseCollectiveExecutor::StartAbort INVALID_ARGUMENT: shapes\n", "user"),
    ("AssertionError: input must lie in [0, 1], but got nan\n", "data"),
    ("ncclSystemError: System call (e.g. socket, malloc) or external library call\n", "unknown"),
    ("E0901 01:02:03.4 7 notify.cc:9] Rpc failed:Out of range:No more nodes exist.\n", ""),
    ("step 8 | [loss] nan |\nstep 9 | [loss] nan |\n", "data"),
    ("run.sh: line 3: export: `=x': not a valid identifier\n", "user"),
])
def test_what_the_eighth_set_showed(text: str, who: str) -> None:
    assert culprit(text) == who


def test_a_traceback_without_its_end_is_a_guess_by_its_last_file() -> None:
    cut = 'Traceback (most recent call last):\n  File "{}", line 7, in f\n    return g(\n'
    found = diagnose(cut.format("/job/train.py"))
    assert found.root is not None and found.root.culprit == "user" and found.root.faint
    assert culprit(cut.format("/lib/python3.11/urllib/request.py")) == "network"
    assert culprit(cut.format("/lib/torch/distributed/c10d.py")) == ""
    assert culprit(cut.format("/lib/torch/autograd/graph.py")) == ""
    lost = "RuntimeError: DataLoader worker (pid 7) exited unexpectedly with exit code 1.\n"
    assert culprit(lost + cut.format("/job/train.py")) == ""
    # A stack that was only shown: the log goes on below it.
    for goes_on in ("Training completed.\n", "INFO: saved\n", "step 14 loss 2.1\n"):
        assert culprit(cut.format("/job/train.py") + goes_on) == ""
    dump = 'Thread 0x7f (most recent call first):\n  File "/job/train.py", line 7 in f\n'
    assert culprit(dump) == ""


@pytest.mark.parametrize(("text", "who"), [
    ("INFO:tensorflow:Error reported to Coordinator: /a/checkpoint; Input/output error\n"
     "INFO:tensorflow:training step 8\n", "storage"),
    ("x - WARNING - WARNING: command error: 'no such file or directory: /a/b'!\n", "user"),
    ("Exception: The dataset is empty. All elements have been skipped.\n", "data"),
    ("errors_impl.InternalError: Graph execution error:\n\n1 root error(s) found.\n"
     "  (0) INTERNAL: NCCL operation ncclInit(a, b) failed: invalid usage; at x\n"
     "0 derived errors ignored.\n", "user"),
    ("errors_impl.ResourceExhaustedError: disk quota exceeded [Op:SaveV2]\n", "storage"),
    ("E local_client.cc:9] Execution of replica 0 failed: Resource exhausted: Out of memory "
     "while trying to allocate 81 bytes.\n", "user"),
    ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 8.1e-320\n", "data"),
    ("n1:7:8 [0] net_ib.cc:93 NCCL WARN NET/IB : Got async event : client reregistration\n", ""),
    ("n1:7:8 [0] net_ib.cc:93 NCCL WARN NET/IB : Got async event : port error\n", "network"),
    ("RuntimeError: CUDA error: initialization error\n", "user"),
    ("ray.exceptions.RayTaskError(RuntimeError): ray::Actor.fit() (pid=7)\n", ""),
    ("Unable to plot network architecture:\n", ""),
    ("terminate called without an active exception\n", "unknown"),  # a thread's, at a process's end
    ("Registered pre-emption signal handler (SIGUSR1)\nOSError: [Errno 5] Input/output error\n",
     "storage"),
    ("PreemptionError: Nodes of this job got pre-empted.\n", "policy"),
    ("UnidentifiedImageError: cannot identify image file 'a.jpg', sample was skipped\n"
     "OSError: [Errno 28] No space left on device\n", "storage"),
    ("KeyError('optional') while reading config, default is taken\n", ""),
    ("  what():  Transport endpoint is not connected: '/mnt/s3/shard-1.tar'\n", "storage"),
    ("size mismatch for head.fc.weight: copying a param with shape (9,) from checkpoint\n", ""),
    ("INFO:tensorflow:Error reported to Coordinator: <class 'x.CancelledError'>, it was ended\n"
     "INFO:tensorflow:Finished training!\n", ""),
    ("2 workers are no longer alive, 6 go on\n", ""),
    ("MXNetError: blob.h:7: Check failed: a.Size() == shape.Size() (129 vs. 128) TBlob\n", "user"),
])
def test_what_more_of_such_logs_showed(text: str, who: str) -> None:
    assert culprit(text) == who
