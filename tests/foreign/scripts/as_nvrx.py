"""The in-process restart of NVRx, by hand.

The model and the optimizer live through restarts. After a fault, each rank destroys its process
group, makes another one over the same store, and wraps the same model again.
"""

from __future__ import annotations

import datetime
import gc
import os
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from common import leave, loss_of, make_inputs, make_model, report
from torch import nn

NUM_STEPS = 9
# The steps with a fault, and the ranks that raise. The other ranks wait for gradients.
FAULTS = {2: (0, 1), 5: (1,)}


class Fault(Exception):
    pass


@dataclass
class Checkpoint:
    """The last checkpoint, and the faults that have happened."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    step: int = 0
    faults: list[int] = field(default_factory=list)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.model = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.optimizer, self.step = optimizer.state_dict(), step


def train(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    model.load_state_dict(checkpoint.model)
    optimizer.load_state_dict(checkpoint.optimizer)
    for step in range(checkpoint.step, NUM_STEPS):
        (inputs,) = make_inputs(1, step)
        model.zero_grad()
        loss = loss_of(wrapped(inputs))
        if step in FAULTS and step not in checkpoint.faults:
            checkpoint.faults.append(step)
            if dist.get_rank() in FAULTS[step]:
                raise Fault(f"fault in step {step}")
        loss.backward()
        optimizer.step()
        if step % 2:
            checkpoint.take(model, optimizer, step + 1)


def restarted(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> bool:
    """Whether a training failed."""
    try:
        train(model, optimizer, checkpoint)
    except (Fault, RuntimeError) as error:
        print(f"rank {dist.get_rank()} restarts after {type(error).__name__}: {error}", flush=True)
        return True
    return False


base = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    is_master=False,
    timeout=datetime.timedelta(seconds=60),
)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = Checkpoint({}, {})
checkpoint.take(model, optimizer, 0)
for iteration in range(len(FAULTS) + 1):
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"iteration {iteration}", base),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    if restarted(model, optimizer, checkpoint):
        dist.destroy_process_group()
        gc.collect()  # closes the connections, which tells a rank that waits
assert dist.is_initialized() and checkpoint.faults == list(FAULTS)
report(model)
dist.destroy_process_group()
leave()
