"""Every collector that reads files, on this machine, with files that are damaged at random.

What is read is this machine's own; a seed decides which readings are cut, junk, or fail.  A reading
may be missing then, and nothing else may: no crash, and no value that is no number.
"""

from __future__ import annotations

import random
import re
import sys

import msgspec
import pytest

from holdfast.agent.runner import Reply
from holdfast.collectors import ALL
from holdfast.collectors.__main__ import _answer
from holdfast.collectors.roots import Roots
from holdfast.collectors.sample import NoData

TOOLS = ("nvidia", "neuron", "amd", "nvme_smart", "dns", "units", "ec2")  # ask others than files
FILES = [one for one in ALL if one.name not in TOOLS]
JUNK = ("", "\n", "-1\n", "nan", "inf", "1e999", "\x00\x01", "max", "9" * 5000, "٣", "0x10", ":",
        "a b c d e f g h i j k l m n o p q r s t u v w x y z", "1,2", "-", "\ufffd" * 9, "= = =",
        "1 " * 4000)  # fmt: skip
CRASH = re.compile(r"\w*(Error|Exception): ")


def damaged(seed: int, read):
    """`read_text` of a machine whose files are not what they were."""
    chance = random.Random(seed)

    def damaged_read(path: str, *more, **others) -> str:
        if chance.random() < 0.1:
            raise NoData(f"{path}: Permission denied")
        text = read(path, *more, **others)
        if chance.random() < 0.6:
            return text
        at, until = sorted(chance.randrange(len(text) + 1) for _ in range(2))
        return text[:at] + chance.choice(JUNK) + text[until:]

    return damaged_read


@pytest.mark.parametrize("make", FILES, ids=lambda one: one.name)
def test_a_damaged_file_costs_readings_and_no_more(make, monkeypatch):
    for seed in range(40):
        with monkeypatch.context() as patch:
            for name, module in list(sys.modules.items()):
                if name.startswith("holdfast.collectors.") and hasattr(module, "read_text"):
                    patch.setattr(module, "read_text", damaged(seed, module.read_text))
            collector = make()
            for boot_s in (100.0, 101.0):
                answer = _answer(collector, Roots(), boot_s)
                said = str(answer.get("error", ""))
                assert not CRASH.match(said), (seed, said)
                msgspec.json.decode(msgspec.json.encode(answer), type=Reply)
