"""Parameters and buffers that are DTensors over another dimension of the mesh.

The reducer averages the gradient of the local shard over the data-parallel ranks. The module keeps
its DTensors. Optimizers, ``clip_grad_norm_``, ``state_dict()`` and ``torch.distributed.checkpoint``
therefore work as without a wrapper.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ddpx import errors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # no DTensor exists if nothing imported it
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local shard of a DTensor, in the same memory. Returns other tensors unchanged."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


class Shard:
    """The local shard of a parameter. The reducer averages the gradient of this leaf tensor.

    While the shard exists, gradients of the parameter are redistributed to the placements of the
    parameter before they are accumulated.

    Args:
        param: A parameter that is a DTensor.
    """

    def __init__(self, param: DTensor) -> None:
        self._param = param
        self.tensor = local_part(param).detach().requires_grad_()
        self.tensor.grad_dtype = None  # the parameter's grad_dtype decides
        placed = partial(_placed, placements=param.placements)
        weakref.finalize(self, param.register_hook(placed).remove)

    def pull(self) -> None:
        """Sets ``tensor.grad`` to the local part of the parameter's gradient."""
        with torch.no_grad():
            grad: Any = self._param.grad
            self.tensor.grad = (
                None if grad is None else local_part(_placed(grad, self._param.placements))
            )

    def push(self) -> None:
        """Sets the parameter's gradient to a DTensor whose local part is ``tensor.grad``.

        ``tensor.grad`` is None afterwards. The memory is freed when the user sets ``param.grad`` to
        None.
        """
        from torch.distributed.tensor import DTensor

        param, local, grad = self._param, self.tensor.grad, self._param.grad
        self.tensor.grad = None
        if local is None:
            param.grad = None
        elif grad is None or local_part(grad) is not local:
            with torch.no_grad():
                param.grad = DTensor.from_local(
                    local,
                    param.device_mesh,
                    param.placements,
                    run_check=False,
                    shape=param.shape,
                    stride=param.stride(),
                )


def _placed(grad: Any, placements: Sequence[Any]) -> Any:
    """Redistributes ``grad`` to these placements. Partial values are summed over ranks."""
    if not is_dtensor(grad) or tuple(grad.placements) == tuple(placements):
        return grad
    return grad.redistribute(placements=placements)


def check_dtensors(module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup) -> None:
    """Checks that the ranks of ``group`` may average and broadcast the tensors of ``module``.

    The check includes frozen parameters and buffers, because construction broadcasts them.

    Args:
        module: The module to wrap.
        ignored: Names of parameters and buffers that the wrapper ignores.
        group: The process group of the wrapper.

    Raises:
        ValueError: ``fully_shard()`` or ``FullyShardedDataParallel`` manages a part of the
            module. Or ranks of ``group`` hold different shards of a parameter or buffer.
    """
    names = [name for name in params_under_fsdp(module) if name not in ignored]
    if names:
        raise ValueError(
            "fully_shard() or FullyShardedDataParallel already shards and reduces "
            f"{errors.count_names(names, 'parameter')}. "
            "ReducerDDP cannot wrap a module with such parameters. To replicate over one mesh "
            "dimension and shard over another, pass a mesh with both dimensions to "
            "fully_shard(module, mesh=...) and do not use ReducerDDP. If the mesh of fully_shard() "
            "has the data-parallel dimension already, wrap only the other parts of the model."
        )
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sharded = {n: t for n, t in tensors.items() if is_dtensor(t) and n not in ignored}
    if not sharded:
        return
    ranks = set(dist.get_process_group_ranks(group))
    names = [name for name, tensor in sharded.items() if _is_split_over(tensor, ranks)]
    if names:
        raise ValueError(
            "the ranks of the process group hold different shards of "
            f"{errors.count_names(names, 'DTensor')}. Different shards must not be averaged. Pass "
            "the data-parallel dimension of the mesh: ReducerDDP(model, device_mesh=mesh['dp'])."
        )


def params_under_fsdp(module: nn.Module) -> list[str]:
    """Names of parameters of FSDP modules.

    These parameters may be plain tensors between a forward and its backward.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    flat = getattr(fsdp, "FlatParameter", ())
    by_call = [m for m in module.modules() if isinstance(m, fsdp.FSDPModule)]
    under_fsdp = {id(param) for m in by_call for param in m.parameters()}
    for m in fsdp.FullyShardedDataParallel.fsdp_modules(module):
        under_fsdp |= {*map(id, m.parameters())} - {*map(id, m._ignored_params)}
    return [
        name
        for name, param in module.named_parameters()
        if id(param) in under_fsdp or isinstance(param, flat)
    ]


def _is_split_over(param: Any, ranks: set[int]) -> bool:
    mesh = param.device_mesh
    return any(
        not placement.is_replicate()
        and len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(dim)))) > 1
        for dim, placement in enumerate(param.placements)
    )
