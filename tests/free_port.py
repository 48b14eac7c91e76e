"""Ports for processes that bind them seconds later."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from itertools import count

# Below the range from which the kernel assigns ports (net.ipv4.ip_local_port_range), for example to
# gloo's listeners: the kernel could assign such a port before the process binds it. Each of
# pytest's workers has its own range.
_FIRST, _PER_WORKER, _MOST_WORKERS = 20_000, 1_000, 9
_tries = count(os.getpid())  # prevents reuse of a port in this run, and soon after in the next run


def free_port() -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _MOST_WORKERS
    for _ in range(_PER_WORKER):
        port = _FIRST + worker * _PER_WORKER + next(_tries) % _PER_WORKER
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise AssertionError("no port is free")
