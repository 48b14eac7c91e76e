"""Wraps models in DDP under several names, trains each, and prints on rank 0 which class worked."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.nn.parallel.distributed
from library import unwrap, wrap
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import parallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.parallel.distributed import DistributedDataParallel


class Derived(DDP):
    """A class as libraries have it, which derives from DDP."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(*inputs) * 2


def train(model: nn.Module) -> None:
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, parameters_as_bucket_view=False
    )
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    for param in model.parameters():
        everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(everyone[0], other) for other in everyone)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    wrappers = {
        "name": DDP,
        "module of DDP": DistributedDataParallel,
        "attribute": torch.nn.parallel.DistributedDataParallel,
        "deep attribute": torch.nn.parallel.distributed.DistributedDataParallel,
        "module": parallel.DistributedDataParallel,
        "library": wrap,
        "derived": Derived,
    }
    for how, make in wrappers.items():
        model = make(nn.Linear(6, 3))
        assert isinstance(model, DDP), how
        assert isinstance(unwrap(model), nn.Linear), how
        assert how == "derived" or type(model) is DDP, how
        train(model)
        # torch calls isinstance here, to leave out the wrapper's "module.".
        assert set(get_model_state_dict(model)) == {"weight", "bias"}, how
        if dist.get_rank() == 0:
            reducer = type(model.reducer)
            print(f"{how}: {reducer.__module__}.{reducer.__name__}", flush=True)
    if dist.get_rank() == 0:
        print(f"main: {__name__}, arguments: {sys.argv[1:]}, ranks: {dist.get_world_size()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
