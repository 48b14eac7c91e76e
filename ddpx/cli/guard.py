"""The process that ``ddpx run --keep-survivors`` starts for each rank: ``python guard.py ...``.

A launcher ends all ranks when one rank fails. Here the launcher starts guards instead. A guard
starts the rank as its child, and ends when all ranks of this machine have ended. This file runs as
a script and imports only the standard library, so that a guard starts fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

# torch's watchdog otherwise ends a survivor about a minute after an error of NCCL, and the end of a
# process group takes a minute.
NCCL_SURVIVAL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
FOLDER = "DDPX_GUARD_FOLDER"  # guards of this machine write exit codes there

_PR_SET_PDEATHSIG = 1
_POLL_INTERVAL_S = 0.1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    end_with(os.getppid())
    guard = Guard([sys.executable, *sys.argv[1:]], os.environ)
    sys.exit(guard.run())


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when ``parent`` ends, for whatever reason."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # the parent has ended already


class Guard:
    """The guard of one rank.

    Args:
        command: The command of the rank.
        environment: The environment from torchrun.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._rank = environment["RANK"]
        self._local_rank = environment["LOCAL_RANK"]
        self._num_local = int(environment["LOCAL_WORLD_SIZE"])
        # Each restart by torchrun has its own exit codes.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._folder = Path(environment[FOLDER], attempt)
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def run(self) -> int:
        """Runs the rank, and waits for all ranks of this machine.

        Returns:
            0 if any rank of this machine succeeded. Otherwise the exit code of this rank.
        """
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        parent = os.getpid()
        # The rank has its own session. Signals to the process group of the guard do not reach it,
        # and the guard forwards them.
        self._process = subprocess.Popen(
            self._command, start_new_session=True, preexec_fn=lambda: end_with(parent)
        )
        if self._signal is not None:  # arrived before the process existed
            self._process.send_signal(self._signal)
        code = self._process.wait()
        own = code if code >= 0 else 128 - code
        if self._signal is not None:
            return own
        self._leave(own)
        codes = self._codes()
        if own != 0:
            others = "; the other ranks continue" if len(codes) < self._num_local else ""
            sys.stderr.write(
                f"ddpx: rank {self._rank} {_ending(code)}{others}\n"
            )  # one write, because ranks share stderr
        while len(codes) < self._num_local and self._signal is None:
            time.sleep(_POLL_INTERVAL_S)
            codes = self._codes()
        return 0 if 0 in codes.values() else own

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)  # no effect on an ended process

    def _leave(self, code: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{self._local_rank}"
        unfinished.write_text(str(code))
        unfinished.rename(self._folder / self._local_rank)

    def _codes(self) -> dict[str, int]:
        """The exit codes of ended ranks, by local rank."""
        files = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        return {path.name: int(path.read_text()) for path in files}


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    named = {known.value: known.name for known in signal.Signals}
    return f"was killed by {named.get(-code, f'signal {-code}')}"


if __name__ == "__main__":
    main()
