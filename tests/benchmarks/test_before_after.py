"""Tests benchmarks/before_after.py, with this checkout on both sides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))

from before_after import mean_and_interval  # noqa: E402


def _compare(*arguments: str) -> list[str]:
    """The cells of a table with one row, without the contender's name."""
    command = [sys.executable, ROOT / "benchmarks" / "before_after.py", ROOT, "--rounds", "2"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split("|")[2:-1]


@pytest.mark.full_only
@pytest.mark.timeout(240)
def test_two_checkouts_take_turns():
    before_ms, after_ms, *ratios, _ = _compare(
        *("--starts", "2", "--steps", "1", "--contender", "ddpx, find unused, use varies")
    )
    assert float(before_ms) > 0 and float(after_ms) > 0
    for ratio, interval in (ratios[:2], ratios[2:]):
        low, high = map(float, interval.split(" - "))
        assert 0 < low <= float(ratio) <= high


@pytest.mark.full_only
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_equal_checkouts_take_an_equal_number_of_instructions():
    before, _, ratio, _, noise, *_ = _compare(
        *("--starts", "1", "--ranks", "1", "--model", "4,000 tiny tensors"),
        *("--measure", "instructions", "--contender", "ddpx, views"),
    )
    assert float(before) > 4000 * 1e-3  # million; a gradient takes more than a thousand
    assert abs(float(ratio) - 1) < 0.003 and abs(float(noise) - 1) < 0.003


def test_an_interval_contains_the_mean_without_outliers():
    assert mean_and_interval([1.0, 1.0, 1.0]) == [1.0, "1.000 - 1.000"]
    mean, interval = mean_and_interval([0.5, *[0.98, 1.0, 1.02] * 6, 9.0])
    low, high = map(float, str(interval).split(" - "))
    assert mean == pytest.approx(1) and 0.9 < low < 1 < high
