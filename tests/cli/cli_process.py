"""Runs ``python -m ddpx`` as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from forked_scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).parent / "scripts"
_TIME_LIMIT_S = 170.0
_OF_LAUNCHERS = re.compile(r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*")


def environment(*first_on_path: Path) -> dict[str, str]:
    """An environment without the variables of a launcher, with ddpx on the path."""
    kept = {name: value for name, value in os.environ.items() if not _OF_LAUNCHERS.fullmatch(name)}
    folders = [*first_on_path, ROOT, *filter(None, kept.get("PYTHONPATH", "").split(os.pathsep))]
    kept["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in folders)
    kept["OMP_NUM_THREADS"] = "1"
    return kept


def run(
    *words: object,
    cwd: Path | None = None,
    start: tuple[str, ...] = ("-m", "ddpx"),
    limit_s: float = _TIME_LIMIT_S,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. The default folder is that of the scripts."""
    return run_python(
        *start,
        *(str(word) for word in words),
        cwd=cwd or SCRIPTS,
        env=environment(),
        limit_s=limit_s,
    )


def start(*words: object) -> subprocess.Popen[str]:
    """Starts a command in a session of its own, which a signal reaches as from a terminal.

    The caller ends the command.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "ddpx", *(str(word) for word in words)],
        cwd=SCRIPTS,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_code(done: subprocess.CompletedProcess[str], code: int) -> None:
    """Checks the exit code. Mistakes of the user, and verdicts, must not show as tracebacks."""
    text = f"exit code {done.returncode}; it printed:\n{done.stdout}\n{done.stderr}"
    assert done.returncode == code, text
    assert "Traceback" not in done.stderr, text
