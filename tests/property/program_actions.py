"""Runs a program with a model, and records the tensors after each action."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from program_models import Average, Model, Ours
from program_module import PlannedFailure
from programs import Fail, Freeze, Hook, Program, Step, Uneven
from slow_ddp import seed
from usages import APART, StepRun

Tensors = dict[str, torch.Tensor | None]


@dataclass(frozen=True)
class Moment:
    """What an action leaves behind.

    Attributes:
        tensors: Gradients, params and buffers by name.
        errors: For each averaged backward: the names of missing params, or the error's text.
    """

    tensors: Tensors
    errors: tuple[Any, ...]


def run_actions(model: Model, program: Program) -> list[Moment]:
    """Runs all actions. Body of a rank."""
    moments = []
    for number, action in enumerate(program.actions):
        seed(number)
        model.errors.clear()
        if isinstance(action, Step):
            _zero(model, action.zero)
            StepRun(model, action).run()
            if action.usage in APART:  # another output may still reach the missing params
                model.errors[:] = ["" for error in model.errors]
        elif isinstance(action, Fail):
            _fail(model, action)
        elif isinstance(action, Uneven):
            model.train_unevenly(action.counts, lambda: _uneven_step(model))
            model.errors.clear()  # ranks have different numbers of backwards
        elif isinstance(action, Freeze):
            _freeze(model, action)
        elif isinstance(action, Hook):
            model.hook(action.kind)
        else:
            _ACTS[action.name](model)
        moments.append(Moment(_tensors(model), tuple(model.errors)))
        # The gradients that an error names are unspecified. No later action may depend on them.
        if isinstance(action, Step) and program.mode == "default" and any(action.left_out):
            _zero(model, "none")
    return moments


def _tensors(model: Model) -> Tensors:
    found: Tensors = {}
    for name, param in model.module.named_parameters():
        found[f"gradient of {name}"] = None if param.grad is None else _plain(param.grad)
        found[f"parameter {name}"] = _plain(param)
    for name, buffer in model.module.named_buffers():
        found[f"buffer {name}"] = _plain(buffer)
    if model.post_sync_calls is not None:
        found["post-sync calls"] = torch.tensor(float(model.post_sync_calls))
    return found


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_dense().resolve_conj().resolve_neg().clone()


def _zero(model: Model, style: str) -> None:
    if style != "keep":
        model.wrapper.zero_grad(set_to_none=style == "none")
        model.forget_weights()


def _whole_step(model: Model, local: str = "") -> Step:
    """A step with all layers. In a static graph, with the layers of all steps."""
    steps = (action for action in model.program.actions if isinstance(action, Step))
    left_out = next(steps, Step()).left_out if model.program.mode == "static" else ((), ())
    return Step(local=local, left_out=left_out)


def whole_step(model: Model) -> None:
    """Makes a step of all layers, without gradients of former steps."""
    _zero(model, "none")
    StepRun(model, _whole_step(model)).run()


def _uneven_step(model: Model) -> None:
    whole_step(model)
    _optimizer_step(model)


def _fail(model: Model, action: Fail) -> None:
    step = _whole_step(model, local="both" if action.local else "")
    try:
        StepRun(model, step, fail=action.place).run()
    except PlannedFailure:
        pass
    else:
        raise AssertionError("the planned failure did not reach the caller")
    if action.place == "backward" and not action.local:
        model.forget_failure()
    # The gradients of a step that failed are unspecified.
    _zero(model, "none")


def _freeze(model: Model, action: Freeze) -> None:
    if dist.get_rank() in action.ranks:
        layer = model.module.layers[action.layer % len(model.module.layers)]
        layer.requires_grad_(not action.frozen)


# ---- actions without arguments -------------------------------------------------------------------


def _optimizer_step(model: Model) -> None:
    with torch.no_grad():
        for param in model.module.parameters():
            if param.grad is not None:
                param -= 0.01 * param.grad.to_dense()


def _decay_in_gradients(model: Model) -> None:
    """Weight decay with autograd on: the gradients then have a history."""
    of_sparse = {
        param
        for layer, module in zip(model.program.layers, model.module.layers, strict=True)
        if layer.kind == "sparse"  # the hand-made average makes the gradient dense
        for param in module.parameters()
    }
    for param in model.module.parameters():
        if param.grad is not None and param not in of_sparse:
            param.grad += 0.1 * param


def _evaluate(model: Model) -> None:
    with torch.no_grad():
        StepRun(model, _whole_step(model)).forward()


def _reset(model: Model) -> None:
    if isinstance(model, Ours):
        model.wrapper.reset()


def _check_finite(model: Model) -> None:
    if isinstance(model, Ours):
        model.wrapper.set_check_finite()


def _post_sync_hook(model: Model) -> None:
    if model.post_sync_calls is None and isinstance(model, (Ours, Average)):
        model.post_sync_calls = 0
        model.hooked = model.wrapper
        if isinstance(model, Ours):
            model.count_post_sync()


def _change_buffers(model: Model) -> None:
    with torch.no_grad():
        for buffer in model.module.buffers():
            buffer += 1 + dist.get_rank()


def _clear_one_gradient(model: Model) -> None:
    if dist.get_rank() == 1:
        model.module.layers[-1].zero_grad(set_to_none=True)


def _drop_a_forward(model: Model) -> None:
    StepRun(model, _whole_step(model)).forward(weight=0.0)


def _record(model: Model) -> None:
    if isinstance(model, Ours):
        model.record()


def _load_state(model: Model) -> None:
    model.wrapper.load_state_dict(copy.deepcopy(model.wrapper.state_dict()))


def _new_storage(model: Model) -> None:
    for param in model.module.parameters():
        param.data = param.data.clone()


_ACTS: dict[str, Callable[[Model], None]] = {
    "optimizer step": _optimizer_step,
    "decay in gradients": _decay_in_gradients,
    "wrap again": lambda model: model.wrap_again(),
    "drop newest wrapper": lambda model: model.drop_newest(),
    "reset": _reset,
    "evaluate": _evaluate,
    "evaluation mode": lambda model: model.wrapper.eval(),
    "training mode": lambda model: model.wrapper.train(),
    "copy": lambda model: model.copy(),
    "check finite": _check_finite,
    "post-sync hook": _post_sync_hook,
    "change buffers": _change_buffers,
    "clear one gradient": _clear_one_gradient,
    "drop a forward": _drop_a_forward,
    "record": _record,
    "load state": _load_state,
    "new storage": _new_storage,
}
