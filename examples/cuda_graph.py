"""Capture a whole training step into a CUDA graph, replay it, and compare with eager steps.

A replay launches all kernels of the step at once: forward, backward with its all-reduces, and the
optimizer. The host then runs no Python code of the step. docs/cuda_graphs.md has the rules.

    python examples/cuda_graph.py
    torchrun --standalone --nproc-per-node=2 examples/cuda_graph.py

Several ranks may share one GPU here. They then take turns on the GPU, so their times mean nothing.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from _common import expect, positive_int, process_group, ranks_agree
from torch import nn

from ddpx import ReducerDDP

WARM_UP_STEPS = 11  # ddpx needs 3, and torch's notes on DDP recommend 11
BATCH_SIZE = 64


class Result(NamedTuple):
    """What a training run returns."""

    model: ReducerDDP
    loss: float
    step_ms: float


def train(device: torch.device, steps: int, use_graph: bool) -> Result:
    """Train for some steps after the warm-up, eagerly or by replays of a graph."""
    stream = torch.cuda.Stream()
    # The module is wrapped, warmed up and captured on one stream.
    with torch.cuda.stream(stream):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device)
        model = ReducerDDP(module, gradient_as_bucket_view=True)
        # capturable: the optimizer keeps its step count on the GPU.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
        # A graph reads and writes fixed memory, so each batch is copied into these tensors.
        inputs = torch.empty(BATCH_SIZE, 32, device=device)
        targets = torch.empty(BATCH_SIZE, 1, device=device)

        def load(number: int) -> None:
            generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
            batch = torch.randn(BATCH_SIZE, 32, generator=generator)
            inputs.copy_(batch)
            targets.copy_(batch.square().mean(dim=1, keepdim=True))

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # averages the gradients over all ranks
            optimizer.step()
            return loss.detach()

        for number in range(WARM_UP_STEPS):
            load(number)
            loss = step()

    if use_graph:
        graph = torch.cuda.CUDAGraph()
        # "thread_local" permits other threads, such as data loaders, to use CUDA meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            loss = step()  # recorded, not run

    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(WARM_UP_STEPS, WARM_UP_STEPS + steps):
            load(number)
            if use_graph:
                graph.replay()  # also writes the loss
            else:
                loss = step()
        torch.cuda.synchronize()
        step_ms = 1e3 * (time.perf_counter() - begin) / steps
    return Result(model, loss.item(), step_ms)


def compare(device: torch.device, steps: int) -> None:
    """Check that replays and eager steps end with the same bits."""
    # Without these settings, sums may have another order, and other bits, in each run.
    torch.use_deterministic_algorithms(True)
    eager = train(device, steps, use_graph=False)
    replayed = train(device, steps, use_graph=True)
    pairs = zip(eager.model.parameters(), replayed.model.parameters(), strict=True)
    expect(all(torch.equal(a, b) for a, b in pairs), "replays and eager steps differ")
    expect(eager.loss == replayed.loss, f"losses differ: {eager.loss} and {replayed.loss}")
    expect(ranks_agree(replayed.model), "ranks hold different weights")
    if dist.get_rank() == 0:
        number = dist.get_world_size()
        print(
            f"OK: {number} {'rank' if number == 1 else 'ranks'}, {steps} replays equal {steps} "
            f"eager steps bit for bit, loss {replayed.loss:.4f}, "
            f"{eager.step_ms:.2f} ms a step eagerly, {replayed.step_ms:.2f} ms replayed",
            flush=True,
        )


def prepare_rank() -> torch.device:
    """Return the GPU of this rank. Set what cuBLAS and NCCL read when they start."""
    if not torch.cuda.is_available():
        raise SystemExit("error: CUDA graphs need a CUDA GPU, and torch finds none here")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
        # NCCL permits one rank for each GPU of a host, so each rank claims to be a host.
        os.environ["NCCL_HOSTID"] = f"rank{local_rank}"
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_IB_DISABLE", "1")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="training steps in a CUDA graph")
    parser.add_argument("--steps", type=positive_int, default=20, help="steps after the warm-up")
    return parser.parse_args(argv)


def main() -> None:
    """Run one rank: that of torchrun, or the only one."""
    args = parse_args()
    device = prepare_rank()
    with tempfile.TemporaryDirectory() as folder:
        rendezvous: dict[str, Any] = {}
        if "RANK" not in os.environ:
            rendezvous = {"init_method": f"file://{folder}/store", "rank": 0, "world_size": 1}
        with process_group(device, **rendezvous):
            compare(device, args.steps)


if __name__ == "__main__":
    main()
