"""Hugging Face Accelerate's Accelerator, with ReducerDDP in DDP's place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate

from ddpx.integrations.options import WrapOptions, init_group


class Accelerator(accelerate.Accelerator):
    """``accelerate.Accelerator``, of which ``prepare()`` wraps models in ReducerDDP.

    Args:
        backend: of the process group, for example ``"shm"``. None: as Accelerate chooses.
        timeline: a folder for a timeline of the training. None: no timeline.
        timeline_steps: how many steps of it are recorded. None: all.
        options: accelerate.Accelerator's.

    Example::

        from ddpx.integrations.accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, optimizer)
    """

    wrap_options = WrapOptions()

    def __init__(
        self,
        *options: Any,
        backend: str | None = None,
        timeline: str | Path | None = None,
        timeline_steps: int | None = None,
        **more_options: Any,
    ) -> None:
        init_group(backend)
        super().__init__(*options, **more_options)
        self.wrap_options = WrapOptions(timeline, timeline_steps)

    def prepare_model(self, model: Any, *options: Any, **more_options: Any) -> Any:
        return self.wrap_options.wrap(
            lambda: super(Accelerator, self).prepare_model(model, *options, **more_options)
        )
