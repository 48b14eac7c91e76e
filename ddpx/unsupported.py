"""DDP's arguments and methods that ReducerDDP does not have yet: each raises and names itself."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from ddpx import errors

_Class = TypeVar("_Class", bound=type)

_USE_DDP = "Leave it out, or use torch.nn.parallel.DistributedDataParallel for this model."
_METHODS = (
    "gather",
    "join",
    "join_device",
    "join_hook",
    "join_process_group",
    "register_comm_hook",
    "scatter",
    "to_kwargs",
    "will_sync_module_buffers",
    "_get_data_parallel_params",
    "_get_ddp_logging_data",
    "_register_buffer_comm_hook",
    "_register_builtin_comm_hook",
    "_register_fused_optim",
    "_set_ddp_runtime_logging_sample_rate",
    "_set_ddp_sink_clone",
    "_set_sparse_metadata",
    "_set_static_graph",
    "_update_process_group",
)


def refuse_arguments(**arguments: object) -> None:
    """Raises NotImplementedError for the first argument that is set (neither None nor False)."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise errors.not_supported(f"{name}={value!r}", _USE_DDP)


def with_unsupported_methods(cls: _Class) -> _Class:
    """Class decorator: adds the methods of DDP's that raise NotImplementedError when called."""
    for name in _METHODS:
        setattr(cls, name, _raising(name))
    return cls


def _raising(name: str) -> Any:
    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise errors.not_supported(f"{name}()", _USE_DDP)

    method.__name__ = name
    method.__doc__ = "Not supported yet: raises NotImplementedError."
    return method
