"""``lazy_bucket_allocation``: the bits of DDP with this option, and no bucket between steps.

DDP has the option since torch 2.15. With an older torch, DDP without the option is the reference.
The option changes bits of DDP only with views, on a number of ranks that is not a power of two:
there the reference holds up to rounding.
"""

from __future__ import annotations

import copy
import inspect
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_arguments import skip_unless_ddp_takes
from slow_ddp import assert_in_step, error_of, on_ranks, seed
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP

DDP_HAS_IT = (
    "lazy_bucket_allocation" in inspect.signature(DistributedDataParallel.__init__).parameters
)
CAP = {"bucket_cap_mb": 0.002}
VIEW = {"gradient_as_bucket_view": True}
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": VIEW,
    "static": {"static_graph": True},
    "static view": {"static_graph": True, **VIEW},
    "unused": {"find_unused_parameters": True},
    "unused view": {"find_unused_parameters": True, **VIEW},
    "batched": {"batched_grad_copy": True},
    "batched view": {"batched_grad_copy": True, **VIEW},
    "one bucket": {"bucket_cap_mb": 25},
    "one bucket, view": {"bucket_cap_mb": 25, **VIEW},
    "skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
}
modes = pytest.mark.parametrize("mode", MODES)


class _Model(nn.Module):
    """Three layers and an embedding. ``spare`` is used in some steps only."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 16, sparse=sparse)
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 24)
        self.third = nn.Linear(24, 4)
        self.spare = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor, spare: bool = False) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.embedding(x)))))
        return self.third(self.spare(hidden) if spare else hidden)


def _wrap(cls: Any, mode: str, lazy: bool, sparse: bool = False) -> Any:
    torch.manual_seed(0)
    module = _Model(sparse)
    if "find_unused_parameters" not in MODES[mode]:
        module.spare.requires_grad_(False)
    options = {**CAP, **MODES[mode]}
    if lazy:
        options["lazy_bucket_allocation"] = True
    return cls(module, **options)


def _train(model: Any, zeros: str, hook: bool = False, num_steps: int = 7) -> list[torch.Tensor]:
    if hook:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[torch.Tensor] = []
    for number in range(num_steps):
        seed(number)
        if zeros != "keep":
            optimizer.zero_grad(set_to_none=zeros == "none")
        if number in (3, 4):
            with model.no_sync():
                model(torch.randint(10, (6,))).square().mean().backward()
        spare = model.find_unused_parameters and number % 3 == 1
        model(torch.randint(10, (6,)), spare).square().mean().backward()
        for param in model.parameters():
            if param.grad is not None:
                found.append(param.grad.to_dense().clone())
        optimizer.step()
    return found + [p.detach().clone() for p in model.parameters()]


def _compare(ours: list[torch.Tensor], theirs: list[torch.Tensor], exact: bool) -> None:
    assert len(ours) == len(theirs)
    for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
        if exact:
            assert torch.equal(left, right), (index, (left - right).abs().max())
        else:
            torch.testing.assert_close(left, right)


def _check_bits(mode: str, zeros: str, hook: bool) -> None:
    ours = _train(_wrap(ReducerDDP, mode, lazy=True), zeros, hook)
    theirs = _train(_wrap(DistributedDataParallel, mode, lazy=DDP_HAS_IT), zeros, hook)
    exact = DDP_HAS_IT or "view" not in mode or dist.get_world_size() != 3
    _compare(ours, theirs, exact)
    assert_in_step()


@pytest.mark.parametrize("zeros", ["none", "zeros", "keep"])
@pytest.mark.parametrize("world", [1, 2, 3])
@modes
def test_bits_equal_ddp(ranks, world: int, mode: str, zeros: str):
    skip_unless_ddp_takes(MODES[mode])
    on_ranks(ranks, world, _check_bits, mode, zeros, False)


@modes
def test_bits_equal_ddp_with_a_communication_hook(ranks, mode: str):
    skip_unless_ddp_takes(MODES[mode])
    if mode != "skipped":  # DDP calls the hook for no bucket that it skips
        on_ranks(ranks, 3, _check_bits, mode, "none", True)


def _check_sparse(mode: str) -> None:
    ours = _train(_wrap(ReducerDDP, mode, lazy=True, sparse=True), "none")
    theirs = _train(_wrap(DistributedDataParallel, mode, lazy=DDP_HAS_IT, sparse=True), "none")
    _compare(ours, theirs, exact=DDP_HAS_IT or "view" not in mode)


@pytest.mark.parametrize("mode", ["default", "view"])
def test_sparse_gradients(ranks, mode: str):
    on_ranks(ranks, 2, _check_sparse, mode)


def _check_memory() -> None:
    """A bucket has memory within the step only."""
    for lazy in (True, False):
        buffers = []

        def hook(_: object, bucket: dist.GradBucket, seen: Any = buffers) -> torch.futures.Future:
            seen.append(StorageWeakRef(bucket.buffer().untyped_storage()))
            return allreduce_hook(None, bucket)

        model = ReducerDDP(nn.Linear(4, 4), lazy_bucket_allocation=lazy)
        model.register_comm_hook(None, hook)
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
        assert len(buffers) == 3
        end = time.monotonic() + 10
        while lazy and not buffers[-1].expired() and time.monotonic() < end:
            time.sleep(0.01)  # a thread of gloo may hold the bucket for a moment longer
        assert buffers[-1].expired() == lazy


def test_no_memory_between_steps(ranks):
    ranks(2).run(_check_memory)


def _check_manual(mode: str) -> None:
    """finalize_backward() releases the memory."""
    model, plain = (_wrap(ReducerDDP, mode, lazy) for lazy in (True, False))
    model.require_manual_backward_finalization = True
    for number in range(3):
        for each in (model, plain):
            seed(number)
            each.zero_grad()
            each(torch.randint(10, (6,))).square().mean().backward()
        model.finalize_backward()
        _compare(
            [p.grad for p in model.parameters() if p.grad is not None],
            [p.grad for p in plain.parameters() if p.grad is not None],
            exact="view" not in mode,
        )


@pytest.mark.parametrize("mode", ["default", "view", "unused"])
def test_manual_finalization(ranks, mode: str):
    on_ranks(ranks, 3, _check_manual, mode)


def _check_failure(mode: str) -> None:
    """A backward that raises in the middle of its step, on all ranks."""
    model, plain = (_wrap(ReducerDDP, mode, lazy) for lazy in (True, False))
    for each in (model, plain):
        for number in range(2):
            seed(number)
            each.zero_grad()
            each(torch.randint(10, (6,))).square().mean().backward()
        handle = each.module.first.weight.register_hook(_raise)
        assert error_of(each(torch.randint(10, (6,))).sum().backward)
        handle.remove()
        seed(5)
        each.zero_grad()
        each(torch.randint(10, (6,))).square().mean().backward()
    _compare(
        [p.grad for p in model.parameters() if p.grad is not None],
        [p.grad for p in plain.parameters() if p.grad is not None],
        exact=False,
    )
    assert_in_step()


def _raise(_: torch.Tensor) -> None:
    raise RuntimeError("raised by a tensor hook")


@pytest.mark.parametrize("mode", ["default", "view", "unused", "static"])
def test_a_failed_backward(ranks, mode: str):
    on_ranks(ranks, 2, _check_failure, mode)


def _check_late_reduction(mode: str) -> None:
    """A reduction ends after its step has failed. The next step adds to zeroed gradients."""
    pending: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []
    fails = False

    def reduce_later(state, bucket):
        if not fails:
            return allreduce_hook(None, bucket)
        future = torch.futures.Future()
        pending.append((bucket.buffer(), future))
        return future

    model = _wrap(ReducerDDP, mode, True)
    model.register_comm_hook(None, reduce_later)
    for number in range(3):
        seed(number)
        model(torch.randint(10, (6,))).square().mean().backward()
        model.zero_grad()
    fails = True
    engine = torch.autograd.Variable._execution_engine
    output = model(torch.randint(10, (6,)))
    output.register_hook(lambda _: engine.queue_callback(partial(_raise, None)))
    assert error_of(output.sum().backward)
    assert pending
    model.zero_grad(set_to_none=False)
    for buffer, future in pending:
        future.set_result(buffer.fill_(7.0))
    for param in model.parameters():
        assert param.grad is None or not param.grad.any()


@pytest.mark.parametrize("mode", ["default", "view", "one bucket, view", "static view"])
def test_a_reduction_that_ends_after_its_step_has_failed(ranks, mode: str):
    on_ranks(ranks, 2, _check_late_reduction, mode)


def _check_sparse_gradient() -> None:
    """The script gives a dense parameter a sparse gradient, which has no memory of its own."""
    model = _wrap(ReducerDDP, "view", True)
    model(torch.randint(10, (6,))).sum().backward()
    model.zero_grad()
    param = next(p for p in model.parameters() if p.dim() == 2)
    param.grad = torch.zeros_like(param).to_sparse()
    output = model(torch.randint(10, (6,)))
    output.register_hook(_raise)
    assert "raised by a tensor hook" in str(error_of(output.sum().backward))
    for _ in range(2):  # the wrapper works on at once, also before gradients are cleared
        model(torch.randint(10, (6,)))
        model.zero_grad()


def test_a_failed_backward_beside_a_sparse_gradient(ranks):
    on_ranks(ranks, 2, _check_sparse_gradient)


def _check_dtypes() -> None:
    for options in (
        {"reduce_dtype": torch.float64},
        {"grad_dtype": torch.float64},
        {"mixed_precision": _mixed_precision()},
    ):
        found = []
        for lazy in (True, False):
            torch.manual_seed(0)
            module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            model = ReducerDDP(module, lazy_bucket_allocation=lazy, **options, **CAP)
            for number in range(3):
                seed(number)
                model.zero_grad()
                model(torch.randn(4, 8)).float().square().mean().backward()
            found.append([p.grad for p in model.parameters()])
        _compare(*found, exact=True)


def _mixed_precision() -> Any:
    from torch.nn.parallel.distributed import _MixedPrecision

    return _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_other_dtypes(ranks):
    on_ranks(ranks, 2, _check_dtypes)


def _check_copy() -> None:
    model = _wrap(ReducerDDP, "default", lazy=True)
    twin = copy.deepcopy(model)
    assert model.lazy_bucket_allocation
    assert twin.lazy_bucket_allocation
    assert twin._ddpx.options.lazy_bucket_allocation
    _compare(_train(twin, "none"), _train(model, "none"), exact=True)


def test_a_copy_keeps_the_option(ranks):
    on_ranks(ranks, 2, _check_copy)


def _check_join() -> None:
    for mode in ("default", "unused view"):
        found = []
        for lazy in (True, False):
            model = _wrap(ReducerDDP, mode, lazy)
            with model.join():
                for number in range(2 + dist.get_rank()):
                    seed(number)
                    model.zero_grad()
                    model(torch.randint(10, (6,))).square().mean().backward()
            found.append([p.grad for p in model.parameters() if p.grad is not None])
        _compare(*found, exact="view" not in mode)


def test_uneven_inputs(ranks):
    on_ranks(ranks, 3, _check_join)


def _check_wrong_type() -> None:
    with pytest.raises(TypeError, match="lazy_bucket_allocation"):
        ReducerDDP(nn.Linear(2, 2), lazy_bucket_allocation="yes")  # type: ignore[arg-type]


def test_a_wrong_type(ranks):
    on_ranks(ranks, 1, _check_wrong_type)


def _check_shm(mode: str) -> None:
    """Over a group of the backend shm, each bucket of a step is a new block of shared memory."""
    group = dist.new_group(backend="shm")
    found = []
    for lazy in (True, False):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model = ReducerDDP(
            module, process_group=group, lazy_bucket_allocation=lazy, **{**CAP, **MODES[mode]}
        )
        for number in range(5):
            seed(number)
            model.zero_grad()
            model(torch.randn(4, 64)).square().mean().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    _compare(*found, exact=True)


@pytest.mark.parametrize("mode", ["default", "view"])
def test_shared_memory(ranks, mode: str):
    on_ranks(ranks, 2, _check_shm, mode)
