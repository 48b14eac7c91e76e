"""Hugging Face's Trainer with ``average="weights"``, without a training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ddpx import ReducerDDP


@pytest.fixture(autouse=True)
def _need_transformers() -> None:
    pytest.importorskip("transformers")


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(inputs).sum()}


def _compute_loss(folder: Path) -> None:
    """The batch has no labels, so the number of items is unknown."""
    import transformers

    from ddpx.integrations.transformers import TrainerMixin, TrainingArguments

    class Trainer(TrainerMixin, transformers.Trainer):
        pass

    args = TrainingArguments(str(folder), use_cpu=True, report_to="none", average="weights")
    trainer = Trainer(_Model(), args)
    model = ReducerDDP(_Model(), average="weights")
    inputs = {"inputs": torch.ones(3, 4)}
    with pytest.raises(RuntimeError, match="needs the number of items of each batch"):
        trainer.compute_loss(model, inputs)
    model.eval()
    with torch.no_grad():
        assert trainer.compute_loss(model, inputs).ndim == 0


def test_only_training_needs_the_number_of_items(ranks, tmp_path: Path) -> None:
    ranks(1).run(_compute_loss, tmp_path)


@pytest.mark.parametrize("average", ["mean", "sum", "weights"])
def test_the_trainer_averages_tokens_only_with_means(tmp_path: Path, average: str) -> None:
    from ddpx.integrations.transformers import TrainingArguments

    args = TrainingArguments(
        str(tmp_path), use_cpu=True, average=average, average_tokens_across_devices=True
    )
    assert args.average_tokens_across_devices == (average == "mean")
