"""Finds bucket caps that divide one bucket and do not change the others."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from ddpx.timeline.model import BucketLayout, Recording

_MIB = 1 << 20
_LEAST_MIB = 0.1


def caps_that_divide(recording: Recording, bucket_index: int) -> list[float] | None:
    """Returns a ``bucket_cap_mb_list`` that divides one bucket of the last step and no other.

    The bucket is the last bucket of its kind to be filled. The buckets of each kind (dtype and
    device) go through the list separately, so a cap applies to buckets of several kinds.

    Returns:
        The list in MiB. None if no such list was found. A bucket of another kind may change, too.
        Or the bucket has a single parameter, or no parameter to which caps apply.
    """
    by_kind = _by_kind(recording)
    kind = next((k for k, buckets in by_kind.items() if bucket_index in buckets), None)
    if kind is None or list(by_kind[kind])[-1] != bucket_index:
        return None
    *before, last = by_kind[kind].values()
    caps = [_a_bit_below(bucket.num_bytes) for bucket in before]
    caps.append(_rounded(last.num_bytes / _MIB / 4))
    for other, buckets in by_kind.items():
        found = list(_deal(recording, buckets.values(), caps))
        expected = [bucket.params for bucket in buckets.values()]
        if other != kind and found != expected:
            return None
        if other == kind and (found[: len(before)] != expected[:-1] or len(found) <= len(expected)):
            return None
    return caps


def _by_kind(recording: Recording) -> dict[str, dict[int, BucketLayout]]:
    """The buckets to which caps apply, by kind and by index, in launch order."""
    found: dict[str, dict[int, BucketLayout]] = defaultdict(dict)
    for index, bucket in enumerate(recording.steps[-1].layout):
        kind = recording.param_kinds[bucket.params[0]] if recording.param_kinds else ""
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


def _a_bit_below(num_bytes: int) -> float:
    return max(math.floor(10 * num_bytes / _MIB) / 10, _LEAST_MIB)


def _rounded(mib: float) -> float:
    return round(mib) if mib >= 10 else max(round(mib, 1), _LEAST_MIB)
