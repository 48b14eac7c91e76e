"""The parameters and buffers of a module that take part, and their special kinds."""

from ddpx.params.managed import (
    ManagedParam,
    choose,
    frozen_params,
    ignored_names,
    managed_params,
    module_state,
    named_managed_buffers,
    named_state,
    names_by_index,
    unfrozen,
)

__all__ = [
    "ManagedParam",
    "choose",
    "frozen_params",
    "ignored_names",
    "managed_params",
    "module_state",
    "named_managed_buffers",
    "named_state",
    "names_by_index",
    "unfrozen",
]
