"""Lines, packets, documents and files of people may be anything: no parser may break."""

from __future__ import annotations

import json
import math
import tempfile
import time
from pathlib import Path

import msgspec
import pytest
from detectors import judged
from hypothesis import given
from hypothesis import strategies as st
from junk import DEEP, FAST, JSON, JUNK, NESTED, absurd, mutated
from msgspec import inspect

from holdfast.agent.catalog import load as catalogue
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.config.runbooks import RunbookError, load_runbooks, parse
from holdfast.agent.core.detect.devices.accelerator import Accelerators
from holdfast.agent.core.model import Doc, Now, Observed, Settings, StoreView
from holdfast.agent.core.node import Node
from holdfast.agent.core.parse import kernel_line
from holdfast.agent.core.parse.logs import scan
from holdfast.agent.core.run import members
from holdfast.agent.core.run.incidents import read_where
from holdfast.agent.launchers import protocol
from holdfast.agent.launchers.server import RunSession
from holdfast.agent.logs import files
from holdfast.collectors.sources import kmsg

CATALOGUE = catalogue.load()


@FAST
@given(st.lists(JUNK, max_size=12), st.sampled_from([b"\n", b"\n3,1,1,-;", b";"]))
def test_a_recorded_kernel_log_may_be_anything(pieces, between):
    with tempfile.NamedTemporaryFile() as file:
        file.write(between.join(pieces))
        file.flush()
        log = kmsg.KernelLog(file.name)
        log.open()
        lines = log.read(1.0)
        log.close()
    assert len(lines) <= kmsg.LINES_PER_READ
    for line in lines:
        assert len(line.text) <= kmsg.TEXT_MAX
        kernel_line.parse(CATALOGUE, line.text, line.cursor, 1.0)


def test_a_line_of_a_megabyte_costs_no_time_worth_naming():
    log = kmsg.parse(b"3,1,1,-;" + b"NVRM: Xid (PCI:" * 70_000, 1.0)
    assert log is not None and len(log.text) == kmsg.TEXT_MAX
    shipped = files.load_catalogue()
    worst = [b"Xid (" * 200_000, b"[rank" * 200_000, b"Error: " * 150_000, b"nrt_" * 250_000,
             b"Traceback (most recent call last):" * 30_000, b"\x1b[" * 500_000]
    begin_s = time.process_time()
    for line in worst:
        kernel_line.parse(CATALOGUE, line.decode("latin-1"))
        scanner = scan.Scanner(shipped)
        scanner.feed(line + b"\n")
        scanner.close()
        assert len(scanner.matches) <= scan.MATCHES_MAX
    assert time.process_time() - begin_s < 5.0


# ------------------------------------------------------------------------------ packets


RANK = {"rank": 0, "pid": 10, "generation": 1, "state": "running"}
LEVELS = {"t": "levels", "n": 1, "generation": 1, "state": "running", "ranks": [
    RANK, RANK | {"rank": 1, "state": "ended", "ended": {"code": 1, "outcome": "exception",
                                                         "error": "x", "boot_s": 5.0}},
    RANK | {"rank": 2, "state": "parked", "parked": {"step": 4}, "flight": [[1, "a", "b"]]},
], "commits": [{"generation": 1, "step": 3, "path": "/c/1"}], "startup_s": 1.0, "keep": 2,
    "snapshot": {"generation": 1, "step": 2, "shards": 3}}
BOOKS = load_runbooks()


@FAST
@given(st.data())
def test_whatever_a_launcher_says_the_core_steps_on(data):
    """Well-formed and absurd: each level of the packet may be any number of its type."""
    session = RunSession(protocol.Hello("r", nproc=2), 1, 0, 1.0)
    node = Node("a", Settings(), BOOKS)
    for number in range(3):
        said = data.draw(st.sampled_from([mutated, absurd]))(LEVELS, data.draw)
        try:
            packet = protocol.decode(json.dumps(said).encode())
        except msgspec.DecodeError:
            continue
        if isinstance(packet, protocol.Levels):
            session.levels, session.have_levels = packet, True
        view = session.view("a", 1.0, {})
        body = json.dumps(data.draw(JSON)).encode()
        docs = (Doc("run/r", number, body), Doc("node/b", 1, body))
        observed = Observed(runs=(view,), store=StoreView(up=True, docs=docs))
        decision = node.step(Now(10.0 + number, 1e9, "b"), observed)
        assert len(decision.incidents) <= 64
        assert "run_not_judged" not in {verdict.fault for verdict in decision.verdicts}
        assert Node("a", Settings(), BOOKS, node.memory()).kept.runs.keys() == {"r"}


def bare_numbers(packet):
    """Names of a packet type's numbers that have no bounds."""
    found, seen, left = [], set(), [(packet.__name__, inspect.type_info(packet))]
    while left:
        name, kind = left.pop()
        if isinstance(kind, inspect.StructType):
            if kind.cls not in seen:
                seen.add(kind.cls)
                left += [(f"{kind.cls.__name__}.{one.name}", one.type) for one in kind.fields]
        elif isinstance(kind, inspect.UnionType):
            left += [(name, one) for one in kind.types]
        elif isinstance(kind, inspect.VarTupleType):
            left.append((name, kind.item_type))
        elif isinstance(kind, inspect.TupleType):
            left += [(name, one) for one in kind.item_types]
        elif isinstance(kind, (inspect.IntType, inspect.FloatType)):
            found += [name] if kind.ge is None or kind.le is None else []
        else:
            assert isinstance(kind, (inspect.StrType, inspect.BoolType, inspect.NoneType)), name
    return found


def test_every_number_of_every_packet_is_bounded():
    class Loose(msgspec.Struct):
        levels: tuple[tuple[int, protocol.Whole], ...] = ()

    assert bare_numbers(Loose) == ["Loose.levels"]
    for packet in protocol.Packet.__args__:
        assert bare_numbers(packet) == []


HUGE = 10**400


@pytest.mark.parametrize("said", [
    {"generation": HUGE}, {"keep": -HUGE}, {"startup_s": 1e300},
    {"commits": [{"generation": 1, "step": -HUGE, "path": "/c/1"}]},
    {"snapshot": {"generation": 1, "step": 2, "shards": HUGE}},
    {"ranks": [RANK | {"ended": {"code": HUGE}}]}, {"ranks": [RANK | {"parked": {"step": HUGE}}]},
    {"ranks": [RANK | {"flight": [[HUGE, "a", "b"]]}]},
    {"logs": {"lines": [["nccl_timeout", "root", "network", HUGE]]}},
], ids=range(9))
def test_a_number_that_no_float_holds_is_refused_with_its_place(said):
    with pytest.raises(msgspec.ValidationError, match=r"Expected .* - at `\$\."):
        protocol.decode(json.dumps(LEVELS | said).encode())


@pytest.mark.parametrize("packet", [DEEP[:65_000], b'{"t":"bye","x":' + DEEP[:60_000],
                                    b'{"t":"levels","ranks":' + DEEP[:60_000]])
def test_a_packet_nested_beyond_reason_is_refused_by_name(packet):
    with pytest.raises(ValueError):
        protocol.decode(packet)


BODIES = st.one_of(st.binary(max_size=80), JSON.map(lambda one: json.dumps(one).encode()),
                   st.sampled_from([DEEP, NESTED]))


@FAST
@given(BODIES)
def test_a_document_of_the_store_may_be_anything(body):
    assert members.read_node(Doc("node/a", 1, body)) is not None
    plan = members.read_plan(Doc("run/a", 1, body))
    assert plan is None or plan.run


@FAST
@given(BODIES)
def test_a_memory_that_cannot_be_read_starts_fresh(memory):
    node = Node("a", Settings(), BOOKS, memory)
    node.step(Now(1.0, 1.0, "b"), Observed(store=StoreView(up=True)))


# ------------------------------------------------------------------------------ files of people


TOML = st.one_of(
    st.binary(max_size=60), st.sampled_from([
        b"[agent]\ntick_s = nan\n", b"[agent]\ntick_s = inf\n", b"[agent]\ntick_s = -1\n",
        b"[agent]\ntick_s = true\n", b"agent = 3\n", b"[agent]\n[agent]\n", b"[[agent]]\nx=1\n",
        b"[actions]\nallow = [1]\n", b"[collectors]\nproc = 9\n", b"x = " + DEEP, b"\xff",
        b"[agent.tick_s]\na = 1\n", b"[detect]\nact = [[]]\n", b"a" * (1 << 20),
        b"[agent]\nslow_s = 1e400\n", b"[agent]\nnode = \"" + b"n" * 300 + b"\"\n",
    ]),
    st.tuples(st.sampled_from(["agent", "detect", "collectors", "x"]),
              st.sampled_from(["tick_s", "fast_s", "act", "proc", "odds", "y"]), JSON)
    .map(lambda one: f"[{one[0]}]\n{one[1]} = {json.dumps(one[2])}\n".encode()),
)


@FAST
@given(TOML, st.lists(TOML, max_size=2))
def test_a_configuration_is_loaded_or_refused_with_every_error_named(text, more):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "agent.toml")
        file.write_bytes(text)
        for number, one in enumerate(more):
            (file.parent / "conf.d").mkdir(exist_ok=True)
            (file.parent / f"conf.d/{number}.toml").write_bytes(one)
        try:
            loaded = load(file)
        except ConfigError as error:
            assert error.errors and all(".toml" in line for line in error.errors)
        else:
            assert math.isfinite(loaded.config.agent.tick_s)


@FAST
@given(BODIES.map(lambda one: one.decode("utf-8", "replace")))
def test_what_an_evidence_child_says_may_be_anything(detail):
    assert read_where(detail) is not None


@FAST
@given(st.text(max_size=80) | st.sampled_from([
    "x = " + DEEP.decode(), "severity = 3", "severity = \"ok\"\nscope = []", "budget = 1",
    "ladder = [[]]", "x = [",
]).map(lambda text: f"+++\n{text}\n+++\n"))
def test_a_runbook_is_read_or_refused(text):
    try:
        parse("x", text, "x.md")
    except RunbookError as error:
        assert all(line.startswith("x.md") for line in error.errors)


def test_accelerators_are_judged_whatever_the_labels_say():
    names = ("lost", "devices", "info", "process", "link_up", "recovery_action", "fabric_fault")
    labels = ("", "x", "=", "vendor=,device=", "pid=٣", "vendor=a,device=1,pid=x", "action={x}",
              "device=" + "9" * 400)
    rows = tuple((f"accelerator_{name}", subject, value, 1.0)
                 for name in names for subject in labels for value in (0.0, 1.0, 1e300))
    for verdict in judged(Accelerators("a"), rows):
        assert verdict.fault in BOOKS
