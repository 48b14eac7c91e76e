"""Two backwards of one forward at once, each on its thread."""

from __future__ import annotations

import threading

import pytest
import slow_ddp as ref
import torch
from torch import nn


class TwoInputs(nn.Module):
    """Two outputs with one layer each, and a layer without use."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 6)
        self.right = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(x)


def _backwards_at_once(model: nn.Module) -> None:
    """Each output has a backward on its own thread. Both run when a gradient arrives."""
    outputs = [output * 1.0 for output in model(ref.data())]
    both = threading.Barrier(2, timeout=10)
    errors: list[Exception] = []

    def wait(_: torch.Tensor) -> None:
        both.wait()

    def run(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except Exception as error:
            errors.append(error)

    module = model.module
    hooks = [layer.weight.register_hook(wait) for layer in (module.left, module.right)]
    threads = [threading.Thread(target=run, args=(ref.loss_of(output),)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for hook in hooks:
        hook.remove()
    assert not errors, errors
    if isinstance(model, ref.SlowDDP):
        model.average()


def _check_two_threads(mode: str) -> None:
    ours, slow = ref.make_pair(TwoInputs, mode)
    ref.check_steps(ours, slow, lambda model, _: _backwards_at_once(model), 4)


@pytest.mark.parametrize("mode", ["unused", "unused-view"])
def test_two_backwards_at_once(ranks, mode, world):
    """The graph of each output leads to a part of the parameters. DDP raises."""
    ref.on_ranks(ranks, world, _check_two_threads, mode)
