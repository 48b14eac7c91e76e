"""``no_sync()`` around a part of a forward."""

from __future__ import annotations

import pytest
import slow_ddp as ref
import torch
from torch import nn

from ddpx import ReducerDDP


class TwoParts(nn.Module):
    """Each call runs one of two layers. The other layer gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.second = nn.Linear(6, 3)

    def forward(self, part: str, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule(part)(x)


def _check_parts(mode: str, first_inside: bool) -> None:
    """Params that only the part inside no_sync uses count when backward reaches the other part."""
    ours, slow = ref.make_pair(TwoParts, mode)

    def step(model: ref.SlowDDP | ReducerDDP, number: int) -> None:
        if first_inside:
            with model.no_sync():
                loss = ref.loss_of(model("first", ref.data()))
            loss = loss + ref.loss_of(model("second", ref.data()))
        else:
            loss = ref.loss_of(model("second", ref.data()))
            with model.no_sync():
                loss = loss + ref.loss_of(model("first", ref.data()))
        ref.backward(model, loss)

    ref.check_steps(ours, slow, step, num_steps=4)


@ref.modes
@pytest.mark.parametrize("first_inside", [True, False])
def test_parts_of_a_module(ranks, mode, first_inside):
    ref.on_ranks(ranks, 2, _check_parts, mode, first_inside)
