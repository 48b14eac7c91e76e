"""The Hugging Face Trainer: accumulates, clips, evaluates, saves, and resumes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import transformers
from common import leave, loss_of, make_inputs, make_model, report
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.inner(inputs))}


class Data(Dataset[dict[str, torch.Tensor]]):
    def __init__(self) -> None:
        self._inputs = torch.cat(make_inputs(16))

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index]}


def train(num_steps: int, resume: bool) -> nn.Module:
    args = transformers.TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=num_steps,
        per_device_train_batch_size=5,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        learning_rate=0.05,
        lr_scheduler_type="constant",
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to="none",
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(Net(), args, train_dataset=Data(), eval_dataset=Data())
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


train(2, resume=False)
dist.barrier()
report(train(4, resume=True))
leave()
