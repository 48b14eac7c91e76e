"""``delay_all_reduce_named_params``: params whose all-reduce waits for another one's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ddpx import errors
from ddpx.params.managed import ManagedParam


def check_delayed(
    named_params: Sequence[tuple[str, nn.Parameter]] | None, hook_param: nn.Parameter | None
) -> None:
    """Raises ValueError if one of DDP's two arguments is given without the other."""
    if (named_params is None) != (hook_param is None):
        raise errors.delayed_without_hook_param()


def with_delayed(
    managed: Sequence[ManagedParam],
    named_params: Sequence[tuple[str, nn.Parameter]] | None,
    hook_param: nn.Parameter | None,
) -> tuple[list[ManagedParam], int | None]:
    """``managed`` with the delayed ones marked, and the index of the param that they wait for.

    Raises:
        ValueError: one of them is not in ``managed``.
    """
    if not named_params or hook_param is None:
        return list(managed), None
    index_of = {id(param.tensor): index for index, param in enumerate(managed)}
    marked = list(managed)
    for name, param in named_params:
        if id(param) not in index_of:
            raise errors.cannot_delay(name)
        index = index_of[id(param)]
        marked[index] = replace(marked[index], delayed=True)
    if id(hook_param) not in index_of:
        raise errors.cannot_hook_all_reduce()
    return marked, index_of[id(hook_param)]
