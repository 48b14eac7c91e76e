"""An ``Accelerator`` of Hugging Face Accelerate that uses ReducerDDP in place of DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate

from ddpx.integrations.options import WrapOptions, init_group


class Accelerator(accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose ``prepare()`` wraps models in ReducerDDP.

    Args:
        options: Positional arguments of ``accelerate.Accelerator``.
        backend: The backend of the process group, for example ``"shm"``. Default: the choice of
            Accelerate. An existing process group is used as it is.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.
        average: The argument of this name of :class:`ddpx.ReducerDDP`. With ``"sum"`` and
            ``"weights"``, ``backward()`` does not divide losses by the number of micro-steps.
        more_options: Keyword arguments of ``accelerate.Accelerator``.

    Raises:
        ValueError: ``timeline_steps`` is not a positive number, or ``timeline`` is missing.

    Example:
        >>> from ddpx.integrations.accelerate import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model, optimizer = accelerator.prepare(module, optimizer)
        >>> isinstance(model, ddpx.ReducerDDP)
        True
    """

    wrap_options = WrapOptions()

    def __init__(
        self,
        *options: Any,
        backend: str | None = None,
        timeline: str | Path | None = None,
        timeline_steps: int | None = None,
        average: str = "mean",
        **more_options: Any,
    ) -> None:
        init_group(backend)
        super().__init__(*options, **more_options)
        self.wrap_options = WrapOptions(timeline, timeline_steps, average)

    def backward(self, loss: Any, **options: Any) -> None:
        """Runs the backward of a loss.

        With another average than the mean, the losses of micro-steps add up. Otherwise
        ``accelerate.Accelerator`` divides each loss by ``gradient_accumulation_steps``.

        Args:
            loss: The loss of a micro-step.
            options: Keyword arguments of ``accelerate.Accelerator.backward``.

        Example:
            >>> from ddpx.integrations.accelerate import Accelerator
            >>> accelerator = Accelerator(cpu=True, average="weights")
            >>> model = accelerator.prepare(module)
            >>> ddpx.set_weight(model, len(inputs))
            >>> accelerator.backward(model(inputs).sum())
        """
        if self.wrap_options.average != "mean":
            loss = loss * self.gradient_accumulation_steps
        super().backward(loss, **options)

    def prepare_model(self, model: Any, *options: Any, **more_options: Any) -> Any:
        """Wraps a model. ``prepare()`` calls this method.

        Args:
            model: The model.
            options: Positional arguments of ``accelerate.Accelerator.prepare_model``.
            more_options: Keyword arguments of ``accelerate.Accelerator.prepare_model``.

        Returns:
            The wrapper. With a single process, the model.

        Example:
            >>> from ddpx.integrations.accelerate import Accelerator
            >>> model = Accelerator(cpu=True).prepare_model(module)
            >>> isinstance(model, ddpx.ReducerDDP)
            True
        """
        return self.wrap_options.wrap(
            lambda: super(Accelerator, self).prepare_model(model, *options, **more_options)
        )
