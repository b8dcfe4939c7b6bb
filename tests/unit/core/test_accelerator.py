"""When accelerators are judged: what each reading means is tested on the drivers' stand-ins."""

from __future__ import annotations

from holdfast.agent.core.detect import accelerator
from holdfast.agent.core.model import RankView, RunView
from holdfast.collectors.sample import Sample


def at(boot_s: float, lost: float) -> tuple[Sample, ...]:
    """A node on which the host was read just now, and its device whenever that changed."""
    return (Sample("host_load_average", "window=1m", 1.0, boot_s),
            Sample("accelerator_lost", "vendor=nvidia,device=3", lost, 1.0 + lost),
            Sample("accelerator_process", "vendor=nvidia,device=3,pid=11", 1.0, 1.0))


def test_devices_are_looked_at_again_when_theirs_is_newer_and_not_for_the_hosts() -> None:
    mind = accelerator.Accelerators("n")
    lost = mind.verdicts(at(2.0, 1.0), (), {})
    assert [one.fault for one in lost] == ["accelerator_lost"]
    view = RunView("m5", "n", "trainer", 1, ranks=(RankView(7, "n", 11, 1, "running"),))
    assert mind.verdicts(at(3.0, 1.0), (view,), {}) is lost
    assert not mind.verdicts(at(4.0, 0.0), (), {})
    (named,) = mind.verdicts(at(5.0, 1.0), (), {})
    assert "rank 7 of m5 computed there" in named.reason  # seen while only the host was newer
