"""Tests benchmarks/before_after.py, with this checkout on both sides."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def _compare(*arguments: str) -> list[float]:
    """The figures of a table with one row."""
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "benchmarks" / "before_after.py",
            ROOT,
            "--rounds",
            "2",
            *arguments,
        ],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return list(map(float, done.stdout.splitlines()[-1].split("|")[2:-1]))


@pytest.mark.full_only
@pytest.mark.timeout(180)
def test_two_checkouts_take_turns():
    before_ms, after_ms, *ratios, _ = _compare(
        "--steps", "1", "--contender", "ddpx, find unused, use varies"
    )
    assert before_ms > 0 and after_ms > 0
    assert 0 < ratios[0] <= ratios[1] <= ratios[2]


@pytest.mark.full_only
@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")
def test_equal_checkouts_take_an_equal_number_of_instructions():
    before, _, *ratios, _ = _compare(
        *("--ranks", "1", "--model", "4,000 tiny tensors"),
        *("--measure", "instructions", "--contender", "ddpx, views"),
    )
    assert before > 4000 * 1e-3  # million; a gradient takes more than a thousand
    assert all(abs(ratio - 1) < 0.003 for ratio in ratios)
