"""``ddpx run``: runs a script that uses DDP with ReducerDDP."""

from __future__ import annotations

import click

from ddpx.cli.errors import mistakes
from ddpx.cli.torchrun import launch, torchrun_options
from ddpx.ddp.arguments.bucket_sizes import CAP_VARIABLE, cap_of_text


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN OPTIONS] [-m] SCRIPT [ARGS]..."
)
def command(words: tuple[str, ...]) -> int:
    """Runs a script that uses DistributedDataParallel, unchanged, with ReducerDDP in its place.

    Takes all options of torchrun. On one machine, the default is 2 ranks; --nproc-per-node changes
    the number. These ranks meet at a free port. Exits with 1 if a rank fails.

    With --keep-survivors, a failed rank does not end the other ranks, and these ranks can continue
    with ddpx.shrink(). The command then fails only if all ranks of the machine fail.

    --bucket-cap-mb replaces the bucket size of the script. -1 is no limit. With "auto", the first
    steps measure which buckets are fastest.

    \b
    Examples:
      ddpx run train.py --lr 0.1
      ddpx run --bucket-cap-mb auto train.py
      ddpx run --nproc-per-node 4 train.py
      ddpx run --keep-survivors --nproc-per-node 4 train.py
      ddpx run -m mypackage.train --epochs 3
      ddpx run --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 8 train.py
    """
    options, script = torchrun_options(words)
    environment = {}
    if options.bucket_cap_mb is not None:
        environment[CAP_VARIABLE] = options.bucket_cap_mb
        with mistakes():
            cap_of_text("--bucket-cap-mb", options.bucket_cap_mb)
    return launch(
        options,
        "ddpx.cli.runner",
        script.command(),
        environment,
        keep_survivors=options.keep_survivors,
    )
