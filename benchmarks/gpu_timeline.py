"""Timelines on a GPU: against torch's profiler, their cost, and whether advice is right.

    python benchmarks/gpu_timeline.py --json figures.json              # a GPU that 2 ranks share
    python benchmarks/gpu_timeline.py --device cpu --tiny --json f.json  # a smoke run, over gloo

Ranks communicate by NCCL. An all-reduce takes 13 ms and more, since ranks take turns on the GPU.
The script needs torch, ddpx and pytest, and matplotlib for pictures. It writes them, and a page and
a trace of each diagnosed run, beside the JSON file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_kernels import ClockReadings, RecordedStep, compare, read_events
from gpu_models import gpt, models
from gpu_profile import profile_events
from interleave import Effort, Seconds, slowest_rank, time_rounds
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.assembly import origin_ns
from ddpx.timeline.analyze.figures import step_figures
from ddpx.timeline.analyze.turns import in_turn

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / "tests" / part) for part in ("", "devices", "timeline")]

from planted import (  # type: ignore[import-not-found]  # noqa: E402
    Device,
    first_cause,
    record_plan,
)

WHAT = ("profiler", "advice", "cost")
CAUSES = ("late start", "slow compute", "small buckets")
OFF, AGAIN, ON = "not recorded", "not recorded, again", "recorded"
# Models of two ranks that share a GPU: batch, length, width, heads, depth and bucket_cap_mb.
# Profiled buckets are large, because their kernels must take much longer than a rank's turn on the
# GPU.
PROFILED, SHARED = "GPT, 105 M", "GPT, 28 M"
_SHAPES = {PROFILED: (16, 512, 1024, 16, 8, 64), SHARED: (32, 512, 512, 8, 8, 16)}
_WARM_UP = 3
_START_S = 20.0  # for the imports of torch, and the first connections
_RECORDING_S = 30.0  # for a recording of a planted cause
_LEFT_S = 60.0  # for the end of a run
Figures = dict[str, Any]


def _model(name: str, device: str, tiny: bool) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
    """A model, its input, and the options of its wrapper."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"gradient_as_bucket_view": True, "transport": "group"}
    if name in _SHAPES:
        batch, length, width, heads, depth, cap_mb = _SHAPES[name]
        build = gpt(batch, length, 4096, width, heads, depth)
        module, x = models(True)["GPT-like"]() if tiny else build()
        options["bucket_cap_mb"] = 0.02 if tiny else cap_mb
    else:
        module, x = models(tiny)[name]()
    return module.to(device), x.to(device), options


def _step(model: nn.Module, x: torch.Tensor, device: str) -> None:
    model.zero_grad()
    model(x).float().square().mean().backward()
    if device != "cpu":
        torch.accelerator.synchronize()


# ---- against the profiler ------------------------------------------------------------------------


def record_under_profiler(device: str, tiny: bool, num_steps: int) -> tuple[Figures, Timeline]:
    """Runs on each rank: records steps, and profiles the same steps."""
    module, x, options = _model(PROFILED, device, tiny)
    model = ReducerDDP(module, **options)
    step = partial(_step, model, x, device)
    for _ in range(_WARM_UP):
        step()
    profile_events(step, device)  # the first start of the profiler takes long
    readings = ClockReadings()

    def steps() -> None:
        _meet(device)
        readings.read()
        for _ in range(num_steps):
            step()
        readings.read()

    with ddpx.record(model, max_steps=num_steps) as timeline:
        events = profile_events(steps, device)
    figures = compare(
        list(_recorded(timeline)), read_events(events, readings), on_device=device != "cpu"
    )
    figures["device_error_us"] = timeline.recording.clocks[dist.get_rank()].error_ns / 1e3
    return figures, timeline


def _meet(device: str) -> None:
    """Waits for all ranks, without an all-reduce. NCCL's barrier is an all-reduce."""
    own = torch.zeros(1, device=device)
    dist.all_gather([torch.zeros_like(own) for _ in range(dist.get_world_size())], own)
    if device != "cpu":
        torch.accelerator.synchronize()


def _recorded(timeline: Timeline) -> Iterator[RecordedStep]:
    """The steps of this rank on the clock of its host, which all ranks here share."""
    origin = origin_ns(timeline._ranks)
    for step in timeline.steps:
        rank_step = step.ranks[dist.get_rank()]
        reduced = in_turn(timeline.recording, step).ranks[dist.get_rank()].buckets
        sent = [
            (times.launched + origin, times.completed + origin, bucket.num_bytes)
            for times, bucket in zip(reduced, step.layout, strict=True)
            if times is not None
        ]
        sent.sort()
        yield RecordedStep(
            step.number,
            [(begin, end) for begin, end, _ in sent],
            [num_bytes for _, _, num_bytes in sent],
            step_figures(rank_step).exposed,
        )


def run_profiler(arguments: argparse.Namespace, left_s: float) -> Figures:
    with RankPool(2, _backend(arguments)) as pool:
        num_steps = 2 if arguments.tiny else 10
        per_rank = pool.run(
            record_under_profiler, arguments.device, arguments.tiny, num_steps, timeout=left_s
        )
    _save(per_rank[0][1], arguments.json.parent / "profiled")
    return {"model": PROFILED, "steps": num_steps, "ranks": [figures for figures, _ in per_rank]}


# ---- advice --------------------------------------------------------------------------------------


def run_advice(arguments: argparse.Namespace, left_s: float) -> Figures:
    """Records runs with a known cause of waiting. The first sentence must name the cause."""
    deadline = time.monotonic() + left_s
    device = Device("cuda", scale=4.0, params_each=4) if arguments.device == "cuda" else Device()
    found: Figures = {cause: [] for cause in CAUSES}
    with RankPool(2, _backend(arguments)) as pool:
        for seed in range(1 if arguments.tiny else arguments.seeds):
            for cause in CAUSES:
                left_s = deadline - time.monotonic()
                if left_s < _RECORDING_S:
                    found["error"] = f"no time was left for all of {arguments.seeds} seeds"
                    return found
                timeline = pool.run(record_plan, cause, seed, device, timeout=left_s)[0]
                first, sentences = first_cause(timeline), timeline.advice()
                print(f"{cause}, seed {seed}: {first}", *sentences, sep="\n  ", flush=True)
                found[cause].append({"seed": seed, "first": first, "sentences": sentences})
                if seed == 0 or first != cause:
                    name = f"{cause.replace(' ', '_')}_{seed}"
                    _save(timeline, arguments.json.parent / name)
    return found


def _save(timeline: Timeline, path: Path) -> None:
    """Writes the summary, the trace, the page, and the picture if matplotlib is installed."""
    text = "\n".join([str(timeline.summary()), *timeline.advice(), ""])
    path.with_suffix(".txt").write_text(text)
    timeline.export_chrome_trace(path.with_suffix(".json"))
    timeline.save_html(path.with_suffix(".html"))
    try:
        timeline.save_plot(path.with_suffix(".png"))
    except ImportError as error:
        print(error, flush=True)


# ---- the cost of a recording ---------------------------------------------------------------------


def time_recording(name: str, device: str, tiny: bool, effort: Effort) -> tuple[Seconds, int]:
    """Runs on each rank.

    Returns:
        The seconds of steps by contender and round, and the number of events of a step.
    """
    module, x, options = _model(name, device, tiny)
    os.environ["DDPX_FORCE_COMM"] = "1"  # a single rank does all the work of several
    try:
        wrapped = {key: ReducerDDP(copy.deepcopy(module), **options) for key in (OFF, AGAIN, ON)}
    finally:
        del os.environ["DDPX_FORCE_COMM"]
    steps = {key: partial(_step, model, x, device) for key, model in wrapped.items()}
    for step in steps.values():
        step()
    with ddpx.record(wrapped[ON]) as timeline:
        times = time_rounds(steps, effort)
    last = timeline.steps[-1].number
    events = timeline._ranks[dist.get_rank()].events
    return times, sum(number == last for _, number, _, _ in events.tolist())


def run_cost(arguments: argparse.Namespace, left_s: float) -> Figures:
    runs = [(1, name) for name in reversed(models(arguments.tiny))] + [(2, SHARED)]
    deadline = time.monotonic() + left_s
    found: Figures = {}
    for place, (ranks, name) in enumerate(runs):
        rest_s = (deadline - time.monotonic()) / (len(runs) - place)
        if rest_s < _START_S + 5 and not arguments.tiny:
            found["error"] = "no time was left for all models"
            break
        seconds = 0.1 if arguments.tiny else min(0.6 * (rest_s - _START_S), 25.0)
        effort = Effort(seconds, min_rounds=5)
        with RankPool(ranks, _backend(arguments)) as pool:
            per_rank = pool.run(
                *(time_recording, name, arguments.device, arguments.tiny, effort),
                timeout=rest_s + _LEFT_S,
            )
        times = slowest_rank([seconds for seconds, _ in per_rank])
        figures = {"ranks": ranks, "events": per_rank[0][1], **_ratios(times)}
        key = f"{name}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
        print(f"{key}: {figures}", flush=True)
        found[key] = figures
    return found


def _ratios(times: Mapping[str, list[float]]) -> Figures:
    """Medians, and medians of each round's ratio to the steps that are not recorded."""

    def ratio(key: str) -> float:
        pairs = zip(times[key], times[OFF], strict=True)
        return round(statistics.median(own / off for own, off in pairs), 5)

    return {
        "rounds": len(times[OFF]),
        "ms": {key: round(1e3 * statistics.median(each), 4) for key, each in times.items()},
        "recorded_to_not": ratio(ON),
        "again_to_not": ratio(AGAIN),
    }


# ---- the command ---------------------------------------------------------------------------------


def _backend(arguments: argparse.Namespace) -> str:
    return "nccl" if arguments.device == "cuda" else "gloo"


PARTS: dict[str, Callable[[argparse.Namespace, float], Figures]] = {
    "profiler": run_profiler,
    "advice": run_advice,
    "cost": run_cost,
}
# Shares of the remaining time.
SHARES = {"profiler": 0.5, "advice": 0.6, "cost": 0.9}


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke run")
    parser.add_argument("--what", nargs="+", choices=WHAT, default=list(WHAT))
    parser.add_argument("--seeds", type=int, default=2, help="recordings of each cause")
    parser.add_argument("--limit-s", type=float, default=300.0, help="approximate time limit")
    parser.add_argument("--json", type=Path, required=True, help="rewritten after each part")
    arguments = parser.parse_args()
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + arguments.limit_s
    figures: Figures = {"backend": _backend(arguments), "device": arguments.device}
    failed = False
    for part in arguments.what:
        start = time.monotonic()
        try:
            figures[part] = PARTS[part](arguments, SHARES[part] * (deadline - start))
        except Exception as error:  # the other parts still run
            failed = True
            traceback.print_exc()
            text = str(error)  # its middle is the stack of a rank
            figures[part] = {"error": f"{type(error).__name__}: {text[:1500]}\n...\n{text[-1500:]}"}
        figures[part]["seconds"] = round(time.monotonic() - start, 1)
        print(f"{part}: {figures[part]['seconds']} s", flush=True)
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
