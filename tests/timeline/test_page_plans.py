"""The bucket plans of a search on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser_page import open_page
from synthetic import make_recording

from ddpx.planning import MeasuredPlan, PlanReport
from ddpx.planning.candidates import ReadyGradient
from ddpx.planning.gain import Gain
from ddpx.timeline.export.page import page_data
from ddpx.timeline.model import Recording

GRADIENTS = tuple(ReadyGradient(1 << 20, ready_s=0.001 * (index + 1)) for index in range(4))
COSTS = ((float(1 << 20), 0.002), (float(4 << 20), 0.005))  # 1 ms, and 1 ms for each MiB
PLANS = (
    MeasuredPlan("default", ((0, 1, 2, 3),), 0.009, 0.010, 0.02),
    MeasuredPlan("single bucket", ((3, 2, 1, 0),), 0.007, None, 0.03),
    MeasuredPlan("best", ((0, 1), (2, 3)), 0.008, 0.0085, 0.01),
)


def _searched(chosen: str = "best") -> Recording:
    gain = Gain(0.02, 0.01, 0.001)
    report = PlanReport("done", 9, chosen, "<b>why</b>", gain, PLANS, GRADIENTS, COSTS)
    return replace(make_recording(), plan_report=report)


def test_what_is_stored() -> None:
    plans = page_data(_searched())["plans"]
    assert plans["title"] == "Plan: best, after 9 steps: <b>why</b>"
    assert plans["ready"] == [1, 2, 3, 4]
    default, best = plans["rows"]
    assert default["title"] == "default: 1 bucket, step 20.0 ms"
    assert default["spans_ms"] == ((4, pytest.approx(9)),) and default["sizes"] == ("4.0 MiB",)
    assert best["title"] == "best: 2 buckets, step 10.0 ms"
    assert best["spans_ms"] == (
        (2, pytest.approx(5)),
        (pytest.approx(5), pytest.approx(8)),
    )
    assert (best["predicted_end_ms"], best["measured_end_ms"]) == (8, 8.5)
    kept = page_data(_searched("default"))["plans"]["rows"]
    assert [row["title"] for row in kept] == [default["title"], best["title"]]


@pytest.mark.parametrize("report", [None, PlanReport("done", 0, "default", "one gradient")])
def test_without_measured_plans(report: PlanReport | None) -> None:
    assert page_data(replace(make_recording(), plan_report=report))["plans"] is None


def test_the_page(browser: Any, tmp_path: Path) -> None:
    page = open_page(browser, _searched(), tmp_path / "page.html")
    assert "<b>why</b>" in page.find("#plans p").text
    default, best = page.find_all("#plans figure")
    assert default.text.split("\n") == [
        "default: 1 bucket, step 20.0 ms",
        "predicted end 9.0 ms",
        "measured end 10.0 ms",
    ]

    def left(figure: Any, selector: str) -> list[float]:
        """Begins in ms, from positions on the screen."""
        tracks = figure.find_element("css selector", ".tracks").rect
        found = figure.find_elements("css selector", f".tracks {selector}")
        length_ms = 1.02 * 10
        return [length_ms * (each.rect["x"] - tracks["x"]) / tracks["width"] for each in found]

    assert left(default, ".reduction") == pytest.approx([4], abs=0.05)
    assert left(best, ".reduction") == pytest.approx([2, 5], abs=0.05)
    assert left(best, ".gradient") == pytest.approx([1, 2, 3, 4], abs=0.05)
    assert left(best, ".end") == pytest.approx([8, 8.5], abs=0.05)
    second = best.find_elements("css selector", ".reduction")[1]
    assert second.get_attribute("title") == "bucket 1, 2.0 MiB: 5.00 to 8.00 ms, as predicted"
    page.check_log()


def test_a_page_without_a_search(page: Any) -> None:
    assert not page.find("#plans").is_displayed()
