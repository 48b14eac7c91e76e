"""Lightning, manual optimization: a generator and a discriminator alternate in each step."""

import lightning.pytorch as lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_STEPS = 4


class Gan(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], number: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        made = self.generator(torch.randn(len(real), 4))

        self.toggle_optimizer(for_generator)
        self.manual_backward(nn.functional.softplus(-self.discriminator(made)).mean())
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        told_real = nn.functional.softplus(-self.discriminator(real)).mean()
        told_made = nn.functional.softplus(self.discriminator(made.detach())).mean()
        self.manual_backward(told_real + told_made)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        parts = (self.generator, self.discriminator)
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=DDPStrategy(find_unused_parameters=True, process_group_backend="gloo"),
    max_steps=2 * NUM_STEPS,  # counts the steps of both optimizers
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Gan(), DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8))
