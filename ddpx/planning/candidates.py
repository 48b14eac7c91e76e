"""The bucket plans that a search compares in training steps.

The cost of an all-reduce alone does not decide on CPUs, where communication slows computation. So
the search measures the plans of several costs, coarser plans, and the default plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ddpx.planning.cost import ReduceCost
from ddpx.planning.partition import Gradient, best_partition

Buckets = tuple[tuple[int, ...], ...]

DEFAULT = "default"
# A slower all-reduce leads to other buckets. 3: communication that computation slows down.
_SCALES = {"best": 1.0, "best for costs times 3": 3.0, "best for a third of the costs": 1 / 3}
_COARSER = "best, merged in pairs"
_SINGLE = "single bucket"
NAMES = (DEFAULT, *_SCALES, _COARSER, _SINGLE)
# The exact search takes time proportional to the square of this number.
_MOST_PARTS = 1000


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient of a model.

    Attributes:
        num_bytes: Its size in a bucket.
        kind: A bucket contains gradients of one kind: one dtype and one device.
        alone: Whether the gradient needs a bucket of its own, as a sparse gradient does.
        ready_s: The time in seconds from the start of the backward until the gradient is ready on
            all ranks.
    """

    num_bytes: int
    kind: int = 0
    alone: bool = False
    ready_s: float = 0.0


def candidates(
    gradients: Sequence[ReadyGradient], default: Buckets, cost: ReduceCost
) -> dict[str, Buckets]:
    """The plans to compare, by name and without equal plans. The first is the default plan.

    Args:
        gradients: By index.
        default: The buckets of the default plan, by index of gradients.
        cost: The time of an all-reduce.
    """
    order = sorted(range(len(gradients)), key=lambda index: (gradients[index].ready_s, index))
    plans = {DEFAULT: default}
    for name, scale in _SCALES.items():
        plans[name] = _planned(gradients, order, cost.scaled(scale))
    plans[_COARSER] = _merged_in_pairs(gradients, plans["best"])
    plans[_SINGLE] = _in_order_of_ends(gradients, _groups(gradients, order))
    distinct: dict[str, Buckets] = {}
    for name, buckets in plans.items():
        if buckets not in distinct.values():
            distinct[name] = buckets
    return distinct


def predicted_end_s(
    gradients: Sequence[ReadyGradient], buckets: Buckets, cost: ReduceCost
) -> float:
    """The predicted time in seconds from the start of the backward to the end of communication."""
    return max((end for _, end in predicted_spans_s(gradients, buckets, cost)), default=0.0)


def predicted_spans_s(
    gradients: Sequence[ReadyGradient], buckets: Buckets, cost: ReduceCost
) -> list[tuple[float, float]]:
    """The predicted start and end of each all-reduce, in seconds from the start of the backward."""
    spans = []
    end_s = 0.0
    for bucket in buckets:
        begin_s = max(end_s, *(gradients[index].ready_s for index in bucket))
        end_s = begin_s + cost(sum(gradients[index].num_bytes for index in bucket))
        spans.append((begin_s, end_s))
    return spans


def _groups(gradients: Sequence[ReadyGradient], order: Sequence[int]) -> list[tuple[int, ...]]:
    """The gradients that may share a bucket, in order of arrival."""
    groups: dict[tuple[int, int], list[int]] = {}
    for index in order:
        gradient = gradients[index]
        groups.setdefault((gradient.kind, index if gradient.alone else -1), []).append(index)
    return [tuple(group) for group in groups.values()]


def _planned(gradients: Sequence[ReadyGradient], order: Sequence[int], cost: ReduceCost) -> Buckets:
    """The best buckets of each kind. Exact if all gradients are of one kind."""
    buckets = []
    for group in _groups(gradients, order):
        parts = list(_parts(gradients, group))
        sizes = best_partition(
            [
                Gradient(
                    sum(gradients[index].num_bytes for index in part),
                    max(gradients[index].ready_s for index in part),
                )
                for part in parts
            ],
            cost,
        )
        rest = iter(parts)
        for size in sizes:
            bucket = itertools.chain.from_iterable(itertools.islice(rest, size))
            buckets.append(tuple(bucket))
    return _in_order_of_ends(gradients, buckets)


def _parts(gradients: Sequence[ReadyGradient], group: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The gradients of a group one by one. In a large group, small gradients stay together."""
    if len(group) <= _MOST_PARTS:
        yield from ((index,) for index in group)
        return
    least = 2 * sum(gradients[index].num_bytes for index in group) / _MOST_PARTS
    # Gradients without a size, too, must not become too many parts.
    most = -(-2 * len(group) // _MOST_PARTS)
    part: list[int] = []
    num_bytes = 0
    for index in group:
        part.append(index)
        num_bytes += gradients[index].num_bytes
        if num_bytes >= least or len(part) >= most:
            yield tuple(part)
            part, num_bytes = [], 0
    if part:
        yield tuple(part)


def _merged_in_pairs(gradients: Sequence[ReadyGradient], buckets: Buckets) -> Buckets:
    """The buckets, each merged with the next one that it may share memory with."""
    merged: list[tuple[int, ...]] = []
    open_bucket: dict[int, int] = {}  # by kind, the place of a bucket that takes another one
    for bucket in buckets:
        first = gradients[bucket[0]]
        place = None if first.alone else open_bucket.pop(first.kind, None)
        if place is not None:
            merged[place] += bucket
            continue
        if not first.alone:
            open_bucket[first.kind] = len(merged)
        merged.append(bucket)
    return _in_order_of_ends(gradients, merged)


def _in_order_of_ends(
    gradients: Sequence[ReadyGradient], buckets: Sequence[tuple[int, ...]]
) -> Buckets:
    """The buckets in the order in which they become ready."""
    return tuple(
        sorted(
            buckets,
            key=lambda bucket: max((gradients[i].ready_s, i) for i in bucket),
        )
    )


def encoded(plans: dict[str, Buckets], num_gradients: int) -> list[int]:
    """The plans as a number of integers that depends on the number of gradients only.

    Each name in ``NAMES`` has the gradients in the order of the buckets, and then the bucket of
    each of these gradients. All integers are -1 without a plan of this name.
    """
    values: list[int] = []
    for name in NAMES:
        if name not in plans:
            values += [-1] * (2 * num_gradients)
            continue
        values += [index for bucket in plans[name] for index in bucket]
        values += [number for number, bucket in enumerate(plans[name]) for _ in bucket]
    return values


def decoded(values: Sequence[int], num_gradients: int) -> dict[str, Buckets]:
    """Reverses :func:`encoded`."""
    plans: dict[str, Buckets] = {}
    for place, name in enumerate(NAMES):
        begin = 2 * place * num_gradients
        order = values[begin : begin + num_gradients]
        numbers = values[begin + num_gradients : begin + 2 * num_gradients]
        if order[0] < 0:
            continue
        buckets: list[list[int]] = [[] for _ in range(numbers[-1] + 1)]
        for index, number in zip(order, numbers, strict=True):
            buckets[number].append(index)
        plans[name] = tuple(map(tuple, buckets))
    return plans
