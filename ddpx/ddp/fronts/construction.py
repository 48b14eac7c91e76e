"""The construction of a front: a wrapper, or the hooks of ``ddpx.replicate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ddpx import params, settings
from ddpx.comm.process_group import resolve_group
from ddpx.ddp.arguments import checks, placement
from ddpx.ddp.arguments.options import make_options
from ddpx.ddp.arguments.placement import Placement
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.replica import ownership
from ddpx.ddp.replica.replica import Replica
from ddpx.ddp.user_module.module_ref import ModuleRef
from ddpx.params.delayed import DelayedParams
from ddpx.params.dtensors import check_dtensors
from ddpx.params.grad_dtypes import check_grad_dtype
from ddpx.planning import indices_of

# Called with a new front, and with True if all ranks make the front and agree on it.
ConstructionCallback = Callable[[Front, bool], None]
_callbacks: list[ConstructionCallback] = []


def call_on_construction(callback: ConstructionCallback) -> None:
    """Calls ``callback`` with each later front of this process."""
    _callbacks.append(callback)


def announce(front: Front, agreed: bool) -> None:
    """Calls the construction callbacks."""
    for callback in _callbacks:
        callback(front, agreed)


def prepare(
    module: nn.Module,
    *,
    keeps_module: bool,
    device_ids: Any,
    output_device: Any,
    process_group: Any,
    device_mesh: Any,
    delay_all_reduce_named_params: Any,
    param_to_hook_all_reduce: Any,
    also_ignored: frozenset[str] = frozenset(),
    **options: Any,
) -> tuple[Replica, Placement]:
    """Checks arguments of ``ReducerDDP`` and makes a replica that does not average yet.

    Args:
        module: The module.
        keeps_module: Whether the replica keeps the module alive.
        also_ignored: Names of parameters and buffers that take no part, besides those that the
            module names.
        options: The arguments that :func:`make_options` takes.
    """
    checks.check_module(module)
    delayed = DelayedParams(delay_all_reduce_named_params, param_to_hook_all_reduce)
    made = make_options(delayed=delayed, **options)
    group = resolve_group(process_group, device_mesh)
    ignored = params.ignored_names(module) | also_ignored
    replica = Replica(ModuleRef(module, keeps_module), ignored, group, made)
    return replica, placement.place(module, ignored, device_ids, output_device)


def complete(front: Front) -> None:
    """Makes the replica of ``front`` average gradients."""
    replica = front._ddpx
    module, options = replica.module, replica.options
    managed = params_to_average(front)
    checks.check_trainable(module, managed)
    check_dtensors(module, replica.ignored, replica.group)
    front._passing_sync_batchnorm_handle(module)
    front._assign_modules_buffers()

    # Errors of one rank precede the calls in which other ranks rely on this rank.
    earlier_owners = ownership.earlier_owners(replica, managed)
    for owner in earlier_owners:  # agree() writes parameters, which would spoil a pending step
        if not ownership.has_ended(owner):
            owner.reducer.check_can_yield()
    options.delayed.mark(managed)
    owned = frozenset[int]().union(*(owner.param_ids for owner in earlier_owners))
    check_grad_dtype(managed, options.grad_dtype, owned)
    if options.bucket_plan is not None:
        indices_of(options.bucket_plan, managed)
    if options.init_sync:
        replica.agree(managed[0].tensor.device)
    replica.attach(managed, earlier_owners)
    if settings.switch_of("DDPX_CHECK_FINITE"):
        front.reducer.set_check_finite(True)
    if options.static_graph:
        front._set_static_graph()
    if options.init_sync:
        front.reducer.number_as_constructed()
    announce(front, options.init_sync)


def params_to_average(front: Front) -> list[params.ManagedParam]:
    """The parameters that a new reducer averages.

    A class derived from ``ReducerDDP`` may choose them in ``_build_params_for_reducer``, and give
    them names in ``_build_debug_param_to_name_mapping``.
    """
    managed = params.managed_params(front.module, front.parameters_to_ignore)
    choosers = ("_build_params_for_reducer", "_build_debug_param_to_name_mapping")
    if all(getattr(type(front), name) is getattr(Front, name) for name in choosers):
        return managed
    chosen, expect_sparse = front._build_params_for_reducer()
    names = front._build_debug_param_to_name_mapping(chosen)
    return params.choose(managed, chosen, expect_sparse, names)
