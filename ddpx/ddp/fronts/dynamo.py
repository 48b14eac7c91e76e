"""torch.compile: Dynamo leaves ddpx alone, and splits graphs at the buckets of the wrapper."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FunctionType, TracebackType

import torch
from torch.nn.parallel import DistributedDataParallel

_REASON = "ddpx does not run within a graph. torch.compile compiles the wrapped module."


def leave_alone(package: str) -> None:
    """Makes Dynamo neither trace nor compile the functions of ``package``, as it treats DDP.

    Dynamo still compiles what these functions call, such as the forward of the wrapped module.
    The interface of ``torch._dynamo`` for this purpose is not used, because its import takes 0.8 s.

    Args:
        package: The name of a package. Modules of it that are imported later are not included.
    """
    eval_frame = torch._C._dynamo.eval_frame
    action = eval_frame._FrameAction
    skip = eval_frame._FrameExecStrategy(action.SKIP, action.DEFAULT)
    for function in _functions_of(package):
        # The attribute is for calls in code that Dynamo traces. The strategy is for other calls.
        function._torchdynamo_disable = True  # type: ignore[attr-defined]
        function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
        own = inspect.unwrap(function)  # not the code of contextlib
        if _belongs(own, package):
            for code in _with_nested(own.__code__):
                eval_frame.set_code_exec_strategy(code, skip)


def _functions_of(package: str) -> Iterator[FunctionType]:
    owners: list[object] = [
        module
        for name, module in list(sys.modules.items())
        if name == package or name.startswith(f"{package}.")
    ]
    classes: set[type] = set()
    while owners:
        for member in list(vars(owners.pop()).values()):
            if isinstance(member, type):
                if _belongs(member, package) and member not in classes:
                    classes.add(member)
                    owners.append(member)
                continue
            is_property = isinstance(member, property)
            parts = (member.fget, member.fset) if is_property else (member,)
            for part in parts:
                function = getattr(part, "__func__", part)
                if isinstance(function, FunctionType) and _belongs(function, package):
                    yield function


def _belongs(member: type | FunctionType, package: str) -> bool:
    return member.__module__ == package or member.__module__.startswith(f"{package}.")


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)


class _Running(threading.local):
    """The wrappers of one thread whose forward runs. The outermost wrapper is first."""

    def __init__(self) -> None:
        self.wrappers: list[object] = []


_running = _Running()


class ActiveWrapper:
    """While the context lasts, ``wrapper`` is the active DDP module that Dynamo asks for.

    Dynamo asks one place for all threads. The end of the context restores the outer wrapper of the
    same thread. A wrapper of another thread is not restored, because its forward may have ended
    meanwhile, and nothing would remove it then.
    """

    __slots__ = ("_outer", "_wrapper")

    def __init__(self, wrapper: object) -> None:
        self._wrapper = wrapper
        self._outer: object | None = None

    def __enter__(self) -> None:
        wrappers = _running.wrappers
        if wrappers:
            self._outer = wrappers[-1]
        else:
            outer = DistributedDataParallel._active_ddp_module
            # Otherwise a ReducerDDP of another thread.
            self._outer = outer if DistributedDataParallel in type(outer).__mro__ else None
        wrappers.append(self._wrapper)
        DistributedDataParallel._active_ddp_module = self._wrapper  # type: ignore[assignment]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _running.wrappers.pop()
        DistributedDataParallel._active_ddp_module = self._outer  # type: ignore[assignment]
