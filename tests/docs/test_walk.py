"""docs/internals.md follows one gradient through the sources: each stop of the walk exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 20


def test_each_stop_exists() -> None:
    page = (ROOT / "docs" / "internals.md").read_text()
    (walk,) = re.findall(r"<!-- walk: begin -->\n(.*?)<!-- walk: end -->", page, re.S)
    stops = re.findall(r"^\| \d+ \| `([\w/.]+)` \| `([^`]+)` \|", walk, re.M)
    assert len(stops) == walk.count("\n") - 2
    for file, function in stops:
        assert function in (ROOT / file).read_text(), (file, function)
    assert len({file.rpartition(".")[0] for file, _ in stops}) <= MOST_FILES
