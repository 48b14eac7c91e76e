"""Starts the ranks of one training on emulated hosts, and reads their events."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import host_training
import store_proxy
from emulated_hosts import EmulatedHosts, Host, enter
from host_training import PROXY_PORT, STORE_PORT, Training

from ddpx.testing.rank_pool import forking_context

_NAMES = ["node-a", "node-b", "node-c", "node-d"]
Event = dict[str, Any]


class RankedHosts:
    """Hosts on which the ranks of a training run. A context manager, which removes them.

    A rank is forked from a server that has already imported ddpx, and then moves into its host.

    Args:
        ranks_per_host: For each host, the number of ranks. Ranks of a host are consecutive.
    """

    def __init__(self, ranks_per_host: tuple[int, ...]) -> None:
        self.num_ranks = sum(ranks_per_host)
        self._host_of = [host for host, size in enumerate(ranks_per_host) for _ in range(size)]
        self._network = EmulatedHosts(_NAMES[: len(ranks_per_host)])
        self._processes: list[BaseProcess] = []
        self._open = contextlib.ExitStack()
        self._folder = Path()

    def __enter__(self) -> RankedHosts:
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddpx-hosts-"))
            self._folder = Path(folder)
            stack.callback(self._join)  # after the hosts were removed, which ends all ranks
            stack.enter_context(self._network)
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _join(self) -> None:
        for process in self._processes:
            process.join(20)

    def start(self, transport: str, settings: list[dict[str, Any]], store_delay_s: float) -> None:
        """Starts all ranks.

        Args:
            settings: For each rank, the settings beside those that follow from its place.
            store_delay_s: The delay of the store in each direction once ``make_store_slow`` was
                called. 0: ranks reach the store without a proxy.
        """
        first = self._network.hosts[0]
        slow = self._folder / "slow"
        if store_delay_s:
            proxy = (PROXY_PORT, STORE_PORT, slow, store_delay_s)
            self.start_beside(0, "proxy", store_proxy.serve, *proxy)
        for rank in range(self.num_ranks):
            training = Training(
                rank,
                self.num_ranks,
                transport,
                first.address,
                through_proxy=store_delay_s > 0,
                **settings[rank],
            )
            self.start_beside(rank, f"rank{rank}", host_training.run, training)

    def start_beside(self, rank: int, name: str, function: Callable[..., None], *args: Any) -> None:
        """Runs a function in a new process on the host of a rank, under a name of its own."""
        first_pid = self.host_of(rank).first_pid
        setting = (first_pid, list(sys.path), self._folder / name, function, args)
        process = forking_context().Process(target=_serve, args=setting, daemon=True)
        process.start()
        self._processes.append(process)

    def make_store_slow(self) -> None:
        (self._folder / "slow").touch()

    # ---- the ranks -------------------------------------------------------------------------------

    def host_of(self, rank: int) -> Host:
        return self._network.hosts[self._host_of[rank]]

    def ranks_beside(self, rank: int) -> set[int]:
        """The ranks on the host of this rank, including the rank."""
        return {other for other, host in enumerate(self._host_of) if host == self._host_of[rank]}

    def pid_of(self, rank: int) -> int:
        """The process ID of a rank that has printed an event, in this process's numbering."""
        return int((self._folder / f"rank{rank}.pid").read_text())

    def events(self, rank: int) -> list[Event]:
        with contextlib.suppress(FileNotFoundError):
            whole, _, _ = (self._folder / f"rank{rank}.out").read_text().rpartition("\n")
            return [json.loads(line) for line in whole.splitlines()]
        return []

    def output(self, rank: int) -> str:
        """What the rank has written to stderr."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"rank{rank}.err").read_text()
        return ""


def _serve(
    first_pid: int,
    path: list[str],
    name: Path,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Runs a function in a new process of a host. ``name`` is that of its files, with suffixes."""
    sys.path[:] = path
    enter(first_pid)
    if pid := os.fork():  # this process is on no host
        name.with_suffix(".pid").write_text(str(pid))
        os.waitpid(pid, 0)
        os._exit(0)
    for stream, suffix in [(1, ".out"), (2, ".err")]:
        file = os.open(name.with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, stream)
    os.environ.update(GLOO_SOCKET_IFNAME="eth0")
    try:
        function(*args)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    sys.stderr.flush()
    os._exit(1)
