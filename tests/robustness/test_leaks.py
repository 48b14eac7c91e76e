"""Steps, constructions and failures leak no memory, file descriptors, threads or processes."""

from __future__ import annotations

import copy
import ctypes
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from resource_usage import Usage, assert_no_leak
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool

NUM_STEPS = {"short": 1000, "full": 10_000}
NUM_CONSTRUCTIONS = 200
NUM_FAILURES = 240  # 40 of each kind
# A leaked wrapper, graph or bucket is larger. One call makes some forty collective calls, each of
# which leaves some bytes in caches of torch that fill slowly.
AT_LEAST = {"bytes_per_call": 1000, "objects_per_call": 5}

MODES = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "batched": {"batched_grad_copy": True},
}


@pytest.fixture(scope="module", params=["gloo", pytest.param("shm", marks=pytest.mark.full_only)])
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Separate ranks, since resources of other tests would disturb the measurement."""
    with pytest.MonkeyPatch.context() as patch:
        # torch's flight recorder keeps the last 2000 collectives of gloo, about a kilobyte for
        # each. This is no leak, but would hide one.
        patch.setenv("TORCH_FR_BUFFER_SIZE", "0")
        with RankPool(2, request.param) as ranks:
            yield ranks


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)  # has buffers
        self.head = nn.Linear(16, 4)
        self.spare = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, use_spare: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.trunk(x)))
        return self.head(hidden) + self.spare(hidden) if use_spare else self.head(hidden)


def _wrap(mode: str, **options: object) -> ReducerDDP:
    return ReducerDDP(TwoHeads(), bucket_cap_mb=0.0005, **MODES[mode], **options)


def _step(model: nn.Module, use_spare: bool = True) -> None:
    model.zero_grad()
    model(torch.ones(3, 8), use_spare).square().mean().backward()


# ---- steps -------------------------------------------------------------------------------------


def _steps(times: int) -> Usage:
    """Steps in every mode in turn. Some are recorded, some are not synchronized."""
    models = [_wrap(mode) for mode in MODES]
    hooked = _wrap("default")
    hooked.register_comm_hook(None, _sum_hook)
    hooked.register_post_sync_hook(hooked.module.trunk, _ignore)
    models.append(hooked)
    recorded = _wrap("default")
    models.append(recorded)

    def act(number: int) -> None:
        model = models[number % len(models)]
        if number % 5 == 0:
            with model.no_sync():
                _step(model)
        _step(model)

    with ddpx.record(recorded):
        return assert_no_leak(act, warm_up=300, times=times)


def _sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
    future = dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def _ignore(*_: object) -> None:
    pass


@pytest.mark.timeout(600)
def test_steps(pool: RankPool, request: pytest.FixtureRequest) -> None:
    form = "full" if request.config.getoption("--full") else "short"
    print(pool.run(_steps, NUM_STEPS[form], timeout=500))


# ---- constructions -----------------------------------------------------------------------------


def _constructions(times: int) -> Usage:
    modes = list(MODES)

    def act(number: int) -> None:
        model = _wrap(modes[number % len(modes)])
        if number % 3 == 0:
            model.register_comm_hook(None, _sum_hook)
            model.register_post_sync_hook(model.module.trunk, _ignore)
        for _ in range(3):  # buckets are rebuilt at the second or third step
            _step(model)
        if number % 4 == 0:
            with ddpx.record(model):
                _step(model)
        if number % 2 == 0:
            ReducerDDP(model.module)  # a second wrapper of the same parameters
        if number % 5 == 0:
            module = ddpx.replicate(model.module, **MODES[modes[number // 5 % len(modes)]])
            for _ in range(2):
                _step(module)
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                module(torch.randn(2, 3))
            copy.deepcopy(module)

    # The names of the last 255 wrappers are kept, for reports about peers.
    return assert_no_leak(act, warm_up=180, times=times, **AT_LEAST)


@pytest.mark.timeout(300)
def test_constructions(pool: RankPool) -> None:
    print(pool.run(_constructions, NUM_CONSTRUCTIONS, timeout=200))


def _constructions_that_fail(times: int) -> Usage:
    """Constructions that fail early: at the agreement of ranks, and since ranks differ in it."""

    def act(number: int) -> None:
        width = 4 + dist.get_rank() * (number % 2)
        options = {} if number % 2 else {"bucket_cap_mb": float("nan")}
        with pytest.raises((RuntimeError, ValueError)):
            ReducerDDP(nn.Linear(4, width), **options)

    return assert_no_leak(act, warm_up=60, times=times, **AT_LEAST)


@pytest.mark.full_only
@pytest.mark.timeout(300)
def test_constructions_that_fail(pool: RankPool) -> None:
    print(pool.run(_constructions_that_fail, NUM_CONSTRUCTIONS, timeout=200))


# ---- groups ------------------------------------------------------------------------------------


def _groups(times: int, backend: str) -> Usage:
    """Groups with monitors, which have a page, descriptors of peers, and threads for a while."""

    def act(number: int) -> None:
        group = dist.new_group([0, 1], backend=backend)
        model = _wrap("default", process_group=group)
        _step(model)
        dist.barrier()
        dist.destroy_process_group(group)

    # torch keeps some texts and keys per group, in the store's server, too.
    return assert_no_leak(
        act, warm_up=40, times=times, bytes_per_call=20_000, objects_per_call=400, settle_s=2.0
    )


@pytest.mark.full_only
@pytest.mark.timeout(300)
def test_groups(pool: RankPool) -> None:
    print(pool.run(_groups, NUM_CONSTRUCTIONS, pool.backend, timeout=250))


# ---- failures ----------------------------------------------------------------------------------


def _explode(*_: object) -> None:
    raise RuntimeError("user code failed")


def _fail_in_backward(model: ReducerDDP) -> None:
    handle = model.module.trunk.weight.register_hook(_explode)
    try:
        _step(model)
    finally:
        handle.remove()


def _fail_in_forward(model: ReducerDDP) -> None:
    handle = model.module.head.register_forward_hook(_explode)
    try:
        _step(model)
    finally:
        handle.remove()


def _leave_params_unused(model: ReducerDDP) -> None:
    _step(model, use_spare=False)


def _not_finite(model: ReducerDDP) -> None:
    model.zero_grad()
    (model(torch.ones(3, 8)).sum() * float("inf")).backward()


def _apply_local_grads(model: ReducerDDP) -> None:
    model.zero_grad()
    weight = model.module.trunk.weight
    (grad,) = torch.autograd.grad(model(torch.ones(3, 8)).sum(), weight)
    with torch.no_grad():
        weight -= 0 * grad
    model(torch.ones(3, 8))


def _fail_in_hook(model: ReducerDDP) -> None:
    model.register_comm_hook(None, lambda state, bucket: bucket.no_such_attribute)
    _step(model)


FAILURES: tuple[Callable[[ReducerDDP], None], ...] = (
    _fail_in_backward,
    _fail_in_forward,
    _leave_params_unused,
    _not_finite,
    _apply_local_grads,
    _fail_in_hook,
)


def _failures(times: int) -> Usage:
    """Failures on all ranks alike, so that ranks stay in step.

    A successful step follows each failure.
    """
    models = [_wrap(mode) for mode in ("default", "view")]
    for model in models:
        model.set_check_finite()

    def act(number: int) -> None:
        fail = FAILURES[number % len(FAILURES)]
        model = models[number % len(models)]
        with pytest.raises((RuntimeError, AttributeError)):
            # A communication hook cannot be removed, so it gets a wrapper of its own.
            fail(_wrap("default") if fail is _fail_in_hook else model)
        _step(model)

    return assert_no_leak(act, warm_up=60, times=times, **AT_LEAST)


@pytest.mark.full_only
@pytest.mark.timeout(300)
def test_failures(pool: RankPool) -> None:
    print(pool.run(_failures, NUM_FAILURES, timeout=200))


# ---- the check itself --------------------------------------------------------------------------

_kept: list[object] = []


def _start_thread() -> None:
    stop = threading.Event()
    threading.Thread(target=stop.wait, daemon=True).start()
    _kept.append(stop)


# The smallest leak of each kind.
LEAKS: dict[str, Callable[[], object]] = {
    "fds": lambda: os.open(os.devnull, os.O_RDONLY),
    "memfds": lambda: os.memfd_create("leak"),
    "threads": _start_thread,
    "children": lambda: _kept.append(subprocess.Popen(["sleep", "60"])),
    "mappings": lambda: _kept.append(mmap.mmap(-1, mmap.PAGESIZE, prot=len(_kept) % 2)),
    "python_blocks": lambda: _kept.append(object()),
    "malloc_bytes": lambda: ctypes.CDLL(None).malloc(100),
}


def _check_sees(kind: str) -> str:
    try:
        with pytest.raises(AssertionError) as caught:
            assert_no_leak(lambda _: LEAKS[kind](), warm_up=1, times=200)
    finally:
        for kept in _kept:
            if isinstance(kept, subprocess.Popen):
                kept.kill()
                kept.wait()
    return str(caught.value)


@pytest.mark.parametrize("kind", LEAKS)
def test_the_check_sees(kind: str) -> None:
    with RankPool(1) as alone:
        (text,) = alone.run(_check_sees, kind)
    assert f"{kind} grew by" in text
