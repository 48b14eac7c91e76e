"""The command line."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

# A run of a few seconds that still learns something, for tests.
SMOKE_DEFAULTS = {
    "steps": 30,
    "batch_size": 8,
    "context": 32,
    "layers": 2,
    "width": 32,
    "eval_every": 15,
    "eval_windows": 32,
    "sample_chars": 60,
    "bucket_cap_mb": 0.02,
}


class Options(argparse.Namespace):
    """The parsed options. See `build_parser` for their meanings."""

    steps: int
    batch_size: int
    context: int
    layers: int
    heads: int
    width: int
    learning_rate: float
    bucket_cap_mb: float
    eval_every: int
    eval_windows: int
    sample_chars: int
    seed: int
    threads: int
    device: str
    out: Path
    smoke: bool


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def positive_float(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"must be a finite number above 0, not {text}")
    return value


def seed_int(text: str) -> int:
    """A whole number that can seed a random generator on every rank."""
    value = int(text)
    if not 0 <= value < 2**31:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 2**31 - 1, not {value}")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Describe every option, its unit and its default."""
    parser = argparse.ArgumentParser(
        # One line, since every rank prints it when an option is wrong.
        usage="torchrun --nproc-per-node=RANKS examples/char_gpt/train.py [options]",
        description="Train a small character-level GPT on Python's standard library with ddpx.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    training = parser.add_argument_group("training")
    add = training.add_argument
    add("--steps", type=positive_int, default=450, help="optimizer steps")
    add("--batch-size", type=positive_int, default=16, help="windows per step and rank")
    add("--learning-rate", type=positive_float, default=3e-3, help="peak, after the warm-up")
    add("--seed", type=seed_int, default=0, help="fixes weights, batches and the sample")

    model = parser.add_argument_group("model")
    add = model.add_argument
    add("--context", type=positive_int, default=64, help="characters per window")
    add("--layers", type=positive_int, default=3, help="transformer blocks")
    add("--heads", type=positive_int, default=4, help="attention heads per block")
    add("--width", type=positive_int, default=128, help="channels, a multiple of --heads")

    ranks = parser.add_argument_group("ranks")
    add = ranks.add_argument
    add(
        "--bucket-cap-mb",
        type=positive_float,
        default=0.5,
        help="gradient bucket size in MiB; smaller buckets start their all-reduce earlier",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: cuda where each rank on the machine has its own GPU, otherwise cpu",
    )
    add("--threads", type=positive_int, default=1, help="CPU threads per rank")

    reports = parser.add_argument_group("reports")
    add = reports.add_argument
    add("--eval-every", type=positive_int, default=50, help="steps between evaluations")
    add("--eval-windows", type=positive_int, default=256, help="held-out windows per evaluation")
    add("--sample-chars", type=positive_int, default=300, help="characters to generate")
    add(
        "--out",
        type=Path,
        default=Path("runs/char_gpt"),
        help="directory for loss.png and metrics.json",
    )
    add(
        "--smoke",
        action="store_true",
        help="a tiny model for a few seconds, to test the script; other options still count",
    )
    return parser


def parse_options(argv: Sequence[str] | None = None) -> Options:
    """Parse and check the command line. Exits with a message if it is invalid."""
    parser = build_parser()
    if parser.parse_args(argv).smoke:
        parser.set_defaults(**SMOKE_DEFAULTS)  # as defaults, so that given options take precedence
    options = parser.parse_args(argv, namespace=Options())
    if options.width % options.heads:
        parser.error(f"--width {options.width} is not a multiple of --heads {options.heads}")
    return options
