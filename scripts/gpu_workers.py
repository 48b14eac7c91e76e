"""Test processes of ``make gpu``, which share one list of tests."""

from __future__ import annotations

import collections
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from gpu_command import ROOT, environment, kill_group

_GRACE_S = 30.0  # beyond a test's own time limit, until its process is killed
_MOST_LOSSES = 3  # number of processes in a row that may die before their first result
Result = dict[str, Any]
Report = Callable[[str, Result], None]

_PYTEST = [sys.executable, "-m", "pytest", "-p", "gpu_pytest", "-p", "no:cacheprovider", "-q"]
# A module whose requirements are not installed here must not stop the others.
_PYTEST += ["-m", "gpu", "--continue-on-collection-errors"]


def collect(limit_s: float = 120.0) -> tuple[list[str], list[str], dict[str, str]]:
    """The ids of the tests marked ``gpu``.

    Returns:
        All tests; the tests of the short selection; and the errors of files that pytest cannot
        import.

    Raises:
        RuntimeError: pytest fails as a whole, or takes longer than the limit.
    """
    with tempfile.TemporaryDirectory(prefix="ddpx-gpu-") as folder:
        begun = []
        for name, options in (("all", ["--full"]), ("short", [])):
            file, log = Path(folder, name), Path(folder, f"{name}.log")
            process = subprocess.Popen(
                [*_PYTEST, "--collect-only", *options],
                cwd=ROOT,
                env=environment({"GPU_PYTEST_IDS": str(file)}),
                stdout=log.open("w"),
                stderr=subprocess.STDOUT,
            )
            begun.append((file, log, process))
        found = []
        for file, log, process in begun:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            process.kill()
            process.wait()
            if not file.exists():
                raise RuntimeError(f"pytest found no tests:\n{log.read_text()[-4000:]}")
            found.append(json.loads(file.read_text()))
    # Other files need packages that a GPU machine may lack.
    errors = {
        file: text
        for file, text in found[0]["errors"].items()
        if any(mark in Path(ROOT, file).read_text() for mark in ("on_devices", "mark.gpu"))
    }
    return found[0]["tests"], found[1]["tests"], errors


class _Worker:
    """One test process: at most one test that runs, and the test after it."""

    def __init__(self, files: Iterable[str], extra: dict[str, str]) -> None:
        self.connection, theirs = Pipe()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*_PYTEST, *files],
            cwd=ROOT,
            env=environment({**extra, "GPU_PYTEST_FD": str(theirs.fileno())}),
            stdout=self.output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            text=True,
            start_new_session=True,
        )
        theirs.close()
        self.taken: list[str] = []  # without a result yet, in order
        self.running: str | None = None
        self.kill_time = float("inf")
        self.has_results = False
        self.is_finished = False  # knows that no test is left

    def end(self) -> None:
        """Ends the process and its ranks."""
        kill_group(self.process)
        self.connection.close()
        self.output.close()

    def output_end(self) -> str:
        self.output.seek(0)
        return self.output.read()[-1500:]


class Workers:
    """Runs tests in several processes at once, in the order of a list.

    A test that ends its process, or hangs beyond its time limit, fails. Another process goes on
    with the other tests.

    Args:
        tests: The ids of the tests.
        number: The number of processes.
        report: Called with the id and the result of each test that has ended.
        extra: Further environment variables.
    """

    def __init__(
        self, tests: Iterable[str], number: int, report: Report, extra: dict[str, str]
    ) -> None:
        self._waiting = collections.deque(tests)
        self._files = sorted({test.partition("::")[0] for test in self._waiting})
        self._report, self._extra = report, extra
        self._number = min(number, len(self._waiting))
        self._workers: list[_Worker] = []
        self._losses = 0

    def run(self, limit_s: float) -> str:
        """Runs the tests until the time limit, in s.

        Tests that run at the limit have no result. Returns an error if no process can run tests,
        otherwise "".
        """
        deadline = time.monotonic() + limit_s
        try:
            self._workers = [_Worker(self._files, self._extra) for _ in range(self._number)]
            error = ""
            while self._workers and time.monotonic() < deadline and not error:
                connections: dict[Any, _Worker] = {w.connection: w for w in self._workers}
                for connection in wait(list(connections), 1.0):
                    error = error or self._read(connections[connection])
                for worker in list(self._workers):
                    error = error or self._watch(worker)
            return error
        finally:
            for worker in self._workers:
                worker.end()

    def _read(self, worker: _Worker) -> str:
        try:
            kind, *values = worker.connection.recv()
            if kind == "take":
                test = self._waiting.popleft() if self._waiting else None
                if test is not None:
                    worker.taken.append(test)
                elif worker.running is None:
                    worker.kill_time = time.monotonic() + _GRACE_S
                worker.is_finished = test is None
                worker.connection.send(test)
            elif kind == "started":
                worker.running = values[0]
                limit_s = values[1] or float("inf")
                worker.kill_time = time.monotonic() + limit_s + _GRACE_S
            else:
                self._ended(worker, *values)
        except (EOFError, OSError):
            return self._lost(worker, "")
        return ""

    def _ended(self, worker: _Worker, test: str, result: Result) -> None:
        worker.taken.remove(test)
        if test == worker.running:
            worker.running, worker.kill_time = None, float("inf")
            if worker.is_finished:
                worker.kill_time = time.monotonic() + _GRACE_S
        worker.has_results, self._losses = True, 0
        self._report(test, result)

    def _watch(self, worker: _Worker) -> str:
        if worker.process.poll() is not None and not worker.connection.poll():
            return self._lost(worker, "")
        if time.monotonic() > worker.kill_time:
            return self._lost(worker, "hung beyond its time limit")
        return ""

    def _lost(self, worker: _Worker, reason: str) -> str:
        """The process has ended, or hangs. Another process takes over its tests."""
        self._workers.remove(worker)
        if not reason:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(_GRACE_S)
            reason = f"the test process ended ({_ending(worker.process.returncode)})"
        text = f"{reason}\n{worker.output_end()}"
        worker.end()
        left = worker.taken
        if worker.running is not None:
            left = [test for test in left if test != worker.running]
            result = {"outcome": "failed", "seconds": 0.0, "text": text}
            self._report(worker.running, result)
        elif not worker.has_results and not worker.is_finished:
            self._losses += 1
        self._waiting.extendleft(reversed(left))
        if self._losses >= _MOST_LOSSES:
            return text
        if self._waiting:
            self._workers.append(_Worker(self._files, self._extra))
        return ""


def _ending(code: int | None) -> str:
    if code is None:
        return "it closed its connection"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
