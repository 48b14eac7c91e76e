"""Fixtures of the property tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from program_judge import Judge


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    """Runs programs on two ranks, the same ranks for all programs of a file."""
    found = Judge()
    yield found
    found.close()
