"""Trains twice on each rank, with DDP and with ReducerDDP, and compares the weights."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

NUM_STEPS = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def inputs_of(rank: int) -> torch.Tensor:
    """The inputs of all steps: NUM_STEPS * 5 samples."""
    return torch.randn(NUM_STEPS * 5, 6, generator=torch.Generator().manual_seed(1 + rank))


def compare(ours: nn.Module, theirs: nn.Module) -> None:
    """Compares two trained models, both as the library wrapped them."""
    assert isinstance(ours, ReducerDDP), type(ours)
    assert type(theirs) is DistributedDataParallel, type(theirs)
    start = dict(make_model().named_parameters())
    found = _weights(theirs)
    for name, weight in _weights(ours).items():
        assert torch.equal(weight, found[name]), name
        assert not torch.equal(weight, start[name]), f"{name} was not trained"
    print(f"identical over {dist.get_backend()}", flush=True)


def _weights(wrapper: nn.Module) -> dict[str, torch.Tensor]:
    """The weights by their names in make_model()."""
    params = wrapper.module.named_parameters()
    return {name.removeprefix("inner."): param.detach() for name, param in params}
