"""The best partition of gradients into buckets, for one channel that reduces buckets in order.

Gradients arrive in a fixed order. A bucket has consecutive gradients, and can start when its last
gradient is ready and the bucket before it is reduced. With F[j] as the end of the communication of
the first j gradients:

    F[j] = min over i of  max(ready of gradient j, F[i]) + T(bytes of gradients i+1 to j)

This holds for any T, because a partition of the first i gradients that ends later is never better.
The greedy rule of MG-WFBP (Shi et al., INFOCOM 2019) assumes T = a + b * bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ddpx.planning.cost import ReduceCost


@dataclass(frozen=True)
class Gradient:
    """A gradient, in the order of arrival.

    Attributes:
        num_bytes: Its size.
        ready_s: The time in seconds from the start of the backward until it is ready on all ranks.

    Example:
        >>> from ddpx.planning import Gradient
        >>> Gradient(num_bytes=4_096, ready_s=0.002).num_bytes
        4096
    """

    num_bytes: int
    ready_s: float


def best_partition(gradients: Sequence[Gradient], cost: ReduceCost) -> list[int]:
    """The sizes of buckets, as numbers of gradients, with which communication ends first.

    Takes time proportional to the square of the number of gradients. Of several best partitions,
    the one whose last buckets are largest.

    Args:
        gradients: In the order of arrival.
        cost: The time of an all-reduce.

    Example:
        >>> from ddpx.planning import Gradient, ReduceCost, best_partition
        >>> cost = ReduceCost([(1, 1.0), (1_000_000, 1.1)])  # nearly the same for each size
        >>> gradients = [Gradient(100, 0.1 * number) for number in range(4)]
        >>> best_partition(gradients, cost)
        [4]
    """
    count = len(gradients)
    num_bytes = [0, *(gradient.num_bytes for gradient in gradients)]
    sizes = torch.tensor(num_bytes, dtype=torch.float64, device="cpu").cumsum(0)
    ends = torch.zeros_like(sizes)
    starts = [0] * (count + 1)  # of the last bucket of the best partition
    ready = itertools.accumulate((g.ready_s for g in gradients), max)
    for end, ready_s in enumerate(ready, start=1):
        times = ends[:end].clamp(min=ready_s) + cost.of(sizes[end] - sizes[:end])
        starts[end] = int(times.argmin())
        ends[end] = times[starts[end]]
    partition = []
    end = count
    while end > 0:
        partition.append(end - starts[end])
        end = starts[end]
    return partition[::-1]
