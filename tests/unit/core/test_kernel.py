"""The kernel's log in the core: every form, every datum's sample, repeats, rungs, junk."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.catalog import load
from holdfast.agent.config.runbooks import load_runbooks
from holdfast.agent.core.model import (
    DEGRADED,
    FATAL,
    OK,
    SEVERITIES,
    WARN,
    Now,
    Observed,
    Settings,
    StoreView,
    readings_of,
)
from holdfast.agent.core.node import Node
from holdfast.agent.core.parse.kernel_line import OTHER, parse, pci_of

from .driver import Lab

TABLES = load.tables()
CATALOGUE = load.load(TABLES)
XIDS = {row["number"]: row for row in TABLES["nvidia_xid"]["xid"]}
ACTIONS = {"check_uvm_then_reset", "contact_support", "decode_intrinfo", "decode_registers",
           "drain_inspect", "follow_companion_xid", "ignore", "none_published",
           "obey_recovery_action", "reboot_node", "reset_gpu", "restart_app", "update_software",
           "replace_node", "watch"}

FORMS = [  # every form in which a line was seen, and what it must be understood as
    ("NVRM: Xid (PCI:0000:05:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
     ("xid", "79", "gpu/0000:05:00", 0, FATAL)),
    ("NVRM: Xid (PCI:0000:9b:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset "
     "gpu to activate.", ("xid", "63", "gpu/0000:9b:00", 1896, WARN)),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.",
     ("xid", "79", "gpu/0000:01:00", 0, FATAL)),
    ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7, name=python3, Contained: SM (0x1). RST: No",
     ("xid", "94", "gpu/0000:01:00", 7, "degraded")),
    ("NVRM: Xid (PCI:0000:3b:00 GPU-I:01 GPU-CI:02): 95, pid='<unknown>', name=<unknown>, Uncont",
     ("xid", "95", "gpu/0000:3b:00", 0, FATAL)),
    ("NVRM: The NVIDIA GPU 0000:b3:00.0\\x0aNVRM: (PCI ID: 10de:2330) installed in this system has"
     "\\x0aNVRM: fallen off the bus and is not responding to commands.",
     ("nvidia", "fallen_off_bus", "gpu/0000:b3:00", 0, FATAL)),
    ("NVRM: fallen off the bus and is not responding to commands.",
     ("nvidia", "fallen_off_bus_end", "", 0, FATAL)),
    ("EDAC MC1: 1 UE memory read error on CPU_SrcID#1_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 "
     "page:0x4a0d75 offset:0x900 grain:32)", ("cpu", "edac_ue", "memory/1", 0, FATAL)),
    ("nvme nvme0: I/O 22 QID 0 timeout, reset controller",
     ("disk", "nvme_timeout", "disk/nvme0", 0, WARN)),
    ("nvme nvme0: I/O 22 (I/O Cmd) QID 3 timeout, reset controller",
     ("disk", "nvme_timeout", "disk/nvme0", 0, WARN)),
    ("nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10",
     ("disk", "nvme_timeout", "disk/nvme0", 0, WARN)),
    ("BUG: unable to handle page fault for address: ffffc90001234000",
     ("host", "oops_address", "", 0, FATAL)),
    ("NVRM: Xid (0000:03:00): 14, Channel 00000001", ("xid", "14", "gpu/0000:03:00", 0, OK)),
    ("[Sun Feb 23 16:24:18 2025] NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, "
     "Timeout after 6s of waiting for RPC response from GPU4 GSP! Expected function 103 "
     "(GSP_RM_ALLOC) (0x2081 0x4).", ("xid", "119", "gpu/0000:9b:00", 2024380, FATAL)),
    ("[Fri Oct 14 14:56:49 2022] NVRM: Xid (PCI:000d:00:00): 31, pid=3234, Graphics SM Warp "
     "Exception on (GPC 2, TPC 2, SM 1): Out Of Range Address",
     ("xid", "31", "gpu/000d:00:00", 3234, WARN)),
    ("NVRM: Xid (PCI:0000:b9:00): 71, pid=<unknown>, name=<unknown>, NVLink: fatal error detected "
     "on link 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)", ("xid", "74", "gpu/0000:b9:00", 0, FATAL)),
    ("NVRM: Xid (PCI:0009:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 "
     "0x00000000 0x00000000 0x00000000 0x00000000 0x00000000)",
     ("xid", "149", "gpu/0009:01:00", 0, FATAL)),
    ("NVRM: Xid (PCI:0019:01:00): 145, pid=876766, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 "
     "i0 Link 12 (0x040980c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)",
     ("xid", "145", "gpu/0019:01:00", 876766, OK)),
    ("NVRM: Xid (PCI:0018:01:00): 149, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 "
     "0x00000001 0x00000000 0x00000000 0x00000000 0x00000000)",
     ("xid", "149", "gpu/0018:01:00", 0, OK)),
    ("NVRM: Xid (PCI:0018:01:00): 149, NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 "
     "0x00000000 0x00000000 0x00000000 0x00000000)", ("xid", "149", "gpu/0018:01:00", 0, FATAL)),
    ("NVRM: Xid (PCI:0009:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x4 (Drain "
     "and Reset)", ("xid", "154", "gpu/0009:01:00", 0, DEGRADED)),
    ("NVRM: Xid (PCI:0019:01:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to "
     "0x0 (None)", ("xid", "154", "gpu/0019:01:00", 0, OK)),
    ("NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.",
     ("nvidia", "fallen_off_bus", "gpu/0000:29:00", 0, FATAL)),
    ("NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
     ("nvidia", "gpu_identity", "gpu/0000:9b:00", 0, OK)),
    ("NVRM: GPU Board Serial Number: 1650124014249", ("nvidia", "gpu_identity", "", 0, OK)),
    ("[131453.740743] nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Fatal, Link 30 LTSSM Fault "
     "Up", ("sxid", "20034", "nvswitch/0000:00:00", 0, FATAL)),
    ("nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV "
     "error (First)", ("sxid", "12028", "nvswitch/0000:05:00", 0, WARN)),
    ("nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Severity 1 Engine instance 60 Sub-engine "
     "instance 00", None),
    ("nvidia-nvswitch0: SXid (PCI:0000:00:00.0): 20034, Data {0x50610002, 0x10100030}", None),
    ("[Jul 23 2024 07:53:55] [ERROR] [tid 841] detected NVSwitch fatal error 20034 on fid 0 on "
     "NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 33",
     ("nvidia", "fabricmanager", "nvswitch/0000:86:00", 0, FATAL)),
    ("NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!",
     ("nvidia", "nvlink_probe", "", 0, WARN)),
    ("nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context, skipping further "
     "processing", ("nvidia", "peermem", "", 0, WARN)),
]


@pytest.mark.parametrize(("line", "wanted"), FORMS)
def test_every_form_of_line_is_understood(line, wanted):
    event = parse(CATALOGUE, line)
    found = event and (event.source, event.code, event.subject, event.pid, event.severity)
    assert found == wanted


def test_every_datum_is_whole_and_its_sample_is_understood_as_it():
    assert len(XIDS) == 173 and len(CATALOGUE.sxids) == 93 and len(CATALOGUE.link5) == 94
    for number, row in XIDS.items():
        event = parse(CATALOGUE, row["sample"])
        assert event is not None and event.code == str(number)
        assert event.fault == row.get("fault", "") or number in (145, 149, 154)
        assert row["action"] in ACTIONS and row["severity"] in SEVERITIES, row
        assert (row["stop"] == "yes") == (row["severity"] == FATAL), row
    for row in TABLES["nvidia_sxid"]["sxid"]:
        event = parse(CATALOGUE, row["sample"])
        assert event is not None and event.code == str(row["number"]), row
        assert event.severity == (WARN if row["stop"] == "no" else FATAL)
    rules = TABLES["kernel"]["rule"]
    assert len([row for row in rules if row["source"] not in ("nvidia", "neuron")]) >= 42
    for row in rules:
        assert row["from"] and row["action"] in ACTIONS and row["severity"] in SEVERITIES, row
        for sample in row["samples"]:
            event = parse(CATALOGUE, sample)
            assert event is not None and event.code in (row["code"], *row.get("codes", ())), sample


@pytest.mark.parametrize(("line", "wanted"), [
    ("pcieport 0000:03:04.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (T)", OK),
    ("pcieport 0000:03:04.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=X, (T)",
     "degraded"),
    ("[Hardware Error]: CPU 3: Machine Check: 0 Bank 5: be00000000800400", FATAL),
    ("[Hardware Error]: CPU:0 (17:71:0) MC18_STATUS[Over|UE|MiscV|-]: 0xfc2040000000011b", FATAL),
    ("Memory failure: 0x124802: recovery action for dirty LRU page: Failed", FATAL),
    ("oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),task=python3,pid=4711,uid=0", "degraded"),
    ("Memory cgroup out of memory: Killed process 4711 (python3) total-vm:1kB", WARN),
    ("eth0: Link is Down", WARN),
    ("efa 0000:a0:1a.0: Admin queue is closed", FATAL),
    ("infiniband efa_0: Failed to process command DEREG_MR (opcode 8) comp_status 7 err -22", OK),
    ("NVRM: Xid (PCI:0000:b9:00): 74, NVLink: x link 1(0x200000, 0x0, 0x0, 0x0, 0x0)", WARN),
    ("NVRM: Xid (PCI:0000:b9:00): 74, NVLink: x link 1(0x0, 0x0, 0x0, 0x0, 0x1)", "degraded"),
])
def test_what_the_line_says_decides_its_severity(line, wanted):
    assert parse(CATALOGUE, line).severity == wanted


def test_harmless_lines_of_similar_look_are_nothing():
    for line in ("ena 0000:00:05.0: Admin queue is closed", "eth0: Link is Up", "NVRM: loading",
                 "EXT4-fs (sda1): mounted filesystem", "python3: process 12 started", ""):
        assert parse(CATALOGUE, line) is None, line


def test_unknown_numbers_are_one_label():
    labels = {parse(CATALOGUE, f"NVRM: Xid (PCI:0000:01:00): {n}, x").labels
              for n in (999, 424242, 0)}
    assert labels == {("xid", OTHER, "unknown", "contact_support")}


def test_every_event_that_may_have_a_fault_begins_at_zero():
    """Else increase() over ten minutes loses the first one."""
    rows = [*TABLES["nvidia_xid"]["xid"], *TABLES["nvidia_sxid"]["sxid"]]
    samples = [row["sample"] for row in rows]
    samples += [sample for row in TABLES["kernel"]["rule"] for sample in row["samples"]]
    samples += [line for line, _ in FORMS]
    samples += ["NVRM: Xid (PCI:0000:01:00): 424242, x", "NEURON_HW_ERR=NEW_ERROR nd-id=3",
                "nvidia-nvswitch0: SXid (PCI:0000:86:00.0): 99999, Fatal, x"]
    events = [parse(CATALOGUE, sample) for sample in samples]
    told = {event.labels for event in events if event is not None and event.fault}
    assert {("xid", OTHER), ("sxid", OTHER), ("neuron", OTHER)} <= {one[:2] for one in told}
    assert told <= set(CATALOGUE.alerted())


def test_one_name_for_one_device():
    assert pci_of("00000000:4E:00.0") == pci_of("0000:4e:00") == "0000:4e:00"


PIECES = st.sampled_from([
    "NVRM: Xid (PCI:", "0000:4e:00", "): ", "79", ", ", "pid=", "name=", "SXid (PCI:", "154",
    "nvidia-nvswitch0: ", "20034", "link 6(", "0x10000", " ", "Link 01 (", "NETIR Fatal XC0 i0 ",
    "I/O error, dev ", "oom-kill:constraint=CONSTRAINT_NONE,", "NEURON_HW_ERR=", "MC0_STATUS[",
    "[Hardware Error]: CPU 0: Machine Check: 0 Bank 11: ", "f" * 22, "\x00", "9" * 30,
])


@given(st.lists(st.one_of(PIECES, st.text(max_size=20)), max_size=25).map("".join))
def test_no_line_breaks_the_parser_or_makes_a_label(line):
    event = parse(CATALOGUE, line)
    if event is None:
        return
    assert len(event.text) <= 400 and len(event.subject) <= 64 and 0 <= event.pid <= 1 << 22
    assert event.severity in SEVERITIES and event.bucket in ACTIONS
    assert event.code == OTHER or event.code in line or event.code in (
        row["code"] for row in TABLES["kernel"]["rule"]
    ) or event.code == "74"
    assert msgspec.json.decode(msgspec.json.encode(event), type=type(event)) == event


# ------------------------------------------------------------------------------ the node's faults

BOOKS = load_runbooks()
XID = "NVRM: Xid (PCI:0000:4e:00): %s, pid=%s, name=python3, something"


class Machine:
    """A node without a run whose kernel says what the test wants."""

    def __init__(self, *allow: str) -> None:
        self.settings = Settings(allow=allow, alone=True)
        self.node = Node("a", self.settings, BOOKS)
        self.boot_s, self.wall_s, self.boot_id, self.cursor = 100.0, 1e9, "b1", 0
        self.events: tuple = ()
        self.samples: tuple = ()

    def say(self, line: str, seconds: float = 1.0):
        self.boot_s += seconds
        self.wall_s += seconds
        self.cursor += 1
        event = parse(CATALOGUE, line, self.cursor, self.boot_s)
        self.events = (*self.events, event)[-8:] if event else self.events
        return self.step()

    def step(self, seconds: float = 0.0):
        self.boot_s += seconds
        self.wall_s += seconds
        now = Now(self.boot_s, self.wall_s, self.boot_id)
        return self.node.step(now, Observed(
            events=self.events, store=StoreView(up=True), samples=readings_of(self.samples),
        ))

    def reboot(self):
        self.boot_id += "x"
        self.boot_s, self.cursor, self.events = 10.0, 0, ()
        return self.step(60.0)

    def restart(self) -> None:
        self.node = Node("a", self.settings, BOOKS, self.node.memory())

    def open(self):
        return [one for one in self.step().incidents if one.state == "open"]


def test_a_fatal_xid_is_one_incident_however_often_it_is_said():
    machine = Machine()
    decision = machine.say(XID % (79, "<unknown>"))
    (incident,) = decision.incidents
    assert (incident.fault, incident.severity) == ("gpu_fell_off_bus", FATAL)
    assert incident.subject == "node/a/gpu/0000:4e:00" and not decision.effects
    assert incident.reason.startswith("XID 79 on GPU 0000:4e:00 of a: GPU has fallen off the bus")
    assert incident.reason.endswith("; training must stop")
    assert incident.would_have == "reboot_node: not done, because actions.allow does not name it"
    (verdict,) = decision.verdicts
    assert (verdict.fault, verdict.detector, verdict.act) == ("gpu_fell_off_bus", "kernel", False)
    before = machine.open()
    assert machine.open() == before  # stepping twice yields nothing new
    for _ in range(40):
        machine.say(XID % (79, "<unknown>"))
    (after,) = machine.open()
    assert after.id == incident.id and 4 < len(after.timeline) < 8  # when the number doubles
    machine.restart()
    assert machine.open() == [after]  # the lines of the last minute open nothing anew
    machine.step(7200.0)
    assert machine.open()  # a reboot clears it, and nothing else
    closed = machine.reboot().incidents
    assert [one.state for one in closed] == ["closed"] and not machine.open()


def test_the_same_on_two_gpus_is_two_incidents():
    machine = Machine()
    machine.say(XID % (79, 1))
    machine.say((XID % (79, 1)).replace("4e", "5e"))
    assert len(machine.open()) == 2


def test_the_drivers_instruction_is_the_rung():
    machine = Machine("reset_gpu")
    machine.say(XID % (119, 77))
    said = "NVRM: Xid (PCI:0000:4e:00): 154, GPU recovery action changed from 0x0 (None) to %s"
    machine.say(said % "0x2 (Node Reboot Required)")
    (incident,) = machine.open()  # joins the one of that GPU
    assert incident.would_have.startswith("reboot_node: not done, because actions.allow")
    assert incident.timeline[-1][1] == (
        "reboot_node is asked for: the driver asks for: node reboot required"
    )
    machine.say(said % "0x1 (GPU Reset Required)")
    (incident,) = machine.open()
    assert incident.would_have.startswith("reset_gpu: allowed, waits 15 s")
    machine.say(said % "0x0 (None)")
    assert not machine.open()
    machine.say(said % "0x4 (Drain and Reset)")
    (incident,) = machine.open()  # alone it is a fault of its own
    assert incident.fault == "gpu_needs_reset" and incident.would_have.startswith("reset_gpu")


def test_repeats_mean_more():
    machine = Machine()
    machine.say(XID % (31, 5))
    assert [one.severity for one in machine.open()] == [WARN]
    machine.say(XID % (31, 5), seconds=1.0)  # the same burst
    assert [one.severity for one in machine.open()] == [WARN]
    machine.say((XID % (31, 5)).replace("4e", "5e"), seconds=60.0)  # another GPU
    assert {one.severity for one in machine.open()} == {WARN}
    machine.say(XID % (31, 5), seconds=60.0)
    worst = [one for one in machine.open() if one.severity == "degraded"]
    assert [one.subject for one in worst] == ["node/a/gpu/0000:4e:00"]
    assert worst[0].timeline[-1][1] == "run_check: devices, accelerators, tensor"


def test_five_fatal_ones_in_a_day_are_for_the_vendor():
    machine = Machine()
    for number in (46, 62, 109, 110):
        machine.say(XID % (number, 1), seconds=3600.0)
    assert "ask_person" not in machine.open()[0].would_have
    machine.say(XID % (46, 1), seconds=3600.0)
    assert machine.open()[0].would_have == "ask_person: a person's part"


def test_what_is_not_fatal_keeps_no_run_off_and_says_so():
    line = ("EDAC MC0: 1 %s memory read error on CPU_SrcID#0_Ha#0_Chan#1_DIMM#0 (channel:1 slot:0 "
            "page:0x4a0d75 offset:0x900 grain:32 syndrome:0x0)")
    machine = Machine()
    machine.say(line % "CE")
    assert [(one.severity, one.would_have) for one in machine.open()] == [
        (WARN, "exclude_node: only where it is fatal: runs go on, and start here")]
    machine.say(line % "UE")
    assert "exclude_node: no run starts on this node while the incident is open" in {
        one.would_have for one in machine.open()}


def test_only_repeats_at_the_same_place_count():
    line = "NVRM: Xid (PCI:0000:4e:00): 13, pid=5, Graphics Exception on (GPC %d, TPC 2, SM 1)"
    machine = Machine()
    machine.say(line % 1)
    machine.say(line % 2, seconds=60.0)
    assert [one.severity for one in machine.open()] == [WARN]
    machine.say(line % 1, seconds=60.0)
    assert [one.severity for one in machine.open()] == ["degraded"]


def test_two_reboots_then_a_person():
    machine = Machine("reboot_node")
    for wanted in ("reboot_node: allowed", "reboot_node: allowed", "ask_person"):
        machine.say(XID % (79, 1))
        assert machine.open()[0].would_have.startswith(wanted)
        machine.reboot()


def test_what_is_open_is_bounded_and_the_worst_has_room():
    machine = Machine()
    for number in range(100):
        machine.say(f"blk_update_request: I/O error, dev sd{number}, sector 1")
    assert len(machine.open()) == 64
    machine.say(XID % (79, 1))
    assert len(machine.open()) == 64
    assert "gpu_fell_off_bus" in {one.fault for one in machine.open()}


def test_a_clean_up_is_blamed_only_when_it_is_alone():
    machine = Machine()
    machine.say(XID % (79, 1))
    machine.say(XID % (45, 1))
    assert [one.fault for one in machine.open()] == ["gpu_fell_off_bus"]
    machine.say((XID % (45, 1)).replace("4e", "5e"))
    assert {one.fault for one in machine.open()} == {"gpu_fell_off_bus", "gpu_application_error"}


def test_a_warning_closes_after_ten_quiet_minutes():
    machine = Machine()
    machine.say("blk_update_request: I/O error, dev sda, sector 123")
    assert [one.subject for one in machine.open()] == ["node/a/disk/sda"]
    machine.step(599.0)
    assert machine.open()
    closed = machine.step(2.0).incidents
    assert closed[0].state == "closed" and not machine.open()


def test_a_fatal_line_that_names_a_rank_restarts_it_once():
    lab = Lab()
    lab.settle()
    lab.all(state="running", step=5)
    lab.step(1.0)
    pid = lab.view.ranks[1].pid
    lab.events = (parse(CATALOGUE, XID % (95, pid), 1, lab.boot_s),)
    lab.step(0.1)
    verdicts = [one for one in lab.decision.verdicts if one.act]
    assert [(one.fault, one.subject) for one in verdicts] == [("gpu_memory_error", "run/r/rank/1")]
    lab.settle()
    orders = [effect for effect in lab.log if effect.kind == "stop"]
    assert orders and orders[0].body.ranks == (1,)
    assert orders[0].fault == "gpu_memory_error"


def test_a_fatal_line_of_a_rank_whose_page_was_not_read_leaves_no_step():
    lab = Lab()
    lab.begin()
    lab.train(5)
    lab.change(1, page=False, step=0)
    lab.events = (parse(CATALOGUE, XID % (95, lab.rank(1).pid), 1, lab.boot_s),)
    lab.step(0.1)
    lab.park(0, 5)
    lab.settle()
    assert lab.view.generation == 2
    assert not [key for key, _ in lab.plan().spent if key.startswith("signature/")]


def test_a_fatal_line_of_somebody_else_or_an_observing_detector_restarts_nobody():
    for settings, pid in ((Settings(), 4), (Settings(act=("ended", "hang")), None)):
        lab = Lab(settings=settings)
        lab.settle()
        lab.all(state="running", step=5)
        lab.step(1.0)
        victim = lab.view.ranks[1].pid if pid is None else pid
        lab.events = (parse(CATALOGUE, XID % (95, victim), 1, lab.boot_s),)
        lab.step(0.1)
        assert not [one for one in lab.decision.verdicts if one.act]
        assert [one.fault for one in lab.decision.incidents] == ["gpu_memory_error"]
