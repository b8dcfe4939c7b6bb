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
GOOD = {
    "dcgm_1": ("dcgmi", says(dcgm())), "nccl_tests": ("all_reduce_perf", says(
        NCCL.format(wrong=0, bounds="0 OK"))),
    "nccom_test": ("nccom-test", NCCOM.format(REPORT)), "rvs": ("rvs", says(RVS.format("TRUE"))),
}
FAILING = {
    "dcgm_1": ("dcgmi", says(dcgm("Fail"), 226), "memory of GPU 3: uncorrectable error in bank 4"),
    "nccl_tests": ("all_reduce_perf", says(NCCL.format(wrong=7, bounds="7 FAILED"), 1),
                   "all_reduce: 7 elements are wrong"),
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
    assert "no answer within 1 s; last it said: " + program in made(tmp_path, name, 1.0).reason


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_is_critical_and_says_what(
    name: str, tmp_path: Path, install: Install
) -> None:
    program, script, reason = FAILING[name]
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
    install("neuron-ls", says('[{"nc_count": 2}]'))
    install("nccom-test", GOOD["nccom_test"][1])
    assert [one.value for one in made(tmp_path, "nccom_test").measures] == [19.9e9, 121.8e9]


def test_the_collective_tests_take_nccl_tests_all_reduce(install: Install) -> None:
    collectives = pytest.importorskip("holdfast.agent.checks.collectives")
    ours = {"said": "well", "critical": [], "table": [], "measures": [
        {"name": "all_reduce", "value": 1.0}, {"name": "broadcast", "value": 2.0}]}
    install("all_reduce_perf", says("no GPU here", 1))
    assert collectives._with_nccl_tests(ours) == ours
    install("all_reduce_perf", GOOD["nccl_tests"][1])
    found = collectives._with_nccl_tests(ours)
    assert [one["name"] for one in found["measures"]] == ["broadcast", "all_reduce", "all_reduce"]
    assert found["said"].endswith("all_reduce by all_reduce_perf")


# --------------------------------------------------------------------------------------- EFA

PINGPONG = """case "$*" in
*-B*) touch "$0.serves"; exec sleep 60;;
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
