"""Settings: types, limits, and all errors at once."""

from __future__ import annotations

import pickle

import pytest

from holdfast.trainer.config import MOVED, Config, ConfigError, load, named_class, read_options
from holdfast.trainer.example.data import CodeSearchOptions
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
