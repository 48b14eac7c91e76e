"""Options of the commands that run a script on ranks of this machine."""

from __future__ import annotations

import click

from ddpx.cli.errors import UserMistake
from ddpx.cli.torchrun import DEFAULT_NUM_RANKS
from ddpx.ddp.arguments.options import cap_of_text

NUM_RANKS = click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    default=DEFAULT_NUM_RANKS,
    show_default=True,
    help="Number of ranks on this machine.",
)
IS_MODULE = click.option(
    "--module", "is_module", is_flag=True, help="SCRIPT is a module name, as for python -m."
)


def check_target(target: str) -> None:
    """Raises NoSuchOption if click took an unknown option for the script."""
    if target.startswith("-"):
        raise click.NoSuchOption(target)


def check_cap(text: str) -> None:
    """Raises UserMistake if ``text`` is neither a bucket size nor ``auto``."""
    try:
        cap_of_text("--bucket-cap-mb", text)
    except ValueError as cause:
        raise UserMistake(str(cause)) from cause
