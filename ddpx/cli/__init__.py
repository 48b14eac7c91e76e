"""The command line ``ddpx``."""

from __future__ import annotations

import io
import os
import sys
from typing import NoReturn

from ddpx.cli import errors


def main() -> NoReturn:
    """Runs the command that ``sys.argv`` names.

    Exit codes: 0, success; 1, a negative verdict, or the script failed; 2, wrong usage; 130, an
    interrupt (SIGINT).
    """
    try:
        import click  # noqa: F401
    except ImportError:
        print(f"ddpx: {errors.needs_tools('click')}", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # names and units may not be in its encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    from ddpx.cli.group import INTERRUPTED, run_command_line

    code = run_command_line(sys.argv[1:])
    if code == INTERRUPTED:
        # The traceback of the interrupt may keep torch's store, whose thread still runs. The end of
        # the interpreter would then abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
