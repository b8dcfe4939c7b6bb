"""Whose an error is that no rule knows: by the things it names, and by how its log ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.agent.core.detect.ranks import live_logs
from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.endings import ends_well
from holdfast.agent.core.parse.logs.subjects import Subjects, words_of
from holdfast.agent.logs import files

from .test_log_vocabularies import culprit, diagnose

SUBJECTS = files.load_subjects()


@pytest.mark.parametrize(
    ("line", "whose"),
    [
        ("ERROR the gaudi board of this host did not come up (rc=7)", "infra"),
        ("[ERROR] firmware of adapter 7 is in a state that it cannot leave", "infra"),
        ("ERROR mlx5_7: too many retransmitted packets, queue 81 is closed", "network"),
        ("FATAL dns answer for the leader has no record", "network"),
        ("ERROR vdev sdz7 of the zpool took too long", "storage"),
        ("ERROR the lustre client waits on ost 81 and was told to end", "storage"),
        ("ERROR fairshare of the project is used up until the reservation begins", "policy"),
        ("ERROR annotation 81 has a checksum of the next archive", "data"),
        ("mmfs: [E] gpfs7 was unmounted, its disk lease ended", "storage"),
        ("job 81 was put on hold by SYSTEM_PERIODIC_HOLD", "policy"),
        ("runtime disconnected: usage limits reached", "policy"),
        ('Error: Error("invalid type: null", line: 33, column: 10)', "data"),
        ("error converting YAML to JSON: yaml: line 3: mapping values are out of place", "user"),
        ("train.cu:12:5: error: 'x' was not declared in this scope", "user"),
        ("Makefile:9: *** missing separator.  Stop.", "user"),
        ("Undefined function or variable 'a'.", "user"),
        ("error: option is of an older package, see its arguments", "user"),
    ],
)
def test_an_error_that_no_rule_knows_is_placed_by_the_things_it_names(
    line: str, whose: str
) -> None:
    found = diagnose(line + "\n")
    assert found.root is not None and found.root.faint
    assert (found.root.signature, found.root.culprit) == (f"about_{whose}", whose)
    assert logroot.as_json(found, ("a",))["root"]["known_by"] == "words"  # type: ignore[index]


@pytest.mark.parametrize(
    "line",
    [
        "INFO the gaudi board of this host came up after an error",  # no error's level
        "W1120 10:00:00.1 7 a.cc:9] annotation 81 has a checksum of its own",
        "the zpool and its vdev: 0 errors",  # sounds like one, and is none
        "ERROR the flux is inverted",  # names nothing
        "mmfs: [I] gpfs7 was unmounted, its disk lease ended",
        "train.cu:12:5: warning: 'x' was declared and is an error later",
        "hold on, the job 81 of SYSTEM_PERIODIC_HOLD begins",
        "auto-unmounted /dev/sdz7: the disk was idle, 0 errors",
        "ERROR the dns name of the vdev",  # names two layers alike
        "ERROR the lustre client waits on ost 81, trying again",  # says that it goes on
        "ERROR tcp socket to a peer was closed",  # a peer's end is no cause
        "ERROR tcp socket to the coordinator was closed",
    ],
)
def test_what_names_nobody_clearly_or_is_no_error_blames_nobody(line: str) -> None:
    assert culprit(line + "\n") == ""


def test_what_is_placed_by_words_yields_to_every_rule_and_to_a_lost_peer() -> None:
    faint = "ERROR vdev sdz7 of the zpool took too long\n"
    assert culprit(faint) == "storage"
    assert culprit(faint + "OSError: [Errno 122] Disk quota exceeded\n") != ""
    assert culprit(faint + "KeyError: 'lr'\n") == "user"
    peer = "RuntimeError: [pair.cc:5] Connection closed by peer [10.0.0.7]:81\n"
    assert culprit(faint + peer) == ""
    assert culprit(faint + "srun: error: n7: task 3: Exited with exit code 1\n") == "storage"


def test_words_are_cut_at_their_joints_and_paths_are_no_words() -> None:
    assert words_of("mlx5_core: PodSecurity I/O") == ["mlx5", "core", "pod", "security", "io"]
    assert words_of("cannot open /home/disk/network/a.py") == ["cannot", "open"]
    assert words_of("/dev/nvme0n1 and/or x") == ["dev", "nvme0n1", "and", "or", "x"]


def test_a_word_inside_a_longer_entry_is_not_counted_again() -> None:
    subjects = Subjects({"disk": {"storage": 2}, "disk quota": {"policy": 2}})
    assert [subjects.of("disk quota"), subjects.of("quota of a disk")] == ["policy", "storage"]
    assert subjects.of("disk7") == "storage"


def test_a_bad_table_of_words_is_refused_by_name(tmp_path: Path) -> None:
    for text, said in (
        ('[moon]\nsure = "a"\nfaint = "b"\n', "moon"),
        ('[infra]\nsure = "a"\n', "infra"),
        ('[infra]\nsure = "a,\\nb c"\nfaint = "d, b c"\n', "'b c' twice"),
    ):
        path = tmp_path / "subjects.toml"
        path.write_text(text)
        with pytest.raises(ValueError, match=said):
            files.load_subjects(path)


def test_the_table_has_small_words_that_a_line_can_hold() -> None:
    assert set(SUBJECTS.points) == {" ".join(words_of(one)) for one in SUBJECTS.points}


# ----------------------------------------------------------------------------- how a log ends


ERROR = "ERROR data: cannot read shard 7: Input/output error\n"


def test_what_was_only_mentioned_in_a_log_that_ends_well_was_handled() -> None:
    assert culprit(ERROR) == "storage"
    assert culprit(ERROR + "INFO data: shard 7 was read successfully\n") == ""
    assert diagnose(ERROR + "INFO link is up again, all is running\n").hint.startswith("only err")


@pytest.mark.parametrize(
    "after",
    [
        "INFO the run could not be completed\n", "INFO all ranks successfully terminated\n",
        "INFO shutting down\n", "ERROR nothing was saved\n", "the run is not healthy\n",
        "INFO saved\nsrun: error: n7: task 3: Exited with exit code 1\n",
        "INFO next shard\n", "Job finished at 10:00\n", "Done.\n", "=== completed on n7 ===\n",
    ],
)
def test_an_end_without_a_sign_of_work_takes_nothing_back(after: str) -> None:
    assert culprit(ERROR + after) == "storage"


def test_an_exception_is_not_taken_back_by_what_is_printed_after_it() -> None:
    assert culprit("OSError: [Errno 5] Input/output error: '/a'\nINFO saved\n") == "storage"


def test_only_lines_after_the_error_count_and_only_the_last_of_them() -> None:
    text = b"INFO saved\nERROR a\n"
    assert not ends_well(text, text.index(b"ERROR"))
    assert ends_well(b"ERROR a\n" + b"x\n" * 5 + b"INFO saved\n", 0)
    assert not ends_well(b"ERROR a\nINFO saved\n" + b"x\n" * 50, 0)


@pytest.mark.parametrize(
    "line",
    [
        "mv: cannot stat 'out': No such file or directory",
        "/var/spool/slurmd/job7/slurm_script: line 9: conda: command not found",
        "cp: cannot stat '/a/last.pt': No such file or directory",
        "fatal: not a git repository (or any of the parent directories): .git",
    ],
)
def test_a_script_goes_on_below_a_complaint_of_a_small_tool(line: str) -> None:
    assert culprit(line + "\nloading 8 shards\n") == ""
    assert culprit(line + "\nKeyError: 'lr'\n") == "user"


@pytest.mark.parametrize(
    "line",
    [
        "mkdir: cannot create directory 'out': File exists", "rm: cannot remove 'a': No such file",
        "/var/spool/slurmd/job7/slurm_script: line 9: /opt/conda/bin/activate: No such file",
        "bash: line 3: module: command not found",
    ],
)
def test_what_ends_no_script_is_never_blamed(line: str) -> None:
    assert culprit(line + "\n") == ""
    assert culprit("mkdir: cannot create directory '/a': Permission denied\n") == "user"
    assert culprit("rm: cannot remove '/x/.nfs0000': Device or resource busy\n") == "storage"


@pytest.mark.parametrize(
    "line",
    ["bash: line 3: torchrun: command not found", "python: can't open file '/a.py': No such file"],
)
def test_what_a_script_is_about_is_no_small_tool(line: str) -> None:
    assert culprit(line + "\nend of job\n") == "user"


def test_a_step_shows_that_what_was_missed_of_the_jobs_own_was_not_needed() -> None:
    missed = "ERROR option of an older package, see its arguments\n"
    assert [culprit(missed), culprit(missed + "step 1 loss 2.0\n")] == ["user", ""]
    raised = "KeyError: 'lr'\n"
    assert culprit(raised + "step 1 loss 2.0\n") == "user"
    link = "ERROR mlx5_7: too many retransmitted packets, queue 81 is closed\n"
    assert culprit(link + "step 1 loss 2.0\n") == "network"


def test_condas_word_about_a_shell_is_no_exception() -> None:
    shell = "CommandNotFoundError: Your shell has not been properly configured to use 'a'.\n"
    assert [culprit(shell), culprit("CommandNotFoundError: no such thing\n")] == ["", "user"]


def test_what_a_clean_up_meets_at_the_end_of_a_process_ends_nothing() -> None:
    frames = 'Traceback (most recent call last):\n  File "/x/util.py", line 3, in {}\n    a()\n'
    busy = "OSError: [Errno 16] Device or resource busy: '.nfs7'\n"
    assert culprit(frames.format("_run_finalizers") + busy) == ""
    assert culprit(frames.format("save") + busy) != ""


def test_a_class_may_begin_with_an_underscore() -> None:
    assert culprit("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 9 GiB\n") == "user"


def test_what_no_rule_knows_ends_a_log_only_near_its_end() -> None:
    faint, more = "ERROR vdev sdz7 of the zpool took too long\n", "wrote a part\n"
    assert [culprit(faint + more * n) for n in (9, 90)] == ["storage", ""]


def test_the_kernels_word_on_a_program_that_does_not_train_is_told() -> None:
    line = "[81.5] {}[81]: segfault at 0 ip 7 sp 7 error 4 in liba.so\n"
    for name, role in (("python3", "root"), ("pt_main_thread", "root"), ("plasmashell", "")):
        found = diagnose(line.format(name))
        assert (found.root.role if found.root else "") == role, name
        assert found.root or found.hint.startswith("an error that no rule knows")


@pytest.mark.parametrize(
    ("line", "said", "confidence"),
    [
        (live_logs.Line("about_storage", "storage", family=True), "the things that it names alone",
         0.2),
        (live_logs.Line("stale_handle", "storage", family=True), "its family alone", 0.4),
        (live_logs.Line("cuda_ecc", "infra"), "", 0.8),
    ],
)
def test_a_live_verdict_says_how_sure_it_is(
    line: live_logs.Line, said: str, confidence: float
) -> None:
    verdict = live_logs.verdict_of(live_logs.Answer(root=line), "r", 1)
    assert verdict is not None and not verdict.act
    assert dict(verdict.evidence).get("known by", "") == said
    assert verdict.confidence == confidence


def test_a_job_that_its_own_user_removed_was_nobody_elses() -> None:
    removed = "009 (41.0.0) Job was aborted.\n\tvia condor_rm (by user {})\n"
    assert [culprit(removed.format(who)) for who in ("u7", "root")] == ["user", "policy"]
    assert culprit("forrtl: error (200): program aborting due to control-C event\n") == "user"
    assert culprit("INFO due to a control-C event handler the program asks again\n") == ""


@pytest.mark.parametrize(
    "line",
    [
        "Can't locate A/B.pm in @INC (you may need to install the A::B module)",
        "Died at a.pl line 9.", "run.sh: line 3: ./a.out: No such file or directory",
        'Error in .Call("x") : object \'y\' not found', "Execution halted",
        "Error: Unable to access jarfile a.jar", "Error using load", "MethodError in rule all:",
        "terminate called after throwing an instance of 'std::out_of_range'",
        "lua: a.lua:12: attempt to index a nil value (local 'x')",
    ],
)
def test_the_last_words_of_languages_are_the_jobs(line: str) -> None:
    assert culprit(line + "\n") == "user"


@pytest.mark.parametrize(
    "line",
    [
        "Error in cpuinfo: prctl(PR_SVE_GET_VL) failed", "Error in atexit._run_exitfuncs:",
        "terminate called after throwing an instance of 'std::system_error'",
        "forrtl: severe (174): SIGSEGV, segmentation fault occurred",
        "INFO the run died at night: a.pl line 9 was slow",
    ],
)
def test_words_near_to_those_are_not(line: str) -> None:
    assert culprit(line + "\n") in ("", "unknown")


def test_a_cancellation_gives_no_reason_and_want_of_memory_beside_it_does() -> None:
    cancelled = "slurmstepd: error: *** JOB 7 ON n7 CANCELLED AT 2026-11-20T10:00:00{} ***\n"
    oom = "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch.\n"
    assert culprit(cancelled.format("") + oom) == culprit(oom + cancelled.format("")) == "user"
    assert culprit(cancelled.format("")) == "policy"
    assert culprit(cancelled.format(" DUE TO TIME LIMIT") + oom) == "policy"


def test_a_loaders_worker_that_crashed_is_not_for_want_of_memory() -> None:
    line = "RuntimeError: DataLoader worker (pid 7) is killed by signal: {}.\n"
    said = [culprit(line.format(one)) for one in ("Killed", "Bus error", "Segmentation fault")]
    assert said == ["user", "user", "unknown"]
