"""Parameters and buffers that are DTensors: of tensor parallelism, on another mesh dimension.

The reducer averages the local shard's gradient over the data-parallel ranks. The module keeps its
DTensors, so that optimizers, ``clip_grad_norm_``, ``state_dict()`` and
``torch.distributed.checkpoint`` see what they see without a wrapper.
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
    module = sys.modules.get("torch.distributed.tensor")  # not imported: there are no DTensors
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, in the same memory; another tensor as it is."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
        return local


class Shard:
    """The local shard of a parameter, as the leaf whose gradient the reducer averages.

    Args:
        param: a parameter that is a DTensor. While the shard lives, a gradient of it is brought
            into the parameter's own placements before it is accumulated.
    """

    def __init__(self, param: DTensor) -> None:
        self._param = param
        self.tensor = local_part(param).detach().requires_grad_()
        self.tensor.grad_dtype = None  # the parameter's counts
        placed = partial(_placed, placements=param.placements)
        weakref.finalize(self, param.register_hook(placed).remove)

    def pull(self) -> None:
        """Makes ``tensor.grad`` the local part of the parameter's gradient."""
        with torch.no_grad():
            grad: Any = self._param.grad
            self.tensor.grad = (
                None if grad is None else local_part(_placed(grad, self._param.placements))
            )

    def push(self) -> None:
        """Makes the parameter's gradient one whose local part is ``tensor.grad``.

        The shard lets the gradient go, so that it is freed when the user sets ``param.grad`` None.
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
    """``grad`` in these placements; sums what is partial, over tensor-parallel ranks."""
    if not is_dtensor(grad) or tuple(grad.placements) == tuple(placements):
        return grad
    return grad.redistribute(placements=placements)


def check_dtensors(module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup) -> None:
    """Frozen parameters and buffers count, too: they are broadcast.

    Args:
        ignored: names of parameters and buffers that the wrapper leaves alone.

    Raises:
        ValueError: parts of the module are under ``fully_shard``, or ranks of ``group`` hold
            different shards of a parameter or buffer.
    """
    names = [name for name in _params_under_fsdp(module) if name not in ignored]
    if names:
        raise _sharded_by_fsdp(names)
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sharded = {n: t for n, t in tensors.items() if is_dtensor(t) and n not in ignored}
    if not sharded:
        return
    ranks = set(dist.get_process_group_ranks(group))
    names = [name for name, tensor in sharded.items() if _is_split_over(tensor, ranks)]
    if names:
        raise _params_split_over_group(names)


def _params_under_fsdp(module: nn.Module) -> list[str]:
    """Between a forward and its backward such parameters may be plain tensors."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = [m for m in module.modules() if isinstance(m, fsdp.FSDPModule)]
    under_fsdp = {id(p) for m in modules for p in m.parameters()}
    return [name for name, param in module.named_parameters() if id(param) in under_fsdp]


def _is_split_over(param: Any, ranks: set[int]) -> bool:
    mesh = param.device_mesh
    return any(
        not placement.is_replicate()
        and len(ranks.intersection(dist.get_process_group_ranks(mesh.get_group(dim)))) > 1
        for dim, placement in enumerate(param.placements)
    )


# ---- errors --------------------------------------------------------------------------------------


def _sharded_by_fsdp(names: Sequence[str]) -> ValueError:
    return ValueError(
        f"fully_shard() already shards and reduces {errors.count_names(names, 'parameter')}. "
        "ReducerDDP cannot wrap a module with such parameters. To replicate over one mesh "
        "dimension and shard over another, pass a mesh with both dimensions to "
        "fully_shard(module, mesh=...) and do not use ReducerDDP. If the mesh of fully_shard() "
        "has the data-parallel dimension already, wrap only the other parts of the model."
    )


def _params_split_over_group(names: Sequence[str]) -> ValueError:
    return ValueError(
        "the ranks of the process group hold different shards of "
        f"{errors.count_names(names, 'DTensor')}. Different shards must not be averaged. Pass the "
        "data-parallel dimension of the mesh: ReducerDDP(model, device_mesh=mesh['dp'])."
    )
