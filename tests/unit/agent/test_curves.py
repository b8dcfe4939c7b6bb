"""The live page's curves: bounded, and no restart is lost; the page itself is small."""

from __future__ import annotations

from holdfast.agent.web.curves import POINTS_MAX, RUNS_MAX, Curve, Curves, Point
from holdfast.agent.web.page import load_page


def test_a_long_run_keeps_its_shape_and_its_restarts() -> None:
    curve = Curve()
    for second in range(200_000):
        curve.add(Point(float(second), second, 1 + second // 50_000, 1.0, 2.0))
    assert len(curve.points) <= POINTS_MAX
    assert curve.points[0].wall_s == 0.0 and curve.points[-1].wall_s > 199_000
    begins = {point.generation: point.step for point in reversed(curve.points)}
    assert begins == {1: 0, 2: 50_000, 3: 100_000, 4: 150_000}


def test_points_come_no_faster_than_is_shown() -> None:
    curve = Curve()
    for tenth in range(100):
        curve.add(Point(tenth / 10, tenth, 1, None, None))
    assert 9 <= len(curve.points) <= 12


def test_runs_that_are_gone_are_forgotten_in_the_end() -> None:
    curves = Curves()
    for number in range(RUNS_MAX + 5):
        curves.add(f"r{number}", Point(1.0, 1, 1, None, 0.5))
    curves.keep({"r0"})
    assert curves.of("r0")["points"] == [[1.0, 1, 1, None, 0.5]]
    assert curves.of("r1")["points"] == [] and curves.of(f"r{RUNS_MAX + 4}")["points"]


def test_the_page_is_small_and_tells_readers_of_screens_what_it_is() -> None:
    page = load_page()[0].decode()
    assert len(page) <= 50_000
    for needed in ('lang="en"', 'role="alert"', 'aria-live="polite"', 'class="skip"', "aria-label",
                   "prefers-color-scheme: dark", ":focus-visible"):
        assert needed in page, needed
