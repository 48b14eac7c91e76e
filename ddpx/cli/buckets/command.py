"""``ddpx buckets``: shows the bucket of each gradient of a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import click

from ddpx.cli.buckets import picture
from ddpx.cli.buckets.plan import MIB, Bucket, Plan, plan_buckets
from ddpx.cli.build import build
from ddpx.ddp.arguments.bucket_sizes import CAP_VARIABLE, PLAN_VARIABLE
from ddpx.ddp.arguments.options import make_options
from ddpx.timeline.texts import table


@click.command("buckets")
@click.argument("target", metavar="MODULE:FUNCTION")
@click.option(
    "--bucket-cap-mb", "caps_mb", type=float, multiple=True, help="Bucket size in MiB. Repeatable."
)
@click.option(
    "--bucket-cap-mb-list",
    "lists_mb",
    multiple=True,
    help="Sizes in MiB, e.g. 1,25,25. Repeatable.",
)
@click.option("--find-unused-parameters", is_flag=True, help="As in ReducerDDP.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="PNG file to draw.")
def command(
    target: str,
    caps_mb: tuple[float, ...],
    lists_mb: tuple[str, ...],
    find_unused_parameters: bool,
    plot: Path | None,
) -> None:
    """Shows which gradients of a model share a bucket. Needs no process group.

    FUNCTION takes no arguments and returns the model. The default bucket sizes are those of
    ReducerDDP: 1 MiB for the first bucket, and 25 MiB for all other buckets. Without sizes, the
    command uses DDPX_BUCKET_PLAN and DDPX_BUCKET_CAP_MB, as ReducerDDP does.

    \b
    Examples:
      ddpx buckets torchvision.models:resnet50
      ddpx buckets mymodels:build --bucket-cap-mb 25 --bucket-cap-mb 5 --plot buckets.png
      ddpx buckets mymodels:build --bucket-cap-mb-list 1,25,25
    """
    if plot is not None:
        picture.check(plot)  # before the model is built
    module, _ = build(target)
    chosen: list[tuple[str, float | None, list[float] | None]] = [
        *((f"{cap:g} MiB", cap, None) for cap in caps_mb),
        *((f"{words} MiB", None, _numbers(words)) for words in lists_mb),
    ]
    variables = [name for name in (PLAN_VARIABLE, CAP_VARIABLE) if os.environ.get(name)]
    default = f"{variables[0]}={os.environ[variables[0]]}" if variables else "default caps"
    plans = []
    with _without(variables if chosen else []):  # the options take precedence
        for name, cap, cap_list in chosen or [(default, None, None)]:
            try:
                options = make_options(
                    bucket_cap_mb=cap,
                    bucket_cap_mb_list=cap_list,
                    find_unused_parameters=find_unused_parameters,
                )
                plans.append(plan_buckets(module, options, name))
            except (ValueError, RuntimeError) as cause:
                raise click.UsageError(str(cause)) from cause
    click.echo("\n\n".join(_text(plan) for plan in plans))
    if len(plans) > 1:
        headline = "Side by side: size of each lasting bucket, as MiB (number of parameters)."
        click.echo(f"\n{headline}\n\n{_compare(plans)}")
    if plot is not None:
        picture.draw(plans, plot, f"Buckets of {target}")
        click.echo(f"\nPicture written to {plot}")


@contextmanager
def _without(variables: Sequence[str]) -> Iterator[None]:
    """Hides environment variables."""
    values = {name: os.environ.pop(name) for name in variables}
    try:
        yield
    finally:
        os.environ.update(values)


def _numbers(words: str) -> list[float]:
    try:
        return [float(word) for word in words.split(",")]
    except ValueError as cause:
        raise click.BadParameter(
            f"{words!r} is not a list of numbers. Pass e.g. 1,25,25.",
            param_hint="--bucket-cap-mb-list",
        ) from cause


def _text(plan: Plan) -> str:
    if plan.rebuilt is None:
        return f"{plan.caps}: buckets of all steps, in launch order.\n\n{_table(plan.first)}"
    return (
        f"{plan.caps}: buckets of the first step, in launch order.\n\n{_table(plan.first)}\n\n"
        f"{plan.caps}: buckets of all later steps, rebuilt by arrival order. This plan assumes "
        "that\ngradients arrive in reverse order of registration. ReducerDDP uses the order that "
        f"it observes\nin the first step.\n\n{_table(plan.rebuilt)}"
    )


def _table(buckets: Sequence[Bucket]) -> str:
    rows = [
        [index, len(bucket.params), _mib(bucket), bucket.params[0], bucket.params[-1]]
        for index, bucket in enumerate(buckets)
    ]
    return table(("bucket", "params", "MiB", "first param", "last param"), rows)


def _compare(plans: Sequence[Plan]) -> str:
    columns = [[f"{_mib(b)} ({len(b.params)})" for b in plan.lasting] for plan in plans]
    rows = [[index, *cells] for index, cells in enumerate(zip_longest(*columns, fillvalue=""))]
    return table(("bucket", *(plan.caps for plan in plans)), rows)


def _mib(bucket: Bucket) -> str:
    return f"{bucket.num_bytes / MIB:.2f}"
