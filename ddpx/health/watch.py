"""Watches over the ranks of a process group, from the first wrapper on; needs no call."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist

from ddpx import _C, errors
from ddpx.health import log
from ddpx.health.failure import RankFailure

_started = threading.Lock()
_MEETING_S = 1.0


def watch(group: dist.ProcessGroup) -> _C.Monitor | None:
    """From here on; None if there is nobody to watch, or ``DDPX_HEALTH=0``."""
    monitor = _C.monitor_of(group)
    if monitor is not None and _started.acquire(blocking=False):
        _start()
    return monitor


def set_patience(
    warn_s: float = 10.0, raise_s: float | None = None, *, stacks: bool = False
) -> None:
    """How long a rank waits for others, in this process.

    Args:
        warn_s: seconds until it logs which ranks are missing and what they were last seen doing;
            again after twice as long, and so on.
        raise_s: seconds until every waiting rank raises :class:`ddpx.RankStalled`; never if None.
        stacks: let warnings bring the Python stacks of the missing ranks.

    Raises:
        ValueError: a time that is not a positive number of seconds.
    """
    for name, value in (("warn_s", warn_s), ("raise_s", raise_s)):
        if value is not None and not 0 < value < 1e9:
            raise errors.bad_patience(name, value)
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


# ---- the start, and the end of this rank ---------------------------------------------------------


def _start() -> None:
    set_patience(
        _seconds("DDPX_STALL_WARN_S") or 10.0,
        _seconds("DDPX_STALL_RAISE_S"),
        stacks=os.environ.get("DDPX_STALL_STACKS") == "1",
    )
    log.start()
    _tell_peers_of_exceptions()
    atexit.register(_end)
    # A process that multiprocessing started ends without atexit, but for these.
    multiprocessing.util.Finalize(None, _end_of_child, exitpriority=1000)
    os.register_at_fork(after_in_child=_forget)


def _seconds(variable: str) -> float | None:
    text = os.environ.get(variable)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise errors.bad_patience(variable, text) from None


def _tell_peers_of_exceptions() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _C.fail_rank(_cause(error))
        previous(kind, error, trace)

    sys.excepthook = excepthook


def _cause(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end() -> None:
    _C.leave_groups()
    log.stop()


def _end_of_child() -> None:
    if multiprocessing.parent_process() is None:
        return  # atexit sees to it
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__  # what torch.multiprocessing.spawn() makes of an exception
    if error is not None:
        _C.fail_rank(_cause(error))
    _end()


def _forget() -> None:
    """In a forked child, which is no rank: a wrapper that it makes starts anew."""
    global _started
    _started = threading.Lock()
    atexit.unregister(_end)
