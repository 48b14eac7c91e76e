"""Each method of ReducerDDP is also a function of ddpx, for a wrapper and a replicated module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _BufferCommHookLocation

import ddpx
from ddpx import ReducerDDP
from ddpx.ddp.fronts.front import Front
from ddpx.ddp.functions.extensions import AsMethod

# The function in the place of each name. The private names are those that scripts call.
FUNCTIONS = {
    "no_sync": "no_sync",
    "require_backward_grad_sync": "set_requires_gradient_sync",
    "join": "join",
    "join_hook": "as_ddp",
    "join_device": "as_ddp",
    "join_process_group": "as_ddp",
    "register_comm_hook": "register_comm_hook",
    "_register_builtin_comm_hook": "register_builtin_comm_hook",
    "_register_buffer_comm_hook": "register_buffer_comm_hook",
    "_register_fused_optim": "register_fused_optim",
    "_set_static_graph": "set_static_graph",
    "_set_sparse_metadata": "set_sparse_metadata",
    "broadcast_buffers": "set_forward_sync_buffers",
    "will_sync_module_buffers": "will_sync_module_buffers",
    "require_manual_backward_finalization": "set_manual_finalization",
    "should_finalize_after_backward": "should_finalize_after_backward",
    "finalize_backward": "finalize_backward",
    "process_group": "process_group",
    "_update_process_group": "update_process_group",
    "_remove_autograd_hooks": "unreplicate",
    "_get_ddp_logging_data": "logging_data",
    "logger": "logging_data",
    "_set_ddp_runtime_logging_sample_rate": "set_logging_sample_rate",
}
# Names without a function, and the reason.
WITHOUT = {
    "forward": "the module's own forward",
    "extra_repr": "the module's own text",
    "scatter": "splits inputs of DDP with several devices; torch has the function",
    "gather": "joins outputs of DDP with several devices; torch has the function",
    "to_kwargs": "moves inputs, which device_ids does",
    "reducer": "internal",
}
PRIVATE = ("_set_", "_register_", "_update_", "_remove_", "_get_ddp_")
# These only have an effect in DDP, or belong to the class.
OF_DDP = {"_set_ddp_sink_clone", "_set_params_and_buffers_to_ignore_for_model"}


def _names_of_wrapper() -> set[str]:
    found = set()
    for base in ReducerDDP.__mro__:
        if not base.__module__.startswith("ddpx.") or base.__name__ == "TorchOnlyNames":
            continue
        for name, value in vars(base).items():
            is_member = callable(value) or isinstance(value, (property, staticmethod, AsMethod))
            if is_member and (name[0] != "_" or name.startswith(PRIVATE)):
                found.add(name)
    return found - OF_DDP


def test_each_name_has_a_function():
    names = _names_of_wrapper()
    of_functions = {name for name in names if isinstance(vars(ReducerDDP).get(name), AsMethod)}
    assert names == of_functions | FUNCTIONS.keys() | WITHOUT.keys()
    for name in {*of_functions, *FUNCTIONS.values()}:
        assert name in ddpx.__all__, name
        assert next(iter(inspect.signature(getattr(ddpx, name)).parameters)) in ("model", "module")


# ---- both fronts -------------------------------------------------------------------------------


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 4) * (1 + dist.get_rank())).sum().backward()


def _train(model: nn.Module) -> None:
    for _ in range(2):
        model.zero_grad()
        _step(model)


def _no_sync(model: nn.Module) -> None:
    with ddpx.no_sync(model):
        _step(model)
    _step(model)


def _no_sync_set(model: nn.Module) -> None:
    ddpx.set_requires_gradient_sync(model, False)
    _step(model)
    ddpx.set_requires_gradient_sync(model, True)
    _step(model)


def _joins(model: nn.Module) -> None:
    for context in (ddpx.join(model), Join([ddpx.as_ddp(model)])):
        with context:
            for _ in range(1 + dist.get_rank()):
                model.zero_grad()
                _step(model)


def _hook(model: nn.Module) -> None:
    ddpx.register_comm_hook(model, None, default_hooks.bf16_compress_hook)
    _train(model)
    assert ddpx.logging_data(model)["comm_hook"] == "bf16_compress_hook"


def _builtin_hook(model: nn.Module) -> None:
    ddpx.register_builtin_comm_hook(model, dist.BuiltinCommHookType.FP16_COMPRESS)
    _train(model)


def _buffer_hook(model: nn.Module) -> None:
    calls = []

    def hook(state: object, named: dict[str, torch.Tensor]) -> None:
        calls.append(
            {name.rpartition(".")[2]: buffer.sum().item() for name, buffer in named.items()}
        )

    for where in _BufferCommHookLocation:
        ddpx.register_buffer_comm_hook(model, None, hook, where)
        _train(model)
    assert all(
        call.keys() == {"num_batches_tracked", "running_mean", "running_var"} for call in calls
    )
    # Two calls before their forwards, and two calls after their forwards.
    assert [call["num_batches_tracked"] for call in calls] == [0, 1, 3, 4]


def _fused(model: nn.Module) -> None:
    ddpx.register_fused_optim(model, torch.optim.SGD, 0.1)
    _train(model)


def _static(model: nn.Module) -> None:
    ddpx.set_static_graph(model)
    _train(model)
    assert ddpx.logging_data(model)["static_graph"] == 1


def _buffers(model: nn.Module) -> None:
    assert ddpx.will_sync_module_buffers(model)
    ddpx.set_forward_sync_buffers(model, False)
    assert not ddpx.will_sync_module_buffers(model)
    _train(model)


def _manual(model: nn.Module) -> None:
    ddpx.set_manual_finalization(model)
    for _ in range(2):
        model.zero_grad()
        _step(model)
        assert ddpx.should_finalize_after_backward(model) in (True, False)
        ddpx.finalize_backward(model)


def _group(model: nn.Module) -> None:
    group = dist.new_group([0, 1])
    ddpx.update_process_group(model, group)
    assert ddpx.process_group(model) is group
    _train(model)


def _logging(model: nn.Module) -> None:
    ddpx.set_logging_sample_rate(model, 1)
    _train(model)
    assert ddpx.logging_data(model)["iteration"] == 1


def _of_ddpx(model: nn.Module) -> None:
    """The functions that are methods, too, have the same code for both fronts."""
    weight = next(model.parameters())
    averaged = []
    handle = ddpx.register_post_sync_hook(model, weight, lambda p: averaged.append(p.grad.sum()))
    ddpx.set_check_finite(model)
    _train(model)
    handle.remove()
    assert len(averaged) == 2
    ddpx.wait_for_gradients(model)
    ddpx.reset(model)
    (grad,) = ddpx.synchronized_grads(model, model(torch.ones(2, 4)).sum(), [weight])
    assert grad is not None
    assert len(ddpx.bucket_plan(model).buckets) >= 1
    assert [status.rank for status in ddpx.peer_status(model)] == [0, 1]
    stack = ddpx.peer_stack(model, 1 - dist.get_rank(), 2.0)
    assert stack is not None and "test_function_forms" in stack
    dist.barrier()
    with ddpx.record(model) as timeline:
        _train(model)
    assert len(timeline.steps) == 2


def _weights(model: nn.Module) -> None:
    for _ in range(2):
        model.zero_grad()
        ddpx.set_weight(model, 2.0 * (1 + dist.get_rank()))
        _step(model)


# The arguments of the fronts, where they are not the defaults.
OPTIONS: dict[str, dict[str, Any]] = {"weights": {"average": "weights"}}
RUNS: dict[str, Callable[[nn.Module], None]] = {
    run.__name__.strip("_"): run
    for run in (
        _no_sync,
        _no_sync_set,
        _joins,
        _hook,
        _builtin_hook,
        _buffer_hook,
        _fused,
        _static,
        _buffers,
        _manual,
        _group,
        _logging,
        _of_ddpx,
        _weights,
    )
}


def _same_with_both(name: str) -> None:
    results = []
    fronts: tuple[Callable[..., nn.Module], ...] = (ReducerDDP, ddpx.replicate)
    for front in fronts:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        model = front(module, **OPTIONS.get(name, {}))
        RUNS[name](model)
        params: list[Any] = [*model.parameters()]
        results.append([p.grad if p.grad is not None else p.detach() for p in params])
        results[-1] += [p.detach() for p in params]
    for wrapped, replicated in zip(*results, strict=True):
        assert torch.equal(wrapped, replicated)


@pytest.mark.parametrize("name", RUNS)
def test_same_with_both_fronts(ranks, name):
    ranks(2).run(_same_with_both, name)


def _sparse_rows() -> None:
    grads = []
    for front in (ReducerDDP, ddpx.replicate):
        torch.manual_seed(0)
        model = front(nn.Embedding(8, 2, sparse=True))
        name = "weight"
        ddpx.set_sparse_metadata(model, {name: torch.tensor([0, 3])})
        model(torch.tensor([3 * dist.get_rank()])).sum().backward()
        (param,) = model.parameters()
        assert param.grad is not None
        grads.append(param.grad.to_dense())
    assert torch.equal(*grads)


def test_sparse_rows(ranks):
    ranks(2).run(_sparse_rows)


def _early_end() -> None:
    model = ReducerDDP(nn.Linear(4, 2))
    with (
        pytest.raises(RuntimeError, match="exhausted"),
        ddpx.join(model, throw_on_early_termination=True),
    ):
        for _ in range(1 + dist.get_rank()):
            _step(model)
    with pytest.raises(TypeError, match="enabled"):
        ddpx.set_forward_sync_buffers(model, "no")


def test_arguments_reach_the_front(ranks):
    ranks(2).run(_early_end)


def test_a_front_has_no_other_names():
    """The hooks' front has the names of the base class, besides those of its own hooks."""
    from ddpx.ddp.fronts.forward_hooks import HookFront

    own = {name for name in vars(HookFront) if name[0] != "_"}
    assert own == {"module", "install", "uninstall"}
    assert issubclass(HookFront, Front) and issubclass(ReducerDDP, Front)
