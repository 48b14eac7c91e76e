"""``torch.autograd.grad`` with a mean over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx.comm.collectives import all_reduce
from ddpx.comm.process_group import world_size
from ddpx.params.dtensors import local_part


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
        A mean for each tensor. None if no rank used the tensor.
    """
    users = torch.tensor(
        [[float(g is not None), float(g is not None and g.is_sparse)] for g in grads],
        dtype=torch.float32,
        device=device,
    )
    all_reduce(users, group)
    averaged: list[torch.Tensor | None] = []
    for grad, tensor, (used, sparse) in zip(grads, tensors, users.tolist(), strict=True):
        if used == 0:
            averaged.append(None)
            continue
        local = torch.zeros_like(tensor) if grad is None else grad
        # Ranks can add sparse tensors only if every rank has one.
        if local.is_sparse and sparse < world_size(group):
            local = local.to_dense()
        averaged.append(_average(local, group, reduce_dtype))
    return tuple(averaged)


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
