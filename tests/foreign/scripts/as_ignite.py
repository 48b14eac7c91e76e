"""ignite, by hand: each micro-batch averages; a moving average of weights; checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from common import loss_of, make_inputs, make_model, process_group, report, save
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

NUM_MICRO_STEPS = 2


def auto_model(model: nn.Module, **options: object) -> nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model, **options)


def unwrap(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else model


class WeightAverage:
    """An exponential moving average of the weights of a wrapped model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(unwrap(model))
        for param in self.model.parameters():
            param.detach_()
        self.model.eval()

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        pairs = zip(self.model.parameters(), unwrap(model).parameters(), strict=True)
        for average, param in pairs:
            average.mul_(0.9).add_(param, alpha=0.1)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: WeightAverage, first: int
) -> None:
    """Accumulates without ``no_sync()``: each backward averages, and gradients are added."""
    for iteration, inputs in enumerate(make_inputs(6, first), start=1):
        if (iteration - 1) % NUM_MICRO_STEPS == 0:
            optimizer.zero_grad()
        model.train()
        loss = loss_of(model(inputs)) / NUM_MICRO_STEPS
        loss.backward()
        if iteration % NUM_MICRO_STEPS == 0:
            nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            average.update(model)
        assert isinstance(loss.item(), float)


with process_group():
    file = Path("ignite.pt")
    model = auto_model(make_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = WeightAverage(model)
    train(model, optimizer, average, 0)
    save(
        file,
        model=unwrap(model).state_dict(),
        average=average.model.state_dict(),
        optimizer=optimizer.state_dict(),
    )

    model = auto_model(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = WeightAverage(model)
    state = torch.load(file, weights_only=True)
    unwrap(model).load_state_dict(state["model"])
    average.model.load_state_dict(state["average"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, average, 6)
    report(unwrap(model))
    report(average.model)
