"""Which transport wrappers of a gloo group of several hosts take, by injected identities."""

from __future__ import annotations

import gc
import logging
import operator
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ddpx
from ddpx.comm import shm, transport

LAYOUTS = ["aabb", "aaab", "abcd"]  # a letter per rank names its host


def _wrap(group: dist.ProcessGroup, choice: str, **options: Any) -> ddpx.ReducerDDP:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 600), nn.Tanh(), nn.Linear(600, 400))
    return ddpx.ReducerDDP(
        module, process_group=group, transport=choice, bucket_cap_mb=0.5, **options
    )


def _step(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return torch.cat([grad.flatten() for grad in grads])


@contextmanager
def _group_of(layout: str) -> Iterator[dist.ProcessGroup]:
    """A gloo group whose wrappers take the ranks for ranks of several hosts."""
    os.environ["DDPX_SHM_HOST_IDENTITY"] = layout[dist.get_rank()]
    group = dist.new_group()
    try:
        yield group
    finally:
        del os.environ["DDPX_SHM_HOST_IDENTITY"]
        dist.destroy_process_group(group)


@contextmanager
def _log() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ddpx.comm").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("ddpx.comm").removeHandler(handler)


# ---- the choice ----------------------------------------------------------------------------------


def _transports(choices: list[str]) -> tuple[list[str], list[str]]:
    with _log() as lines, _group_of("aabb") as group:
        models = [_wrap(group, choice) for choice in choices]
        over_shm = {id(m._ddpx.transport) for m in models if m.reducer.transport == "shm"}
        assert len(over_shm) == 1  # shared by all wrappers
        return [model.reducer.transport for model in models], lines


@pytest.mark.parametrize(
    "choices", [["auto", "shm", "auto", "shm", "group"], ["shm", "auto", "shm"]]
)
def test_only_the_choice_shm_leaves_the_group(ranks, choices):
    results = ranks(4).run(_transports, choices)
    wanted = [("shm" if choice == "shm" else "gloo") for choice in choices]
    assert [names for names, _ in results] == [wanted] * 4
    lines = [line for _, lines in results for line in lines]
    assert len(lines) == (choices[0] == "auto"), lines
    for line in lines:
        assert "[ddpx rank 0] gradients are averaged over gloo, because the ranks are on 2" in line
        assert "Set DDPX_TRANSPORT=shm to use shared memory within hosts" in line


def _lines_of_later_ranks() -> list[str]:
    group = dist.new_group([2, 3])
    os.environ["DDPX_SHM_HOST_IDENTITY"] = str(dist.get_rank())
    try:
        with _log() as lines:
            if dist.get_rank() >= 2:
                _wrap(group, "auto")
            return lines
    finally:
        del os.environ["DDPX_SHM_HOST_IDENTITY"]


def test_the_log_has_the_rank_of_the_job(ranks):
    results = ranks(4).run(_lines_of_later_ranks)
    assert [len(lines) for lines in results] == [0, 0, 1, 0]
    assert results[2][0].startswith("[ddpx rank 2] gradients are averaged over gloo")


def _keeps_nothing() -> bool:
    with _group_of("aabb") as group:
        model = _wrap(group, "auto")
        return transport.of(group) is None and model._ddpx.transport is None


def test_auto_keeps_no_shared_memory(ranks):
    assert ranks(4).run(_keeps_nothing) == [True] * 4


def _by_variable() -> str:
    os.environ["DDPX_TRANSPORT"] = "shm"
    try:
        with _group_of("aabb") as group:
            return ddpx.ReducerDDP(nn.Linear(2, 2), process_group=group).reducer.transport
    finally:
        del os.environ["DDPX_TRANSPORT"]


def test_the_variable_counts_between_hosts(ranks):
    assert ranks(4).run(_by_variable) == ["shm"] * 4


def _with_another_default_device() -> str:
    module = nn.Linear(3, 3)
    with _group_of("aabb") as group:
        with torch.device("meta"):
            model = ddpx.ReducerDDP(module, process_group=group, transport="shm")
        model(torch.ones(3)).sum().backward()
        return model.reducer.transport


def test_the_default_device_does_not_matter(ranks):
    assert ranks(4).run(_with_another_default_device) == ["shm"] * 4


# ---- the averages --------------------------------------------------------------------------------


def _averages(layout: str) -> torch.Tensor:
    with _group_of(layout) as group:
        models = {choice: _wrap(group, choice) for choice in ("shm", "group")}
        for _ in range(3):
            averages = {choice: _step(model) for choice, model in models.items()}
        torch.testing.assert_close(averages["shm"], averages["group"], rtol=1e-5, atol=1e-6)
        return averages["shm"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hosts_may_have_different_numbers_of_ranks(ranks, layout):
    first, *others = ranks(4).run(_averages, layout) + ranks(4).run(_averages, layout)
    assert all(torch.equal(first, other) for other in others)  # on all ranks, and in each run


def _averages_of_two() -> bool:
    with _group_of("ab") as group:
        models = [_wrap(group, choice) for choice in ("shm", "group")]
        return all(torch.equal(*[_step(model) for model in models]) for _ in range(3))


def test_two_ranks_have_the_bits_of_gloo(ranks):
    assert ranks(2).run(_averages_of_two) == [True, True]


def _fork_that_changes_gradients() -> None:
    with _group_of("aabb") as group:
        model = _wrap(group, "shm", gradient_as_bucket_view=True)
        expected = [_step(model) for _ in range(3)][-1]
        child = os.fork()
        if child == 0:
            for param in model.parameters():
                assert param.grad is not None
                param.grad.fill_(7)
            del model
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert torch.equal(_step(model), expected)


def test_a_forked_child_does_not_change_gradients_of_its_parent(ranks):
    ranks(4).run(_fork_that_changes_gradients)


# ---- the end -------------------------------------------------------------------------------------


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _one_group() -> None:
    with _group_of("aabb") as group:
        _step(_wrap(group, "shm"))


def _leaked() -> tuple[int, int]:
    _one_group()
    gc.collect()
    time.sleep(0.5)  # threads of a dropped group end
    before = _resources()
    for _ in range(2):
        _one_group()
    gc.collect()
    deadline = time.monotonic() + 20
    while any(map(operator.gt, _resources(), before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    after = _resources()
    return after[0] - before[0], after[1] - before[1]


def test_the_transport_ends_with_its_group(ranks):
    for num_files, num_threads in ranks(4).run(_leaked):
        assert num_files <= 0
        assert num_threads <= 0


# ---- faults --------------------------------------------------------------------------------------


def _without_network(victims: list[int]) -> tuple[str, float, str]:
    """The victims cannot connect to other hosts.

    Returns the error, the time until the error, and the transport of a later wrapper.
    """
    options, limit = shm.one_thread_options, transport._LONGEST_RENDEZVOUS

    def fail(*_: object) -> None:
        raise OSError(113, "No route to host")

    transport._LONGEST_RENDEZVOUS = timedelta(seconds=2)
    begin = time.monotonic()
    with _group_of("aabb") as group:
        if dist.get_rank() in victims:
            shm.one_thread_options = fail  # type: ignore[assignment]
        try:
            with pytest.raises(ValueError, match="transport='shm' cannot be used") as caught:
                _wrap(group, "shm")
        finally:
            shm.one_thread_options = options
            transport._LONGEST_RENDEZVOUS = limit
        seconds = time.monotonic() - begin
        model = _wrap(group, "auto")
        assert _step(model).isfinite().all()
        return str(caught.value), seconds, model.reducer.transport


def _check_connection_error(results: list[tuple[str, float, str]]) -> str:
    """Returns the text, which all ranks raise."""
    (text,) = {text for text, _, _ in results}
    assert "Open the ports between hosts; GLOO_SOCKET_IFNAME selects a network. With" in text
    assert all(seconds < 15 and name == "gloo" for _, seconds, name in results)
    return text


def test_hosts_that_cannot_connect_raise_on_all_ranks(ranks):
    text = _check_connection_error(ranks(4).run(_without_network, [1]))
    assert "connection of hosts failed on rank 1: No route to host;" in text
    assert "connection of hosts failed on rank 3: " in text  # the counterpart, which waited


def test_an_error_of_many_ranks_has_few_causes(ranks):
    text = _check_connection_error(ranks(4).run(_without_network, [0, 1, 2, 3]))
    assert text.count("No route to host") == 3
    assert "; also on rank 3 of the group. Open" in text
