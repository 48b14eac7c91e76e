"""Measures the offset of each rank's clock to the clock of rank 0.

The algorithm is from F. Cristian, "Probabilistic clock synchronization", 1989. A rank makes many
round trips to rank 0 and uses the shortest. Rank 0 read its clock at some time in this round trip.
"""

from __future__ import annotations

import functools
import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm.collectives import all_gather_json

_T = TypeVar("_T")

_ROUND_TRIPS = 50
_POLL_INTERVAL_S = 0.1  # for lost ranks
# The largest drift of two clocks against each other, as a share of the elapsed time. The tolerance
# of a computer's quartz is 50 ppm. (The drift may be larger while NTP corrects a large offset.)
_MOST_DRIFT = 100e-6


@dataclass(frozen=True)
class Reading:
    """One comparison of this rank's clock with the clock of rank 0.

    Attributes:
        at_ns: The time of the comparison, on this rank's clock.
        offset_ns: The time of rank 0 minus the time of this rank.
        error_ns: The error bound of ``offset_ns``: half of the round trip. 0 for the same clock.
    """

    at_ns: int
    offset_ns: float
    error_ns: float


def name_recording(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns a unique name, which is the same on all ranks of the group. A collective call."""
    return str(all_gather_json(uuid.uuid4().hex, group, device)[0])


def name_by_store(group: dist.ProcessGroup, key: str) -> str:
    """Returns a name that is the same on all ranks of the group that pass this key.

    No rank waits for another rank. Without a store (in groups that torch did not make) each rank
    gets a different name.
    """
    own = uuid.uuid4().hex
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        return store.compare_set(f"ddpx/timeline/{key}", "", own).decode()
    except (KeyError, AttributeError, RuntimeError):
        return own


def clock_identity() -> str:
    """Returns a text that identifies the monotonic clock of this process.

    Processes have the same clock if they share the boot of a machine and the time namespace.
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
    """Compares the clocks of all ranks with the clock of rank 0. A collective call.

    Args:
        group: The ranks.
        device: The device of tensors that the group can send.
        identity: The identity of this rank's clock. Default: :func:`clock_identity`.
    """
    rank = group.rank()
    identities = all_gather_json(identity or clock_identity(), group, device)
    reading = Reading(_C.steady_now(), 0.0, 0.0)
    for other, other_identity in enumerate(identities):
        if other_identity == identities[0]:
            continue
        if rank == other:
            reading = _watched(functools.partial(_ask, group, device), group, device)
        elif rank == 0:
            _watched(functools.partial(_answer, other, group, device), group, device)
    return reading


def _watched(exchange: Callable[[], _T], group: dist.ProcessGroup, device: torch.device) -> _T:
    """Returns the result of ``exchange``. Raises if a rank is lost meanwhile.

    A gloo receive or send that waits with a timeout breaks the group when the timeout is over. So a
    second thread waits without a timeout, and this thread polls the failure detector.
    """
    monitor = health.watch(group)
    if monitor is None or not _C.needs_abort_polling(group, device):
        return exchange()
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(exchange())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ddpx-clocks", daemon=True).start()
    while not wait([future], timeout=_POLL_INTERVAL_S).done:
        monitor.raise_if_failed()
    return future.result()


def _ask(group: dist.ProcessGroup, device: torch.device) -> Reading:
    best = Reading(0, 0.0, float("inf"))
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_ROUND_TRIPS):
        begin = _C.steady_now()
        dist.send(message, group=group, group_dst=0)
        dist.recv(message, group=group, group_src=0)
        theirs = int(message.item())  # the host waits for the device here
        end = _C.steady_now()
        if (end - begin) / 2 < best.error_ns:
            best = Reading(end, theirs - (begin + end) / 2, (end - begin) / 2)
    return best


def _answer(other: int, group: dist.ProcessGroup, device: torch.device) -> None:
    message = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_ROUND_TRIPS):
        dist.recv(message, group=group, group_src=other)
        message.cpu()  # the host waits for the device here
        message.fill_(_C.steady_now())
        dist.send(message, group=group, group_dst=other)


def to_rank_0(at_ns: int, readings: tuple[Reading, ...]) -> float:
    """Converts a time of this rank to the clock of rank 0.

    Args:
        at_ns: The time on this rank's clock.
        readings: One reading, or one from the start and one from the end. The drift between two
            readings is assumed to be constant.
    """
    first, last = readings[0], readings[-1]
    if last.at_ns <= first.at_ns:
        return at_ns + first.offset_ns
    share = (at_ns - first.at_ns) / (last.at_ns - first.at_ns)
    return at_ns + first.offset_ns + share * (last.offset_ns - first.offset_ns)


def error_of(until_ns: int, readings: tuple[Reading, ...]) -> float:
    """Returns the error bound of the times from :func:`to_rank_0`, in ns.

    With a single reading, the bound grows by 0.1 ms for each second after the reading.

    Args:
        until_ns: The last of the times, on this rank's clock.
        readings: The readings that :func:`to_rank_0` used.
    """
    worst = max(reading.error_ns for reading in readings)
    if len(readings) > 1 or worst == 0:
        return worst
    return worst + _MOST_DRIFT * max(until_ns - readings[0].at_ns, 0)
