"""Fixtures that many test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ddpx.testing import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="whole matrices, of which otherwise a part is run"
    )


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """``ranks(n)``: a pool of n gloo ranks that lives for the session; idle, it costs memory."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session", params=[2, 3])
def world(request: pytest.FixtureRequest) -> int:
    """Number of ranks. Tests are grouped by it, since starting ranks takes seconds."""
    return int(request.param)
