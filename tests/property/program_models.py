"""The three models that run a program: ReducerDDP, DDP and the hand-made average."""

from __future__ import annotations

import copy
import datetime
import gc
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from hand_made import HandMade
from program_module import ProgramModule
from programs import DTYPES, MODES, Program
from replicated import Replicated
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx import ReducerDDP
from ddpx.params import unfrozen

FACTORS = {"allreduce": 1.0, "doubled": 2.0}
_DDP_ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
# DDP hangs where it is not the oracle. Its group has a time limit of its own.
DDP_TIMEOUT_S = 5.0


def doubled(group, bucket):  # DDP refuses text annotations
    return allreduce_hook(group, bucket).then(lambda future: future.value() * 2)


class Model:
    """A module in a wrapper, or in several wrappers of which the last is in use.

    Attributes:
        wrappers: The wrappers that are alive.
        errors: For each averaged backward of the running action: the names of missing params, or
            the text of the error that names them.
        post_sync_calls: The number of calls of the post-sync hook. None without a hook.
        hooked: The wrapper that has the post-sync hook.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        torch.manual_seed(0)
        self.wrappers = [self.wrap(ProgramModule(program))]
        self.errors: list[Any] = []
        self.post_sync_calls: Any = None
        self.hooked: Any = None

    @property
    def wrapper(self) -> Any:
        return self.wrappers[-1]

    @property
    def module(self) -> Any:
        return self.wrapper.module

    @property
    def bypass(self) -> Callable[..., Any]:
        """Runs the module without the front."""
        return self.module

    def wrap_again(self) -> None:
        self.wrappers.append(self.wrap(self.module))

    def drop_newest(self) -> None:
        if len(self.wrappers) > 1:
            self.wrappers.pop()
            gc.collect()

    def copy(self) -> None:
        self.wrappers[:] = [copy.deepcopy(self.wrapper)]

    def hook(self, kind: str) -> None:
        if not getattr(self.wrapper, "has_hook_of_program", False):
            self.wrapper.has_hook_of_program = True
            self.register_hook(kind)

    def train_unevenly(self, counts: tuple[int, int], step: Callable[[], None]) -> None:
        """Calls ``step`` on each rank as often as its element of ``counts`` says."""
        with self.wrapper.join():
            for _ in range(counts[dist.get_rank()]):
                step()

    def forget_failure(self) -> None:
        """Called on all ranks after an averaged backward that failed as planned."""

    def set_weight(self, weight: float) -> None:
        """Called before each forward that records a graph."""

    def forget_weights(self) -> None:
        """Called when the gradients of local micro-steps are dropped."""

    def wrap(self, module: nn.Module) -> nn.Module:
        raise NotImplementedError

    def register_hook(self, kind: str) -> None:
        raise NotImplementedError

    def backward(self, loss: torch.Tensor, averages: bool, **kwargs: Any) -> None:
        raise NotImplementedError


class Average(Model):
    """The module in the hand-made average."""

    def wrap(self, module: nn.Module) -> nn.Module:
        for tensor in (*module.parameters(), *module.buffers()):
            _broadcast(tensor)
        return self._wrap(module)

    def _wrap(self, module: nn.Module) -> HandMade:
        syncs_buffers = dict(self.program.options).get("forward_sync_buffers", True)
        mixed = DTYPES.get(self.program.mixed)
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        return HandMade(
            module, syncs_buffers, self.program.mode, mixed, self.program.average, ignored
        )

    def drop_newest(self) -> None:
        super().drop_newest()
        self.wrapper.forget()

    def copy(self) -> None:
        module = copy.deepcopy(self.module)
        params = dict(module.named_parameters())
        with unfrozen([params[name] for name in self.wrapper.managed]):
            copied = self._wrap(module)
        copied.last_forward_was_synchronized = self.wrapper.last_forward_was_synchronized
        copied.buffers_from = self.wrapper.buffers_from
        self.wrappers[:] = [copied]

    def register_hook(self, kind: str) -> None:
        self.wrapper.factor = FACTORS[kind]

    def train_unevenly(self, counts: tuple[int, int], step: Callable[[], None]) -> None:
        for number in range(max(counts)):
            active = [rank for rank, count in enumerate(counts) if number < count]
            self.wrapper.buffers_from = max(active)
            if dist.get_rank() in active:
                step()
            else:
                self.wrapper.shadow_step()
        # As in DDP, the settings of join() hold after the context.
        self.wrapper.buffers_from = dist.get_world_size() - 1
        buffers = self.module.named_buffers() if self.wrapper.syncs_buffers else ()
        for name, tensor in (*self.module.named_parameters(), *buffers):
            if name not in self.wrapper.ignored:
                _broadcast(tensor, max(active))

    def set_weight(self, weight: float) -> None:
        self.wrapper.weight = weight

    def forget_weights(self) -> None:
        self.wrapper.sum_of_weights = 0.0

    def forget_failure(self) -> None:
        self.wrapper.forget()

    def backward(self, loss: torch.Tensor, averages: bool, **kwargs: Any) -> None:
        self.wrapper.parts.clear()
        self.wrapper.count_weight()  # of a forward that bypassed the wrapper
        loss.backward(**kwargs)
        if averages:
            self.errors.append(self.wrapper.missing())
            self.wrapper.average()
            if self.hooked is self.wrapper and not self.errors[-1]:
                self.post_sync_calls += 1


class Ours(Model):
    """The module in ReducerDDP, or averaged by ``ddpx.replicate()``."""

    recording: Any = None

    def wrap(self, module: nn.Module) -> nn.Module:
        mixed = DTYPES.get(self.program.mixed)
        front = ReducerDDP if self.program.front == "wrapper" else Replicated
        wrapper = front(
            module,
            average=self.program.average,
            gradient_as_bucket_view=self.program.views,
            mixed_precision=mixed and _MixedPrecision(mixed, torch.float32),
            **MODES[self.program.mode],
            **dict(self.program.options),
        )
        wrapper.require_manual_backward_finalization = self.program.manual
        return wrapper

    def register_hook(self, kind: str) -> None:
        self.wrapper.register_comm_hook(None, HOOKS[kind])

    def set_weight(self, weight: float) -> None:
        if self.program.average == "weights":
            ddpx.set_weight(self._front, weight)

    def forget_weights(self) -> None:
        if self.program.average == "weights":
            self.wrapper.reset()

    @property
    def bypass(self) -> Callable[..., Any]:
        return self.module.forward if self.program.front == "replicate" else self.module

    def record(self) -> None:
        """Begins a recording of the wrapper, or ends the one that runs."""
        if self.recording is None:
            self.recording = ddpx.record(self._front).start()
        else:
            self.recording.stop()
            self.recording = None

    @property
    def _front(self) -> nn.Module:
        """The module that functions of ddpx take."""
        return self.module if self.program.front == "replicate" else self.wrapper

    def backward(self, loss: torch.Tensor, averages: bool, **kwargs: Any) -> None:
        try:
            loss.backward(**kwargs)
            if averages and self.program.manual:
                self.wrapper.finalize_backward()
        except RuntimeError as error:
            if self.program.mode != "default" or "find_unused_parameters=True" not in str(error):
                raise
            self.errors.append(str(error))
        else:
            if averages:
                self.errors.append("")

    def count_post_sync(self) -> None:
        def hook(_: torch.Tensor) -> None:
            self.post_sync_calls += 1

        self.wrapper.register_post_sync_hook(self.module.layers[0].weight, hook)


class Ddp(Model):
    """The module in torch's DDP, over a group with a short time limit.

    All programs of a process share the group. After a failure of DDP, the next program needs a new
    group. The old group is not destroyed, since that may block.
    """

    _groups: ClassVar[list[dist.ProcessGroup]] = []
    _failed_groups: ClassVar[list[dist.ProcessGroup]] = []

    def __init__(self, program: Program) -> None:
        if not self._groups:
            timeout = datetime.timedelta(seconds=DDP_TIMEOUT_S)
            self._groups.append(dist.new_group(timeout=timeout, backend="gloo"))
        self.group = self._groups[-1]
        super().__init__(program)

    @classmethod
    def drop_group(cls) -> None:
        """Called on all ranks after a failure of DDP."""
        cls._failed_groups += cls._groups
        cls._groups.clear()

    def wrap(self, module: nn.Module) -> nn.Module:
        options = {k: v for k, v in self.program.options if k in _DDP_ARGUMENTS}
        return DistributedDataParallel(
            module,
            process_group=self.group,
            gradient_as_bucket_view=self.program.views,
            **MODES[self.program.mode],
            **options,
        )

    def register_hook(self, kind: str) -> None:
        self.wrapper.register_comm_hook(self.group, HOOKS[kind])

    def backward(self, loss: torch.Tensor, averages: bool, **kwargs: Any) -> None:
        loss.backward(**kwargs)


HOOKS: dict[str, Callable[..., Any]] = {"allreduce": allreduce_hook, "doubled": doubled}


@torch.no_grad()
def _broadcast(tensor: torch.Tensor, source: int = 0) -> None:
    value = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    copied = value.contiguous()
    dist.broadcast(copied, source)
    value.copy_(copied)
