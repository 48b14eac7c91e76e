"""Ranks that end with their file.

Tests make groups for meshes. torch caches meshes, and later looks for their groups by name, so
these groups cannot be destroyed. The threads of a gloo group wake a hundred times a second, and
would slow down all tests that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from rank_pools import rank_pools

from ddpx.testing import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """As the fixture of all other tests, but until the end of the file."""
    with rank_pools() as get:
        yield get
