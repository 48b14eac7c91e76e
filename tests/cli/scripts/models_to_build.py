"""Build functions, valid and invalid, for commands that take module:function."""

from __future__ import annotations

import sys

import torch
from torch import nn


def mlp() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 512), nn.Linear(512, 4))
    return model, torch.randn(8, 64)


def with_attribute() -> nn.Module:
    model = nn.Linear(6, 3)
    model.example_input = torch.randn(4, 6)
    return model


def without_input() -> nn.Module:
    return nn.Linear(6, 3)


def frozen() -> nn.Module:
    return nn.Linear(6, 3).requires_grad_(False)


def not_a_module() -> int:
    return 3


def raises() -> nn.Module:
    raise RuntimeError("no weights\nto be found")


def exits() -> nn.Module:
    sys.exit(0)
