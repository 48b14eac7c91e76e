"""The timeline of a model's steps, as users get it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from torch import nn

from ddpx.timeline import errors, trace
from ddpx.timeline.advice import advise
from ddpx.timeline.assembly import assemble
from ddpx.timeline.model import Recording, Step
from ddpx.timeline.raw import RankData
from ddpx.timeline.recorder import Recorder
from ddpx.timeline.summary import Summary, summarize

if TYPE_CHECKING:
    from ddpx.module import ReducerDDP


def record(model: nn.Module, max_steps: int | None = None) -> Timeline:
    """A timeline of the steps of ``model`` between ``start()`` and ``stop()``, or in a ``with``::

        with ddpx.record(model) as timeline:
            for x, y in batches:
                ...
        print(timeline.summary())

    ``torch.distributed.elastic.multiprocessing.errors.record`` is another thing: a decorator of
    ``main()`` that writes the exception of a failed rank into torchrun's error file.

    Every rank of the model's process group has to record, at the same place in the script: the
    start and the end are collective calls. After an exception in the ``with`` a timeline has what
    its own rank saw, and no rank is waited for.

    Args:
        model: a ReducerDDP, or a module around one (as ``torch.compile`` returns).
        max_steps: record that many synchronised steps and no more. None: as many of the last ones
            as fit a ring of fixed size; about 50, fewer for models of many thousands of params.

    Raises:
        TypeError: there is no ReducerDDP in ``model``, or there are several.
        ValueError: ``max_steps`` is not positive.
    """
    if max_steps is not None and max_steps < 1:
        raise errors.bad_max_steps(max_steps)
    return Timeline(Recorder(_find_wrapper(model), max_steps))


def _find_wrapper(model: nn.Module) -> ReducerDDP:
    from ddpx.module import ReducerDDP  # which imports this package, for DDPX_TIMELINE

    modules = model.modules() if isinstance(model, nn.Module) else []
    wrappers = [module for module in modules if isinstance(module, ReducerDDP)]
    if len(wrappers) != 1:
        raise errors.not_one_wrapper(model, len(wrappers))
    return wrappers[0]


class Timeline:
    """What happened in the steps of a model, on all ranks. From :func:`record` or :meth:`load`."""

    def __init__(self, recorder: Recorder | None, ranks: Sequence[RankData] = ()) -> None:
        self._recorder = recorder
        self._ranks = list(ranks)

    # ---- recording -----------------------------------------------------------------------------

    def start(self) -> Timeline:
        """Begins to record. Collective over the model's process group.

        Raises:
            RuntimeError: it has been started before, or a backward is running.
        """
        if self._recorder is None or self._recorder.started:
            raise errors.timeline_started()
        self._recorder.start()
        return self

    def stop(self) -> Timeline:
        """Ends the recording and gathers what all ranks recorded, on every rank. Collective.

        Raises:
            RuntimeError: it is not recording.
        """
        recorder = self._running()
        recorder.stop()
        self._ranks = [recorder.data()]  # if the others cannot be reached
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
        if self._recorder is None:  # stopped by hand
            return
        if error is None:
            self.stop()
            return
        self._recorder.stop(wait=False)
        self._ranks = [self._recorder.data()]
        self._recorder = None

    def _running(self) -> Recorder:
        if self._recorder is None or not self._recorder.started:
            raise errors.timeline_not_running()
        return self._recorder

    # ---- what was recorded ---------------------------------------------------------------------

    @cached_property
    def recording(self) -> Recording:
        """Everything, as typed values.

        Raises:
            RuntimeError: nothing has been recorded yet.
        """
        if not self._ranks:
            raise errors.timeline_empty()
        return assemble(self._ranks)

    @property
    def steps(self) -> tuple[Step, ...]:
        return self.recording.steps

    def summary(self) -> Summary:
        """Per bucket and per step, over all recorded steps; ``print()`` makes tables of it."""
        return summarize(self.recording)

    def advice(self) -> list[str]:
        """What the measurements say, in sentences; empty if there is nothing to gain."""
        return advise(self.recording)

    # ---- files ---------------------------------------------------------------------------------

    def export_chrome_trace(self, path: str | Path) -> None:
        """Writes Chrome trace events, which https://ui.perfetto.dev opens, and :meth:`load`."""
        trace.write(path, self.recording, self._ranks)

    @classmethod
    def load(cls, path: str | Path, model: int = 0) -> Timeline:
        """From a file of :meth:`export_chrome_trace`, or a folder of files of single ranks.

        ``DDPX_TIMELINE`` and the adapters in ``ddpx.integrations`` write such folders.

        Args:
            model: of a folder, which of the script's models: its number in the order in which they
                were wrapped, from 0.

        Raises:
            ValueError: it holds no timeline of ddpx, or none of this model.
        """
        return cls(None, trace.read(path, model))

    def save_plot(self, path: str | Path, step: int | None = None) -> None:
        """Draws one step of all ranks; needs matplotlib.

        Args:
            step: its number. None: the one of median length.
        """
        from ddpx.timeline.picture import draw

        draw(self.recording, path, step)

    def save_html(self, path: str | Path) -> None:
        """Writes one page, without references to others, to step through every iteration."""
        from ddpx.timeline.page import write

        write(self.recording, path)
