"""Two clocks read as one instant."""

from __future__ import annotations

import pytest

from holdfast.agent.system import clocks


class Time:
    """Both clocks, ten seconds apart; whoever reads is held up so long before each reading."""

    CLOCK_BOOTTIME = 7

    def __init__(self, *pauses_s: float) -> None:
        self.now_s, self.pauses_s = 100.0, list(pauses_s)

    def monotonic(self) -> float:
        self.now_s += self.pauses_s.pop(0) if self.pauses_s else 0.0
        return self.now_s

    def clock_gettime(self, clock: int) -> float:
        assert clock == self.CLOCK_BOOTTIME
        return self.monotonic() + 10.0


@pytest.mark.parametrize("pauses_s", [(0.0, 0.0, 0.0), (0.0, 0.2, 0.0), (0.0, 0.0, 0.2, 0.0, 0.2)])
def test_who_is_held_up_between_the_clocks_reads_them_again(
    pauses_s: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clocks, "time", Time(*pauses_s))
    now_s, boot_s = clocks.instant()
    assert boot_s - now_s == pytest.approx(10.0)


def test_a_machine_that_never_lets_it_gets_some_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", Time(*[0.5] * 1000))
    now_s, boot_s = clocks.instant()
    assert 9.0 < boot_s - now_s < 12.0
