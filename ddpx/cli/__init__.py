"""The command line ``ddpx``."""

from __future__ import annotations

import sys
from typing import NoReturn

from ddpx.cli import errors


def main() -> NoReturn:
    """Runs the command that ``sys.argv`` names.

    Exit codes: 0, success; 1, a negative verdict, or the script failed; 2, wrong usage.
    """
    try:
        import click  # noqa: F401
    except ImportError:
        print(f"ddpx: {errors.needs_tools('click')}", file=sys.stderr)
        sys.exit(2)
    from ddpx.cli.group import run_command_line

    sys.exit(run_command_line(sys.argv[1:]))
