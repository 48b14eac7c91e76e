"""Passes messages of the failure detector to the standard ``logging`` module."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from types import FrameType

from ddpx import _C
from ddpx.frames import innermost_frames, is_launcher
from ddpx.health import recorded_calls

# A record has the attributes event, rank, about_rank, step and phase.
logger = logging.getLogger("ddpx.health")

_NUMBERS = ("rank", "about_rank", "step")
_WAIT_S = 1.0  # a handler of the script may hang
_reading = threading.Lock()  # held from the time when a message is taken until it is logged


def start() -> None:
    """From now on, messages are logged. A thread exists only while there are messages."""
    _C.set_health_log_reader(_start_thread)


def stop() -> None:
    """Logs what waits already. Later messages are lost."""
    _C.set_health_log_reader(None)
    is_alone = _reading.acquire(timeout=_WAIT_S)
    try:
        _log_all()
    finally:
        if is_alone:
            _reading.release()


def _start_thread() -> None:
    try:
        threading.Thread(target=_work, name="ddpx-health-log", daemon=True).start()
    except RuntimeError:  # the process is at its limit of threads
        _work()  # this thread has no other work


def _work() -> None:
    with _reading:
        _log_all()


def _log_all() -> None:
    while (record := _C.take_health_record()) is not None:
        try:
            _serve(record)
        except Exception:  # of a log handler; later messages are still logged
            traceback.print_exc()


def _serve(record: _C.HealthRecord) -> None:
    if record.event == "stack_wanted":
        stacks = _stacks().encode("utf-8", "backslashreplace").decode()
        record.answer_stack_request(stacks)
    elif record.event == "calls_wanted":
        calls = recorded_calls.read(record.message)
        # The newest first, since a long record is cut off.
        record.publish_recorded_calls(sorted(calls.items(), reverse=True))
    else:
        message = record.message
        if record.event == "stack":
            head, _, stacks = message.partition("\n")
            message = head + innermost_frames(stacks)
        numbers = {name: int(record.fields[name]) for name in _NUMBERS}
        extra = {"event": record.event, **record.fields, **numbers}
        # Each rank raises the failure of its group, so the log has it for information only.
        level = logging.INFO if record.event == "rank_failed" else logging.WARNING
        logger.log(level, "[ddpx] %s", message, extra=extra)


def _stacks() -> str:
    """Returns the stacks of all other threads of this process, the main thread first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] != main)
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{_stack(frame)}"
        for ident, frame in frames
        if ident != threading.get_ident()
    )


def _stack(innermost: FrameType) -> str:
    """Returns the stack of a thread, from the user's script on."""
    stack = [frame for frame, _ in traceback.walk_stack(innermost)]
    while len(stack) > 1 and is_launcher(stack[-1]):
        stack.pop()
    return "".join(traceback.format_stack(innermost, limit=len(stack))).rstrip()
