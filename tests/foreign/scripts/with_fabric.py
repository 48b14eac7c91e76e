"""Lightning Fabric: accumulates, clips, saves and loads."""

from __future__ import annotations

from pathlib import Path

import lightning
import torch
from common import leave, loss_of, make_inputs, make_model, report

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
fabric.launch()
file = Path("fabric.ckpt").resolve()
for first in (0, 6):
    module = make_model()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    model, optimizer = fabric.setup(module, optimizer)
    if first:
        fabric.load(file, {"model": model, "optimizer": optimizer})
    for number, inputs in enumerate(make_inputs(6, first), start=1):
        with fabric.no_backward_sync(model, enabled=number % 2 != 0):
            fabric.backward(loss_of(model(inputs)))
        if number % 2 == 0:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    fabric.save(file, {"model": model, "optimizer": optimizer})
    fabric.barrier()
report(module)
leave()
