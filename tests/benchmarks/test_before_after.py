"""Tests benchmarks/before_after.py, with this checkout on both sides."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full_only
@pytest.mark.timeout(180)
def test_two_checkouts_take_turns():
    arguments = ["--rounds", "2", "--steps", "1", "--contender", "ddpx, find unused, use varies"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "before_after.py", ROOT, *arguments],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "use varies" in line)
    before_ms, after_ms, *ratios, _ = map(float, row.split("|")[2:-1])
    assert before_ms > 0 and after_ms > 0
    assert 0 < ratios[0] <= ratios[1] <= ratios[2]
