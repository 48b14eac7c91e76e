"""Accelerate: two forwards in no_sync. The second backward must synchronize."""

import torch
from accelerate import Accelerator
from torch import nn

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)

for step in range(4):
    torch.manual_seed(10 * step + accelerator.process_index)
    first, second = torch.randn(2, 5, 6)
    with accelerator.no_sync(model):
        losses = [model(x).square().mean() for x in (first, second)]
    accelerator.backward(losses[0])
    with accelerator.trigger_sync_in_backward(model):
        accelerator.backward(losses[1])
    optimizer.step()
    optimizer.zero_grad()

accelerator.end_training()
