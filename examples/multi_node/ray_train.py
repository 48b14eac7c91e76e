"""Ray Train on several nodes: ReducerDDP in DDP's place, over gloo, shm or NCCL.

On one machine, for a try:

    python examples/multi_node/ray_train.py --storage "$PWD/runs/ray"

On a cluster, `ray start --head` runs on one node and `ray start --address=HEAD:6379` on the others.
Then, on the head node:

    python examples/multi_node/ray_train.py --address auto --workers 4 --storage /shared/ray
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

from ddpx.integrations.ray import TorchConfig, prepare_model

NUM_SAMPLES = 960  # each step's batch, over all workers
STEPS_PER_CHECKPOINT = 10


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", help="auto: the cluster of this node; default: a new one here")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--backend", default="shm", choices=["gloo", "shm", "nccl"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--storage", required=True, help="folder on a file system of all nodes")
    parser.add_argument("--interface", help="network interface between nodes, for gloo and NCCL")
    return parser.parse_args()


def make_batch(step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """This worker's share of a step's batch."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(NUM_SAMPLES, 16, generator=generator)[dist.get_rank() :: dist.get_world_size()]
    return x.to(device), x.square().mean(dim=1, keepdim=True).to(device)


def train_loop(config: dict[str, Any]) -> None:
    """What each worker runs. Ray has created the process group."""
    device = get_device()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    first_step = 0
    checkpoint = ray.train.get_checkpoint()  # after a failure, or a run of the same name
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt", map_location=device, weights_only=True)
        first_step = state["step"]
        module.load_state_dict(state["module"])
        optimizer.load_state_dict(state["optimizer"])
    model = prepare_model(module)
    for step in range(first_step, config["steps"]):
        x, y = make_batch(step, device)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        steps_done = step + 1
        if steps_done % STEPS_PER_CHECKPOINT == 0 or steps_done == config["steps"]:
            report(steps_done, loss.item(), module, optimizer)


def report(
    steps_done: int, loss: float, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Reports metrics from all workers, and the checkpoint of rank 0."""
    weights = torch.cat([param.detach().flatten() for param in module.parameters()])
    weights_of_rank_0 = weights.clone()
    dist.broadcast(weights_of_rank_0, 0)
    if not torch.equal(weights, weights_of_rank_0):
        raise RuntimeError(f"worker {dist.get_rank()} has other weights than worker 0")
    metrics = {"steps": steps_done, "loss": loss, "world_size": dist.get_world_size()}
    if dist.get_rank() > 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        state = {
            "step": steps_done,
            "module": module.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save(state, Path(folder) / "state.pt")
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main() -> None:
    arguments = parse_arguments()
    environment = {"OMP_NUM_THREADS": "1"}
    if arguments.interface:
        environment["GLOO_SOCKET_IFNAME"] = arguments.interface
        environment["NCCL_SOCKET_IFNAME"] = arguments.interface
    cluster = (
        {"address": arguments.address} if arguments.address else {"num_cpus": arguments.workers}
    )
    ray.init(runtime_env={"env_vars": environment}, **cluster)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"steps": arguments.steps},
        torch_config=TorchConfig(backend=arguments.backend),
        scaling_config=ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.backend == "nccl"
        ),
        run_config=RunConfig(
            storage_path=arguments.storage, failure_config=FailureConfig(max_failures=3)
        ),
    ).fit()
    metrics = result.metrics
    print(
        f"OK: {metrics['steps']} steps, loss {metrics['loss']:.4f}, the same weights on "
        f"{metrics['world_size']} workers over {arguments.backend}"
    )


if __name__ == "__main__":
    main()
