"""Options of the commands that run a script on ranks of this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ddpx.cli.torchrun import DEFAULT_NUM_RANKS

IS_MODULE = click.option(
    "--module", "is_module", is_flag=True, help="SCRIPT is a module name, as for python -m."
)


def num_ranks(least: int = 1) -> Callable[[Any], Any]:
    """The option for a number of ranks, ``least`` or more."""
    return click.option(
        "--nproc-per-node",
        type=click.IntRange(min=least),
        default=DEFAULT_NUM_RANKS,
        show_default=True,
        help="Number of ranks on this machine.",
    )


def check_target(target: str) -> None:
    """Raises NoSuchOption if click took an unknown option for the script."""
    if target.startswith("-"):
        raise click.NoSuchOption(target)
