"""Transforms of torch.func, such as vmap and grad: communication within them runs as outside."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

_NO_TRANSFORM: AbstractContextManager[object] = nullcontext()


def outside() -> AbstractContextManager[object]:
    """While the context lasts, no transform runs on this thread."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return _NO_TRANSFORM
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the memory of ``tensor``, which transforms may have wrapped."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
