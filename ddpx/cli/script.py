"""A user's script or module. The command checks it, and ranks run it as Python would."""

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
    """A script and its arguments.

    Attributes:
        target: A file, or the name of a module.
        is_module: Whether ``target`` is a module, as with ``python -m``.
        arguments: The arguments of the script.
    """

    target: str
    is_module: bool
    arguments: tuple[str, ...]

    def check(self) -> None:
        """Raises UserMistake if the script or module does not exist."""
        if not self.is_module:
            if not Path(self.target).is_file():
                raise errors.UserMistake(
                    f"there is no script {self.target!r}. Pass the path of a Python file."
                )
            return
        path = list(sys.path)
        sys.path.insert(0, os.getcwd())  # ``python -m`` searches there first
        try:
            found = importlib.util.find_spec(self.target) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path[:] = path
        if not found:
            raise errors.no_such_module(self.target)

    def command(self) -> list[str]:
        """Returns the words from which :meth:`from_command` makes this script."""
        return [*(["-m"] if self.is_module else []), self.target, *self.arguments]

    @classmethod
    def from_command(cls, words: Sequence[str]) -> Script:
        """Reverses :meth:`command`."""
        if words[0] == "-m":
            return cls(words[1], True, tuple(words[2:]))
        return cls(words[0], False, tuple(words[1:]))

    def run(self) -> None:
        """Runs the script as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``.

        ``sys.path[0]`` must be the working folder, as for ``python -m``. The process is used for
        nothing else.
        """
        sys.argv = [self.target, *self.arguments]
        if self.is_module:
            runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            return
        if not getattr(sys.flags, "safe_path", False):  # else sys.path has no folder of the script
            sys.path[0] = os.path.dirname(os.path.realpath(self.target))
        runpy.run_path(self.target, run_name="__main__")
