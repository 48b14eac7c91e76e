"""Commands that ``make gpu`` starts."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment of a command, with these further variables."""
    path = [str(ROOT), str(ROOT / "scripts"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONUNBUFFERED": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # cuBLAS sums in a fixed order only with this workspace.
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        **(extra or {}),
    }


def kill_group(process: subprocess.Popen[str]) -> None:
    """Ends the process group of a command, also ranks that outlive the command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run(command: list[str], limit_s: float) -> tuple[int | None, str]:
    """Runs a command in a process group of its own, and ends the group afterwards.

    Returns:
        The exit code, or None if the time limit ended the command; and the output.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        code: int | None
        try:
            code = process.wait(max(limit_s, 1.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_group(process)
        output.seek(0)
        return code, output.read()
