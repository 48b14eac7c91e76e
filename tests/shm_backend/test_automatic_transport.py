"""ReducerDDP over a gloo group: buckets move through shared memory, and the bits stay gloo's."""

from __future__ import annotations

import gc
import logging
import os
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpx import ReducerDDP
from ddpx.comm import transport
from ddpx.testing import RankFailed, RankPool

_files: list[int] = []  # open in this process, see _names_and_lines

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as three_ranks:
        yield three_ranks


def _module(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 300), nn.Tanh(), nn.Linear(300, 7))


def _step(model: nn.Module, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(10 * seed + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 30)).square().mean().backward()
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


def _wrap(**options: Any) -> ReducerDDP:
    return ReducerDDP(_module(), bucket_cap_mb=0.01, **options)


def _name(model: ReducerDDP) -> str:
    name = model._get_ddp_logging_data()["transport"]
    assert model.reducer.transport == name
    return str(name)


# ---- which transport -----------------------------------------------------------------------------


def _compare_with_ddp(options: dict[str, Any], expected: str) -> None:
    ours = _wrap(**options)
    del options["transport"]
    theirs = DistributedDataParallel(_module(), bucket_cap_mb=0.01, **options)
    assert _name(ours) == expected
    for number in range(4):
        for gradient, reference in zip(_step(ours, number), _step(theirs, number), strict=True):
            assert torch.equal(gradient, reference)


@pytest.mark.parametrize("choice, expected", [(None, "shm"), ("shm", "shm"), ("group", "gloo")])
@pytest.mark.parametrize("mode", MODES)
def test_bits_are_those_of_ddp_over_gloo(
    pool: RankPool, mode: str, choice: str | None, expected: str
) -> None:
    pool.run(_compare_with_ddp, {**MODES[mode], "transport": choice}, expected)


def _names_with_variable() -> list[str]:
    os.environ["DDPX_TRANSPORT"] = "group"
    try:
        return [_name(_wrap()), _name(_wrap(transport="auto"))]
    finally:
        del os.environ["DDPX_TRANSPORT"]


def test_the_argument_overrides_the_variable(pool: RankPool) -> None:
    assert pool.run(_names_with_variable) == [["gloo", "shm"]] * 3


@pytest.mark.parametrize("choice", ["tcp", "", 1, True])
def test_another_choice_is_an_error(choice: object) -> None:
    with pytest.raises(ValueError, match=r"transport=.* is not a transport. Pass 'auto'"):
        transport.checked_choice(choice)


def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPX_TRANSPORT", "tcp")
    with pytest.raises(ValueError, match="DDPX_TRANSPORT='tcp' is not a transport"):
        transport.checked_choice(None)
    monkeypatch.setenv("DDPX_TRANSPORT", "")
    assert transport.checked_choice(None) == "auto"


def _wrong_order_on_one_rank() -> None:
    os.environ["DDPX_SHM_ORDER"] = "wrong" if dist.get_rank() == 1 else ""
    try:
        ReducerDDP(_module())
    finally:
        del os.environ["DDPX_SHM_ORDER"]


def test_a_wrong_order_on_one_rank_is_an_error_on_all(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="failed on 3 of 3 ranks") as failed:
        pool.run(_wrong_order_on_one_rank, timeout=15)
    assert "no order 'wrong'" in str(failed.value)


def _other_order_on_one_rank() -> None:
    os.environ["DDPX_SHM_ORDER"] = "fixed" if dist.get_rank() == 1 else ""
    try:
        ReducerDDP(_module(), process_group=dist.new_group())
    finally:
        del os.environ["DDPX_SHM_ORDER"]


def test_ranks_with_different_orders_raise_at_construction(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="failed on 3 of 3 ranks") as failed:
        pool.run(_other_order_on_one_rank, timeout=15)
    assert "'gloo' on 2 ranks (rank 0, 2); 'fixed' on 1 rank (rank 1). Set" in str(failed.value)


def _choices_that_differ() -> None:
    ReducerDDP(_module(), transport="group" if dist.get_rank() == 1 else "auto")


def test_ranks_with_different_choices_raise(pool: RankPool) -> None:
    with pytest.raises(RankFailed, match="option transport: 'auto' on rank 0, rank 2; 'group' on"):
        pool.run(_choices_that_differ)


def _without_agreement() -> tuple[str, str, str]:
    import copy

    model = _wrap()
    names = _name(model), _name(_wrap(init_sync=False)), _name(copy.deepcopy(model))
    with pytest.raises(ValueError, match="transport='shm' needs init_sync=True"):
        ReducerDDP(_module(), init_sync=False, transport="shm")
    return names


def test_wrappers_without_agreement_use_the_group(pool: RankPool) -> None:
    assert pool.run(_without_agreement) == [("shm", "gloo", "gloo")] * 3


def _groups() -> tuple[str | None, ...]:
    pair = dist.new_group([0, 2])
    both = dist.new_group(backend="cpu:gloo")
    shm = dist.new_group(backend="shm")
    names = []
    if dist.get_rank() != 1:
        model = ReducerDDP(_module(), process_group=pair, transport="shm")
        names.append(_name(model))
        gradients = _step(model)
        other = ReducerDDP(_module(), process_group=pair, transport="group")
        assert all(map(torch.equal, gradients, _step(other)))
    for group in (both, shm):
        names.append(_name(ReducerDDP(_module(), process_group=group)))
    ReducerDDP(_module(), process_group=shm, transport="shm")
    return tuple(names)


def test_groups_of_some_ranks_and_of_other_backends(pool: RankPool) -> None:
    names = pool.run(_groups)
    assert names == [("shm", "shm", "shm"), ("shm", "shm"), ("shm", "shm", "shm")]


def _hook_stays_on_the_group() -> int:
    """The number of calls of the group in a step."""
    model = ReducerDDP(_module())
    group: Any = dist.group.WORLD
    for _ in range(2):
        _step(model)  # ranks agree on the order of buckets, which is a call of the group
    before = group._get_sequence_number_for_group()
    _step(model)
    assert group._get_sequence_number_for_group() == before
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    _step(model)
    return int(group._get_sequence_number_for_group() - before)


def test_hooks_stay_on_the_group(pool: RankPool) -> None:
    assert pool.run(_hook_stays_on_the_group) == [1] * 3


# ---- the life of a transport ---------------------------------------------------------------------


def _resources() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def _one_round() -> None:
    group = dist.new_group()
    models = [ReducerDDP(_module(), process_group=group) for _ in range(2)]
    made = transport.of(group)
    assert made is not None
    assert [model._ddpx.transport for model in models] == [made, made]
    for model in models:
        _step(model)
    dist.destroy_process_group(group)


def _leaked() -> tuple[int, int]:
    _one_round()
    gc.collect()
    time.sleep(0.5)  # threads of a dropped group end
    before = _resources()
    for _ in range(5):
        _one_round()
    gc.collect()
    deadline = time.monotonic() + 20
    while _resources() != before and time.monotonic() < deadline:
        time.sleep(0.1)
    after = _resources()
    return after[0] - before[0], after[1] - before[1]


def test_a_transport_is_shared_by_wrappers_and_ends_with_its_group(pool: RankPool) -> None:
    for num_files, num_threads in pool.run(_leaked):
        assert num_files <= 0
        assert num_threads <= 0


# ---- where ranks cannot share memory -------------------------------------------------------------


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _names_and_lines() -> tuple[list[str], list[str]]:
    """Rank 1 alone can open only two further files."""
    heard = _Lines()
    logging.getLogger("ddpx.comm").addHandler(heard)
    group = dist.new_group()
    if dist.get_rank() == 1:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        opened = {int(name) for name in os.listdir("/proc/self/fd")}
        num_gaps = max(opened) + 1 - len(opened)
        _files.extend(os.open(os.devnull, os.O_RDONLY) for _ in range(num_gaps))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(opened) + 3, hard))
    try:
        names = [_name(ReducerDDP(_module(), process_group=group)) for _ in range(2)]
        with pytest.raises(ValueError, match="open files failed on rank 1: Too many"):
            ReducerDDP(_module(), process_group=group, transport="shm")
    finally:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        logging.getLogger("ddpx.comm").removeHandler(heard)
    return names, heard.lines


@pytest.mark.timeout(120)
def test_all_ranks_use_the_group_if_one_cannot_share_memory() -> None:
    with RankPool(3) as ranks:
        results = ranks.run(_names_and_lines, timeout=100)
    assert [names for names, _ in results] == [["gloo", "gloo"]] * 3
    lines = [line for _, lines in results for line in lines]
    assert len(lines) == 1, lines
    assert "gradients are averaged over gloo" in lines[0]
    assert "open files failed on rank 1: Too many open files" in lines[0]


def _fault_in_a_group_of_later_ranks() -> str:
    group = dist.new_group([1, 2])

    def fail(num_files: int) -> None:
        raise OSError("on purpose")

    with pytest.MonkeyPatch.context() as patched:
        if dist.get_rank() == 0:
            return ""
        if dist.get_rank() == 2:
            patched.setattr(transport, "_open_files", fail)
        with pytest.raises(ValueError) as raised:
            ReducerDDP(_module(), process_group=group, transport="shm")
        return str(raised.value)


def test_a_fault_names_the_rank_of_the_job(pool: RankPool) -> None:
    for text in pool.run(_fault_in_a_group_of_later_ranks)[1:]:
        assert "open files failed on rank 2: on purpose" in text


# ---- beside other calls of the group -------------------------------------------------------------


def _calls_at_different_places() -> None:
    """A collective call of the user before the backward on rank 0, and after it on other ranks."""
    model = ReducerDDP(_module())
    reference = ReducerDDP(_module(), transport="group")
    for either in (model, reference) * 2:
        _step(either)  # ranks agree on the order of buckets, which is a call of the group
    for _ in range(3):
        expected = _step(reference)
        total = torch.ones(1000)
        if dist.get_rank() == 0:
            work = dist.all_reduce(total, async_op=True)
        gradients = _step(model)
        if dist.get_rank() != 0:
            work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait()
        assert total.eq(3).all()
        assert all(map(torch.equal, gradients, expected))


def test_calls_of_the_group_need_no_place_among_buckets(pool: RankPool) -> None:
    pool.run(_calls_at_different_places)


def _profile_steps() -> None:
    model = _wrap(find_unused_parameters=True)
    for number in range(60):
        with torch.profiler.profile() as profile:
            for _ in range(3):
                _step(model, number)
        names = {event.name for event in profile.events()}
        assert "shm:all_reduce" in names


def test_a_profile_may_stop_before_an_unread_sum_ends(pool: RankPool) -> None:
    """Ranks do not wait for the used-map if they use all parameters."""
    pool.run(_profile_steps)


# ---- forked children -----------------------------------------------------------------------------


def _fork_that_changes_gradients(options: dict[str, Any]) -> None:
    model = _wrap(**options)
    gradients = [_step(model) for _ in range(4)][-1]  # in the buckets of all later steps
    child = os.fork()
    if child == 0:
        for param in model.parameters():
            assert param.grad is not None
            param.grad.fill_(7)
            param.grad = None
        del model
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    for param, expected in zip(model.parameters(), gradients, strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad, expected)
    for gradient, expected in zip(_step(model), gradients, strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_forked_child_does_not_change_gradients_of_its_parent(pool: RankPool, mode: str) -> None:
    pool.run(_fork_that_changes_gradients, MODES[mode])
