"""mmengine, by hand: classes that are derived from DDP, with steps of their own.

Accumulation runs forward in ``no_sync()``, and backward outside. A second class is derived from DDP
only for its name: it wraps each part of the module, and leaves out DDP's constructor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import loss_of, make_inputs, make_model, process_group, report, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_MICRO_STEPS = 2


class OptimWrapper:
    """Decides when a step averages, clips and updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.num_calls = 0

    def is_last(self) -> bool:
        return (self.num_calls + 1) % NUM_MICRO_STEPS == 0

    @contextlib.contextmanager
    def context(self, model: nn.Module) -> Iterator[None]:
        with contextlib.nullcontext() if self.is_last() else model.no_sync():
            yield

    def update(self, loss: torch.Tensor) -> None:
        (loss / NUM_MICRO_STEPS).backward()
        if self.is_last():
            params = [p for group in self.optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(params, 0.5)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.num_calls += 1


class BaseModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, inputs: torch.Tensor, mode: str = "tensor") -> dict[str, torch.Tensor]:
        output = self.layers(inputs)
        return {"loss": loss_of(output)} if mode == "loss" else {"output": output}


class StepWrapper(DistributedDataParallel):
    """A wrapper with ``train_step`` and ``val_step``."""

    def __init__(self, module: nn.Module, detect: bool = False, **kwargs: Any) -> None:
        super().__init__(module=module, **kwargs)
        self.detect = detect

    def train_step(self, data: dict[str, Any], optim: OptimWrapper) -> dict[str, torch.Tensor]:
        with optim.context(self):
            losses = self(**data, mode="loss")
        optim.update(losses["loss"])
        if self.detect:
            assert all(param.requires_grad for param in self.parameters())
        return losses

    def val_step(self, data: dict[str, Any]) -> torch.Tensor:
        return self.module(**data)["output"]


class PartsWrapper(DistributedDataParallel):
    """Wraps each part of a module. Its own base class is not constructed."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super(DistributedDataParallel, self).__init__()
        self.module = module
        for name, part in list(module.named_children()):
            module._modules[name] = StepWrapper(part, **kwargs)

    def train(self, mode: bool = True) -> PartsWrapper:
        self.training = mode
        self.module.train(mode)
        return self


def whole() -> None:
    file = Path("mmengine.pth")
    model = StepWrapper(BaseModel(), detect=True, broadcast_buffers=False)
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    for inputs in make_inputs(8):
        model.train_step({"inputs": inputs}, optim)
    save(file, state_dict=model.module.state_dict(), optimizer=optim.optimizer.state_dict())

    model = StepWrapper(BaseModel(), find_unused_parameters=True)
    state = torch.load(file, weights_only=True)
    model.module.load_state_dict(state["state_dict"])
    optim = OptimWrapper(torch.optim.SGD(model.parameters(), lr=0.1))
    optim.optimizer.load_state_dict(state["optimizer"])
    for inputs in make_inputs(8, 8):
        model.train_step({"inputs": inputs}, optim)
    model.eval()
    assert model.val_step({"inputs": inputs}).shape == (5, 3)
    report(model.module)


def parts() -> None:
    """A generator and a discriminator, each with a wrapper, take turns."""
    module = nn.ModuleDict({"generator": nn.Linear(6, 6), "discriminator": make_model()})
    model = PartsWrapper(module, broadcast_buffers=False)
    model.train()
    generator, discriminator = module["generator"], module["discriminator"]
    for_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
    for_discriminator = torch.optim.SGD(discriminator.parameters(), lr=0.1)
    for inputs in make_inputs(4):
        discriminator.requires_grad_(False)
        loss_of(discriminator(generator(inputs))).backward()
        for_generator.step()
        for_generator.zero_grad()
        discriminator.requires_grad_(True)
        loss_of(discriminator(generator(inputs).detach())).neg().backward()
        for_discriminator.step()
        for_discriminator.zero_grad()
    report(module)


with process_group():
    whole()
    parts()
