"""Runs a plan on a rank, and the reference, which averages each gradient by one all-reduce."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from random_modules import ROWS, WIDTH, Plan, RandomModule, Step, outputs_of
from slow_ddp import SlowDDP, assert_in_step, assert_names, bare, seed, zero_grads
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddpx import ReducerDDP

TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,
}


class ParamByParam(SlowDDP):
    """Averages gradients one by one in double precision, and counts the parts of each backward.

    Sparse gradients become dense. A param that no rank has used since the last averaging keeps its
    ``grad``.
    """

    def __init__(self, module: RandomModule) -> None:
        super().__init__(module, dict(module.plan.options).get("find_unused_parameters", False))
        self.parts: Counter[str] = Counter()  # counts of the running backward
        for name, param in self.managed.items():
            param.register_post_accumulate_grad_hook(lambda _, name=name: self.parts.update([name]))

    def missing(self) -> list[str]:
        """Params that the last backward could have reached, but did not."""
        return [n for n, p in self.managed.items() if p.requires_grad and not self.parts[n]]

    def average(self) -> None:
        for name, param in self.managed.items():
            kind = torch.complex128 if param.is_complex() else torch.float64
            total = torch.zeros(param.shape, dtype=kind)
            if param.grad is not None:
                total += param.grad.detach().to_dense().to(kind)
            users = torch.tensor([float(name in self.used)])
            dist.all_reduce(torch.view_as_real(total) if param.is_complex() else total)
            dist.all_reduce(users)
            if users.item() > 0 and (param.requires_grad or self.find_unused_parameters):
                param.grad = (total / dist.get_world_size()).to(param.dtype)
        self.used.clear()


Model = ReducerDDP | ParamByParam


class StepRun:
    """One step of one model. Errors of backward are recorded, and the step continues."""

    def __init__(self, model: Model, step: Step) -> None:
        self.model = model
        self.step = step
        self.missing: list[list[str]] = []  # per synchronized backward, for the reference
        self.errors: list[str] = []  # per synchronized backward, for ours

    def run(self) -> None:
        for micro_batch in self.step.micro_batches:
            self.model.require_backward_grad_sync = micro_batch.sync
            KINDS[micro_batch.kind](self)
        self.model.require_backward_grad_sync = True

    def forward(self, bypass: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        self.x = torch.randn(3, WIDTH, dtype=torch.float64).requires_grad_()
        rows = torch.randint(ROWS, (3,))
        model = bare(self.model) if bypass else self.model
        return outputs_of(model(self.x, rows, self.step, dist.get_rank()))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        model = self.model
        if isinstance(model, ReducerDDP):
            error = ""
            try:
                loss.backward(**kwargs)
            except RuntimeError as caught:
                error = str(caught) or repr(caught)
            self.errors.append(error)
            return
        model.parts.clear()
        loss.backward(**kwargs)
        self.missing.append(model.missing() if model.require_backward_grad_sync else [])
        if model.require_backward_grad_sync:
            model.average()


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.sum()


def _plain(run: StepRun) -> None:
    run.backward(_loss(run.forward()[0]))


def _bypass(run: StepRun) -> None:
    run.backward(_loss(run.forward(bypass=True)[0]))


def _both_outputs(run: StepRun) -> None:
    last, at_cut = run.forward()
    run.backward(_loss(last) + _loss(at_cut))


def _ffbb(run: StepRun) -> None:
    for loss in [_loss(run.forward()[0]) for _ in range(2)]:
        run.backward(loss)


def _fbb(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    run.backward(loss, retain_graph=True)
    run.backward(loss)


def _sum_of_two(run: StepRun) -> None:
    run.backward(_loss(run.forward()[0]) + _loss(run.forward(bypass=True)[0]))


def _evaluation_between(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    with torch.no_grad():
        run.forward()
    run.backward(loss)


def _one_dropped(run: StepRun) -> None:
    run.forward()
    run.backward(_loss(run.forward()[0]))


def _gradient_of_input(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    torch.autograd.grad(loss, run.x, retain_graph=True)
    run.backward(loss)


def _outputs_apart(run: StepRun) -> None:
    last, at_cut = run.forward()
    run.backward(_loss(last), retain_graph=True)
    run.backward(_loss(at_cut))


def _outputs_apart_in_reverse(run: StepRun) -> None:
    last, at_cut = run.forward()
    run.backward(_loss(at_cut), retain_graph=True)
    run.backward(_loss(last))


KINDS: dict[str, Callable[[StepRun], None]] = {
    "plain": _plain,
    "bypass": _bypass,
    "both outputs": _both_outputs,
    "ffbb": _ffbb,
    "fbb": _fbb,
    "evaluation between": _evaluation_between,
    "one dropped": _one_dropped,
    "gradient of an input": _gradient_of_input,
    "sum of two": _sum_of_two,
    "outputs apart": _outputs_apart,
    "outputs apart, in reverse": _outputs_apart_in_reverse,
}


def freeze(model: Model, step: Step) -> None:
    """Freezes the params of this step on this rank, and unfreezes those of earlier steps."""
    module = bare(model)
    always = _ids(module, (i for i, layer in enumerate(module.plan.layers) if layer.frozen))
    now = _ids(module, step.frozen[dist.get_rank()])
    for param in module.parameters():
        if id(param) not in always:
            param.requires_grad_(id(param) not in now)


def _ids(module: RandomModule, layers: Iterable[int]) -> set[int]:
    return {id(param) for index in layers for param in module.layers[index].parameters()}


def run_plan(plan: Plan) -> None:
    """Runs and compares every step of the plan. Body of a rank."""
    torch.manual_seed(0)
    module = RandomModule(plan)
    slow = ParamByParam(copy.deepcopy(module))
    ours = ReducerDDP(module, **dict(plan.options))
    if plan.hook:
        ours.register_comm_hook(None, allreduce_hook)
    style = "none"
    for number, step in enumerate(plan.steps):
        zero_grads(style, ours, slow)
        runs = [StepRun(slow, step), StepRun(ours, step)]
        for run in runs:
            freeze(run.model, step)
            seed(number)
            run.run()
        unspecified = check_errors(plan, step, runs[0].missing, runs[1].errors)
        check_grads(ours, slow, unspecified, number)
        # After an error grad is not specified, so the next step must not depend on it.
        style = "none" if anywhere_missing(plan, step) else plan.zero_style
    assert_in_step()


def anywhere_missing(plan: Plan, step: Step) -> bool:
    return not tolerates_unused(plan) and any(step.left_out)


def tolerates_unused(plan: Plan) -> bool:
    options = dict(plan.options)
    return bool(options.get("find_unused_parameters") or options.get("static_graph"))


def check_errors(plan: Plan, step: Step, missing: list[list[str]], errors: list[str]) -> set[str]:
    """Checks that errors name exactly the params that default mode misses. Returns the names."""
    assert len(missing) == len(errors)
    # An output that is alive and had no backward yet may still reach them.
    apart = any(micro_batch.kind.startswith("outputs apart") for micro_batch in step.micro_batches)
    named: set[str] = set()
    for names, error in zip(missing, errors, strict=True):
        if not names or tolerates_unused(plan) or apart:
            assert not error, error
        else:
            assert_names(error, names, "find_unused_parameters=True")
            named.update(names)
    return named


def check_grads(ours: ReducerDDP, slow: ParamByParam, unspecified: set[str], number: int) -> None:
    found = []
    for (name, param), expected in zip(
        ours.module.named_parameters(), slow.module.parameters(), strict=True
    ):
        if name in unspecified:
            continue
        if param.grad is None or expected.grad is None:
            if param.grad is not expected.grad:
                found.append(f"{name}: {_kind(param.grad)}, expected {_kind(expected.grad)}")
            continue
        left, right = param.grad.detach().to_dense(), expected.grad.detach().to_dense()
        tolerance = TOLERANCES[param.dtype]
        scale = max(1.0, right.abs().max().item()) if right.numel() else 1.0
        if not torch.allclose(left, right, rtol=tolerance, atol=tolerance * scale):
            found.append(f"{name}: {left.flatten()[:4]}, expected {right.flatten()[:4]}")
    assert not found, f"rank {dist.get_rank()}, step {number}: " + "; ".join(found)


def _kind(grad: torch.Tensor | None) -> str:
    return "None" if grad is None else "a gradient"
