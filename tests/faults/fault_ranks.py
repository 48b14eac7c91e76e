"""Fresh ranks that may die in any way, and what each of them had to say.

A rank is forked from a server that has imported ddpx already, so that a case costs tens of
milliseconds instead of an import of torch a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
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
from ddpx.testing.rank_pool import forking_context

# Seconds until a group's own timeout: much later than anything that is tested here.
GROUP_TIMEOUT_S = 60.0
_CASE_TIMEOUT_S = 45.0
_END_TIMEOUT_S = 8.0

_NAP_S = 0.05
# A third of what a store's answer may take, to which three threads have to wake.
HELD_UP_S = 0.1


@dataclass
class Ending:
    """How one rank ended.

    Attributes:
        value: what its function returned; None if it did not return.
        marks: the readings of time.monotonic() that it noted, by name.
        exit_code: of its process; -9 after SIGKILL. None if it hung and had to be killed.
        end_s: seconds from the moment when all had said what they had to say to its end.
    """

    value: Any = None
    marks: dict[str, float] = field(default_factory=dict)
    exit_code: int | None = None
    end_s: float = 0.0


_to_parent: Connection | None = None
_directory = Path()


def mark(name: str) -> None:
    """Notes the time, also of a rank that dies at once."""
    assert _to_parent is not None
    _to_parent.send(("mark", (name, time.monotonic())))


def announce(name: str) -> None:
    """To other ranks of the case, through a file: no part of what is tested."""
    (_directory / name).touch()


def await_announcement(name: str) -> None:
    await_that((_directory / name).exists, f"nobody announced {name}")


def await_that(condition: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.01)


def let_meet(model: nn.Module) -> None:
    """Ranks that have not met, as in a job's first moments, know nothing of each other. Then all go
    on at the same time."""
    if isinstance(model, ddpx.ReducerDDP):
        others = dist.get_world_size() - 1
        await_that(lambda: len(ddpx.ranks(model)) == others, "ranks do not meet")
    dist.barrier()


def crash(name: str) -> NoReturn:
    """Ends this process in the way called ``name``."""
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif name == "segfault":
        ctypes.string_at(0)
    elif name == "abort":
        os.abort()
    elif name == "exit":
        os._exit(3)
    raise AssertionError(f"still alive after {name}")


def stop_for(seconds: float) -> None:
    """All threads of this process, as by ^Z; returns when it was woken up again."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    # To this thread, which would go on for a moment if another one were to take the signal.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


class HoldUps:
    """While entered, a thread naps on each core in turn: what is late to wake was held up."""

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
            os.sched_setaffinity(0, {core})  # this thread's
            is_over = self._over.wait(_NAP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - start - _NAP_S)
            if is_over:
                return


def again_if_held_up(test: Callable[..., None]) -> Callable[..., None]:
    """Decorates what asserts how soon ranks report: it may fail once, but only if the machine held
    processes up meanwhile."""

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


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    identities: str = "",
    environment: Mapping[str, str] | None = None,
    timeout_s: float = GROUP_TIMEOUT_S,
) -> list[Ending]:
    """Runs ``function(*args)`` on new ranks; rank 0 hosts the store. By rank, how they ended.

    A rank that has returned stays until all have returned or died: survivors must get their
    reports while the other survivors live on.

    Args:
        identities: a letter a rank; ranks with different ones take each other for ranks of other
            hosts. Empty: all are on one.
        timeout_s: of the process group.
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
            _listen(connections, endings)
        finally:
            _end(processes, connections, endings)
    return endings


def _listen(connections: list[Connection], endings: list[Ending]) -> None:
    """Until every rank has returned or died."""
    deadline = time.monotonic() + _CASE_TIMEOUT_S
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
        connection.close()  # those that wait may go
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
    timeout = timedelta(seconds=timeout_s)
    store = _store(rank, world_size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    value = function(*args)  # what it raises ends this process as it ends a script
    connection.send(("value", value))
    with contextlib.suppress(EOFError, ConnectionResetError):
        connection.recv()


def _store(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Its server is a thread of rank 0, at a port that was free."""
    port = _directory / "port"
    if rank == 0:
        # Its own socket would be an IPv6 one, for which 127.0.0.1 is not in /etc/hosts: torch would
        # ask a name server who connects, and serve nobody until that has answered.
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
    """As a traceback ends."""
    return "".join(traceback.format_exception_only(error)).strip()
