"""``torch.autograd.grad`` with a mean over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

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
    used = torch.tensor([float(grad is not None) for grad in grads], device=device)
    dist.all_reduce(used, group=group)
    averaged: list[torch.Tensor | None] = []
    for grad, tensor, num_users in zip(grads, tensors, used.tolist(), strict=True):
        if num_users == 0:
            averaged.append(None)
            continue
        local = torch.zeros_like(tensor) if grad is None else grad
        dtype = reduce_dtype if reduce_dtype and local.is_floating_point() else local.dtype
        mean = (local.to(dtype) * (1 / world_size(group))).detach().contiguous()
        real = torch.view_as_real(mean) if mean.is_complex() else mean
        dist.all_reduce(local_part(real), group=group)
        averaged.append(mean.to(local.dtype))
    return tuple(averaged)
