"""Runs one test: forks a process for each rank, and makes sure that all of them end.

The parent has imported everything but has used nothing of it (no autograd, no process group), so
that forks start fast and in a valid state.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import unittest
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import contestants
import torch
import torch.distributed as dist
import torch_tests
from outcomes import Outcome

# How long ranks may still run after one has failed, since they may wait for that rank.
GRACE_S = 3.0


@dataclass
class _Report:
    rank: int
    status: str
    reason: str = ""
    details: str = ""
    built: Counter[str] = field(default_factory=Counter)


def _rank_main(
    module: ModuleType, name: str, contestant: str, rank: int, world_size: int, connection: Any
) -> None:
    """Body of a rank's process, with the work of torch's launcher."""
    os.setsid()  # processes that the test starts die with the rank
    temp = Path(os.environ["TEMP_DIR"])
    log = os.open(temp / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    tempfile.tempdir = str(temp)  # some tests write files of fixed names there
    # In some tests rank 0 removes a file that others may be about to read. All are removed with
    # `temp`.
    os.remove = lambda *_args, **_kwargs: None
    # Tests that load their own objects by torch.load are older than its default of weights_only.
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.set_num_threads(1)
    report = _Report(rank, "pass")
    try:
        contestants.install(contestant, module)
        _run_test(module, name, rank, world_size)
    except unittest.SkipTest as skip:
        report.status, report.reason = "skip", str(skip)
    except SystemExit as leave:
        report.status, report.reason = "skip", _skip_reason(leave.code)
    except BaseException as error:
        report.status, report.reason = "fail", _short(error)
        report.details = traceback.format_exc()
    report.built = contestants.built
    if contestant == "ddpx" and report.built["torch"]:
        report.status, report.reason = "fail", "harness: torch's class was constructed"
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(report)
    connection.close()
    # Skips the interpreter's shutdown, since threads of a failed group may never end.
    os._exit(0)


def _run_test(module: ModuleType, name: str, rank: int, world_size: int) -> None:
    from torch.testing._internal import common_utils

    os.environ.update(WORLD_SIZE=str(world_size), RANK=str(rank))
    case = torch_tests.test_case(module)(name)
    method = getattr(case, name)
    if getattr(method, "__unittest_skip__", False):
        raise unittest.SkipTest(method.__unittest_skip_why__)
    case.rank = rank
    init_file = Path(os.environ["TEMP_DIR"]) / "group"
    case.file_name = str(init_file)
    seconds = module.CUSTOM_PG_TIMEOUT.get(name, module.default_pg_timeout)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{init_file}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    case._barrier()
    common_utils.set_rng_seed()
    method()
    case._barrier()
    if dist.is_initialized():
        dist.destroy_process_group()


def _skip_reason(code: Any) -> str:
    """The skip reason of an exit code. torch's decorators skip by these exit codes."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == code:
            return skip.message
    raise RuntimeError(f"the test left the process with {code!r}")


def _short(error: BaseException) -> str:
    """The type and first line of an error's text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


class RunningTest:
    """One running test.

    Poll :attr:`connections`; :meth:`advance` returns the outcome at the end.
    """

    def __init__(
        self, module: ModuleType, name: str, contestant: str, world_size: int, limit_s: float
    ) -> None:
        self.name = name
        self.contestant = contestant
        self._start = time.monotonic()
        self._deadline = self._start + limit_s
        self._limit_s = limit_s
        self._reports: list[_Report] = []
        self._temp = tempfile.TemporaryDirectory(prefix="peer-", ignore_cleanup_errors=True)
        # The directories that torch's tests expect.
        for folder in ("barrier", "test_dir", "init_dir"):
            (Path(self._temp.name) / folder).mkdir()
        os.environ["TEMP_DIR"] = self._temp.name
        context = multiprocessing.get_context("fork")
        self._processes = []
        self.connections: list[Connection] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(module, name, contestant, rank, world_size, theirs)
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self.connections.append(ours)

    def advance(self) -> Outcome | None:
        """Takes the reports of ranks. Returns the outcome once it is known."""
        for connection in wait(self.connections, timeout=0):
            assert isinstance(connection, Connection)
            self._take(connection)
        if self.connections and time.monotonic() < self._deadline:
            return None
        outcome = self._outcome()
        self._end()
        outcome.seconds = round(time.monotonic() - self._start, 1)
        return outcome

    def _take(self, connection: Connection) -> None:
        self.connections.remove(connection)
        try:
            report = connection.recv()
        except EOFError:
            report = _Report(-1, "crash", "a rank died")
        connection.close()
        self._reports.append(report)
        if report.status in ("fail", "crash"):
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _outcome(self) -> Outcome:
        bad = [r for r in self._reports if r.status in ("fail", "crash")]
        skipped = [r for r in self._reports if r.status == "skip"]
        built = max((r.built[self.contestant] for r in self._reports), default=0)
        if bad:
            # The errors of other ranks are mostly about the loss of this rank.
            first = bad[0]
            outcome = Outcome(first.status, first.reason, built)
            outcome.details = "\n".join(f"rank {r.rank}: {r.details}" for r in bad)
        elif self.connections:
            outcome = Outcome("timeout", f"over {self._limit_s:.0f} s", built)
        elif skipped:
            outcome = Outcome("skip", skipped[0].reason, built)
        else:
            outcome = Outcome("pass", "", built)
        if outcome.status not in ("pass", "skip"):
            for log in sorted(Path(self._temp.name).glob("rank*.log")):
                outcome.details += (
                    f"\n--- {log.stem} printed:\n{log.read_text(errors='replace')[-4000:]}"
                )
        return outcome

    def _end(self) -> None:
        for process in self._processes:
            assert process.pid is not None
            # Also ends processes that a rank started. There is no process group before setsid().
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        for connection in self.connections:
            connection.close()
        self.connections = []
        self._temp.cleanup()


def run_all(
    module: ModuleType, work: list[tuple[str, str, int]], jobs: int, limit_s: float, on_outcome: Any
) -> None:
    """Runs ``work`` (test, class, world size), ``jobs`` tests at a time."""
    pending = list(reversed(work))
    running: list[RunningTest] = []
    try:
        while pending or running:
            while pending and len(running) < jobs:
                name, contestant, world_size = pending.pop()
                running.append(RunningTest(module, name, contestant, world_size, limit_s))
            wait([c for test in running for c in test.connections], timeout=0.2)
            for test in list(running):
                outcome = test.advance()
                if outcome is not None:
                    running.remove(test)
                    on_outcome(test.name, test.contestant, outcome)
    finally:
        for test in running:
            test._end()
