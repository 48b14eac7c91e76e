"""Stops a process as a debugger does. The thread that attaches must be the one that detaches."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17
_WALL = 0x40000000  # wait() also for threads
_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, thread: int) -> None:
    if _libc.ptrace(request, thread, None, None) == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), f"thread {thread}")


class Debugger:
    """Attached to all threads of a process, which stop until ``detach()``."""

    def __init__(self, pid: int) -> None:
        self._threads: list[int] = []
        # Threads that are still running may start others.
        while new := self._threads_of(pid) - {*self._threads}:
            for thread in sorted(new):
                _ptrace(_SEIZE, thread)
                _ptrace(_INTERRUPT, thread)
                os.waitpid(thread, _WALL)
                self._threads.append(thread)

    @staticmethod
    def _threads_of(pid: int) -> set[int]:
        return {int(folder.name) for folder in Path(f"/proc/{pid}/task").iterdir()}

    def detach(self) -> None:
        for thread in self._threads:
            _ptrace(_DETACH, thread)
