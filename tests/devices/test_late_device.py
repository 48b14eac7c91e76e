"""The late device itself: which work is late, in which order, and the contents of freed memory.

Ranks run these tests, since the device changes the default accelerator of its process.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import late_device
import pytest
import torch
import torch.distributed as dist
from device_ranks import HOLD_MS, controls

pytestmark = pytest.mark.timeout(60)


def _kernels_run_late_and_in_order() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    x = torch.zeros(4, device="late")
    torch.accelerator.synchronize()
    begin = time.monotonic()
    for _ in range(3):
        x.mul_(2).add_(1)
    stream = torch.accelerator.current_stream()
    assert not stream.query()
    assert x.tolist() == [7.0] * 4  # reading demands the work
    assert stream.query()
    assert time.monotonic() - begin < 5


def _held_work_runs_by_itself_in_the_end() -> None:
    controls().set_hold(late_device.milliseconds(30))
    x = torch.zeros(4, device="late").add_(1)
    stream = torch.accelerator.current_stream()
    begin = time.monotonic()
    while not stream.query():
        time.sleep(0.001)
    assert 0.02 < time.monotonic() - begin < 5
    assert x.cpu().eq(1).all()


def _streams_are_ordered_by_events_only() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x = torch.zeros(4, device="late")
    torch.accelerator.synchronize()
    x.add_(1)
    with side:
        unordered = x * 1
    side.synchronize()
    assert _peek(unordered, side) == [0.0] * 4
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        ordered = x * 1
    side.synchronize()
    assert _peek(ordered, side) == [1.0] * 4


def _peek(tensor: torch.Tensor, stream: torch.Stream) -> list[float]:
    with stream:
        return tensor.tolist()


def _an_event_is_the_version_that_was_recorded() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x = torch.zeros(4, device="late")
    begin, end = (torch.Event("late", enable_timing=True) for _ in range(2))
    begin.record()
    controls().sleep(late_device.milliseconds(50))
    end.record()
    side.wait_event(begin)
    x.add_(1)
    begin.synchronize()
    assert begin.query() and not end.query()
    end.synchronize()
    assert 45 < begin.elapsed_time(end) < 1000
    assert not torch.accelerator.current_stream().query()


def _freed_memory_is_nan_for_other_streams(recorded: bool) -> list[float]:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x = torch.ones(16, device="late")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    if recorded:
        x.record_stream(side)
    del x
    time.sleep(0.05)
    return _peek(y, side)


def _memory_of_a_stream_is_reused_in_its_order() -> None:
    x = torch.ones(16, device="late")
    place = x.data_ptr()
    y = x * 2
    del x
    z = torch.empty(16, device="late")
    assert z.data_ptr() == place
    assert y.tolist() == [2.0] * 16
    assert z.isnan().all()
    assert torch.empty(1000, device="late").isnan().all()


def _freed_memory_is_split_and_merged() -> None:
    side = torch.Stream(device="late")
    with side:  # no freed memory belongs to this stream yet
        x = torch.ones(64, device="late")
        place = x.data_ptr()
        del x
        parts = [torch.zeros(16, device="late") for _ in range(3)]
        assert [part.data_ptr() for part in parts] == [place, place + 64, place + 128]
        other = torch.empty(64, device="late")
        assert other.data_ptr() != place
        while parts:
            del parts[len(parts) // 2]
        whole = torch.empty(64, device="late")
        assert whole.data_ptr() == place
        assert whole.isnan().all()


def _an_ordered_use_of_freed_memory_is_right() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x = torch.ones(16, device="late")
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        y = x * 2
    torch.accelerator.current_stream().wait_stream(side)
    del x
    time.sleep(0.05)
    assert _peek(y, side) == [2.0] * 16


def _a_pinned_buffer_is_read_late() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    host = torch.ones(4, pin_memory=True)
    assert host.is_pinned() and not torch.ones(4).is_pinned()
    late = host.to("late", non_blocking=True)
    host.fill_(2)
    assert late.tolist() == [2.0] * 4
    pageable = torch.ones(4)
    staged = pageable.to("late", non_blocking=True)
    pageable.fill_(2)
    assert staged.tolist() == [1.0] * 4
    host.fill_(3)
    late = host.to("late", non_blocking=True)
    del host
    others = [torch.full((4,), 4.0, pin_memory=True) for _ in range(4)]
    assert late.tolist() == [3.0] * 4 and len(others) == 4


def _what_the_device_lacks_runs_on_the_host_in_order() -> None:
    controls().reset_counts()
    x = torch.tensor([3.0, 1.0, 2.0], device="late").mul_(2)
    assert "aten::sort" not in str(controls().counts(0)["fallback"])
    assert x.sort().values.tolist() == [2.0, 4.0, 6.0]
    assert "aten::sort" in str(controls().counts(0)["fallback"])


def _operations_and_bytes_are_counted() -> None:
    x, y = (torch.ones(10, device="late") for _ in range(2))
    controls().reset_counts()
    x.copy_(y)
    x.mul_(2)
    torch._foreach_copy_([x], [y])
    _ = x + y
    assert controls().counts(0)["native"] == {
        "copy_": (1, 80),
        "mul_": (1, 80),
        "_foreach_copy_": (1, 80),
        "add": (1, 120),
    }
    assert controls().counts(1)["native"] == {}
    assert controls().num_synchronisations() == 0
    x.cpu()
    assert controls().num_synchronisations() == 1


def _collectives_do_not_block_the_host() -> list[float]:
    controls().set_hold(late_device.milliseconds(10_000))
    x = torch.full((4,), 1.0 + dist.get_rank(), device="late")
    controls().reset_counts()
    x.mul_(3)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has looked"])
    work = dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        assert not work.is_completed()
        store.set("rank 0 has looked", "")
    work.wait()
    y = x * 1
    assert not torch.accelerator.current_stream().query()
    assert controls().num_synchronisations() == 0
    return y.tolist()


def _a_synchronous_collective_runs_on_the_current_stream() -> tuple[list[float], ...]:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x, y = (torch.full((4,), 1.0 + dist.get_rank(), device="late") for _ in range(2))
    work = dist.all_reduce(y, async_op=True)
    side.wait_stream(torch.accelerator.current_stream())
    controls().set_tracing(True)
    with side:
        dist.all_reduce(x)
        assert not side.query()
        x.mul_(2)
        results = (x.tolist(), _peek(y, side))  # calls of one group run in their order
    streams = [span.stream_id for span in controls().trace() if span.name == "allreduce"]
    controls().set_tracing(False)
    assert streams[-1] == side.stream_id
    work.wait()
    return results


def _a_future_orders_its_callbacks_streams() -> list[float]:
    controls().set_hold(late_device.milliseconds(10_000))
    x = torch.full((4,), 1.0 + dist.get_rank(), device="late")
    controls().reset_counts()
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert controls().num_synchronisations() == 0
    return doubled.wait().tolist()


def _other_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.full((2,), float(rank), device="late:1")
    dist.broadcast(x, 1)
    assert x.tolist() == [1.0] * 2
    parts = [torch.empty(2, device="late") for _ in range(size)]
    dist.all_gather(parts, torch.full((2,), float(rank), device="late"))
    assert [part[0].item() for part in parts] == list(range(size))
    dist.barrier()


def _devices_wait_for_each_other_in_copies() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    x = torch.zeros(4, device="late:0").add_(1)
    y = x.to("late:1") * 2
    assert y.device == torch.device("late:1")
    assert y.tolist() == [2.0] * 4


def _an_ignored_wait_is_not_made() -> None:
    controls().set_hold(late_device.milliseconds(10_000))
    side = torch.Stream(device="late")
    x = torch.zeros(4, device="late")
    torch.accelerator.synchronize()
    x.add_(1)
    event = torch.Event("late")
    event.record()
    with late_device.without("STREAM", "no such function") as removed:
        pass
    assert removed.num_applied == 0
    with late_device.without("STREAM", "_PyEval_EvalFrameDefault") as removed:
        side.wait_event(event)
    assert removed.num_applied == 1
    with side:
        y = x * 1
    assert _peek(y, side) == [0.0] * 4


def _random_delays_repeat() -> None:
    times = []
    for _ in range(2):
        controls().set_hold(late_device.milliseconds(100), seed=4)
        stream = torch.Stream(device="late")
        with stream:
            x = torch.zeros(4, device="late").add_(1)
        begin = time.monotonic()
        while not stream.query():
            time.sleep(0.001)
        times.append(time.monotonic() - begin)
        del x
    assert times[0] == pytest.approx(times[1], abs=0.05)


def _what_a_collective_throws_comes_out_of_the_next_wait() -> None:
    dist.all_reduce(torch.zeros(2, dtype=torch.float32, device="late"), dist.ReduceOp.BXOR)
    with pytest.raises(RuntimeError, match="BXOR"):
        torch.accelerator.synchronize()


def _a_capture_has_the_rules_of_cuda() -> None:
    side, other = torch.Stream(device="late"), torch.Stream(device="late")
    main = torch.accelerator.current_stream()
    before = torch.Event("late")
    before.record()
    forbidden: dict[str, Callable[[torch.Tensor], object]] = {
        "the host": lambda x: x.sum().item(),
        "the host, too": lambda x: x.cpu(),
        "the host, for the device": lambda x: torch.accelerator.synchronize(),
        "the host asks": lambda x: before.query(),
        "outside the capture": lambda x: side.wait_stream(other),
        "the default stream": lambda x: main.wait_stream(side),
    }
    x = torch.ones(4, device="late")
    torch.accelerator.synchronize()
    for text, action in forbidden.items():
        with side:
            controls().begin_capture()
            with pytest.raises(RuntimeError, match=text.partition(",")[0].removesuffix(" asks")):
                action(x)
            with pytest.raises(RuntimeError, match="has made the capture invalid"):
                controls().end_capture()
    with side:
        controls().begin_capture()
        y = x.sort().values * 2  # the device lacks sort
        other.wait_stream(side)
        side.wait_stream(other)
        controls().end_capture()
        assert y.tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="default stream"):
        controls().begin_capture()


ALONE = [
    _kernels_run_late_and_in_order,
    _held_work_runs_by_itself_in_the_end,
    _streams_are_ordered_by_events_only,
    _an_event_is_the_version_that_was_recorded,
    _memory_of_a_stream_is_reused_in_its_order,
    _freed_memory_is_split_and_merged,
    _an_ordered_use_of_freed_memory_is_right,
    _a_pinned_buffer_is_read_late,
    _what_the_device_lacks_runs_on_the_host_in_order,
    _operations_and_bytes_are_counted,
    _devices_wait_for_each_other_in_copies,
    _an_ignored_wait_is_not_made,
    _random_delays_repeat,
    _what_a_collective_throws_comes_out_of_the_next_wait,
    _a_capture_has_the_rules_of_cuda,
]


@pytest.mark.parametrize("check", ALONE, ids=lambda check: check.__name__.strip("_"))
def test_on_one_rank(device_ranks, check):
    assert HOLD_MS > 0
    device_ranks("late", 1).run(check)


def test_freed_memory_is_nan_for_other_streams(device_ranks):
    ranks = device_ranks("late", 1)
    (poisoned,) = ranks.run(_freed_memory_is_nan_for_other_streams, recorded=False)
    assert all(value != value for value in poisoned)
    (kept,) = ranks.run(_freed_memory_is_nan_for_other_streams, recorded=True)
    assert kept == [2.0] * 16


def test_collectives_do_not_block_the_host(device_ranks):
    assert device_ranks("late", 2).run(_collectives_do_not_block_the_host) == [[9.0] * 4] * 2


def test_a_synchronous_collective_runs_on_the_current_stream(device_ranks):
    results = device_ranks("late", 2).run(_a_synchronous_collective_runs_on_the_current_stream)
    assert results == [([6.0] * 4, [3.0] * 4)] * 2


def test_a_future_orders_the_streams_of_its_callbacks(device_ranks):
    assert device_ranks("late", 2).run(_a_future_orders_its_callbacks_streams) == [[6.0] * 4] * 2


def test_other_collectives(device_ranks):
    device_ranks("late", 2).run(_other_collectives)
