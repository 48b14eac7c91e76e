"""The launches of a script that ``ddpx timeline`` records, and their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from ddpx.cli import errors
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.analyze.summary import Summary
from ddpx.timeline.export import trace_file


@dataclass(frozen=True)
class Launch:
    """One run of a script."""

    timeline: Timeline

    @cached_property
    def summary(self) -> Summary:
        with errors.mistakes(RuntimeError):  # no complete step was recorded
            return self.timeline.summary()

    @cached_property
    def steps_ms(self) -> list[float]:
        """The times of the steps that the summary evaluates, each on its slowest rank."""
        evaluated = set(self.summary.steps)
        return [
            max(step_figures(rank_step).whole for rank_step in step.ranks.values()) / 1e6
            for step in self.timeline.steps
            if step.number in evaluated
        ]

    @property
    def step_ms(self) -> float:
        return median(self.steps_ms)


def median_first(launches: Sequence[Launch]) -> list[Launch]:
    """Moves the launch of median step time to the front. Of two, the faster launch."""
    middle = sorted(launches, key=lambda launch: launch.step_ms)[(len(launches) - 1) // 2]
    return [middle, *(launch for launch in launches if launch is not middle)]


def load(path: Path, model: int) -> list[Launch]:
    """Reads all launches of a folder, or one launch from another path.

    Raises:
        UserMistake: The path does not exist, or has no timeline of this model.
    """
    if not path.exists():
        raise errors.UserMistake(f"there is no file or folder '{path}'. Pass an existing path.")
    with errors.mistakes():
        files = [] if model or trace_file.models_in(path) else trace_file.launches_in(path)
        return [Launch(Timeline.load(file, model)) for file in files or [path]]


_SUMMARY = "summary.txt"
_WRITERS: dict[str, Callable[[Timeline, Path], None]] = {
    "timeline.png": Timeline.save_plot,
    "timeline.html": Timeline.save_html,
}


def write(launches: Sequence[Launch], text: str, out: Path) -> list[str]:
    """Writes the files of a recording, and then removes other launches of an earlier recording.

    Returns:
        The names of the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    traces = [trace_file.launch_name(number) for number in range(len(launches))]
    for name, launch in zip(traces, launches, strict=True):
        launch.timeline.export_chrome_trace(out / name)
    for file in trace_file.launches_in(out):
        if file.name not in traces:
            file.unlink()
    for name, write_file in _WRITERS.items():
        write_file(launches[0].timeline, out / name)
    (out / _SUMMARY).write_text(text + "\n", encoding="utf-8")
    return [*traces, *_WRITERS, _SUMMARY]


def check_folder(out: Path) -> None:
    """Checks that :func:`write` can write into a folder, and replaces only an earlier recording.

    Raises:
        UserMistake: The folder is not writable, or has other files of these names.
    """
    errors.check_folder(out)
    with errors.mistakes():
        trace_file.check_replaceable(out, [*_WRITERS, _SUMMARY])
