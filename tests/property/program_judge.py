"""Compares the three models of a program: the body of a rank, and the judgement over all ranks."""

from __future__ import annotations

import faulthandler
import traceback
from dataclasses import dataclass

import torch
import torch.distributed as dist
from known import ddp_differs, has_late_errors, may_raise
from program_actions import Moment, run_actions, whole_step
from program_models import Average, Ddp, Ours
from programs import DTYPES, Program, Step
from slow_ddp import assert_in_step, assert_names

from ddpx.health.ending import end_with
from ddpx.testing import RankFailed, RankPool, Trace, compare_traces

TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
# A program takes a fraction of a second. Start-up of ranks is not included.
TIME_LIMIT_S = 20.0


@dataclass(frozen=True)
class Verdict:
    """What one rank found.

    Attributes:
        difference: The first difference from an oracle, or an empty string.
        error: The traceback of an error of ReducerDDP, or an empty string.
        oracle: What DDP did, or an empty string if DDP did not run.
    """

    difference: str = ""
    error: str = ""
    oracle: str = ""


def run_program(program: Program, with_ddp: bool) -> Verdict:
    """Runs the program with each model. Body of a rank. Before the time limit, prints stacks."""
    faulthandler.dump_traceback_later(TIME_LIMIT_S - 2)
    try:
        return _compare_models(program, with_ddp)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _compare_models(program: Program, with_ddp: bool) -> Verdict:
    expected = run_actions(Average(program), program)
    try:
        ours = Ours(program)
        found = run_actions(ours, program)
        if has_late_errors(program):
            whole_step(ours)  # an error may come one step later
        assert_in_step()
    except BaseException as error:
        end_with(error)  # as if the error ended the script: peers raise, too
        return Verdict(error=traceback.format_exc())
    difference = _first_difference(program, found, expected, _least_tolerance(program))
    if not with_ddp:
        return Verdict(difference)
    ddp = _moments_of_ddp(program)
    if ddp is None:
        oracle = "DDP failed"
    elif _first_difference(program, ddp, expected, 0.0):
        oracle = "DDP differs from the average"
    else:
        difference = difference or _different_bits(program, ddp, found)
        oracle = "DDP agrees with the average"
    return Verdict(difference and f"{difference} ({oracle})", oracle=oracle)


def _moments_of_ddp(program: Program) -> list[Moment] | None:
    """None if DDP raises on a rank, or hangs until its time limit."""
    try:
        moments = run_actions(Ddp(program), program)
    except Exception:
        moments = None
    succeeded = torch.tensor([float(moments is not None)])
    dist.all_reduce(succeeded, dist.ReduceOp.MIN)
    if not succeeded.item():
        Ddp.drop_group()
        return None
    return moments


def _first_difference(
    program: Program, found: list[Moment], expected: list[Moment], least_tolerance: float
) -> str:
    for number, (left, right) in enumerate(zip(found, expected, strict=True)):
        text = _tensors_differ(left, right, least_tolerance) or _errors_differ(left, right)
        if text:
            return f"action {number}, {program.actions[number]}: {text}"
    return ""


def _errors_differ(found: Moment, expected: Moment) -> str:
    """Whether the errors do not name exactly the params that the hand-made average misses."""
    if not found.errors and not any(expected.errors):
        return ""  # DDP, which runs without errors
    if len(found.errors) != len(expected.errors):
        return f"{len(found.errors)} averaged backwards, expected {len(expected.errors)}"
    for error, names in zip(found.errors, expected.errors, strict=True):
        if not names and error:
            return f"unexpected error: {error}"
        try:
            assert_names(error, names)
        except AssertionError as missing:
            return f"an error without these names: {missing}"
    return ""


def _tensors_differ(found: Moment, expected: Moment, least_tolerance: float) -> str:
    # The gradients that an error names are unspecified.
    skipped = {f"gradient of {name}" for names in expected.errors for name in names}
    for name, right in expected.tensors.items():
        if name in skipped or name not in found.tensors:
            continue
        left = found.tensors[name]
        if (left is None) != (right is None):
            return f"{name} is {_short(left)}, expected {_short(right)}"
        if left is None or right is None:
            continue
        tolerance = max(TOLERANCES.get(right.dtype, 0.0), least_tolerance)
        scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
        if left.shape != right.shape or not torch.allclose(
            left.to(right.dtype), right, rtol=tolerance, atol=tolerance * scale
        ):
            return f"{name} is {_short(left)}, expected {_short(right)}"
    return ""


def _least_tolerance(program: Program) -> float:
    """Reduced precision anywhere reaches all params through the activations."""
    dtypes = {DTYPES[layer.dtype] for layer in program.layers}
    if program.mixed:
        dtypes.add(DTYPES[program.mixed])
    if "reduce_dtype" in dict(program.options):
        dtypes.add(torch.float32)
    if any(isinstance(action, Step) and action.usage == "autocast" for action in program.actions):
        dtypes.add(torch.bfloat16)
    return max(TOLERANCES[dtype] for dtype in dtypes)


def _different_bits(program: Program, ddp: list[Moment], found: list[Moment]) -> str:
    for number, (left, right) in enumerate(zip(ddp, found, strict=True)):
        shared = {name: right.tensors[name] for name in left.tensors}
        comparison = compare_traces(Trace((left.tensors,)), Trace((shared,)))
        if not comparison.identical:
            return f"action {number}, {program.actions[number]}: DDP: {comparison.differences[0]}"
    return ""


def _short(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else str(tensor.flatten()[:4].tolist())


class Judge:
    """Runs programs on two ranks. New ranks replace ranks that hang, die or raise."""

    def __init__(self) -> None:
        self._pools: dict[str, RankPool] = {}

    def check(self, program: Program) -> str:
        """Returns what DDP did, or an empty string if DDP is no oracle.

        An error of ReducerDDP must reach all ranks: by itself, or in the failure that names it.

        Raises:
            AssertionError: ReducerDDP differs from an oracle, raises or hangs.
        """
        pool = self._pools.setdefault(program.backend, RankPool(2, program.backend))
        with_ddp = not ddp_differs(program)
        try:
            verdicts = pool.run(run_program, program, with_ddp, timeout=TIME_LIMIT_S)
        except RankFailed as error:
            if _moments_of_ddp.__name__ not in str(error):
                raise
            # gloo ended a process because DDP's collective calls did not match.
            verdicts = pool.run(run_program, program, False, timeout=TIME_LIMIT_S)
        errors = [verdict.error for verdict in verdicts]
        found = [verdict.error or verdict.difference for verdict in verdicts]
        as_documented = may_raise(program, found)
        if any(errors) or has_late_errors(program):
            pool.close()  # the group of these ranks has failed, or may fail in the next program
        if as_documented:
            return "an error, as documented"
        if any(found):
            lines = (
                f"--- rank {rank}: {text or 'no difference'}" for rank, text in enumerate(found)
            )
            raise AssertionError("\n".join([repr(program), *lines]))
        return str(verdicts[0].oracle)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
