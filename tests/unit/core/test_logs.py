"""The engine over single lines, tracebacks and ranks, by value; the cases are bench's as well."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import classify_cases
from holdfast.agent.core.parse.logs import lines as logtext
from holdfast.agent.core.parse.logs import root as logroot
from holdfast.agent.core.parse.logs import scan as logs
from holdfast.agent.core.parse.logs import signatures, tracebacks
from holdfast.agent.core.parse.logs.lines import NO_RANK, clean
from holdfast.agent.logs import files

CATALOGUE = files.load_catalogue()
FAMILIES = files.load_families()
TABLES = tomllib.loads(files.SHIPPED.read_text())
ROWS = TABLES["signature"]
SAMPLES = [(row, sample) for row in ROWS for sample in row["samples"]]
DAY_S = 86_400.0


def scan(*texts: str | bytes, piece: int = 1 << 20, signals: bool = True) -> list[signatures.Match]:
    found = []
    for file, text in enumerate(texts):
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        scanner = logs.Scanner(CATALOGUE, file, signals=signals)
        for at in range(0, len(data), piece):
            scanner.feed(data[at : at + piece])
        scanner.close()
        found += scanner.matches
    return found


def sample(name: str, number: int = 0) -> str:
    return str(next(row for row in ROWS if row["id"] == name)["samples"][number]) + "\n"


def root(*texts: str) -> str:
    found = logroot.diagnose(scan(*texts), CATALOGUE.exit_codes).root
    return found.signature if found else ""


# ------------------------------------------------------------------------------------ catalogue


def test_the_catalogue_has_every_signature_once() -> None:
    assert len(ROWS) == len({row["id"] for row in ROWS}) == 87
    assert len(TABLES["negatives"]) == 5


@pytest.mark.parametrize(("row", "sample"), SAMPLES, ids=lambda one: one["id"] if isinstance(
    one, dict) else "")
def test_a_sample_is_found_as_its_row_says(row: dict[str, Any], sample: str) -> None:
    found = {match.signature: match for match in scan(sample)}
    carried = {"nccl_watchdog_cuda": {"nccl_watchdog_cuda", "cuda_ecc"}}
    assert set(found) == carried.get(row["id"], {row["id"]})
    match = found[row["id"]]
    assert (match.role, match.culprit, match.category, match.retryable, match.weak) == (
        row["role"], row["culprit"], row["category"], row["retryable"], row.get("weak", False),
    )


@pytest.mark.parametrize("line", TABLES["negatives"])
def test_a_healthy_line_is_no_match(line: str) -> None:
    assert scan(line) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ('role = "boss"\n', "signature 'a': role must be one of root"),
        ('role = "root"\nculprit = "me"\n', "culprit must be one of infra"),
        ('role = "root"\nculprit = "user"\nretryable = "no"\n', "signature 'a': set category"),
        ('role = "root"\nculprit = "user"\nretryable = "no"\ncategory = "c"\npattern = "("\n'
         'literals = []\n', "pattern: missing"),
        ("= 3", "Invalid"),
    ],
)
def test_a_bad_catalogue_is_refused_by_name(tmp_path: Any, change: str, said: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(f'gates = []\nsignal_gates = []\n[[signature]]\nid = "a"\n{change}')
    with pytest.raises(ValueError, match="own.toml") as caught:
        files.load_catalogue(path)
    assert said in str(caught.value)


# ---------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(
    ("line", "text", "rank", "day_s"),
    [
        ("[rank3]: KeyError: 'a'", "KeyError: 'a'", 3, None),
        ("[default12]:    indented", "   indented", 12, None),
        ("\x1b[31m[rank1]:\x1b[0m x", "x", 1, None),
        ("7: Traceback", "Traceback", 7, None),
        ("2026-01-02 03:04:05,500 [rank2] step", "step", 2, DAY_S + 11_045.5),
        ("2026-01-01T00:00:10.25Z stderr F boom", "boom", NO_RANK, 10.25),
        ("[E0102 00:00:01.5 ProcessGroupNCCL.cpp:6] [Rank 4] x",
         "[E0102 00:00:01.5 ProcessGroupNCCL.cpp:6] [Rank 4] x", 4, DAY_S + 1.5),
        ("[PG ID 1 PG GUID 1 Rank 9] late", "[PG ID 1 PG GUID 1 Rank 9] late", 9, None),
        ("(TrainWorker pid=12, ip=10.0.0.1) no", "no", NO_RANK, None),
        ("0%\r50%\r100% done", "100% done", NO_RANK, None),
        ("2026-99-99 00:00:00 x", "x", NO_RANK, None),
    ],
)
def test_a_line_without_its_wrapping(
    line: str, text: str, rank: int, day_s: float | None
) -> None:
    found = clean(line)
    assert (found.text, found.rank, found.time_s) == (text, rank, day_s)


def test_a_frames_source_line_is_not_what_happened() -> None:
    text = classify_cases.traceback("ValueError: bad")
    assert "CUDA error: out of memory" in text
    assert [match.signature for match in scan(text)] == ["python_exception"]


def test_two_tracebacks_without_a_link_are_two() -> None:
    text = classify_cases.traceback("ValueError: a") + classify_cases.traceback("ValueError: b")
    assert [match.text for match in scan(text)] == ["ValueError: a", "ValueError: b"]


def test_the_last_of_a_chain_is_its_root() -> None:
    first, last = (classify_cases.traceback(f"ValueError: {name}") for name in "ab")
    for link in (classify_cases.LINK_DURING, classify_cases.LINK_CAUSE):
        found = scan(first + link + last)
        assert [(m.text, m.role) for m in found] == [
            ("ValueError: a", "carrier"), ("ValueError: b", "root"),
        ]


def test_pieces_of_any_size_give_the_same() -> None:
    text = "".join(
        text for case in classify_cases.variants()[8:15] for _, text in case.files
    ) + "quiet\n" * 40_000
    whole = scan(text)
    assert len(whole) > 8
    for piece in (997, 70_001):
        assert scan(text, piece=piece) == whole, piece


def test_a_root_after_which_training_goes_on_was_handled() -> None:
    before = classify_cases.traceback("OSError: [Errno 5] Input/output error: '/a'")
    assert root(before) == "io_error"
    assert root(before + classify_cases.steps(1, 3, 0)) == "io_error"  # a last step may end
    after = before + classify_cases.steps(1, 9, 0)
    assert root(after) == ""
    pieces = scan(after + "quiet\n" * 40_000, piece=50_000)
    assert [match for match in pieces if match.role == "root"] == []


def test_a_storm_of_errors_is_bounded() -> None:
    lines = "".join(f"[rank{n % 3000}]: KeyError: '{n}'\n" for n in range(30_000))
    scanner = logs.Scanner(CATALOGUE)
    scanner.feed(lines.encode())
    scanner.close()
    assert len(scanner.matches) == logs.MATCHES_MAX // 2  # of lines without tracebacks
    assert sum(scanner.counts.values()) + scanner.skipped >= 20_000


def test_mentions_do_not_take_the_place_of_what_ended_it() -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
    many = f"WARNING caught {oom}, halving the batch\n" * 20
    storm = "".join(f"[rank{n}]: WARNING PermissionError: [Errno 13] '/x'\n" for n in range(900))
    last = classify_cases.traceback(oom)
    for text in (many + last, storm + many + last):
        found = logroot.diagnose(scan(text), {}).root
        assert found is not None and (found.text, found.mention) == (oom, False)


def test_only_the_next_traceback_was_let_go() -> None:
    ignored = "Exception ignored in: <function f at 0x7f>\n"
    let_go = "".join(f"node3: {row}\n" for row in (
        ignored + classify_cases.traceback("ValueError: a")).splitlines())
    texts = (let_go, ignored + "\n", let_go + ignored + classify_cases.traceback("ValueError: c"))
    for text in texts:
        found = scan(text + classify_cases.traceback("ValueError: b"))
        assert [match.text for match in found] == ["ValueError: b"]


def test_a_storm_of_tracebacks_is_bounded() -> None:
    lines = "".join(f"[rank{n}]: {tracebacks.TRACEBACK}\n" for n in range(9_000))
    scanner = logs.Scanner(CATALOGUE)
    scanner.feed(lines.encode())
    scanner.close()
    assert scanner._walk == 0
    assert len(scanner.streams) <= 8193
    woven = "".join(
        f"node{rank}: {row}\n" for row in classify_cases.traceback("KeyError: 'x'").splitlines()
        for rank in range(100)
    )
    assert root(woven) == "key_or_type"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["2026-01-01 00:00:07 x\n", "a: b: c\n", "quiet\n" * 9, "\n"])),
       st.lists(st.integers(0, 60), max_size=9), st.sampled_from([30, 100, logtext.LOOK_BACK]))
def test_number_and_time_of_a_line_do_not_depend_on_who_asked_before(
    texts: list[str], asked: list[int], back: int
) -> None:
    buffer = "".join(texts).encode()
    begins = [0, *(at + 1 for at, byte in enumerate(buffer) if byte == 10)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logtext, "LOOK_BACK", back)
        shared = logtext.Ruler()
        for at in (begins[index % len(begins)] for index in asked):
            fresh = logtext.Ruler()
            assert shared.number(buffer, 0, at) == fresh.number(buffer, 0, at)
            assert fresh.number(buffer, 0, at) == begins.index(at) + 1
            window = [one for one in begins if at - back <= one < at]
            clocks = [one for one in window if buffer[one:].startswith(b"2026")]
            expected = 7.0 if clocks else None
            assert shared.time_before(buffer, 0, at) == expected
            assert fresh.time_before(buffer, 0, at) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(
    st.binary(max_size=200),
    st.sampled_from([sample.encode() for _, sample in SAMPLES]),
    st.sampled_from([b"Traceback (most recent call last):", b'  File "a.py", line 1, in f',
                     b"\nDuring handling of the above exception, another exception occurred:\n",
                     b"ValueError: x", b"[rank1]: ", b"n1: Traceback (most recent call last):",
                     b'n1:   File "a.py"', b"n1: KeyError: 'x'", b"Exception ignored in: f",
                     b"Root Cause (first observed failure):", b"step 1", b"step 2", b"step 3",
                     b"\x1b[31m", b"2026-11-20 10:00:00 ", b"\n"]),
), max_size=40), st.integers(1, 4000))
def test_any_bytes_are_read(parts: list[bytes], piece: int) -> None:
    data = b"\n".join(parts)
    found = scan(data, piece=piece)
    assert scan(data) == found
    diagnosis = logroot.diagnose(found, CATALOGUE.exit_codes)
    assert diagnosis.root or diagnosis.hint
    assert diagnosis.root is None or diagnosis.root.role == signatures.ROOT


# ---------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("case", classify_cases.variants(), ids=lambda case: case.name)
def test_the_root_of_all_ranks(case: classify_cases.Case) -> None:
    found: list[signatures.Match] = []
    for file, (name, text) in enumerate(case.files):
        scanner = logs.Scanner(CATALOGUE, file, files.rank_of(name), families=FAMILIES)
        scanner.feed(text.encode())
        scanner.close()
        found += scanner.matches
    root = logroot.diagnose(found, CATALOGUE.exit_codes).root
    assert (root.signature if root else "") == case.root
    if root:
        assert root.culprit == case.culprit
        assert case.rank in (None, root.rank)


def test_only_infrastructure_points_at_a_node() -> None:
    said = {
        row["id"]: logroot.BLAMES.get(row["culprit"], "job")
        for row in ROWS if row["role"] == "root"
    }
    assert {said[name] for name in ("cuda_ecc", "cuda_no_device", "neuron_mem_ue")} == {"node"}
    assert said["nccl_ib_async_event"] == "link"
    innocent = ("cuda_oom", "key_or_type", "file_missing", "no_space", "user_cancel", "cublas_fail",
                "slurm_time_limit", "megatron_nan_grad")
    assert {said[name] for name in innocent} == {"job"}


def test_only_xids_that_end_training_are_named() -> None:
    pattern = next(row for row in ROWS if row["id"] == "nvrm_xid")["pattern"]
    numbers = set(map(int, pattern.partition("(?P<xid>")[2].partition(")")[0].split("|")))
    folder = files.SHIPPED.parent
    known = tomllib.loads((folder / "nvidia_xid.toml").read_text())["xid"]
    stopping = {row["number"] for row in known if row["severity"] == "fatal"}
    assert {79, 48} < numbers <= stopping


def test_new_year_does_not_turn_the_order_round() -> None:
    old = "2026-12-31 23:59:58 x\n" + classify_cases.traceback("ValueError: old")
    new = "2027-01-01 00:00:03 x\n" + classify_cases.traceback("ValueError: new")
    found = logroot.diagnose(scan(new, old), {}).root
    assert found is not None and found.text == "ValueError: old"


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([classify_cases.WATCHDOG.format(0), classify_cases.WATCHDOG.format(2)], "ranks 0, 2"),
        ([classify_cases.WATCHDOG.format(0),
          classify_cases.WATCHDOG.format(1).replace("812", "790")], "furthest behind: rank 1"),
        ([classify_cases.GLOO], "look at 127.0.0.1"),
        ([classify_cases.SUMMARY.replace("exitcode: 1", "exitcode: -9")], "want of host memory"),
        (["step 4 loss: nan\n"], "not healthy"),
        ([sample("deepspeed_exit")], "local rank 3 ended without a word; its exit status says: k"),
        ([sample("mpirun_signal")], "rank 3 (pid 1234) on n1 ended without a word"),
        ([sample("shell_killed")], "a rank (pid 12345) ended without a word; its exit status says"),
        ([sample("srun_task_exit", 1)], "task 3 on node12 ended without a word"),
        ([classify_cases.SUMMARY + sample("elastic_first_failure")],
         "rank 11 (pid 1234) on node1 failed first"),
        ([sample("elastic_first_failure").replace(": 1 (", ": -9 (")],
         "rank 11 (pid 1234) on node1 ended without a word"),
        ([classify_cases.CLOSING], "asked to end"),
        ([""], "nothing known stands"),
    ],
)
def test_without_a_root_it_says_where_to_look(texts: list[str], said: str) -> None:
    found = logroot.diagnose(scan(*texts), CATALOGUE.exit_codes)
    assert found.root is None
    assert said in found.hint
