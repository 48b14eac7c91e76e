"""A process whose system calls fail, as at a limit or on an older kernel. See seccomp(2)."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CLONE = {"x86_64": (56, 435), "aarch64": (220, 435)}  # clone, clone3
_MEMFD_CREATE = {"x86_64": (319,), "aarch64": (279,)}
_PIDFD_OPEN = {"x86_64": (434,), "aarch64": (434,)}

_NO_NEW_PRIVILEGES = 38
_SET_FILTER, _ALL_THREADS = 1, 1
_LOAD_NUMBER = 0x20  # of the system call
_JUMP_IF_EQUAL = 0x15
_RETURN = 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


def _refuse(calls: tuple[int, ...], error: int) -> None:
    """From now on, these system calls of this process fail with ``error``."""
    code = b"".join(
        (
            _instruction(_LOAD_NUMBER, 0),
            *(
                _instruction(_JUMP_IF_EQUAL, call, if_true=len(calls) - place)
                for place, call in enumerate(calls)
            ),
            _instruction(_RETURN, _ALLOW),
            _instruction(_RETURN, _ERROR | error),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    number = _SECCOMP[platform.machine()]
    if (
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0
        or libc.syscall(number, _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) != 0
    ):
        raise OSError(ctypes.get_errno(), "the system refuses a filter of system calls")


def start_no_more_threads() -> None:
    """From now on, threads and processes that this process starts fail with EAGAIN.

    A limit of the system (RLIMIT_NPROC) would not hold for root.
    """
    _refuse(_CLONE[platform.machine()], errno.EAGAIN)


def create_no_more_memory_files() -> None:
    """From now on, memory files fail with EMFILE, as at the limit of open files."""
    _refuse(_MEMFD_CREATE[platform.machine()], errno.EMFILE)


def open_no_more_pidfds() -> None:
    """From now on, descriptors of processes fail with ENOSYS, as on kernels before Linux 5.3."""
    _refuse(_PIDFD_OPEN[platform.machine()], errno.ENOSYS)
