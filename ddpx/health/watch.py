"""Watches over the ranks of a process group, from the first wrapper on; needs no call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from ddpx import _C, settings
from ddpx.health import ending, log, stall_timeout
from ddpx.health.failure import RankError

_started = threading.Lock()


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
    try:
        with explained(monitor):
            yield
    finally:
        monitor.note(_C.Doing.OUTSIDE)


def introduction(group: dist.ProcessGroup) -> bytes:
    """Returns ``_C.INTRODUCTION_BYTES`` bytes by which this rank introduces itself to the others.

    All zero if the ranks know each other already, or if nobody watches over them.
    """
    monitor = watch(group)
    text = b"" if monitor is None else monitor.introduction()
    return text.ljust(_C.INTRODUCTION_BYTES, b"\0")


def meet(
    introductions: Sequence[bytes],
    group: dist.ProcessGroup,
    all_gather: Callable[[bytes], list[bytes]],
) -> None:
    """Lets the ranks of a group know each other, so that they need no store for this.

    A collective call, unless all ``introductions`` are zero.

    Args:
        introductions: The results of :func:`introduction`, by rank.
        group: The ranks.
        all_gather: Gathers 8 bytes of each rank.
    """
    if not any(map(any, introductions)):
        return
    monitor = watch(group)
    texts = [text.rstrip(b"\0") for text in introductions]
    host = 0 if monitor is None else monitor.find_host(texts)
    hosts = [int.from_bytes(host, "little") for host in all_gather(host.to_bytes(8, "little"))]
    if monitor is not None:
        monitor.meet(texts, hosts)


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


def note_fault(monitor: _C.Monitor | None, error: Exception, is_of_module: bool) -> None:
    """A forward has raised. Ranks that wait report this, unless the script trains on.

    Args:
        monitor: The failure detector of the group, if there is one.
        error: The error.
        is_of_module: The module's own code raised the error. Ranks that wait then warn only.
    """
    if monitor is not None and torch.is_grad_enabled():
        monitor.note_fault(ending.describe(error), is_of_module)


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


def wait_for(work: dist.Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits for a collective call on tensors of ``device``; see :func:`explained`.

    Not named ``wait``: pybind11 would take a function of this name with ``work`` as its first
    argument for ``work.wait()`` of a work in Python, and would call the base class instead.
    """
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
