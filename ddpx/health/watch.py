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
        if value is not None and not 0 < value < _MOST_S:
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


def _start(warn_s: float, raise_s: float | None) -> None:
    set_patience(warn_s, raise_s, stacks=os.environ.get("DDPX_STALL_STACKS") == "1")
    log.start()
    _tell_peers_of_exceptions()
    atexit.register(_end)
    # A process that multiprocessing started ends without atexit, but for these.
    multiprocessing.util.Finalize(None, _end_of_child, exitpriority=1000)
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


def _tell_peers_of_exceptions() -> None:
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        failure = None
        try:
            failure = _end_with(error)
        finally:
            if failure is not None:
                failure.__cause__ = error.with_traceback(trace)
                previous(type(failure), failure, None)
            else:
                previous(kind, error, trace)

    sys.excepthook = excepthook


def _end_with(error: BaseException) -> RankFailure | None:
    """Tells peers that this ends the script; returns what explains it, if ranks are lost."""
    failure = _explanation(error)
    _C.fail_rank(_cause(failure or error))
    return failure


def _explanation(error: BaseException) -> RankFailure | None:
    """Of an error in a collective call of the script's own, behind which may be a lost rank."""
    if isinstance(error, RankFailure) or not _of_communication(error):
        return None
    try:
        _C.explain_error(_text(error))
    except RankFailure as failure:
        return failure
    return None


def _of_communication(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in _text(error)
    )


def _cause(error: BaseException) -> str:
    text = _text(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "(its text could not be made)"
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as of file names


def _end() -> None:
    _C.leave_groups()
    log.stop()


def _end_of_child() -> None:
    if multiprocessing.parent_process() is None:
        return  # atexit sees to it
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        error = error.__context__  # what torch.multiprocessing.spawn() makes of an exception
    failure = None if error is None else _end_with(error)
    if failure is not None:
        print(f"ddpx.{type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
    _end()


def _forget() -> None:
    """In a forked child, which is no rank: a wrapper that it makes starts anew."""
    global _started
    _started = threading.Lock()
    atexit.unregister(_end)
