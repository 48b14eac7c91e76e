"""DDP's arguments and methods that ReducerDDP does not have yet: each raises and names itself."""

from __future__ import annotations

from typing import Any, NoReturn, TypeVar

from ddpx import errors

_Class = TypeVar("_Class", bound=type)

_USE_DDP = "Leave it out, or use torch.nn.parallel.DistributedDataParallel for this model."
_METHODS = ("_set_sparse_metadata",)


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
