"""An operation whose backward raises."""

from __future__ import annotations

import torch

TEXT = "user code failed"


class Raises(torch.autograd.Function):
    """Returns a copy. Raises in backward."""

    @staticmethod
    def forward(context: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: object, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(TEXT)
