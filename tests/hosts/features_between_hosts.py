"""What ranks of two hosts run: features of DDP with transport="shm", each compared with DDP.

Each rank prints the end of each feature as a JSON line, with the error if there is one.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx.comm import transport

STORE_PORT = 29500
# The order of additions differs from gloo's.
_TOLERANCE: dict[str, float] = {"rtol": 1e-5, "atol": 1e-6}
_NUM_STEPS = 3

Train = Callable[[nn.Module], object]


class _Net(nn.Module):
    """One layer is larger than a chunk between hosts. Forwards may leave out ``extra``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(30, 600)
        self.middle = nn.Linear(600, 400)
        self.extra = nn.Linear(400, 400)
        self.last = nn.Linear(400, 5)

    def forward(self, x: torch.Tensor, with_extra: bool = True) -> torch.Tensor:
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(self.extra(x) if with_extra else x)


def _ours(module: nn.Module, **options: Any) -> ddpx.ReducerDDP:
    model = ddpx.ReducerDDP(module, transport="shm", **options)
    # The hook of mixed precision uses the group.
    assert model.reducer.transport == ("gloo" if "mixed_precision" in options else "shm")
    made = transport.of(model.process_group)
    assert made is not None and made.hosts == [[0, 1], [2, 3]]
    return model


def _inputs(number: int, num_rows: int = 4) -> torch.Tensor:
    torch.manual_seed(100 * number + dist.get_rank())
    return torch.randn(num_rows, 30)


def _train(model: nn.Module) -> None:
    for number in range(_NUM_STEPS):
        model.zero_grad()
        model(_inputs(number)).square().mean().backward()


def _state(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and gradients."""
    params = list(module.parameters())
    grads = [param.grad.to_dense() for param in params if param.grad is not None]
    return [tensor.detach().clone() for tensor in [*params, *grads]]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.numpy().tobytes())
    return whole.hexdigest()


def _assert_same_on_all_ranks(tensors: list[torch.Tensor]) -> None:
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, _digest(tensors))
    assert len({*digests}) == 1, f"ranks differ: {digests}"


def _over_group(module: nn.Module, **options: Any) -> ddpx.ReducerDDP:
    return ddpx.ReducerDDP(module, transport="group", **options)


def _compare(
    train: Train = _train,
    build: Callable[[], nn.Module] = _Net,
    reference: Callable[..., nn.Module] = DistributedDataParallel,
    **options: Any,
) -> None:
    results = []
    for wrap in (_ours, reference):
        torch.manual_seed(0)
        module = build()
        train(wrap(module, bucket_cap_mb=0.5, **options))
        results.append(_state(module))
    _assert_same_on_all_ranks(results[0])
    torch.testing.assert_close(results[0], results[1], **_TOLERANCE)


# ---- the features --------------------------------------------------------------------------------


def _modes() -> None:
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        _compare(**options)


def _same_bits_each_time() -> None:
    """Another group and another wrapper of the same layout give the same bits."""
    digests = set()
    for _ in range(2):
        group = dist.new_group()
        torch.manual_seed(0)
        model = _ours(_Net(), process_group=group, bucket_cap_mb=0.5)
        _train(model)
        digests.add(_digest(_state(model)))
        dist.destroy_process_group(group)
    assert len(digests) == 1


def _order() -> None:
    """Two wrappers in turns. Ranks make calls of the script at different places of a step."""

    def train(models: list[nn.Module], differ: bool) -> None:
        for number in range(_NUM_STEPS + 1):
            total = torch.ones(200_000)
            # Before the third step, ranks agree on the order of buckets, over the group.
            is_early = not (differ and number > 1) or dist.get_rank() % 2 == 0
            work = dist.all_reduce(total, async_op=True) if is_early else None
            loss = torch.zeros(())
            for model in models:
                model.zero_grad()
                loss = loss + model(_inputs(number)).square().mean()
            loss.backward()
            work = work or dist.all_reduce(total, async_op=True)
            assert work is not None
            work.wait()
            assert total.eq(dist.get_world_size()).all()

    results = []
    for wrap in (_ours, DistributedDataParallel):
        torch.manual_seed(0)
        modules = [_Net(), _Net()]
        models = [wrap(module, bucket_cap_mb=0.5) for module in modules]
        train(models, differ=wrap is _ours)
        results.append([grad for module in modules for grad in _state(module)])
    _assert_same_on_all_ranks(results[0])
    torch.testing.assert_close(results[0], results[1], **_TOLERANCE)


def _no_sync() -> None:
    def train(model: Any) -> None:
        for number in range(_NUM_STEPS):
            model.zero_grad()
            with model.no_sync():
                model(_inputs(2 * number)).square().mean().backward()
            model(_inputs(2 * number + 1)).square().mean().backward()

    _compare(train)


def _find_unused() -> None:
    """Only rank 3 uses a layer in some steps, and no rank in others."""

    def train(model: nn.Module) -> None:
        for number in range(_NUM_STEPS + 1):
            with_extra = number % 2 == 0 and dist.get_rank() == 3
            model.zero_grad()
            model(_inputs(number), with_extra).square().mean().backward()

    _compare(train, find_unused_parameters=True)


def _join() -> None:
    def train(model: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Join([model]):
            for number in range(1 + dist.get_rank()):
                optimizer.zero_grad()
                model(_inputs(number)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()  # ranks that joined keep older gradients

    _compare(train)


def _hook() -> None:
    """A hook gets the group, and its buckets are calls of the group."""
    calls: list[int] = []

    def halve(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
        calls.append(group.size())
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        assert work is not None
        return work.get_future().then(lambda future: future.value()[0] / 8)

    def train(model: Any) -> None:
        # Without annotations, which torch compares with classes, not with their names.
        model.register_comm_hook(dist.group.WORLD, lambda group, bucket: halve(group, bucket))
        _train(model)

    _compare(train)
    assert set(calls) == {4}


def _sparse() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 30, sparse=True)
            self.net = _Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.table((x[:, 0].abs() * 20).long() % 50))

    _compare(build=Sparse)


def _mixed_precision() -> None:
    """DDP's needs a device."""
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

    def train(model: nn.Module) -> None:
        for number in range(_NUM_STEPS):
            model.zero_grad()
            model(_inputs(number)).float().square().mean().backward()

    _compare(train, reference=_over_group, mixed_precision=config)


def _other_averages() -> None:
    """Sums in another dtype, sums by weight, and the check for infinite gradients."""

    def train(model: Any) -> None:
        ddpx.set_check_finite(model)
        for number in range(_NUM_STEPS):
            model.zero_grad()
            ddpx.set_weight(model, 1 + dist.get_rank())
            model(_inputs(number)).square().sum().backward()

    _compare(train, reference=_over_group, average="weights", reduce_dtype=torch.float64)


def _timeout() -> None:
    """Rank 3 is late by more than the timeout of the group, which was changed after wrapping."""
    group = dist.new_group()
    model = _ours(_Net(), process_group=group)
    _train(model)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    if dist.get_rank() == 3:
        time.sleep(4)
    begin = time.monotonic()
    try:
        _train(model)
    except ddpx.RankStalled as error:
        assert error.lost_ranks == (3,), error
    else:
        raise AssertionError("no rank was late")
    assert time.monotonic() - begin < 10


FEATURES: dict[str, Callable[[], None]] = {
    "modes": _modes,
    "same bits each time": _same_bits_each_time,
    "order": _order,
    "no_sync": _no_sync,
    "find_unused": _find_unused,
    "join": _join,
    "hook": _hook,
    "sparse": _sparse,
    "mixed precision": _mixed_precision,
    "other averages": _other_averages,
    "timeout": _timeout,
}


def run(rank: int, num_ranks: int, address: str) -> None:
    """Runs one rank. The process then waits, since peers may still need the store."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, STORE_PORT, num_ranks, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    for name, feature in FEATURES.items():
        error = ""
        begin = time.monotonic()
        try:
            feature()
        except Exception:
            error = traceback.format_exc()
        line = json.dumps({"event": name, "error": error, "seconds": time.monotonic() - begin})
        os.write(1, f"{line}\n".encode())
    time.sleep(3600)
