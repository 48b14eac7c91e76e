"""Frames of Python stacks that are not the user's."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import FrameType

import torch

_CLI = Path(__file__).parent / "cli"
_LAUNCHER = {
    runpy.run_path.__code__.co_filename,
    *(str(_CLI / file) for file in ("rank.py", "script.py", "runner.py")),
    *(str(_CLI / command / "runner.py") for command in ("parity", "plan", "timeline")),
}


_LIBRARIES = tuple(f"{Path(file).parent}/" for file in (__file__, torch.__file__))
_NUM_FRAMES = 3


def innermost_frames(stacks: str) -> str:
    """Returns the three innermost frames of the script, from the stacks of all threads.

    Args:
        stacks: The stacks in the format of ``ddpx.peer_stack``, the main thread first.
    """
    _, *frames = stacks.split("\nthread ", 1)[0].split('\n  File "')
    of_script = [frame for frame in frames if not frame.startswith(_LIBRARIES)] or frames
    return "".join(f'\n  File "{frame}' for frame in of_script[-_NUM_FRAMES:])


def is_launcher(frame: FrameType) -> bool:
    """Whether a frame belongs to the start of a script: to runpy, or to a rank of ``ddpx run``.

    Such frames are the outermost frames of the main thread. Tracebacks and stacks leave them out.
    """
    return frame.f_code.co_filename in _LAUNCHER
