"""Which parameters and buffers of a module take part, under which names."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class ManagedParam:
    """A parameter whose gradient is reduced."""

    name: str
    tensor: nn.Parameter
    expect_sparse: bool
    delayed: bool = False  # by delay_all_reduce_named_params


def ignored_names(module: nn.Module) -> frozenset[str]:
    """Names that the module asks to be left alone, by the attribute that DDP reads, too."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def managed_params(module: nn.Module, ignored: Collection[str]) -> list[ManagedParam]:
    """Parameters that require a gradient, in registration order; a shared one counts once."""
    managed: dict[nn.Parameter, ManagedParam] = {}
    for module_name, submodule in module.named_modules():
        sparse = isinstance(submodule, (nn.Embedding, nn.EmbeddingBag)) and submodule.sparse
        for param_name, param in submodule.named_parameters(recurse=False):
            name = f"{module_name}.{param_name}" if module_name else param_name
            if param.requires_grad and name not in ignored and param not in managed:
                managed[param] = ManagedParam(name, param, bool(sparse))
    return list(managed.values())


def frozen_params(module: nn.Module, ignored: Collection[str]) -> list[ManagedParam]:
    """Parameters that take part but require no gradient."""
    return [
        ManagedParam(name, param, False)
        for name, param in module.named_parameters()
        if not param.requires_grad and name not in ignored
    ]


def named_managed_buffers(
    module: nn.Module, ignored: Collection[str]
) -> list[tuple[str, torch.Tensor]]:
    """Buffers in registration order; asked for anew each time, as modules may replace them."""
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in ignored]


def module_state(
    module: nn.Module, ignored: Collection[str], with_buffers: bool
) -> list[torch.Tensor]:
    """Everything that must be equal on all ranks at the start, frozen parameters included."""
    state = [p.detach() for name, p in module.named_parameters() if name not in ignored]
    if with_buffers:
        state += [b.detach() for _, b in named_managed_buffers(module, ignored)]
    return state
