"""The ranks that a waiting rank names, and the traces of a lost rank."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fault_ranks import (
    Ending,
    Log,
    again_if_held_up,
    announce,
    await_announcement,
    await_that,
    is_stopped,
    let_meet,
    run_ranks,
    stop_for,
    text_of,
)
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.health.ending import end_with

pytestmark = pytest.mark.timeout(120)
STALL_S = 2.5
GROUP_TIMEOUT_S = 3.0
WARN_S = 2.0  # the machine may delay other ranks, but not for as long
WARN, RAISE = "DDPX_STALL_WARN", "DDPX_STALL_ERROR"


def run(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    exit_codes: Mapping[int, int] | None = None,
    **options: Any,
) -> list[Ending]:
    """Like ``run_ranks``.

    All ranks must end normally and in time, except those with an exit code here.
    """
    endings = run_ranks(world_size, function, *args, **options)
    for rank, ending in enumerate(endings):
        assert ending.exit_code == (exit_codes or {}).get(rank, 0), (rank, endings)
    return endings


# ---- ranks that are late -------------------------------------------------------------------------


def _begin_trial(model: nn.Module, **patience: float) -> None:
    """Starts the measured time.

    Before it the machine may delay any rank, and all ranks begin together.
    """
    let_meet(model)
    ddpx.set_stall_timeout(**patience)


def _await_warnings() -> None:
    """Waits for the warnings of all other ranks."""
    for rank in set(range(dist.get_world_size())) - {dist.get_rank()}:
        await_announcement(f"rank {rank} has warned")


def _await_failure(model: nn.Module) -> None:
    monitor = ddpx._C.monitor_of(model.process_group)
    assert monitor is not None
    await_that(lambda: monitor.failed, "it is not given up")
    time.sleep(0.5)  # its stack is taken


def _one_is_late(late: int, **patience: float) -> tuple[list[str], tuple[int, ...], str]:
    """One rank is late. Returns the warnings, the ranks that an error names, and its text."""
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    for step in range(3):
        if step == 2:
            _begin_trial(model, **patience)
            if dist.get_rank() == late and "error" in patience:
                # Wait for the report of the failure: calls of ranks that gave up may still succeed.
                _await_failure(model)
            elif dist.get_rank() == late:
                _await_warnings()
        try:
            model(torch.ones(2, 4)).sum().backward()
        except ddpx.RankStalled as stalled:
            return log.texts, stalled.lost_ranks, str(stalled)
    return log.texts, (), ""


@pytest.mark.parametrize("late", [1, 3])
def test_only_the_late_of_other_hosts_are_warned_of(late: int) -> None:
    endings = run(4, partial(_one_is_late, late, warn=WARN_S), identities="AABB")
    for rank, ending in enumerate(endings):
        warnings, named, _ = ending.value
        assert named == ()
        stalled = [text for text in warnings if " has waited " in text]
        assert bool(stalled) == (rank != late), (rank, warnings)
        for text in stalled:
            assert [part.split(",")[0] for part in text.split("missing: ")[1:]] == [f"rank {late}"]


def test_only_the_late_of_other_hosts_are_given_up() -> None:
    endings = run(3, partial(_one_is_late, 2, error=WARN_S), identities="ABB")
    assert [ending.value[1] for ending in endings] == [(2,)] * 3
    for rank, ending in enumerate(endings):
        text = ending.value[2]
        assert ("] this rank is the late one, " in text) == (rank == 2), text
        # Its own stack has the call in which it was late.
        assert ("When the others gave up, this rank was at:" in text) == (rank == 2), text
        assert rank != 2 or "in _await_failure\n" in text, text


def _limit_the_group(model: nn.Module) -> None:
    """Sets the timeout of the group only now. The start of a rank could take longer."""
    let_meet(model)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    backend.set_timeout(timedelta(seconds=GROUP_TIMEOUT_S))


def _outlast_the_group(late: int) -> tuple[str, str]:
    """One rank arrives after the group's own timeout has ended the calls of the others."""
    model = ReducerDDP(nn.Linear(4, 4))
    try:
        for step in range(3):
            if step == 2:
                _limit_the_group(model)
                if dist.get_rank() == late:
                    for rank in set(range(dist.get_world_size())) - {late}:
                        await_announcement(f"rank {rank} has raised")
                    _await_failure(model)
            model(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        announce(f"rank {dist.get_rank()} has raised")
        return type(error).__name__, text_of(error)
    return "", ""


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("transport", "hosts"), [("gloo", ""), ("gloo", "AAB"), ("shm", "")])
@again_if_held_up  # a rank that was stopped shortly before a timeout may report another cause
def test_the_end_of_the_groups_own_patience(transport: str, hosts: str, late: int) -> None:
    endings = run(3, _outlast_the_group, late, backend=transport, identities=hosts)
    for rank, ending in enumerate(endings):
        kind, text = ending.value
        assert kind == "RankStalled", text
        assert f"rank {late} (host " in text and ") has not come for " in text, text
        assert ("] this rank is the late one, " in text) == (rank == late), text
        assert rank == late or "imed out" in text.split("The backend said: ")[1], text


def _go_ways_of_ones_own(after_s: float) -> str:
    """Returns the last lines of output.

    Rank 1 waits in a call of its own, for ranks that wait for rank 1. These began to wait
    ``after_s`` later, or earlier if negative.
    """
    model = ReducerDDP(nn.Linear(32, 32))
    try:
        model(torch.ones(2, 32)).sum().backward()
        _limit_the_group(model)
        if dist.get_rank() == 1:
            time.sleep(max(-after_s, 0.0))
            dist.all_reduce(torch.zeros(3))
        time.sleep(max(after_s, 0.0))
        model(torch.ones(2, 32)).sum().backward()
    except RuntimeError as error:
        end = end_with(error) or error
        return f"{type(end).__name__}: {end}"
    return ""


@pytest.mark.parametrize("after_s", [-0.5, 1.5])
@again_if_held_up  # the order of timeouts matters
def test_calls_that_wait_for_each_other_until_the_groups_timeout(after_s: float) -> None:
    endings = run(3, _go_ways_of_ones_own, after_s)
    for rank, ending in enumerate(endings):
        if after_s < 0:
            assert f"RankStalled: [ddpx rank {rank}, " in ending.value, ending
        elif rank != 1:  # the rank whose call ends first, and which reports why its script ends
            assert f"RankFailure: [ddpx rank {rank}, " in ending.value, ending
        if after_s < 0 or rank != 1:
            assert "rank 1 (host " in ending.value, ending


def _raise_in_a_hook() -> list[str]:
    """The warnings about a rank that has left the wait, and does other work for longer than
    allowed."""
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    model.register_comm_hook(None, _hook_that_raises)
    with pytest.raises(RuntimeError, match="no"):
        model(torch.ones(2, 4)).sum().backward()
    ddpx.set_stall_timeout(warn=0.5)
    time.sleep(1.5)
    return log.texts


def _hook_that_raises(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise RuntimeError("no")


def test_who_has_come_out_of_a_hook_is_not_late() -> None:
    endings = run(2, _raise_in_a_hook)
    assert [ending.value for ending in endings] == [[], []]


def _lose_a_rank_of_a_hook() -> str:
    """A callback sets an error of its own in place of the error of the collective call."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        assert work is not None
        result: torch.futures.Future[torch.Tensor] = torch.futures.Future()

        def replace_error(future: torch.futures.Future[list[torch.Tensor]]) -> None:
            try:
                result.set_result(future.value()[0])
            except RuntimeError:
                result.set_exception(ValueError("the sum failed"))

        work.get_future().add_done_callback(replace_error)
        return result

    model = ReducerDDP(nn.Linear(4, 4))
    model.register_comm_hook(None, hook)
    for _ in range(2):  # later forwards agree on nothing
        model(torch.ones(2, 4)).sum().backward()
    let_meet(model)
    if dist.get_rank() == 1:
        os._exit(3)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_an_error_set_by_a_callback_hides_no_lost_rank() -> None:
    text = run(2, _lose_a_rank_of_a_hook, exit_codes={1: 3})[0].value
    assert "RankFailure: [ddpx rank 0, " in text, text
    assert "rank 1 (host " in text and "the sum failed" in text, text


def _lose_a_rank_of_a_part() -> str:
    """The ranks of the job form two groups. The last rank of the second group ends."""
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = ReducerDDP(nn.Linear(4, 4), process_group=parts[dist.get_rank() // 2])
    model(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 3:
        os._exit(3)
    try:
        model(torch.ones(2, 4)).sum().backward()
    except ddpx.RankFailure as failure:
        return text_of(failure)
    return ""


def test_ranks_of_a_part_have_their_names_in_the_job_beside() -> None:
    endings = run(4, _lose_a_rank_of_a_part, exit_codes={3: 3})
    assert endings[0].value == endings[1].value == ""
    assert ": [ddpx rank 0 (rank 2 of the job), step " in endings[2].value, endings
    assert "] rank 1 (rank 3 of the job, host " in endings[2].value, endings


def _be_impatient_from_the_start() -> int:
    ddpx.set_stall_timeout(warn=0.4)
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    if dist.get_rank() == 1:
        time.sleep(STALL_S)
    model(torch.ones(2, 4)).sum().backward()
    return len(log.texts)


def test_patience_may_be_set_before_a_model_is_wrapped() -> None:
    endings = run(2, _be_impatient_from_the_start, environment={WARN: "20"})
    assert endings[0].value > 0


def _load_data_first() -> list[str]:
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4), init_sync=False)
    time.sleep(2.5)
    ddpx.set_stall_timeout(warn=20, error=20)  # a rank may well wait for the other in the step
    dist.barrier()
    model(torch.ones(2, 4)).sum().backward()
    return log.texts


def test_who_has_not_begun_waits_for_nobody() -> None:
    endings = run(2, _load_data_first, environment={WARN: "1", RAISE: "2"})
    assert [ending.value for ending in endings] == [[], []]


def _outlast_stop(pid: int) -> None:
    await_that(lambda: is_stopped(pid), "it is not stopped")
    await_that(lambda: not is_stopped(pid), "it is not woken up")
    time.sleep(0.4)  # the rank continues to wait, and polls twice


def _sleep_while_another_is_late() -> list[str]:
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    for step in range(3):
        if step == 2:
            _begin_trial(model, warn=WARN_S)
            if dist.get_rank() == 0:
                _outlast_stop(ddpx.peer_status(model)[1].pid)
            else:
                threading.Timer(0.1, stop_for, (WARN_S + 1.0,)).start()
        model(torch.ones(2, 4)).sum().backward()
    return log.texts


def test_who_was_stopped_has_waited_for_nobody() -> None:
    first, second = run(2, _sleep_while_another_is_late)
    assert first.value == second.value == []


def _wait_in_a_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook waits for its peers in the call, instead of asynchronously as in DDP's tutorials."""
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _one_is_late_for_a_hook() -> list[str]:
    log = Log()
    model = ReducerDDP(nn.Linear(4, 4))
    model.register_comm_hook(None, _wait_in_a_hook)
    for step in range(3):
        if step == 2:
            _begin_trial(model, warn=WARN_S)
            if dist.get_rank() == 1:
                _await_warnings()
        model(torch.ones(2, 4)).sum().backward()
    return log.texts


def test_a_hook_that_waits_is_a_wait() -> None:
    endings = run(3, _one_is_late_for_a_hook)
    for rank in (0, 2):
        texts = [text for text in endings[rank].value if " is back " not in text]
        assert texts and all("missing: rank 1, " in text for text in texts), texts
        assert all("missing: rank " + str(2 - rank) not in text for text in texts), texts


# ---- bad patience --------------------------------------------------------------------------------


def _wrap_twice() -> tuple[str, bool]:
    """The error of the first construction, and whether the second one, without the variable, is
    monitored."""
    text = ""
    try:
        ReducerDDP(nn.Linear(4, 4))
    except ValueError as error:
        text = str(error)
    del os.environ[WARN]
    dist.barrier()
    model = ReducerDDP(nn.Linear(4, 4))
    let_meet(model)
    stack = ddpx.peer_stack(model, 1 - dist.get_rank())  # the other rank answers if it is monitored
    dist.barrier()
    return text, "_wrap_twice" in stack


@pytest.mark.parametrize("value", ["0", "soon", "-1", "nan"])
def test_a_bad_variable_is_named_and_nothing_is_lost(value: str) -> None:
    for ending in run(2, _wrap_twice, environment={WARN: value}):
        text, watched = ending.value
        assert text.startswith(f"{WARN}=") and "is not a valid time limit" in text, text
        assert watched
