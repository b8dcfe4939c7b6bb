"""A bundle holds what stood around an incident, and no secret in any form."""

from __future__ import annotations

import gzip
import io
import json
import stat
import tarfile
from pathlib import Path
from typing import Any

import pytest

from holdfast.agent.evidence import bundle

SECRET = "kAb3dEf6hIj9kLm2nOp5qRs8tUv1wXy4z"


def files(packed: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        found = {}
        for member in archive:
            assert member.mode == 0o640 and member.isfile()
            file = archive.extractfile(member)
            assert file is not None
            found[member.name] = file.read().decode()
        return found


def incident(id: str, opened_s: float, run: str = "") -> dict[str, Any]:
    return {"id": id, "opened_wall_s": opened_s, "run": run, "reason": "x"}


def test_of_all_that_is_told_only_this_run_and_the_node() -> None:
    one = incident("a/b", 1000.0, "mine")
    others = [one, incident("node", 900.0), incident("near", 1200.0, "mine"),
              incident("other", 1000.0, "theirs"), incident("old", 1000.0 - 7200.0)]
    status = {"node": "n", "runs": [{"run": "mine"}, {"run": "theirs"}], "incidents": others,
              "faults": [{"run": "theirs"}, {"run": ""}]}
    found = files(bundle.pack("a/b", bundle.parts_of(one, status, others, checks=[1]), {}))
    assert set(found) == {f"a_b/{name}.json"
                          for name in ("incident", "around", "node", "run", "checks")}
    assert [at["id"] for at in json.loads(found["a_b/around.json"])] == ["node", "near"]
    assert "theirs" not in "".join(found.values())


@pytest.mark.parametrize("planted", [
    f"Authorization: Bearer {SECRET}", f"postgres://me:{SECRET}@db/x", {"WANDB_API_KEY": SECRET},
    ["HF_TOKEN", SECRET], f"hf_{SECRET}", {"evidence": [["password", SECRET]]},
    {"locals": {"x": SECRET}}, {"environ": [SECRET]}, {f"token={SECRET}": 1},
    {"deep": [{"db_password": SECRET}]}, f'{{"secret": "{SECRET}"}}',
])
def test_no_secret_and_no_variable_gets_in(planted: object) -> None:
    packed = bundle.pack("x", {"part": {"planted": planted, "pad_tokens": 7}}, {})
    assert SECRET not in gzip.decompress(packed).decode()
    assert '"pad_tokens": 7' in files(packed)["x/part.json"]


def test_a_key_that_the_end_of_a_log_cuts_is_gone(tmp_path: Path) -> None:
    log = tmp_path / "rank0.log"
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{f'{SECRET}' * 2000}\n-----END RSA PRIVATE KEY-----\n"
    log.write_text("early\n" * 100_000 + key + "training goes on\n")
    end = bundle.tail(log)
    for text in (end, end[-70_000:], end[-30_000:], end[-10_000:], key[1000:]):
        assert SECRET not in bundle.clean_log(text)
    assert "training goes on" in bundle.clean_log(end)


def test_a_part_that_is_too_long_is_said_and_the_others_stay() -> None:
    found = files(bundle.pack("x", {"long": "a" * bundle.FILE_MAX_BYTES, "short": 1}, {}))
    assert found["x/long.json"].startswith("left out") and found["x/short.json"] == "1"


def test_it_is_for_its_group_and_overwrites_nothing(tmp_path: Path) -> None:
    to = tmp_path / "one.tar.gz"
    bundle.write(to, b"x")
    assert stat.S_IMODE(to.stat().st_mode) == 0o640
    with pytest.raises(FileExistsError):
        bundle.write(to, b"y")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        bundle.write(tmp_path / "link", b"y")
