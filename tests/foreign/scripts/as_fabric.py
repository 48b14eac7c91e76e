"""Lightning Fabric, by hand: a wrapper around the wrapper, autocast, and unwrapped state dicts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import loss_of, make_inputs, make_model, process_group, report, save
from torch import nn
from torch.nn.parallel.distributed import DistributedDataParallel

NUM_MICRO_STEPS = 3


class Setup(nn.Module):
    """Holds the wrapper and the user's module, and runs the wrapper under autocast."""

    def __init__(self, wrapper: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self.wrapper = wrapper
        self.original = original

    def forward(self, *args: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.wrapper(*args).float()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.original.state_dict(*args, **kwargs)


def local(setup: Setup, enabled: bool) -> AbstractContextManager[None]:
    assert isinstance(setup.wrapper, DistributedDataParallel)
    return setup.wrapper.no_sync() if enabled else nullcontext()


def unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module


def train(setup: Setup, optimizer: torch.optim.Optimizer, first: int) -> None:
    for number, inputs in enumerate(make_inputs(9, first)):
        is_last = (number + 1) % NUM_MICRO_STEPS == 0
        with local(setup, enabled=not is_last):
            (loss_of(setup(inputs)) / NUM_MICRO_STEPS).backward()
        if is_last:
            norm = nn.utils.clip_grad_norm_(setup.wrapper.parameters(), 0.1)
            assert norm.isfinite()
            optimizer.step()
            optimizer.zero_grad()


with process_group():
    file = Path("fabric.ckpt")
    module = make_model()
    setup = Setup(DistributedDataParallel(module=module, device_ids=None), module)
    optimizer = torch.optim.Adam(setup.parameters(), lr=0.01)
    train(setup, optimizer, 0)
    model_state = unwrapped(setup.wrapper).state_dict()
    assert list(model_state) == list(setup.state_dict())
    save(file, model=model_state, optimizer=optimizer.state_dict())

    module = make_model()
    setup = Setup(DistributedDataParallel(module, gradient_as_bucket_view=True), module)
    optimizer = torch.optim.Adam(setup.parameters(), lr=0.01)
    checkpoint = torch.load(file, weights_only=True)
    unwrapped(setup.wrapper).load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(setup, optimizer, 9)
    report(module)
