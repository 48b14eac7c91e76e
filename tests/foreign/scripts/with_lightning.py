"""Lightning's Trainer: accumulates, clips, saves, and resumes in another Trainer."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
import torch.distributed as dist
from common import leave, loss_of, make_inputs, make_model, report
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        return loss_of(self.inner(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def fit(num_steps: int, checkpoint: Path | None) -> lightning.Trainer:
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=num_steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )
    data = torch.cat(make_inputs(16))
    trainer.fit(Module(), DataLoader(TensorDataset(data), batch_size=5), ckpt_path=checkpoint)
    return trainer


file = Path("lightning.ckpt").resolve()
fit(2, None).save_checkpoint(file)
dist.barrier()
report(fit(4, file).lightning_module)
leave()
