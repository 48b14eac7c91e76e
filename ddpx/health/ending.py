"""Publishes the end of this rank's script to its peers, and names a lost rank in the traceback."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

import torch.distributed as dist

from ddpx import _C, settings
from ddpx.health import log
from ddpx.health.failure import RankError

_rank_pid: int | None = None
_hook: Callable[..., None] | None = None  # the newest excepthook of this module
_has_ended = False


def publish_end() -> None:
    """Makes the end of the script known to peers from now on.

    Each construction calls this again: another library may have replaced the hook for uncaught
    exceptions, or a forked child may have become a rank.
    """
    global _rank_pid
    if sys.excepthook is not _hook and settings.switch_of("DDPX_EXCEPTHOOK") is not False:
        _take_excepthook()
    _end_first()
    if _rank_pid == os.getpid():
        return
    if _rank_pid is None:
        os.register_at_fork(after_in_child=_forget)
        multiprocessing.util.register_after_fork(_end_of_child, _watch_end_of_child)
    _rank_pid = os.getpid()
    _watch_end_of_child(_end_of_child)


def _end_first() -> None:
    """Lets _end run before functions that were registered later, which may destroy the group."""
    atexit.unregister(_end)
    atexit.register(_end)


def _watch_end_of_child(function: Callable[[], None]) -> None:
    """A process of multiprocessing runs finalizers at its end, and no functions of atexit."""
    if _rank_pid == os.getpid():
        multiprocessing.util.Finalize(None, function, exitpriority=1000)


def _forget() -> None:
    """Runs in a forked child. The child may become a rank if its parent has no process group."""
    atexit.unregister(_end)
    if not dist.is_initialized():
        publish_end()


def _take_excepthook() -> None:
    global _hook
    previous = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        failure = None
        try:
            if not _has_ended and _ends_the_script(sys._getframe()):
                failure = end_with(error)
        finally:
            is_report = isinstance(failure or error, RankError)
            if is_report:
                _C.begin_printing_report()
            if failure is not None:
                failure.__cause__ = error.with_traceback(trace)
                previous(type(failure), failure, None)
            else:
                previous(kind, error, trace)
            if is_report:
                _C.end_printing_report()

    sys.excepthook = _hook = excepthook


def _ends_the_script(hook: FrameType) -> bool:
    """Whether Python calls the hook. Code that logs a caught exception may call the hook, too."""
    if _rank_pid != os.getpid() or threading.current_thread() is not threading.main_thread():
        return False
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    caller = hook.f_back
    while caller is not None and caller.f_code.co_name != "<module>":
        caller = caller.f_back  # later hooks call the previous one
    return caller is None


def end_with(error: BaseException) -> RankError | None:
    """Publishes that an error ends the script. Returns its explanation, if ranks are lost."""
    global _has_ended
    _has_ended = True  # earlier hooks do not search for the cause again
    _end_first()
    failure = _explanation(error)
    if not of_communication(error) and dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            _C.monitor_of(group)  # other ranks may wait there for the construction of a wrapper
    _C.fail_rank(describe(failure or error))
    return failure


def _explanation(error: BaseException) -> RankError | None:
    """Returns why a collective call of the script failed, if a lost rank is the cause."""
    if isinstance(error, RankError) or not of_communication(error):
        return None
    try:
        _C.explain_error(_text(error))
    except RankError as failure:
        return failure
    return None


def of_communication(error: BaseException) -> bool:
    """Whether a collective call raised the error."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in _text(error)
    )


def describe(error: BaseException) -> str:
    """The type and the text of an error."""
    text = _text(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        return "(its text could not be made)"
    return text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, as of file names


def _end() -> None:
    """At the end of a script. The interpreter ends next, which torch's watchdogs may still use."""
    _leave()
    _C.await_watchdogs_of_aborted()


def _leave() -> None:
    global _has_ended
    _has_ended = True  # an exception of a finalizer, which comes later, ends no training
    _C.leave_groups()
    log.stop()


def _end_of_child() -> None:
    if multiprocessing.parent_process() is None:
        return  # atexit calls _end
    error = sys.exc_info()[1]
    if isinstance(error, SystemExit):
        # What torch.multiprocessing.spawn() makes of an exception.
        error = error.__context__ if error.code not in (None, 0) else None
    try:
        failure = None if error is None else end_with(error)
        if failure is not None:
            _C.begin_printing_report()
            print(f"ddpx.{type(failure).__name__}: {failure}", file=sys.stderr, flush=True)
            _C.end_printing_report()
    finally:
        _leave()  # a process of multiprocessing ends without the end of its interpreter
