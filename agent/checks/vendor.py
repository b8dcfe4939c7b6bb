"""The vendors' own tests, run when installed: dcgmi, nccl-tests, nccom-test, rvs, fi_pingpong.

Owns their command lines and what their output comes to.  Each is called in a check's child, which
ends it at its deadline; one that is not installed is `unknown`.  The forms of the output are those
of the tools' documentation: `dcgmi diag --json` of DCGM 3 and 4, nccl-tests' rows, nccom-test's
JSON report, rvs' [RESULT] lines, fi_pingpong's eight columns.  Standard library of Python 3.9
alone: the collective tests beside torch use nccl-tests as well.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import isolate

Answer = dict[str, Any]  # the fields of agent/core/checks/verdict.py's Answer
OUTPUT_MAX_BYTES = 8 << 20
PLACES = ("/usr/local/bin", "/usr/bin", "/opt/nccl-tests/build", "/opt/aws/neuron/bin",
          "/opt/rocm/bin", "/opt/amazon/efa/bin")
# Ours of each of nccl-tests' programs.
NCCL_TESTS = {"all_reduce_perf": "all_reduce", "all_gather_perf": "all_gather",
              "reduce_scatter_perf": "reduce_scatter", "alltoall_perf": "all_to_all",
              "broadcast_perf": "broadcast", "sendrecv_perf": "sendrecv"}
SIZES = tuple(1 << power for power in range(20, 31, 2))  # 1 MB to 1 GB
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
NCCOM_TESTS = {"allr": "all_reduce", "allg": "all_gather", "redsct": "reduce_scatter",
               "alltoall": "all_to_all", "sendrecv": "sendrecv"}
NCCOM_FAILED = re.compile(r"\d+ errors? found - test failed.*")
NCCOM_ROW = "%11s %12s %8s %9s %7s %7s"
NCCOM_HEAD = ("#" + (NCCOM_ROW % ("size", "count", "type", "time", "algbw", "busbw"))[1:],
              "#" + (NCCOM_ROW % ("(B)", "(elements)", "", "(us)", "(GB/s)", "(GB/s)"))[1:])
GIB = 1 << 30
VISIBLE_CORES, NUMBER_OF_CORES = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
CORES_MAX = 1024
EFA_BYTES, EFA_S = 1 << 20, 12.0
PINGPONG_ROW = re.compile(r"\d+(\.\d+)?")  # MB/sec, of its eight columns
RVS_CONF = "/opt/rocm/share/rocm-validation-suite/conf"
RVS_RESULT = re.compile(r"\[RESULT\].*?\b(?:met|pass)\s*:\s*(TRUE|FALSE)", re.I)


def program(name: str) -> str | None:
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *PLACES]))


def _said(*command: str) -> tuple[str, str]:
    """What a tool prints, and why that is to be doubted: "" for nothing."""
    found = program(command[0])
    if found is None:
        return "", "%s is not installed" % command[0]
    print(" ".join(command), flush=True)  # the last words of a check that hangs
    with subprocess.Popen([found, *command[1:]], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          pass_fds=isolate.HELD) as tool:
        assert tool.stdout is not None
        output = tool.stdout.read(OUTPUT_MAX_BYTES)
        if tool.stdout.read(1):
            tool.kill()
        status = tool.wait()
    text = output.decode("utf-8", "replace")
    last = next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "nothing")
    return text, "%s ended with status %d: %s" % (command[0], status, last[:200]) if status else ""


# -------------------------------------------------------------------------------- dcgmi diag


def dcgm_1(_: object) -> Answer:
    return dcgm(1)


def dcgm_2(_: object) -> Answer:
    return dcgm(2)


def dcgm_3(_: object) -> Answer:
    return dcgm(3)


def dcgm_4(_: object) -> Answer:
    return dcgm(4)


def dcgm(level: int) -> Answer:
    text, problem = _said("dcgmi", "diag", "-r", str(level), "--json")
    found = dcgm_answer(text)
    # Its status is not 0 for a failed test, which its report names; without one that is all.
    return found if found is not None else {
        "unknown": [problem or "dcgmi's output has no report of a diagnostic"]}


def dcgm_answer(text: str) -> Answer | None:
    """None where there is no report in it."""
    try:
        whole = json.loads(text[text.index("{"):text.rindex("}") + 1])
        report = whole.get("DCGM Diagnostic") or whole["DCGM GPU Diagnostic"]
        rows = [(str(test["name"]), result) for category in report["test_categories"]
                for test in category["tests"] for result in test["results"]]
        by: dict[str, list[str]] = {"pass": [], "fail": [], "warn": [], "skip": []}
        for name, result in rows:
            status = str(result["status"]).lower()
            if status not in by:
                return {"unknown": ["%s ended as %r" % (name, result["status"])]}
            by[status].append(_dcgm_words(name, result))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    if not by["pass"] and not by["fail"] and not by["warn"]:
        return {"unknown": ["no test was made: %s" % ("; ".join(by["skip"]) or "none is named")]}
    return {"said": "%d passed, %d skipped" % (len(by["pass"]), len(by["skip"])),
            "critical": by["fail"], "warning": by["warn"]}


def _dcgm_words(name: str, result: dict[str, Any]) -> str:
    of = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id", "")))
    who = "%s %s" % (result.get("entity_group", "GPU"), of) if of != "" else ""
    raw = result.get("warnings") or result.get("info") or ""
    said = raw if isinstance(raw, list) else [raw]
    whys = [str(one.get("warning", one) if isinstance(one, dict) else one) for one in said if one]
    return ": ".join(part for part in ("%s of %s" % (name, who) if who else name,
                                       "; ".join(whys)[:300]) if part)


# -------------------------------------------------------------------------------- nccl-tests


def nccl_tests(facts: object, wanted: Sequence[str] = tuple(NCCL_TESTS),
               sizes: Sequence[int] = (), devices: int = 0) -> Answer:
    """Those of nccl-tests that are installed, over all of this node's GPUs that may be used."""
    sizes = sizes or _sizes(facts)
    devices = devices or nvidia_devices(os.environ)
    named = [name for name in wanted if program(name)]
    if not named:
        return {"unknown": ["nccl-tests are not installed: no all_reduce_perf on the PATH"]}
    whole: Answer = {"critical": [], "unknown": [], "measures": [], "table": []}
    for name, sweep in ((name, sweep) for name in named for sweep in sweeps(sizes)):
        text, problem = _said(name, *sweep, "-g", str(devices))
        found = nccl_answer(NCCL_TESTS[name], text, problem)
        for key, value in found.items():
            whole[key] = whole.get(key, []) + value
    whole["said"] = "%s over %d devices" % (", ".join(named), devices)
    return whole


def _sizes(facts: object) -> Sequence[int]:
    """Those that were asked for, else the usual ones."""
    return tuple(getattr(facts, "sizes", ())) or SIZES


def nvidia_devices(environ: Mapping[str, str], files: str = "/dev/nvidia[0-9]*") -> int:
    """How many GPUs a process with this environment may use; 1 where that cannot be told."""
    count = len(glob.glob(files))
    visible = environ.get(VISIBLE_GPUS)
    if visible is not None:
        named = [one.strip() for one in visible.split(",")]
        # CUDA looks at none behind the first that is no device.
        there = list(itertools.takewhile(lambda one: one and not one.startswith("-"), named))
        count = min(len(there), count or len(there))
    return count or 1


def sweeps(sizes: Sequence[int]) -> list[list[str]]:
    """The options of one run for sizes of which each is as many times the one before, else those
    of a run for each size."""
    first, *rest = sorted(set(sizes))
    factor = rest[0] // first if rest else 2
    if [first * factor ** power for power in range(len(rest) + 1)] == [first, *rest]:
        return [["-b", str(first), "-e", str(rest[-1] if rest else first), "-f", str(factor)]]
    return [["-b", str(size), "-e", str(size), "-f", "2"] for size in (first, *rest)]


def nccl_answer(operation: str, text: str, problem: str = "") -> Answer:
    """Rows: size, count, type, redop, root, then time, algbw, busbw and #wrong, out of place and
    in place.  Bandwidths are those out of place, in 1e9 bytes a second."""
    measures, wrong, lines = [], 0, []
    for line in text.split("\n"):
        words = line.split()
        if line.startswith("#") or len(words) < 9 or not words[0].isdecimal():
            continue
        lines.append(line[:100])
        tail = words[-8:] if len(words) >= 11 else words[-4:]
        try:
            busbw = float(tail[2])
            wrong += sum(int(float(one)) for one in tail[3::4] if one != "N/A")
        except ValueError:
            return {"unknown": ["%s: a row cannot be read: %s" % (operation, line.strip()[:120])]}
        measures.append({"name": operation, "value": busbw * 1e9, "unit": "B/s",
                         "subject": "%s bytes" % words[0]})
    failed = wrong or re.search(r"Out of bounds values\s*:\s*\d+\s+FAILED", text)
    return {"measures": measures, "table": ["# %s" % operation, *lines],
            "critical": ["%s: %d elements are wrong" % (operation, wrong)] if failed else [],
            "unknown": [problem] if problem and not failed else [] if measures or failed else
            ["%s: no row of results" % operation]}


# -------------------------------------------------------------------------------- nccom-test


def nccom_test(facts: object, wanted: Sequence[str] = tuple(NCCOM_TESTS),
               sizes: Sequence[int] = ()) -> Answer:
    """Collectives over this node's Neuron cores, every result compared.  It compiles its graphs
    first, which takes minutes when cold and is no part of the times that it reports."""
    sizes = sizes or _sizes(facts)
    try:
        cores = len(neuron_cores(os.environ))
    except LookupError as error:
        return {"unknown": [str(error)]}
    whole: Answer = {"critical": [], "unknown": [], "measures": [], "table": []}
    made: list[str] = []
    older: list[str] = []
    for name, sweep in ((name, sweep) for name in wanted for sweep in sweeps(sizes)):
        with tempfile.TemporaryDirectory(prefix="holdfast-check-") as folder:
            report = os.path.join(folder, "report.json")
            text, problem = _said(
                "nccom-test", "-r", str(cores), *sweep, "-d", "fp32", "--check", "random",
                "--report-to-json-file", report, name)
            if made and "invalid choice" in text:  # an older one, which has not all of them
                older.append(name)
                continue
            try:
                with open(report, "rb") as file:
                    rows = file.read(OUTPUT_MAX_BYTES).decode("utf-8", "replace")
            except OSError:
                rows = ""
        found = nccom_answer(NCCOM_TESTS[name], rows, text, problem)
        for key, value in found.items():
            whole[key] += value
        made.append(name)
        if found["unknown"] and not found["measures"]:
            break  # whoever lacks the driver lacks it for the others as well
    whole["said"] = "%s over %d Neuron cores%s" % (
        ", ".join(dict.fromkeys(made)), cores,
        "; this nccom-test has no %s" % ", ".join(dict.fromkeys(older)) if older else "")
    return whole


def neuron_cores(environ: Mapping[str, str]) -> list[int]:
    """The cores that a process with this environment may use, as the Neuron runtime numbers them.
    Raises LookupError that says what is missing, or what is wrong with the environment."""
    listed, problem = _said("neuron-ls", "--json-output")
    try:
        count = sum(int(one["nc_count"]) for one in json.loads(listed))
    except (ValueError, LookupError, TypeError):
        count = 0
    visible, number = environ.get(VISIBLE_CORES, "").strip(), environ.get(NUMBER_OF_CORES, "")
    if visible:
        cores = cores_of(visible)
    elif number.isdecimal() and int(number) > 0:
        cores = list(range(int(number)))
    else:
        cores = list(range(count))
    if not cores:
        raise LookupError(problem or "neuron-ls lists no device")
    if count and max(cores) >= count:
        raise LookupError("%s=%s names core %d, and neuron-ls lists %d cores" % (
            VISIBLE_CORES if visible else NUMBER_OF_CORES, visible or number, max(cores), count))
    return cores


def cores_of(text: str) -> list[int]:
    """Of `3`, `0-3`, `0,2,4-7`.  Raises LookupError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or dash and not last.isdecimal():
            raise LookupError("%s=%s is no list of cores" % (VISIBLE_CORES, text[:60]))
        found += range(int(first), min(int(last or first), int(first) + CORES_MAX) + 1)
    return list(dict.fromkeys(found))[:CORES_MAX]


def nccom_answer(operation: str, report: str, text: str = "", problem: str = "") -> Answer:
    """`report`: the JSON file, "" where there is none.  A test that failed says so in its last
    line, whatever the report holds, and the line before it which size that was.  What the tool
    calls GB are 2^30 bytes: its guide has 32 MiB in 768 us as 40.69."""
    measures, lines, unknown = [], [], []
    try:
        for row in json.loads(report)["results"] if report else ():
            size, numbers = int(row["size(B)"]), (row.get("busbw(GB/s)"), row.get("algbw(GB/s)"))
            busbw, algbw = (one * GIB if isinstance(one, (int, float)) else None for one in numbers)
            took = next((row[key] for key in row if key.startswith("time")), None)
            lines.append(NCCOM_ROW % (size, row.get("count(elems)", "-"), row.get("type", "-"), *(
                "-" if one is None else "%.2f" % one for one in (
                    took, algbw and algbw / 1e9, busbw and busbw / 1e9))))
            if busbw is None:
                unknown.append("%s: no result at %d bytes" % (operation, size))
            else:
                measures.append({"name": operation, "value": busbw, "unit": "B/s",
                                 "subject": "%d bytes" % size})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        unknown.append("%s: nccom-test's report cannot be read: %s" % (operation, error))
    failed = NCCOM_FAILED.search(text)
    if failed:
        whys = [" ".join(line.split()) for line in text.split("\n") if "ailure" in line]
        said = "; ".join([failed[0].strip(), *whys])[:300]
        return {"measures": measures, "table": _nccom_table(operation, lines), "unknown": [],
                "critical": ["%s: nccom-test: %s" % (operation, said)]}
    if problem:
        unknown.insert(0, problem)
    if not measures and not unknown:
        unknown.append("nccom-test's report has no result" if report
                       else "nccom-test wrote no report")
    return {"measures": measures, "table": _nccom_table(operation, lines), "unknown": unknown,
            "critical": []}


def _nccom_table(operation: str, lines: list[str]) -> list[str]:
    return ["# %s" % operation, *NCCOM_HEAD, *lines] if lines else []


# --------------------------------------------------------------------------------------- rvs


def rvs(_: object) -> Answer:
    """AMD's stress test of matrix products, by the configuration of this model where there is."""
    models = sorted(glob.glob(os.path.join(RVS_CONF, "MI*", "gst_single.conf")))
    chosen = os.environ.get("RVS_CONF") or (models[0] if len(models) == 1 else
                                            os.path.join(RVS_CONF, "gst_single.conf"))
    text, problem = _said("rvs", "-c", chosen)
    return rvs_answer(text, problem)


def rvs_answer(text: str, problem: str = "") -> Answer:
    rows = [(found[1].upper(), line.strip()[:200]) for line in text.split("\n")
            for found in (RVS_RESULT.search(line),) if found]
    failed = [line for result, line in rows if result == "FALSE"]
    if failed or (rows and not problem):
        return {"said": "%d results are met" % len(rows), "critical": failed}
    return {"unknown": [problem or "rvs named no result"]}


# --------------------------------------------------------------------------------------- EFA


def efa_loopback(_: object) -> Answer:
    """Each EFA device to itself by libfabric's fi_pingpong, every byte compared.  Without shared
    memory in between the data takes the card's way."""
    names = efa_devices()
    if not names:
        return {"said": "no EFA device"}
    if program("fi_pingpong") is None:
        return {"unknown": ["fi_pingpong is not installed: no libfabric on the PATH"]}
    # Newer libfabric has a second fabric, which this tool cannot use.
    listed, _ = _said("fi_info", "-p", "efa", "-t", "FI_EP_RDM")
    fabric = ["-f", "efa"] if "efa-direct" in listed else []
    found: Answer = {"critical": [], "measures": [], "table": [],
                     "said": "%d devices, each to itself" % len(names)}
    for name in names:
        text, problem = _pingpong(name, fabric)
        rates = [float(row[-3]) for row in map(str.split, text.split("\n"))
                 if len(row) == 8 and PINGPONG_ROW.fullmatch(row[-3])]
        if problem or not rates:
            found["critical"].append("%s: %s" % (name, problem or "fi_pingpong named no result"))
        else:
            found["measures"].append({"name": "efa_loopback", "value": rates[-1] * 1e6,
                                      "unit": "B/s", "subject": name})
        found["table"] += ["# %s" % name, *text.split("\n")[:20]]
    return found


def efa_devices(root: str = "/sys/class/infiniband") -> list[str]:
    drivers = {one: os.path.realpath(os.path.join(one, "device/driver"))
               for one in glob.glob(os.path.join(root, "*"))}
    return sorted(os.path.basename(one) for one, driver in drivers.items()
                  if os.path.basename(driver) == "efa")


def _pingpong(name: str, fabric: list[str]) -> tuple[str, str]:
    """What the client prints, and why that is to be doubted.  The server is there when it is: what
    cannot connect yet is tried again."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    tool, environ = program("fi_pingpong"), {**os.environ, "FI_EFA_ENABLE_SHM_TRANSFER": "0"}
    assert tool is not None
    words = [tool, "-e", "rdm", "-p", "efa", *fabric, "-d", "%s-rdm" % name, "-c", "-I", "100",
             "-S", str(EFA_BYTES)]
    print(" ".join(words), flush=True)
    server = subprocess.Popen([*words, "-B", port], env=environ, stdin=subprocess.DEVNULL,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              pass_fds=isolate.HELD)
    limit_s = time.monotonic() + EFA_S
    try:
        while True:
            left_s = max(0.1, limit_s - time.monotonic())
            done = subprocess.run([*words, "-P", port, "localhost"], env=environ, timeout=left_s,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, check=False,
                                  pass_fds=isolate.HELD)
            text = done.stdout[:OUTPUT_MAX_BYTES].decode("utf-8", "replace")
            if done.returncode == 0:
                return text, ""
            if server.poll() is not None or time.monotonic() > limit_s - EFA_S / 2:
                return text, "fi_pingpong ended with status %d: %s" % (
                    done.returncode, " ".join(text.split())[-200:] or "nothing")
            time.sleep(0.2)
    except subprocess.TimeoutExpired:
        return "", "no data came through within %g s" % EFA_S
    finally:
        server.kill()
        server.wait()
