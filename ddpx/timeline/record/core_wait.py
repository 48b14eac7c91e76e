"""Measures how long a thread is ready to run while other threads occupy all of its cores."""

from __future__ import annotations

import threading
import time
from pathlib import Path


class CoreWait:
    """The waits of one thread for a core, between ``start`` and ``stop``.

    The kernel counts these waits in ``/proc/self/task/*/schedstat``: nanoseconds on a core,
    nanoseconds in a run queue, number of time slices.
    """

    def __init__(self) -> None:
        self._file: Path | None = None
        self._begin: int | None = None  # the waits until the start, in ns
        self._begin_ns = 0
        self.share: float | None = None

    def start(self) -> None:
        """Starts to count the waits of the calling thread."""
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._begin_ns = time.monotonic_ns()
        self._begin = self._read()

    def stop(self) -> None:
        """Sets ``share`` to the share of the time since ``start``. None without a counter."""
        end = self._read()
        # The time contains both counts. A wait between a count and its time would otherwise make a
        # share above 1.
        passed_ns = time.monotonic_ns() - self._begin_ns
        if self._begin is not None and end is not None and passed_ns > 0:
            self.share = (end - self._begin) / passed_ns

    def _read(self) -> int | None:
        if self._file is None:
            return None
        try:
            return int(self._file.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # no such counter, or the thread has ended
            return None
