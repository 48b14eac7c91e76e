"""The measured parts of ``make gpu``. A part has the GPU for itself."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_command import run

TEXT_CHARS = 4000  # size of the output that is kept of a failed part


@dataclass(frozen=True)
class Part:
    """A script that measures on the device ``--device``, and writes figures into ``--json``.

    Args:
        about: What the part measures, for the docs.
        script: The script, relative to the checkout. It adapts its effort to ``--limit-s``.
        options: Further options.
        limit_s: Time limit of the script in s.
        num_gpus: The number of GPUs that the part needs.
    """

    about: str
    script: str
    options: tuple[str, ...]
    limit_s: float
    num_gpus: int = 1


_STEP = ("--what", "time", "counts", "overlap")
# In order of running.
PARTS = {
    "step": Part(
        "a step of one NCCL rank beside DDP's: time, kernels, bytes copied, overlap",
        "benchmarks/gpu_step.py",
        ("--ranks", "1", *_STEP, "--models", "ResNet", "GPT"),
        90.0,
    ),
    "small_step": Part(
        "the same with small gradients, and limits of DDPX_SMALL_GRAD_BYTES",
        "benchmarks/gpu_step.py",
        ("--ranks", "1", *_STEP, "--small-grad-limits", "--models", "small layers"),
        90.0,
    ),
    "graph": Part(
        "steps captured into CUDA graphs",
        "benchmarks/gpu_step.py",
        ("--ranks", "1", "--what", "graph"),
        60.0,
    ),
    "timeline": Part(
        "timelines of 2 NCCL ranks: against torch's profiler, their cost, and advice",
        "benchmarks/gpu_timeline.py",
        (),
        150.0,
    ),
    "failures": Part(
        "3 NCCL ranks: faults of one rank, and what the others see, beside DDP",
        "scripts/gpu_failures.py",
        (),
        100.0,
    ),
    "shared_step": Part(
        "a step of 2 gloo ranks that share the GPU",
        "benchmarks/gpu_step.py",
        ("--ranks", "2", *_STEP),
        60.0,
    ),
}


def needs(part: Part) -> str:
    """The reason why a machine with too few GPUs skips the part."""
    return f"needs {'two' if part.num_gpus == 2 else part.num_gpus} GPUs"


def outcome(code: int | None, output: str) -> dict[str, Any]:
    """The outcome of a command, with the end of its output if it failed."""
    if code == 0:
        return {"outcome": "passed"}
    reason = "the time limit ended the command\n" if code is None else ""
    return {"outcome": "failed", "text": reason + output[-TEXT_CHARS:]}


def measure(part: Part, device: str, tiny: bool, limit_s: float) -> dict[str, Any]:
    """Runs a part within a time limit in s. Returns its outcome, text and figures."""
    with tempfile.TemporaryDirectory(prefix="ddpx-gpu-") as folder:
        figures = Path(folder) / "figures.json"
        command = [sys.executable, part.script, "--device", device, *part.options]
        command += ["--limit-s", f"{limit_s - 5:.0f}", "--json", str(figures)]
        row = outcome(*run(command + (["--tiny"] if tiny else []), limit_s))
        if figures.exists():
            row["results"] = json.loads(figures.read_text())
    return row
