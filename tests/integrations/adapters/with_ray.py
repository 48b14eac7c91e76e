"""Ray Train: compares ddpx's prepare_model with the library's own, in the loop of each worker."""

import os
import sys
from pathlib import Path

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from twice import compare, inputs_of, make_model

from ddpx.integrations.ray import TorchConfig, prepare_model


def train(model: nn.Module) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs in inputs_of(ray.train.get_context().get_world_rank()).split(5):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return model


def loop(config: dict[str, str]) -> None:
    ours = train(prepare_model(make_model(), timeline=config["folder"], timeline_steps=2))
    theirs = train(ray.train.torch.prepare_model(make_model()))
    compare(ours, theirs)


if __name__ == "__main__":
    folder = sys.argv[1]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    TorchTrainer(
        loop,
        train_loop_config={"folder": folder},
        torch_config=TorchConfig(backend="shm"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder),
    ).fit()
