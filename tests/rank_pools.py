"""Pools of ranks by their number."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ddpx.testing import RankPool


@contextlib.contextmanager
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """A function that returns a pool of n gloo ranks, the same one in each call."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        return pools.setdefault(world_size, RankPool(world_size))

    yield get
    for pool in pools.values():
        pool.close()
