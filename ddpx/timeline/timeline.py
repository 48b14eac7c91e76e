"""``record`` and ``Timeline``: the interface of this package for users."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

from torch import nn

from ddpx.ddp.fronts.lookup import replica_of
from ddpx.errors import count
from ddpx.timeline.analyze.assembly import assemble
from ddpx.timeline.analyze.diagnoses import advise
from ddpx.timeline.analyze.summarize import summarize
from ddpx.timeline.analyze.summary import Summary
from ddpx.timeline.export import page, picture, trace_file
from ddpx.timeline.model import Recording, Step
from ddpx.timeline.record.rank_data import RankData
from ddpx.timeline.record.recorder import Recorder


def record(model: nn.Module, max_steps: int | None = None) -> Timeline:
    """Creates a timeline, which records the steps of ``model`` in a ``with`` block.

    Outside a ``with`` statement, :meth:`Timeline.start` and :meth:`Timeline.stop` do the same.

    The start and the end of a recording are collective calls. Every rank of the model's process
    group makes them at the same place in the script. After an exception in the block, the timeline
    has the steps of this rank only, and this rank does not wait for other ranks.

    This function is not related to ``torch.distributed.elastic.multiprocessing.errors.record``.
    That function is a decorator of ``main()``. It writes the exception of a failed rank into an
    error file, which torchrun prints. ``ddpx.record`` records the times of buckets and steps.

    Args:
        model: A replicated module, a wrapper, or a module around one, such as the result of
            ``torch.compile``.
        max_steps: The number of synchronized steps to record. Default: the last steps before the
            end that fit into a ring buffer of fixed size. These are about 50 steps, and fewer for
            a model of many thousands of parameters.

    Returns:
        A :class:`Timeline`, which is not started.

    Raises:
        TypeError: ``model`` contains no wrapper or replicated module, or contains several.
        ValueError: ``max_steps`` is not a positive integer.

    Example:
        >>> with ddpx.record(model) as timeline:
        ...     for batch in batches:
        ...         model(batch).sum().backward()
        >>> len(timeline.steps)
        3
    """
    if max_steps is not None and not (isinstance(max_steps, int) and max_steps >= 1):
        raise ValueError(
            f"max_steps={max_steps!r} is not valid. Pass a positive integer, or None for no limit."
        )
    return Timeline(Recorder(replica_of(model), max_steps))


class Timeline:
    """The recorded steps of a model on all ranks, from :func:`record` or :meth:`load`.

    Example:
        >>> with ddpx.record(model, max_steps=2) as timeline:
        ...     for batch in batches:
        ...         model(batch).sum().backward()
        >>> [step.number for step in timeline.steps]
        [0, 1]
    """

    def __init__(self, recorder: Recorder | None, ranks: Sequence[RankData] = ()) -> None:
        self._recorder = recorder
        self._ranks = list(ranks)

    def __repr__(self) -> str:
        if self._ranks:
            return (
                f"<Timeline: {count(len(self.steps), 'complete step')} of "
                f"{len(self._ranks)} of {self.recording.world_size} ranks>"
            )
        started = self._recorder is not None and self._recorder.started
        return f"<Timeline: {'recording' if started else 'not started'}>"

    # ---- recording -----------------------------------------------------------------------------

    def start(self) -> Timeline:
        """Starts the recording. A collective call over the model's process group.

        Returns:
            This timeline.

        Raises:
            RuntimeError: The timeline was started before, or a backward is running.
            RankFailure: A rank was lost.

        Example:
            >>> timeline = ddpx.record(model).start()
            >>> model(inputs).sum().backward()
            >>> timeline = timeline.stop()
        """
        if self._recorder is None or self._recorder.started:
            raise RuntimeError(
                "this timeline was started before. Make a new timeline with ddpx.record(model)."
            )
        self._recorder.start()
        return self

    def stop(self) -> Timeline:
        """Ends the recording, and gathers the data of all ranks on every rank.

        A collective call over the model's process group.

        Returns:
            This timeline.

        Raises:
            RuntimeError: The timeline is not recording.
            RankFailure: A rank was lost. The timeline then has the steps of this rank only.

        Example:
            >>> timeline = ddpx.record(model).start()
            >>> model(inputs).sum().backward()
            >>> len(timeline.stop().steps)
            1
        """
        recorder = self._recorder
        if recorder is None or not recorder.started:
            raise RuntimeError(
                "this timeline is not recording. Call start() first, and call stop() once."
            )
        recorder.stop()
        self._ranks = [recorder.data]  # kept if the gather fails
        self._recorder = None
        self._ranks = recorder.gather()
        return self

    def __enter__(self) -> Timeline:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._recorder is None:  # the block called stop()
            return
        if error is None:
            self.stop()
            return
        self._recorder.stop(wait=False)
        self._ranks = [self._recorder.data]
        self._recorder = None

    # ---- recorded data ---------------------------------------------------------------------

    @cached_property
    def recording(self) -> Recording:
        """All recorded data, as a :class:`~ddpx.timeline.model.Recording`.

        Raises:
            RuntimeError: The timeline has no data yet.

        Example:
            >>> timeline.recording.param_names
            ('weight', 'bias')
        """
        if not self._ranks:
            raise RuntimeError(
                "this timeline is empty. Run training steps inside `with ddpx.record(model) as "
                "timeline:`, or between start() and stop()."
            )
        return assemble(self._ranks)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The complete steps, in order.

        Raises:
            RuntimeError: The timeline has no data yet.

        Example:
            >>> bucket = timeline.steps[0].ranks[1].buckets[0]
            >>> bucket.launched < bucket.completed
            True
        """
        return self.recording.steps

    def summary(self) -> Summary:
        """Computes medians for each bucket and each rank, over all recorded steps.

        Returns:
            A :class:`~ddpx.timeline.analyze.summary.Summary`. ``print()`` shows its tables.

        Raises:
            RuntimeError: No complete step was recorded.

        Example:
            >>> print(timeline.summary())
            2 steps (1 to 2) of 2 of 2 ranks over shm, on cpu. Times are medians over steps, in ms.
            ...
        """
        return summarize(self.recording)

    def advice(self) -> list[str]:
        """Names the causes for which steps wait, and what to do about them.

        docs/advice.md lists the causes, their evidence, and how often the first sentence is right.

        Returns:
            Sentences. The first sentence is the first thing to change. Empty if no cause is found.

        Raises:
            RuntimeError: No complete step was recorded.

        Example:
            >>> lines = [f"- {sentence}" for sentence in timeline.advice()]
        """
        return advise(self.recording)

    # ---- files ---------------------------------------------------------------------------------

    def export_chrome_trace(self, path: str | Path) -> None:
        """Writes a file of Chrome trace events.

        https://ui.perfetto.dev and :meth:`load` open the file.

        Args:
            path: The file to write.

        Raises:
            RuntimeError: The timeline has no data yet.

        Example:
            >>> timeline.export_chrome_trace("steps.json")
            >>> len(ddpx.Timeline.load("steps.json").steps)
            3
        """
        trace_file.write(path, self.recording, self._ranks)

    @classmethod
    def load(cls, path: str | Path, model: int = 0) -> Timeline:
        """Reads a timeline from a file or a folder.

        Args:
            path: A file of :meth:`export_chrome_trace`, a folder that ``ddpx timeline`` wrote, or
                a folder with a file of each rank. ``DDPX_TIMELINE`` and the adapters in
                ``ddpx.integrations`` write folders with a file of each rank.
            model: The number of the model, if the script wrapped several. Models are counted from
                0 in the order of wrapping. Default 0.

        Returns:
            A timeline.

        Raises:
            ValueError: The path has no timeline of ddpx, or no timeline of this model.

        Example:
            >>> timeline.export_chrome_trace("steps.json")
            >>> ddpx.Timeline.load("steps.json").recording.world_size
            2
        """
        return cls(None, trace_file.read(path, model))

    def save_plot(self, path: str | Path, step: int | None = None) -> None:
        """Draws one step of all ranks. Requires matplotlib.

        Args:
            path: The picture to write. The suffix selects the format.
            step: The number of the step. Default: the step of median duration.

        Raises:
            ImportError: matplotlib is not installed.
            RuntimeError: No complete step was recorded.
            ValueError: The timeline has no such step.

        Example:
            >>> timeline.save_plot("step.png", step=2)
        """
        picture.draw(self.recording, path, step)

    def save_html(self, path: str | Path) -> None:
        """Writes an HTML page that shows every step. The page loads no other file.

        Args:
            path: The page to write.

        Raises:
            RuntimeError: No complete step was recorded.

        Example:
            >>> timeline.save_html("steps.html")
        """
        page.write(self.recording, path)
