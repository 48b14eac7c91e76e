"""The group of all commands. Prints mistakes of users."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from ddpx.cli import info, run
from ddpx.cli.buckets import command as buckets
from ddpx.cli.errors import UserMistake
from ddpx.cli.parity import command as parity
from ddpx.cli.plan import command as plan
from ddpx.cli.timeline import command as timeline
from ddpx.version import __version__

INTERRUPTED = 130  # 128 + SIGINT, as of a shell


@click.group()
@click.version_option(__version__, prog_name="ddpx")
def ddpx() -> None:
    """Runs and inspects data-parallel training with ddpx.

    \b
    Examples:
      ddpx run --nproc-per-node 4 train.py --lr 0.1
      ddpx parity train.py
      ddpx timeline train.py --steps 20 --out timeline
      ddpx buckets mymodels:build --bucket-cap-mb 25 --bucket-cap-mb 5
      ddpx plan train.py --out plan.json
      ddpx info
    """


for module in (run, parity, timeline, buckets, plan, info):
    ddpx.add_command(module.command)


def run_command_line(arguments: Sequence[str]) -> int:
    """Runs a command and returns the exit code. A mistake of the user is printed in one line."""
    try:
        return ddpx.main(arguments, prog_name="ddpx", standalone_mode=False) or 0
    except getattr(click.exceptions, "NoArgsIsHelpError", ()) as wanted:  # new in click 8.2
        print(wanted.format_message())
        return 2
    except UserMistake as mistake:
        return _print_mistake(str(mistake), 2)
    except click.UsageError as mistake:
        command = mistake.ctx.command_path if mistake.ctx else "ddpx"
        return _print_mistake(f"{mistake.format_message()} ({command} --help has examples.)", 2)
    except click.ClickException as mistake:
        return _print_mistake(mistake.format_message(), mistake.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _print_mistake("interrupted", INTERRUPTED)


def _print_mistake(text: str, exit_code: int) -> int:
    print(f"ddpx: {text}", file=sys.stderr)
    return exit_code
