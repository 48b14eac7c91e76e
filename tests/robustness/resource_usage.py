"""Measures the resources of this process, precisely enough to find a leak of 100 bytes a step."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

_PROC = Path("/proc/self")


@dataclass(frozen=True)
class Usage:
    """Resources in use, or the difference of two measurements."""

    fds: int
    memfds: int
    threads: int
    children: int
    mappings: int  # mappings of memory, shared or not
    python_blocks: int  # each is an object of up to 512 bytes
    malloc_bytes: int  # memory of C and C++, and of larger Python objects
    resident_bytes: int

    def minus(self, other: Usage) -> Usage:
        return Usage(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(Usage)))


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _malloc_bytes() -> int:
    """Bytes that malloc() has allocated and that are not freed, over all threads."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


def _open_files() -> list[str]:
    targets = []
    for entry in os.listdir(_PROC / "fd"):
        try:
            targets.append(os.readlink(_PROC / "fd" / entry))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return targets


def _num_children() -> int:
    count = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process has ended
        count += int(after_name[1]) == os.getpid()
    return count


def read_usage() -> Usage:
    for _ in range(3):  # finalizers may release further objects
        gc.collect()
    files = _open_files()
    return Usage(
        fds=len(files),
        memfds=sum("memfd:" in name for name in files),
        threads=len(os.listdir(_PROC / "task")),
        children=_num_children(),
        mappings=len((_PROC / "maps").read_text().splitlines()),
        python_blocks=sys.getallocatedblocks(),
        malloc_bytes=_malloc_bytes(),
        resident_bytes=int((_PROC / "statm").read_text().split()[1]) * resource.getpagesize(),
    )


def assert_no_leak(
    act: Callable[[int], object],
    *,
    warm_up: int,
    times: int,
    bytes_per_call: int = 100,
    objects_per_call: int = 1,
    settle_s: float = 0.0,
) -> Usage:
    """Calls ``act(0)``, ``act(1)``, ..., and checks that nothing grows from the end of
    ``warm_up`` on.

    Returns the growth. Other threads get ``settle_s`` seconds to release resources. Counted
    resources must not grow at all. The other limits are half of what a leak would add in ``times``
    calls (at least 200), because caches of Python and of torch fill slowly: one mapping,
    ``objects_per_call``, and ``bytes_per_call`` of malloc. Whether a page is resident has many
    reasons, so only a leak of a page per call, as of mapped memory, is detected there.
    """
    assert times >= 200
    for number in range(warm_up):
        act(number)
    time.sleep(settle_s)
    before = read_usage()
    for number in range(warm_up, warm_up + times):
        act(number)
    time.sleep(settle_s)
    growth = read_usage().minus(before)
    limits = Usage(
        fds=0,
        memfds=0,
        threads=0,
        children=0,
        mappings=times // 2,
        python_blocks=times * objects_per_call // 2,
        malloc_bytes=times * bytes_per_call // 2,
        resident_bytes=max(times * resource.getpagesize() // 2, 4 << 20),
    )
    leaks = [
        f"{field.name} grew by {getattr(growth, field.name)} in {times} calls"
        for field in fields(Usage)
        if getattr(growth, field.name) > getattr(limits, field.name)
    ]
    assert not leaks, "; ".join(leaks) + f"\nall: {growth}"
    return growth
