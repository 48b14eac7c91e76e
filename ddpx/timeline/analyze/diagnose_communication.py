"""Diagnoses of waits for communication. They return sentences for diagnoses.py.

Several may find their signs in one recording. The first one explains the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from statistics import median

from ddpx.timeline.analyze.caps import caps_that_divide
from ddpx.timeline.analyze.evidence import SMALL_BYTES, Communication, Evidence, most_common
from ddpx.timeline.texts import size_text

_MS = 1e6
# Assumed of usual links: half of the time of such an all-reduce does not depend on the size.
_HALF_OVERHEAD_BYTES = 128 << 10
_MOST_OVERHEAD_MS = 2.0  # of an all-reduce
_MOST_OF_BUCKET = 0.75
_LESS_OFTEN = "several backwards in no_sync() for one that averages"


def small_buckets(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None:
        return
    sizes = [num_bytes for num_bytes in found.bucket_bytes.values() if 0 < num_bytes < SMALL_BYTES]
    if len(sizes) < 2:
        return
    num_enough = ceil(sum(sizes) / SMALL_BYTES)
    saved_ms = (1 - num_enough / len(sizes)) * _overhead_ms(found, sizes)
    if saved_ms > found.exposed_ms / 2:
        yield (
            f"{len(sizes)} of {len(found.bucket_bytes)} buckets are smaller than 1 MiB, "
            f"{size_text(median(sizes))} in the median, and take "
            f"{found.small_transfer_ms / len(sizes):.2f} ms each on average: "
            f"{_exposed(evidence, found)}. Try bucket_cap_mb=1 or more."
        )


def _overhead_ms(found: Communication, sizes: Sequence[int]) -> float:
    """The part of the transfers of small buckets that larger buckets would not need."""
    without_size, of_size = len(sizes) * _HALF_OVERHEAD_BYTES, sum(sizes)
    assumed_ms = min(
        found.small_transfer_ms * without_size / (without_size + of_size),
        len(sizes) * _MOST_OVERHEAD_MS,
    )
    least_ms, most_ms = (
        found.small_transfer_ms - of_size * ms_per_byte
        for ms_per_byte in (found.most_ms_per_byte, found.ms_per_byte)
    )
    return min(max(assumed_ms, least_ms), most_ms)


def slow_link(evidence: Evidence) -> Iterator[str]:
    found, recording = evidence.communication, evidence.recording
    if found is None or found.transfer_ms - found.hideable_ms <= found.exposed_ms / 2:
        return
    num_bytes = sum(found.bucket_bytes.values())
    advice = (
        f"Buckets are moving for {found.transfer_ms:.1f} ms a step "
        f"({num_bytes / found.transfer_ms / 1e6:.3g} GB/s), and backward on rank {found.rank} can "
        f"hide only {found.hideable_ms:.1f} ms of it: {_exposed(evidence, found)}. Send less"
    )
    if recording.has_hook:
        yield f"{advice}: {_LESS_OFTEN}."
        return
    advice += f" (bf16_compress_hook, or {_LESS_OFTEN})"
    num_hosts = len(set(recording.hosts.values()))
    can_share = recording.backend == "gloo" and recording.device == "cpu"
    if can_share and num_hosts == 1:
        advice += (
            ', or, without a communication hook, through shared memory: transport="shm" of '
            "ReducerDDP"
        )
    elif can_share and num_hosts < len(recording.hosts):
        advice += (
            ", or, without a communication hook, through shared memory within hosts: "
            'transport="shm" of ReducerDDP, with which sums are rounded differently'
        )
    yield advice + "."


def late_first_bucket(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None or found.origin != 0 or len(found.bucket_bytes) == 1:
        return
    late = f"{_bucket(evidence, 0)} is launched too late for backward to hide the communication"
    if _queue_behind(evidence, found):
        yield (
            f"{late}: the gradient of {_last_gradient(evidence, found)} completes it, and full "
            f"buckets queue behind it; {_exposed(evidence, found)}. Two arguments keep buckets "
            "from following the order in which gradients arrive: find_unused_parameters=True "
            "(leave it out, or register layers in the order of forward), and bucket_plan= or "
            "DDPX_BUCKET_PLAN (make a new plan)."
        )
    else:
        yield f"{late}: {_exposed(evidence, found)}. {_smaller(evidence, 0)}"


def large_bucket(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None or evidence.layout[found.origin].num_bytes < SMALL_BYTES:
        return
    which = ""
    if len(evidence.layout) == 1:
        which = ", the only bucket,"
    elif found.origin == len(evidence.layout) - 1:
        which = ", the last to be launched,"
    yield (
        f"{_bucket(evidence, found.origin)}{which} is too large to be hidden: "
        f"{_exposed(evidence, found)}. {_smaller(evidence, found.origin)}"
    )


def _exposed(evidence: Evidence, found: Communication) -> str:
    return (
        f"rank {found.rank} waits {found.exposed_ms:.1f} ms of a step of {evidence.step_ms:.1f} ms"
    )


def _bucket(evidence: Evidence, index: int) -> str:
    num_bytes = evidence.layout[index].num_bytes
    return f"Bucket {index} of {size_text(num_bytes)}" if num_bytes else f"Bucket {index}"


def _smaller(evidence: Evidence, index: int) -> str:
    """What to do about a bucket that is too large."""
    sizes = evidence.recording.param_bytes
    params = evidence.layout[index].params
    largest = max(params, key=lambda param: sizes[param])
    if sizes[largest] > _MOST_OF_BUCKET * sum(sizes[param] for param in params):
        less = "send less of it, with bf16_compress_hook"
        if evidence.recording.has_hook:  # a wrapper takes one hook
            less = f"run {_LESS_OFTEN}"
        return (
            f"The gradient of {evidence.recording.param_names[largest]} alone has "
            f"{size_text(evidence.sent_bytes[largest])}, and a gradient is never divided: {less}."
        )
    caps = caps_that_divide(evidence.recording, index)
    if caps is None:
        return "Try a smaller bucket_cap_mb."
    return f"Try bucket_cap_mb_list=[{', '.join(f'{cap:g}' for cap in caps)}]."


def _queue_behind(evidence: Evidence, found: Communication) -> bool:
    """Whether buckets after the first one are full long before the first one is launched."""
    queued_ms = [
        max(first.launched - b.ready for b in rank_step.buckets[1:] if b is not None) / _MS
        for step in evidence.steps
        if (rank_step := step.ranks.get(found.rank)) and (first := rank_step.buckets[0])
    ]
    return median(queued_ms) > found.exposed_ms / 2


def _last_gradient(evidence: Evidence, found: Communication) -> str:
    members = set(evidence.layout[0].params)
    last = most_common(
        max((a for a in r.arrivals if a.param in members), key=lambda a: a.at).param
        for step in evidence.steps
        if (r := step.ranks.get(found.rank)) and any(a.param in members for a in r.arrivals)
    )
    return "no parameter" if last is None else evidence.recording.param_names[last]
