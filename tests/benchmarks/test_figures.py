"""Intervals of ratios between launches, and the verdicts that they give."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import tables
from goals import Goal
from pooling import interval, ratios_to_lowest


def test_interval_is_students():
    low, high = interval([[1.0], [1.1, 1.1, 9.0], [1.21]])  # logarithms 0.1 apart
    half = 4.303 * 0.09531 / 3**0.5
    assert low == pytest.approx(1.1 * 2.71828**-half, rel=1e-3)
    assert high == pytest.approx(1.1 * 2.71828**half, rel=1e-3)
    assert interval([[2.0, 3.0, 4.0]]) == pytest.approx((3.0, 3.0))


def test_the_best_setting_is_chosen_by_the_other_launches():
    launches = [
        {"DDP, a": [1.0], "DDP, b": [2.0], "DDP, a again": [0.1], "ddpx": [1.0]},
        {"DDP, a": [2.0], "DDP, b": [1.0], "DDP, a again": [0.1], "ddpx": [1.0]},
    ]
    assert ratios_to_lowest(launches, "ddpx", "DDP, ") == [[0.5], [0.5]]


@pytest.mark.parametrize(
    ("bounds", "met", "verdict"),
    [
        ((0.99, 1.04), True, "met"),
        ((1.01, 1.05), False, "**missed** by 1.0%"),
        ((0.90, 1.04), True, "met, interval wider than 6%"),
    ],
)
def test_a_goal_is_met_if_its_interval_reaches_it(bounds, met, verdict):
    goal = Goal("a step", 1.02, 1.0, interval=bounds)
    assert (goal.met, goal.verdict) == (met, verdict)
    assert goal.found == "1.02x ({:.2f} - {:.2f})".format(*bounds)


def test_figures_with_another_torch_stand_beside_the_others():
    both, newer = Goal("a step", 1.1, 1.0), Goal("a step that only newer torch has", 0.9, 1.0)
    text = tables.goal_table([both], {"2.15.0": [Goal("a step", 0.8, 1.0), newer]})
    header, _, first, second = text.splitlines()
    assert "measured, torch 2.15.0" in header
    cells = [cell.strip() for cell in first.split("|")[1:-1]]
    assert cells == ["a step", "≤ 1x", "1.1x", "**missed** by 10.0%", "0.8x", "met"]
    cells = [cell.strip() for cell in second.split("|")[1:-1]]
    assert cells == [newer.what, "≤ 1x", "", "", "0.9x", "met"]
