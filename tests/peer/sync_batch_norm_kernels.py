"""The five kernels of SyncBatchNorm for other devices. torch has them for GPUs only.

They are registered with torch's dispatcher, so that torch's own SyncBatchNorm runs on them
unchanged. As the CUDA kernels, they compute statistics of half-precision inputs in single
precision.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

_library: torch.library.Library | None = None


def _accumulate_type(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _other_dims(tensor: Tensor) -> list[int]:
    return [d for d in range(tensor.dim()) if d != 1]


def _stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    values = input.to(_accumulate_type(input))
    var, mean = torch.var_mean(values, dim=_other_dims(values), unbiased=False)
    return mean, (var + eps).rsqrt()


def _gather_stats(
    input: Tensor,
    means: Tensor,
    invstds: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    weights = counts.to(means.dtype).unsqueeze(1)
    total = weights.sum()
    mean = (means * weights).sum(0) / total
    # E[x^2] - E[x]^2 around the common mean: variances within ranks, and of their means.
    squares = invstds.reciprocal().square() - eps + (means - mean).square()
    sum_squares = (squares * weights).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = sum_squares / (total - 1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return mean, (sum_squares / total + eps).rsqrt()


def _elemt(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    eps: float,
) -> Tensor:
    output = (input - _per_channel(mean, input)) * _per_channel(invstd, input)
    if weight is not None:
        output = output * _per_channel(weight, input)
    if bias is not None:
        output = output + _per_channel(bias, input)
    # to() keeps the memory format, as the kernels for CUDA do.
    return output.to(input.dtype)


def _backward_reduce(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad = grad.to(mean.dtype)
    sum_dy = grad.sum(_other_dims(grad))
    sum_dy_xmu = (grad * (input - _per_channel(mean, input))).sum(_other_dims(grad))
    dtype = mean.dtype if weight is None else weight.dtype
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(dtype), sum_dy.to(dtype)


def _backward_elemt(
    grad: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    counts: Tensor,
) -> Tensor:
    total = counts.sum()
    projection = _per_channel(sum_dy_xmu / total * invstd.square(), input)
    centered = input - _per_channel(mean, input)
    result = grad - _per_channel(sum_dy / total, input) - centered * projection
    scale = invstd if weight is None else invstd * weight
    return (result * _per_channel(scale, input)).to(input.dtype)


def install_kernels(dispatch_key: str) -> None:
    """Registers the kernels for a device without kernels of its own."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "batch_norm_stats": _stats,
        "batch_norm_gather_stats_with_counts": _gather_stats,
        "batch_norm_elemt": _elemt,
        "batch_norm_backward_reduce": _backward_reduce,
        "batch_norm_backward_elemt": _backward_elemt,
    }.items():
        _library.impl(name, kernel, dispatch_key)


def install() -> None:
    """Makes SyncBatchNorm run on CPUs."""
    install_kernels("CPU")
    forward = nn.SyncBatchNorm.forward

    def forward_on_cpu(self: nn.SyncBatchNorm, input: Tensor) -> Any:
        # forward() accepts the device types that it knows, and the one of this name.
        with mock.patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "cpu"):
            return forward(self, input)

    nn.SyncBatchNorm.forward = forward_on_cpu  # type: ignore[method-assign]
