"""The Trainer of Hugging Face with ReducerDDP in place of DDP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from ddpx.ddp.functions.extensions import set_weight
from ddpx.ddp.functions.weights import averages_by_weight
from ddpx.ddp.module import ReducerDDP
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
    _get_num_items_in_batch: Callable[[list[Any], torch.device], Any]

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
            getattr(self.args, "timeline", None),
            getattr(self.args, "timeline_steps", None),
            getattr(self.args, "average", "mean"),
        )

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Computes the loss of a micro-step. ``transformers.Trainer`` calls this method.

        With ``average="weights"``, the loss is a sum over items, and the number of items is the
        weight of the forward.

        Args:
            model: The model.
            inputs: The inputs of the model.
            return_outputs: Whether to return the outputs, too.
            num_items_in_batch: The number of items in all micro-steps of this rank.

        Returns:
            The loss, or the loss and the outputs.

        Raises:
            RuntimeError: The number of items is unknown.

        Example:
            >>> import transformers
            >>> from ddpx.integrations.transformers import TrainerMixin, TrainingArguments
            >>> class MyTrainer(TrainerMixin, transformers.Trainer):
            ...     pass
            >>> trainer = MyTrainer(module, TrainingArguments("runs", use_cpu=True))
            >>> trainer.compute_loss(lambda x: (x.sum(),), {"x": inputs})
            tensor(32.)
        """
        if _weighs(model):
            num_items = self._get_num_items_in_batch([inputs], self.args.device)
            if num_items is None:
                raise RuntimeError(
                    'average="weights" needs the number of items of each batch, but the Trainer '
                    "does not know the number. The batch needs labels. The model, or "
                    "compute_loss_func, needs the argument num_items_in_batch."
                )
            set_weight(model, num_items)
            num_items_in_batch = torch.ones((), device=self.args.device)
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Runs forward and backward of a micro-step. ``transformers.Trainer`` calls this method.

        Args:
            model: The model.
            inputs: The inputs of the model.
            num_items_in_batch: The number of items in all micro-steps of this rank.

        Returns:
            The loss, for logs. With ``average="weights"``, a mean over the items of this rank.

        Example:
            >>> import transformers
            >>> from ddpx.integrations.transformers import TrainerMixin, TrainingArguments
            >>> class MyTrainer(TrainerMixin, transformers.Trainer):
            ...     pass
            >>> MyTrainer.training_step is not transformers.Trainer.training_step
            True
        """
        loss = super().training_step(  # type: ignore[misc]
            model, inputs, num_items_in_batch=num_items_in_batch
        )
        return loss / num_items_in_batch if _weighs(model) else loss


def _weighs(model: object) -> bool:
    wrapper = getattr(model, "_orig_mod", model)  # torch.compile() wraps the wrapper
    return isinstance(wrapper, ReducerDDP) and wrapper.training and averages_by_weight(wrapper)


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with three more arguments and the backend ``"shm"``.

    All other arguments are those of ``transformers.TrainingArguments``.

    Args:
        ddp_backend: The backend of the process group. ``"shm"`` is allowed.
        timeline: A folder for a timeline of the training. Default: no timeline.
        timeline_steps: The number of recorded steps. Default: as ``max_steps`` of
            :func:`ddpx.record`.
        average: The argument of this name of :class:`ddpx.ReducerDDP`. ``"weights"`` averages over
            tokens of all ranks, as ``average_tokens_across_devices``, without a collective call
            before the forward. The Trainer's argument of that name is then without effect.

    Example:
        >>> from ddpx.integrations.transformers import TrainingArguments
        >>> args = TrainingArguments("runs", use_cpu=True, timeline="runs/timeline")
        >>> args.timeline
        'runs/timeline'
    """

    timeline: str | None = field(default=None, metadata={"help": "A folder for a timeline."})
    timeline_steps: int | None = field(default=None, metadata={"help": "Steps to record."})
    average: str = field(default="mean", metadata={"help": "mean, sum or weights."})

    def __post_init__(self) -> None:
        if self.ddp_backend == "shm":  # Accelerate rejects the name, but uses an existing group
            init_group(self.ddp_backend)
            self.ddp_backend: str | None = None
        super().__post_init__()
        if self.average != "mean":  # the Trainer would multiply losses by the number of ranks
            self.average_tokens_across_devices: bool = False
