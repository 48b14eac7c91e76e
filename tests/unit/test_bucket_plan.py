"""The bucket plan by DDP's rules, compared with values computed by hand and a slow reference."""

from __future__ import annotations

import random

import pytest
import torch

from ddpx._C import BucketCaps, BucketPlan, GraphMode, ParamMeta

KIB = 1024


def _metas(*kib: int, dtype: torch.dtype = torch.uint8) -> list[ParamMeta]:
    """One param per size in KiB, of a one-byte dtype by default."""
    return [ParamMeta(torch.empty(size * KIB // dtype.itemsize, dtype=dtype)) for size in kib]


def _caps(first: int, rest: int, *listed: int) -> BucketCaps:
    return BucketCaps(first * KIB, rest * KIB, [cap * KIB for cap in listed])


@pytest.mark.parametrize("mode", [GraphMode.DEFAULT, GraphMode.STATIC], ids=lambda m: m.name)
def test_starts_as_one_bucket(mode):
    assert BucketPlan.initial(_metas(4, 4, 4), _caps(1, 2), mode).buckets == [[0, 1, 2]]


def test_find_unused_starts_split_with_small_bucket_launched_last():
    plan = BucketPlan.initial(_metas(2, 2, 2, 2, 2), _caps(1, 4), GraphMode.FIND_UNUSED)
    assert plan.buckets == [[3, 4], [1, 2], [0]]


@pytest.mark.parametrize("mode", list(GraphMode.__members__.values()), ids=lambda m: m.name)
def test_listed_caps_split_from_the_start_and_the_last_repeats(mode):
    plan = BucketPlan.initial(_metas(2, 2, 2, 2, 2, 2), _caps(9, 9, 2, 4), mode)
    assert plan.buckets == [[5], [3, 4], [1, 2], [0]]


def test_rebuilt_in_arrival_order_with_small_bucket_first():
    plan = BucketPlan.by_arrival(_metas(2, 2, 2, 2), _caps(1, 4), [3, 1, 0, 2])
    assert plan.buckets == [[3], [1, 0], [2]]


def test_a_bucket_closes_with_the_param_that_reaches_its_cap():
    plan = BucketPlan.by_arrival(_metas(3, 3, 3), _caps(4, 4), [0, 1, 2])
    assert plan.buckets == [[0, 1], [2]]


def test_zero_cap_gives_each_param_its_bucket():
    assert BucketPlan.by_arrival(_metas(1, 0, 1), _caps(0, 0), [0, 1, 2]).buckets == [[0], [1], [2]]


def test_dtypes_do_not_mix_and_walk_the_caps_apart():
    metas = [*_metas(2, 2), *_metas(2, 2, dtype=torch.float32), *_metas(2)]
    plan = BucketPlan.by_arrival(metas, _caps(2, 4), [0, 2, 1, 3, 4])
    assert plan.buckets == [[0], [2], [1, 4], [3]]


def test_sparse_param_is_alone():
    metas = [*_metas(1), ParamMeta(torch.empty(4), expect_sparse=True), *_metas(1)]
    assert BucketPlan.initial(metas, _caps(1, 9), GraphMode.DEFAULT).buckets == [[1], [0, 2]]


@pytest.mark.parametrize("order", [[0], [0, 0], [0, 2], [0, 1, 1]], ids=str)
def test_arrival_order_must_be_a_permutation(order):
    with pytest.raises(RuntimeError, match="internal error"):
        BucketPlan.by_arrival(_metas(1, 1), _caps(1, 1), order)


def _reference(
    metas: list[ParamMeta], dtypes: list[torch.dtype], order: list[int], limits: list[int]
) -> list[list[int]]:
    """One pass per dtype. Full buckets are sorted by their end, open ones follow by their first
    param."""
    closed: list[tuple[int, list[int]]] = []
    for dtype in set(dtypes):
        mine = [(position, index) for position, index in enumerate(order) if dtypes[index] == dtype]
        bucket: list[int] = []
        remaining = list(limits)
        first_position = mine[0][0] if mine else 0
        for position, index in mine:
            bucket.append(index)
            if sum(metas[i].numel * metas[i].element_bytes for i in bucket) >= remaining[0]:
                closed.append((position, bucket))
                bucket = []
                remaining = remaining[1:] or remaining
        if bucket:
            closed.append((len(order) + first_position, bucket))
    return [bucket for _, bucket in sorted(closed)]


def test_against_slow_reference():
    rng = random.Random(0)
    for _ in range(300):
        num_params = rng.randint(1, 12)
        dtypes = [rng.choice([torch.float32, torch.float64]) for _ in range(num_params)]
        metas = [ParamMeta(torch.empty(rng.randint(0, 600), dtype=dtype)) for dtype in dtypes]
        caps = BucketCaps(rng.randint(0, 4 * KIB), rng.randint(0, 8 * KIB))
        order = rng.sample(range(num_params), num_params)
        expected = _reference(metas, dtypes, order, [caps.first_bytes, caps.cap_bytes])
        assert BucketPlan.by_arrival(metas, caps, order).buckets == expected
