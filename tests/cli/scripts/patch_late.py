"""Plain Python: libraries and torch's own modules have imported DDP before its replacement."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
from library import unwrap, wrap
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpx import ReducerDDP
from ddpx.integrations.patch import patch_ddp


class TooEarly(TorchDDP):
    pass


def main() -> None:
    store = dist.FileStore(sys.argv[1], 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    assert type(wrap(nn.Linear(6, 3))) is TorchDDP
    original = TorchDDP  # only names in modules are replaced, and this is a local name
    patch_ddp()
    assert TorchDDP is ReducerDDP
    model = wrap(nn.Linear(6, 3))
    assert type(model) is ReducerDDP
    assert isinstance(unwrap(model), nn.Linear)
    state_dict = torch.distributed.checkpoint.state_dict
    assert set(state_dict.get_model_state_dict(model)) == {"weight", "bias"}
    made = original(nn.Linear(6, 3))
    assert type(made) is ReducerDDP
    replicated = replicate(nn.Linear(6, 3))  # replicate() runs parts of torch's own DDP
    replicated(torch.ones(2, 6)).sum().backward()
    assert type(replicate.state(replicated)._ddp) is original
    try:
        TooEarly(nn.Linear(6, 3))
    except RuntimeError as error:
        print(error)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
