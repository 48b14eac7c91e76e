"""The script that ``ddpx parity module:function`` trains: a few steps of SGD in DDP."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpx.cli.build import build
from ddpx.ddp.user_module import nested

_LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Training:
    """The settings of the training.

    Attributes:
        target: ``module:function``, which returns the model.
        num_steps: The number of optimizer steps.
        backend: The backend of the process group. With NCCL, the model is on the rank's GPU.
        options: The arguments of DDP.
    """

    target: str
    num_steps: int
    backend: str
    options: dict[str, Any] = field(default_factory=dict)

    def to_word(self) -> str:
        """The settings as an argument of the command line."""
        return json.dumps(asdict(self))


def main() -> None:
    """Trains the model."""
    training = Training(**json.loads(sys.argv[1]))
    dist.init_process_group(training.backend)
    torch.manual_seed(0)
    module, example = build(training.target)
    options = dict(training.options)
    device = torch.device("cpu")
    if "nccl" in training.backend:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        options.setdefault("device_ids", [device.index])
    model = DistributedDataParallel(module.to(device), **options)
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), _LEARNING_RATE)
    inputs = example if isinstance(example, (tuple, list)) else (example,)
    for step in range(training.num_steps):
        torch.manual_seed(1 + step * dist.get_world_size() + dist.get_rank())
        optimizer.zero_grad()
        output = model(*(_vary(value, device) for value in inputs))
        outputs = [tensor for tensor in nested.tensors_in(output) if tensor.requires_grad]
        means = [tensor.abs().square().float().mean() for tensor in outputs]
        torch.stack(means).sum().backward()
        optimizer.step()
    dist.destroy_process_group()


def _vary(value: Any, device: torch.device) -> Any:
    """Varies inputs between ranks and steps, so that a missing average changes the result."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point() or value.is_complex():
        varied = value + torch.randn(value.shape, dtype=value.dtype, device=value.device)
    else:  # a permutation keeps token and class numbers valid
        places = torch.randperm(value.numel(), device=value.device)
        varied = value.flatten()[places].view_as(value)
    return varied.to(device)


if __name__ == "__main__":
    main()
