"""Measures how long a thread is ready to run while other threads occupy all of its cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class CoreWait:
    """The waits of the calling thread for a core, from the construction of this object on.

    The kernel counts these waits in ``/proc/self/task/*/schedstat``: nanoseconds on a core,
    nanoseconds in a run queue, number of time slices.
    """

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._begin_ns = time.monotonic_ns()
        self._waits_before_ns = self._read()

    def share(self) -> float | None:
        """The share of the time since the construction. None without a counter."""
        waits_ns = self._read()
        # The time contains both counts. A wait between a count and its time would otherwise make a
        # share above 1.
        passed_ns = time.monotonic_ns() - self._begin_ns
        if self._waits_before_ns is None or waits_ns is None or passed_ns == 0:
            return None
        return (waits_ns - self._waits_before_ns) / passed_ns

    def _read(self) -> int | None:
        try:
            return int(self._file.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # no such counter, or the thread has ended
            return None
