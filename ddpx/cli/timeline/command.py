"""``ddpx timeline``: records the steps of a script, and shows and compares recordings."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from ddpx.cli import errors
from ddpx.cli.launch import DEFAULT_NUM_RANKS, launch, local_options
from ddpx.cli.script import Script
from ddpx.cli.timeline.compare import comparison_text, is_slower
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.summary import Summary
from ddpx.timeline.environment import FOLDER, STEPS
from ddpx.timeline.export.trace_file import models_in

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
      ddpx timeline show timeline/trace.json
      ddpx timeline show after/trace.json --against before/trace.json
    """


@command.command(_RECORD, context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="SCRIPT")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--nproc-per-node",
    type=click.IntRange(min=1),
    default=DEFAULT_NUM_RANKS,
    show_default=True,
    help="Number of ranks on this machine.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Number of steps to record. The script runs to its end.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("timeline"),
    show_default=True,
    help="Folder for the output files.",
)
@click.option(
    "--module", "is_module", is_flag=True, help="SCRIPT is a module name, as for python -m."
)
def record(
    target: str,
    arguments: tuple[str, ...],
    nproc_per_node: int,
    steps: int,
    out: Path,
    is_module: bool,
) -> int:
    """Runs a script as `ddpx run` does, and records the steps of the script.

    Writes summary.txt, trace.json (for https://ui.perfetto.dev and `ddpx timeline show`),
    timeline.png and timeline.html. Options that ddpx does not know, and all words after --, go to
    the script.

    \b
    Examples:
      ddpx timeline train.py --steps 20 --out timeline
      ddpx timeline --nproc-per-node 4 --out timeline train.py -- --steps 1000
    """
    if target.startswith("-"):
        raise click.NoSuchOption(target)
    script = Script(target, is_module, arguments)
    script.check()
    if importlib.util.find_spec("matplotlib") is None:  # checked before the script runs
        raise errors.tool_missing("matplotlib")
    with tempfile.TemporaryDirectory(prefix="ddpx-timeline-") as folder:
        environment = {
            FOLDER: folder,
            STEPS: str(steps),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        options = local_options(nproc_per_node)
        code = launch(options, "ddpx.cli.timeline.runner", script.command(), environment)
        if code != 0:
            return code
        if not models_in(Path(folder)):
            raise errors.nothing_wrapped(target)
        timeline = _load(Path(folder), 0)
        num_others = len(models_in(Path(folder))) - 1
    text = _report(timeline)
    _write(timeline, text, out)
    click.echo(text)
    if num_others:
        click.echo(f"\nThe script wrapped {num_others + 1} models. This is the first model.")
    click.echo(f"\nFiles written to {out}: {', '.join(_WRITERS)}, summary.txt")
    return 0


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

    RECORDING is a trace.json, or a folder with one file per rank (DDPX_TIMELINE). Ratios are the
    times of RECORDING divided by the times of the --against recording.

    Exit codes: 0, RECORDING is not slower, or --against is not given; 1, RECORDING is slower; 2,
    wrong usage, or a recording without a complete step.

    The slowest rank of each recording counts, with the median of its step times. RECORDING is
    slower if its median exceeds the other median by more than the noise. The noise is the larger of
    two values: 3 % of the other median, and twice the standard error of the difference of the
    medians. The standard error is estimated from median absolute deviations. With fewer than 3
    steps, RECORDING is never slower.

    \b
    Examples:
      ddpx timeline show timeline/trace.json
      ddpx timeline show after/trace.json --against before/trace.json
    """
    timeline = _load(recording, model)
    if against is None:
        click.echo(_report(timeline))
        return 0
    new, base = _summary(timeline), _summary(_load(against, model))
    click.echo(comparison_text(new, base, str(recording), str(against)))
    return 1 if is_slower(new, base) else 0


def _load(path: Path, model: int) -> Timeline:
    if not path.exists():
        raise errors.no_such_file(path)
    try:
        return Timeline.load(path, model)
    except ValueError as cause:
        raise errors.UserMistake(str(cause)) from cause


def _summary(timeline: Timeline) -> Summary:
    try:
        return timeline.summary()
    except RuntimeError as cause:  # no complete step was recorded
        raise errors.UserMistake(str(cause)) from cause


def _report(timeline: Timeline) -> str:
    lines = [str(_summary(timeline))]
    advice = timeline.advice()
    if advice:
        lines += ["", "Advice:", *(f"- {sentence}" for sentence in advice)]
    return "\n".join(lines)


_WRITERS: dict[str, Callable[[Timeline, Path], None]] = {
    "trace.json": Timeline.export_chrome_trace,
    "timeline.png": Timeline.save_plot,
    "timeline.html": Timeline.save_html,
}


def _write(timeline: Timeline, text: str, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.txt").write_text(text + "\n")
    for name, write in _WRITERS.items():
        write(timeline, out / name)
