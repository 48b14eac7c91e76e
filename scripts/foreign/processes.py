"""Runs a command of a suite with one of the two classes, and ends all of its processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")
_ERROR = re.compile(
    r"^(?:\[\w+\]:\s*|E\s+)*([\w.]*(?:Error|Exception|Failure|Mismatch|Stalled)\b.*)"
)
# What launchers and pools report about an error of another process.
_SECOND_HAND = re.compile(r"ChildFailedError|ProcessRaisedException|ProcessExitedException")


def variables(contestant: str, log: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables of a run with ``contestant``, "torch" or "ddpx".

    Args:
        contestant: The class.
        log: The file to which processes append the classes that they construct.
        extra: Further variables.
    """
    kept = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    # Each process would compile all that it imports, and some tests are too late then.
    for name in ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE"):
        kept.pop(name, None)
    kept |= {"FOREIGN_CLASS": contestant, "FOREIGN_LOG": str(log), "OMP_NUM_THREADS": "1"}
    kept["PYTHONHASHSEED"] = "0"  # some suites name tests by the order of a set
    return kept | dict(extra or {})


def run(
    command: Sequence[str], env: Mapping[str, str], log: Path, folder: Path, limit_s: float
) -> int | None:
    """Runs a command with its output in a file. Returns the exit code, or None after the limit."""
    with log.open("a") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _kill_all(env)
            process.wait()


def _kill_all(env: Mapping[str, str]) -> None:
    """Ends the processes of a run, which have its log in their environment.

    Launchers put ranks into process groups of their own.
    """
    mark = f"FOREIGN_LOG={env['FOREIGN_LOG']}\0".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            if mark in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)


def error_in(text: str) -> str:
    """The last error that a traceback in ``text`` ends with. "" if there is none."""
    matches = [match[1] for match in map(_ERROR.match, text.splitlines()) if match]
    first_hand = [line for line in matches if not _SECOND_HAND.search(line)]
    return (first_hand or matches or [""])[-1].strip()


def num_built(log: Path, name: str) -> int:
    """How many wrappers of the class ``name`` a run began to construct."""
    return log.read_text().split().count(name) if log.exists() else 0
