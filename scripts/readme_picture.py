"""Draws docs/images/readme.png: a step of the demo, and the report of a lost rank.

    make picture

The step is recorded on 2 ranks, in a gloo group whose buckets use shared memory. For the report,
one of 3 ranks is killed (benchmarks/recovery.py). Both are real runs on this machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.image
import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "readme.png"
RECORDING = ROOT / "runs" / "readme"
SCRIPT = "examples/char_gpt/train.py"
WIDTH_IN, REPORT_IN, DPI = 11.0, 2.25, 110
COLUMNS = 122  # width of the report's text
DARK, LIGHT, RED, GREEN = "#1e2430", "#e6e6e6", "#ff9d96", "#8fd6a8"


def record_step() -> Path:
    """A plot of the median step of the demo."""
    command = [sys.executable, "-m", "ddpx", "timeline", "--steps", "20", "--out", str(RECORDING)]
    command += [SCRIPT, "--", "--steps", "40"]
    command += ["--out", str(RECORDING / "demo")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    return RECORDING / "timeline.png"


def lose_a_rank() -> tuple[str, float]:
    """A survivor's error, and the seconds from the kill to the end of the next step."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from recovery import launch

    launched = launch("gloo")
    # The text of the backend is cut. docs/reliability.md has such texts in full.
    return launched["error"].split(" The backend said:")[0], launched["next_step_s"]


def draw(step: Path, error: str, next_step_s: float) -> None:
    plot: Any = matplotlib.image.imread(step)
    plot_in = WIDTH_IN * plot.shape[0] / plot.shape[1]
    total = plot_in + REPORT_IN
    figure = plt.figure(figsize=(WIDTH_IN, total))
    figure.add_axes((0, REPORT_IN / total, 1, plot_in / total)).imshow(plot, aspect="auto")
    figure.axes[0].axis("off")
    panel = figure.add_axes((0.01, 0.02, 0.98, REPORT_IN / total - 0.03))
    panel.axis("off")
    panel.add_patch(FancyBboxPatch((0, 0), 1, 1, boxstyle="square,pad=0", facecolor=DARK))
    lines = [
        ("$ kill -9 …     # one of 3 ranks, while the others wait for its gradients", LIGHT),
        *((line, RED) for line in textwrap.wrap(error, COLUMNS)),
        ("", LIGHT),
        (">>> ddpx.shrink(model, optimizer, step=step)     # on both survivors", LIGHT),
        (f"next step: {next_step_s:.2f} s after the kill; the survivors' weights are equal", GREEN),
    ]
    for number, (line, color) in enumerate(lines):
        height = 0.93 - number * 0.87 / len(lines)
        panel.text(0.012, height, line, color=color, family="monospace", size=9, va="top")
    panel.set(xlim=(0, 1), ylim=(0, 1))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=DPI, metadata={"Software": None})


def main() -> None:
    draw(record_step(), *lose_a_rank())
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
