"""Accelerate: compares ddpx's Accelerator with the library's own."""

import sys

import accelerate
import torch
from torch import nn
from twice import compare, inputs_of, make_model

from ddpx.integrations.accelerate import Accelerator


def train(accelerator: accelerate.Accelerator) -> nn.Module:
    module = make_model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    for inputs in inputs_of(accelerator.process_index).split(5):
        optimizer.zero_grad()
        accelerator.backward(model(inputs).square().mean())
        optimizer.step()
    return model


ours = train(Accelerator(cpu=True, backend="shm", timeline=sys.argv[1], timeline_steps=2))
theirs = train(accelerate.Accelerator(cpu=True))
compare(ours, theirs)
