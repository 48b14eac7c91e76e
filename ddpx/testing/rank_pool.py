"""Processes that form a process group and run functions together, across many test cases."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

StartMethod = Literal["spawn", "forkserver"]

_START_TIMEOUT_S = 180.0
# The time that other ranks have to report after one rank has failed.
_GRACE_S = 3.0
# DDP and torch.compile would import the second module on each rank, which takes a second. Neither
# import may initialize CUDA or count its devices: a fork of such a process cannot use CUDA.
PRELOADED = ["ddpx.testing", "torch._dynamo"]


def forking_context() -> ForkServerContext:
    """A context of ``multiprocessing`` whose processes are forks of one that has imported ddpx."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailed(RuntimeError):
    """A function raised on a rank, or did not return in time. The text has the tracebacks.

    After a crash, such as a segmentation fault, the text has the Python stacks of all threads.

    Example:
        >>> from ddpx.testing import RankFailed, RankPool
        >>> try:
        ...     with RankPool(1) as pool:
        ...         pool.run(int, "two")
        ... except RankFailed as error:
        ...     print(str(error).splitlines()[0])
        int failed on 1 of 1 rank
    """


class RankPool:
    """A pool of processes with one process group, which runs functions on all ranks.

    The processes live across calls, so a test suite starts them once. The pool is a context
    manager. Outside a ``with`` statement, call :meth:`close`. After a failure the pool ends its
    processes, because a rank may hang in a collective call. The next :meth:`run` starts new
    processes.

    Args:
        world_size: The number of ranks, 1 or more.
        backend: The backend of the process group. Default ``"gloo"``. With ``"nccl"``, several
            ranks may share a GPU. The ranks then communicate over the loopback interface, and take
            turns on the GPU: results are those of NCCL, but times mean nothing.
        start_method: A start method of ``multiprocessing``. With ``"forkserver"``, ranks are forks
            of a server process, which has imported torch and has not initialized CUDA. The server
            process serves all pools of this process. Environment variables that torch reads at
            import have the values of the server's start. With ``"spawn"``, each rank imports
            torch, which takes seconds. Default: ``"forkserver"``.

    Raises:
        ValueError: ``world_size`` is less than 1.

    Example:
        >>> from ddpx.testing import RankPool
        >>> with RankPool(2) as pool:
        ...     pool.run(dist.get_rank)
        [0, 1]
    """

    def __init__(
        self,
        world_size: int,
        backend: str = "gloo",
        start_method: StartMethod = "forkserver",
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be 1 or more, but got {world_size}")
        self.world_size = world_size
        self.backend = backend
        self.start_method = start_method
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on every rank.

        On a rank, ``torch.distributed`` is initialized, and ``torch.get_num_threads()`` is 1.

        Args:
            function: A function at the top level of a module. The pool pickles the function and
                its arguments.
            args: Positional arguments of the function.
            timeout: Seconds until all ranks must return. Default 60.
            kwargs: Keyword arguments of the function.

        Returns:
            The results, in order of rank.

        Raises:
            RankFailed: A rank raised, died or did not return in time.

        Example:
            >>> from ddpx.testing import RankPool
            >>> with RankPool(2) as pool:
            ...     pool.run(int, "101", base=2, timeout=30)
            [5, 5]
        """
        try:
            if not self._processes:
                self._start()
            for connection in self._connections:
                # _collect reports a rank that has ended. Pickling may raise other errors.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.send((function, args, kwargs))
            return self._collect(getattr(function, "__name__", repr(function)), timeout)
        except BaseException:
            self._end()  # a later call must not get results of this call
            raise

    def close(self) -> None:
        """Ends the processes.

        Example:
            >>> from ddpx.testing import RankPool
            >>> pool = RankPool(1)
            >>> pool.run(dist.get_world_size)
            [1]
            >>> pool.close()
        """
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the rank has ended already
                connection.send(None)
        deadline = time.monotonic() + _GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._end()

    def _end_of(self, rank: int) -> str:
        """Returns how a process ended; after a crash, with the Python stacks of its threads."""
        self._processes[rank].join(_GRACE_S)
        assert self._directory is not None
        log = _crash_log(self._directory.name, rank)
        stacks = log.read_text(errors="replace") if log.exists() else ""
        return f"died, exit code {self._processes[rank].exitcode}\n{stacks}".rstrip()

    def _start(self) -> None:
        context: SpawnContext | ForkServerContext
        if self.start_method == "spawn":
            context = multiprocessing.get_context("spawn")
        else:
            context = forking_context()
        self._directory = tempfile.TemporaryDirectory(prefix="ddpx-ranks-")
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    *(theirs, rank, self.world_size, self.backend, self._directory.name),
                    dict(os.environ),
                ),
                daemon=True,
                name=f"ddpx-rank-{rank}",
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
        self._collect("start of the ranks", _START_TIMEOUT_S)

    def _collect(self, what: str, timeout: float) -> list[Any]:
        """Returns one result from every rank."""
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        pending = {connection: rank for rank, connection in enumerate(self._connections)}
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    succeeded, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    succeeded, value = False, self._end_of(rank)
                (results if succeeded else failures)[rank] = value
                if not succeeded:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if not failures and not pending:
            return [results[rank] for rank in range(self.world_size)]
        for rank in pending.values():
            reason = "had not returned when another rank failed" if failures else "did not return"
            failures.setdefault(rank, f"{reason} ({what}, limit {timeout:g} s)")
        report = "\n".join(f"--- rank {rank}: {text}" for rank, text in sorted(failures.items()))
        ranks = "rank" if self.world_size == 1 else "ranks"
        raise RankFailed(f"{what} failed on {len(failures)} of {self.world_size} {ranks}\n{report}")

    def _end(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _crash_log(directory: str, rank: int) -> Path:
    return Path(directory, f"crash.{rank}")


def choose_gpu(rank: int, world_size: int) -> None:
    """Chooses the GPU of an NCCL rank. Several ranks share a GPU if there are fewer GPUs."""
    num_gpus = torch.cuda.device_count()
    if world_size > num_gpus:
        # NCCL refuses two ranks of one host on one GPU. With these settings each rank is a host.
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    torch.cuda.set_device(rank % num_gpus)


def _print_stacks_of_crashes(python_log: Path) -> None:
    """Makes a crash print the C++ stacks of all threads, and then the Python stack into the log.

    The handler that is installed last runs first. faulthandler's handler has a small stack of its
    own. If it ran first, torch's handler would run on that stack too, and overflow into the heap.
    """
    faulthandler.enable(os.open(python_log, os.O_CREAT | os.O_WRONLY))
    on_interrupt = signal.getsignal(signal.SIGINT)
    torch._C._set_print_stack_traces_on_fatal_signal(True)
    signal.signal(signal.SIGINT, on_interrupt)  # torch also replaces the handler of this signal


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    backend: str,
    directory: str,
    environment: dict[str, str],
) -> None:
    """The main function of a rank: runs the functions that it receives, until it receives None."""
    _print_stacks_of_crashes(_crash_log(directory, rank))
    os.environ.clear()
    os.environ.update(environment)  # the fork server has an older environment
    dist.set_debug_level_from_env()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if "nccl" in backend:
        choose_gpu(rank, world_size)
    dist.init_process_group(
        backend,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
    )
    connection.send((True, None))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        try:
            call = pickle.loads(message)
            if call is None:
                break
            function, args, kwargs = call
            connection.send((True, function(*args, **kwargs)))
        except BaseException:  # includes errors from pickling
            connection.send((False, traceback.format_exc()))
    dist.destroy_process_group()
