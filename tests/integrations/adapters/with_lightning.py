"""Lightning's Trainer: compares the strategy "ddpx" with "ddp"."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twice import NUM_STEPS, compare, inputs_of, make_model

from ddpx.integrations.lightning import ReducerDDPStrategy


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return self.inner(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(strategy: object) -> nn.Module:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=NUM_STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    wrapped: list[nn.Module] = []

    class Keep(lightning.Callback):
        def on_train_end(self, trainer: lightning.Trainer, module: nn.Module) -> None:
            wrapped.append(trainer.strategy.model)

    trainer.callbacks.append(Keep())
    data = torch.cat([inputs_of(0), inputs_of(1)])
    trainer.fit(Model(), DataLoader(TensorDataset(data), batch_size=5))
    return wrapped[0]


devices = [torch.device("cpu")]
assert ReducerDDPStrategy(None, devices).parallel_devices == devices  # Lightning's order
ours = train(
    ReducerDDPStrategy(process_group_backend="shm", timeline=sys.argv[1], timeline_steps=2)
)
theirs = train("ddp")
compare(ours, theirs)
compare(train("ddpx"), theirs)
