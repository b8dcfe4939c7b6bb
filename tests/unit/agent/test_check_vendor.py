"""The vendors' tools, as stand-ins first on the PATH: good, failing, junk, hanging, absent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.checks import vendor
from holdfast.agent.checks.facts import Facts
from holdfast.agent.checks.runner import Runner, Wanted
from holdfast.agent.checks.table import BY_NAME
from holdfast.agent.core.checks.verdict import CRITICAL, OK, UNKNOWN, WARNING, CheckVerdict

Install = Callable[[str, str], None]
NCCL = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 4194304
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
     1048576  262144  float  sum  -1  20.00   52.43   52.43        0  21.00   49.93   49.93    0
     4194304 1048576  float  sum  -1  40.00  104.86  104.86  {wrong}  40.00  104.86  104.86  N/A
# Out of bounds values : {bounds}
"""
RVS = ("[RESULT] [ 497544.637462] [action_1] gst 50599 Gflops 19600.5 Target stress: 19000 "
       "met: {}")


def dcgm(status: str = "Pass", old: bool = False) -> str:
    """As `dcgmi diag --json` of DCGM 4 has it, or of an older one."""
    result: dict[str, Any] = {"entity_group": "GPU", "entity_id": 3, "status": status}
    if status != "Pass":
        result["warnings"] = [{"error_id": 11, "warning": "uncorrectable error in bank 4"}]
    if old:
        result = {"gpu_ids": "3", "status": status.upper(), "warnings": "an error in bank 4"}
    category = {"category": "Hardware", "tests": [{"name": "memory", "results": [result]}]}
    key = "DCGM GPU Diagnostic" if old else "DCGM Diagnostic"
    return json.dumps({key: {"test_categories": [category]}})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(vendor, "PLACES", ())

    def put(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return put


def says(text: str, status: int = 0) -> str:
    return f"cat <<'END'\n{text}\nEND\nexit {status}"


def made(tmp_path: Path, name: str, deadline_s: float = 30.0) -> CheckVerdict:
    check = BY_NAME[name]._replace(deadline_s=deadline_s)
    (found,) = Runner(Wanted([check], Facts("a"), tmp_path / "checks", "boot", True)).run()
    return found


REPORT = json.dumps({"results": [{"size(B)": 1048576, "busbw(GB/s)": 19.9},
                                 {"size(B)": 1073741824, "busbw(GB/s)": 121.8}]})
NCCOM = """for word; do
    [ "$last" = --report-to-json-file ] && echo '{}' > "$word"
    last=$word
done"""
# As the tool's guide has it, behind a report that it wrote all the same.
NCCOM_BAD = NCCOM.format(REPORT) + """
if [ "$last" = redsct ]; then
    echo '    33554432    Failure running neuron-bench - log file /tmp/nccom_test_log_7pq.log'
    echo '1 errors found - test failed'
    exit {status}
fi"""
GOOD = {
    "dcgm_1": ("dcgmi", says(dcgm())), "nccl_tests": ("all_reduce_perf", says(
        NCCL.format(wrong=0, bounds="0 OK"))),
    "nccom_test": ("nccom-test", NCCOM.format(REPORT)), "rvs": ("rvs", says(RVS.format("TRUE"))),
}
FAILING = {
    "dcgm_1": ("dcgmi", says(dcgm("Fail"), 226), "memory of GPU 3: uncorrectable error in bank 4"),
    "nccl_tests": ("all_reduce_perf", says(NCCL.format(wrong=7, bounds="7 FAILED"), 1),
                   "all_reduce: 7 elements are wrong"),
    "nccom_test": ("nccom-test", NCCOM_BAD.replace("{status}", "1"),
                   "reduce_scatter: nccom-test: 1 errors found - test failed; 33554432 Failure"),
    "rvs": ("rvs", says(RVS.format("FALSE")), "met: FALSE"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_one_a_junk_one_a_broken_one_one_that_hangs_and_none(
    name: str, tmp_path: Path, install: Install
) -> None:
    program, script = GOOD[name]
    assert made(tmp_path, name).status == UNKNOWN  # none is installed
    assert "not installed" in made(tmp_path, name).reason
    install("neuron-ls", says('[{"neuron_device": 0, "nc_count": 2}]'))
    install(program, script)
    good = made(tmp_path, name)
    assert good.status == OK, good
    for broken in (says("\x01 {nothing of any use"), says("cannot reach the host engine", 3),
                   says("[" * 5000)):
        install(program, broken)
        found = made(tmp_path, name)
        assert found.status == UNKNOWN and found.todo, (broken[:40], found)
    install(program, "sleep 1000")
    assert "no answer within 4 s; last it said: " + program in made(tmp_path, name, 4.0).reason


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_is_critical_and_says_what(
    name: str, tmp_path: Path, install: Install
) -> None:
    program, script, reason = FAILING[name]
    install("neuron-ls", says('[{"neuron_device": 0, "nc_count": 2}]'))
    install(program, script)
    found = made(tmp_path, name)
    assert found.status == CRITICAL and reason in found.reason


def test_both_forms_of_dcgms_report_and_what_it_skips(tmp_path: Path, install: Install) -> None:
    for old in (False, True):
        assert vendor.dcgm_answer("Successfully ran.\n" + dcgm(old=old)) == {
            "said": "1 passed, 0 skipped", "critical": [], "warning": []}
        for status, key in (("Fail", "critical"), ("Warn", "warning")):
            (said,) = (vendor.dcgm_answer(dcgm(status, old)) or {})[key]
            assert said.startswith("memory of GPU 3: ") and said.endswith("error in bank 4")
    skipped = vendor.dcgm_answer(dcgm("Skip")) or {}
    assert "no test was made" in skipped["unknown"][0]
    install("dcgmi", says(dcgm("Warn")))
    assert made(tmp_path, "dcgm_1").status == WARNING


def test_bandwidths_are_nccl_tests_out_of_place(tmp_path: Path, install: Install) -> None:
    install("all_reduce_perf", GOOD["nccl_tests"][1])
    found = made(tmp_path, "nccl_tests")
    assert [(one.name, one.value, one.subject) for one in found.measures] == [
        ("all_reduce", 52.43e9, "1048576 bytes"), ("all_reduce", 104.86e9, "4194304 bytes")]


NODE = says('[{"nc_count": 2}]')


def test_every_operation_of_nccom_test_is_made_and_its_table_is_shown(
    tmp_path: Path, install: Install
) -> None:
    row = {"size(B)": 33554432, "count(elems)": 33554432, "type": "uint8", "time:avg(us)": 768.0,
           "algbw(GB/s)": 40.69, "busbw(GB/s)": 40.69}
    log = tmp_path / "words"
    install("neuron-ls", NODE)
    install("nccom-test", f'echo "$*" >> {log}\n' + NCCOM.format(json.dumps({"results": [row]})))
    found = made(tmp_path, "nccom_test")
    assert found.status == OK, found
    assert {one.name for one in found.measures} == set(BY_NAME["nccom_test"].measures)
    # 32 MiB in 768 us: what the tool calls GB are 2^30 bytes.
    assert all(abs(one.value / (33554432 / 768e-6) - 1) < 1e-3 for one in found.measures)
    assert found.table[0] == "# all_reduce" and found.table[1].split() == [
        "#", "size", "count", "type", "time", "algbw", "busbw"]
    assert found.table[3].split() == [
        "33554432", "33554432", "uint8", "768.00", "43.69", "43.69"]
    words = log.read_text().splitlines()
    assert [one.split()[-1] for one in words] == ["allr", "allg", "redsct", "alltoall", "sendrecv"]
    assert all("-r 2 -b 1048576 -e 1073741824 -f 4 -d fp32 --check random" in one for one in words)


def test_an_older_nccom_test_has_fewer_operations(tmp_path: Path, install: Install) -> None:
    install("neuron-ls", NODE)
    install("nccom-test", NCCOM.format(REPORT) + """
if [ "$last" = alltoall ]; then
    echo "error: argument op: invalid choice: 'alltoall' (choose from 'allr', 'allg')"; exit 2
fi""")
    found = made(tmp_path, "nccom_test")
    assert found.status == OK and "this nccom-test has no alltoall" in found.reason
    assert "sendrecv" in found.reason


@pytest.mark.parametrize(("script", "status", "reason"), [
    (NCCOM_BAD.replace("{status}", "0"), CRITICAL, "test failed"),  # its words count, too
    (NCCOM.format(REPORT) + "\nexit 3", UNKNOWN, "ended with status 3"),
    (NCCOM.format(json.dumps({"results": [{"size(B)": 8}, *json.loads(REPORT)["results"]]})),
     UNKNOWN, "all_reduce: no result at 8 bytes"),
    (NCCOM.format("[3]"), UNKNOWN, "report cannot be read"),
    (NCCOM.format('{"results": []}'), UNKNOWN, "has no result"),
    (says("Neuron DKMS Driver is not running!", 1), UNKNOWN, "Driver is not running"),
], ids=["failed", "status", "no number", "junk", "empty", "no driver"])
def test_what_nccom_test_says_and_what_it_reports_must_both_be_well(
    script: str, status: str, reason: str, tmp_path: Path, install: Install
) -> None:
    install("neuron-ls", NODE)
    install("nccom-test", script)
    found = made(tmp_path, "nccom_test")
    assert (found.status, reason in found.reason) == (status, True), found


def test_the_collective_tests_take_nccl_tests_all_reduce_of_the_same_sizes(
    tmp_path: Path, install: Install
) -> None:
    collectives = pytest.importorskip("holdfast.agent.checks.collectives")
    ours = {"said": "well", "critical": [], "table": [], "measures": [
        {"name": name, "value": 1.0, "subject": f"{size} bytes"}
        for name, size in (("all_reduce", 1 << 20), ("all_reduce", 1 << 36), ("broadcast", 8))]}
    sizes = [1 << 20, 1 << 22]
    install("all_reduce_perf", says("no GPU here", 1))
    assert collectives._with_nccl_tests(ours, sizes, 2) == ours
    log = tmp_path / "words"
    install("all_reduce_perf", f'echo "$*" >> {log}\n' + GOOD["nccl_tests"][1])
    found = collectives._with_nccl_tests(ours, sizes, 2)
    assert log.read_text() == "-b 1048576 -e 4194304 -f 4 -g 2\n"
    assert [(one["name"], one["subject"]) for one in found["measures"]] == [
        ("all_reduce", f"{1 << 36} bytes"), ("broadcast", "8 bytes"),
        ("all_reduce", "1048576 bytes"), ("all_reduce", "4194304 bytes")]
    assert found["said"].endswith("all_reduce by all_reduce_perf")


@pytest.mark.parametrize(("sizes", "runs"), [
    ((1 << 16, 1 << 20, 1 << 26), ["-b 65536 -e 65536 -f 2", "-b 1048576 -e 1048576 -f 2",
                                   "-b 67108864 -e 67108864 -f 2"]),
    ((1 << 28, 1 << 20, 1 << 24), ["-b 1048576 -e 268435456 -f 16"]),
    ((1 << 34,), ["-b 17179869184 -e 17179869184 -f 2"]),
    ((3, 3, 4), ["-b 3 -e 3 -f 2", "-b 4 -e 4 -f 2"]),
])
def test_sizes_that_are_asked_for_are_those_that_a_tool_is_given(
    sizes: tuple[int, ...], runs: list[str]
) -> None:
    assert [" ".join(one) for one in vendor.sweeps(sizes)] == runs


def test_the_vendors_checks_take_the_sizes_of_the_command(tmp_path: Path, install: Install) -> None:
    log = tmp_path / "words"
    for name, script in (("all_reduce_perf", GOOD["nccl_tests"][1]), ("neuron-ls", NODE),
                         ("nccom-test", NCCOM.format(REPORT))):
        install(name, f'echo "$*" >> {log}\n{script}')
    facts = Facts("a", sizes=(16 << 30,))
    vendor.nccl_tests(facts)
    vendor.nccom_test(facts, ("allr",))
    assert log.read_text().count("-b 17179869184 -e 17179869184") == 2


def test_only_devices_that_may_be_used_are_counted(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()

    def count(visible: str | None, files: str = "nvidia[0-9]*") -> int:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        return vendor.nvidia_devices(environ, f"{tmp_path}/{files}")

    assert [count(one) for one in (None, "0,1", "3", "GPU-8932f937, GPU-1", "0,1,-1,2")] == [
        8, 2, 1, 2, 2]
    assert (count("0,1", "none*"), count(None, "none*"), count("")) == (2, 1, 1)


# --------------------------------------------------------------------------------------- EFA

PINGPONG = """case "$*" in
*-B*) : > "$0.serves"; exec sleep 60;;
esac
[ -e "$0.serves" ] || exit 1
{client}"""
ROWS = """bytes   #sent   #ack     total       time     MB/sec    usec/xfer   Mxfers/sec
1m      100     =100     200m        0.03s   {rate}     150.00       0.01"""


@pytest.fixture
def efa(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two EFA devices and a card of another kind."""
    for name, driver in (("rdmap0s6", "efa"), ("rdmap1s6", "efa"), ("mlx5_0", "mlx5_core")):
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / "ib" / name / "device").mkdir(parents=True)
        (tmp_path / "ib" / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
    found = vendor.efa_devices(str(tmp_path / "ib"))
    assert found == ["rdmap0s6", "rdmap1s6"]
    monkeypatch.setattr(vendor, "efa_devices", lambda: found)


@pytest.mark.usefixtures("efa")
def test_each_efa_device_is_tested_with_itself(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "EFA_S", 3.0)
    assert "fi_pingpong is not installed" in made(tmp_path, "efa_loopback").reason
    install("fi_info", "echo '    fabric: efa-direct'")
    log = tmp_path / "words"
    client = f'echo "$*" >> {log}; {says(ROWS.format(rate="6990.51"))}'
    install("fi_pingpong", PINGPONG.format(client=client))
    found = made(tmp_path, "efa_loopback")
    assert found.status == OK, found
    assert {(one.subject, one.value) for one in found.measures} == {
        ("rdmap0s6", 6990.51e6), ("rdmap1s6", 6990.51e6)}
    assert "-f efa -d rdmap0s6-rdm -c" in log.read_text()
    install("fi_pingpong", PINGPONG.format(client="""
case "$*" in *rdmap1*) echo "fi_getinfo(): -61 (No data available)"; exit 61;; esac
""" + says(ROWS.format(rate="9.5"))))
    lost = made(tmp_path, "efa_loopback")
    assert lost.status == CRITICAL and "rdmap1s6: fi_pingpong ended with status 61" in lost.reason
    assert "rdmap0s6" not in lost.reason
    install("fi_pingpong", PINGPONG.format(client="exec sleep 60"))
    assert "no data came through" in made(tmp_path, "efa_loopback").reason


def test_without_an_efa_device_there_is_nothing_to_test(tmp_path: Path, install: Install) -> None:
    assert made(tmp_path, "efa_loopback").status == OK
