"""Verdicts on step times: identical scripts are not told apart, and large differences are."""

from __future__ import annotations

import random

import pytest

from ddpx.cli.timeline.verdict import Verdict, compare_steps

# Standard deviations of the logarithm of a step's time: between launches, of a drift within a
# launch, and from step to step.
QUIET = (0.01, 0.01, 0.02)
BUSY = (0.2, 0.15, 0.15)
LAUNCHES_DIFFER = (0.05, 0.01, 0.02)
_NUM_PAIRS = 500


def _launch(chance: random.Random, noise: tuple[float, float, float], factor: float) -> list[float]:
    """The times of 20 steps, in which a drift persists for about 5 steps. Some steps are late."""
    of_launch, of_drift, of_step = noise
    level = factor * 20 * chance.lognormvariate(0, of_launch)
    drift = chance.gauss(0, of_drift)
    times = []
    for _ in range(20):
        drift = 0.8 * drift + 0.6 * chance.gauss(0, of_drift)
        late = 3 if chance.random() < 0.02 else 1
        times.append(level * late * chance.lognormvariate(drift, of_step))
    return times


def _share(noise: tuple[float, float, float], factor: float, num_launches: int) -> float:
    """The share of pairs whose verdict is "slower" or "faster"."""
    chance = random.Random(17)
    told_apart = 0
    for _ in range(_NUM_PAIRS):
        new = [_launch(chance, noise, factor) for _ in range(num_launches)]
        base = [_launch(chance, noise, 1) for _ in range(num_launches)]
        verdict = compare_steps(new, base)
        assert verdict is not None
        told_apart += verdict.is_slower or verdict.is_faster
    return told_apart / _NUM_PAIRS


@pytest.mark.parametrize("num_launches", [1, 3])
@pytest.mark.parametrize("noise", [QUIET, BUSY, LAUNCHES_DIFFER])
def test_identical_scripts_are_rarely_told_apart(noise, num_launches):
    """With a chance of 2 %, twenty pairs have at most one false verdict in 94 % of all cases."""
    assert _share(noise, 1, num_launches) <= 0.02


@pytest.mark.parametrize(
    ("noise", "factor", "num_launches"),
    [(QUIET, 1.1, 3), (QUIET, 1.6, 1), (BUSY, 4.0, 3), (LAUNCHES_DIFFER, 1.5, 3)],
)
def test_large_differences_are_found(noise, factor, num_launches):
    assert _share(noise, factor, num_launches) >= 0.9


@pytest.mark.parametrize(("num_steps", "num_launches"), [(14, 1), (14, 3), (0, 1)])
def test_too_few_steps_or_launches(num_steps, num_launches):
    assert compare_steps([[10.0] * num_steps], [[10.0] * num_steps]) is None


def test_interval_of_launches():
    """The medians are 10, 11, 12 and 20, 22, 24: Student's interval for 4 degrees of freedom."""
    base = [[1.0, 10.0, 90.0], [11.0], [12.0]]
    found = compare_steps([[2 * ms for ms in launch] for launch in base], base)
    assert found == Verdict(
        before_ms=11.0,
        after_ms=22.0,
        low=pytest.approx(1.4196, abs=0.001),
        high=pytest.approx(2.8178, abs=0.001),
        basis="3 and 3 launches",
    )
    assert found.is_slower and found.ratio == 2


def test_one_launch_counts_among_several():
    assert compare_steps([[10.0]], [[10.0], [10.1], [9.9]]).basis == "1 and 3 launches"


@pytest.mark.parametrize("num_steps", [15, 20])
def test_equal_times(num_steps):
    found = compare_steps([[10.0] * num_steps], [[10.0] * num_steps])
    assert found.basis == "5 and 5 blocks of steps"
    assert found.low < 1 < found.high
