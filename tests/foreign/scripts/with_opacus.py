"""Opacus: gradients of each sample, clipped, by hooks on layers of a wrapped model. No noise."""

from __future__ import annotations

import torch
from common import make_inputs, process_group, report
from opacus import PrivacyEngine
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def make_model() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def train(clipping: str, max_grad_norm: float | list[float]) -> nn.Module:
    wrapper = make_model()
    inputs = torch.cat(make_inputs(8))
    classes = torch.arange(len(inputs)) % 3
    model, optimizer, batches = PrivacyEngine().make_private(
        module=wrapper,
        optimizer=torch.optim.SGD(wrapper.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(inputs, classes), batch_size=5),
        noise_multiplier=0.0,
        max_grad_norm=max_grad_norm,
        clipping=clipping,
        poisson_sampling=False,
    )
    for batch, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return wrapper


with process_group():
    report(train("flat", 1.0))
    report(train("per_layer", [1.0] * 4))
