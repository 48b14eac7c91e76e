"""``ddpx plan``: runs a script until the fastest bucket plan is known, and writes the plan."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click

from ddpx.cli import errors, options
from ddpx.cli.plan.runner import PLAN, REPORT
from ddpx.cli.script import Script
from ddpx.cli.torchrun import launch, local_options
from ddpx.ddp.arguments.bucket_sizes import AUTO, CAP_VARIABLE, PLAN_VARIABLE
from ddpx.planning import BucketPlan, PlanReport
from ddpx.planning.search import MOST_STEPS
from ddpx.timeline.export import plan_picture, plan_rows
from ddpx.timeline.texts import table

_SUFFIXES = (".svg", ".png", ".pdf", ".html")


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@options.num_ranks(least=2)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("plan.json"),
    show_default=True,
    help="File for the plan.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Picture of the chosen plan beside the default plan: .svg, .png, .pdf or .html.",
)
@options.IS_MODULE
def command(
    target: str,
    arguments: tuple[str, ...],
    nproc_per_node: int,
    out: Path,
    plot: Path | None,
    is_module: bool,
) -> int:
    """Runs a script as `ddpx run --bucket-cap-mb auto` does, until the fastest plan is known.

    The command then writes the plan and ends the script, at the start of a forward, as sys.exit()
    would. If the script trains several models, the plan is that of the model on rank 0 whose search
    ends first. A search takes up to 300 steps of the model. Options that ddpx does not know, and
    all words after --, go to the script.

    \b
    Examples:
      ddpx plan train.py --out plan.json
      ddpx plan --nproc-per-node 4 --out plan.json --plot plan.svg train.py -- --lr 0.1
      DDPX_BUCKET_PLAN=plan.json ddpx run --nproc-per-node 4 train.py --lr 0.1
    """
    options.check_target(target)
    script = Script(target, is_module, arguments)
    script.check()
    errors.check_file(out)
    if plot is not None:
        _check_plot(plot)
        if plot.resolve() == out.resolve():
            raise errors.UserMistake("--out and --plot name the same file. Pass two files.")
    with tempfile.TemporaryDirectory(prefix="ddpx-plan-") as folder:
        code = launch(
            local_options(nproc_per_node),
            "ddpx.cli.plan.runner",
            [folder, *script.command()],
            {CAP_VARIABLE: AUTO, PLAN_VARIABLE: ""},
        )
        if not Path(folder, PLAN).exists():
            if code != 0:
                return code
            raise errors.UserMistake(
                f"{target} ended before the plan was known. The search needs up to {MOST_STEPS} "
                "synchronized steps of a model with several gradients and no communication hook. "
                "Let the script make so many steps."
            )
        report = PlanReport.from_json(json.loads(Path(folder, REPORT).read_text()))
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(Path(folder, PLAN), out)
    click.echo(_text(report, BucketPlan.load(out)))
    click.echo(f"\nPlan written to {out}, for bucket_plan= or {PLAN_VARIABLE}.")
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        plan_picture.draw(report, plot)
        click.echo(f"Picture written to {plot}")
    return 0


def _check_plot(plot: Path) -> None:
    """Finds mistakes before the script runs."""
    errors.check_file(plot)
    if plot.suffix.lower() not in _SUFFIXES:
        raise errors.UserMistake(
            f"{plot} has no suffix of a picture. Pass one of {', '.join(_SUFFIXES)}."
        )
    errors.check_tool("matplotlib")


def _text(report: PlanReport, plan: BucketPlan) -> str:
    rows = [
        [
            each.name,
            len(each.buckets),
            f"{1e3 * each.predicted_end_s:.2f}",
            _ms(each.measured_end_s),
            _ms(each.step_s),
        ]
        for each in report.plans
    ]
    headers = ("plan", "buckets", "predicted end, ms", "measured end, ms", "step, ms")
    return (
        f"{plan_rows.title(report)}.\n\n{table(headers, rows)}\n\n"
        "The end of communication counts from the start of the backward. For torch's DDP:\n"
        f"bucket_cap_mb_list={plan.cap_mb_list}"
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1e3 * seconds:.2f}"
