"""The parameters and buffers of a module that take part, with their names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import nn

from ddpx import errors


@dataclass(frozen=True)
class ManagedParam:
    """A parameter of a wrapped module.

    Attributes:
        name: The name in the module.
        tensor: The parameter.
        expect_sparse: Whether gradients are sparse.
        delayed: Whether the all-reduce waits (``delay_all_reduce_named_params``).
    """

    name: str
    tensor: nn.Parameter
    expect_sparse: bool
    delayed: bool = False


def ignored_names(module: nn.Module) -> frozenset[str]:
    """The names of parameters and buffers to ignore, from the attribute that DDP reads, too."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def managed_params(module: nn.Module, ignored: Collection[str]) -> list[ManagedParam]:
    """The parameters that require a gradient, in registration order. No parameter occurs twice."""
    managed: dict[nn.Parameter, ManagedParam] = {}
    for module_name, submodule in module.named_modules():
        sparse = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse
        for param_name, param in submodule.named_parameters(recurse=False):
            name = f"{module_name}.{param_name}" if module_name else param_name
            if param.requires_grad and name not in ignored and param not in managed:
                managed[param] = ManagedParam(name, param, bool(sparse))
    return list(managed.values())


def choose(
    managed: Sequence[ManagedParam],
    tensors: Sequence[nn.Parameter],
    expect_sparse: Sequence[bool],
    names: Mapping[int, str],
) -> list[ManagedParam]:
    """The parameters in ``managed`` that are ``tensors``, in the order of ``tensors``.

    Args:
        managed: The parameters of a module.
        tensors: Some of these parameters.
        expect_sparse: Whether the gradient of each of ``tensors`` is sparse.
        names: The name of each of ``tensors``, by index.

    Raises:
        ValueError: One of ``tensors`` is not in ``managed``.
    """
    by_id = {id(param.tensor): param for param in managed}
    unknown = sum(id(tensor) not in by_id for tensor in tensors)
    if unknown:
        raise ValueError(
            f"_build_params_for_reducer() returned {errors.count(unknown, 'parameter')} that the "
            "wrapped module does not have, ignores or does not train. Return a part of the result "
            "of super()._build_params_for_reducer()."
        )
    return [
        replace(by_id[id(tensor)], name=names[index], expect_sparse=bool(sparse))
        for index, (tensor, sparse) in enumerate(zip(tensors, expect_sparse, strict=True))
    ]


def frozen_params(module: nn.Module, ignored: Collection[str]) -> list[ManagedParam]:
    """The parameters that take part but require no gradient."""
    return [
        ManagedParam(name, param, False)
        for name, param in module.named_parameters()
        if not param.requires_grad and name not in ignored
    ]


@contextmanager
def unfrozen(tensors: Sequence[nn.Parameter]) -> Iterator[None]:
    """In the block, all of ``tensors`` that may require gradients do."""
    frozen = [
        tensor
        for tensor in tensors
        if not tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())
    ]
    for tensor in frozen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor in frozen:
            tensor.requires_grad_(False)


def named_managed_buffers(
    module: nn.Module, ignored: Collection[str]
) -> list[tuple[str, torch.Tensor]]:
    """The buffers in registration order. Modules may replace buffers between two calls."""
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]


def named_state(
    module: nn.Module, ignored: Collection[str], with_buffers: bool
) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that must be equal on all ranks, including frozen parameters."""
    state: list[tuple[str, torch.Tensor]] = [
        (name, param) for name, param in module.named_parameters() if name not in ignored
    ]
    return state + (named_managed_buffers(module, ignored) if with_buffers else [])


def module_state(
    module: nn.Module, ignored: Collection[str], with_buffers: bool
) -> list[torch.Tensor]:
    """The tensors of :func:`named_state`, without autograd."""
    return [tensor.detach() for _, tensor in named_state(module, ignored, with_buffers)]


def names_by_index(
    managed: Sequence[ManagedParam], tensors: Sequence[nn.Parameter]
) -> dict[int, str]:
    """Returns the name of each of ``tensors``, by index.

    Raises:
        ValueError: ``tensors`` are not the parameters in ``managed``.
    """
    names = {id(p.tensor): p.name for p in managed}
    given = {id(p) for p in tensors}
    for name in (name for key, name in names.items() if key not in given):
        raise ValueError(
            f"Param with name {name} found in module parameters, but not DDP parameters. Pass the "
            "result of _build_params_for_reducer()."
        )
    if len(given) != len(names):
        raise ValueError(
            "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
            f"{len(given)} vs {len(names)}. Pass the result of _build_params_for_reducer()."
        )
    return {index: names[id(p)] for index, p in enumerate(tensors)}
