"""docs/environment.md lists exactly the environment variables of the sources."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = (
    "setup.py",
    "csrc/extension.py",
    "ddpx/**/*.py",
    "csrc/**/*.cpp",
    "tests/property/*.py",
    "benchmarks/*.cpp",
)


def test_page_and_sources_have_the_same_variables():
    used = {
        name
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        for name in re.findall(r'"(DDPX_[A-Z_]+)"', path.read_text())
    }
    told = re.findall(r"`(DDPX_[A-Z_]+)`", (ROOT / "docs" / "environment.md").read_text())
    assert len(used) > 10
    assert sorted(told) == sorted(used)
