"""Hugging Face's Trainer, with and without the mixin."""

import sys

import torch
import transformers
from torch import nn
from torch.utils.data import Dataset
from twice import NUM_STEPS, compare, inputs_of, make_model

from ddpx.integrations.transformers import TrainerMixin, TrainingArguments


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(inputs).square().mean()}


class Data(Dataset):
    def __init__(self) -> None:
        self._inputs = torch.cat([inputs_of(0), inputs_of(1)])

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index]}


class ReducerTrainer(TrainerMixin, transformers.Trainer):
    pass


def train(cls: type[transformers.Trainer], **options: object) -> nn.Module:
    args = TrainingArguments(
        sys.argv[1],
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=5,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        learning_rate=0.1,
        **options,
    )
    trainer = cls(Model(), args, train_dataset=Data())
    trainer.train()
    return trainer.model_wrapped


ours = train(ReducerTrainer, ddp_backend="shm", timeline=sys.argv[1], timeline_steps=2)
theirs = train(transformers.Trainer)
compare(ours, theirs)
