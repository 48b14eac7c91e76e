"""Composer's Trainer: micro-batches, clipping, layers that freeze, and a checkpoint."""

from __future__ import annotations

import os
from typing import Any

import torch
from common import leave, loss_of, make_inputs, make_model, report
from composer import Trainer
from composer.algorithms import GradientClipping, LayerFreezing
from composer.models import ComposerModel
from composer.utils import dist
from torch.utils.data import DataLoader, TensorDataset


class Net(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.inner(batch[0])

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return loss_of(outputs)


def fit(duration: str, load: str | None) -> torch.nn.Module:
    model = Net()
    data = TensorDataset(torch.cat(make_inputs(8)))
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=10, sampler=dist.get_sampler(data)),
        max_duration=duration,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=[
            GradientClipping("norm", 0.5),
            LayerFreezing(freeze_start=0.0, freeze_level=0.5),
        ],
        device="cpu",
        device_train_microbatch_size=5,
        save_folder="checkpoints",
        save_overwrite=True,
        load_path=load,
        load_weights_only=True,  # the optimizer of frozen layers cannot be loaded
        run_name="run",
        progress_bar=False,
        seed=1,
    )
    trainer.fit()
    state = trainer.state.model
    return getattr(state, "module", state)


os.environ.setdefault("NODE_RANK", "0")  # as Composer's own launcher sets it
fit("2ep", None)
report(fit("4ep", "checkpoints/latest-rank0.pt"))
leave()
