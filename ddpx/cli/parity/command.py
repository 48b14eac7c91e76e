"""``ddpx parity``: compares every bit of a training under DDP and under another wrapper."""

from __future__ import annotations

import ast
import inspect
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import torch
from torch.nn.parallel import DistributedDataParallel

from ddpx.cli import errors, options
from ddpx.cli.build import build, find_wrapper
from ddpx.cli.parity import text as parity_text
from ddpx.cli.parity.record import RankRecord, Settings
from ddpx.cli.parity.training import Training
from ddpx.cli.script import Script
from ddpx.cli.torchrun import launch, local_options
from ddpx.errors import count
from ddpx.testing.events import Difference, Event, Verdict, compare

_DEFAULT_NUM_STEPS = 10  # for module:function


class RunFailed(click.ClickException):
    """The script itself failed. ``exit_code`` is the exit code of the launcher."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code  # type: ignore[misc]


@dataclass(frozen=True)
class Subject:
    """The training that runs twice.

    Attributes:
        name: The name that the user passed.
        script: The script that trains.
        num_ranks: The number of ranks on this machine.
        max_steps: The number of compared steps. None: all steps.
        wrapper: ``module:Class`` of the wrapper that is compared with DDP.
    """

    name: str
    script: Script
    num_ranks: int
    max_steps: int | None
    wrapper: str

    @property
    def title(self) -> str:
        """The name of the wrapper."""
        return self.wrapper.partition(":")[2]

    def run(self, replaces: bool, difference: Difference | None = None) -> Outcome:
        """Runs the training.

        Args:
            replaces: Whether the wrapper replaces DDP.
            difference: A difference of earlier runs. The run stores its first tensor.

        Raises:
            RunFailed: The script failed.
            UserMistake: The script wrapped no model in DDP, or a rank left no record.
        """
        title = self.title if replaces else "DDP"
        ranks = count(self.num_ranks, "rank")
        click.echo(f"ddpx: running {self.name} with {title} on {ranks}", err=True)
        with tempfile.TemporaryDirectory(prefix="ddpx-parity-") as folder:
            settings = Settings(folder, self.wrapper if replaces else None, self.max_steps)
            if difference is not None:
                settings = replace(
                    settings,
                    captured_rank=difference.rank,
                    captured_event=difference.index,
                    captured_name=difference.names[0],
                )
            code = launch(
                local_options(self.num_ranks),
                "ddpx.cli.parity.runner",
                [settings.to_word(), *self.script.command()],
            )
            if code != 0:
                text = f"{self.name} failed with {title}. Nothing was compared."
                raise RunFailed(text, code)
            records = RankRecord.read_all(Path(folder))
            captured = settings.captured
            tensor = torch.load(captured) if captured.exists() else None
        wrappers = {name for record in records for name in record.wrappers}
        if len(records) < self.num_ranks:
            raise errors.nothing_recorded(self.name)
        if not wrappers:
            raise errors.nothing_wrapped(self.name)
        itself = wrappers & {self.title, "ReducerDDP"}
        if not replaces and itself:
            wrapper = itself.pop()
            raise errors.UserMistake(
                f"{self.name} uses {wrapper} directly, so ddpx parity cannot run the script with "
                "DDP. Import DistributedDataParallel from torch.nn.parallel in the script. ddpx "
                f"parity then replaces DistributedDataParallel by {wrapper}."
            )
        return Outcome(records, tensor)


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        records: The records of all ranks.
        captured: The stored tensor.
    """

    records: list[RankRecord]
    captured: torch.Tensor | None

    @property
    def events(self) -> list[list[Event]]:
        """The events of each rank."""
        return [record.events for record in self.records]


@click.command("parity", context_settings={"ignore_unknown_options": True})
@click.argument("target", metavar="SCRIPT|MODULE:FUNCTION")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@options.num_ranks()
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Number of steps to compare. Default: all steps of a script; 10 steps of a function.",
)
@options.IS_MODULE
@click.option("--backend", help="For MODULE:FUNCTION: gloo (default), shm, nccl.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="NAME=VALUE",
    help="For MODULE:FUNCTION: an argument of DDP. Repeatable.",
)
@click.option(
    "--class",
    "wrapper",
    metavar="MODULE:CLASS",
    default="ddpx:ReducerDDP",
    show_default=True,
    help="Wrapper to compare with DDP. The class must take the arguments of DDP.",
)
def command(
    target: str,
    arguments: tuple[str, ...],
    nproc_per_node: int,
    steps: int | None,
    is_module: bool,
    backend: str | None,
    settings: tuple[str, ...],
    wrapper: str,
) -> int:
    """Runs a training under DDP and then under ReducerDDP, and compares every bit.

    Compares losses, gradients after each synchronized backward, and weights, on every rank and in
    every step. Also prints step times and peak memory. The script must seed all random numbers.
    Options that ddpx does not know, and all words after --, go to the script.

    FUNCTION takes no arguments and returns (module, example input), or a module with an attribute
    example_input.

    Exits with 0 if all values are identical, and with 1 if not.

    \b
    Examples:
      ddpx parity train.py --epochs 1
      ddpx parity --steps 20 --nproc-per-node 3 train.py -- --steps 1000
      ddpx parity mymodels:build --backend shm --set find_unused_parameters=true
      ddpx parity --class mywrappers:MyDDP train.py
    """
    options.check_target(target)
    find_wrapper(wrapper)
    is_function = ":" in target and not is_module and not Path(target).exists()
    if is_function:
        if arguments:
            words = " ".join(arguments)
            raise click.UsageError(f"MODULE:FUNCTION takes no arguments, but got: {words}.")
        steps = steps or _DEFAULT_NUM_STEPS
        training = Training(target, steps, backend or "gloo", _ddp_options(settings))
        if build(target)[1] is None:
            raise errors.UserMistake(
                f"{target} returned no example input. Return (module, example_input), or set "
                "module.example_input."
            )
        script = Script("ddpx.cli.parity.training", True, (training.to_word(),))
    else:
        if backend is not None or settings:
            raise click.UsageError(
                "--backend and --set are only for MODULE:FUNCTION. Leave them out for a script."
            )
        script = Script(target, is_module, arguments)
        script.check()
    return _compare(Subject(target, script, nproc_per_node, steps, wrapper))


def _compare(subject: Subject) -> int:
    """Runs both trainings, prints the comparison, and returns the exit code."""
    ddp, ours = (subject.run(replaces) for replaces in (False, True))
    verdict = compare(ddp.events, ours.events)
    if verdict.identical and not verdict.num_values.get("gradient"):
        raise errors.UserMistake(
            f"{subject.name} averaged no gradients, so there is nothing to compare. Call "
            "loss.backward() on an output of the wrapper. ddpx parity does not see gradients of "
            "torch.autograd.grad()."
        )
    sentence = _sentence(subject, ddp, verdict)
    click.echo(parity_text.steps_table(ddp.records, verdict, ours.records[0], subject.title))
    click.echo(f"\n{parity_text.costs_table(ddp.records, ours.records, subject.title)}")
    click.echo(f"\n{parity_text.compared(verdict, subject.num_ranks)}.\n{sentence}")
    return 0 if verdict.identical else 1


def _sentence(subject: Subject, ddp: Outcome, verdict: Verdict) -> str:
    if verdict.identical:
        return "Identical."
    first = verdict.differences[0]
    place = parity_text.where(first, subject.title)
    if not first.same_course:
        return f"Different: {place}."
    # A second run stores the first tensor that differs. It also shows whether DDP repeats its own
    # results.
    again = subject.run(replaces=False, difference=first)
    unstable = compare(ddp.events, again.events).differences
    if unstable and unstable[0].step <= first.step:
        return (
            f"Different: {place}. Two runs with DDP differ from each other, too: "
            f"{parity_text.where(unstable[0], 'DDP (second run)')}. "
            "Seed all random numbers of the script, and compare again."
        )
    if first.event.kind == "loss":
        return f"Different: {place}."
    ours = subject.run(replaces=True, difference=first)
    return f"Different: {place} {parity_text.how_far(first, again.captured, ours.captured)}."


def _ddp_options(settings: Sequence[str]) -> dict[str, Any]:
    """Parses ``NAME=VALUE``. Values are Python literals, or true, false and none in any case."""
    init = inspect.signature(DistributedDataParallel.__init__)
    known = set(init.parameters) - {"self", "module"}
    parsed = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or name not in known:
            raise click.BadParameter(
                f"{setting!r} is not NAME=VALUE with the name of an argument of DDP.",
                param_hint="--set",
            )
        words = {"true": True, "false": False, "none": None}
        try:
            parsed[name] = words[text.lower()] if text.lower() in words else ast.literal_eval(text)
            json.dumps(parsed[name])  # ranks get the value as JSON
        except (ValueError, SyntaxError, TypeError) as cause:
            raise click.BadParameter(
                f"{text!r} is not a number, a string, a list or a dict of Python.",
                param_hint="--set",
            ) from cause
    return parsed
