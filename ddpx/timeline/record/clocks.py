"""Brings the clocks of all ranks together.

Cristian's algorithm (F. Cristian, "Probabilistic clock synchronization", 1989): of many round trips
to rank 0 the quickest tells most, and rank 0's answer was given somewhere within it.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddpx import _C
from ddpx.timeline.record.exchange import all_gather_json

_ROUND_TRIPS = 50
# Of two clocks against each other, as a share of the time that passes: quartzes of computers are
# made to be off by 50 millionths at most. (While NTP corrects a large offset it may be more.)
_MOST_DRIFT = 100e-6


@dataclass(frozen=True)
class Reading:
    """This rank's clock against rank 0's, once.

    Attributes:
        at_ns: when, on this rank's clock.
        offset_ns: what is to be added to this rank's times to get rank 0's.
        error_ns: how far ``offset_ns`` may be off: half the round trip. 0 if it is one clock.
    """

    at_ns: int
    offset_ns: float
    error_ns: float


def name_recording(group: dist.ProcessGroup, device: torch.device) -> str:
    """The same on all ranks of the group, and different from any other; collective."""
    return str(all_gather_json(uuid.uuid4().hex, group, device)[0])


def name_by_store(group: dist.ProcessGroup, key: str) -> str:
    """The same on all ranks of the group that ask with this key; waits for none of them.

    Of a group without a store (one that was not made by torch) each rank has a name of its own.
    """
    own = uuid.uuid4().hex
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        return store.compare_set(f"ddpx/timeline/{key}", "", own).decode()
    except (KeyError, AttributeError, RuntimeError):
        return own


def clock_identity() -> str:
    """The same for processes whose monotonic clock is the same: one boot of one machine, and one
    time namespace.
    """
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        boot = boot_id.read().strip()
    try:
        return f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:  # a kernel without time namespaces
        return boot


def read_clocks(
    group: dist.ProcessGroup, device: torch.device, identity: str | None = None
) -> Reading:
    """Collective over ``group``.

    Args:
        device: where tensors that the group can send must lie.
        identity: in the place of :func:`clock_identity`.
    """
    rank = group.rank()
    identities = all_gather_json(identity or clock_identity(), group, device)
    reading = Reading(_C.steady_now(), 0.0, 0.0)
    for other, other_identity in enumerate(identities):
        if other_identity == identities[0]:
            continue
        if rank == other:
            reading = _ask(group, device)
        elif rank == 0:
            _answer(other, group, device)
    return reading


def _ask(group: dist.ProcessGroup, device: torch.device) -> Reading:
    best = Reading(0, 0.0, float("inf"))
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_ROUND_TRIPS):
        begin = _C.steady_now()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = int(message.item())  # waits for a device
        end = _C.steady_now()
        if (end - begin) / 2 < best.error_ns:
            best = Reading(end, theirs - (begin + end) / 2, (end - begin) / 2)
    return best


def _answer(other: int, group: dist.ProcessGroup, device: torch.device) -> None:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_ROUND_TRIPS):
        dist.recv(message, group=group, group_src=other)
        message.cpu()  # has come, also on a device
        message.fill_(_C.steady_now())
        dist.send(message, group=group, group_dst=other)


def to_rank_0(at_ns: int, readings: tuple[Reading, ...]) -> float:
    """A time of this rank on rank 0's clock.

    Args:
        readings: one, or one from the start and one from the end; between them the clock is taken
            to drift evenly.
    """
    first, last = readings[0], readings[-1]
    if last.at_ns <= first.at_ns:
        return at_ns + first.offset_ns
    share = (at_ns - first.at_ns) / (last.at_ns - first.at_ns)
    return at_ns + first.offset_ns + share * (last.offset_ns - first.offset_ns)


def error_of(until_ns: int, readings: tuple[Reading, ...]) -> float:
    """How far times that :func:`to_rank_0` gives may be off, in ns.

    With one reading only, of another clock, it grows with the distance from that reading: clocks
    drift apart by 0.1 ms a second at most.

    Args:
        until_ns: the last of the times, on this rank's clock.
    """
    worst = max(reading.error_ns for reading in readings)
    if len(readings) > 1 or worst == 0:
        return worst
    return worst + _MOST_DRIFT * max(until_ns - readings[0].at_ns, 0)
