"""The reducer of a wrapper: ``model.reducer``.

The class also has the names of DDP's reducer that torch's communication hooks and scripts use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ddpx import _C, health
from ddpx.comm.transport import Transport, name_of
from ddpx.params import ManagedParam
from ddpx.params.dtensors import Shard, is_dtensor
from ddpx.reducer.torch_only import OF_REDUCER, refuse

Futures = Sequence[torch.futures.Future[Any]]


@dataclass
class Settings:
    """Settings that a copy of a wrapper gives to its own reducer.

    Attributes:
        check_finite: Whether backward raises if a gradient is not finite.
        manual_finalization: Whether ``finalize_backward()`` ends a step.
        sample_rate: The number of steps between two reports. None: the default.
        sparse_rows: The rows in which sparse gradients have entries, by parameter name.
    """

    check_finite: bool = False
    manual_finalization: bool = False
    sample_rate: int | None = None
    sparse_rows: dict[str, torch.Tensor] = field(default_factory=dict)


@refuse("model.reducer", OF_REDUCER)
class Reducer(_C.Reducer):
    """A ``_C.Reducer`` over the parameters of a module.

    A wrapper owns this object. ``csrc/reducer/reducer.h`` describes the threads that call it.

    Attributes:
        settings: What was set after construction.
        first_buckets: The buckets of the first step.
        delays_all_params: Whether the all-reduce of all parameters is delayed.
        has_hook: Whether a communication hook moves buckets over the group. The owner of the hook
            sets this attribute.
        wait_for: Makes the end of the next synchronized backward of a reducer wait for futures. The
            wrapper sets this attribute.

    Args:
        managed: The parameters to average.
        frozen: Parameters of the same module that require no gradient.
        process_group: The ranks to average over.
        transport: Sums buckets in place of the group. None: the group sums them.
        options: How gradients are grouped, copied and summed.
    """

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        frozen: Sequence[ManagedParam],
        process_group: dist.ProcessGroup,
        transport: Transport | None,
        options: _C.ReducerOptions,
    ) -> None:
        self.monitor = health.begin(process_group)
        super().__init__(
            [_as_reducer_param(p) for p in managed],
            process_group,
            transport,
            options,
            [_C.ReducerParam(p.tensor, p.name) for p in frozen],
        )
        self.first_buckets = self.plan.buckets
        self._sparse_params = {p.name: i for i, p in enumerate(managed) if p.expect_sparse}
        self._process_group = process_group
        self._transport = transport
        self._devices = list(dict.fromkeys(param.tensor.device for param in managed))
        self._device = self._devices[0]
        self.settings = Settings()
        self.wait_for: Callable[[Reducer, Futures], None] | None = None
        self.delays_all_params = all(p.delayed for p in managed)
        self.has_hook = False

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks that this reducer averages over."""
        return self._process_group

    @property
    def transport(self) -> str:
        """The transport of buckets: ``"shm"``, or the backend of the process group."""
        in_use = None if self.has_hook else self._transport
        return name_of(in_use, self._process_group, self._device)

    @property
    def is_captured(self) -> bool:
        """Whether the current stream of the device is captured into a CUDA graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def move_to(
        self,
        process_group: dist.ProcessGroup,
        transport: Transport | None = None,
        num_steps: int | None = None,
    ) -> None:
        """Averages over other ranks, with buckets as before the first step.

        Args:
            process_group: The new ranks.
            transport: Sums buckets in place of the group. None: the group sums them.
            num_steps: The number of steps of these ranks. None: the number of this rank.
        """
        monitor = health.begin(process_group)
        self.set_collective(process_group, transport, num_steps)
        self.monitor = monitor
        if self.monitor is not None:
            self.monitor.begin_construction()
            self.number_as_constructed()
        self._process_group = process_group
        self._transport = transport

    def wait_for_gradients(self) -> None:
        """Waits for the averages of the last backward. Raises if the group cannot continue."""
        for device in self._devices:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        if self.monitor is not None:
            self.monitor.raise_if_failed()
        self.mark_waited()

    def _run_allreduce_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """Sums the bucket over all ranks, without a division."""
        buffer = bucket.buffer()
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        work = self._process_group.allreduce([real])
        return work.get_future()

    def _set_sparse_metadata(self, metadata: Mapping[str, torch.Tensor]) -> None:
        for name in metadata:
            if name not in self._sparse_params:
                raise ValueError(
                    f"_set_sparse_metadata() got row indices for {name!r}, but the module has no "
                    "parameter of this name with sparse gradients. Pass names of weights of "
                    "nn.Embedding(..., sparse=True)."
                )
        sorted_rows = {
            name: ids.detach().to(device=self._device, dtype=torch.int64).unique(sorted=True)
            for name, ids in metadata.items()
        }
        self.set_sparse_rows(
            {self._sparse_params[name]: rows for name, rows in sorted_rows.items()}
        )
        self.settings.sparse_rows.update(sorted_rows)

    def set_static_graph(self) -> None:
        super().set_static_graph()
        if not self.arrival_order:  # no step has ended, so the buckets may be other ones now
            self.first_buckets = self.plan.buckets

    def set_check_finite(self, enabled: bool) -> None:
        """Sets whether backward raises if a gradient of any rank is not finite."""
        super().set_check_finite(enabled)
        self.settings.check_finite = enabled

    def set_manual_finalization(self, required: bool) -> None:
        """Sets whether ``finalize_backward()`` ends each step, instead of the end of backward."""
        super().set_manual_finalization(required)
        self.settings.manual_finalization = required

    def set_sample_rate(self, sample_rate: int) -> None:
        """Sets the number of steps between two reports, after the first ten steps."""
        super().set_sample_rate(sample_rate)
        self.settings.sample_rate = sample_rate

    def apply(self, settings: Settings) -> None:
        """Takes over the settings of another reducer of a copy of the module."""
        self.set_check_finite(settings.check_finite)
        if settings.manual_finalization:
            self.set_manual_finalization(True)
        if settings.sample_rate is not None:
            self.set_sample_rate(settings.sample_rate)
        self._set_sparse_metadata(settings.sparse_rows)

    def _get_local_used_map(self) -> torch.Tensor:
        """For each parameter, the number of ranks that used it in the last agreed step."""
        return torch.tensor(self.used_by_ranks, dtype=torch.int32, device=self._device)

    def prepare_for_backward(self, outputs: object = ()) -> None:
        """Makes the next backward average gradients, even if its forward ran in ``no_sync``.

        Pipelines and trainers call this method of ``model.reducer`` before the last backward of
        several micro-batches.

        Args:
            outputs: DDP starts its search for unused parameters from these outputs. ddpx ignores
                them.

        Raises:
            RuntimeError: In the next backward, if ``torch.autograd.grad`` computes the gradients
                of parameters, as zero-bubble pipeline schedules do. Such gradients would stay
                local.

        Example:
            >>> with model.no_sync():
            ...     loss = model(inputs).sum()
            >>> model.reducer.prepare_for_backward()
            >>> loss.backward()
            >>> model.module.weight.grad
            tensor([[16., 16., 16., 16.]])
        """
        super().prepare_for_backward()

    def prepare_for_forward(self) -> None:
        """Prepares for a forward that records a graph. Code of DDP's forward calls this method."""
        self.prepare_forward()

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _install_post_backward_futures(self, futures: Futures) -> None:
        """Makes the end of the next synchronized backward wait for ``futures``."""
        if self.wait_for is not None:
            self.wait_for(self, futures)

    def _update_process_group(self, new_process_group: dist.ProcessGroup) -> None:
        self.move_to(new_process_group)

    def _check_reducer_finalized(self) -> None:
        """Raises RuntimeError if ``finalize_backward()`` has yet to end a step.

        Other steps end with their backward, or raise there.
        """
        if self.phase.name == "READY":
            raise RuntimeError(
                f"[ddpx rank {self.process_group.rank()}, step {self.num_steps}, phase end of "
                "backward, before finalize_backward()] Expected to have finalized the prior "
                "backward pass before starting a new one. The gradients of that backward pass are "
                "not averaged yet. Call finalize_backward() after backward() when "
                "require_manual_backward_finalization is true."
            )

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _ddp_graph_static(self) -> bool:
        return self.graph_was_static

    def _set_static_graph(self) -> None:
        self.set_static_graph()

    def _should_finalize_after_backward(self) -> bool:
        return self.should_finalize_after_backward

    def _finalize_backward_manual(self) -> None:
        self.finalize_backward()

    _set_ddp_runtime_logging_sample_rate = set_sample_rate
    _set_manual_finalization_required = set_manual_finalization


def _as_reducer_param(param: ManagedParam) -> _C.ReducerParam:
    if not is_dtensor(param.tensor):
        return _C.ReducerParam(param.tensor, param.name, param.expect_sparse, param.delayed)
    shard = Shard(param.tensor)  # type: ignore[arg-type]
    return _C.ReducerParam.of_dtensor(
        param.tensor, shard.tensor, param.name, param.delayed, shard.pull, shard.push
    )
