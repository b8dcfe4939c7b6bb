"""No secret in a job's words passes into what the agent keeps, and training's own words stay."""

from __future__ import annotations

import datetime
import json
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agent.launchers import protocol
from holdfast.agent.logs import child
from holdfast.worker import wire
from holdfast.worker.launcher import process
from holdfast.worker.redact import GONE, redacted, redacted_value, redacted_words

SECRET = st.text("abcdefghijklmnopqrstuvwxyzABCDEFGHXYZ0123456789+/=_-.", min_size=8,
                 max_size=60).map(lambda text: f"k{text}7Z")
TEMPLATES = (
    "could not reach postgres://user:{}@db.example.com:5432/train",
    "git clone https://{}@github.com/x/y failed",
    "redis: admin:{}@10.0.0.1 refused",
    "401 for https://api.example.com/v1?run=3&token={}&page=2",
    "ValueError: token={}",
    "headers: {{'Authorization': 'Bearer {}', 'Accept': '*/*'}}",
    'headers: {{"authorization": "Basic {}"}}',
    "Authorization: {}",
    "curl -H Authorization:Bearer {}",
    "sent Bearer {} to the server",
    "Cookie: session={}; path=/",
    "AWS_SECRET_ACCESS_KEY={}",
    "botocore: aws_secret_access_key = '{}' is wrong",
    "aws_session_token: {}",
    "login(user='me', password='{} and more')",
    'connect(password="{}")',
    '{{\\"api_key\\": \\"{}\\"}}',
    "os.environ['WANDB_API_KEY'] = '{}'",
    "X-Amz-Signature={}&X-Amz-Date=1",
    "hf_{}", "--db-password={}", "my_secret => {}", "passwd:{}", "x-api-key: {}",
    "-----BEGIN RSA PRIVATE KEY-----\n{}\n-----END RSA PRIVATE KEY-----",
)
ALNUM = "".join(chr(n) for n in range(48, 123) if chr(n).isalnum())
AROUND = st.text(st.sampled_from("ab 1.:=,;/\n-_()"), max_size=30)


@given(st.sampled_from(TEMPLATES), SECRET, AROUND, AROUND)
def test_a_planted_secret_is_gone(template: str, secret: str, before: str, after: str) -> None:
    if "://" in template or "admin:" in template:
        secret = secret.replace("/", "_")  # none stands in an address unescaped
    if template == "hf_{}":
        secret = "".join(c for c in secret if c.isalnum()) + 20 * "x"
        before += " "
    text = f"{before} {template.format(secret)} {after}"
    found = redacted(text)
    assert secret not in found and "***" in found, found
    assert redacted(found) == found


@given(st.sampled_from(TEMPLATES), SECRET)
def test_no_packet_brings_one_in(template: str, secret: str) -> None:
    """In each of the fields in which a job's words come, evidence and logs included."""
    secret = "".join(c for c in secret if c.isalnum()) + 20 * "x"
    text = template.format(secret)
    ended = {"code": 1, "signal": 0, "outcome": "exception", "error": text, "by_us": False,
             "boot_s": 1.0, "wall_s": 1.0}
    rank = {"rank": 0, "pid": 5, "generation": 1, "state": "ended", "ended": ended, "parked": None}
    packets = (
        {"t": "hello", "run": "x", "protocol": 1, "argv": ["a.py", text, "--token", secret]},
        {"t": "levels", "generation": 1, "ranks": [rank], "commits": [
            {"generation": 1, "step": 2, "path": "/secret=1/c", "world": 1, "bad": text}]},
        {"t": "outcome", "id": "token=1", "ok": True, "error": text,
         "detail": json.dumps({"root": {"line": text}, "stack": [text]})},
        {"t": "report", "rank": 0, "fault": "checkpoint_failed", "text": text},
    )
    for packet in packets:
        read = protocol.decode(json.dumps(packet).encode())
        assert secret not in msgspec.json.encode(read).decode(), packet
        if isinstance(read, protocol.Outcome):
            assert read.id == "token=1" and json.loads(read.detail)
        if isinstance(read, protocol.Levels):
            assert read.commits[0].path == "/secret=1/c"


@pytest.mark.parametrize("text", [
    "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "pad_token=0 eos_token: </s> max_tokens=512 tokens/s: 31204",
    "step 5 tokens: 1024, token=1024",
    "KeyError: 'layers.0.attention.key'",
    "ValueError: unexpected keyword argument 'key'",
    "rank 3 (pid 77): connect 10.0.0.1:5000 refused",
    "torch.distributed.DistBackendError: NCCL error in: ../ProcessGroup.cpp:1970",
])
def test_trainings_own_words_stay(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize("before", range(455, 505, 7))
def test_no_cut_leaves_half_a_secret_that_nobody_knows_any_more(
    tmp_path: Path, before: int
) -> None:
    """An address is one by its `@`: its password must go before the cut takes that away."""
    words = "x" * before + " postgres://user:Geheim9Geheim9Geheim9@db.example.com/train"
    rank: Any = SimpleNamespace(home=str(tmp_path), folder=str(tmp_path), number=0)
    (tmp_path / "stderr.log").write_text(f"  what():  {words}\n")
    cuts = [process.error_line(rank, signal.SIGABRT), wire.cut(words, 500)]
    (tmp_path / "error-0.json").write_text(json.dumps({"message": {"message": words}}))
    cuts.append(process.error_line(rank, 0))
    line: Any = SimpleNamespace(
        signature="", role="", culprit="", rank=0, text=words[300:])
    cuts.append(child.seen_row(line)["text"])
    assert [one for one in cuts if "Geheim" in one or len(one) > 500] == []


def test_a_flag_and_its_value() -> None:
    assert redacted_words(["a.py", "--api-key", "abc", "--lr", "1"]) == [
        "a.py", "--api-key", "***", "--lr", "1"]


def test_settings_are_kept_without_their_secrets() -> None:
    given = {
        "steps": 5, "tokenizer": "bert", "pad_token": "</s>", "max_tokens": 64, "token": 7,
        "password": 1234, "auth": "me", "author": "me", "compass": "n", "empty_token": "",
        "read_token": "geheim", "root": "s3://user:geheim@host/x", "on": True, "secret_flag": True,
        "credentials": {"name": "me", "keys": ["geheim", 5]}, "lines": ["token=geheim", 3, None],
    }
    assert redacted_value(given) == {
        **given, "password": GONE, "auth": GONE, "read_token": GONE, "root": f"s3://{GONE}@host/x",
        "credentials": {"name": GONE, "keys": [GONE, GONE]}, "lines": [f"token={GONE}", 3, None]}


@pytest.mark.parametrize("name", [
    "key", "wandb_key", "ssh_key", "api_tokens", "creds", "dbpass", "passcode", "bearer", "oauth",
    "slack_webhook"])
def test_a_setting_of_such_a_name_is_kept_as_a_name_alone(name: str) -> None:
    assert redacted_value({name: ["geheim"], "monkey": "see"}) == {name: [GONE], "monkey": "see"}


def test_what_a_file_of_settings_may_hold_besides_becomes_text() -> None:
    """TOML has dates; JSON has none, and without a manifest no checkpoint is ever committed."""
    given = {"began": datetime.date(2026, 11, 27), "of": {"https://me:geheim@host/": 1}}
    assert json.loads(json.dumps(redacted_value(given))) == {
        "began": "2026-11-27", "of": {f"https://{GONE}@host/": 1}}


@pytest.mark.parametrize("text", ["a" * 32_000, "token" * 6_000, "a:" * 16_000, "'" * 32_000,
                                  "secret='" * 4_000, "://" * 10_000, "cookie " * 4_000,
                                  "-----BEGIN PRIVATE KEY-----" * 1_000])
def test_it_takes_no_time(text: str) -> None:
    begin_s = time.process_time()
    redacted(text)
    assert time.process_time() - begin_s < 1.0
