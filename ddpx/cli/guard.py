"""What ``ddpx run --keep-survivors`` starts in a rank's place: ``python guard.py words of python``.

Launchers end all ranks as soon as one has failed. They see guards only: each starts the rank as
its child and, when that has ended, stays until all ranks of this machine have. It is run as a
file and needs nothing but the standard library, so that it costs little.
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

FOLDER = "DDPX_GUARD_FOLDER"  # where guards of this machine leave how their ranks ended

_PR_SET_PDEATHSIG = 1
_BETWEEN_LOOKS_S = 0.1
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main() -> None:
    end_with(os.getppid())
    guard = Guard([sys.executable, *sys.argv[1:]], os.environ)
    sys.exit(guard.run())


def end_with(parent: int) -> None:
    """The kernel kills this process when ``parent`` ends, however that comes about."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it has ended already


class Guard:
    """Of one rank.

    Args:
        command: what the rank runs.
        environment: as torchrun makes it.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._rank = environment["RANK"]
        self._local_rank = environment["LOCAL_RANK"]
        self._num_local = int(environment["LOCAL_WORLD_SIZE"])
        # Ranks that torchrun starts anew are others.
        attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._folder = Path(environment[FOLDER], attempt)
        self._process: subprocess.Popen[bytes] | None = None
        self._signal: int | None = None

    def run(self) -> int:
        """Returns the exit code that stands for all ranks of this machine: 0 if any came to a good
        end, else this one's own."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        parent = os.getpid()
        # In a session of its own: who ends a guard's whole group leaves it to the guard to pass on.
        self._process = subprocess.Popen(
            self._command, start_new_session=True, preexec_fn=lambda: end_with(parent)
        )
        if self._signal is not None:  # came before there was a process
            self._process.send_signal(self._signal)
        code = self._process.wait()
        own = code if code >= 0 else 128 - code
        if self._signal is not None:
            return own
        self._leave(own)
        codes = self._codes()
        if own != 0:
            others = "; the other ranks continue" if len(codes) < self._num_local else ""
            sys.stderr.write(f"ddpx: rank {self._rank} {_ending(code)}{others}\n")  # in one piece
        while len(codes) < self._num_local and self._signal is None:
            time.sleep(_BETWEEN_LOOKS_S)
            codes = self._codes()
        return 0 if 0 in codes.values() else own

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._process is not None:
            self._process.send_signal(number)  # nothing happens if it has ended

    def _leave(self, code: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / f".{self._local_rank}"
        unfinished.write_text(str(code))
        unfinished.rename(self._folder / self._local_rank)

    def _codes(self) -> dict[str, int]:
        """By local rank, of those that have ended."""
        files = [path for path in self._folder.iterdir() if not path.name.startswith(".")]
        return {path.name: int(path.read_text()) for path in files}


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    named = {known.value: known.name for known in signal.Signals}
    return f"was killed by {named.get(-code, f'signal {-code}')}"


if __name__ == "__main__":
    main()
