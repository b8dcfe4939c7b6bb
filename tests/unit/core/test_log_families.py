"""Errors that no signature knows: their forms, their families, and what is never blamed."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import classify_cases, classify_outside
from holdfast.agent.core.parse.logs import families as known
from holdfast.agent.core.parse.logs import forms, signatures, unlisted
from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs.endings import ends_well
from holdfast.agent.core.parse.logs.progress import passed
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.logs import files

CATALOGUE = files.load_catalogue()
FAMILIES = files.load_families()
TABLES = tomllib.loads(files.FAMILIES.read_text())
ROWS = TABLES["family"]
SAMPLES = [(row, sample) for row in ROWS for sample in row["samples"]]


def diagnose(*texts: str) -> logroot.Diagnosis:
    found: list[signatures.Match] = []
    for number, text in enumerate(texts):
        scanner = Scanner(CATALOGUE, number, number, families=FAMILIES)
        scanner.feed(text.encode("utf-8", "surrogatepass"))
        scanner.close()
        found += scanner.matches
    return logroot.diagnose(found, CATALOGUE.exit_codes)


def culprit(*texts: str) -> str:
    root = diagnose(*texts).root
    return root.culprit if root else ""


# ------------------------------------------------------------------------------------- the data


def test_every_family_stands_once_and_has_a_sample() -> None:
    assert len(ROWS) == len({row["id"] for row in ROWS}) > 60
    assert all(row["samples"] for row in ROWS)
    assert all(word == word.lower() for row in ROWS for word in row.get("words", ()))


@pytest.mark.parametrize(("row", "sample"), SAMPLES, ids=lambda one: one["id"] if isinstance(
    one, dict) else "")
def test_a_sample_is_of_its_family(row: dict[str, Any], sample: str) -> None:
    found = diagnose(sample + "\n")
    role, expected = row.get("role", "root"), row.get("culprit", "unknown")
    if role != "root":
        assert found.root is None or found.root.culprit == "unknown"
        return
    assert found.root is not None and found.root.culprit == expected
    if found.root.family:  # a signature may know the sample as well, and wins
        assert found.root.signature == row["id"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"culprit": "me"}, "culprit must be one of"), ({"role": "boss"}, "role must be one of"),
        ({"retryable": "maybe"}, "retryable must be"), ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_row_is_refused_by_name(tmp_path: Any, change: dict[str, str], said: str) -> None:
    path = tmp_path / "own.toml"
    keys = {"id": "a", "culprit": "user", "retryable": "no"} | change
    rows = "".join(f'{key} = "{value}"\n' for key, value in keys.items())
    path.write_text(f"gates = []\n[[family]]\n{rows}")
    with pytest.raises(ValueError, match=r"own.toml: family 'a'") as caught:
        files.load_families(path)
    assert said in str(caught.value)


def test_each_word_is_looked_for() -> None:
    gates = [gate.decode() for gate in FAMILIES.gates]
    for row in FAMILIES.rows:
        for word in () if row.lasting else row.words:
            bare = re.sub(r"\d", "", word)
            short = len(bare) < known.GATE_LEAST  # a number: its line sounds bad in other words
            assert short or any(gate in bare for gate in gates), (row.id, word)
    assert min(map(len, gates)) >= known.GATE_LEAST


# ------------------------------------------------------------------------------------- forms


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("E1120 10:00:00.1 7 a.cc:9] bad", forms.LOUD), ("[W socket.cpp:4] late", forms.WARN),
        ("[E412 10:00:00.1 socket.cpp:4] late", forms.LOUD),
        ("F tensorflow/core/a.cc:9] Check failed", forms.LOUD),
        ("I 149 199] node_manager.cc:1: alive", forms.INFO),
        ("[NeMo W 2026-11-20 10:00:00 a:9] no folder", forms.WARN),
        ("gpu1:7:8 [0] NCCL INFO Channel 00", forms.INFO),
        ("gpu1:7:8 [0] transport.cc:9 NCCL WARN bad", forms.LOUD),
        ("gpu1:7:8 [0] misc/ibvwrap.cu:9 WARN Call failed", forms.LOUD),
        ("root - WARNING - slow", forms.WARN), ("INFO:root:fine", forms.INFO),
        ("[ERROR] worker", forms.LOUD), ("| CRITICAL | end", forms.LOUD),
        ('time="x" level=warning msg="late"', forms.WARN), ('level=error msg="x"', forms.LOUD),
        ("libfabric:7:efa:a():9<warn> slow", forms.WARN), ("srun: error: node1", forms.LOUD),
        ("/lib/a.py:9: UserWarning: old", forms.WARN), ("Normal   Pulled  9s", forms.INFO),
        ("Warning  Evicted  2s  kubelet", forms.PLAIN), ("what a day", forms.PLAIN),
    ],
)
def test_how_loud_a_line_is(line: str, level: int) -> None:
    assert forms.level_of(line) == level


@pytest.mark.parametrize(
    ("line", "name", "ends"),
    [
        ("ValueError: bad", "ValueError", True), ("> a.b.BadError: x", "BadError", True),
        ("ray.exceptions.RayTaskError(ValueError): ray::f()", "ValueError", True),
        ("terminate called after throwing an instance of 'a'", "", True),
        ("  what():  it broke", "", True), ("F1120 10:00:00.1 7 a.cc:9] x", "", True),
        ("note: all is well", "", False), ("Epoch: 7", "", False),
    ],
)
def test_what_a_process_ends_with(line: str, name: str, ends: bool) -> None:
    said = forms.form(line)
    assert (said.name, said.ends) == (name, ends)


@pytest.mark.parametrize(
    ("line", "name"),
    [('    raise a.b.BadShard("x")', "BadShard"), ("    assert x is None", "AssertionError"),
     ("----> 7     raise ValueError(", "ValueError"), ("    return raised", "")],
)
def test_what_a_cut_traceback_raises(line: str, name: str) -> None:
    assert forms.cut_off(line) == name


# ------------------------------------------------------------------------------------- families


VENDORS = {
    "infra": (
        "RuntimeError: HIP error: hipErrorECCNotCorrectable uncorrectable ECC error",
        "nvidia-container-cli: initialization error: nvml error: driver not loaded",
        "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x26:0xffff:1290)",
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "Failed to initialize NVML: Unknown Error",
        "[  81.5] amdgpu 0000:01:00.0: amdgpu: GPU reset begin!",
        "2026-Nov-20 10:00:00.1 7:7 ERROR  TDRV:tdrv_init  Could not open the nd9",
        "RuntimeError: Found no NVIDIA driver on your system. No CUDA GPUs are available",
        "slurmctld: error: Node failure on gpu07, NODE_FAIL",
        "gpu1:7:8 [0] misc/ibvwrap.cc:9 NCCL WARN Call to ibv_open_device failed",
        "E1120 10:00:00.1 7 hsa.cc:9] hsa_init failed, possibly no supported GPU devices",
        "[ 81.5] [drm:amdgpu_job_timedout [amdgpu]] *ERROR* ring gfx7 timeout, but soft recovered",
        "HCCL error: synDeviceAcquire(&handle, nullptr) failed with synapse error: 7",
        "slurmstepd: error: execve(): /spool/slurmd/job7/slurm_script: No such file or directory",
        "XlaRuntimeError: INTERNAL: Core halted unexpectedly",
        "RuntimeError: CUDA error: system has a driver mismatch: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "docker: Error response from daemon: unknown or invalid runtime name: nvidia.",
        "gpu1:7:8 [0] p2p.cc:9 NCCL WARN cudaIpcOpenMemHandle failed : invalid device context",
        "nrtd[7]: [NRTD:Init] Failed to initialize devices, error:9",
        "NVRM: Xid (PCI:0000:07:00): 45, pid=7, name=py, Ch 00000007 caused by previous Xid 148",
        "0/9 nodes are available: 9 node(s) had taint {node.kubernetes.io/not-ready: }, no pod",
        "[ 81.5] EDAC MC0: 1 UE memory read error on CPU_SrcID#7_MC#0",
    ),
    "network": (
        "gpu1:7:8 [0] ib.cc:9 NCCL WARN NET/IB: Got completion status=IBV_WC_RETRY_EXC_ERR(12)",
        "[gpu1:7:0:7] ib_mlx5_log.c:1 UCX  ERROR Transport retry count exceeded on mlx5_1:1/RoCE",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='h', port=443): Max retries "
        "exceeded with url: / (Caused by NewConnectionError('timed out'))",
        "socket.gaierror: [Errno -2] Name or service not known",
        "gpu1:7:8 [0] NCCL WARN NET/OFI Request 0x1 completed with error. RC: 113: unreachable",
        "fatal: unable to access 'https://h/m': Could not resolve host: h",
        "http.client.RemoteDisconnected: Remote end closed connection without response",
        "OSError: [Errno 113] No route to host",
        "ssh: connect to host n2 port 22: No route to host",
        "httpx.ReadTimeout: The read operation timed out",
        "TimeoutError: The handshake operation timed out",
    ),
    "storage": (
        "OSError: [Errno 122] Disk quota exceeded: '/out'",
        "botocore.exceptions.ClientError: An error occurred (SlowDown) when calling the PutObject",
        "google.api_core.exceptions.ServiceUnavailable: 503 GET https://s: Service Unavailable",
        "OSError: [Errno 30] Read-only file system: '/out'",
        "[ 81.5] EXT4-fs error (device sda1): ext4_find_entry:9: reading directory",
        "LustreError: 11-0: out-OST0001: operation ost_write failed: rc = -5",
        "cp: error writing '/out/a': No space left on device",
        "[ 81.5] blk_update_request: critical medium error, dev sdz, sector 81",
        "E1120 10:00:00.1 7 kubelet.go:9] timeout expired waiting for volumes to attach; skipping",
        "RuntimeError: File out/step_7.pt cannot be opened.",
    ),
    "data": (
        "zlib.error: Error -3 while decompressing data: invalid block type",
        "EOFError: Compressed file ended before the end-of-stream marker was reached",
        "file #81:  bad zipfile offset (local header sig):  812",
        "OSError: broken data stream when reading image file",
        "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer.",
        "json.decoder.JSONDecodeError: Expecting ',' delimiter: line 7 column 1 (char 9)",
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0",
        "_pickle.UnpicklingError: invalid load key, '<'.",
        "OSError: Unable to open file (file signature not found)",
        "tensorflow.python.framework.errors_impl.DataLossError: corrupted record at 81",
    ),
    "user": (
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x3)",
        "OSError: [Errno 24] Too many open files: '/data/a'",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to",
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        "ImportError: libcudart.so.9: cannot open shared object file: No such file or directory",
        "torch.cuda.OutOfMemoryError: HIP out of memory. Tried to allocate 9.00 GiB",
        "[ 81.5] Memory cgroup out of memory: Killed process 7 (python) total-vm:1kB, anon-rss:1kB",
        "sbatch: error: Batch job submission failed: Invalid account or partition",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 9.0 GiB for an array",
        "botocore.exceptions.NoCredentialsError: Unable to locate credentials",
        "RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "2026-11-20T10:00:00.1Z container oom 0123456789abcdef (image=train:7, name=rank-7)",
    ),
    "policy": (
        "slurmstepd: error: *** STEP 7.0 ON n CANCELLED AT 2026-11-20T10:00 DUE TO TIME LIMIT ***",
        "=>> PBS: job killed: walltime 7205 exceeded limit 7200",
        "TERM_RUNLIMIT: job killed after reaching LSF run time limit.",
        "Warning  Evicted  2s  kubelet  The node was low on resource: memory.",
        "Warning  FailedScheduling  2s  scheduler  0/9 nodes are available: 9 Insufficient cpu.",
        "INFO:agent: received a spot interruption notice", "lame workers found: worker 7",
        '{"level": "warn", "message": "Spot interruption payload received: {terminate}"}',
        "TERM_ADMIN: job killed by root or LSF administrator.",
        "I1120 10:00:00.1 7 dump.go:9] event for w-7: {kubelet n1} Evicted: The node was low on "
        "resource: memory.",
        "salloc: Job allocation 81 has been revoked.",
    ),
}


@pytest.mark.parametrize(
    ("expected", "line"), [(who, line) for who, lines in VENDORS.items() for line in lines])
def test_a_last_line_alone_says_whose_it_is(expected: str, line: str) -> None:
    assert culprit(f"step 1 loss 2.0\n{line}\n") == expected


@pytest.mark.parametrize("line", [
    "[E ProcessGroup.cpp:5] To avoid data inconsistency, we are taking the entire process down.",
    "RuntimeError: [pair.cc:5] Connection closed by peer [10.0.0.7]:81",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
    "E1120 10:00:00.1 7 coordination_service.cc:9] /job:w/task:7 heartbeat timeout. This indicates "
    "that the remote task has failed, got preempted, or crashed unexpectedly.",
    "worker-0   0/1   CrashLoopBackOff   8   2m",
    "srun: error: n1: task 7: Exited with exit code 1",
    "Process 7 exited with code 137",
    "[2026-11-20 10:00:00,000 E 7 7] gcs_rpc_client.h:9: Failed to connect to GCS within 9 s.",
    "RuntimeError: Engine core initialization failed. See root cause above.",
    "[core_client.py:9] Engine core proc EngineCore_DP7 died unexpectedly, shutting down client.",
    "RuntimeError: [unbound_buffer.cc:9] Timed out waiting 9000ms for recv operation to complete",
    "RuntimeError: unable to open shared memory object </torch_7_8> in read-write mode",
])
def test_a_consequence_is_told_and_blames_nobody(line: str) -> None:
    found = diagnose(line + "\n")
    assert found.root is None
    assert "nothing known" not in found.hint


HEALTHY = (
    "INFO loader: errors=0 failed=0 retries=0 timeouts=0",
    "{'nccl_timeout': 1800, 'on_error': 'abort', 'max_failures': 3, 'kill_timeout': 30}",
    "WARNING retrying request (1/5): HTTPSConnectionPool(host='h'): Read timed out. succeeded",
    "UserWarning: torch.cross without dim is deprecated and will fail in a later release",
    "INFO Unable to initialize backend 'tpu': NOT_FOUND",
    "gpu1:7:8 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so).",
    "gpu1:7:8 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 0.",
    "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
    "OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
    "iteration 7/ 100 | loss scale: 1.0 | grad norm: 0.2 | number of nan iterations:   0 |",
    "Failed to import apex, falling back to the native optimizer",
    "Setting up watchdog timeout of 600 s; kill switch armed",
    "[rank0]:W1120 10:00:00.1 7 a.py:9] Detected no CUDA graph; will be ignored",
    "train: 100 images, 0 corrupt", "validation error: 0.031", "word error rate 4.1",
    "Traceback logging is on", "abort_on_nan=True skip_corrupt=False preemptible=True",
    "Saved checkpoint; quota use 31 %, 9 GB left on device", "signal handlers installed",
    "Resuming after preemption: step 9", "WARNING: no checkpoint was found, training from scratch",
    "0 errors, 0 warnings", "eval: exact match 0.4, not found 12", "dropout=0.1 kill_prob=0",
    "nvidia-smi: GPU 0: ECC Errors: 0 uncorrectable, 3 correctable",
    "            SRAM Uncorrectable        : 0", "ibstat: LinkUp, link down counter 0, errors 0",
    "cuda.is_available() = False; no CUDA GPUs are available, using CPU",
    "spot=True on_preempt=checkpoint  # an instance may be preempted at any time",
    "Estimated device memory 30 GB of 40 GB; will not run out of memory",
    "best val loss: inf", "class_weights: [1.0, nan_to_num, inf]", "kill_after=30 oom_score=0",
    "find: '/proc/tty/driver': Permission denied", "Process 123 finished with exit code 0",
    "W tensorflow/bfc_allocator.cc:9] Allocator ran out of memory; this is not a failure",
    "[W socket.cpp:6] [c10d] The server socket has failed to bind to [::]:29500 (errno: 97 - x).",
    "EarlyStopping: monitored metric did not improve; signaling Trainer to stop.",
    "killed old tensorboard; started new", "checkpoint not found, starting from scratch",
    "Timeout: 1800", "Error: 0.031", "Exit: 0", "throttled = False; throttle: none",
    "Removing stale file handle cache entry", "Checking disk quota: used 10 of 100 GB",
    "model has 0 missing keys; no corrupt shards", "pynvml not found; GPU stats disabled",
    "Failed to load image Python extension: b.so: cannot open shared object file: No such file",
    "ldconfig: Warning: ignoring a file that cannot be opened: /etc/a: No such file or directory",
    "DEBUG urllib3.connectionpool: https://h:443 \"HEAD /a HTTP/1.1\" 404 0",
    "Skipped 12 corrupt images; dataset has 10000 samples", "Warning:  a.so: undefined symbol: f",
    "Corrupt JPEG data: bad Huffman code", "libpng warning: iCCP: known incorrect sRGB profile",
    " 9%|#   | 9/99 [00:09<00:90]Premature end of JPEG file", "[info] worker: timeout failed once",
    "[h264 @ 0x7f0] error while decoding MB 7 9, bytestream -5",
    "libtpu.so already in use by another process. Not attempting to load libtpu.so here.",
    "[W socket.cpp:9] [c10d] The IPv4 network addresses of (n1, 81) cannot be retrieved (gai "
    "error: -2 - Name or service not known).",
    '{"severity": "INFO", "message": "connection timed out, next endpoint"}',
    "libfabric:81:1732000000::core:core:fi_getinfo():9<warn> No data available",
    "libfabric:81:1732000000::efa:fabric:x():9<warn> Function not implemented",
    "libfabric:81:1732000000::efa:fabric:x():9<info> Connection timed out, trying the next",
    "Lower the batch size to avoid CUDA out of memory errors on small devices",
    "I1120 10:00:00.1 7 request.go:9] Waited for 1.0s due to client-side throttling, not priority",
    "slurmstepd: error: xcgroup_instantiate: unable to create cgroup '/a/uid_7' : Cannot allocate "
    "memory",
    "[ 81.5] mce: [Hardware Error]: Machine check events logged",
    "Transaction: Memory read error MemCtrl:  Corrected read error bank: 0x1",
    "pcieport 0000:00:07.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer",
    "Tolerations:  node.kubernetes.io/not-ready:NoExecute op=Exists for 300s",
)


@pytest.mark.parametrize("line", HEALTHY)
def test_a_healthy_line_is_never_blamed(line: str) -> None:
    assert diagnose(line + "\n").root is None
    assert diagnose("\n".join(HEALTHY) + "\n").root is None


def test_a_launchers_summary_is_not_the_errors_next_line() -> None:
    failed = classify_cases.traceback("ModuleNotFoundError: No module named 'apex'")
    summary = ("ERROR:torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) "
               "local_rank: 0 (pid: 7) of binary: /usr/bin/python\n")
    found = diagnose(failed + summary).root
    assert found is not None and found.signature == "import_error"


def test_what_nccl_calls_its_last_error_is_what_ended_it() -> None:
    text = ("ncclSystemError: System call (e.g. socket, malloc) failed.\nLast error:\n"
            "socketStartConnect: Connect to 10.0.0.7<81> failed : Connection refused\n")
    assert culprit(text) == "network"


def test_a_retried_error_is_handled_and_one_that_gives_up_is_not() -> None:
    failed = "ERROR fetch: HTTPSConnectionPool(host='h', port=443): Read timed out.\n"
    assert culprit(failed) == "network"
    assert culprit(failed + "Trying to resume download...\n") == ""
    assert culprit(failed.replace("timed out.", "timed out, retry in 1s")) == ""
    assert culprit("ERROR giving up after 5 attempts, retry limit: " + failed) == "network"


def test_steps_after_an_error_show_that_it_was_handled() -> None:
    failed = "ERROR cannot identify image file 'a.jpg'\n"
    assert culprit(failed) == "data"
    assert culprit(failed + classify_cases.steps(1, 9, 0)) == ""


def test_events_after_an_error_show_that_it_went_well() -> None:
    waited = "Warning  FailedScheduling  9s  s  0/8 nodes are available: 8 Insufficient cpu.\n"
    assert culprit(waited) == "policy"
    assert culprit(waited + "Normal  Scheduled  1s  s  Successfully assigned a/b to n1\n") == ""


def test_a_program_that_says_that_all_went_well_had_no_error() -> None:
    probed = "gpu1:7:8 [0] nvmlwrap.cc:9 NCCL WARN Failed to open libcuda.so\n"
    table = "#  size  time  busbw  error\n   8  11.2  0.00  1e-07\n"
    assert culprit(probed + table) == "infra"
    assert culprit(probed + table + "# Out of bounds values : 0 OK\n") == ""
    assert culprit(probed + table + "# Out of bounds values : 9 FAILED\n") == "infra"
    ended = "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert culprit(ended + "# Out of bounds values : 0 OK\n") == "infra"


def test_an_xid_that_names_nobody_is_told_and_blames_no_node() -> None:
    for number in (13, 31, 43, 69, 109):
        line = f"NVRM: Xid (PCI:0000:07:00): {number}, pid=7, name=python, errorString A TIMEOUT\n"
        found = diagnose(line)
        assert found.root is None and found.hint.startswith("a GPU error that the driver counts")


def test_a_loss_that_stays_no_number_is_the_datas() -> None:
    assert culprit("step 1 loss: nan\n") == ""
    assert culprit("step 1 loss: nan\nstep 2 loss: nan\n") == "data"
    assert culprit("step 1 loss: nan\nstep 2 loss: nan\nstep 3 loss: 2.0\n") == ""


def test_what_is_known_by_family_alone_says_so_and_yields() -> None:
    root = diagnose("OSError: [Errno 116] Stale file handle: '/a'\n").root
    assert root is not None and root.family
    both = diagnose("nfs: server s not responding\n", classify_cases.traceback("KeyError: 'x'"))
    assert both.root is not None and (both.root.signature, both.root.family) == ("key_or_type",
                                                                                False)
    row = logroot.as_json(both, ("a", "b"))["matches"]
    assert {one["known_by"] for one in row} == {"signature", "family"}  # type: ignore[attr-defined]


def test_an_error_that_no_rule_knows_is_told() -> None:
    found = diagnose("E1120 10:00:00.1 7 frobnicator.cc:9] the flux is inverted\n")
    assert found.root is None
    assert found.hint == ("an error that no rule knows; the last one: "
                          "E1120 10:00:00.1 7 frobnicator.cc:9] the flux is inverted")
    assert diagnose("all is well\n").hint.startswith("nothing known")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ERROR Read timed out. Trying to resume download\n", "only errors that were handled"),
        ("W1120 10:00:00.1 7 a.cc:9] EXT4-fs error (device a)\n", "no error, but a warning"),
        ('  File "/lib/torch/distributed/x.py", line 7, in f\n    return g(\n',
         "a traceback without its end"),
    ],
)
def test_what_nobody_is_blamed_for_is_told(text: str, said: str) -> None:
    found = diagnose(text)
    assert found.root is None
    assert found.hint.startswith(said)


def test_the_source_line_of_a_cut_traceback_says_what_it_raises() -> None:
    frame = 'Traceback (most recent call last):\n  File "a.py", line 7, in f\n'
    assert culprit(frame + "    raise UnpicklingError(\n") == "data"
    assert culprit(frame + "    raise ChildFailedError(\n") == ""
    assert culprit("    raise UnpicklingError(\n") == ""


# ----------------------------------------------------------------------------- what must not matter


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([line for lines in VENDORS.values() for line in lines]),
       st.lists(st.sampled_from(HEALTHY), max_size=6),
       st.lists(st.sampled_from(HEALTHY), max_size=2))
def test_healthy_lines_around_change_nothing(
    line: str, before: list[str], after: list[str]
) -> None:
    after = [one for one in after if not forms.GOES_ON.search(one)  # those say it was handled
             and not ends_well(f"\n{one}\n".encode(), 0)
             and not any(passed(one.encode(), 0, len(one.encode())))]
    assert culprit("\n".join([*before, line, *after]) + "\n") == culprit(line + "\n")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([lines[0] for lines in VENDORS.values()]), min_size=1, max_size=3),
       st.permutations(range(4)))
def test_the_order_of_the_ranks_files_changes_nothing(lines: list[str], order: list[int]) -> None:
    clocked = [f"2026-11-20 10:00:{9 * n:02d} {line}\n" for n, line in enumerate(lines)]
    texts = (clocked + ["step 1 loss 2.0\n"] * 4)[:4]
    root = diagnose(*texts).root
    turned = diagnose(*(texts[n] for n in order)).root
    assert (root.text if root else "") == (turned.text if turned else "")


# ----------------------------------------------------------------------------- cost


def _repeats(tree: Any, inside: int = 0) -> int:
    """The deepest nesting of repetitions without a bound."""
    deepest = inside
    for op, value in tree:
        if str(op) in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, below = value
            deepest = max(deepest, _repeats(below, inside + (most > 1000)))
        elif str(op) == "SUBPATTERN":
            deepest = max(deepest, _repeats(value[3], inside))
        elif str(op) == "BRANCH":
            deepest = max(deepest, *(_repeats(one, inside) for one in value[1]))
        elif str(op) in ("ASSERT", "ASSERT_NOT"):
            deepest = max(deepest, _repeats(value[1], inside))
    return deepest


def test_no_pattern_repeats_what_repeats() -> None:
    patterns = [row.get(key, "") for row in ROWS for key in ("pattern", "until")]
    patterns += [one.pattern for one in vars(forms).values() if isinstance(one, re.Pattern)]
    for pattern in patterns:
        assert _repeats(re._parser.parse(pattern)) <= 1, pattern  # type: ignore[attr-defined]


def test_long_lines_cost_a_bounded_number_of_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    by_text = known.Families.by_text

    def counted(self: known.Families, text: str, *more: bool) -> known.Family | None:
        looked.append(min(len(text), known.TEXT_MAX))
        return by_text(self, text, *more)

    monkeypatch.setattr(known.Families, "by_text", counted)
    pieces = ("error " * 11_000, "failed: " + "a" * 65_000, "E" * 65_000 + "Error: x",
              "[" * 65_000, "(" * 32_000 + ")" * 32_000, "loss: nan " * 6_500, "| " * 32_000,
              "A." * 32_000 + "Error", "timed out " * 6_500, "=" * 65_000 + " Error: failed")
    text = "\n".join(pieces * 40) + "\n"
    diagnose(text)
    assert sum(looked) <= 3 * unlisted.BUDGET_CHARS
    short = "ERROR: nothing here is known 7\n" * 200_000
    looked.clear()
    diagnose(short)
    assert len(looked) <= 3 * unlisted.LINES_MAX


# ----------------------------------------------------------------------------- the score itself


@pytest.mark.parametrize(
    ("role", "expected", "got", "useful", "is_right"),
    [
        ("root", "user", "user", True, True), ("root", "user", "none", True, False),
        ("root", "unknown", "none", True, True), ("root", "unknown", "none", False, False),
        ("root", "unknown", "user", True, False), ("cascade", "unknown", "none", True, True),
        ("cascade", "user", "user", True, False), ("cascade", "unknown", "none", False, False),
        ("harmless", "none", "none", False, True), ("harmless", "none", "unknown", True, False),
    ],
)
def test_what_counts_as_right(
    role: str, expected: str, got: str, useful: bool, is_right: bool
) -> None:
    assert classify_outside.right(role, expected, got, useful) is is_right
