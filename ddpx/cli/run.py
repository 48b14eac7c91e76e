"""``ddpx run``: a script that uses DDP, with ReducerDDP in its place."""

from __future__ import annotations

import click

from ddpx.cli.launch import launch, torchrun_options


@click.command(
    "run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument(
    "words", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN OPTIONS] [-m] SCRIPT [ARGS]..."
)
def command(words: tuple[str, ...]) -> int:
    """Runs a script that uses DistributedDataParallel, unchanged, with ReducerDDP in its place.

    Takes all options of torchrun's. On one machine it starts 2 ranks, if --nproc-per-node does
    not say otherwise, which meet at a free port. Exits with 1 if a rank failed.

    With --keep-survivors ranks are not ended when another one fails, so that they can go on by
    ddpx.shrink(); it is a failure only if no rank of the machine comes to a good end.

    \b
    Examples:
      ddpx run train.py --lr 0.1
      ddpx run --nproc-per-node 4 train.py
      ddpx run --keep-survivors --nproc-per-node 4 train.py
      ddpx run -m mypackage.train --epochs 3
      ddpx run --nnodes 2 --node-rank 0 --master-addr host0 --nproc-per-node 8 train.py
    """
    options, script = torchrun_options(words, {"--keep-survivors": "spare ranks if others fail"})
    return launch(
        options,
        "ddpx.cli.runner",
        script.command(),
        keep_survivors=options.keep_survivors,
    )
