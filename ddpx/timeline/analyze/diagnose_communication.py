"""Diagnoses of waits for communication. They return sentences for diagnoses.py.

Several may find their signs in one recording. The first one explains the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from statistics import median

from ddpx.timeline.analyze.caps import caps_that_divide
from ddpx.timeline.analyze.evidence import Communication, Evidence, most_common
from ddpx.timeline.analyze.texts import size_text

_MS = 1e6
_MIB = 1 << 20
# An all-reduce of this size takes about twice as long as one of a few bytes.
_HALF_OVERHEAD_BYTES = 128 << 10
_MOST_OVERHEAD_MS = 2.0  # of an all-reduce
_MOST_OF_BUCKET = 0.75


def small_buckets(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None:
        return
    sizes = {index: evidence.layout[index].num_bytes for index in found.bucket_ms}
    small = [index for index, num_bytes in sizes.items() if 0 < num_bytes < _MIB]
    if len(small) < 2:
        return
    overhead_ms = [_overhead_ms(found.bucket_ms[index], sizes[index]) for index in small]
    num_enough = ceil(sum(sizes[index] for index in small) / _MIB)
    saved_ms = (1 - num_enough / len(small)) * sum(overhead_ms)
    if saved_ms > found.exposed_ms / 2:
        yield (
            f"{len(small)} of {len(sizes)} buckets are smaller than 1 MiB, "
            f"{size_text(median(sizes[index] for index in small))} in the median, and each "
            f"takes {median(found.bucket_ms[index] for index in small):.2f} ms: "
            f"{_exposed(evidence, found)}. Try bucket_cap_mb=1 or more."
        )


def _overhead_ms(bucket_ms: float, num_bytes: int) -> float:
    """The part of a transfer that does not depend on the size, as it is on usual links."""
    share = _HALF_OVERHEAD_BYTES / (_HALF_OVERHEAD_BYTES + num_bytes)
    return min(share * bucket_ms, _MOST_OVERHEAD_MS)


def slow_link(evidence: Evidence) -> Iterator[str]:
    found, recording = evidence.communication, evidence.recording
    if found is None or found.transfer_ms - found.hideable_ms <= found.exposed_ms / 2:
        return
    num_bytes = sum(evidence.layout[index].num_bytes for index in found.bucket_ms)
    advice = (
        f"Buckets are moving for {found.transfer_ms:.1f} ms a step "
        f"({num_bytes / found.transfer_ms / 1e6:.3g} GB/s), and backward on rank {found.rank} can "
        f"hide only {found.hideable_ms:.1f} ms of it: {_exposed(evidence, found)}. Send less "
        "(bf16_compress_hook, or several backwards in no_sync() for one that averages)"
    )
    one_host = len(set(recording.hosts.values())) == 1
    if recording.backend == "gloo" and recording.device == "cpu" and one_host:
        advice += ', or through shared memory: init_process_group("shm")'
    yield advice + "."


def late_first_bucket(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None or found.origin != 0 or len(found.bucket_ms) == 1:
        return
    late = f"{_bucket(evidence, 0)} is launched too late for backward to hide the communication"
    if _queue_behind(evidence, found):
        yield (
            f"{late}: the gradient of {_last_gradient(evidence, found)} completes it, and full "
            f"buckets queue behind it; {_exposed(evidence, found)}. With "
            "find_unused_parameters=True, buckets do not follow the order in which gradients "
            "arrive: leave it out, or register layers in the order of forward."
        )
    else:
        yield f"{late}: {_exposed(evidence, found)}. {_smaller(evidence, 0)}"


def large_bucket(evidence: Evidence) -> Iterator[str]:
    found = evidence.communication
    if found is None or evidence.layout[found.origin].num_bytes < _MIB:
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
    largest = max(evidence.layout[index].params, key=lambda param: sizes[param])
    if sizes[largest] > _MOST_OF_BUCKET * evidence.layout[index].num_bytes:
        return (
            f"The gradient of {evidence.recording.param_names[largest]} alone has "
            f"{size_text(sizes[largest])}, and a gradient is never divided: send less of it, with "
            "bf16_compress_hook."
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
