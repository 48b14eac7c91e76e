"""Which parameters and buffers take part, and what is special about some of them."""

from ddpx.params.managed import (
    ManagedParam,
    frozen_params,
    ignored_names,
    managed_params,
    module_state,
    named_managed_buffers,
    names_by_index,
)

__all__ = [
    "ManagedParam",
    "frozen_params",
    "ignored_names",
    "managed_params",
    "module_state",
    "named_managed_buffers",
    "names_by_index",
]
