"""Recordings of real runs whose cause of waiting is known, for tests of the advice.

A seed chooses sizes, times and the rank at fault. Ranks sleep in place of computing, so that other
processes disturb them less. Ranks that share cores compute. A slow link needs root. On a device,
the device sleeps for most causes. A rank that begins late sleeps on the host.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from emulated_hosts import EmulatedHosts
from torch import nn

import ddpx
from ddpx import ReducerDDP
from ddpx.testing import RankPool
from ddpx.timeline import Timeline
from ddpx.timeline.analyze.diagnoses import diagnose

MIB = 1 << 20
WARM_UP, STEPS = 3, 12
LINK_MBIT = 200.0
_LIMIT_S = 300.0  # of one recording, on a machine that is busy with other things


@dataclass(frozen=True)
class Plan:
    """What a rank trains.

    Attributes:
        layers: Per layer, in order of forward: size in MiB, seconds of forward and of backward.
        options: Arguments of the wrapper.
        params_each: The number of parameters of a layer.
        late_s: Seconds of sleep before each forward.
        unused_mib: The size of parameters that forward does not use.
        unused_first: Whether they are registered before the layers, or after them.
        registered_last: The layer that is registered after all others.
        device: The type of the device.
    """

    layers: tuple[tuple[float, float, float], ...]
    options: Mapping[str, Any]
    params_each: int = 1
    late_s: float = 0.0
    unused_mib: float = 0.0
    unused_first: bool = False
    registered_last: int | None = None
    device: str = "cpu"


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.backward_s = backward_s
        _sleep(x, forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        _sleep(grads[0], ctx.backward_s)
        return grads[0], None, None


def _sleep(tensor: torch.Tensor, seconds: float) -> None:
    """Sleeps where the tensor is: on the host, or in the current stream of the device."""
    if tensor.device.type == "cpu":
        time.sleep(seconds)
    else:
        from device_ranks import keep_busy

        keep_busy(tensor.device.type, 1e3 * seconds)


class SleepingLayer(nn.Module):
    """The gradients arrive ``backward_s`` after backward has reached the layer."""

    def __init__(self, mib: float, forward_s: float, backward_s: float, num_params: int) -> None:
        super().__init__()
        self.weights = _params(mib, num_params)
        self.seconds = forward_s, backward_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * sum(weight.mean() for weight in self.weights), *self.seconds)


def _params(mib: float, number: int) -> nn.ParameterList:
    return nn.ParameterList([torch.ones(round(mib * MIB / 4 / number)) for _ in range(number)])


class Layers(nn.Module):
    def __init__(self, plan: Plan) -> None:
        super().__init__()
        layers = {
            f"layer{number}": SleepingLayer(*layer, num_params=plan.params_each)
            for number, layer in enumerate(plan.layers)
        }
        self._order = list(layers)
        if plan.registered_last is not None:
            name = f"layer{plan.registered_last}"
            layers[name] = layers.pop(name)
        if plan.unused_mib and plan.unused_first:
            self.unused = _params(plan.unused_mib, 4)
        self.layers = nn.ModuleDict(layers)
        if plan.unused_mib and not plan.unused_first:
            self.unused = _params(plan.unused_mib, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self._order:
            x = self.layers[name](x)
        return x


def record(plan: Plan) -> Timeline:
    # Over shared memory, nothing would wait long.
    model = ReducerDDP(Layers(plan).to(plan.device), transport="group", **plan.options)
    for _ in range(WARM_UP):
        _step(model, plan)
    with ddpx.record(model, max_steps=STEPS) as timeline:
        for _ in range(STEPS):
            _step(model, plan)
    return timeline


def _step(model: nn.Module, plan: Plan) -> None:
    time.sleep(plan.late_s)
    model(torch.ones(1, device=plan.device)).sum().backward()
    if plan.device != "cpu":
        torch.accelerator.synchronize()  # as a script that prints the loss


# ---- plans: one cause each -----------------------------------------------------------------------

MakePlan = Callable[[Random, int], Plan]  # the second argument is the rank


def _layers(
    random: Random, step_s: float, mib: float = 0.5, number: int | None = None
) -> list[tuple[float, float, float]]:
    """Layers of ``mib`` on average that compute ``step_s``. The first layer is small."""
    number = number or random.randint(6, 12)
    shares = [random.uniform(0.5, 1.5) for _ in range(number)]
    times = [share * step_s / sum(shares) for share in shares]
    sizes = [mib * random.uniform(0.5, 1.5) for _ in range(number)]
    sizes[0] = 0.03
    return [(size, s / 3, 2 * s / 3) for size, s in zip(sizes, times, strict=True)]


def healthy(random: Random, rank: int) -> Plan:
    return Plan(tuple(_layers(random, random.uniform(0.08, 0.12))), {"bucket_cap_mb": 1})


def late_start(random: Random, rank: int) -> Plan:
    layers = _layers(random, random.uniform(0.05, 0.1))
    victim, late_s = random.randrange(2), random.uniform(0.02, 0.06)
    return Plan(tuple(layers), {"bucket_cap_mb": 1}, late_s=late_s * (rank == victim))


def slow_compute(random: Random, rank: int) -> Plan:
    layers = _layers(random, random.uniform(0.05, 0.1))
    victim, factor = random.randrange(2), random.uniform(1.3, 2.0)
    if rank == victim:
        layers = [(mib, factor * f, factor * b) for mib, f, b in layers]
    return Plan(tuple(layers), {"bucket_cap_mb": 1})


def late_gradient(random: Random, rank: int) -> Plan:
    layers = _layers(random, random.uniform(0.05, 0.1))
    victim, number = random.randrange(2), random.randrange(len(layers))
    late_s = random.uniform(0.02, 0.06)
    if rank == victim:
        mib, forward_s, backward_s = layers[number]
        layers[number] = (mib, forward_s, backward_s + late_s)
    return Plan(tuple(layers), {"bucket_cap_mb": 1})


def slow_link(random: Random, rank: int) -> Plan:
    """For a link of LINK_MBIT, which moves a MiB in 42 ms."""
    layers = _layers(random, random.uniform(0.04, 0.06), random.uniform(0.4, 0.7))
    return Plan(tuple(layers), {"bucket_cap_mb": random.choice([0.5, 1])})


def large_bucket(random: Random, rank: int) -> Plan:
    """All layers in one bucket."""
    layers = _layers(random, random.uniform(0.08, 0.12), random.uniform(4, 5))
    return Plan(tuple(layers), {"bucket_cap_mb": 100})


def small_buckets(random: Random, rank: int) -> Plan:
    """A bucket for each of many small parameters."""
    layers = _layers(random, random.uniform(0.02, 0.04), random.uniform(0.1, 0.5), number=8)
    return Plan(tuple(layers), {"bucket_cap_mb": 0.001}, params_each=random.randint(25, 40))


def late_first_bucket(random: Random, rank: int) -> Plan:
    """Either the first bucket is most of the model, or it has a layer whose gradient is last."""
    if random.random() < 0.5:
        layers = _layers(random, random.uniform(0.08, 0.12), 5, number=12)
        first_mib = sum(mib for mib, _, _ in layers[2:])  # all but the last two gradients
        return Plan(tuple(layers), {"bucket_cap_mb_list": [first_mib - 0.1, 1]})
    layers = _layers(random, random.uniform(0.08, 0.12), 4, number=random.randint(8, 12))
    options = {"bucket_cap_mb": 4, "find_unused_parameters": True}
    return Plan(tuple(layers), options, registered_last=0)


def unused_parameters(random: Random, rank: int) -> Plan:
    layers = _layers(random, random.uniform(0.06, 0.1))
    options = {"bucket_cap_mb": 2, "find_unused_parameters": True}
    unused_mib, unused_first = random.uniform(16, 32), random.random() < 0.5
    return Plan(tuple(layers), options, unused_mib=unused_mib, unused_first=unused_first)


PLANS: dict[str, MakePlan] = {
    "none": healthy,
    "late start": late_start,
    "slow compute": slow_compute,
    "late gradient": late_gradient,
    "large bucket": large_bucket,
    "late first bucket": late_first_bucket,
    "small buckets": small_buckets,
    "unused parameters": unused_parameters,
}


@dataclass(frozen=True)
class Device:
    """Where ranks train.

    Attributes:
        type: The type of the device.
        scale: A factor for the times in plans, for a device whose all-reduces take long.
        params_each: The number of parameters of a layer, if a plan has more.
    """

    type: str = "cpu"
    scale: float = 1.0
    params_each: int = 40

    def adapt(self, plan: Plan) -> Plan:
        return replace(
            plan,
            device=self.type,
            layers=tuple((mib, f * self.scale, b * self.scale) for mib, f, b in plan.layers),
            late_s=plan.late_s * self.scale,
            params_each=min(plan.params_each, self.params_each),
        )


CPU = Device()


def record_plan(cause: str, seed: int, device: Device = CPU) -> Timeline | None:
    """Runs on each rank. Rank 0 returns the timeline."""
    rank = dist.get_rank()
    timeline = record(device.adapt(PLANS[cause](Random(f"{cause} {seed}"), rank)))
    return timeline if rank == 0 else None


def record_slow_link(seed: int) -> Timeline | None:
    """Runs on each rank. Rank 0 returns the timeline."""
    rank = dist.get_rank()
    timeline = record(slow_link(Random(seed), rank))
    return timeline if rank == 0 else None


# ---- ranks that share cores ----------------------------------------------------------------------


def record_on_shared_cores(seed: int) -> Timeline | None:
    """Runs on each of more ranks than two, which compute on two cores."""
    random = Random(seed)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:2])
    try:
        size = random.randint(200, 350)
        layers = [nn.Linear(size, size) for _ in range(random.randint(6, 12))]
        model = ReducerDDP(nn.Sequential(*layers), bucket_cap_mb=1)
        x = torch.randn(random.randint(300, 600), size)
        for _ in range(WARM_UP):
            model(x).sum().backward()
        with ddpx.record(model, max_steps=STEPS) as timeline:
            for _ in range(STEPS):
                model(x).sum().backward()
    finally:
        os.sched_setaffinity(0, allowed)
    return timeline if dist.get_rank() == 0 else None


# ---- from outside the ranks ----------------------------------------------------------------------

HEALTHY = "none"
# The names in docs/advice.md.
CAUSES = (*PLANS, "slow link", "shared cores")


def first_cause(timeline: Timeline) -> str:
    """The cause that the first sentence of the advice names."""
    findings = diagnose(timeline.recording)
    return findings[0].cause if findings else HEALTHY


def recordings(cause: str, seeds: range, ranks: Callable[[int], RankPool]) -> Iterator[Timeline]:
    """Makes a recording for each seed.

    Args:
        cause: One of CAUSES.
        seeds: The seeds.
        ranks: Returns a pool of so many ranks.

    Raises:
        CannotEmulate: This machine permits no namespaces, which a slow link needs.
    """
    if cause == "slow link":
        yield from record_over_a_slow_link(seeds)
    for seed in seeds if cause != "slow link" else ():
        if cause == "shared cores":
            yield ranks(4).run(record_on_shared_cores, seed, timeout=_LIMIT_S)[0]
        else:
            yield ranks(2).run(record_plan, cause, seed, timeout=_LIMIT_S)[0]


def record_over_a_slow_link(seeds: range) -> list[Timeline]:
    with tempfile.TemporaryDirectory() as folder, EmulatedHosts(["node-a", "node-b"]) as network:
        for host in network.hosts:
            host.limit_rate(LINK_MBIT)
        root = Path(__file__).parents[2]
        command = [sys.executable, __file__, folder, str(seeds.start), str(seeds.stop)]
        paths = [root, root / "tests", root / "tests" / "timeline"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "MASTER_ADDR": "node-a",
            "MASTER_PORT": "29500",
            "WORLD_SIZE": "2",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
        }
        for done in network.run(command, limit_s=60 + 20 * len(seeds), env=environment, cwd=root):
            assert done.returncode == 0, done.stdout
        return [Timeline.load(Path(folder) / f"{seed}.json") for seed in seeds]


def main() -> None:
    folder, start, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.environ["RANK"] = "0" if os.uname().nodename == "node-a" else "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for seed in range(start, stop):
        timeline = record_slow_link(seed)
        if timeline is not None:
            timeline.export_chrome_trace(folder / f"{seed}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
