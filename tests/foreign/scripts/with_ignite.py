"""ignite: a supervised trainer over ``auto_model``, with accumulation, and a checkpoint."""

from __future__ import annotations

from pathlib import Path

import ignite.distributed as idist
import torch
from common import leave, loss_of, make_inputs, make_model, report
from ignite.engine import Events, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler
from torch import nn


def run(first: int, folder: Path) -> nn.Module:
    model = idist.auto_model(make_model())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer = create_supervised_trainer(
        model,
        optimizer,
        lambda output, _: loss_of(output),
        device=idist.device(),
        gradient_accumulation_steps=2,
    )
    average = EMAHandler(model, momentum=0.1)
    average.attach(trainer, event=Events.ITERATION_COMPLETED(every=2))
    objects = {"model": model, "optimizer": optimizer, "average": average.ema_model}
    if first:
        (file,) = folder.glob("*.pt")
        Checkpoint.load_objects(objects, torch.load(file, weights_only=True))
    saver = DiskSaver(str(folder), require_empty=False)
    trainer.add_event_handler(Events.COMPLETED, Checkpoint(objects, saver, n_saved=1))
    batches = [(inputs, inputs) for inputs in make_inputs(6, first)]
    trainer.run(batches, max_epochs=1)
    idist.barrier()
    report(average.ema_model)
    return model


def main(_: int) -> None:
    folder = Path("checkpoints").resolve()
    run(0, folder)
    report(run(6, folder).module)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(main)
leave()
