"""Lightning's Trainer, by hand.

The wrapper's forward runs ``training_step``: the module's ``forward`` is replaced for one call. The
optimizer calls a closure that runs forward and backward. With manual optimization, the wrapper's
flag ``require_backward_grad_sync`` is off during ``training_step``, and the strategy prepares the
reducer before each backward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import loss_of, make_inputs, make_model, process_group, report, save
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NUM_MICRO_STEPS = 2


class Module(nn.Module):
    """A module with methods of a training, in the place of a LightningModule."""

    def __init__(self, automatic: bool) -> None:
        super().__init__()
        self.automatic = automatic
        self.inner = make_model()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)

    def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
        return loss_of(self(inputs))


def redirected(model: DistributedDataParallel, *args: Any) -> Any:
    """Calls ``training_step`` of the module by the wrapper's forward."""
    module = model.module
    forward = module.forward

    def training_step(*args: Any) -> Any:
        module.forward = forward  # the step itself may call forward
        output = module.training_step(*args)
        if not module.automatic:
            model.require_backward_grad_sync = False
        return output

    module.forward = training_step
    output = model(*args)
    if not module.automatic:
        model.require_backward_grad_sync = True
    return output


def automatic(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, first: int) -> None:
    """Steps by closures, with clipping. The other micro-steps run in ``no_sync()``."""
    for number, inputs in enumerate(make_inputs(8, first)):

        def closure(inputs: torch.Tensor = inputs, number: int = number) -> torch.Tensor:
            loss = redirected(model, inputs) / NUM_MICRO_STEPS
            if number % NUM_MICRO_STEPS == 0:
                optimizer.zero_grad()
            loss.backward()
            return loss.detach()

        if (number + 1) % NUM_MICRO_STEPS:
            with model.no_sync():
                closure()
            continue

        def with_clipping(closure: Any = closure) -> torch.Tensor:
            loss = closure()
            nn.utils.clip_grad_norm_(model.module.parameters(), 0.5)
            return loss

        optimizer.step(with_clipping)


def manual(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    """Two backwards per step, each announced to the reducer."""
    for inputs in make_inputs(4):
        loss = redirected(model, inputs)
        assert torch.is_grad_enabled() and model.require_backward_grad_sync
        model.require_forward_param_sync = True
        outputs = [loss] if model.find_unused_parameters and not model.static_graph else []
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward(outputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


with process_group():
    file = Path("lightning.ckpt")
    module = Module(automatic=True)
    model = DistributedDataParallel(module=module, device_ids=None)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    automatic(model, optimizer, 0)
    model._get_ddp_logging_data().get("can_set_static_graph")  # read at the end of a fit
    save(file, state_dict=module.state_dict(), optimizer=optimizer.state_dict())

    resumed = Module(automatic=True)
    checkpoint = torch.load(file, weights_only=True)
    resumed.load_state_dict(checkpoint["state_dict"])
    model = DistributedDataParallel(resumed)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(checkpoint["optimizer"])
    automatic(model, optimizer, 8)
    report(resumed)

    by_hand = Module(automatic=False)
    model = DistributedDataParallel(by_hand, find_unused_parameters=True)
    manual(model, torch.optim.SGD(by_hand.parameters(), lr=0.1))
    report(by_hand)
