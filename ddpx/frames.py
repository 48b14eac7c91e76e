"""Frames of Python stacks that are not the user's."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import FrameType

_CLI = Path(__file__).parent / "cli"
_LAUNCHER = {
    runpy.run_path.__code__.co_filename,
    *(str(_CLI / file) for file in ("rank.py", "script.py", "runner.py")),
    *(str(_CLI / command / "runner.py") for command in ("parity", "timeline")),
}


def is_launcher(frame: FrameType) -> bool:
    """Whether a frame belongs to the start of a script: to runpy, or to a rank of ``ddpx run``.

    Such frames are the outermost frames of the main thread. Tracebacks and stacks leave them out.
    """
    return frame.f_code.co_filename in _LAUNCHER
