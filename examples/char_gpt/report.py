"""The output files of a run: metrics.json with its numbers, and loss.png with its curves."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Metrics:
    """The record of one run. Losses are in nats per character, averaged over the ranks."""

    world_size: int
    backend: str
    device: str
    parameters: int
    bucket_cap_mb: float
    train_loss: list[float]  # one per step
    held_out_steps: list[int]  # number of steps before each evaluation
    held_out_loss: list[float]  # one per evaluation
    seconds: float  # time of the training loop with its evaluations
    tokens_per_second: float  # of all ranks together, over `seconds`
    weights_sha256: list[str]  # one per rank


def write_metrics(metrics: Metrics, path: Path) -> None:
    """Write all fields as one JSON object."""
    path.write_text(json.dumps(asdict(metrics), indent=1) + "\n", encoding="utf-8")


def smoothed(values: list[float], decay: float = 0.8) -> list[float]:
    """Exponential moving average, with bias correction for its start at zero."""
    averages, total, weight = [], 0.0, 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        averages.append(total / weight)
    return averages


def plot_losses(metrics: Metrics, path: Path) -> None:
    """Draw the training and held-out curves as a PNG."""
    # Imported here, since only rank 0 draws. A bare Figure renders with Agg and needs no display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    steps = range(1, len(metrics.train_loss) + 1)
    axes.plot(
        steps, metrics.train_loss, color="tab:blue", alpha=0.3, linewidth=0.8, label="training"
    )
    axes.plot(steps, smoothed(metrics.train_loss), color="tab:blue", label="training, smoothed")
    axes.plot(
        metrics.held_out_steps, metrics.held_out_loss, "o-", color="tab:orange",
        label="held-out files",
    )  # fmt: skip
    last = metrics.held_out_loss[-1]
    axes.annotate(
        f"{last:.2f}", (metrics.held_out_steps[-1], last), xytext=(0, 10),
        textcoords="offset points", ha="center", color="tab:orange",
    )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy loss (nats per character)")
    ranks = "1 rank" if metrics.world_size == 1 else f"{metrics.world_size} ranks"
    axes.set_title(f"Character GPT, {metrics.parameters / 1e6:.2f} M parameters, {ranks}")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
