"""Runs ranks of which some die. Records the errors of the survivors, and their times."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ddpx.testing.rank_pool import forking_context

Function = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: the result of its function, or its death."""

    value: Any
    exit_code: int | None


def die() -> NoReturn:
    """Dies by SIGKILL, as under the kernel's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def error_of(action: Callable[[], Any]) -> tuple[str, float]:
    """The text of the exception that ``action`` raises, and the seconds until then."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def run_mortal(
    world_size: int,
    function: Function,
    *args: Any,
    identities: str = "",
    timeout_s: float = 60.0,
    stay: bool = False,
) -> list[Outcome]:
    """Runs ``function(*args)`` on new ranks with a ``shm`` group. All ranks must end, dead or
    alive.

    Args:
        identities: A letter per rank. Ranks with different letters share no memory. Default: all
            ranks share memory.
        timeout_s: The timeout of the group.
        stay: A rank that has returned stays alive until all ranks have returned or died.
    """
    context = forking_context()
    with tempfile.TemporaryDirectory(prefix="ddpx-mortal-") as directory:
        connections: dict[int, Connection] = {}
        processes = []
        for rank in range(world_size):
            connection, theirs = context.Pipe()
            store = os.path.join(directory, "store")
            setting = (rank, world_size, store, identities, timeout_s, stay)
            process = context.Process(
                target=_serve,
                args=(theirs, setting, list(sys.path), dict(os.environ), function, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            connections[rank] = connection
            processes.append(process)
        values: dict[int, Any] = {}
        deadline = time.monotonic() + 90
        open_ends = {connection: rank for rank, connection in connections.items()}
        while open_ends and time.monotonic() < deadline:
            for connection in wait(list(open_ends), 1.0):
                assert isinstance(connection, Connection)
                rank = open_ends.pop(connection)
                try:
                    values[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    values[rank] = None
        for connection in connections.values():
            connection.close()  # ranks that stay end
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        assert not open_ends, f"ranks {sorted(open_ends.values())} did not end"
    return [Outcome(values[rank], processes[rank].exitcode) for rank in range(world_size)]


def _serve(
    connection: Connection,
    setting: tuple[int, int, str, str, float, bool],
    path: list[str],
    environment: dict[str, str],
    function: Function,
    args: tuple[Any, ...],
) -> None:
    rank, world_size, store, identities, timeout_s, stay = setting
    sys.path[:] = path
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if identities:
        os.environ["DDPX_SHM_HOST_IDENTITY"] = identities[rank]
    import ddpx  # noqa: F401 - registers the backend

    torch.set_num_threads(1)
    dist.init_process_group(
        "shm",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        connection.send(function(*args))
    except BaseException:
        connection.send(traceback.format_exc())
        os._exit(1)
    if stay:
        with contextlib.suppress(EOFError, ConnectionResetError):
            connection.recv()
    # The group is not destroyed, as in a script that raises. Nothing may hang then.
    os._exit(0)
