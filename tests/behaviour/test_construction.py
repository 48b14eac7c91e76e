"""Construction: broadcasts, checks, copies, and what remains after a wrapper is gone."""

from __future__ import annotations

import copy
import gc
import io
import os
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx import ReducerDDP


def _same_on_all_ranks(tensor: torch.Tensor) -> bool:
    reference = tensor.clone()
    dist.broadcast(reference, 0)
    verdict = torch.tensor([int(torch.equal(reference, tensor))])
    dist.all_reduce(verdict, dist.ReduceOp.MIN)
    return bool(verdict.item())


def _differing_module() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].running_mean.fill_(dist.get_rank())
    module[0].bias.requires_grad_(False).fill_(dist.get_rank())
    return module


def _broadcast_of_state() -> None:
    ours = ReducerDDP(_differing_module())
    assert all(_same_on_all_ranks(tensor) for tensor in ours.state_dict().values())

    kept = ReducerDDP(_differing_module(), broadcast_buffers=False)
    assert _same_on_all_ranks(kept.module[0].weight.detach())
    assert not _same_on_all_ranks(kept.module[1].running_mean)

    synced = ReducerDDP(_differing_module(), forward_sync_buffers=False)
    assert _same_on_all_ranks(synced.module[1].running_mean)

    untouched = ReducerDDP(_differing_module(), init_sync=False)
    assert not _same_on_all_ranks(untouched.module[0].weight.detach())


def test_broadcast_of_state(ranks):
    ranks(2).run(_broadcast_of_state)


def _buffers_at_forward() -> None:
    x = torch.ones(3, 4) * (dist.get_rank() + 1)
    ours = ReducerDDP(_differing_module())
    ours.module[1].running_mean.fill_(dist.get_rank())
    ours(x)  # forward broadcasts buffers, then updates them from each rank's batch
    assert not _same_on_all_ranks(ours.module[1].running_mean)
    ours.eval()
    ours(x)
    assert _same_on_all_ranks(ours.module[1].running_mean)

    ours = ReducerDDP(_differing_module(), forward_sync_buffers=False).eval()
    ours.module[1].running_mean.fill_(dist.get_rank())
    ours(x)
    assert not _same_on_all_ranks(ours.module[1].running_mean)


def test_buffers_at_forward(ranks):
    ranks(2).run(_buffers_at_forward)


class _Sized(nn.Module):
    def __init__(self, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(size, dtype=dtype) for size in sizes)


def _change(name: str, module: nn.Module, options: dict[str, Any]) -> nn.Module:
    """Changes the module or the options of the last rank."""
    weights = module.weights
    if name == "shape":
        weights[1] = nn.Parameter(torch.ones(4))
    elif name == "count":
        weights.append(nn.Parameter(torch.ones(5)))
    elif name == "name":
        module.other = weights[1]
        module.weights = nn.ParameterList([weights[0]])
    elif name == "order":
        module.weights = nn.ParameterList()
        module.weights.register_parameter("1", weights[1])
        module.weights.register_parameter("0", weights[0])
    elif name == "dtype":
        weights[0].data = weights[0].data.double()
    elif name == "strides":
        weights[0].data = weights[0].data.t().contiguous().t()
    elif name == "frozen":
        weights[1].requires_grad_(False)
    elif name == "buffer":
        module.register_buffer("mean", torch.zeros(7))
    elif name == "option":
        options["find_unused_parameters"] = True
    elif name == "version":
        ddpx.version.__version__ = "9.9"
    elif name == "version of torch":
        torch.__version__ = "9.9"
    return module


DIFFERENCES = {
    "shape": [
        "parameter 'weights.1': shape (3,), float32, strides (1,), trained on rank 0, rank 1; "
        "shape (4,), float32, strides (1,), trained on rank 2"
    ],
    "count": ["parameter 'weights.2': absent on rank 0, rank 1; shape (5,), "],
    "name": ["parameter 'weights.1': shape (3,)", "parameter 'other': absent on rank 0, rank 1; "],
    "order": ["parameter number 0: 'weights.0' on rank 0, rank 1; 'weights.1' on rank 2"],
    "dtype": [
        "parameter 'weights.0': shape (2, 2), float32, strides (2, 1), trained on rank 0, rank 1; "
        "shape (2, 2), float64"
    ],
    "strides": ["strides (2, 1), trained on rank 0, rank 1; shape (2, 2), float32, strides (1, 2)"],
    "frozen": ["trained on rank 0, rank 1; shape (3,), float32, strides (1,), frozen on rank 2"],
    "buffer": [
        "buffer 'mean': absent on rank 0, rank 1; shape (7,), float32, strides (1,) on rank 2"
    ],
    "option": ["option find_unused_parameters: False on rank 0, rank 1; True on rank 2"],
    "version": ["ddpx version: ", " on rank 0, rank 1; 9.9 on rank 2"],
    "version of torch": ["torch version: ", " on rank 0, rank 1; 9.9 on rank 2"],
}


def _mismatch(name: str) -> str:
    versions = ddpx.version.__version__, torch.__version__
    module, options = _Sized((2, 2), (3,)), {}
    if dist.get_rank() == 2:
        _change(name, module, options)
    try:
        with pytest.raises(RuntimeError, match="needs the same module, options and ver") as error:
            ReducerDDP(module, **options)
    finally:
        ddpx.version.__version__, torch.__version__ = versions
    return str(error.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_mismatch_is_reported_alike_on_every_rank(ranks, name):
    reports = set(ranks(3).run(_mismatch, name))
    assert len(reports) == 1
    report = reports.pop()
    for part in DIFFERENCES[name]:
        assert part in report, report
    # One line for each difference. No other name appears.
    num_lines = 2 if name == "name" else 1
    assert len(report.splitlines()) == num_lines + 2, report


OPTIONS = {
    "static_graph": True,
    "gradient_as_bucket_view": True,
    "bucket_cap_mb": 3,
    "bucket_cap_mb_list": [1.0, 2.0],
    "transport": "group",
    "average": "sum",
    "reduce_dtype": torch.float64,
    "mixed_precision": _MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16),
    "broadcast_buffers": False,
    "forward_sync_buffers": False,
    "lazy_bucket_allocation": True,
    "batched_grad_copy": True,
    "skip_all_reduce_unused_params": True,
}


def _another_option(name: str) -> str:
    options = {name: OPTIONS[name]} if dist.get_rank() == 1 else {}
    with pytest.raises(RuntimeError, match="needs the same module, options and ver") as error:
        ReducerDDP(_Sized((2, 2)), **options)
    return str(error.value)


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_is_compared(ranks, name):
    (report,) = set(ranks(2).run(_another_option, name))
    assert " on rank 0; " in report and " on rank 1\n" in report
    assert f"option {name}" in report, report


def _other_delayed_params() -> str:
    module = _Sized((2, 2), (3,))
    delayed, trigger = list(module.named_parameters())[:: 2 * dist.get_rank() - 1]
    with pytest.raises(RuntimeError, match="needs the same module, options and ver") as error:
        ReducerDDP(
            module, delay_all_reduce_named_params=[delayed], param_to_hook_all_reduce=trigger[1]
        )
    return str(error.value)


def test_delayed_params_are_compared(ranks):
    (report,) = set(ranks(2).run(_other_delayed_params))
    names = "['weights.1'] on rank 0; ['weights.0'] on rank 1"
    assert f"option delay_all_reduce_named_params: {names}" in report
    trigger = "'weights.0' on rank 0; 'weights.1' on rank 1"
    assert f"option param_to_hook_all_reduce: {trigger}" in report


def _another_variable(name: str) -> str:
    if dist.get_rank() == 1:
        os.environ[name] = "1"
    try:
        with pytest.raises(RuntimeError, match="needs the same module, options and ver") as error:
            ReducerDDP(_Sized((2, 2)))
    finally:
        os.environ.pop(name, None)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["CHECK_FINITE", "HEALTH", "HOST_LEASE", "TIMELINE", "TIMELINE_STEPS"]
)
def test_each_variable_that_decides_about_calls_is_compared(ranks, name):
    (report,) = set(ranks(2).run(_another_variable, f"DDPX_{name}"))
    assert f"environment variable DDPX_{name}: not set on rank 0; 1 on rank 1\n" in report


def _another_number_of_small_bytes() -> None:
    os.environ["DDPX_SMALL_GRAD_BYTES"] = str(100 * dist.get_rank())
    try:
        ReducerDDP(_Sized((2, 2)))
    finally:
        del os.environ["DDPX_SMALL_GRAD_BYTES"]


def test_the_size_of_small_gradients_may_differ(ranks):
    """The size decides only how a rank copies gradients."""
    ranks(2).run(_another_number_of_small_bytes)


def _another_number_of_bytes_in_a_plan() -> None:
    plan = ddpx.BucketPlan((("weights.0",),), (16 + dist.get_rank(),))
    ReducerDDP(_Sized((2, 2)), bucket_plan=plan)


def test_numbers_of_bytes_in_a_plan_may_differ(ranks):
    """Buckets are made from the names in the plan."""
    ranks(2).run(_another_number_of_bytes_in_a_plan)


def _many_differences() -> str:
    sizes = [(3,)] * 30 if dist.get_rank() else [(2,)] * 30
    with pytest.raises(RuntimeError) as error:
        ReducerDDP(_Sized(*sizes))
    return str(error.value)


def test_many_differences_are_counted(ranks):
    for report in ranks(2).run(_many_differences):
        assert "and 20 more differences\n" in report
        assert len(report.splitlines()) == 13


def _ignored() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torch.manual_seed(dist.get_rank())
    nn.init.normal_(module[0].weight)
    module[0].bias.requires_grad_(False)
    for name in ("kept", "shared"):
        module.register_buffer(name, torch.tensor(float(dist.get_rank())))
    names = ["0.weight", "0.bias", "kept"]
    ReducerDDP._set_params_and_buffers_to_ignore_for_model(module, names)
    ours = ReducerDDP(module)
    module[0].bias.requires_grad_(True)  # may change, since the wrapper ignores the parameter
    for _ in range(2):
        ours.zero_grad()
        ours(torch.randn(3, 4)).square().sum().backward()
    assert not _same_on_all_ranks(module[0].weight.detach())
    assert not _same_on_all_ranks(module[0].weight.grad)
    assert not _same_on_all_ranks(module[0].bias.grad)
    assert _same_on_all_ranks(module[1].weight.grad)
    assert (module.kept, module.shared) == (dist.get_rank(), 0)


def test_ignored_params_and_buffers(ranks):
    ranks(2).run(_ignored)


def _copies() -> None:
    ours = ReducerDDP(nn.Linear(4, 4), gradient_as_bucket_view=True)
    ours.require_backward_grad_sync = False
    buffer = io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(ours), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin.module.weight, ours.module.weight)
        assert twin.module.weight is not ours.module.weight
        assert not twin.require_backward_grad_sync
        twin.require_backward_grad_sync = True
        twin(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
        assert _same_on_all_ranks(twin.module.weight.grad)
        assert ours.module.weight.grad is None


def test_deepcopy_and_pickle(ranks):
    ranks(2).run(_copies)


def _state_dict() -> None:
    ours = ReducerDDP(nn.Linear(4, 4))
    assert list(ours.state_dict()) == ["module.weight", "module.bias"]
    ours.load_state_dict({name: tensor + 1 for name, tensor in ours.state_dict().items()})
    assert _same_on_all_ranks(ours.module.weight.detach())


def test_state_dict_has_ddps_prefix(ranks):
    ranks(2).run(_state_dict)


def _nothing_is_left_behind(explicitly: bool) -> None:
    """Rank 0 alone runs a backward after the wrapper is gone.

    A remaining hook would make it hang.
    """
    module = nn.Linear(4, 4)
    ours = ReducerDDP(module)
    ours(torch.ones(2, 4)).sum().backward()
    module.zero_grad()
    if explicitly:
        ours._remove_autograd_hooks()
    else:
        gone = weakref.ref(ours)
        del ours
        gc.collect()
        assert gone() is None
    if dist.get_rank() == 0:
        module(torch.ones(2, 4)).sum().backward()
        assert torch.equal(module.bias.grad, torch.full((4,), 2.0))
    again = ReducerDDP(module)
    again.zero_grad()
    again(torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    assert torch.equal(module.weight.grad, torch.full((4, 4), 3.0))


@pytest.mark.parametrize("explicitly", [False, True], ids=["destroyed", "removed"])
def test_nothing_is_left_behind(ranks, explicitly):
    ranks(2).run(_nothing_is_left_behind, explicitly)


def _two_groups() -> None:
    """A subgroup averages over its own members only."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    rank = dist.get_rank()
    ours = ReducerDDP(nn.Linear(1, 1, bias=False), process_group=pairs[rank // 2])
    ours(torch.tensor([[float(rank)]])).sum().backward()
    assert ours.module.weight.grad.item() == (0.5 if rank < 2 else 2.0)


def test_subgroups(ranks):
    ranks(3).run(_two_groups)


def _described(**options: Any) -> str:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    return repr(ReducerDDP(module, **options))


@pytest.mark.parametrize("average", ["mean", "sum"])
def test_repr_says_what_is_averaged(ranks, average):
    end = "" if average == "mean" else ", average='sum'"
    for rank, text in enumerate(ranks(2).run(_described, average=average)):
        first, second, *_ = text.splitlines()
        assert first == "ReducerDDP("
        assert second == f"  ddpx, rank {rank} of 2, 3 parameters in 1 bucket{end}"
