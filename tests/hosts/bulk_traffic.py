"""Traffic of somebody else, which fills the queues of a slow link."""

from __future__ import annotations

import itertools
import socket
import time

_SO_SNDBUFFORCE = 32  # the usual limit would let only 0.2 MB wait in the link's queue
_PACKET = bytes(1400)
_PORT = 9  # discard


def send_bursts(address: str, num_bytes: int, every_s: float) -> None:
    """Sends ``num_bytes`` at once, again and again."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as out:
        out.setsockopt(socket.SOL_SOCKET, _SO_SNDBUFFORCE, 8 * num_bytes)
        start = time.monotonic()
        for burst in itertools.count(1):
            for _ in range(num_bytes // len(_PACKET)):
                out.sendto(_PACKET, (address, _PORT))
            time.sleep(max(0.0, start + burst * every_s - time.monotonic()))
