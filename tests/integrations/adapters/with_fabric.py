"""Fabric: compares the strategy "ddpx" with "ddp"."""

import sys

import lightning
import torch
from torch import nn
from twice import compare, inputs_of, make_model

from ddpx.integrations.lightning import ReducerDDPFabricStrategy


def train(strategy: object) -> nn.Module:
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    module = make_model()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for inputs in inputs_of(fabric.global_rank).split(5):
        optimizer.zero_grad()
        fabric.backward(model(inputs).square().mean())
        optimizer.step()
    return model._forward_module


ours = train(
    ReducerDDPFabricStrategy(process_group_backend="shm", timeline=sys.argv[1], timeline_steps=2)
)
theirs = train("ddp")
compare(ours, theirs)
compare(train("ddpx"), theirs)
