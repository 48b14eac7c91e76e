"""A proxy in front of the store that makes the store slow."""

from __future__ import annotations

import asyncio
from pathlib import Path

_MOST_BYTES = 1 << 16


def serve(port: int, store_port: int, slow: Path, delay_s: float) -> None:
    """Forwards connections on this host.

    Args:
        slow: While this file exists, data is delayed.
        delay_s: The delay in each direction, in seconds.
    """

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(_MOST_BYTES):
            loop.call_later(delay_s if slow.exists() else 0.0, writer.write, data)
        loop.call_later(delay_s, writer.close)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_store, to_store = await _connect_to_store(store_port)
        await asyncio.gather(forward(reader, to_store), forward(from_store, writer))

    async def main() -> None:
        async with await asyncio.start_server(connect, "0.0.0.0", port) as server:
            await server.serve_forever()

    asyncio.run(main())


async def _connect_to_store(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    while True:
        try:
            return await asyncio.open_connection("127.0.0.1", port)
        except ConnectionRefusedError:  # rank 0 has not started the store yet
            await asyncio.sleep(0.05)
