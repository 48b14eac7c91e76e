"""New ranks that may die in any way, and their reports.

A rank is forked from a server that has already imported ddpx. A case then takes tens of
milliseconds, instead of an import of torch per rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx.ddp.fronts.front import Front
from ddpx.testing.rank_pool import choose_gpu, forking_context

# The timeout of the group in seconds, much longer than any tested time.
GROUP_TIMEOUT_S = 60.0
CASE_TIMEOUT_S = 45.0
_END_TIMEOUT_S = 8.0

_NAP_S = 0.05
# A third of the time limit for an answer of the store, for which three threads must wake up.
HELD_UP_S = 0.1


@dataclass
class Ending:
    """The end of one rank.

    Attributes:
        value: The result of its function. None if the function did not return.
        marks: Recorded readings of time.monotonic(), by name.
        exit_code: That of its process; -9 after SIGKILL. None if it hung and was killed.
        end_s: Seconds from the moment when all ranks had reported to its end.
    """

    value: Any = None
    marks: dict[str, float] = field(default_factory=dict)
    exit_code: int | None = None
    end_s: float = 0.0


_to_parent: Connection | None = None
_directory = Path()


def mark(name: str) -> None:
    """Records the time, also for a rank that dies at once."""
    assert _to_parent is not None
    _to_parent.send(("mark", (name, time.monotonic())))


def announce(name: str) -> None:
    """Signals other ranks of the case through a file, independent of the tested code."""
    (_directory / name).touch()


def was_announced(name: str) -> bool:
    return (_directory / name).exists()


def await_announcement(name: str) -> None:
    await_that(lambda: was_announced(name), f"nobody announced {name}")


def await_that(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def let_meet(model: nn.Module | Front) -> None:
    """Waits until ranks know each other, then lets all continue at once.

    In the first moments of a job, ranks do not know each other yet.
    """
    if isinstance(model, Front):
        world_size = dist.get_world_size()
        await_that(lambda: len(ddpx.peer_status(model)) == world_size, "ranks do not meet")
    dist.barrier()


def crash(name: str) -> NoReturn:
    """Ends this process in the way called ``name``. "leave": as the end of a script."""
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "segfault":
        ctypes.string_at(0)
    elif name == "abort":
        os.abort()
    elif name == "exit":
        os._exit(3)
    elif name == "exit 0":
        os._exit(0)
    elif name == "leave":
        sys.exit(0)
    raise AssertionError(f"still alive after {name}")


def stop_for(seconds: float) -> None:
    """Stops all threads of this process, as ^Z does. Returns after the process was continued."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    # Sent to this thread: if another thread took the signal, this thread would run on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class HoldUps:
    """In the block, a thread sleeps on each core in turn.

    A late wake-up shows that the core was busy.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def __enter__(self) -> HoldUps:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._over.set()
        self._thread.join()

    def _nap(self) -> None:
        for core in itertools.cycle(os.sched_getaffinity(0)):
            start = time.monotonic()
            os.sched_setaffinity(0, {core})  # pins this thread
            is_over = self._over.wait(_NAP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - start - _NAP_S)
            if is_over:
                return


def again_if_held_up(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates tests of report times.

    They may fail once, but only if the machine delayed processes.
    """

    @functools.wraps(test)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        hold_ups = HoldUps()
        try:
            with hold_ups:
                test(*args, **kwargs)
        except AssertionError:
            if hold_ups.longest_s < HELD_UP_S:
                raise
            how = f"again, since processes were held up for {hold_ups.longest_s:.2f} s"
            warnings.warn(f"{how}: {traceback.format_exc()}", stacklevel=2)
        else:
            return
        test(*args, **kwargs)

    return wrapped


class Log(logging.Handler):
    """The warnings of this rank. Others can wait for them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("ddpx.health").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        announce(f"rank {dist.get_rank()} has warned")


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    identities: str = "",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
    limit_s: float = CASE_TIMEOUT_S,
) -> list[Ending]:
    """Runs ``function(*args)`` on new ranks, and returns their ends by rank. Rank 0 hosts the
    store.

    A rank that has returned stays until all ranks have returned or died: survivors must report
    while the other survivors are alive.

    Args:
        identities: A letter per rank. Ranks with different letters treat each other as ranks of
            other hosts. Default: all are on one host.
        timeout_s: The timeout of the process group.
        limit_s: The time until all ranks must have returned or died.
    """
    context = forking_context()
    with tempfile.TemporaryDirectory(prefix="ddpx-faults-") as directory:
        connections: list[Connection] = []
        processes: list[BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            variables = {"GLOO_SOCKET_IFNAME": "lo", **(environment or {})}
            if identities:
                variables["DDPX_SHM_HOST_IDENTITY"] = identities[rank]
            setting = (rank, world_size, backend, directory, timeout_s, variables)
            process = context.Process(
                target=_serve, args=(theirs, setting, list(sys.path), function, args), daemon=True
            )
            process.start()
            theirs.close()
            connections.append(ours)
            processes.append(process)
        endings = [Ending() for _ in range(world_size)]
        try:
            _listen(connections, endings, limit_s)
        finally:
            _end(processes, connections, endings)
    return endings


def _listen(connections: list[Connection], endings: list[Ending], limit_s: float) -> None:
    """Receives messages until every rank has returned or died."""
    deadline = time.monotonic() + limit_s
    pending = dict(zip(connections, range(len(connections)), strict=True))
    while pending and time.monotonic() < deadline:
        for connection in wait(list(pending), 0.5):
            assert isinstance(connection, Connection)
            rank = pending[connection]
            try:
                kind, value = connection.recv()
            except (EOFError, ConnectionResetError):
                del pending[connection]
                continue
            if kind == "mark":
                endings[rank].marks.setdefault(*value)
            else:
                endings[rank].value = value
                del pending[connection]


def _end(
    processes: list[BaseProcess], connections: list[Connection], endings: list[Ending]
) -> None:
    for connection in connections:
        connection.close()  # lets waiting ranks continue
    start = time.monotonic()
    for process, ending in zip(processes, endings, strict=True):
        process.join(max(0.1, start + _END_TIMEOUT_S - time.monotonic()))
        ending.end_s = time.monotonic() - start
        ending.exit_code = process.exitcode
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()


def _serve(
    connection: Connection,
    setting: tuple[int, int, str, str, float, dict[str, str]],
    path: list[str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, world_size, backend, directory, timeout_s, variables = setting
    global _to_parent, _directory
    _to_parent, _directory = connection, Path(directory)
    sys.path[:] = path
    os.environ.update(variables)
    torch.set_num_threads(1)
    if backend == "nccl":
        choose_gpu(rank, world_size)
    timeout = timedelta(seconds=timeout_s)
    store = _store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    value = function(*args)  # an exception ends this process, as in a script
    connection.send(("value", value))
    with contextlib.suppress(EOFError, ConnectionResetError):
        connection.recv()


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The store, whose server is a thread of rank 0, on a free port."""
    port = _directory / "port"
    if rank == 0:
        # The store's own socket would be an IPv6 socket, for which 127.0.0.1 is not in /etc/hosts.
        # torch would then ask a name server for each client, and serve no client until the answer.
        listening = socket.create_server(("127.0.0.1", 0))
        store = dist.TCPStore(
            "127.0.0.1",
            listening.getsockname()[1],
            world_size,
            True,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
        return store
    await_announcement("port")
    return dist.TCPStore(
        "127.0.0.1", int(port.read_text()), world_size, False, timeout, wait_for_workers=False
    )


def text_of(error: BaseException) -> str:
    """The last line of a traceback."""
    return "".join(traceback.format_exception_only(error)).strip()
