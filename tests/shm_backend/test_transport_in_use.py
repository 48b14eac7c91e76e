"""The transport that a wrapper names is the one that moves its buckets."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel.distributed import _MixedPrecision

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool


def _step(model: nn.Module) -> None:
    model.zero_grad()
    model(torch.ones(8, 30)).sum().backward()


def _wrap(**options: Any) -> ReducerDDP:
    return ReducerDDP(nn.Linear(30, 300), **options)


def _with_hook(**options: Any) -> ReducerDDP:
    model = _wrap(**options)
    model.register_comm_hook(None, allreduce_hook)
    return model


def _with_builtin_hook(**options: Any) -> ReducerDDP:
    model = _wrap(**options)
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return model


def _with_mixed_precision(**options: Any) -> ReducerDDP:
    dtype = torch.bfloat16
    precision = _MixedPrecision(param_dtype=dtype, reduce_dtype=dtype)
    return _wrap(mixed_precision=precision, **options)


def _with_sums_in_float64(**options: Any) -> ReducerDDP:
    return _wrap(reduce_dtype=torch.float64, **options)


MODELS: dict[str, tuple[Callable[..., ReducerDDP], str]] = {
    "plain": (_wrap, "shm"),
    "reduce_dtype": (_with_sums_in_float64, "shm"),
    "hook": (_with_hook, "gloo"),
    "hook in C++": (_with_builtin_hook, "gloo"),
    "mixed_precision": (_with_mixed_precision, "gloo"),
}


def _names(make: str, options: dict[str, Any], folder: str) -> tuple[set[str], int]:
    """The names of the transport, and the number of calls of the group in a step."""
    os.environ["DDPX_TIMELINE"] = folder
    try:
        model = MODELS[make][0](**options)
    finally:
        del os.environ["DDPX_TIMELINE"]
    for _ in range(3):
        _step(model)  # ranks agree on the order of buckets, which is a call of the group
    group: Any = dist.group.WORLD
    before = group._get_sequence_number_for_group()
    _step(model)
    num_calls = group._get_sequence_number_for_group() - before
    with ddpx.record(model) as timeline:
        _step(model)
    names = {
        timeline.recording.backend,
        str(model._get_ddp_logging_data()["transport"]),
        model.reducer.transport,
    }
    del model
    gc.collect()  # writes the file
    return names, num_calls


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("make", MODELS)
def test_the_name_is_that_of_the_transport_in_use(ranks, tmp_path, make, view):
    expected = MODELS[make][1]
    options = {"gradient_as_bucket_view": view}
    for names, num_calls in ranks(2).run(_names, make, options, str(tmp_path)):
        assert names == {expected}
        assert num_calls == (expected == "gloo")
    assert ddpx.Timeline.load(tmp_path).recording.backend == expected


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_of_the_former_group(options: dict[str, Any]) -> tuple[int, str]:
    """Without the transport, the number of threads after the group was left and destroyed."""
    former, group = dist.new_group(), dist.new_group()
    model = _wrap(process_group=group, transport="group")
    _step(model)
    before = _num_threads()
    moved = _wrap(process_group=former, **options)
    _step(moved)
    moved._update_process_group(group)
    dist.destroy_process_group(former)
    del former
    gc.collect()
    deadline = time.monotonic() + 10
    while _num_threads() >= before and time.monotonic() < deadline:
        time.sleep(0.1)  # threads of a dropped group end
    _step(moved)
    return _num_threads() - before, moved.reducer.transport


@pytest.mark.parametrize("options", [{}, {"static_graph": True}])
def test_a_wrapper_that_leaves_its_group_keeps_no_transport(ranks, options):
    for num_threads, name in ranks(2).run(_threads_of_the_former_group, options):
        assert num_threads < 0  # those of gloo, which `before` has
        assert name == "gloo"


def _without_a_store(name: str) -> dist.ProcessGroup:
    """A gloo group as scripts make it without torch's ``new_group()``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
    group = dist.ProcessGroup(rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


def _gradients_without_a_store(options: dict[str, Any]) -> tuple[str, list[torch.Tensor]]:
    group = _without_a_store(f"without a store, {options}")
    model = _wrap(process_group=group, **options)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((8, 30), dist.get_rank() + 1.0)).sum().backward()
    with pytest.raises(ValueError, match="takes the place of a gloo group that has a store"):
        _wrap(process_group=group, transport="shm")
    return model.reducer.transport, [param.grad for param in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}])
def test_a_group_without_a_store_averages_gradients(ranks, options):
    for name, (weight, bias) in ranks(2).run(_gradients_without_a_store, options):
        assert name == "gloo"
        assert weight.eq(12).all()  # the mean of 8 and 16
        assert bias.eq(8).all()


@pytest.mark.parametrize("options", [{}, {"transport": "shm"}])
def test_an_error_names_what_asked_for_shared_memory(ranks, options):
    asked = "transport='shm'" if options else "DDPX_TRANSPORT=shm"
    ranks(2).run(_shared_memory_without_agreement, options, asked)


def _shared_memory_without_agreement(options: dict[str, Any], asked: str) -> None:
    os.environ["DDPX_TRANSPORT"] = "auto" if options else "shm"
    try:
        with pytest.raises(ValueError, match=f"^{asked} needs init_sync=True"):
            _wrap(init_sync=False, **options)
        assert _wrap(init_sync=False, transport="auto").reducer.transport == "gloo"
    finally:
        del os.environ["DDPX_TRANSPORT"]


def _error_of_late_peer(how: str) -> str:
    """Ranks 0 and 2 wait for rank 1 in a step."""
    group = dist.new_group()
    model = _wrap(process_group=group, transport="shm")
    _step(model)
    if how == "stall":
        ddpx.set_stall_timeout(error=0.5)
    else:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)
    try:
        if dist.get_rank() == 1:
            time.sleep(4)
        _step(model)
    except ddpx.RankError as error:
        return f"{type(error).__name__} {error.lost_ranks}"
    return ""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["stall", "timeout of the group"])
def test_a_late_rank_is_reported(how: str) -> None:
    """A declared failure aborts the transport. A timeout of the group that changes counts there."""
    with RankPool(3) as ranks:
        errors = ranks.run(_error_of_late_peer, how)
    assert [errors[0], errors[2]] == ["RankStalled (1,)"] * 2


def _num_sockets() -> int:
    files = list(Path("/proc/self/fd").iterdir())
    return sum(file.is_socket() for file in files)


def _sockets_before_and_after_a_group() -> tuple[int, int]:
    before = _num_sockets()
    group = dist.new_group()
    model = _wrap(process_group=group)
    _step(model)
    dist.destroy_process_group(group)
    del model, group
    gc.collect()
    time.sleep(1)  # the watchdog looks for the end of groups five times a second
    return before, _num_sockets()


def test_connections_end_with_the_group() -> None:
    with RankPool(3) as pool:
        for before, after in pool.run(_sockets_before_and_after_a_group):
            assert after <= before
