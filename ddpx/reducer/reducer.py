"""The reducer as a wrapper's ``reducer`` attribute, with the names that DDP's has.

torch's own communication hooks and older scripts reach for them on ``model.reducer``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ddpx import _C, errors, health
from ddpx.ddp.options import Options
from ddpx.params import ManagedParam
from ddpx.params.dtensors import Shard, is_dtensor


class Reducer(_C.Reducer):
    """A ``_C.Reducer`` over the params of a module; see ``csrc/reducer/reducer.h``."""

    def __init__(
        self,
        managed: Sequence[ManagedParam],
        bystanders: Sequence[ManagedParam],
        process_group: dist.ProcessGroup,
        options: Options,
        gate: int | None = None,
    ) -> None:
        self.monitor = health.begin(process_group)
        super().__init__(
            [_as_reducer_param(p) for p in managed],
            process_group,
            options.caps,
            options.mode,
            options.gradient_as_bucket_view,
            options.batched_grad_copy,
            options.skip_all_reduce_unused_params,
            [_C.ReducerParam(p.tensor, p.name) for p in bystanders],
            gate,
            options.precision,
        )
        self._sparse_params = {p.name: i for i, p in enumerate(managed) if p.expect_sparse}
        self._process_group = process_group
        self._device = managed[0].tensor.device

    def join(self, process_group: dist.ProcessGroup, num_steps: int | None = None) -> None:
        """Goes over to other ranks, with buckets as before the first step.

        Args:
            num_steps: that those have made; as many as this one if None.
        """
        self.monitor = health.begin(process_group)
        self.set_collective(process_group, num_steps)
        if self.monitor is not None:
            self.monitor.begin_construction()
            self.number_as_constructed()
        self._process_group = process_group

    def _run_allreduce_hook(self, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """Sums the bucket over all ranks, undivided."""
        buffer = bucket.buffer()
        real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
        work = self._process_group.allreduce([real])
        return work.get_future()

    def _set_sparse_metadata(self, metadata: Mapping[str, torch.Tensor]) -> None:
        for name, ids in metadata.items():
            if name not in self._sparse_params:
                raise errors.unknown_sparse_param(name)
            rows = ids.detach().to(device=self._device, dtype=torch.int64).unique(sorted=True)
            self.set_sparse_rows(self._sparse_params[name], rows)

    def _get_local_used_map(self) -> torch.Tensor:
        """Per param, how many ranks used it in the last step that they agreed about."""
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

    def _rebuild_buckets(self) -> bool:
        return self.rebuild_buckets()

    def _remove_autograd_hooks(self) -> None:
        self.remove_hooks()

    def _ddp_graph_static(self) -> bool:
        return self.graph_was_static

    def _set_static_graph(self) -> None:
        self.set_static_graph()


def _as_reducer_param(param: ManagedParam) -> _C.ReducerParam:
    if not is_dtensor(param.tensor):
        return _C.ReducerParam(param.tensor, param.name, param.expect_sparse, param.delayed)
    shard = Shard(param.tensor)  # type: ignore[arg-type]
    return _C.ReducerParam.of_dtensor(
        param.tensor, shard.tensor, param.name, param.delayed, shard.pull, shard.push
    )
