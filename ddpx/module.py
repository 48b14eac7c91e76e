"""``ReducerDDP``: data parallelism over a module, with ddpx's own reducer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter

from ddpx import _C, errors, nested, params, placement, state_sync
from ddpx.options import make_options
from ddpx.unsupported import refuse_arguments, with_unsupported_methods


@with_unsupported_methods
class ReducerDDP(nn.Module):
    """Averages the gradients of ``module`` over all ranks while backward runs.

    Takes the place of :class:`torch.nn.parallel.DistributedDataParallel`: same arguments in the
    same order (torch 2.13's), same results to the bit, and ``isinstance`` of it.

    Args:
        module: the model. All parameters on devices of one type, the same on every rank.
        device_ids: for a module on one accelerator, a list with that device, to which inputs are
            then moved; otherwise None.
        output_device: for a module on one accelerator, where outputs lie; kept for DDP's sake.
        dim: batch dimension; only 0.
        broadcast_buffers: older form of ``forward_sync_buffers``, which rules construction as well.
        init_sync: check at construction that parameters agree, and broadcast rank 0's state.
        process_group: ranks to average over; the default group if None.
        bucket_cap_mb: bucket size in MiB; 25 if None, with a first bucket of 1 MiB.
        find_unused_parameters: some parameters may get no gradient in some steps. Where that is so
            on all ranks, ``grad`` stays as it was.
        check_reduction: has no effect, as in DDP.
        gradient_as_bucket_view: let ``grad`` lie in the bucket, which saves a copy and memory.
        static_graph: the set of used parameters, and how often each is used, never changes.
        bucket_cap_mb_list: a size in MiB for each bucket in turn; the last one repeats.
        forward_sync_buffers: broadcast rank 0's buffers at forward; True if None.
        delay_all_reduce_named_params, param_to_hook_all_reduce, mixed_precision, device_mesh,
            skip_all_reduce_unused_params, batched_grad_copy: not supported yet.

    Raises:
        NotImplementedError: an argument that is not supported yet, by name.
        TypeError, ValueError: an argument that makes no sense; the text says what to pass.
        RuntimeError: no parameter requires a gradient; parameters differ between ranks.

    In ``backward()``, RuntimeError if a parameter got no gradient (unless
    ``find_unused_parameters`` or ``static_graph`` is set), or if communication failed.

    Whether a backward is synchronised is decided when its first gradient arrives, by
    ``require_backward_grad_sync`` at that moment; DDP decides at forward.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: list[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise errors.not_a_module(module)
        refuse_arguments(
            dim=dim or None,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            batched_grad_copy=batched_grad_copy,
        )
        self._options = make_options(
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb_list=bucket_cap_mb_list,
            forward_sync_buffers=forward_sync_buffers,
        )
        self.process_group = _resolve_group(process_group)
        self.parameters_to_ignore = params.ignored_names(module)
        managed = params.managed_params(module, self.parameters_to_ignore)
        _check_trainable(module, managed)
        place = placement.place(module, self.parameters_to_ignore, device_ids, output_device)
        self.device = place.device
        self.device_type = place.device.type
        self.is_multi_device_module = place.is_multi_device
        self.device_ids = place.device_ids
        self.output_device = place.output_device
        self.dim = dim
        self.module = module
        self.find_unused_parameters = self._options.find_unused_parameters
        self.gradient_as_bucket_view = self._options.gradient_as_bucket_view
        self.static_graph = self._options.static_graph
        self.bucket_bytes_cap = self._options.cap_bytes
        self.forward_sync_buffers = self._options.sync_buffers_at_forward
        # DDP skips the broadcast of buffers after a forward that was not synchronised.
        self.require_forward_param_sync = True

        if self._options.init_sync:
            state_sync.check_params_agree(managed, self.process_group)
            state_sync.broadcast_from_rank_0(
                params.module_state(
                    module, self.parameters_to_ignore, self._options.sync_buffers_at_init
                ),
                self.process_group,
            )
        self.reducer = self._make_reducer(managed)

    def _make_reducer(self, managed: Sequence[params.ManagedParam]) -> _C.Reducer:
        return _C.Reducer(
            [_C.ReducerParam(p.tensor, p.name, p.expect_sparse) for p in managed],
            self.process_group,
            self._options.caps,
            self._options.mode,
            self._options.gradient_as_bucket_view,
        )

    # ---- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module; see :class:`ReducerDDP` for what happens around it."""
        records_graph = torch.is_grad_enabled()
        if records_graph:
            self.reducer.prepare_forward()
        if self.forward_sync_buffers and self.require_forward_param_sync:
            self._sync_buffers()
        if self.device_ids:
            inputs = nested.to_device(inputs, self.device)
            kwargs = nested.to_device(kwargs, self.device)
        output = self.module(*inputs, **kwargs)
        if records_graph:
            self.reducer.watch_outputs(list(nested.tensors_in(output)))
        self.require_forward_param_sync = records_graph and self.require_backward_grad_sync
        return output

    def _sync_buffers(self) -> None:
        buffers = params.managed_buffers(self.module, self.parameters_to_ignore)
        if buffers:
            # Autograd may have saved a buffer in an earlier forward: it must not see a new version.
            with torch.autograd._unsafe_preserve_version_counter(tuple(buffers)):
                state_sync.broadcast_from_rank_0(buffers, self.process_group)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward averages gradients. May be set by hand, as in DDP."""
        return self.reducer.sync_enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.sync_enabled = bool(value)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds to local gradients; the next backward outside averages the sum.

        It is the backward that has to run inside; where the forward ran makes no difference.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    @property
    def broadcast_buffers(self) -> bool:
        """Older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    # ---- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if not dist.is_initialized() or self.process_group is not dist.group.WORLD:
            raise errors.not_default_group()
        state = copy.copy(self.__dict__)
        del state["process_group"], state["reducer"]
        state["require_backward_grad_sync"] = self.require_backward_grad_sync
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync")
        super().__setstate__(state)
        self.process_group = _resolve_group(None)
        managed = params.managed_params(self.module, self.parameters_to_ignore)
        self.reducer = self._make_reducer(managed)
        self.require_backward_grad_sync = sync

    # ---- what DDP has besides ------------------------------------------------------------------

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Marks parameters and buffers, by their full names, to be left alone by a later wrap."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]

    def _remove_autograd_hooks(self) -> None:
        """Takes ddpx's hooks off the parameters; no later backward is synchronised."""
        self.reducer.remove_hooks()


# isinstance(model, DistributedDataParallel) holds, without inheriting a line of it: libraries ask.
DistributedDataParallel.register(ReducerDDP)


def _resolve_group(process_group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if process_group is None:
        if not dist.is_initialized() or dist.group.WORLD is None:
            raise errors.no_process_group()
        return dist.group.WORLD
    if process_group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise errors.rank_not_in_group()
    if not isinstance(process_group, dist.ProcessGroup):
        raise errors.not_a_process_group(process_group)
    return process_group


def _check_trainable(module: nn.Module, managed: Sequence[params.ManagedParam]) -> None:
    if not managed:
        raise errors.nothing_to_train()
    lazy = [p.name for p in managed if isinstance(p.tensor, UninitializedParameter)]
    if lazy:
        raise errors.uninitialized_params(lazy)
    if managed[0].tensor.device.type == "cpu":
        names = [n for n, m in module.named_modules() if isinstance(m, nn.SyncBatchNorm)]
        if names:
            raise errors.sync_batch_norm_on_cpu(names)
