"""The cost of recording a timeline: nanoseconds an event, times the events of a step."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import contenders
import torch
from goals import PERCENT, Goal
from interleave import Effort, Seconds, time_rounds
from models import joined
from plan import Plan
from pooling import difference, level
from tables import Results, short, table
from torch import nn

import ddpx
from ddpx.timeline import Timeline
from ddpx.timeline.export import trace_file

NAME = "recording"
TITLE = "Cost of a recording"

_OFF, _AGAIN, _ON = "not recorded", "not recorded, again", "recorded"
_MOST = 1.0  # percent of the demo's step
_DEMO = Path(__file__).parent.parent / "scripts" / "demo.py"


def _num_events(model: nn.Module, x: torch.Tensor) -> int:
    """The number of events of one step."""
    assert isinstance(model, ddpx.ReducerDDP)
    core = ddpx._C.Recording(1 << 20, torch.device("cpu"))
    model.reducer.add_recording(core)
    contenders.step(model, x)
    model.reducer.remove_recording(core)
    return core.num_added


def time_recording(num_params: int, effort: Effort) -> tuple[Seconds, int]:
    """Runs on one rank. Returns CPU seconds of the thread that trains, and the events of a step."""
    wraps = {name: contenders.ours_over_gloo() for name in (_OFF, _AGAIN, _ON)}
    models, x = contenders.make_models(partial(joined, num_params), wraps)
    for model in models.values():
        contenders.step(model, x)
    num_events = _num_events(models[_OFF], x)
    steps = {name: partial(contenders.step, model, x) for name, model in models.items()}
    with ddpx.record(models[_ON]):
        times = time_rounds(steps, effort, clock=time.thread_time)
    return times, num_events


def _demo(steps: int) -> Results:
    """Events and milliseconds of a step of the main example, from a recording."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DDPX_TIMELINE": folder}
        command = [sys.executable, str(_DEMO), f"--steps={steps}", f"--out={folder}/run"]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=600)
        ranks = trace_file.read(folder)
        summary = Timeline.load(folder).summary()
    last = summary.steps[-1]
    events = [sum(step == last for _, step, _, _ in data.events.tolist()) for data in ranks]
    return {"events": max(events), "step_ms": max(rank.step_ms for rank in summary.ranks)}


def measure(plan: Plan) -> Results:
    num_params = 100 if plan.tiny else 10_000
    launches = [launch[0] for launch in plan.launch(1, time_recording, num_params, plan.effort)]
    times = [seconds for seconds, _ in launches]
    num_events = launches[0][1]
    per_event = 1e9 / num_events
    return {
        "num_params": num_params,
        "num_events": num_events,
        "ms": {name: level(times, name, 1e3) for name in times[0]},
        "ns_per_event": difference(times, _ON, _OFF, per_event),
        "noise_ns_per_event": difference(times, _AGAIN, _OFF, per_event),
        "demo": _demo(20 if plan.tiny else 100),
    }


def _share(results: Results) -> float:
    """The cost of a recording, in percent of the demo's step."""
    demo = results["demo"]
    return 100 * demo["events"] * results["ns_per_event"]["median"] / (1e6 * demo["step_ms"])


def goals(results: Results) -> list[Goal]:
    return [Goal("cost of a recording, of the demo's step", _share(results), _MOST, PERCENT)]


def section(results: Results) -> str:
    demo = results["demo"]
    rows = [[name, short(found["median"])] for name, found in results["ms"].items()]
    cost, noise = (results[key]["median"] for key in ("ns_per_event", "noise_ns_per_event"))
    return "\n\n".join(
        [
            f"CPU time of the thread that trains, one rank, {results['num_params']} tensors of 16 "
            f"elements, {results['num_events']} events a step.",
            table(["step", "ms"], rows),
            f"An event takes {cost:.0f} ns (two steps that are not recorded differ by {noise:.0f} "
            f"ns an event). A step of the demo has {demo['events']} events a rank, and takes "
            f"{demo['step_ms']:.1f} ms. Recording takes {_share(results):.3f} % of the step.",
        ]
    )
