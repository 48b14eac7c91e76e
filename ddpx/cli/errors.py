"""Mistakes in the use of a command, and the errors that several commands raise."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpx.timeline.export import trace_file


class UserMistake(Exception):
    """A command was used wrongly. The command line prints one line, and exits with 2."""


def needs_tools(package: str) -> str:
    return f"this command needs {package}, which is not installed. Run: pip install {package}"


def check_tool(package: str) -> None:
    """Raises UserMistake if a package that some commands need is not installed."""
    try:
        importlib.import_module(package)
    except ImportError as cause:
        raise UserMistake(needs_tools(package)) from cause


@contextmanager
def mistakes(kind: type[Exception] = ValueError) -> Iterator[None]:
    """Makes a UserMistake of each error of this kind in the block."""
    try:
        yield
    except kind as cause:
        raise UserMistake(str(cause)) from cause


def check_folder(folder: Path) -> None:
    """Raises UserMistake if files cannot be written into a folder, which need not exist."""
    with mistakes():
        trace_file.check_folder(folder)


def check_file(path: Path) -> None:
    """Raises UserMistake if a file cannot be written. Its folder need not exist."""
    if not path.name:
        raise UserMistake("an empty text is no path of a file. Pass the path of a file.")
    check_folder(path.parent)
    if path.exists() and not os.access(path, os.W_OK):
        raise UserMistake(f"cannot write the file '{path}': permission denied. Pass another path.")


def no_such_module(name: str) -> UserMistake:
    return UserMistake(
        f"there is no module {name!r} that can be imported from here. "
        "Pass the full name of the module, as for python -m."
    )


def nothing_wrapped(script: str) -> UserMistake:
    return UserMistake(
        f"{script} wrapped no model in DistributedDataParallel. ddpx does not reach processes that "
        "the script starts by itself, e.g. with mp.spawn. Use ReducerDDP in such processes."
    )


def nothing_recorded(script: str) -> UserMistake:
    return UserMistake(
        f"{script} left no recording. A recording needs a model that a rank wraps in "
        "DistributedDataParallel, and is written when Python ends: a rank that calls os._exit() "
        "writes none. ddpx does not reach processes that the script starts by itself, e.g. with "
        "mp.spawn."
    )
