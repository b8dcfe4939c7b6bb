"""Signatures of the operator's own: good ones are used, bad ones are named by file and key."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from holdfast.agent.config.load import ConfigError, Loaded, load
from holdfast.agent.core.parse.logs.scan import Scanner
from holdfast.agent.logs import files

GOOD = """
[[signature]]
id = "our_storage_lost"
role = "root"
category = "storage"
culprit = "storage"
retryable = "yes"
pattern = 'blobfs: volume (?P<volume>\\S+) went away'
literals = ["blobfs: volume"]
samples = ["[rank3]: E0412 blobfs: volume train-7 went away (rc=-5)"]
"""


def loaded(folder: Path, *texts: str) -> Loaded:
    main = folder / "agent.toml"
    main.write_text("[agent]\ntick_s = 0.5\n")
    (folder / "conf.d").mkdir()
    for number, text in enumerate(texts):
        (folder / "conf.d" / f"{number}.toml").write_text(text)
    return load(main)


def test_a_good_one_is_taken_and_found_without_a_gate_of_ours(tmp_path: Path) -> None:
    rows = loaded(tmp_path, GOOD).signatures
    assert [row["id"] for row in rows] == ["our_storage_lost"]
    scanner = Scanner(files.with_own(files.load_catalogue(), rows))
    scanner.feed(b"quiet\nblobfs: volume a went away\n")
    scanner.close()
    assert [(one.signature, one.fields) for one in scanner.matches] == [
        ("our_storage_lost", (("volume", "a"),))
    ]


def test_a_signal_of_ones_own_is_searched_where_signals_are(tmp_path: Path) -> None:
    rows = loaded(tmp_path, GOOD.replace('"root"', '"signal"')).signatures
    catalogue = files.with_own(files.load_catalogue(), rows)
    assert b"blobfs: volume" in catalogue.signal_gates and b"blobfs: volume" not in catalogue.gates


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ('id = "our_storage_lost"', 'id = "Our storage"', "id"),
        ('id = "our_storage_lost"', "", "id"),
        ('role = "root"', 'role = "boss"', "role"),
        ('culprit = "storage"', "", "culprit"),
        ('retryable = "yes"', "retryable = 1", "retryable"),
        ('category = "storage"', "category = 3", "category"),
        ("pattern = 'blobfs", "pattern = '(blobfs", "pattern"),
        ("went away'", "came'", "samples"),
        ('literals = ["blobfs: volume"]', 'literals = ["b"]', "literals"),
        ('literals = ["blobfs: volume"]', 'literals = "blobfs"', "literals"),
        ('literals = ["blobfs: volume"]', 'literals = ["other text"]', "samples"),
        ("samples = [", "samples = [ 3, ", "samples"),
        ('role = "root"', 'role = "root"\nweak = "no"', "weak"),
        ('role = "root"', 'role = "root"\nfatal = 1', "fatal"),
        ('role = "root"', 'role = "root"\ncolour = "red"', "colour"),
    ],
)
def test_a_bad_one_is_named_by_file_and_key(
    tmp_path: Path, old: str, new: str, key: str
) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, GOOD.replace(old, new))
    assert len(caught.value.errors) == 1, caught.value.errors
    said = caught.value.errors[0]
    assert said.startswith(f"{tmp_path}/conf.d/0.toml: signature ") and f": {key}: " in said
    assert any(word in said for word in ("set ", "change ", "mend "))


def test_every_error_of_every_file_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, GOOD, GOOD, "[signature]\nid = 3\n", GOOD.replace('"yes"', '"no way"'))
    said = caught.value.errors
    assert len(said) == 3, said
    assert "2.toml: signature: write [[signature]]" in said[0]
    assert "3.toml" in said[1] and "retryable" in said[1]
    assert "1.toml" in said[2] and "is also in" in said[2] and "0.toml" in said[2]


def test_on_a_machine_without_time_for_us_good_ones_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 4.0 * next(ticks))
    several = "".join(GOOD.replace("our_storage", f"our_{n}") for n in range(4))
    assert len(loaded(tmp_path, several).signatures) == 4


def test_too_many_are_refused(tmp_path: Path) -> None:
    many = "".join(GOOD.replace("our_storage", f"our_{n}") for n in range(40))
    with pytest.raises(ConfigError, match="80 rows"):
        loaded(tmp_path, many, many.replace("our_", "their_"))
