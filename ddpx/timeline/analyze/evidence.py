"""The measurements that diagnoses are made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from statistics import median
from typing import TypeVar

from ddpx.timeline.analyze.extent import check_recorded, step_extent
from ddpx.timeline.analyze.lateness import Lateness, lateness
from ddpx.timeline.analyze.noise import surely_above, surely_below
from ddpx.timeline.analyze.transfers import (
    Transfers,
    exposed_transfer_ns,
    hideable_ns,
    ns_per_byte,
    origin_of_wait,
    transfers,
)
from ddpx.timeline.model import BucketLayout, Recording, Step

_T = TypeVar("_T")
_MS = 1e6
SMALL_BYTES = 1 << 20  # buckets of this size need little time that does not depend on the size
# Smaller shares of a step are not worth a change.
_WORTH_A_WORD = 0.05


@dataclass(frozen=True)
class Communication:
    """The waits of one rank for communication itself, as medians over steps in ms.

    Attributes:
        rank: The rank that waits least. The other ranks also wait for this rank.
        exposed_ms: The time in which the end of backward waits for buckets that all ranks have
            launched.
        transfer_ms: The time in which buckets move. Exposed or not.
        hideable_ms: The time from the first gradient to the end of backward.
        origin: The bucket whose launch makes the rank wait, in most steps.
        bucket_bytes: The size of each bucket that is communicated. 0 if unknown.
        small_transfer_ms: The part of ``transfer_ms`` in which buckets below SMALL_BYTES move.
        ms_per_byte: The transfer time that a byte adds at least, in buckets of different sizes. 0
            if the buckets do not tell.
        most_ms_per_byte: The time that a byte adds at most. Infinite if the buckets do not tell.
    """

    rank: int
    exposed_ms: float
    transfer_ms: float
    hideable_ms: float
    origin: int
    bucket_bytes: dict[int, int]
    small_transfer_ms: float
    ms_per_byte: float
    most_ms_per_byte: float


class Evidence:
    """The steps of a recording with the buckets of its last step.

    Args:
        recording: The recording.

    Raises:
        RuntimeError: No complete step was recorded.
    """

    def __init__(self, recording: Recording) -> None:
        check_recorded(recording)
        self.recording = recording
        self.layout: tuple[BucketLayout, ...] = recording.steps[-1].layout
        self.steps: list[Step] = [s for s in recording.steps if s.layout == self.layout]
        # Without the other ranks, waits for them look like waits for communication.
        self.whole_steps = [s for s in self.steps if len(s.ranks) == recording.world_size]
        self.step_ms = median(step_extent(step).ns for step in self.steps) / _MS

    def is_worth_a_word(self, values_ns: Sequence[float]) -> bool:
        """Whether the figure of a step is above noise, clock errors and 5 % of the step."""
        clock_ms = max(clock.error_ns for clock in self.recording.clocks.values()) / _MS
        least_ms = max(_WORTH_A_WORD * self.step_ms, clock_ms)
        num_ranks = len(self.recording.hosts)
        return bool(values_ns) and surely_above(values_ns, num_ranks) / _MS > least_ms

    def lateness(self, rank: int) -> list[Lateness]:
        """The lateness of a rank, in each step that the rank and another rank recorded."""
        return [late[rank] for late in self._lateness if rank in late]

    @cached_property
    def _lateness(self) -> list[dict[int, Lateness]]:
        return [lateness(step) for step in self.steps]

    @cached_property
    def unused(self) -> tuple[int, ...]:
        """The parameters in communicated buckets that got no gradient on any rank in any step."""
        arrived = {
            arrival.param
            for step in self.whole_steps
            for rank_step in step.ranks.values()
            for arrival in rank_step.arrivals
        }
        return tuple(
            param
            for index, bucket in enumerate(self.layout)
            if any(r.buckets[index] is not None for s in self.whole_steps for r in s.ranks.values())
            for param in bucket.params
            if param not in arrived
        )

    @cached_property
    def transfers(self) -> list[Transfers]:
        """The transfers of the steps that all ranks recorded."""
        return [transfers(step, self.recording.backend) for step in self.whole_steps]

    @cached_property
    def communication(self) -> Communication | None:
        """The waits for communication. None if they are not worth a word.

        Time that unused parameters take does not count.
        """
        exposed: dict[int, list[int]] = {rank: [] for rank in self.recording.hosts}
        for step, found in zip(self.whole_steps, self.transfers, strict=True):
            for rank, rank_step in step.ranks.items():
                exposed[rank].append(exposed_transfer_ns(rank_step, found.begin))
        if not self.whole_steps:
            return None
        rank = min(exposed, key=lambda each: median(exposed[each]))
        own = [step.ranks[rank] for step in self.whole_steps]
        in_vain = self.share_of(self.unused)
        pairs = zip(exposed[rank], self.transfers, strict=True)
        waited = [ns - in_vain * found.total_ns for ns, found in pairs]
        origin = most_common(map(origin_of_wait, own, waited))
        if origin is None or not self.is_worth_a_word(waited):
            return None
        total_ns = median(found.total_ns for found in self.transfers)
        sizes = {
            index: bucket.num_bytes
            for index, bucket in enumerate(self.layout)
            if any(index in found.ns for found in self.transfers)
        }
        small_ns = [
            sum(ns for index, ns in found.ns.items() if 0 < sizes[index] < SMALL_BYTES)
            for found in self.transfers
        ]
        rates = [ns_per_byte(found.ns, sizes) for found in self.transfers]
        known = [rate for rate in rates if rate is not None]
        return Communication(
            rank=rank,
            exposed_ms=median(waited) / _MS,
            transfer_ms=(1 - in_vain) * total_ns / _MS,
            hideable_ms=median(map(hideable_ns, own)) / _MS,
            origin=origin,
            bucket_bytes=sizes,
            small_transfer_ms=median(small_ns) / _MS,
            ms_per_byte=max(surely_above(known), 0.0) / _MS if known else 0.0,
            most_ms_per_byte=max(surely_below(known), 0.0) / _MS if known else inf,
        )

    @cached_property
    def sent_bytes(self) -> dict[int, float]:
        """By parameter, the bytes that an all-reduce without a communication hook sends for it."""
        sizes = self.recording.param_bytes
        return {
            param: sizes[param] * bucket.num_bytes / max(sum(sizes[p] for p in bucket.params), 1)
            for bucket in self.layout
            for param in bucket.params
        }

    def share_of(self, params: Iterable[int]) -> float:
        """The share of these parameters of all bytes that a step averages."""
        whole = sum(self.sent_bytes.values())
        return sum(self.sent_bytes[param] for param in params) / whole if whole else 0.0


def most_common(values: Iterable[_T]) -> _T | None:
    counts = Counter(values)
    return counts.most_common(1)[0][0] if counts else None
