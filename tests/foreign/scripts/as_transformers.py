"""The Hugging Face Trainer, by hand: unused parameters, checkpointed layers, outputs in a dict."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import nullcontext
from pathlib import Path

import torch
from common import loss_of, make_inputs, process_group, report, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as run_checkpointed

NUM_MICRO_STEPS = 2


class Output(OrderedDict[str, torch.Tensor]):
    """As ``ModelOutput``: values by key, and as attributes."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self[name]


class Net(nn.Module):
    """Two layers that share their weights, and a layer that no step uses."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.checkpointed = checkpointed
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.LayerNorm(6)
        if not checkpointed:
            self.pooler = nn.Linear(6, 6)

    def _layers(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(hidden))))

    def forward(self, inputs: torch.Tensor) -> Output:
        if self.checkpointed:
            hidden = run_checkpointed(self._layers, inputs, use_reentrant=False)
        else:
            hidden = self._layers(inputs)
        logits = self.norm(hidden)
        return Output(loss=loss_of(logits), logits=logits)


def unwrap(model: nn.Module) -> nn.Module:
    while isinstance(model, DistributedDataParallel):
        model = model.module
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int) -> None:
    model.train()
    batches = make_inputs(8, first)
    for number, inputs in enumerate(batches):
        is_last = (number + 1) % NUM_MICRO_STEPS == 0
        with nullcontext() if is_last else model.no_sync():
            (model(inputs=inputs).loss / NUM_MICRO_STEPS).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            model.zero_grad()
        if number == 3:
            evaluate(model, batches)


def evaluate(model: nn.Module, batches: list[torch.Tensor]) -> None:
    """Runs the wrapper in the middle of an epoch, without gradients."""
    model.eval()
    with torch.no_grad():
        assert all(model(inputs).logits.shape == inputs.shape for inputs in batches)
    model.train()


def run(checkpointed: bool) -> None:
    file = Path(f"trainer-{checkpointed}.bin")
    options = {"find_unused_parameters": not checkpointed}
    model = DistributedDataParallel(Net(checkpointed), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 0)
    save(file, model=unwrap(model).state_dict(), optimizer=optimizer.state_dict())

    model = DistributedDataParallel(Net(checkpointed), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = torch.load(file, weights_only=True)
    unwrap(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, 8)
    report(unwrap(model))


with process_group():
    run(checkpointed=False)
    run(checkpointed=True)
