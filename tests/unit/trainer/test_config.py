"""Settings: types, limits, and all errors at once."""

from __future__ import annotations

import dataclasses
import os
import pickle
from typing import get_type_hints

import pytest

from holdfast.trainer.config import (
    MOVED,
    Config,
    ConfigError,
    Options,
    load,
    named_class,
    read_options,
)
from holdfast.trainer.example.data import CodeSearchOptions
from holdfast.trainer.example.model import EncoderOptions
from holdfast.trainer.example.multitask import MultiTaskOptions
from holdfast.trainer.feed.ray_data import RayOptions
from holdfast.trainer.feed.shards import ShardOptions
from holdfast.trainer.standalone import place


def problems(path=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return caught.value.problems


def test_defaults_are_valid():
    assert load(None) == Config()


def test_file_then_overrides(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text('steps = 7\n[optimizer]\nlearning_rate = 1\n[model_options]\nwidth = 64\n')
    config = load(str(file), ["steps=9", "checkpoint.dir=/x y", "model_options.layers=2"])
    assert (config.steps, config.optimizer.learning_rate) == (9, 1.0)
    assert config.checkpoint.dir == "/x y"
    assert config.model_options == {"width": 64, "layers": 2}


def test_all_errors_at_once_with_key_and_remedy():
    found = problems(None, ["step=3", "batch=-1", "steps=x", "optimizer.beta1=2", "seed", "a.b=1"])
    text = "\n".join(found)
    assert "step: unknown key; did you mean steps?" in text
    assert "batch = -1: set at least 1" in text
    assert "steps = 'x': set a value of type int" in text
    assert "optimizer.beta1 = 2" in text
    assert "'seed': set it as key=value" in text
    assert "a: unknown key" in text


@pytest.mark.parametrize("override, said", [
    ("seed=true", "type int"), ("checkpoint=3", "set a table [checkpoint]"),
    ("checkpoint.keep=0", "at least 1"), ("checkpoint.digest=md5", "xxh3_128, sha256"),
    ("model=nothing", "module:Class"), ("device=tpu", "one of auto, cpu"),
    ("model_options=3", "table"), ("steps.x=1", "type int"),
])
def test_each_limit(override, said):
    assert said in "\n".join(problems(None, [override]))


@pytest.mark.parametrize("content, said", [
    (b"steps = ", "not TOML"), (b"\xff\xfe", "not TOML"), (b"#" * (1 << 20) + b"\n\n", "larger"),
])
def test_bad_file(tmp_path, content, said):
    file = tmp_path / "train.toml"
    file.write_bytes(content)
    (problem,) = problems(str(file))
    assert said in problem and str(file) in problem


def test_a_file_may_begin_with_the_mark_that_windows_writes(tmp_path):
    file = tmp_path / "train.toml"
    file.write_text("\ufeffsteps = 7\n")
    assert load(str(file)).steps == 7


def test_no_file(tmp_path):
    assert "cannot be read" in problems(str(tmp_path / "none.toml"))[0]


def test_what_is_no_file_is_an_error_and_never_a_wait(tmp_path):
    """The launcher reads before it answers a Ctrl-C, and /dev/zero has no end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    keeper = os.open(fifo, os.O_RDWR)  # so that a reader that waits, waits for a byte and not here
    os.write(keeper, b"steps = \n")
    try:
        for path in (str(fifo), "/dev/null"):
            (problem,) = problems(path)
            assert f"{path}: cannot be read: no regular file: set a TOML file" in problem
    finally:
        os.close(keeper)


def test_what_takes_for_ever_to_read_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("holdfast.worker.toml_text.READ_S", 0.05)
    file = tmp_path / "train.toml"
    file.write_text("model_options." + ".".join("a" * 40_000) + " = 1\n")
    (problem,) = problems(str(file))
    assert "not TOML: line 1: a key of more than 64 parts" in problem
    file.write_text("".join(f"a{number} = {{ b.c.d = [[1, 2]] }}\n" for number in range(30_000)))
    (problem,) = problems(str(file))
    assert "takes longer than 0.05 s to read: shorten its keys" in problem


@pytest.mark.parametrize("content", ["a." * 40 + "a = 1", "a = [{a" + ".a" * 40 + " = 1}]"])
def test_tables_lie_in_one_another_to_a_depth(tmp_path, content):
    file = tmp_path / "train.toml"
    file.write_text(f"[model_options]\n{content}\n")
    (problem,) = problems(str(file))
    assert "model_options: more than 32 tables or lists in one another: set fewer" in problem


def test_a_file_with_what_python_cannot_count_is_said(tmp_path):
    file = tmp_path / "train.toml"
    for content, said in (("steps = " + "9" * 5000, "not TOML"), ("a = " + "[" * 5000, "not TOML"),
                          ("model = 0x" + "f" * 5000, "a number of thousands of digits"),
                          ("[optimizer]\nlearning_rate = 0x" + "f" * 5000,
                           "a number of thousands of digits: set a number above 0")):
        file.write_text(content)
        (problem,) = problems(str(file))
        assert said in problem and len(problem) < 400


TABLES = [Config, EncoderOptions, MultiTaskOptions, CodeSearchOptions, RayOptions, ShardOptions,
          *(type(one.default) for one in dataclasses.fields(Config)
            if isinstance(one.default, Options))]


@pytest.mark.parametrize("table", TABLES)
def test_every_number_has_an_upper_bound_that_its_error_says(table):
    for name, kind in get_type_hints(table).items():
        wrong = {int: (10**20,), float: (1e20, float("inf"), float("nan"))}.get(kind, ())
        for value in wrong:
            with pytest.raises(ConfigError) as raised:
                read_options(table, {name: value})
            told = "\n".join(raised.value.problems)
            assert f"{name} = {value!r}: set " in told, (name, value)


def test_more_steps_than_a_page_can_hold_are_refused():
    (problem,) = problems(None, ["steps=10000000000000000"])
    assert problem.endswith("set at least 1 and at most 1000000000000")
    assert "auto, or at least 1" in problems(None, [f"mics.group={10**20}"])[0]


def test_named_class():
    assert named_class("holdfast.trainer.config:Config", "model") is Config
    for name in ("nowhere:X", "holdfast.trainer.config:Nothing"):
        with pytest.raises(ConfigError, match="model = "):
            named_class(name, "model")


@pytest.mark.parametrize("name", MOVED)
def test_a_class_is_found_under_the_name_it_had(name):
    default = Config().model if name.endswith("Encoder") else Config().data
    assert MOVED[name] == default
    assert named_class(name, "model") is named_class(default, "model")


def test_options_of_a_plugged_in_class():
    with pytest.raises(ConfigError, match="data_options.vocabulary = 3"):
        read_options(CodeSearchOptions, {"vocabulary": 3}, "data_options")


@pytest.mark.parametrize("wrong, named", [
    ({"RANK": "-1"}, "$RANK is '-1': set 0 to 1"), ({"RANK": "2"}, "$RANK is '2': set 0 to 1"),
    ({"LOCAL_RANK": "x"}, "$LOCAL_RANK is 'x'"), ({"WORLD_SIZE": "9" * 5000}, "$WORLD_SIZE"),
    ({"WORLD_SIZE": "0"}, "$WORLD_SIZE is '0': set 1 to"), ({"RANK": ""}, "$RANK is ''"),
    ({"MASTER_PORT": "99999"}, "$MASTER_PORT is '99999': set 1 to 65535"),
    ({"MASTER_ADDR": None}, "$MASTER_ADDR is not set"),
])
def test_a_place_that_is_none(wrong, named):
    right = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
             "MASTER_PORT": "29500"}
    assert place(right) == (1, 1, 2) and place({}) == (0, 0, 1)
    with pytest.raises(ConfigError) as raised:
        place({key: value for key, value in (right | wrong).items() if value is not None})
    assert named in raised.value.problems[0] and len(str(raised.value)) < 300


def test_an_error_is_the_same_behind_another_process() -> None:
    sent = pickle.loads(pickle.dumps(ConfigError(["a = 1: set 2", "b"])))
    assert sent.problems == ("a = 1: set 2", "b") and str(sent) == "a = 1: set 2\nb"
