"""Every wait of the reducer's device path: its place, and the check that detects its removal.

The late device leaves a wait out if the functions that make it are on the call stack. No code of
ddpx takes part in this. scripts/device_tables.py writes the table of docs/devices.md from this
module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import abort_cases
import average_cases
import device_models
import kept_grad_cases
import late_device
import memory_cases
import sparse_cases
import stream_cases
import torch
import torch.distributed as dist
import two_device_cases
import unused_cases
import usage_cases
from device_ranks import controls


@dataclass(frozen=True)
class Proof:
    """One wait.

    Attributes:
        name: What waits for what, for the table.
        kind, callers: As for ``late_device.without``.
        check: Runs on every rank and raises an error if a result is wrong.
        slow: Work with this in its name takes ``slow_ms`` longer, with and without the wait.
    """

    name: str
    kind: str
    callers: tuple[str, ...]
    check: Callable[[], None]
    slow: str = ""
    slow_ms: float = 60


def _pairs(case: Callable[..., device_models.Pairs], **options: Any) -> Callable[[], None]:
    return functools.partial(_check_pairs, case, options)


def _check_pairs(case: Callable[..., device_models.Pairs], options: dict[str, Any]) -> None:
    device_models.check_rank(dist.get_rank(), case("late", **options))


def _as_on_cpu(case: Callable[..., usage_cases.State], *args: Any) -> Callable[[], None]:
    return functools.partial(_check_as_on_cpu, case, args)


def _check_as_on_cpu(case: Callable[..., usage_cases.State], args: tuple[Any, ...]) -> None:
    torch.testing.assert_close(case("late", *args), case("cpu", *args))


def _finds_what_is_not_finite() -> None:
    texts = stream_cases.checked_for_finite("late")
    assert texts[0] == texts[2] == "" and "finite" in texts[1], "no error is raised"


def _finds_that_all_is_finite() -> None:
    case = stream_cases.hooks_on_several_streams
    try:
        _check_pairs(case, {"keep": True, "check_finite": True})
    except RuntimeError as error:
        assert "NaN" not in str(error), "finite gradients are reported as not finite"
        raise


def _reads_the_use_of_all_ranks() -> None:
    readings = unused_cases.use_read_on_another_stream("late")
    assert readings == [[dist.get_world_size()] * 4] * 3, "the use of this rank alone is read"


def _peers_hear_what_is_not_finite() -> None:
    texts = abort_cases.not_finite_before_an_abort("late")
    assert dist.get_rank() == 0 or "finite" in texts[2], "no error is raised"


def _reports_weights_of_zero() -> None:
    weights = [0.0] * dist.get_world_size()
    try:
        average_cases.bad_weights("late", weights, finite_check=False, pauses=False)
    except Exception as error:
        raise AssertionError("the report is wrong, or does not come") from error


def _divides_by_weights_of_other_streams() -> None:
    try:
        _check_as_on_cpu(average_cases.weighted_on_side_streams, ())
    except RuntimeError as error:
        raise AssertionError("a weight is read before it is computed") from error


def _reads_rows_of(case: Callable[[str], device_models.Pairs]) -> Callable[[], None]:
    return functools.partial(_check_rows, case)


def _check_rows(case: Callable[[str], device_models.Pairs]) -> None:
    try:
        _check_pairs(case, {})
    except RuntimeError as error:
        raise AssertionError("row numbers are read in freed memory") from error


def _records_all_steps() -> None:
    timeline = usage_cases.recorded_late("late", range(2))
    of_ranks = [list(range(timeline.recording.world_size))] * 3
    assert [sorted(step.ranks) for step in timeline.steps] == of_ranks, "recorded steps are missing"


def _records_when_collectives_end() -> None:
    timeline, _ = usage_cases.recorded_busy_layers("late", 5)
    for step in timeline.steps:
        for rank_step in step.ranks.values():
            for bucket in rank_step.buckets:
                assert bucket is not None
                assert bucket.completed - bucket.launched > 55e6, "an end is recorded too early"


def _records_one_end_of_a_collective() -> None:
    """Ranks record the same end of an all-reduce, by the clock of any rank."""
    timeline = usage_cases.recorded_late("late", [0])
    for step in timeline.steps:
        ends = [
            bucket.completed for rank in step.ranks.values() for bucket in rank.buckets if bucket
        ]
        assert max(ends) - min(ends) < 200e6, f"{(max(ends) - min(ends)) / 1e6:.0f} ms apart"


PROOFS = (
    Proof(
        "the packing of a full bucket waits for the streams that its gradients came from",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::Step::complete", "!ddpx::Bucket::prepare_launch"),
        _pairs(stream_cases.hooks_on_several_streams, keep=True, batched_grad_copy=True),
    ),
    Proof(
        "check_finite looks at gradients that were packed on several streams",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::Step::check_finite"),
        _finds_that_all_is_finite,
    ),
    Proof(
        "the packing of gradients that came before the step began waits for their streams",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::Reducer::on_output_grad", "!ddpx::Step::complete"),
        _pairs(stream_cases.local_gradients_first),
    ),
    Proof(
        "the packing of unused gradients on another device waits for the stream of the caller",
        "STREAM",
        ("ddpx::StepRunner::begin", "!ddpx::Step::begin"),
        _pairs(two_device_cases.leave_the_second_device_unused),
    ),
    Proof(
        "with mixed precision, casts after a backward that raised wait for the gradients",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::StepRunner::recover"),
        _as_on_cpu(kept_grad_cases.aborted_in_mixed_precision, False),
    ),
    Proof(
        "the same, where the gradients' bucket was launched",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::StepRunner::recover"),
        _as_on_cpu(kept_grad_cases.aborted_in_mixed_precision, True),
        slow="copy_",
    ),
    Proof(
        "with views, copies into new buckets after a backward that raised wait for the gradients",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::StepRunner::recover"),
        _as_on_cpu(kept_grad_cases.aborted_with_views),
    ),
    Proof(
        "with views, autograd adds to a gradient behind its move after a backward that raised",
        "STREAM",
        ("ddpx::StepRunner::recover_in_backward", "!ddpx::StreamSet::wait"),
        _as_on_cpu(kept_grad_cases.kept_after_an_abort),
    ),
    Proof(
        "after an abort, the packing of a bucket that was predicted to be unused waits for the "
        "streams that its gradients came from",
        "STREAM",
        (
            "ddpx::StreamSet::wait",
            "ddpx::Step::launch_mispredicted",
            "!ddpx::Bucket::prepare_launch",
            "!ddpx::Step::complete",
        ),
        _pairs(abort_cases.packed_at_an_abort),
    ),
    Proof(
        "after an abort, check_finite reads what was found on other streams",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::FiniteCheck::launch"),
        _peers_hear_what_is_not_finite,
        slow="_foreach_norm",
        slow_ms=200,
    ),
    Proof(
        "the launch of a bucket waits for the stream on which it was packed",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::Bucket::prepare_launch"),
        _pairs(stream_cases.launched_from_another_stream),
    ),
    Proof(
        "autograd adds to a gradient behind its move into a lazy bucket",
        "STREAM",
        (
            "ddpx::Step::ensure_memory",
            "!ddpx::StreamSet::wait",
            "!ddpx::GradBuffer::ensure_memory",
        ),
        _pairs(
            stream_cases.hooks_on_several_streams,
            keep=True,
            gradient_as_bucket_view=True,
            lazy_bucket_allocation=True,
        ),
    ),
    Proof(
        "with views, the memory of gradients outlives the packing of a full bucket",
        "RECORD",
        ("ddpx::pack_all(",),
        _pairs(
            stream_cases.gradients_dropped_while_read,
            gradient_as_bucket_view=True,
            batched_grad_copy=True,
        ),
    ),
    Proof(
        "the memory of gradients in another dtype outlives the packing of a full bucket",
        "RECORD",
        ("ddpx::pack_all(",),
        _pairs(memory_cases.local_gradients_in_another_dtype, batched_grad_copy=True),
    ),
    Proof(
        "write-back waits for the all-reduce",
        "STREAM",
        ("ddpx::Bucket::wait", "ddpx::Step::finalize", "!c10::ivalue::Future"),
        _pairs(stream_cases.gradients_made_on_a_side_stream),
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "with views, the end of backward waits for the all-reduce",
        "STREAM",
        ("ddpx::Bucket::wait", "ddpx::Step::finalize", "!c10::ivalue::Future"),
        _pairs(stream_cases.gradients_made_on_a_side_stream, gradient_as_bucket_view=True),
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "write-back waits for the future of a communication hook",
        "STREAM",
        ("ddpx::Bucket::wait", "c10::ivalue::Future"),
        _as_on_cpu(usage_cases.with_a_hook, "a continuation"),
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "the memory of the result of a communication hook outlives write-back",
        "RECORD",
        ("ddpx::Bucket::wait", "!c10::ivalue::Future"),
        _pairs(memory_cases.a_result_of_a_side_stream),
    ),
    Proof(
        "the memory of a sparse average outlives its use on the stream of the caller",
        "RECORD",
        ("ddpx::Bucket::wait", "!c10::ivalue::Future"),
        _pairs(sparse_cases.drop_an_average_while_it_is_read),
    ),
    Proof(
        "the memory of a sparse gradient that a hook put in place of another outlives its packing",
        "RECORD",
        ("ddpx::pack(",),
        _reads_rows_of(sparse_cases.drop_a_gradient_of_another_stream),
    ),
    Proof(
        "after an abort, the memory of a sparse bucket outlives its launch",
        "RECORD",
        ("ddpx::StreamSet::keep_alive",),
        _reads_rows_of(sparse_cases.fail_before_rows_are_read),
    ),
    Proof(
        "the continuation of a built-in hook waits for the all-reduce",
        "STREAM",
        ("ddpx::Bucket::launch", "!ddpx::StreamSet::wait"),
        _as_on_cpu(usage_cases.in_mixed_precision),
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "reading the used-map waits for the ranks' agreement on it",
        "STREAM",
        ("ddpx::UsedMap::wait",),
        _pairs(unused_cases.used_differently_by_rank),
        slow="allreduce",
    ),
    Proof(
        "the memory of the used-map outlives the ranks' agreement on it",
        "RECORD",
        ("ddpx::UsedMap::wait",),
        _pairs(memory_cases.use_exchanged_on_alternating_streams),
    ),
    Proof(
        "another thread that reads the used-map waits for the stream that waited for the agreement",
        "STREAM",
        ("ddpx::Reducer::used_by_ranks", "!ddpx::UsedMap::wait"),
        _reads_the_use_of_all_ranks,
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "check_finite waits for what the other ranks found",
        "STREAM",
        ("ddpx::FiniteCheck::agree",),
        _finds_what_is_not_finite,
        slow="allreduce",
    ),
    Proof(
        "the sum of weights waits for the streams that computed the weights of this rank",
        "STREAM",
        ("ddpx::StreamSet::wait", "ddpx::Weights::take"),
        _divides_by_weights_of_other_streams,
        slow="sub",
    ),
    Proof(
        "the report of weights without an average waits for the sum of the step before",
        "HOST",
        ("ddpx::UnreadWeights::error",),
        _reports_weights_of_zero,
        slow="allreduce",
        slow_ms=200,
    ),
    Proof(
        "the rebuild of buckets waits for rank 0's order of arrival",
        "STREAM",
        ("ddpx::ArrivalOrder::agree",),
        _pairs(stream_cases.arrived_in_another_order),
        slow="broadcast",
    ),
    Proof(
        "wrapping waits for the broadcast of parameters",
        "STREAM",
        ("broadcast_coalesced",),
        _as_on_cpu(usage_cases.unequal_at_first),
        slow="broadcast",
    ),
    Proof(
        "the end of a recording waits for the device",
        "HOST",
        ("ddpx::DeviceMarks::collect_all", "!ddpx::DeviceMarks::relate"),
        _records_all_steps,
    ),
    Proof(
        "relating the device's clock to the host's waits for the device",
        "HOST",
        ("ddpx::DeviceMarks::relate",),
        _records_one_end_of_a_collective,
    ),
    Proof(
        "the recorded end of an all-reduce waits for the all-reduce",
        "STREAM",
        ("ddpx::Recording::follow",),
        _records_when_collectives_end,
        slow="allreduce",
    ),
)


def run(number: int, remove: bool) -> tuple[int, str]:
    """Runs a proof on every rank.

    Returns how often the wait was left out, and the detected errors.
    """
    proof = PROOFS[number]
    slow = late_device.slow(proof.slow or "nothing", proof.slow_ms)
    noticed = ""
    with (
        slow,
        late_device.without(
            proof.kind, *(proof.callers if remove else ("no such function",))
        ) as removed,
    ):
        try:
            proof.check()
        except Exception as error:
            noticed = f"{type(error).__name__}: {error}"
        for index in range(controls().NUM_DEVICES):
            controls().synchronize(index)
    return removed.num_applied, noticed
