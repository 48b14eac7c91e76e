"""The front of a module without a wrapper: forward hooks of the module do a wrapper's work."""

from __future__ import annotations

import sys
import threading
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.utils.hooks import RemovableHandle

from ddpx import health
from ddpx.ddp.arguments.placement import Placement
from ddpx.ddp.fronts.front import Front, set_attributes
from ddpx.ddp.replica import ownership
from ddpx.ddp.replica.replica import Replica
from ddpx.ddp.user_module import nested


class HookFront(Front):
    """The front that two forward hooks of a module hold. Nothing else holds this object."""

    def __init__(self, replica: Replica, place: Placement, device_mesh: Any) -> None:
        Joinable.__init__(self)
        set_attributes(self, replica, place, device_mesh)
        self._handles: list[RemovableHandle] = []

    @property
    def module(self) -> nn.Module:  # type: ignore[override]
        """The module."""
        return self._ddpx.module

    def install(self) -> None:
        """Puts the hooks on the module. The hook before forward runs first."""
        module = self.module
        self._handles = [
            module.register_forward_pre_hook(Before(self), prepend=True, with_kwargs=True),
            module.register_forward_hook(After(self), always_call=True),
        ]

    def uninstall(self) -> None:
        """Removes the hooks. No later backward is averaged."""
        self._remove_autograd_hooks()  # raises within a step, before anything has changed
        for handle in self._handles:
            handle.remove()


class Hook:
    """A hook of ddpx. Its copy is a hook without effect, so that copies of modules are plain."""

    def __deepcopy__(self, memo: object) -> NoHook:
        return NoHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return NoHook, ()

    @property
    def __name__(self) -> str:
        """``torch.jit.script`` reads the names of the hooks that it compiles.

        Raises:
            RuntimeError: torch.jit.script reads the name.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise RuntimeError(
                "torch.jit.script cannot compile a module after ddpx.replicate(), because its "
                "hooks are written in Python. Compile a copy: "
                "torch.jit.script(copy.deepcopy(module)). Or call ddpx.unreplicate(module) first."
            )
        return "ddpx_hook"


class Before(Hook):
    """The hook that runs before the forward of a module."""

    def __init__(self, front: HookFront) -> None:
        self.front = front

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self.begin(sys._getframe(1), args, kwargs)

    def begin(self, frame: FrameType, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begins the forward.

        Args:
            frame: The frame that calls the hook.
            args: Arguments of the module.
            kwargs: Keyword arguments of the module.

        Returns:
            The arguments with which the module's own forward runs.
        """
        front = self.front
        calls = _running.calls
        is_nested = False
        if calls:
            _close_ended(calls)
            # A module that calls itself is one forward, as in a wrapper.
            is_nested = any(call.front is front for call in calls)
        is_passive = is_nested or _is_traced()
        call = _Call(front, frame, is_passive)
        calls.append(call)
        if is_passive:
            return args, kwargs
        ownership.forwards.running.append(front._ddpx)
        inputs = front._pre_forward(*args, **kwargs)
        call.enter()
        return inputs


class After(Hook):
    """The hook that runs after the forward of a module, also if the forward raised."""

    def __init__(self, front: HookFront) -> None:
        self.front = front

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        front = self.front
        calls = _running.calls
        if not calls or calls[-1].front is not front:
            if not any(call.front is front for call in calls):
                return  # another hook raised before the forward began
            while calls[-1].front is not front:
                calls.pop().close(None)
        call = calls.pop()
        if call.is_passive:
            return
        error = sys.exc_info()[1]
        try:
            if error is not call.outer_error:
                call.close(error)
                if isinstance(error, Exception):
                    health.publish_fault(front.reducer.monitor, error, call.module_runs)
                return
            call.leave(output)
            front._post_forward(output)
        except Exception as fault:
            health.publish_fault(front.reducer.monitor, fault, False)
            raise
        finally:
            del ownership.forwards.running[call.depth :]


class NoHook:
    """Takes the place of a hook in a copy by a class that copies modules in its own way."""

    def __call__(self, module: nn.Module, *_: Any) -> None:
        """Removes itself."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook is self]:
                del hooks[key]


class _Call:
    """A forward that runs.

    Attributes:
        frame: The frame that runs the hooks. Hooks after a forward do not run after an exception
            such as KeyboardInterrupt. The frame then tells that the forward has ended.
        depth: The number of other forwards around it.
        outer_error: The exception that the caller was handling when the forward began.
        is_passive: Whether the hooks do nothing: the forward is a part of a forward of the same
            module, or is traced.
        module_runs: Whether the module's own forward has begun.
    """

    __slots__ = (
        "_active",
        "_lowered",
        "_outputs",
        "depth",
        "frame",
        "front",
        "is_passive",
        "module_runs",
        "outer_error",
    )

    def __init__(self, front: HookFront, frame: FrameType, is_passive: bool) -> None:
        self.front = front
        self.frame = frame
        self.depth = len(ownership.forwards.running)
        self.outer_error = sys.exc_info()[1]
        self.is_passive = is_passive
        self.module_runs = False
        self._active: AbstractContextManager[None] | None = None
        self._lowered: AbstractContextManager[list[torch.Tensor]] | None = None

    def enter(self) -> None:
        """The module's own forward begins."""
        replica = self.front._ddpx
        precision = replica.averaging.precision
        if precision is not None and not replica.is_part_of_another():
            self._lowered = precision.forward()
            self._outputs = self._lowered.__enter__()
        self._active = self.front._inside_ddp_forward()
        self._active.__enter__()
        self.module_runs = True

    def leave(self, output: Any) -> None:
        """The module's own forward has returned."""
        self.module_runs = False
        if self._lowered is not None:
            self._outputs += nested.tensors_in(output)
        self._exit(None)

    def close(self, error: BaseException | None) -> None:
        """The forward has raised."""
        self._exit(error or RuntimeError("the forward has ended"))

    def _exit(self, error: BaseException | None) -> None:
        active, self._active = self._active, None
        lowered, self._lowered = self._lowered, None
        # contextlib gives the error the traceback that it gets.
        details = (None, None, None) if error is None else (type(error), error, error.__traceback__)
        if active is not None:
            active.__exit__(*details)
        if lowered is not None:
            lowered.__exit__(*details)


class _Running(threading.local):
    """The forwards of one thread that run. The outermost forward is first."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []


_running = _Running()


def _is_traced() -> bool:
    """Whether torch.jit or torch.export traces the forward. Neither can trace communication."""
    return torch.jit.is_tracing() or torch.compiler.is_exporting()


def _close_ended(calls: list[_Call]) -> None:
    """Removes forwards that ended without a hook after them."""
    frames = set()
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        frames.add(frame)
        frame = frame.f_back
    while calls and calls[-1].frame not in frames:
        call = calls.pop()
        if not call.is_passive:
            call.close(None)
            del ownership.forwards.running[call.depth :]
