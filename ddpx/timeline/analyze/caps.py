"""Finds bucket caps that divide one bucket and do not change the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ddpx.timeline.model import BucketLayout, Recording

_MIB = 1 << 20
_LEAST_MIB = 0.1
_MOST_CAPS = 12


def caps_that_divide(recording: Recording, bucket_index: int) -> list[float] | None:
    """Returns a ``bucket_cap_mb_list`` that divides one bucket of the last step and no other.

    The parts have about a quarter of the size. The buckets of each kind (dtype and device) go
    through the list separately, so a cap applies to buckets of several kinds.

    Returns:
        The list in MiB. None if no such short list was found. A bucket of another kind may change,
        too. Or the bucket has a single parameter, or no parameter to which caps apply.
    """
    by_kind = _by_kind(recording)
    kind = next((k for k, buckets in by_kind.items() if bucket_index in buckets), None)
    if kind is None:
        return None
    buckets = by_kind[kind]
    before = [bucket.params for index, bucket in buckets.items() if index < bucket_index]
    after = [bucket.params for index, bucket in buckets.items() if index > bucket_index]
    num_bytes = sum(recording.param_bytes[param] for param in buckets[bucket_index].params)
    quarter = _rounded(num_bytes / _MIB / 4)
    parts = list(_deal(recording, [buckets[bucket_index]], [quarter]))
    wanted = [*before, *parts, *after]
    if after:
        caps = [_a_bit_below(recording, params) for params in wanted[:-1]]
        caps.append(max(_a_bit_below(recording, wanted[-1]), 1))
    else:
        caps = [*(_a_bit_below(recording, params) for params in before), quarter]
    for other, others in by_kind.items():
        expected = wanted if other == kind else [bucket.params for bucket in others.values()]
        if len(parts) < 2 or list(_deal(recording, others.values(), caps)) != expected:
            return None
    return caps if len(caps) <= _MOST_CAPS else None


def _by_kind(recording: Recording) -> dict[str, dict[int, BucketLayout]]:
    """The buckets to which caps apply, by kind and by index, in launch order."""
    found: dict[str, dict[int, BucketLayout]] = defaultdict(dict)
    for index, bucket in enumerate(recording.steps[-1].layout):
        kind = recording.param_kinds[bucket.params[0]]
        if bucket.num_bytes and not kind.endswith(", delayed"):  # others ignore caps
            found[kind][index] = bucket
    return dict(found)


def _deal(
    recording: Recording, buckets: Iterable[BucketLayout], caps: Sequence[float]
) -> Iterator[tuple[int, ...]]:
    """Distributes the parameters as ``csrc/buckets/bucket_plan.cpp`` does.

    A bucket closes when its size reaches the cap.
    """
    members: list[int] = []
    num_bytes = num_closed = 0
    for param in (param for bucket in buckets for param in bucket.params):
        members.append(param)
        num_bytes += recording.param_bytes[param]
        if num_bytes >= int(caps[min(num_closed, len(caps) - 1)] * _MIB):
            yield tuple(members)
            members, num_bytes = [], 0
            num_closed += 1
    if members:
        yield tuple(members)


def _a_bit_below(recording: Recording, params: Iterable[int]) -> float:
    num_bytes = sum(recording.param_bytes[param] for param in params)
    return max(math.floor(10 * num_bytes / _MIB) / 10, _LEAST_MIB)


def _rounded(mib: float) -> float:
    return round(mib) if mib >= 10 else max(round(mib, 1), _LEAST_MIB)
