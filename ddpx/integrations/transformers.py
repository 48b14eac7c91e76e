"""The Trainer of Hugging Face with ReducerDDP in place of DDP."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import transformers

from ddpx.integrations.accelerate import Accelerator
from ddpx.integrations.options import WrapOptions, init_group


class TrainerMixin:
    """Makes ``transformers.Trainer``, or a class derived from it, wrap models in ReducerDDP.

    Example:
        >>> import transformers
        >>> from ddpx.integrations.transformers import TrainerMixin, TrainingArguments
        >>> class MyTrainer(TrainerMixin, transformers.Trainer):
        ...     pass
        >>> trainer = MyTrainer(module, TrainingArguments("runs", use_cpu=True))
        >>> type(trainer.accelerator).__module__
        'ddpx.integrations.accelerate'
    """

    args: Any
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Creates the accelerator. ``transformers.Trainer`` calls this method.

        Example:
            >>> import transformers
            >>> from ddpx.integrations.transformers import TrainerMixin, TrainingArguments
            >>> class MyTrainer(TrainerMixin, transformers.Trainer):
            ...     pass
            >>> trainer = MyTrainer(module, TrainingArguments("runs", use_cpu=True))
            >>> trainer.create_accelerator_and_postprocess()
        """
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator
        self.accelerator.wrap_options = WrapOptions(
            getattr(self.args, "timeline", None), getattr(self.args, "timeline_steps", None)
        )


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with two more arguments and the backend ``"shm"``.

    All other arguments are those of ``transformers.TrainingArguments``.

    Args:
        ddp_backend: The backend of the process group. ``"shm"`` is allowed.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.

    Example:
        >>> from ddpx.integrations.transformers import TrainingArguments
        >>> args = TrainingArguments("runs", use_cpu=True, timeline="runs/timeline")
        >>> args.timeline
        'runs/timeline'
    """

    timeline: str | None = field(default=None, metadata={"help": "A folder for a timeline."})
    timeline_steps: int | None = field(default=None, metadata={"help": "Steps to record."})

    def __post_init__(self) -> None:
        if self.ddp_backend == "shm":  # Accelerate rejects the name, but uses an existing group
            init_group(self.ddp_backend)
            self.ddp_backend: str | None = None
        super().__post_init__()
