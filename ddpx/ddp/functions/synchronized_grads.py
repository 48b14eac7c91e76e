"""``torch.autograd.grad`` with a mean over ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx.comm.collectives import all_reduce
from ddpx.comm.process_group import world_size
from ddpx.params.dtensors import local_part

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)


def average_grads(
    grads: Sequence[torch.Tensor | None],
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None,
) -> tuple[torch.Tensor | None, ...]:
    """Averages ``grads`` over the ranks of ``group``. A collective call.

    Args:
        grads: This rank's gradients of ``tensors``. None if this rank did not use the tensor.
        tensors: The differentiated tensors.
        device: The device of tensors that the group can send.
        group: The ranks to average over.
        reduce_dtype: The dtype of sums of floating-point gradients. None: the gradient's dtype.

    Returns:
        A mean for each tensor. None if no rank used the tensor. If gradients of the ranks differ in
        their dtype, the mean has a dtype that can hold all of them.
    """
    uses = torch.tensor([_use(grad) for grad in grads], dtype=torch.float32, device=device)
    all_reduce(uses, group)
    averaged: list[torch.Tensor | None] = []
    for grad, tensor, (sparse, *users) in zip(grads, tensors, uses.tolist(), strict=True):
        used = [dtype for dtype, number in zip(_DTYPES, users, strict=True) if number]
        if not used:
            averaged.append(None)
            continue
        dtype = functools.reduce(torch.promote_types, used)
        local = torch.zeros_like(tensor, dtype=dtype) if grad is None else grad.to(dtype)
        # Ranks can add sparse tensors only if every rank has one.
        if local.is_sparse and sparse < world_size(group):
            local = local.to_dense()
        averaged.append(_average(local, group, reduce_dtype))
    return tuple(averaged)


def _use(grad: torch.Tensor | None) -> list[float]:
    """Whether the gradient is sparse, and whether it has each of the dtypes."""
    if grad is None:
        return [0.0] * (1 + len(_DTYPES))
    return [float(grad.is_sparse), *(float(grad.dtype is dtype) for dtype in _DTYPES)]


def _average(
    local: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None
) -> torch.Tensor:
    dtype = reduce_dtype if reduce_dtype and local.is_floating_point() else local.dtype
    mean = (local.to(dtype) * (1 / world_size(group))).detach()
    if not mean.is_sparse:
        # A copy has memory, also of a lazy tensor of zeros.
        mean = mean.clone(memory_format=torch.contiguous_format)
    real = torch.view_as_real(mean) if mean.is_complex() and not mean.is_sparse else mean
    all_reduce(local_part(real), group)
    return mean.to(local.dtype)
