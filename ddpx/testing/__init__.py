"""Tools for tests of data-parallel code: a pool of ranks, and comparison with DDP."""

from ddpx.testing.compare import (
    Comparison,
    Trace,
    compare_traces,
    compare_with_ddp,
    record_training,
)
from ddpx.testing.rank_pool import RankFailed, RankPool

__all__ = [
    "Comparison",
    "RankFailed",
    "RankPool",
    "Trace",
    "compare_traces",
    "compare_with_ddp",
    "record_training",
]
