"""``ReducerDDP``: averages gradients of a module over ranks, with the reducer of ddpx."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ddpx import errors, health, params
from ddpx.comm.process_group import resolve_group
from ddpx.ddp.arguments import agreement
from ddpx.ddp.fronts import construction
from ddpx.ddp.fronts.wrapper_interface import DDPInterface
from ddpx.ddp.functions import extensions
from ddpx.ddp.functions.extensions import AsMethod
from ddpx.ddp.interface.torch_only import check_overrides
from ddpx.ddp.replica import ownership
from ddpx.ddp.user_module import nested
from ddpx.planning import BucketPlan


class ReducerDDP(DDPInterface):
    """Averages the gradients of ``module`` over all ranks while backward runs.

    The first 21 arguments are those of ``torch.nn.parallel.DistributedDataParallel`` (DDP) of
    torch 2.15, in the same order. The arguments of ddpx are keyword-only.
    ``isinstance(model, DistributedDataParallel)`` is true. On CPU with ``gloo``, results equal
    those of DDP bit for bit.

    A backward averages gradients, unless the backward or the forward of each output that the
    backward reaches runs in :meth:`no_sync`.

    A derived class may override, or call, the methods of DDP that ``forward`` is made of, such as
    ``_pre_forward``, ``_run_ddp_forward``, ``_post_forward`` and ``_sync_buffers``.

    Parameters and buffers may be DTensors over another dimension of the mesh. ``param.grad`` is
    then a DTensor in the parameter's placements.

    Args:
        module: The model. All its parameters are on devices of one type. The type is the same on
            every rank.
        device_ids: A list with the device of the module, if the module is on one accelerator. The
            wrapper then moves inputs to this device. None, the default, for all other modules.
        output_device: The device of outputs, if the module is on one accelerator. The wrapper
            stores this argument for compatibility with DDP.
        dim: The batch dimension of ``scatter()`` and ``gather()``. No other effect. Default 0.
        broadcast_buffers: The older form of ``forward_sync_buffers``. This form also decides
            whether construction broadcasts buffers.
        init_sync: Compare the parameters of all ranks at construction, and broadcast the state of
            rank 0. Default True.
        process_group: The ranks to average over. Default: the default process group.
        bucket_cap_mb: The size of a bucket in MiB. A negative size is no limit, as in DDP. Default:
            25, with a first bucket of 1 MiB. ``"auto"``: the first 300 steps at most measure plans,
            and the wrapper uses the fastest plan from then on. ``param.grad`` may move between
            these steps if ``gradient_as_bucket_view`` is set. At three or more ranks, another plan
            gives other bits over gloo and NCCL. Excludes a communication hook, ``bucket_plan``,
            ``bucket_cap_mb_list`` and delayed parameters. The page docs/bucket_plans.md has the
            rules. ``DDPX_BUCKET_CAP_MB`` takes precedence over a number. ``"auto"`` is not in DDP.
        find_unused_parameters: Allow parameters without a gradient in some steps. If no rank uses
            a parameter in a step, ``param.grad`` does not change. Default False.
        check_reduction: No effect, as in DDP.
        gradient_as_bucket_view: Place ``param.grad`` in the bucket. This saves a copy, and memory
            of the size of the gradients. Default False.
        static_graph: Promise that every step uses the same parameters, each the same number of
            times. Default False.
        delay_all_reduce_named_params: A list of (name, parameter) pairs. These parameters are
            averaged together, when the gradient of ``param_to_hook_all_reduce`` is ready. Steps
            may leave these parameters unused.
        param_to_hook_all_reduce: The parameter that the delayed parameters wait for.
        mixed_precision: An object with ``param_dtype``, ``reduce_dtype`` and ``buffer_dtype``. The
            module computes in ``param_dtype``. Gradients are summed in ``reduce_dtype``.
            Parameters and gradients keep their dtypes. Excludes a communication hook.
        device_mesh: A mesh of one dimension, in place of ``process_group``. The mesh may be part
            of a larger mesh.
        skip_all_reduce_unused_params: With ``find_unused_parameters``: do not communicate a bucket
            whose parameters no rank used in the last steps. Default False.
        bucket_cap_mb_list: The size in MiB of each bucket in turn. Further buckets have the last
            size. Default None.
        batched_grad_copy: Copy and divide all gradients of a bucket together, when the bucket is
            full. Default False.
        forward_sync_buffers: Broadcast the buffers of rank 0 before each forward. Default True.
        lazy_bucket_allocation: Allocate the memory of a bucket when its first gradient is packed,
            and release the memory at the end of the step. The memory of buckets and of activations
            then overlaps less. With ``gradient_as_bucket_view``, ``param.grad`` keeps the memory.
            Default False.
        reduce_dtype: The dtype in which floating-point gradients are summed over ranks, for
            example ``torch.float32`` for a 16-bit model. If this dtype is wider than the
            gradient's, sums over micro-steps in ``no_sync`` have it, too. ``param.grad`` is
            rounded to the parameter's dtype once, after the sum. Not in DDP.
        grad_dtype: The dtype of ``param.grad``, as ``Tensor.grad_dtype`` of torch. Default: the
            parameter's dtype. ``torch.float32`` avoids the last rounding, too. Also the dtype of
            sums, unless ``reduce_dtype`` is given. The optimizer must accept such gradients. Not
            in DDP.
        average: What a step makes of the gradients of all ranks. ``"mean"``: their sum, divided by
            the number of ranks, as DDP. ``"sum"``: their sum. ``"weights"``: their sum, divided by
            the sum of the weights that ``ddpx.set_weight()`` sets before each forward. The page
            docs/averages.md has the rules. Default ``"mean"``. Not in DDP.
        transport: ``"auto"``: over a gloo group, buckets move through shared memory if all ranks
            of the group can share memory. ``"group"``: buckets move over the process group.
            ``"shm"``: shared memory, or an error; over several hosts, shared memory within hosts,
            where sums over three or more ranks have other roundings than over gloo. Default: the
            value of ``DDPX_TRANSPORT``, otherwise ``"auto"``. Communication hooks, sparse
            gradients, copies of a wrapper and wrappers with ``init_sync=False`` use the group. Not
            in DDP.
        bucket_plan: A :class:`ddpx.BucketPlan`, or the path of its file: the buckets of all steps,
            in place of bucket sizes. Default: the file in ``DDPX_BUCKET_PLAN``, if it is set. Not
            in DDP.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has a wrong value.
        RuntimeError: No parameter requires a gradient, or parameters differ between ranks. In
            ``backward()``: a parameter got no gradient, and neither ``find_unused_parameters`` nor
            ``static_graph`` is set; or communication failed.

    Example:
        >>> model = ddpx.ReducerDDP(module)
        >>> model(inputs).sum().backward()
        >>> module.weight.grad
        tensor([[16., 16., 16., 16.]])
    """

    @agreement.faults_reach_all_ranks
    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | str | None = None,
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
        lazy_bucket_allocation: bool = False,
        *,
        reduce_dtype: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
        average: str | None = None,
        transport: str | None = None,
        bucket_plan: BucketPlan | str | Path | None = None,
    ) -> None:
        check_overrides(type(self), ReducerDDP)
        replica, place = construction.prepare(
            module,
            keeps_module=True,
            device_ids=device_ids,
            output_device=output_device,
            broadcast_buffers=broadcast_buffers,
            init_sync=init_sync,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            check_reduction=check_reduction,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
            mixed_precision=mixed_precision,
            device_mesh=device_mesh,
            skip_all_reduce_unused_params=skip_all_reduce_unused_params,
            bucket_cap_mb_list=bucket_cap_mb_list,
            batched_grad_copy=batched_grad_copy,
            forward_sync_buffers=forward_sync_buffers,
            lazy_bucket_allocation=lazy_bucket_allocation,
            reduce_dtype=reduce_dtype,
            grad_dtype=grad_dtype,
            average=average,
            transport=transport,
            bucket_plan=bucket_plan,
        )
        super().__init__(replica, place, device_mesh, dim)
        construction.complete(self)

    # Beyond DDP. A method is absent if the module has an attribute of its name.
    bucket_plan = AsMethod(extensions.bucket_plan)
    plan_report = AsMethod(extensions.plan_report)
    register_post_sync_hook = AsMethod(extensions.register_post_sync_hook)
    reset = AsMethod(extensions.reset)
    set_check_finite = AsMethod(extensions.set_check_finite)
    set_requires_gradient_sync = AsMethod(extensions.set_requires_gradient_sync)
    set_weight = AsMethod(extensions.set_weight)
    synchronized_grads = AsMethod(extensions.synchronized_grads)
    wait_for_gradients = AsMethod(extensions.wait_for_gradients)

    # ---- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module on this rank's inputs, as ``model(*inputs, **kwargs)``.

        The forward first broadcasts the buffers of rank 0, if ``forward_sync_buffers`` is set. If
        ``device_ids`` is given, the forward moves tensors in the inputs to this device.

        Args:
            inputs: Positional arguments of the module.
            kwargs: Keyword arguments of the module.

        Returns:
            The output of the module.

        Raises:
            RuntimeError: A parameter of the module was replaced after wrapping, and no output
                requires a gradient. Otherwise the backward raises this error.
            RankFailure: A rank was lost, or communication failed.

        Example:
            >>> model(inputs).shape
            torch.Size([8, 1])
        """
        running = ownership.forwards.running
        running.append(self._ddpx)
        module_runs = False
        try:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            module_runs = True
            output = _run(self, inputs, kwargs)
            module_runs = False
            return self._post_forward(output)
        except Exception as error:
            health.publish_fault(self._ddpx.reducer.monitor, error, module_runs)
            raise
        finally:
            running.pop()

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the module."""
        with self._inside_ddp_forward():
            return self.module(*inputs, **kwargs)

    def extra_repr(self) -> str:
        """Returns the line of ``repr()`` that describes the wrapper.

        Example:
            >>> model
            ReducerDDP(
              ddpx, rank 0 of 2, 2 parameters in 1 bucket
              (module): Linear(in_features=4, out_features=1, bias=True)
            )
        """
        group, buckets = self.process_group, self.reducer.plan.buckets
        average = self._ddpx.options.average
        return (
            f"ddpx, rank {group.rank()} of {group.size()}, "
            f"{errors.count(sum(map(len, buckets)), 'parameter')} in "
            f"{errors.count(len(buckets), 'bucket')}"
            f"{'' if average == 'mean' else f', average={average!r}'}"
        )

    # ---- copies --------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        state["_ddpx"] = self._ddpx.without_ranks()  # a copy gets its own reducer
        state["require_backward_grad_sync"] = self.require_backward_grad_sync
        state["settings_of_reducer"] = self.reducer.settings
        present = {id(param) for _, param in self.module.named_parameters()}
        state["averaged"] = [p.tensor for p in self._ddpx.managed if id(p.tensor) in present]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        sync = state.pop("require_backward_grad_sync")
        settings_of_reducer = state.pop("settings_of_reducer")
        averaged = state.pop("averaged")
        super().__setstate__(state)
        self._lazy_init_ran = False
        replica = self._ddpx
        replica.continue_with(resolve_group(None))
        with params.unfrozen(averaged):  # ranks may have frozen different parameters meanwhile
            managed = construction.params_to_average(self)
            replica.attach(managed, ownership.earlier_owners(replica, managed))
        if self.static_graph:
            self.reducer.set_static_graph()
        self.reducer.apply(settings_of_reducer)
        replica.comm_hook.continue_with(self.reducer)
        replica.post_sync.continue_with(self.reducer)
        construction.announce(self, False)  # only some ranks may make a copy
        self.require_backward_grad_sync = sync


def _run(wrapper: ReducerDDP, inputs: Any, kwargs: Any) -> Any:
    """Runs the module, with cast parameters if ``mixed_precision`` is set."""
    replica = wrapper._ddpx
    precision = replica.averaging.precision
    if precision is None or replica.is_part_of_another():
        return wrapper._run_ddp_forward(*inputs, **kwargs)
    with precision.forward() as outputs:
        output = wrapper._run_ddp_forward(*inputs, **kwargs)
        outputs += nested.tensors_in(output)
    return output


# isinstance(model, TorchDDP) is true, although no code of DDP is inherited.
TorchDDP.register(ReducerDDP)

# patch_ddp() gives ReducerDDP this name. Pickles with either name load.
DistributedDataParallel = ReducerDDP
