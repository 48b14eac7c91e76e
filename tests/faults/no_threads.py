"""A process that can start no further thread, as at its limit of threads."""

from __future__ import annotations

import ctypes
import errno
import platform
import struct

_SECCOMP = {"x86_64": 317, "aarch64": 277}
_CLONE = {"x86_64": (56, 435), "aarch64": (220, 435)}  # clone, clone3

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


def start_no_more_threads() -> None:
    """From now on, threads and processes that this process starts fail with EAGAIN.

    A limit of the system (RLIMIT_NPROC) would not hold for root. See seccomp(2).
    """
    machine = platform.machine()
    clone, clone3 = _CLONE[machine]
    code = b"".join(
        (
            _instruction(_LOAD_NUMBER, 0),
            _instruction(_JUMP_IF_EQUAL, clone, if_true=1),
            _instruction(_JUMP_IF_EQUAL, clone3, if_false=1),
            _instruction(_RETURN, _ERROR | errno.EAGAIN),
            _instruction(_RETURN, _ALLOW),
        )
    )
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(buffer))
    if (
        libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0
        or libc.syscall(_SECCOMP[machine], _SET_FILTER, _ALL_THREADS, ctypes.byref(program)) != 0
    ):
        raise OSError(ctypes.get_errno(), "the system refuses a filter of system calls")
