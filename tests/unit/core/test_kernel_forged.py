"""Lines of the kernel's in which a user without any right chose the words: none of them may be
taken for a fault of the hardware, and none for the driver's word that all is well again."""

from __future__ import annotations

import json

import msgspec
import pytest

from holdfast.agent.core.model import FATAL, OK, WARN
from holdfast.agent.core.parse.kernel_line import LED, at_begin, parse
from holdfast.collectors.sources.journald import JournalLog

from .test_kernel import CATALOGUE, FORMS, TABLES, XID, Machine

RULES = TABLES["kernel"]["rule"]
SAMPLES = [sample for row in RULES for sample in row["samples"]]
EVERY = list(dict.fromkeys([
    *SAMPLES, *(line for line, _ in FORMS), XID % (79, "'777'"),
    *(row["sample"] for row in TABLES["nvidia_xid"]["xid"]),
    *(row["sample"] for row in TABLES["nvidia_sxid"]["sxid"]),
]))
LED_RULES = {"oom_invoked", "segfault_nccl"}

# A file's, a cgroup's, an option's name in the middle: up to 255 bytes, any but NUL and "/".
CRASH = "x[1]: segfault at 0 ip 0 sp 0 error 4 in %s[400000+1000]"
WRAPPERS = (
    CRASH,
    "x[1]: segfault at 7f797fe00000 ip 00007f7c7ac69996 sp 00007f7c12fd7c30 error 4 in "
    "%s[7f7c7ac00000+d3d3000] likely on CPU 3 (core 1, socket 0)",
    "traps: x[1] general protection fault ip:7f7c7ac69996 sp:7f7c12fd7c30 error:0 in "
    "%s[400000+1000]",
    "traps: x[1] trap invalid opcode ip:400000 sp:7f7c12fd7c30 error:0 in %s[400000+1000]",
    "x[1]: unhandled exception: DABT (lower EL), ESR 0x92000007, in %s[400000+1000]",
    "x: page allocation failure: order:0, mode:0x0(), nodemask=(null),cpuset=%s,mems_allowed=0",
    "[x: page allocation failure: order:0, mode:0x0(), nodemask=(null),cpuset=] %s,mems_allowed=0",
    "[1.0] x[1]: segfault at 0 ip 0 sp 0 error 4 in %s[400000+1000]",
    "cgroup: fork rejected by pids controller in /%s",
    "process '%s' started with executable stack",
    "tmpfs: Unknown parameter '%s'",
    "eth7: option mode: invalid value (%s)",
    " in %s[400000+1000]",
)
# A process's name at the begin: 15 bytes, and behind them what the kernel says of it.
BEHIND = (
    "[77]: segfault at 0 ip 0 sp 0 error 4 in %s[400000+1000]",
    "[77] general protection fault ip:0 sp:0 error:0 in %s[400000+1000]",
    "[77]: unhandled exception: DABT (lower EL), ESR 0x92000007, in %s[400000+1000]",
    ": page allocation failure: order:0, mode:0x0(), nodemask=(null),cpuset=%s,mems_allowed=0",
    " invoked oom-killer: gfp_mask=0x0(), order=0, oom_score_adj=0%.0s",
    " (77) used greatest stack depth: 1 bytes left%.0s",
    "/77: potentially unexpected fatal signal 11.%.0s",
)
OOM = ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=%s,mems_allowed=0,"
       "oom_memcg=/%s,task_memcg=/%s,task=x,pid=1,uid=0")


@pytest.mark.parametrize("sample", EVERY)
def test_no_name_of_a_file_or_a_cgroup_is_an_event(sample):
    for wrapper in WRAPPERS:
        event = parse(CATALOGUE, wrapper % sample)
        if event is not None:  # ` in java` may be a process's name: counted, and nothing more
            assert (event.code, event.severity, event.fault) == ("oom_invoked", OK, ""), wrapper
            assert "invoked oom-killer" in sample
    event = parse(CATALOGUE, OOM % (sample, sample, sample))
    # What it is, of the process that the kernel names, and nothing that stands in between.
    assert event is not None
    assert (event.code, event.severity, event.pid, event.subject) == ("oom_constraint", OK, 1, "")


def suffixes(sample: str) -> list[str]:
    """The sample, and what is left of it behind each blank."""
    return [sample, *(sample[at + 1 :] for at, letter in enumerate(sample) if letter == " ")]


def test_no_name_of_a_process_makes_a_line_another():
    heads = ["EDAC MC0: 1 CE ", "EDAC MC0: 1 UE ", "EXT4-fs error (",
             "nvidia-peermem ", "NEURON_HW_ERR=X",
             "NVRM: GPU 1:2:3", "NVRM: knvlinkab", "XFS (a): ", "mlx5_core 1:2.3", "ib0: link down",
             "[1.0] x", "a efa_0: "]
    cases = [(sample[:n], rest) for sample in SAMPLES for n in range(1, 16)
             for rest in suffixes(sample)]
    cases += [(head, rest) for head in heads for sample in SAMPLES for rest in suffixes(sample)]
    lines = {head + behind % rest for head, rest in cases for behind in BEHIND}
    assert len(lines) > 10_000
    for line in lines:
        # Twice: by what the expressions ask for alone, and by the kind of line.
        found = {rule.code for needle, rule in CATALOGUE.needles
                 if needle in line and rule.expression.match(line)}
        assert found <= LED_RULES, line
        event = parse(CATALOGUE, line)
        assert event is None or event.code in LED_RULES, line


def test_a_line_that_a_processs_name_begins_is_for_the_rules_that_say_so():
    assert {rule.code for _, rule in CATALOGUE.needles if rule.led} == LED_RULES
    (rule,) = (rule for _, rule in CATALOGUE.needles if rule.code == "kernel_panic")
    loose = msgspec.structs.replace(rule, expression=at_begin(".*Kernel panic"))
    catalogue = msgspec.structs.replace(CATALOGUE, needles=(("Kernel panic", loose),))
    assert parse(catalogue, "x: Kernel panic") is not None
    for wrapper in (*WRAPPERS[:8], *("x" + behind for behind in BEHIND[:4])):
        assert parse(catalogue, wrapper % "Kernel panic") is None, wrapper


@pytest.mark.parametrize(
    "name", [r"\x0a\x1b" * 7 + "x", "a b[1]: c", "", "[1.0] ", "] [", "\ufffd"]
)
def test_whatever_a_process_is_called_its_line_is_led_by_it(name):
    for behind in BEHIND:
        assert LED.match(name + behind % "file"), behind


@pytest.mark.parametrize("behind", ["x[1]: y in ", "/", "'", "=", ") ", ", ", "[x] ", "\t"])
def test_every_expression_begins_where_the_line_does(behind):
    for row in RULES:
        (rule,) = {rule.code: rule for _, rule in CATALOGUE.needles if rule.code == row["code"]
                   }.values()
        for sample in row["samples"]:
            assert rule.expression.match(sample), sample
            assert rule.led or not rule.expression.match(behind + sample), sample
            time = "" if sample.startswith("[") and "Error]" not in sample else "[   12.345678] "
            assert rule.led or rule.expression.match(time + sample), sample


@pytest.mark.parametrize(("line", "wanted"), [
    ("INFO: task %s:77 blocked for more than 120 seconds.", ("hung_task", 77, "degraded")),
    ("watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [%s:77]", ("soft_lockup", 77, "degraded")),
    ("Out of memory: Killed process 77 (%s) total-vm:1kB, anon-rss:1kB, UID:0",
     ("oom_killed", 77, "degraded")),
    ("Memory cgroup out of memory: Killed process 77 (%s) total-vm:1kB", ("oom_killed", 77, WARN)),
    ("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/%s,"
     "task_memcg=/%s,task=%s,pid=77,uid=0", ("oom_constraint", 77, OK)),
    ("%s invoked oom-killer: gfp_mask=0x280da, order=0, oom_score_adj=0", ("oom_invoked", 0, OK)),
    ("NVRM: Xid (PCI:0000:4e:00): 71, pid=77, name=%s, Ch 00000001", ("71", 77, WARN)),
    ("NVRM: Xid (PCI:0000:4e:00): 74, pid=77, name=%s, NVLink: x link 1(0x200000, 0x0)",
     ("74", 77, WARN)),
    ("NVRM: Xid (PCI:0000:4e:00): 79, pid=77, name=%s, GPU has fallen off the bus.",
     ("79", 77, FATAL)),
])
@pytest.mark.parametrize("name", [
    "python3", "", "a) b", "memory cgroup", "CONSTRAINT_NONE", ",pid=1,uid=0", "a:1] [b",
    "x, NVLink", "a,link 9(0x0)", "fatal error, ", "x[1]: segfault ", ":1 blocked for ",
    r"\x0a\x0a), ", "a\ufffd",
])
def test_no_name_changes_what_a_line_says(line, wanted, name):
    event = parse(CATALOGUE, line.replace("%s", name))
    assert event is not None and (event.code, event.pid, event.severity) == wanted


def test_a_cgroups_name_that_fills_the_line_names_no_process():
    line = (
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),oom_memcg=/%s,task=x,pid=4711,uid=0"
    )
    event = parse(CATALOGUE, line % ("a" * 890))  # cut where the reader cuts: there was more
    assert event is not None and event.pid == 0


@pytest.mark.parametrize(("process", "thread", "pid"), [
    ("python3", "python3", 4711), ("", "x", 4711), ("a b", "", 4711),
    ("pid 5 thread x", "pid 5 thread x", 4711), ("0123456789abcde", "pid 5 thread x", 4711),
    # What could as well be of a process with hardly a name and number 7, and its thread: nobody's.
    ("a pid 7 thread", "x", 0), (" pid 777 thread", "x", 0),
])
def test_a_page_fault_is_of_the_process_that_the_kernel_names(process, thread, pid):
    line = ("amdgpu 0000:83:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:10 pasid:1, "
            f"for process {process} pid 4711 thread {thread} pid 4712)")
    event = parse(CATALOGUE, line)
    assert event is not None and (event.code, event.pid) == ("amdgpu_page_fault", pid)


@pytest.mark.parametrize("real", ["process  pid 777", "process a pid 77", "process ab pid 7"])
def test_the_name_of_a_thread_is_no_number_of_a_process(real):
    line = ("amdgpu 0000:83:00.0: amdgpu: [gfxhub] page fault (src_id:0 ring:24 vmid:10 pasid:1, "
            f"for {real} thread pid 5 thread x pid 778)")
    event = parse(CATALOGUE, line)
    assert event is not None and event.pid == 0


def test_a_forged_line_opens_nothing_and_closes_nothing():
    machine = Machine("reboot_node", "reset_gpu")
    machine.say(CRASH % (XID % (79, "'777'")))
    assert not machine.open()
    machine.say(XID % (119, 1))
    (incident,) = machine.open()
    calm = ("NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x4 (Drain and "
            "Reset) to 0x0 (None)")
    machine.say(CRASH % calm)
    assert machine.open() == [incident]
    machine.say(calm)
    assert not machine.open()


@pytest.mark.parametrize(("line", "code"), [
    ("EDAC MC0: 1 CE on mc#0csrow#1channel#0 (csrow:1 channel:0 page:0x1 offset:0x0 grain:64)",
     "edac_ce"),
    ("mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 5: be00000000800400",
     "mce_bank"),
    ("mce: CPU0: Core temperature above threshold, cpu clock throttled (total events = 1)",
     "cpu_thermal"),
    ("pcieport 10000:00:1c.0: AER: PCIe Bus Error: severity=Corrected, type=Physical Layer, (T)",
     "pcie_bus_error"),
    ("nvidia 0000:4e:00.0: PCIe Bus Error: severity=Corrected, id=0008(Transmitter ID)",
     "pcie_bus_error"),
    ("NMI watchdog: BUG: soft lockup - CPU#1 stuck for 22s! [python3:77]", "soft_lockup"),
    ("Out of memory (oom_kill_allocating_task): Killed process 7 (x) total-vm:1kB", "oom_killed"),
    ("I/O error, dev nvme0n1, sector 1 op 0x0:(READ) flags 0x80700 phys_seg 1", "blk_io"),
    ("nf_conntrack: nf_conntrack: table full, dropping packet", "conntrack_full"),
    ("XFS (dm-0): Corruption of in-memory data (0x8) detected at x+0x1/0x2 [xfs] (fs/xfs/x.c:1).  "
     "Shutting down filesystem.", "xfs_shutdown"),
    ("mlx5_core 0000:d2:00.0: port_module_event:1131:(pid 0): Port module event[error]: module 0, "
     "Cable error, Bus stuck", "mlx5_module"),
    ("mlx5_core 0000:65:00.0 eth0: Link down", "carrier_lost"),
    ("e1000e: eth0 NIC Link is Down", "carrier_lost"),
    ("igb 0000:01:00.0 eth0: igb: eth0 NIC Link is Down", "carrier_lost"),
    ("efa 0000:a0:1a.0 rdmap160s26: Admin queue is closed", "efa_dead"),
    ("efa 0000:a0:1a.0 (null): Reset indication didn't turn on", "efa_dead"),
    ("efa 0000:a0:1a.0: The device didn't send any completion for admin cmd CREATE_QP(6) status 0",
     "efa_no_completion"),
    ("efa 0000:a0:1a.0 rdmap160s26: Wait for completion (polling) timeout", "efa_no_completion"),
    ("amdgpu 0000:c3:00.0: {7}socket: 1, die: 0, 1 new uncorrectable hardware errors detected in "
     "umc block", "amdgpu_ras"),
    ("2026-01-02T03:04:05.678Z NEURON_HW_ERR=DMA_ERROR nd-id=3 nc-id=1", "DMA_ERROR"),
    ("NVRM: The NVIDIA GPU 0000:18:00.0 (PCI ID: 10de:2330) installed in this system has fallen "
     "off the bus and is not responding to commands.", "fallen_off_bus"),
])
def test_what_drivers_put_before_their_lines_is_allowed(line, code):
    event = parse(CATALOGUE, line)
    assert event is not None and event.code == code


def test_journald_brings_nothing_that_the_kernel_would_not():
    log = JournalLog("x")
    said = XID % (79, 1)
    for number, text in enumerate((CRASH % said, CRASH % f"\n{said}\n", f"[x\n] {said}", said)):
        entry = {"__CURSOR": f"s={number}", "MESSAGE": list(text.encode()), "SYSLOG_FACILITY": "0"}
        (line,) = log.feed(json.dumps(entry).encode() + b"\n", 1.0)
        assert "\n" not in line.text  # as /dev/kmsg writes it
        event = parse(CATALOGUE, line.text)  # journald gives names as they are, line ends included
        assert (event is not None) == (text == said), text
