"""Watches over the ranks of a process group, from the first wrapper on; needs no call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ddpx import _C, settings
from ddpx.health import ending, log, stall_timeout
from ddpx.health.failure import RankError

_started = threading.Lock()
_MEETING_S = 1.0


def watch(group: dist.ProcessGroup) -> _C.Monitor | None:
    """From here on; None if there is nobody to watch, or ``DDPX_HEALTH=0``."""
    monitor = _C.monitor_of(group)
    if monitor is not None and not _started.locked():
        settings.switch_of("DDPX_HEALTH")  # which the core takes for on unless it is 0
        settings.seconds_of("DDPX_HOST_LEASE")  # which the core reads
        stall_timeout.apply()
        if _started.acquire(blocking=False):
            _start()
    return monitor


def begin(group: dist.ProcessGroup) -> _C.Monitor | None:
    """As :func:`watch`, for a wrapper that is being made."""
    monitor = watch(group)
    if monitor is not None and group is not dist.group.WORLD:
        with suppress(KeyError, ValueError):  # torch's, for a group that it did not make itself
            monitor.name_ranks(dist.get_process_group_ranks(group))
    return monitor


@contextmanager
def constructing(group: dist.ProcessGroup) -> Iterator[None]:
    """Around the collective calls of a construction; see :func:`explained`."""
    monitor = begin(group)
    if monitor is None:
        yield
        return
    monitor.begin_construction()
    _meet(monitor)
    try:
        with explained(monitor):
            yield
        _meet(monitor)
    finally:
        monitor.note(_C.Doing.OUTSIDE)


def _meet(monitor: _C.Monitor) -> None:
    """All come as far as this, and soon: once their pages are open, what they did last is known."""
    deadline = time.monotonic() + _MEETING_S
    while sum(map(bool, monitor.ranks())) < len(monitor.ranks()) - 1:
        if time.monotonic() > deadline or monitor.failed:
            return
        time.sleep(0.005)


@contextmanager
def waiting_for_buffers(monitor: _C.Monitor | None) -> Iterator[None]:
    """Around the collective calls for buffers, in a forward; see :func:`explained`."""
    if monitor is None:
        yield
        return
    monitor.note(_C.Doing.BUFFERS)
    try:
        with explained(monitor):
            yield
    finally:
        monitor.note(_C.Doing.FORWARD)


@contextmanager
def explained(monitor: _C.Monitor | None) -> Iterator[None]:
    """Around a collective call: if it fails because ranks are gone, RankError says so."""
    try:
        yield
    except RankError:
        raise
    except RuntimeError as error:
        if monitor is not None:
            monitor.explain_error(str(error))
        raise


@contextmanager
def collective_call(group: dist.ProcessGroup) -> Iterator[None]:
    """Around one of a construction, so that peers see who has come to it; nothing elsewhere."""
    monitor = watch(group)
    if monitor is not None:
        monitor.begin_call()
    yield  # who explains an error has to see that it came in the call
    if monitor is not None:
        monitor.end_call()


def wait(work: dist.Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits for a collective call on tensors of ``device``; see :func:`explained`."""
    assert work is not None  # as for a rank that is no member of the group
    with explained(watch(group)):
        _C.wait(work, group, device)


# ---- the start -----------------------------------------------------------------------------------


def _start() -> None:
    log.start()
    ending.tell_peers()
    os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """In a forked child, which is no rank: a wrapper that it makes starts anew."""
    global _started
    _started = threading.Lock()
