"""Watches over the ranks of a process group, from the first wrapper on; needs no call."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ddpx import _C, errors
from ddpx.health import ending, log
from ddpx.health.failure import RankFailure

_started = threading.Lock()
_patience_is_set = False  # by the script, which may do so before anything is watched
_MEETING_S = 1.0
_WARN_S = 10.0
_MOST_S = 1e9


def watch(group: dist.ProcessGroup) -> _C.Monitor | None:
    """From here on; None if there is nobody to watch, or ``DDPX_HEALTH=0``."""
    monitor = _C.monitor_of(group)
    if monitor is not None and not _started.locked():
        patience = _patience_of_environment()
        if _started.acquire(blocking=False):
            _start(*patience)
    return monitor


def set_patience(
    warn_s: float = _WARN_S, raise_s: float | None = None, *, stacks: bool = False
) -> None:
    """How long a rank waits for others, in this process; goes before the environment's
    ``DDPX_STALL_WARN_S``, ``DDPX_STALL_RAISE_S`` and ``DDPX_STALL_STACKS``.

    Args:
        warn_s: seconds until it logs which ranks are missing and what they were last seen doing;
            again after twice as long, and so on.
        raise_s: seconds until every waiting rank raises :class:`ddpx.RankStalled`; never if None.
        stacks: let warnings bring the Python stacks of the missing ranks.

    Raises:
        ValueError: a time that is not a positive number of seconds.
    """
    for name, value in (("warn_s", warn_s), ("raise_s", raise_s)):
        if value is not None and not 0 < value < _MOST_S:
            raise errors.bad_patience(name, value)
    global _patience_is_set
    _patience_is_set = True
    _C.set_patience(warn_s, raise_s, stacks)


@contextmanager
def constructing(monitor: _C.Monitor | None) -> Iterator[None]:
    """Around the collective calls of a construction; see :func:`explained`."""
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
    """Around a collective call: if it fails because ranks are gone, RankFailure says so."""
    try:
        yield
    except RankFailure:
        raise
    except RuntimeError as error:
        if monitor is not None:
            monitor.explain_error(str(error))
        raise


def wait(work: dist.Work | None, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits for a collective call on tensors of ``device``; see :func:`explained`."""
    assert work is not None  # as for a rank that is no member of the group
    with explained(watch(group)):
        _C.wait(work, group, device)


# ---- the start -----------------------------------------------------------------------------------


def _start(warn_s: float, raise_s: float | None) -> None:
    if not _patience_is_set:
        _C.set_patience(warn_s, raise_s, os.environ.get("DDPX_STALL_STACKS") == "1")
    log.start()
    ending.tell_peers()
    os.register_at_fork(after_in_child=_forget)


def _patience_of_environment() -> tuple[float, float | None]:
    return _seconds("DDPX_STALL_WARN_S") or _WARN_S, _seconds("DDPX_STALL_RAISE_S")


def _seconds(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise errors.bad_patience(variable, text) from None
    if not 0 < seconds < _MOST_S:
        raise errors.bad_patience(variable, seconds)
    return seconds


def _forget() -> None:
    """In a forked child, which is no rank: a wrapper that it makes starts anew."""
    global _started
    _started = threading.Lock()
    ending.forget()
