"""Hugging Face's Trainer, with ReducerDDP in DDP's place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from ddpx.integrations.accelerate import Accelerator
from ddpx.integrations.options import WrapOptions, init_group


class TrainerMixin:
    """Makes ``transformers.Trainer``, or a class derived from it, wrap models in ReducerDDP.

    Example::

        from ddpx.integrations.transformers import TrainerMixin

        class MyTrainer(TrainerMixin, transformers.Trainer):
            pass
    """

    args: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator
        self.accelerator.wrap_options = WrapOptions(
            getattr(self.args, "timeline", None), getattr(self.args, "timeline_steps", None)
        )


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with two more, and with ddpx's backend.

    Args:
        ddp_backend: ``"shm"``, too.
        timeline: a folder for a timeline of the training. None: no timeline.
        timeline_steps: how many steps of it are recorded. None: all.

    Example::

        from ddpx.integrations.transformers import TrainingArguments

        args = TrainingArguments("runs", ddp_backend="shm", timeline="runs/timeline")
    """

    timeline: str | None = field(default=None, metadata={"help": "A folder for a timeline."})
    timeline_steps: int | None = field(default=None, metadata={"help": "Steps to record."})

    def __post_init__(self) -> None:
        if self.ddp_backend == "shm":  # which Accelerate does not know; it uses a group that exists
            init_group(self.ddp_backend)
            self.ddp_backend: str | None = None
        super().__post_init__()
