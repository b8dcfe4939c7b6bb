"""Profiles of machines, shipped ones and an operator's own: what is read, which limit speaks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.agent.checks import profiles
from holdfast.agent.checks.table import CHECKS
from holdfast.agent.config.load import ConfigError, load
from holdfast.agent.core.checks.verdict import Measure
from holdfast.worker import toml_text


def test_profiles_have_a_source_for_each_number() -> None:
    shipped = profiles.shipped()
    names = [one.name for one in shipped]
    products = [product for one in shipped for product in one.product]
    assert len(set(names)) == len(names) and len(set(products)) == len(products)
    for one in shipped:
        assert one.devices > 0 and one.source and one.date
        assert all(each.source and each.date and each.value > 0 for each in one.limit)
        measures = {name for check in CHECKS for name in check.measures}
        assert {each.measure for each in one.limit} <= measures
    with pytest.raises(ValueError, match="there are p3dn, p4d"):
        profiles.named("p5d")


OWN = """[profile]
name = "ours"
vendor = "amd"
model = "MI300X"
devices = 8
[[profile.limit]]
measure = "host_copy"
value = 4e10
"""


@pytest.mark.parametrize(("change", "why"), [
    (lambda text: text.replace('"amd"', '"AMD"'), "vendor 'AMD'"),
    (lambda text: text.replace("= 8", "= 0"), "0 devices"),
    (lambda text: text.replace("= 8", "= 1025"), "1025 devices, of at most 1024"),
    (lambda text: text.replace("4e10", "nan"), "limit of host_copy: value = nan: set 0 to 1e+21"),
    (lambda text: text.replace("4e10", "inf"), "limit of host_copy: value = inf: set 0 to 1e+21"),
    (lambda text: text.replace("devices", "device"), "device"),
    (lambda text: text.replace("= 8", '= "8"'), "Expected `int`"),
    (lambda text: "[limits]\n", "it has no [profile]"),
    (lambda text: "profile = 3\n", ""), (lambda text: "[profile\n", "line 1"),
    (lambda text: "[[profile]]\n[[profile]]\n", "too many values"),
    (lambda text: f"{'a.' * 40_000}a = 1\n", "line 1: a key of more than 64 parts"),
    (lambda text: "".join(f"a{n} = [[1, 2]]\n" for n in range(40_000)), "longer than 0.05 s"),
])
def test_an_operators_own_profile_is_read_or_what_is_wrong_with_it_is_said(
    change: Callable[[str], str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(toml_text, "READ_S", 0.05)
    file = tmp_path / "ours.toml"
    file.write_text(OWN)
    found = profiles.chosen(str(file))
    assert found is not None and (found.name, found.devices) == ("ours", 8)
    limit = found.limit_of(Measure("host_copy", 3e10, "B/s", "cuda:0"))
    assert limit is not None and not limit.met and str(file) in limit.source
    file.write_text(f"\ufeff{OWN}")  # as Windows writes it
    assert profiles.chosen(str(file)) == found
    assert profiles.chosen("") is None and profiles.chosen("p5") == profiles.named("p5")
    file.write_text(change(OWN))
    with pytest.raises(ValueError) as raised:
        profiles.chosen(str(file))
    assert f"the profile {file}" in str(raised.value) and why in str(raised.value)
    assert "write one [profile]" in str(raised.value)
    for wrong, said in (("/nowhere/p.toml", "No such file"), (str(tmp_path), "Is a directory"),
                        ("/dev/zero", "no regular file"), ("p5x", "there is no profile 'p5x'")):
        with pytest.raises(ValueError, match=said):
            profiles.chosen(wrong)
        with pytest.raises(ConfigError) as refused:
            load(None, {"checks.profile": (wrong, "a test")})
        assert "a test: checks.profile: " in refused.value.errors[0]


def test_a_limit_of_large_messages_says_nothing_of_small_ones() -> None:
    profile = profiles.of_devices("nvidia", ["NVIDIA H100 80GB HBM3"] * 8)
    assert profile is not None and profile.name == "hgx-h100"
    assert profiles.of_devices("nvidia", ["NVIDIA H100 80GB HBM3"] * 7) is None

    def told(size: int) -> bool | None:
        limit = profile.limit_of(Measure("all_reduce", 1e9, "B/s", f"{size} bytes"))
        return limit.met if limit else None

    assert (told(1 << 20), told(1 << 28), told(1 << 34)) == (None, False, False)


@pytest.mark.parametrize(("name", "size", "least"), [
    ("p3dn", 8 << 30, 110e9), ("p4d", 1 << 28, 150e9), ("p4d", 8 << 30, 228e9),
    ("p5", 1 << 30, 150e9), ("p5", 16 << 30, 460e9), ("p5en", 16 << 30, 431e9),
    ("hgx-a100", 8 << 30, 228e9), ("hgx-h100", 1 << 28, 150e9)])
def test_the_limit_of_the_next_smaller_size_speaks(name: str, size: int, least: float) -> None:
    found = profiles.named(name).limit_of(Measure("all_reduce", least, "B/s", f"{size} bytes"))
    assert found is not None and found.value == least and found.met and found.source
