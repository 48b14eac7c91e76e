"""mmengine: both of its wrappers, with an optimizer wrapper that accumulates and clips."""

from __future__ import annotations

from typing import Any

import torch
from common import loss_of, make_inputs, make_model, process_group, report
from mmengine.model import (
    BaseModel,
    MMDistributedDataParallel,
    MMSeparateDistributedDataParallel,
    is_model_wrapper,
)
from mmengine.optim import OptimWrapper, OptimWrapperDict
from torch import nn


class Whole(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        output = self.layers(inputs)
        return {"loss": loss_of(output)} if mode == "loss" else output


class Parts(BaseModel):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(6, 6)
        self.discriminator = make_model()

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> Any:
        return self.discriminator(self.generator(inputs))

    def train_step(self, data: torch.Tensor, optim: OptimWrapperDict) -> dict[str, torch.Tensor]:
        self.discriminator.requires_grad_(False)
        with optim["generator"].optim_context(self.generator):
            loss = loss_of(self(data))
        optim["generator"].update_params(loss)
        self.discriminator.requires_grad_(True)
        with optim["discriminator"].optim_context(self.discriminator):
            other = -loss_of(self.discriminator(self.generator(data).detach()))
        optim["discriminator"].update_params(other)
        return {"loss": loss}


def optim_of(module: nn.Module, num_micro_steps: int) -> OptimWrapper:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    clip = {"max_norm": 0.5}
    return OptimWrapper(optimizer, accumulative_counts=num_micro_steps, clip_grad=clip)


def whole() -> None:
    model = MMDistributedDataParallel(Whole(), broadcast_buffers=False)
    assert is_model_wrapper(model)
    optim = optim_of(model, 3)
    optim.initialize_count_status(model, init_counts=0, max_counts=6)
    for inputs in make_inputs(6):
        model.train_step({"inputs": inputs}, optim)
    report(model.module)


def parts() -> None:
    model = MMSeparateDistributedDataParallel(Parts())
    model.train()
    inner = model.module
    optim = OptimWrapperDict(
        generator=optim_of(inner.generator, 1), discriminator=optim_of(inner.discriminator, 1)
    )
    for inputs in make_inputs(4):
        model.train_step(inputs, optim)
    report(inner)


with process_group():
    whole()
    parts()
