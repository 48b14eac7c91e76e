"""NVRx: its in-process restart wraps a training that fails twice, on all ranks and on one rank.

NVRx reads annotations as classes, so that they are no strings here.
"""

import contextlib
import datetime
import os
from typing import Optional

import nvidia_resiliency_ext.inprocess as inprocess
import torch
import torch.distributed as dist
from common import leave, loss_of, make_inputs, make_model, report
from torch import nn

NUM_STEPS = 6
# The step of the fault, by restart, and the ranks that raise.
FAULTS = {0: (2, (0, 1)), 1: (4, (1,))}


@inprocess.Wrapper(store_kwargs={"port": int(os.environ["MASTER_PORT"]) + 2})
def train(
    base: dist.Store,
    start: dict,
    call_wrapper: Optional[inprocess.CallWrapper] = None,  # noqa: UP045
) -> nn.Module:
    assert call_wrapper is not None
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(call_wrapper.iteration), base),
        rank=rank,
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=10),
    )
    model.load_state_dict(start)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    step_of_fault, ranks = FAULTS.get(call_wrapper.iteration, (-1, ()))
    for step, inputs in enumerate(make_inputs(NUM_STEPS)):
        model.zero_grad()
        loss = loss_of(wrapped(inputs))
        if step == step_of_fault and rank in ranks:
            raise RuntimeError(f"fault in step {step}")
        loss.backward()
        optimizer.step()
    report(model)
    dist.destroy_process_group()
    return model


model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
base = dist.TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]) + 1,
    world_size=int(os.environ["WORLD_SIZE"]),
    is_master=os.environ["RANK"] == "0",
    multi_tenant=True,
    wait_for_workers=True,
)
start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
train(base, start)
base.set(f"rank {os.environ['RANK']} ended", "")
with contextlib.suppress(dist.DistNetworkError):  # rank 0 has the store, and may have left
    base.wait([f"rank {rank} ended" for rank in range(int(os.environ["WORLD_SIZE"]))])
leave()
