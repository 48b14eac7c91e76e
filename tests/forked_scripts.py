"""Runs Python programs in forks of a process that has imported ddpx.

A plain process would need seconds for the import. A fork runs the script as its main program:
uncaught exceptions, the end of the interpreter and the exit code are those of a plain process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_POLL_S = 0.02


class Job:
    """The ranks of one job, which a ``ForkServer`` has started. Each writes into its own files."""

    def __init__(self, folder: Path, num_ranks: int) -> None:
        self._folder = folder
        self.ranks = range(num_ranks)

    def stdout(self, rank: int) -> str:
        """What the rank has written so far."""
        return self._read(rank, "stdout")

    def stderr(self, rank: int) -> str:
        """What the rank has written so far."""
        return self._read(rank, "stderr")

    def exit_code(self, rank: int) -> int | None:
        """None while the rank runs. Negative after a signal."""
        text = self._read(rank, "exit_code")
        return int(text) if text else None

    def exit_codes(self) -> list[int | None]:
        return [self.exit_code(rank) for rank in self.ranks]

    def send_signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # the rank has ended
            os.kill(int(self._read(rank, "pid")), number)

    def wait(self, *ranks: int, limit_s: float) -> None:
        """Waits until these ranks have ended, or all ranks. Then kills those that still run."""
        deadline = time.monotonic() + limit_s
        awaited = ranks or self.ranks
        while any(self.exit_code(rank) is None for rank in awaited):
            if time.monotonic() > deadline:
                self._kill()
                raise AssertionError([self.stderr(rank) for rank in self.ranks])
            time.sleep(_POLL_S)

    def wait_for(self, text: str, rank: int, limit_s: float) -> None:
        """Waits until the rank has written the text."""
        deadline = time.monotonic() + limit_s
        while text not in self.stderr(rank):
            assert time.monotonic() < deadline, self.stderr(rank)
            time.sleep(_POLL_S)

    def _kill(self) -> None:
        for rank in self.ranks:
            if self._read(rank, "pid") and self.exit_code(rank) is None:
                self.send_signal(rank, signal.SIGKILL)

    def _read(self, rank: int, what: str) -> str:
        path = self._folder / f"rank{rank}.{what}"
        return path.read_text() if path.exists() else ""


class ForkServer:
    """A process that has imported ddpx, and its forks. A context manager."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, env=environment, text=True
        )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def start(
        self,
        folder: Path,
        words: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        cwd: Path | None = None,
    ) -> Job:
        """Starts a script as the ranks of a job.

        Args:
            folder: An empty folder for the output of the ranks.
            words: What follows ``python`` on a command line: a script, ``-m MODULE`` or
                ``-c CODE``, and its arguments.
            environments: The variables of each rank.
            cwd: The working directory. Default: that of this process when the server started.
        """
        assert self._process.stdin is not None
        request = {
            "folder": str(folder),
            "words": list(words),
            "environments": environments,
            "cwd": str(cwd or "."),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Job(folder, len(environments))


@functools.cache
def _shared_server() -> ForkServer:
    """The server of this process, which ends with it."""
    server = ForkServer(os.environ)
    atexit.register(server.__exit__)
    return server


def run_python(
    *words: str, cwd: Path, env: Mapping[str, str], limit_s: float
) -> subprocess.CompletedProcess[str]:
    """Like ``subprocess.run(["python", *words])``, in a fork.

    Raises:
        AssertionError: The program still runs after ``limit_s`` seconds. It is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        job = _shared_server().start(Path(folder), words, [env], cwd)
        job.wait(limit_s=limit_s)
        code = job.exit_code(0)
        assert code is not None
        return subprocess.CompletedProcess(words, code, job.stdout(0), job.stderr(0))


# ---- in the server -------------------------------------------------------------------------------


def _next_rank() -> dict[str, Any]:
    """Serves requests. Returns in each fork that is to become a rank, with its part of the job."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks that watch a job
    for line in sys.stdin:
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _start_ranks(json.loads(line))
    os._exit(0)


def _start_ranks(request: dict[str, Any]) -> dict[str, Any]:
    """Returns in the forks. This process watches the forks, and ends when all have ended."""
    pids = []
    for rank, variables in enumerate(request["environments"]):
        prefix = f"{request['folder']}/rank{rank}"
        pid = os.fork()
        if pid == 0:
            return {**request, "prefix": prefix, "variables": variables}
        _write(f"{prefix}.pid", pid)
        pids.append((pid, prefix))
    _watch(pids)
    os._exit(0)


def _watch(ranks: list[tuple[int, str]]) -> None:
    """Writes the exit codes. Reaps no rank, so that other ranks can read how the rank ended."""
    poll = select.poll()
    running = {os.pidfd_open(pid): prefix for pid, prefix in ranks}
    for descriptor in running:
        poll.register(descriptor, select.POLLIN)
    while running:
        for descriptor, _ in poll.poll():
            end = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOWAIT)
            assert end is not None
            exited = end.si_code == os.CLD_EXITED
            _write(
                f"{running.pop(descriptor)}.exit_code", end.si_status if exited else -end.si_status
            )
            poll.unregister(descriptor)


def _write(path: str, number: int) -> None:
    """Writes a number at once, as readers do not wait for the end of a write."""
    Path(f"{path}.new").write_text(str(number))
    Path(f"{path}.new").rename(path)


def _become(rank: dict[str, Any]) -> None:
    paths = (os.devnull, f"{rank['prefix']}.stdout", f"{rank['prefix']}.stderr")
    for descriptor, path in enumerate(paths):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(rank["variables"])
    os.chdir(rank["cwd"])
    sys.argv = rank["words"]
    is_file = sys.argv[0] not in ("-m", "-c")
    first = os.path.dirname(os.path.abspath(sys.argv[0])) if is_file else os.getcwd()
    of_server = sys.path[1:]
    of_program = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    new = [folder for folder in of_program if folder not in of_server]
    sys.path[:] = [first, *new, *of_server]


if __name__ == "__main__":
    # The first wrapper would import the first module, and launchers the second one.
    import torch._dynamo
    import torch.distributed.run  # noqa: F401

    import ddpx.cli.group  # noqa: F401

    gc.freeze()  # the end of a fork need not look through these objects, which takes a second
    _become(_next_rank())
    # Outside of any function, so that an uncaught exception ends the interpreter.
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        main = types.ModuleType("__main__")
        if sys.argv[0] == "-c":
            file, code = "<string>", sys.argv.pop(1)
        else:
            file = main.__file__ = sys.argv[0]  # multiprocessing imports it in new processes
            code = Path(file).read_text()
        sys.modules["__main__"] = main
        exec(compile(code, file, "exec"), main.__dict__)
