"""Ways to call forward and backward in one micro-step. The same usage runs with each model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from program_module import BATCH, ROWS, WIDTH, outputs_of
from programs import Step

if TYPE_CHECKING:
    from program_models import Model


class StepRun:
    """A micro-step of a model."""

    def __init__(self, model: Model, step: Step, fail: str = "") -> None:
        self.model = model
        self.step = step
        self.fail = fail

    def run(self) -> None:
        USAGES[self.step.usage](self)

    def forward(
        self, call: Callable[..., Any] | None = None, weight: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs ``call``, by default the wrapper, on new inputs. Returns both outputs.

        The weight is 0 if no backward follows.
        """
        if torch.is_grad_enabled():
            self.model.set_weight(2.0 + 3 * dist.get_rank() if weight is None else weight)
        self.x = torch.randn(BATCH, WIDTH, dtype=torch.float64).requires_grad_()
        rows = torch.randint(ROWS, (BATCH,))
        with self._context("forward"):
            run = call or self.model.wrapper
            return outputs_of(run(self.x, rows, self.step, dist.get_rank(), self.fail))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        with self._context("backward"):
            self.model.backward(loss, averages=not self.step.local, **kwargs)

    def _context(self, place: str) -> AbstractContextManager[None]:
        return self.model.wrapper.no_sync() if self.step.local in (place, "both") else nullcontext()


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean() + output.sum()


def _plain(run: StepRun) -> None:
    run.backward(_loss(run.forward()[0]))


def _bypass(run: StepRun) -> None:
    run.backward(_loss(run.forward(run.model.bypass)[0]))


def _both_outputs(run: StepRun) -> None:
    last, middle = run.forward()
    run.backward(_loss(last) + _loss(middle))


def _ffbb(run: StepRun) -> None:
    for loss in [_loss(run.forward()[0]) for _ in range(2)]:
        run.backward(loss)


def _autocast(run: StepRun) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = _loss(run.forward()[0])
    run.backward(loss)


def _gradient_penalty(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    (grad,) = torch.autograd.grad(loss, run.x, create_graph=True)
    run.backward(loss + grad.square().sum())


def _to_params(run: StepRun) -> None:
    """A backward to all params that require a gradient, and not to inputs."""
    loss = _loss(run.forward()[0])
    run.backward(loss, inputs=[p for p in run.model.module.parameters() if p.requires_grad])


def _in_a_thread(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    errors: list[BaseException] = []

    def body() -> None:
        try:
            run.backward(loss)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def _fbb(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    run.backward(loss, retain_graph=True)
    run.backward(loss)


def _sum_of_two(run: StepRun) -> None:
    run.backward(_loss(run.forward()[0]) + _loss(run.forward(run.model.bypass)[0]))


def _evaluation_between(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    with torch.no_grad():
        run.forward()
    run.backward(loss)


def _one_dropped(run: StepRun) -> None:
    run.forward(weight=0.0)
    run.backward(_loss(run.forward()[0]))


def _gradient_of_input(run: StepRun) -> None:
    loss = _loss(run.forward()[0])
    torch.autograd.grad(loss, run.x, retain_graph=True)
    run.backward(loss)


def _outputs_apart(run: StepRun) -> None:
    last, middle = run.forward()
    run.backward(_loss(last), retain_graph=True)
    run.backward(_loss(middle))


def _outputs_apart_in_reverse(run: StepRun) -> None:
    last, middle = run.forward()
    run.backward(_loss(middle), retain_graph=True)
    run.backward(_loss(last))


def _functional(run: StepRun, num_changed: int | None = None) -> None:
    """A forward of the wrapper with plain tensors in place of params."""
    wrapper = run.model.wrapper
    names = [name for name, param in wrapper.named_parameters() if param.requires_grad]
    changed = {name: wrapper.get_parameter(name) * 1.5 for name in names[:num_changed]}
    call = lambda *inputs: torch.func.functional_call(wrapper, changed, inputs)  # noqa: E731
    run.backward(_loss(run.forward(call)[0]))


def _functional_in_part(run: StepRun) -> None:
    _functional(run, num_changed=1)


USAGES: dict[str, Callable[[StepRun], None]] = {
    "plain": _plain,
    "functional": _functional,
    "functional in part": _functional_in_part,
    "both outputs": _both_outputs,
    "autocast": _autocast,
    "gradient penalty": _gradient_penalty,
    "to params": _to_params,
    "in a thread": _in_a_thread,
    "bypass": _bypass,
    "ffbb": _ffbb,
    "fbb": _fbb,
    "evaluation between": _evaluation_between,
    "one dropped": _one_dropped,
    "gradient of an input": _gradient_of_input,
    "sum of two": _sum_of_two,
    "outputs apart": _outputs_apart,
    "outputs apart, in reverse": _outputs_apart_in_reverse,
}
# Usages with one forward of the wrapper, and one backward.
SIMPLE = (
    "plain",
    "functional",
    "functional in part",
    "both outputs",
    "autocast",
    "to params",
    "in a thread",
)
APART = ("outputs apart", "outputs apart, in reverse")
TWO_BACKWARDS = ("ffbb", "fbb", *APART)
