"""A user's script, or module: found before ranks start, run in them as Python would run it."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpx.cli import errors


@dataclass(frozen=True)
class Script:
    """Attributes:
    target: a file, or a module's name.
    is_module: as with ``python -m``.
    arguments: its own.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]

    def check(self) -> None:
        """Raises UserMistake if there is no such script or module."""
        if not self.is_module:
            if not Path(self.target).is_file():
                raise _no_such_script(self.target)
            return
        path = list(sys.path)
        sys.path.insert(0, os.getcwd())  # where ``python -m`` looks first
        try:
            found = importlib.util.find_spec(self.target) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path[:] = path
        if not found:
            raise errors.no_such_module(self.target)

    def command(self) -> list[str]:
        """What ``from_command`` reads."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @classmethod
    def from_command(cls, words: Sequence[str]) -> Script:
        if words[0] == "-m":
            return cls(words[1], True, tuple(words[2:]))
        return cls(words[0], False, tuple(words[1:]))

    def run(self) -> None:
        """As ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``. To be called in a process
        that was started by ``python -m`` and has no other purpose."""
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        if not getattr(sys.flags, "safe_path", False):  # then there is no folder to replace
            sys.path[0] = os.path.dirname(os.path.realpath(self.target))
        runpy.run_path(self.target, run_name="__main__")


# ---- errors --------------------------------------------------------------------------------------


def _no_such_script(path: str) -> errors.UserMistake:
    return errors.UserMistake(f"there is no script {path!r}. Pass the path of a Python file.")
