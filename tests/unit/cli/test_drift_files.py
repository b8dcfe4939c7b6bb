"""`holdfast drift FILE...`: several nodes beside each other, with no agent at all."""

from __future__ import annotations

import io
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import same_as_golden

from holdfast.agent.cli import drift, drift_files, main
from holdfast.agent.cli.text import Failure
from holdfast.agent.core.nodes.identity import Change, Identity, answer

GOLDEN = Path(__file__).resolve().parents[2] / "golden/cli"
Captured = pytest.CaptureFixture[str]
CHANGE = Change("software.nvidia_driver", "535.161.08", "550.54.15", 1795168920.0)


def of(driver: str = "535.161.08", *changes: Change, gpus: bool = True) -> Identity:
    node = {"host.kernel": "6.8.0-1016-aws", "software.nccl": "2.21.5",
            "software.nvidia_driver": driver}
    return Identity({"node": node} | ({"nvidia": {"nvidia.count": "8"}} if gpus else {}), changes)


def told(name: str, one: Identity | None = None, run: str = "m5") -> dict[str, Any]:
    """What the agent of one node answers, which knows itself alone."""
    return answer(name, run, [name], {name: one if one is not None else of()})


def written(name: str, one: Identity | None = None) -> str:
    return json.dumps(told(name, one), indent=2, sort_keys=True) + "\n"


FOUR = {"node-a": of(), "node-b": of(), "node-c": of("550.54.15", CHANGE),
        "node-d": of(gpus=False)}


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No agent is anywhere, and times read the same everywhere."""
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / "none"))
    monkeypatch.setattr(drift, "clock", lambda wall_s: f"{wall_s:.0f}")


def given_to(
    monkeypatch: pytest.MonkeyPatch, text: str | bytes, *arguments: str
) -> int:
    raw = io.BytesIO(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(raw))
    return main(["drift", *arguments, "-"])


def files(folder: Path, nodes: dict[str, Identity]) -> list[str]:
    for name, one in nodes.items():
        (folder / f"{name}.json").write_text(written(name, one))
    return [str(folder / f"{name}.json") for name in nodes]


def srun(nodes: dict[str, Identity], size: int = 1024) -> str:
    """What `srun --label` makes of it: 1,024 bytes of each in turn, wherever they end, each line
    of them with the task's number before it."""
    texts = [written(name, one) for name, one in nodes.items()]
    said = []
    for at in range(0, max(map(len, texts)), size):
        for task, text in enumerate(texts):
            for line in text[at : at + size].splitlines():
                said.append(f"{task:02d}: {line}\n")
    return "".join(said)


# ------------------------------------------------------------------ what is found


def test_files_of_several_nodes_read_as_an_agents_answer(tmp_path: Path, capsys: Captured) -> None:
    assert main(["drift", *files(tmp_path, FOUR)]) == 1
    same_as_golden(GOLDEN / "drift-files.txt", capsys.readouterr().out)
    assert main(["drift", "--json", *files(tmp_path, FOUR)]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(answer("", "m5", sorted(FOUR), FOUR)))


def test_what_several_nodes_said_can_be_given_again(tmp_path: Path, capsys: Captured) -> None:
    assert main(["drift", "--json", *files(tmp_path, FOUR)]) == 1
    first = capsys.readouterr().out
    (tmp_path / "rack.json").write_text(first)
    assert main(["drift", "--json", str(tmp_path / "rack.json")]) == 1
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("form", ["one after the other", "srun", "srun, small", "pdsh"])
def test_one_stream_of_all_nodes(
    form: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    lines = [[f"{name}: {line}\n" for line in written(name, one).splitlines()]
             for name, one in FOUR.items()]
    text = {
        "one after the other": "".join(written(name, one) for name, one in FOUR.items()),
        "srun": srun(FOUR), "srun, small": srun(FOUR, 7),
        "pdsh": "".join(line for each in zip(*lines, strict=False) for line in each)
        + "".join(line for each in lines for line in each[min(map(len, lines)):]),
    }[form]
    assert given_to(monkeypatch, text) == 1
    same_as_golden(GOLDEN / "drift-files.txt", capsys.readouterr().out)


def test_the_code_says_what_was_found(tmp_path: Path, capsys: Captured) -> None:
    same = files(tmp_path, {"node-a": of(), "node-b": of()})
    assert main(["drift", *same]) == 0
    assert "none, in 4 values" in capsys.readouterr().out
    assert main(["drift", same[0], same[0]]) == 0
    assert "host.kernel" in capsys.readouterr().out, "one node: its values"
    (less,) = files(tmp_path, {"node-d": of(gpus=False)})
    assert main(["drift", *same, less]) == 3
    assert "node-d has not said nvidia" in capsys.readouterr().out
    unknown = tmp_path / "node-e.json"
    unknown.write_text(json.dumps(answer("node-e", "m5", ["node-e"], {})))
    assert main(["drift", *same, str(unknown)]) == 3
    assert "nothing is known of node-e" in capsys.readouterr().out
    assert main(["drift", *same, str(unknown), *files(tmp_path, {"node-c": of("1")})]) == 1


def test_a_node_that_one_did_not_know_is_taken_from_the_other(tmp_path: Path) -> None:
    both = tmp_path / "both.json"
    text = json.dumps(answer("node-a", "m5", ["node-a", "node-b"], {"node-a": of()}))
    both.write_text(text + written("node-b"))
    assert main(["drift", str(both)]) == 0


def test_a_run_is_named_when_all_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(json.dumps(told("a", run="m5")))
    (tmp_path / "b").write_text(json.dumps(told("b", run="m6")))
    assert drift_files.compared([str(tmp_path / "a")])["run"] == "m5"
    assert drift_files.compared([str(tmp_path / "a"), str(tmp_path / "b")])["run"] == ""


# ------------------------------------------------------------------ what is refused


HALF = written("node-b")[:200]
BAD = {
    "empty": ("", "empty: write it anew with `holdfast drift --json` on that node"),
    "blank": (" \n\n", "empty"),
    "words": ("holdfast: nothing runs here", "no JSON, but 'holdfast: nothing runs here'"),
    "half": (HALF, "broken or cut JSON"),
    "half and whole": (HALF + written("node-c"), "let srun put a name before each line (--label)"),
    "mixed": ("".join(a + b for a, b in zip(
        written("b").splitlines(True), written("c").splitlines(True), strict=True)), "broken"),
    "status": ('[{"node": "a"}]', "no document of `holdfast drift --json` (Expected `object`"),
    "verify": ('{"node": "a", "run": ""}', "no document of `holdfast drift --json`"),
    "a number": ("7", "no JSON, but '7'"),
    "no node": (json.dumps(told("a") | {"nodes": []}), "length >= 1 - at `$.nodes`"),
    "a value of another kind": (json.dumps(told("a") | {"identities": {"a": {"node": {"k": 1}}}}),
                                "Expected `str`, got `int` - at `$.identities"),
    "a time without end": (json.dumps(told("a", of("1", CHANGE))).replace("1795168920.0", "1e999"),
                           "at `$.changes[0].wall_s`"),
    "a time that is none": (json.dumps(told("a", of("1", CHANGE))).replace("1795168920.0", "NaN"),
                            "NaN is no JSON"),
    "deep": ("[" * 200_000, "broken or cut JSON"),
    "digits": ('{"node":' + "9" * 9000, "broken or cut JSON"),
    "no text": (b"\xff\xfe{", "no text (byte 0 is not UTF-8)"),
    "half of one's lines": (srun({"node-b": of(), "node-c": of()})[:-9], "lines of 01: broken"),
    "words of one among all": ("0: holdfast: no agent\n" + srun({"b": of(), "c": of()}).replace(
        "00:", "02:"), "lines of 0: no JSON, but 'holdfast: no agent'"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named_with_what_to_do(name: str, tmp_path: Path, capsys: Captured) -> None:
    text, says = BAD[name]
    good, bad = files(tmp_path, {"node-a": of()}) + [str(tmp_path / "bad.json")]
    Path(bad).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["drift", good, bad]) == 2
    out, err = capsys.readouterr()
    assert not out and says in err
    assert err.startswith(f"holdfast: {bad}") and "node-a.json" not in err and err.count("\n") == 1
    assert any(hint in err for hint in ("write it anew", "give "))


def test_all_bad_files_are_told_at_once_and_no_more_than_fit(
    tmp_path: Path, capsys: Captured
) -> None:
    gone = [str(tmp_path / f"{number}.json") for number in range(20)]
    assert main(["drift", str(tmp_path), *gone]) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path}: cannot be read: Is a directory" in err
    assert f"{gone[0]}: cannot be read: No such file or directory" in err
    assert "and 5 more" in err and len(err.splitlines()) == 17


def test_a_hundred_megabytes_are_not_read(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(100_000_000)
    assert main(["drift", str(huge)]) == 2
    assert f"{huge}: too long: 32 MiB are read in all" in capsys.readouterr().err
    assert main(["drift", "/dev/zero"]) == 2
    assert "/dev/zero: too long" in capsys.readouterr().err
    # The bound is of all files together.
    many = files(tmp_path, FOUR)
    monkeypatch.setattr(drift_files, "BYTES_MAX", sum(Path(one).stat().st_size for one in many) - 1)
    assert main(["drift", *many]) == 2
    assert capsys.readouterr().err.startswith(f"holdfast: {many[-1]}: too long")


def test_one_node_may_not_say_two_things(tmp_path: Path, capsys: Captured) -> None:
    (first,) = files(tmp_path, {"node-a": of()})
    old = tmp_path / "old.json"
    old.write_text(written("node-a", of("550.54.15")))
    assert main(["drift", first, str(old)]) == 2
    assert capsys.readouterr().err == (
        f"holdfast: {old}: says of node-a otherwise than {first} (software.nvidia_driver: "
        "550.54.15, there 535.161.08): leave the older one out\n"
    )
    less = tmp_path / "less.json"
    less.write_text(written("node-a", of(gpus=False)))
    assert main(["drift", first, str(less)]) == 2
    assert "nvidia.count: none, there 8" in capsys.readouterr().err


def test_nodes_and_keys_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drift_files, "NODES_MAX", 3)
    monkeypatch.setattr(drift_files, "KEYS_MAX", 3)
    with pytest.raises(Failure) as raised:
        drift_files.compared(files(tmp_path, FOUR))
    assert "4 nodes in all, and 3 are compared at most" in str(raised.value)
    assert "4 keys in all, and 3 are compared at most" in str(raised.value)


def test_the_changes_of_many_nodes_are_taken_once(tmp_path: Path) -> None:
    """4,096 nodes with 32 changes each would be looked at 500 million times."""
    names = [f"node-{number:04d}" for number in range(drift_files.NODES_MAX)]
    known = {name: of("1", *[CHANGE] * 16) for name in names}
    (path := tmp_path / "all.json").write_text(json.dumps(answer("", "m5", names, known)))
    began_s = time.process_time()
    found = drift_files.compared([str(path)])
    assert time.process_time() - began_s < 3.0
    assert len(found["changes"]) == 16 * len(names)


def test_a_standard_input_that_is_closed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["drift", "-"]) == 2
    assert "standard input: closed" in capsys.readouterr().err


def test_a_run_is_not_asked_for_beside_files(tmp_path: Path, capsys: Captured) -> None:
    assert main(["drift", "--run", "m5", *files(tmp_path, FOUR)]) == 2
    assert "--run and FILE exclude each other: each file says" in capsys.readouterr().err


def test_the_help_shows_how_several_nodes_are_compared(capsys: Captured) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["drift", "--help"])
    said = capsys.readouterr().out
    assert "srun -l --ntasks-per-node=1 holdfast drift --json | holdfast drift -" in said


# ------------------------------------------------------------------ anything at all

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3)
                    | st.dictionaries(st.text(max_size=8), inner, max_size=3), max_leaves=8)
PIECES = st.sampled_from([*(written(name, one) for name, one in FOUR.items()), srun(FOUR), HALF,
                          "0: ", "node-a: ", "{", "}", "\n", ", ", '"', "\\", "\ud800", "\x1b[2J"])


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=20), max_size=5), st.sampled_from(["", "\n", "\n1: "]))
def test_any_text_is_compared_or_refused(pieces: list[str], between: str) -> None:
    holds(between.join(pieces).encode("utf-8", "surrogatepass"))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_document_with_anything_in_it_is_compared_or_refused(data: st.DataObject) -> None:
    document = told("node-a", of("1", CHANGE))
    key = data.draw(st.sampled_from(sorted(document)))
    document[key] = data.draw(JSON)
    holds((json.dumps(document) + written("node-b")).encode())


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=5), st.dictionaries(
    st.sampled_from(["node", "nvidia"]),
    st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=3)), min_size=1),
    st.integers(1, 80))
def test_however_it_is_cut_the_agents_own_comparison_comes_out(
    sources: dict[str, dict[str, dict[str, str]]], size: int
) -> None:
    """An agent that knew all of these nodes would answer the same."""
    nodes = {
        name: Identity({source: {f"{source}.{key}": value for key, value in values.items()}
                        for source, values in one.items()})
        for name, one in sources.items()
    }
    raw = srun(nodes, size).encode()
    expected = answer(next(iter(nodes)) if len(nodes) == 1 else "", "m5", sorted(nodes), nodes)
    assert drift_files.compared(["-"], io.BytesIO(raw)) == expected


def holds(raw: bytes) -> None:
    try:
        found = drift_files.compared(["-"], io.BytesIO(raw))
    except Failure as failure:
        assert re.match("standard input|[0-9]+ (nodes|keys)", str(failure)) and failure.code == 2
        return
    assert drift.code(found) in (0, 1, 3) and found["nodes"]
    json.dumps(found)
    drift.said(found)


def test_a_long_value_is_said_whole(tmp_path: Path, capsys: Captured) -> None:
    long = "6.8.0-1021-aws-" + "x" * 40
    odd = {"node-a": of(), "node-b": of(), "node-c": of(long)}
    assert main(["drift", *files(tmp_path, odd)]) == 1
    said = capsys.readouterr().out
    assert "…" not in said and max(map(len, said.splitlines())) <= 80
    assert long in "".join(said.split())
