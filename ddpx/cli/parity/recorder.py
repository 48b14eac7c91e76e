"""Records the training of a script, with any wrapper."""

from __future__ import annotations

import functools
import resource
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ddpx.cli.observe import WRAPPERS, HeldGroups, on_wrap
from ddpx.cli.parity.record import RankRecord, Settings
from ddpx.testing.events import Event, Tensors


@dataclass
class _Model:
    wrapper: weakref.ref[nn.Module]
    module: nn.Module  # held, because its weights are read after the script has ended
    weights_due: bool = True


class Recorder:
    """Records this process from ``install`` to ``finish``.

    Args:
        settings: The settings of the run.
        rank: The rank of this process.
        wrapper: The class that replaces DDP. None: DDP itself.
        on_step: A function to call after each step. Its time does not count.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        wrapper: type[nn.Module] | None,
        on_step: Callable[[], None] | None,
    ) -> None:
        self.record = RankRecord()
        self._settings = settings
        self._captured_event = settings.captured_event if rank == settings.captured_rank else None
        self._wrappers = dict.fromkeys(WRAPPERS if wrapper is None else (wrapper, *WRAPPERS))
        self._on_step = on_step
        self._models: list[_Model] = []
        self._groups = HeldGroups()
        self._num_steps = 0
        self._last_end_ns: int | None = None
        self._own_ns = 0  # the time of this object since then

    def install(self) -> None:
        """Starts the recording."""
        on_wrap(self._add, self._wrappers)
        on_wrap(self._groups.add, self._wrappers)
        for cls in self._wrappers:
            cls.forward = self._before_forward(cls.forward)
        torch.autograd.backward = self._around_backward(torch.autograd.backward)

    def finish(self) -> RankRecord:
        """Ends the recording. Called when the script has ended."""
        for number in range(len(self._models)):
            self._record_weights(number)
        self._groups.release()
        self.record.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if torch.cuda.is_available():
            self.record.device_peak_bytes = torch.cuda.max_memory_allocated()
        return self.record

    # ---- hooks ---------------------------------------------------------------------------------

    def _add(self, wrapper: nn.Module) -> None:
        cls = next(base for base in type(wrapper).__mro__ if base in self._wrappers)
        self.record.wrappers.append(cls.__name__)
        module = wrapper.module
        assert isinstance(module, nn.Module)
        self._models.append(_Model(weakref.ref(wrapper), module))

    def _before_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapped(wrapper: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                self._on_forward(wrapper)
            return forward(wrapper, *args, **kwargs)

        return wrapped

    def _around_backward(self, backward: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(backward)
        def wrapped(tensors: Any, *args: Any, **kwargs: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # nested: a checkpointed layer
                backward(tensors, *args, **kwargs)
                return
            self._record_losses(tensors)
            backward(tensors, *args, **kwargs)
            self._after_backward()

        return wrapped

    # ---- events --------------------------------------------------------------------------------

    @torch._disable_dynamo
    def _on_forward(self, wrapper: nn.Module) -> None:
        for number, model in enumerate(self._models):
            if model.wrapper() is wrapper:
                self._record_weights(number)

    def _record_weights(self, number: int) -> None:
        model = self._models[number]
        if not model.weights_due:
            return
        model.weights_due = False
        with self._own_time():
            module = model.module
            tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            self._record_event("weight", self._num_steps, number, tensors)

    def _record_losses(self, tensors: Any) -> None:
        if not self._within_bounds(self._num_steps + 1):
            return
        with self._own_time():
            losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            # An edge of the graph may take the place of a tensor, and has no value.
            tensors = [loss for loss in losses if isinstance(loss, torch.Tensor)]
            scalars = [loss.item() for loss in tensors if loss.numel() == 1]
            values: dict[str, str | None] = {
                f"number {index}": repr(scalar) for index, scalar in enumerate(scalars)
            }
            self.record.events.append(Event("loss", self._num_steps + 1, -1, values))

    def _after_backward(self) -> None:
        synced = [number for number, model in enumerate(self._models) if _syncs(model)]
        if not synced:
            return
        self._num_steps += 1
        _await_device()
        now = time.perf_counter_ns()
        if self._last_end_ns is not None:
            self.record.step_ns.append(now - self._last_end_ns - self._own_ns)
        self._last_end_ns, self._own_ns = now, 0
        if self._on_step is not None:
            with self._own_time():
                self._on_step()
        if not self._within_bounds(self._num_steps):
            return
        with self._own_time():
            for number in synced:
                named_params = self._models[number].module.named_parameters()
                grads = {name: param.grad for name, param in named_params}
                self._record_event("gradient", self._num_steps, number, grads)
                self._models[number].weights_due = True

    def _record_event(self, kind: str, step: int, number: int, tensors: Tensors) -> None:
        if self._captured_event == len(self.record.events):
            tensor = tensors.get(self._settings.captured_name)
            torch.save(None if tensor is None else tensor.detach().cpu(), self._settings.captured)
        self.record.events.append(Event.of(kind, step, number, tensors))

    def _within_bounds(self, step: int) -> bool:
        return self._settings.max_steps is None or step <= self._settings.max_steps

    @contextmanager
    def _own_time(self) -> Iterator[None]:
        _await_device()  # work of the step must not count
        begin = time.perf_counter_ns()
        try:
            yield
        finally:
            self._own_ns += time.perf_counter_ns() - begin


def _await_device() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _syncs(model: _Model) -> bool:
    wrapper = model.wrapper()
    return wrapper is not None and bool(getattr(wrapper, "require_backward_grad_sync", True))
