"""Composer, by hand: three ways to average micro-batches, closures, and layers that freeze."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from common import loss_of, make_inputs, make_model, process_group, report, save
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel

NUM_MICRO_BATCHES = 3


def context(model: nn.Module, strategy: str, is_final: bool) -> AbstractContextManager[None]:
    local = strategy == "forced" or (strategy == "single" and not is_final)
    return model.no_sync() if local else nullcontext()


def average(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad = param.grad / dist.get_world_size()


def closure_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], strategy: str
) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for number, inputs in enumerate(batches, start=1):
            with context(model, strategy, number == len(batches)):
                loss = loss_of(model(inputs)) / len(batches)
                loss.backward()
            total += loss.detach()
        if strategy == "forced":
            average(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return total

    return closure


def freeze(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Freezes the first layer, and removes its params from the optimizer."""
    frozen = list(model.module[0].parameters())
    for param in frozen:
        param.requires_grad = False
        optimizer.state.pop(param, None)
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is f for f in frozen)]


def train(strategy: str, freezes: bool) -> None:
    file = Path(f"{strategy}.pt")
    model = DistributedDataParallel(make_model(), find_unused_parameters=strategy == "multi")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if freezes and step == 2:
            freeze(model, optimizer)
        batches = make_inputs(NUM_MICRO_BATCHES, step * NUM_MICRO_BATCHES)
        optimizer.step(closure_of(model, optimizer, batches, strategy))
    state = model.state_dict()
    consume_prefix_in_state_dict_if_present(state, "module.")
    save(file, model=state)

    module = make_model()
    module.load_state_dict(torch.load(file, weights_only=True)["model"])
    model = DistributedDataParallel(module, find_unused_parameters=strategy == "multi")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4, 6):
        batches = make_inputs(NUM_MICRO_BATCHES, step * NUM_MICRO_BATCHES)
        optimizer.step(closure_of(model, optimizer, batches, strategy))
    report(module)


with process_group():
    train("single", freezes=False)
    train("multi", freezes=False)
    train("multi", freezes=True)
    train("forced", freezes=False)
