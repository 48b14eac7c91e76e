"""A model in each mode, and its steps with manual finalization."""

from __future__ import annotations

from typing import Any

import pytest
import slow_ddp as ref
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DDP_HAS_IT = hasattr(DistributedDataParallel, "finalize_backward")
SMALL_CAP = 0.002
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static view": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "unused view": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "delayed": {"delays": True},
}
modes = pytest.mark.parametrize("mode", MODES)
places = pytest.mark.parametrize("place", ["after", "hook"])


class Model(nn.Module):
    """Three layers behind a product, whose backward comes last. ``spare`` is used in odd steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.spare = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.first(x * 1.0))
        hidden = torch.tanh(self.second(hidden))
        return self.third(self.spare(hidden) if spare else hidden)


def wrap_model(cls: Any, mode: str, manual: bool, **further: Any) -> Any:
    torch.manual_seed(0)
    options = dict(MODES[mode])
    module = Model()
    if options.pop("delays", False):
        options["delay_all_reduce_named_params"] = [("third.weight", module.third.weight)]
        options["param_to_hook_all_reduce"] = module.second.weight
    if not options.get("find_unused_parameters"):
        module.spare.requires_grad_(False)
    model = cls(module, bucket_cap_mb=SMALL_CAP, **options, **further)
    if manual:
        model.require_manual_backward_finalization = True
    return model


def run_backward(model: Any, x: torch.Tensor, loss: torch.Tensor, place: str) -> None:
    """A backward that a hook finalizes if it may, or the script afterwards."""
    in_hook = place == "hook" and not model.should_finalize_after_backward
    if in_hook:
        x.register_hook(lambda _: model.finalize_backward())
    loss.backward()
    if not in_hook:
        model.finalize_backward()


def train(cls: Any, mode: str, place: str, manual: bool, zeros: bool) -> list[torch.Tensor]:
    model = wrap_model(cls, mode, manual)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for number in range(6):
        ref.seed(number)
        optimizer.zero_grad(set_to_none=not zeros)
        x = torch.randn(6, 16, requires_grad=True)
        if number == 3:
            with model.no_sync():
                model(torch.randn(6, 16)).square().mean().backward()
        spare = number % 2 == 1 and "unused" in mode
        loss = model(x, spare).square().mean()
        if manual:
            run_backward(model, x, loss, place)
        else:
            loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


def run_step(model: Any) -> None:
    model(torch.randn(6, 16)).sum().backward()
