"""DDP's arguments and methods that ReducerDDP does not have yet: each raises and names itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ddpx import errors

_USE_DDP = "Leave it out, or use torch.nn.parallel.DistributedDataParallel for this model."


def refuse_arguments(**arguments: object) -> None:
    """Raises NotImplementedError for the first argument that is set (neither None nor False)."""
    for name, value in arguments.items():
        if value is not None and value is not False:
            raise errors.not_supported(f"{name}={value!r}", _USE_DDP)


def unsupported_method(name: str) -> Callable[..., NoReturn]:
    """A method that raises NotImplementedError with its own name."""

    def method(self: object, *args: Any, **kwargs: Any) -> NoReturn:
        raise errors.not_supported(f"{name}()", _USE_DDP)

    method.__name__ = name
    method.__doc__ = "Not supported yet: raises NotImplementedError."
    return method
