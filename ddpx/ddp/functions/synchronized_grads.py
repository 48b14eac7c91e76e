"""``torch.autograd.grad`` with a mean over ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ddpx.comm.collectives import all_reduce, flattened_together
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

_CALL_BYTES = 1 << 20  # smaller tensors share a collective call


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
    dtypes: list[torch.dtype | None] = []
    sums: list[torch.Tensor] = []
    for grad, tensor, (sparse, *users) in zip(grads, tensors, uses.tolist(), strict=True):
        used = [dtype for dtype, number in zip(_DTYPES, users, strict=True) if number]
        dtype = functools.reduce(torch.promote_types, used) if used else None
        dtypes.append(dtype)
        if dtype is None:
            continue
        local = torch.zeros_like(tensor, dtype=dtype) if grad is None else grad.to(dtype)
        # Ranks can add sparse tensors only if every rank has one.
        if local.is_sparse and sparse < world_size(group):
            local = local.to_dense()
        sums.append(_summand(local, group, reduce_dtype))
    _add_over_ranks(sums, group)
    means = iter(sums)
    return tuple(None if dtype is None else next(means).to(dtype) for dtype in dtypes)


def _use(grad: torch.Tensor | None) -> list[float]:
    """Whether the gradient is sparse, and whether it has each of the dtypes."""
    if grad is None:
        return [0.0] * (1 + len(_DTYPES))
    if grad.dtype not in _DTYPES:
        raise TypeError(
            f"synchronized_grads() cannot average a gradient of {grad.dtype}, because no backend "
            "adds it over ranks. Use a parameter of a wider dtype."
        )
    return [float(grad.is_sparse), *(float(grad.dtype is dtype) for dtype in _DTYPES)]


def _summand(
    local: torch.Tensor, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None
) -> torch.Tensor:
    """This rank's part of the mean: a new tensor in the dtype of sums."""
    dtype = reduce_dtype if reduce_dtype and local.is_floating_point() else local.dtype
    part = (local.to(dtype) * (1 / world_size(group))).detach()
    # A copy has memory, also of a lazy tensor of zeros.
    return part if part.is_sparse else part.clone(memory_format=torch.contiguous_format)


def _add_over_ranks(summands: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replaces each tensor by its sum over ranks. Small dense tensors share collective calls."""
    dense = []
    for summand in summands:
        if summand.is_sparse:
            all_reduce(summand, group)
        else:
            dense.append(
                local_part(torch.view_as_real(summand) if summand.is_complex() else summand)
            )
    for together in flattened_together(dense, _CALL_BYTES):
        if len(together) == 1:
            all_reduce(together[0], group)
            continue
        flat = all_reduce(torch.cat([tensor.reshape(-1) for tensor in together]), group)
        parts = flat.split([tensor.numel() for tensor in together])
        for tensor, part in zip(together, parts, strict=True):
            tensor.copy_(part.view_as(tensor))
