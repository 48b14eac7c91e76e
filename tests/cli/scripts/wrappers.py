"""Wrappers for ``ddpx parity --class``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Derived(DistributedDataParallel):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, gradient_as_bucket_view=True, **kwargs)


class Sums(nn.Module):
    """Does not derive from DDP, and does not divide the sums."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, 0)
        for param in module.parameters():
            param.register_post_accumulate_grad_hook(_sum)

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def _sum(param: torch.Tensor) -> None:
    dist.all_reduce(param.grad)
