"""A port for a process that binds it seconds later."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

# Below those that the kernel gives out by itself (net.ipv4.ip_local_port_range), as to any listener
# of gloo's: one of these may be taken until it is bound. Each of pytest's workers has its own.
_FIRST, _PER_WORKER, _MOST_WORKERS = 20_000, 1_000, 9
_tries = count(os.getpid())  # so that none is given out twice, nor soon by the next run of tests


def free_port() -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_WORKERS
    for _ in range(_PER_WORKER):
        port = _FIRST + worker * _PER_WORKER + next(_tries) % _PER_WORKER
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")
