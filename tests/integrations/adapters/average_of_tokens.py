"""Averages over tokens: Hugging Face's Trainer and Accelerate with DDP, and with ddpx.

Ranks and micro-batches have different numbers of tokens.
"""

import sys
from contextlib import nullcontext
from typing import Any

import accelerate
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ddpx
from ddpx.integrations.accelerate import Accelerator
from ddpx.integrations.transformers import TrainerMixin, TrainingArguments

NUM_STEPS, MICRO_STEPS, BATCH, TOKENS, CLASSES = 3, 2, 2, 5, 4
TOLERANCE = 1e-12  # relative to the largest element of a parameter


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        logits = self.inner(inputs).flatten(0, -2)
        loss = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return {"loss": loss / kwargs["num_items_in_batch"]}


class Data(Dataset):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        number = NUM_STEPS * MICRO_STEPS * BATCH * 2
        self._inputs = torch.randn(number, TOKENS, 6, dtype=torch.float64, generator=generator)
        self._labels = torch.randint(CLASSES, (number, TOKENS), generator=generator)
        for index, labels in enumerate(self._labels):
            labels[1 + (7 * index) % TOKENS :] = -100  # padding

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self._inputs[index], "labels": self._labels[index]}


class ReducerTrainer(TrainerMixin, transformers.Trainer):
    pass


def with_trainer(cls: type[transformers.Trainer], **options: Any) -> nn.Module:
    args = TrainingArguments(
        sys.argv[1],
        use_cpu=True,
        max_steps=NUM_STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=MICRO_STEPS,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        logging_steps=1,
        **options,
    )
    trainer = cls(Model(), args, train_dataset=Data())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == NUM_STEPS and all(0.5 < loss < 2 for loss in losses), losses
    return trainer.model_wrapped


def with_accelerate(accelerator: accelerate.Accelerator, weighs: bool) -> nn.Module:
    module = Model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    data, rank = Data(), accelerator.process_index
    batches = [
        torch.utils.data.default_collate([data[i] for i in range(start, start + BATCH)])
        for start in range(rank * BATCH, len(data), 2 * BATCH)
    ]
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        micro_batches = batches[MICRO_STEPS * step : MICRO_STEPS * (step + 1)]
        counts = [(batch["labels"] != -100).sum() for batch in micro_batches]
        total = accelerator.gather(sum(counts)).sum()  # Accelerate's own way
        for number, (batch, count) in enumerate(zip(micro_batches, counts, strict=True)):
            is_last = number == MICRO_STEPS - 1
            with nullcontext() if is_last else accelerator.no_sync(model):
                if weighs:
                    ddpx.set_weight(model, count)
                    loss = model(**batch, num_items_in_batch=1)["loss"]
                else:
                    scale = MICRO_STEPS * accelerator.num_processes
                    loss = model(**batch, num_items_in_batch=total)["loss"] * scale
                accelerator.backward(loss)
        optimizer.step()
    return model


def compare(ours: nn.Module, theirs: nn.Module, name: str) -> None:
    assert isinstance(ours, ddpx.ReducerDDP) and not type(theirs).__module__.startswith("ddpx")
    start = Model()
    for left, right, first in zip(
        ours.parameters(), theirs.parameters(), start.parameters(), strict=True
    ):
        error = (left - right).abs().max() / right.abs().max()
        assert error <= TOLERANCE, (name, error)
        assert (left - first).abs().max() > 1e-3, f"{name}: not trained"
    print(f"{name}: as with DDP", flush=True)


def plain_accelerator(cls: type[accelerate.Accelerator], **options: Any) -> accelerate.Accelerator:
    return cls(cpu=True, gradient_accumulation_steps=MICRO_STEPS, **options)


compare(
    with_trainer(ReducerTrainer, average="weights"),
    with_trainer(transformers.Trainer, average_tokens_across_devices=True),
    "Trainer",
)
compare(
    with_accelerate(plain_accelerator(Accelerator, average="weights"), weighs=True),
    with_accelerate(plain_accelerator(accelerate.Accelerator), weighs=False),
    "Accelerate",
)
