"""``ddpx timeline``: records the steps of a script, and shows and compares recordings."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from ddpx.cli import errors, options
from ddpx.cli.script import Script
from ddpx.cli.timeline import launches as files
from ddpx.cli.timeline.compare import comparison_text
from ddpx.cli.timeline.launches import Launch
from ddpx.cli.timeline.verdict import compare_steps
from ddpx.cli.torchrun import launch, local_options
from ddpx.timeline.environment import FOLDER, STEPS
from ddpx.timeline.export import trace_file

_RECORD = "record"


class _RecordsByDefault(click.Group):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] != "--help" and args[0] not in self.commands:
            args = [_RECORD, *args]
        return super().parse_args(ctx, args)


@click.group("timeline", cls=_RecordsByDefault)
def command() -> None:
    """Records the steps of a script, and shows and compares recordings.

    The word "record" may be left out.

    \b
    Examples:
      ddpx timeline train.py --steps 20 --out timeline
      ddpx timeline show timeline
      ddpx timeline train.py --launches 3 --out after
      ddpx timeline show after --against before
    """


@command.command(_RECORD, context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@options.num_ranks()
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of steps to record. The script runs to its end.",
)
@click.option(
    "--launches",
    "num_launches",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of runs of the script to record. Comparisons need the noise between several.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("timeline"),
    show_default=True,
    help="Folder for the output files.",
)
@options.IS_MODULE
def record(
    target: str,
    arguments: tuple[str, ...],
    nproc_per_node: int,
    steps: int,
    num_launches: int,
    out: Path,
    is_module: bool,
) -> int:
    """Runs a script as `ddpx run` does, and records the steps of the script.

    Writes summary.txt, trace.json (for https://ui.perfetto.dev and `ddpx timeline show`),
    timeline.png and timeline.html. With --launches, these files show the launch whose step time is
    the median. The files trace-2.json and so on contain the other launches. If the script fails,
    the files show the steps of the failed launch before the failure, and the exit code is 1. After
    Ctrl-C, the files show the steps of the interrupted launch, and the exit code is 130. The files
    replace an earlier recording, but no other files. Options that ddpx does not know, and all words
    after --, go to the script.

    \b
    Examples:
      ddpx timeline train.py --steps 20 --out timeline
      ddpx timeline train.py --launches 3 --out before
      ddpx timeline --nproc-per-node 4 --out timeline train.py -- --steps 1000
    """
    options.check_target(target)
    script = Script(target, is_module, arguments)
    script.check()
    errors.check_tool("matplotlib")  # before the script runs, not after
    files.check_folder(out)
    launches = []
    for number in range(num_launches):
        if num_launches > 1:
            click.echo(f"ddpx: launch {number + 1} of {num_launches}", err=True)
        with tempfile.TemporaryDirectory(prefix="ddpx-timeline-") as folder:
            environment = {FOLDER: folder, STEPS: str(steps)}
            try:
                code = launch(
                    local_options(nproc_per_node),
                    "ddpx.cli.timeline.runner",
                    script.command(),
                    environment,
                )
            except KeyboardInterrupt:
                _keep(Path(folder), out, "was interrupted", "interrupt")
                raise
            if code != 0:
                _keep(Path(folder), out, "failed", "failure")
                return code
            num_models = len(trace_file.models_in(Path(folder)))
            if not num_models:
                raise errors.nothing_recorded(target)
            launches += files.load(Path(folder), 0)
    _write(files.median_first(launches), num_models, out)
    return 0


def _keep(folder: Path, out: Path, what_happened: str, event: str) -> None:
    """Writes what the ranks of a failed or interrupted launch recorded, if they recorded steps.

    The steps before a failure may show why the script failed.
    """
    num_models = len(trace_file.models_in(folder))
    if not num_models:
        return
    try:
        _write(files.load(folder, 0), num_models, out)
    except errors.UserMistake as cause:
        text = f"ddpx: the script {what_happened}, and its recording is not kept: {cause}"
        click.echo(text, err=True)
    else:
        click.echo(f"The script {what_happened}. These files have the steps before the {event}.")


def _write(launches: Sequence[Launch], num_models: int, out: Path) -> None:
    text = _report(launches)
    written = files.write(launches, text, out)
    click.echo(text)
    if num_models > 1:
        click.echo(f"\nThe script wrapped {num_models} models. This is the first model.")
    click.echo(f"\nFiles written to {out}: {', '.join(written)}")


@command.command("show")
@click.argument("recording", type=click.Path(path_type=Path))
@click.option(
    "--against", type=click.Path(path_type=Path), help="Another recording to compare with."
)
@click.option(
    "--model",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Number of the model in a folder with several models.",
)
def show(recording: Path, against: Path | None, model: int) -> int:
    """Prints the summary of a recording, or compares two recordings.

    RECORDING is a folder of `ddpx timeline`, a trace.json, or a folder with one file per rank
    (DDPX_TIMELINE). Ratios are the times of RECORDING divided by the times of the --against
    recording.

    Exit codes: 0, RECORDING is not slower, or --against is not given; 1, RECORDING is slower; 2,
    wrong usage, a recording without a complete step, or too few steps for a comparison.

    A difference is reported only if the interval of the ratio excludes 1. The interval contains the
    ratio with a confidence of 99 %. It is computed from the median steps of the launches, if both
    recordings together have at least 4 launches (--launches). Otherwise it is computed from 5
    blocks of steps in each launch. The noise between launches is unknown then, and is assumed to be
    1.5 times the noise between blocks, and at least 8 %: only differences of about a half and more
    are reported. The time of a step is the time on its slowest rank.

    \b
    Examples:
      ddpx timeline show timeline
      ddpx timeline show after --against before
    """
    launches = files.load(recording, model)
    if against is None:
        click.echo(_report(launches))
        return 0
    base = files.load(against, model)
    verdict = compare_steps(
        [launch.steps_ms for launch in launches], [launch.steps_ms for launch in base]
    )
    new_summaries, base_summaries = ([each.summary for each in side] for side in (launches, base))
    names = (str(recording), str(against))
    click.echo(comparison_text(new_summaries, base_summaries, verdict, *names))
    if verdict is None:
        return 2
    return 1 if verdict.is_slower else 0


def _report(launches: Sequence[Launch]) -> str:
    first = launches[0]
    lines = [str(first.summary)]
    if len(launches) > 1:
        times = ", ".join(f"{each.step_ms:.2f}" for each in launches)
        lines += ["", f"{len(launches)} launches. Median steps, on the slowest rank: {times} ms."]
        lines.append(f"The tables show the launch of {first.step_ms:.2f} ms.")
    advice = first.timeline.advice()
    if advice:
        lines += ["", "Advice:", *(f"- {sentence}" for sentence in advice)]
    return "\n".join(lines)
